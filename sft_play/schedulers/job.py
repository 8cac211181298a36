"""A plain Job, for clusters without an operator: pods with an index, which find the first by a headless Service."""

from __future__ import annotations

from sft_play.schedulers.kubernetes_spec import Spec
from sft_play.schedulers.pods import RUN_LABEL, Document, labels, metadata, pod_template

CONTAINER = "train"
PERMANENT_CODES = (1, 2, 3, 4, 5)
"""Contract section 7: our own bug, configuration, hardware, data, checkpoint. Another try would end in the same way."""


def permanent(container: str) -> Document:
    """Returns the rule that ends a job whose pod ended with a permanent error."""
    return {"action": "FailJob", "onExitCodes": {"containerName": container, "operator": "In", "values": list(PERMANENT_CODES)}}


def disrupted() -> Document:
    """Returns the rule that does not count a pod which the cluster itself took away: drained, preempted, evicted."""
    return {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def documents(spec: Spec) -> list[Document]:
    """Returns the Service, where there are several pods, and the Job.

    A Job starts single pods again. Those that are left notice the lost one within 30 s, leave with 175, and are started again too, so
    that all meet anew and go on from the newest checkpoint; each of them counts as a failure.
    """
    job: Document = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(spec, queued=True),
        "spec": {
            "completionMode": "Indexed",
            "completions": spec.pods,
            "parallelism": spec.pods,
            "backoffLimit": spec.settings.max_restarts * spec.pods,
            "podReplacementPolicy": "Failed",  # never two pods of one rank
            "podFailurePolicy": {"rules": [disrupted(), permanent(CONTAINER)]},
            "ttlSecondsAfterFinished": spec.settings.finished_seconds,
            "template": pod_template(
                spec, CONTAINER, restart="Never", subdomain=spec.name if spec.pods > 1 else None, env=_master(spec)
            ),
        },
    }
    return [_service(spec), job] if spec.pods > 1 else [job]


def _master(spec: Spec) -> dict[str, str]:
    return {"MASTER_ADDR": f"{spec.name}-0.{spec.name}"} if spec.pods > 1 else {}


def _service(spec: Spec) -> Document:
    """Gives each pod a name, from before it is ready: rank 0 waits for the others, and they look for it."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(spec),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {RUN_LABEL: labels(spec)[RUN_LABEL]},
            "ports": [{"name": "master", "port": spec.settings.port}],
        },
    }
