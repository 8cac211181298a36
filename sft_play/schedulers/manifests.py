"""Manifests of a run as plain data, without effects: templates of `kubernetes_templates/`, filled with its facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from sft_play.config.schedulers import KubernetesConfig, pod_memory
from sft_play.config.yaml_files import fill, read_plain_yaml

Document = dict[str, Any]
TEMPLATES = Path(__file__).with_name("kubernetes_templates")
PLACES = {"models": "/models", "runs": "/runs", "tracking": "/tracking"}
"""Role of a claim -> its mount path in pods."""
SETTINGS = "/config"
"""Mount path of the configuration."""
CONFIG_FILE, DEEPSPEED_FILE = "config.json", "deepspeed.json"
OBJECTS = {"pytorchjob": ("pytorchjob",), "trainjob": ("runtime", "trainjob"), "job": ("service", "job")}
"""Kind of job -> the templates of its objects."""
CONTAINERS = {"pytorchjob": "pytorch", "trainjob": "node", "job": "train"}
"""Kind of job -> the name that it expects of a container."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """A run's facts for manifests."""

    name: str
    """Name of the run, the job and all its objects."""
    settings: KubernetesConfig
    command: str
    """`train-distributed`, `train-deepspeed` or `train`."""
    device: Literal["cpu", "cuda"]
    pods: int
    processes: int
    """Number of ranks of each pod; on GPUs each has one GPU."""
    card: str
    """The catalogue's name of the pods' GPU, or `cpu`."""
    files: Mapping[str, str]
    """Files of `/config`: the resolved configuration with the origin of each key, and a user's DeepSpeed JSON
    verbatim.
    """
    join_seconds: int
    own_words: tuple[str, ...] = ()
    """Words typed again in the pod, since a copied configuration cannot give them (`config.load.own_words`)."""

    @property
    def size(self) -> dict[str, str]:
        """The cores and the memory of a pod."""
        cpus = self.settings.cpus
        return {
            "cpus": str(8 * self.processes if cpus == "auto" else cpus),
            "memory": pod_memory(self.settings, self.processes),
        }

    @property
    def words(self) -> list[str]:
        """The words for the entry point of a pod."""
        words = [self.command, f"CONFIG={SETTINGS}/{CONFIG_FILE}", f"RUN_NAME={self.name}", *self.own_words]
        if DEEPSPEED_FILE in self.files:
            words.append(f"DEEPSPEED_CONFIG={SETTINGS}/{DEEPSPEED_FILE}")
        if self.command != "train":
            words.append(f"NUM_GPUS={self.processes}")
        if self.pods > 1:
            words += [
                f"NUM_NODES={self.pods}",
                f"MASTER_PORT={self.settings.port}",
                f"LAUNCH_JOIN_SECONDS={self.join_seconds}",
            ]
        return words


def documents(spec: Spec) -> list[Document]:
    """Return the ConfigMap and the objects of the job."""
    facts = _facts(spec)
    facts["pod"] = _pod(spec, facts)
    return [
        document
        for template in ("config", *OBJECTS[spec.settings.kind])
        if (document := fill(_read(template), facts)) is not None
    ]


def claims(spec: Spec) -> dict[str, list[str]]:
    """Return claim -> its roles."""
    roles: dict[str, list[str]] = {}
    for role in PLACES:
        if claim := getattr(spec.settings, f"{role}_claim"):
            roles.setdefault(claim, []).append(role)
    return roles


def access_mode(spec: Spec) -> str:
    """Return the access mode of rendered claims; `auto` is `ReadWriteMany` for several pods."""
    mode = spec.settings.access_mode
    return mode if mode != "auto" else "ReadWriteMany" if spec.pods > 1 else "ReadWriteOnce"


def claim_documents(spec: Spec) -> list[Document]:
    """Return the claims to create."""
    rows = claims(spec).items() if spec.settings.create_claims else ()
    facts = _facts(spec) | {"access_mode": access_mode(spec)}
    return [fill(_read("claim"), facts | {"claim": claim, "role": ".".join(roles)}) for claim, roles in rows]


# ---- The templates


def _read(template: str) -> Any:
    return read_plain_yaml(TEMPLATES / f"{template}.yaml")


def _pod(spec: Spec, facts: dict[str, Any]) -> Document:
    """Return the template of the pods."""
    own = {"words": spec.words, **spec.size, "gpus": str(spec.processes) if spec.device == "cuda" else None}
    pod: Document = fill(_read("pod"), facts | own)
    own_names, [container] = spec.settings.env, pod["spec"]["containers"]
    ours = [variable for variable in container["env"] if variable["name"] not in own_names]
    container["env"] = [*ours, *({"name": name, "value": text} for name, text in own_names.items())]
    return pod


def _facts(spec: Spec) -> dict[str, Any]:
    """Return the facts that templates name: the keys of `kubernetes:`, and others of the run; `None` omits an entry."""
    settings, several, mounted = spec.settings, spec.pods > 1, claims(spec)
    nccl = spec.device == "cuda" and spec.pods * spec.processes > 1
    facts: dict[str, Any] = {
        "name": spec.name,
        "pods": spec.pods,
        "others": spec.pods - 1,
        "several": several,
        "processes": spec.processes,
        "processes_as_text": str(spec.processes),
        "files": dict(spec.files),
        "container": CONTAINERS[settings.kind],
        "port_name": "pytorchjob-port" if settings.kind == "pytorchjob" else "master",
        "restart_policy": None if settings.kind == "pytorchjob" else "Never",
        "restart_by_code": "ExitCode" if settings.max_restarts else "Never",
        "limit": str(settings.max_restarts) if settings.max_restarts else None,
        "restarts_of_all": settings.max_restarts * spec.pods,
        "subdomain": spec.name if several and settings.kind == "job" else None,
        "nccl": nccl,
        "nccl_over_infiniband": nccl and settings.infiniband,
        "hca": settings.hca if nccl else None,
        "capabilities": ["IPC_LOCK"] if settings.infiniband else [],
        "rdma_count": str(settings.rdma_count) if settings.infiniband else None,
        "tolerations": [
            {k: int(v) if k == "tolerationSeconds" else v for k, v in toleration.items()}
            for toleration in settings.tolerations
        ],
        "volumes": [
            {"name": roles[0], "persistentVolumeClaim": {"claimName": claim}} for claim, roles in mounted.items()
        ],
        "mounts": [
            {"name": roles[0], "mountPath": PLACES[role]} | ({"subPath": role} if len(roles) > 1 else {})
            for roles in mounted.values()
            for role in roles
        ],
    }
    return asdict(settings) | facts
