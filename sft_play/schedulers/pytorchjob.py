"""A PyTorchJob of the Training Operator (v1): a Master and Workers; one node is a Master alone."""

from __future__ import annotations

from sft_play.schedulers.kubernetes_spec import Spec
from sft_play.schedulers.pods import Document, metadata, pod_template

CONTAINER = "pytorch"
"""The operator looks for the container of this name."""


def documents(spec: Spec) -> list[Document]:
    """Returns the job.

    `ExitCode` starts pods again from exit code 128 on: a lost peer (75, which the entry point makes 175), a stop that saved (143), a
    kill by the kernel (137). Configuration, hardware, data and checkpoint errors (1 to 5) stay. `backoffLimit` would be no limit
    (kubeflow/trainer#2045): pods are made anew, and none has restarted. The Master's entry point counts (`launch.tries`), and ends the job.
    """
    replicas: Document = {"Master": _replica(spec, pod=0, count=1)}
    if spec.pods > 1:
        replicas["Worker"] = _replica(spec, pod=1, count=spec.pods - 1)
    job: Document = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata(spec, queued=True),
        "spec": {
            "runPolicy": {
                "cleanPodPolicy": "Running",
                "ttlSecondsAfterFinished": spec.settings.finished_seconds,
            },
            "pytorchReplicaSpecs": replicas,
        },
    }
    if len(set(spec.processes)) == 1:
        job["spec"] = {"nprocPerNode": str(spec.processes[0]), **job["spec"]}
    return [job]


def _replica(spec: Spec, *, pod: int, count: int) -> Document:
    return {
        "replicas": count,
        "restartPolicy": "ExitCode" if spec.settings.max_restarts else "Never",
        "template": pod_template(spec, CONTAINER, pod=pod),
    }
