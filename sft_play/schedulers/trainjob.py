"""A TrainJob of Trainer v2 with a TrainingRuntime of its own.

A TrainJob can say little of its pods, and the field that patches a shared runtime was renamed twice (2.1, 2.2): a runtime of the
run's own holds the whole pod template and the restart rules of its JobSet, and works with all of them.
"""

from __future__ import annotations

from sft_play.schedulers.job import permanent
from sft_play.schedulers.kubernetes_spec import Spec
from sft_play.schedulers.pods import Document, metadata, pod_template

NODE = "node"
"""The torch plugin looks for the replicated job and the container of this name."""
GROUP = "trainer.kubeflow.org"


def documents(spec: Spec) -> list[Document]:
    """Returns runtime and job. The JobSet starts all pods again together, unless one ended with a permanent error (1 to 5).

    No `ttlSecondsAfterFinished`: the JobSet would go, and the operator make it again (kubeflow/trainer#3779).
    """
    return [_runtime(spec), _job(spec)]


def _runtime(spec: Spec) -> Document:
    node: Document = {
        "name": NODE,
        "template": {
            "metadata": {"labels": {f"{GROUP}/trainjob-ancestor-step": "trainer"}},
            "spec": {
                "backoffLimit": 0,
                "podReplacementPolicy": "Failed",
                "podFailurePolicy": {"rules": [permanent(NODE)]},
                "template": pod_template(spec, NODE, restart="Never"),
            },
        },
    }
    failure: Document = {
        "maxRestarts": spec.settings.max_restarts,
        "rules": [{
            "name": "permanent", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"],
            "targetReplicatedJobs": [NODE],
        }],
    }  # fmt: skip
    return {
        "apiVersion": f"{GROUP}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _labelled(metadata(spec)),
        "spec": {
            "mlPolicy": {"numNodes": spec.pods, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": failure,
                    "replicatedJobs": [node],
                }
            },
        },
    }


def _labelled(found: Document) -> Document:
    """The operator's own runtimes say their framework in a label."""
    return found | {"labels": found["labels"] | {f"{GROUP}/framework": "torch"}}


def _job(spec: Spec) -> Document:
    return {
        "apiVersion": f"{GROUP}/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata(spec, queued=True),
        "spec": {
            "runtimeRef": {"apiGroup": GROUP, "kind": "TrainingRuntime", "name": spec.name},
            "trainer": {"numNodes": spec.pods, "numProcPerNode": spec.processes[0]},
        },
    }
