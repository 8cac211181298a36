"""The pod that all kinds of job share: the container with its entry point, volumes by role, resources, and what it may not do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sft_play.launch.key import VARIABLE as KEY
from sft_play.launch.tries import LIMIT
from sft_play.schedulers.kubernetes_spec import MODELS, RUNS, SETTINGS, TRACKING, Spec

Document = dict[str, Any]

USER = 1000
"""As the Dockerfile makes it; the claims' files belong to its group."""
GRACE_SECONDS = 180
"""From SIGTERM to SIGKILL: a step and a save take at most 25 s, a large model's save more."""
ENTRY = ("python", "-m", "sft_play.schedulers.entry")
RUN_LABEL = "app.kubernetes.io/instance"


def labels(spec: Spec) -> dict[str, str]:
    """Labels of everything that belongs to the run."""
    return {"app.kubernetes.io/name": "sft-play", RUN_LABEL: spec.name, "app.kubernetes.io/managed-by": "sft-play"}


def metadata(spec: Spec, name: str | None = None, *, queued: bool = False) -> Document:
    """Metadata of one object; `queued`: the one that Kueue holds back until there is room."""
    found: Document = {"name": name or spec.name}
    if spec.settings.namespace:
        found["namespace"] = spec.settings.namespace
    queue = {"kueue.x-k8s.io/queue-name": spec.settings.queue} if queued and spec.settings.queue else {}
    return found | {"labels": labels(spec) | queue}


def pod_template(
    spec: Spec, container: str, *, pod: int = 0, restart: str | None = None, subdomain: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Document:  # fmt: skip
    """Returns the template of pod number `pod`, whose container is called as the kind of job wants it.

    `restart` is the pod's restart policy, `None` where the operator decides; `env` are variables of the kind.
    """
    found: Document = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # a Service's variables would look like ours
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER, "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }  # fmt: skip
    if restart:
        found["restartPolicy"] = restart
    if subdomain:
        found["subdomain"] = subdomain
    if spec.selectors[pod]:
        found["nodeSelector"] = dict(spec.selectors[pod])
    if spec.settings.tolerations:
        found["tolerations"] = [toleration(given) for given in spec.settings.tolerations]
    if spec.settings.pull_secret:
        found["imagePullSecrets"] = [{"name": spec.settings.pull_secret}]
    if spec.pods > 1:
        found["topologySpreadConstraints"] = [{
            "maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {RUN_LABEL: spec.name}},
        }]  # fmt: skip
    found["containers"] = [_container(spec, container, pod, env or {})]
    found["volumes"] = _volumes(spec)
    return {
        "metadata": {"labels": labels(spec), "annotations": {"sidecar.istio.io/inject": "false"}},
        "spec": found,
    }


def toleration(given: Mapping[str, str]) -> Document:
    """Returns a toleration as the API has it: seconds are a number there."""
    return {key: int(text) if key == "tolerationSeconds" else text for key, text in given.items()}


def _container(spec: Spec, name: str, pod: int, env: Mapping[str, str]) -> Document:
    found: Document = {
        "name": name,
        "image": spec.settings.image,
        "command": list(ENTRY),
        "args": spec.words(spec.processes[pod]),
        "env": _environment(spec, env),
        "resources": _resources(spec, spec.processes[pod]),
        "securityContext": _security(spec),
        "volumeMounts": _mounts(spec),
    }
    if spec.pods > 1:
        port = {"name": "pytorchjob-port" if name == "pytorch" else "master", "containerPort": spec.settings.port}
        found["ports"] = [port]
    return found


def _security(spec: Spec) -> Document:
    capabilities: Document = {"drop": ["ALL"]}
    if spec.settings.infiniband:
        capabilities["add"] = ["IPC_LOCK"]  # pinned memory for the adapters; PodSecurity `restricted` does not allow it
    return {"allowPrivilegeEscalation": False, "privileged": False, "capabilities": capabilities}


def _resources(spec: Spec, processes: int) -> Document:
    """Requests equal limits: a pod that gets less than it was planned with would be killed, or slow the others."""
    settings = spec.settings
    found: Document = {"cpu": str(settings.cpus), "memory": settings.memory}
    if spec.device == "cuda":
        found[settings.gpu_resource] = str(processes)
    if settings.infiniband:
        found[settings.rdma_resource] = str(settings.rdma_count)
    return {"requests": dict(found), "limits": dict(found)}


def _environment(spec: Spec, of_kind: Mapping[str, str]) -> list[Document]:
    settings = spec.settings
    plain = {**variables(spec), **of_kind}
    found: list[Document] = [{"name": name, "value": text} for name, text in plain.items() if name not in settings.env]
    found += [{"name": name, "value": text} for name, text in settings.env.items()]
    if spec.pods > 1:
        found.append({"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
        found.append({"name": KEY, "valueFrom": {"secretKeyRef": {"name": f"{spec.name}-key", "key": KEY, "optional": True}}})
    if settings.token_secret:
        reference = {"name": settings.token_secret, "key": "HF_TOKEN"}
        found.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}})
    return found


def variables(spec: Spec) -> dict[str, str]:
    """Returns the variables that do not depend on the kind of job: where things are, how often it is tried again, and NCCL's."""
    found = {"RUNS_DIR": RUNS, "HF_HOME": f"{MODELS}/huggingface", "SFT_PLAY_CACHE": f"{MODELS}/cache"}
    if spec.settings.max_restarts:
        found[LIMIT] = str(spec.settings.max_restarts)
    if spec.settings.tracking_claim:
        found["AIM_REPO"] = TRACKING
    if spec.device == "cuda" and sum(spec.processes) > 1:
        found["NCCL_DEBUG"] = "WARN"
        if spec.pods > 1 and not spec.settings.infiniband:
            found["NCCL_IB_DISABLE"] = "1"
        elif spec.settings.infiniband:
            found["NCCL_IB_DISABLE"] = "0"
            if spec.settings.hca:
                found["NCCL_IB_HCA"] = spec.settings.hca
    return found


def claims(spec: Spec) -> dict[str, list[str]]:
    """Returns claim -> roles that it serves: `models`, `runs`, `tracking`; one claim may serve several."""
    settings = spec.settings
    found: dict[str, list[str]] = {}
    for role, claim in (("models", settings.models_claim), ("runs", settings.runs_claim), ("tracking", settings.tracking_claim)):
        if claim:
            found.setdefault(claim, []).append(role)
    return found


def _mounts(spec: Spec) -> list[Document]:
    where = {"models": MODELS, "runs": RUNS, "tracking": TRACKING}
    found: list[Document] = [
        {"name": "config", "mountPath": SETTINGS, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    for roles in claims(spec).values():
        for role in roles:
            part = {"subPath": role} if len(roles) > 1 else {}
            found.append({"name": roles[0], "mountPath": where[role], **part})
    return found


def _volumes(spec: Spec) -> list[Document]:
    """Volumes are named by the first role of their claim; `/dev/shm` is memory, and counts against the pod's."""
    found: list[Document] = [
        {"name": "config", "configMap": {"name": config_name(spec)}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": spec.settings.shm}},
    ]
    return found + [
        {"name": roles[0], "persistentVolumeClaim": {"claimName": claim}} for claim, roles in claims(spec).items()
    ]  # fmt: skip


def config_name(spec: Spec) -> str:
    """Returns the name of the run's ConfigMap."""
    return f"{spec.name}-config"


def config_map(spec: Spec) -> Document:
    """Returns the ConfigMap with the resolved configuration, and a user's DeepSpeed JSON."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(spec, config_name(spec)), "data": spec.files()}


def access_mode(spec: Spec) -> str:
    """Returns the mode of claims that are rendered: by `auto` for many nodes at once where there are several pods."""
    wanted = spec.settings.access_mode
    return wanted if wanted != "auto" else "ReadWriteMany" if spec.pods > 1 else "ReadWriteOnce"


def claim_documents(spec: Spec) -> list[Document]:
    """Returns the claims, where they are to be made: one for each role."""
    settings = spec.settings
    if not settings.create_claims:
        return []
    mode = access_mode(spec)
    return [
        {
            "apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": {key: value for key, value in metadata(spec, claim).items() if key != "labels"}
            | {"labels": {"app.kubernetes.io/name": "sft-play", "sft-play/role": ".".join(roles)}},
            "spec": {
                "accessModes": [mode], "storageClassName": settings.storage_class,
                "resources": {"requests": {"storage": settings.storage_size}},
            },
        }
        for claim, roles in claims(spec).items()
    ]  # fmt: skip
