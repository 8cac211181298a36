"""Manifests of a run as plain data, without effects: the pod that all kinds of job share, the jobs around it, and
claims.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sft_play.config.schedulers import KubernetesConfig
from sft_play.launch.environment import VARIABLE as KEY
from sft_play.schedulers.entry import LIMIT

Document = dict[str, Any]
IN_MODELS = {"HF_HOME": "/huggingface", "SFT_PLAY_CACHE": "/cache"}
"""Variables of folders on the models' claim -> folder."""
PLACES = {"models": "/models", "runs": "/runs", "tracking": "/tracking"}
"""Role of a claim -> its mount path in pods."""
SETTINGS = "/config"
"""Mount path of the configuration."""
CONFIG_FILE, DEEPSPEED_FILE = "config.json", "deepspeed.json"
USER = 1000
"""The Dockerfile's user; the claims' files belong to its group."""
GRACE_SECONDS = 180
"""Time from SIGTERM to SIGKILL: a step and a save take at most 25 s, a large model's save longer."""
ENTRY = ("python", "-m", "sft_play.schedulers.entry")
RUN_LABEL = "app.kubernetes.io/instance"
PERMANENT_CODES = (1, 2, 3, 4, 5)
"""Our own bug, configuration, hardware, data, checkpoint (contract section 7): another try would end in the same
way.
"""
TRAINER = "trainer.kubeflow.org"


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """A run's facts for manifests."""

    name: str
    """Name of the run, the job and all its objects."""
    settings: KubernetesConfig
    command: str
    """`train-distributed`, `train-deepspeed` or `train`."""
    device: Literal["cpu", "cuda"]
    processes: tuple[int, ...]
    """Number of ranks of each pod, in order; on GPUs each has one GPU."""
    selectors: tuple[Mapping[str, str], ...]
    """Node selector of each pod, in order."""
    cards: tuple[str, ...]
    """The catalogue's name of each pod's GPU, or `cpu`."""
    files: Mapping[str, str]
    """Files of `/config`: the resolved configuration with the origin of each key, and a user's DeepSpeed JSON
    verbatim.
    """
    join_seconds: int
    own_words: tuple[str, ...] = ()
    """Words typed again in the pod, since a copied configuration cannot give them (`config.load.own_words`)."""

    @property
    def pods(self) -> int:
        return len(self.processes)

    def words(self, processes: int, *, folder: str = SETTINGS) -> list[str]:
        """Return the words for the entry point of a pod with `processes` ranks and the files in `folder`."""
        words = [self.command, f"CONFIG={folder}/{CONFIG_FILE}", f"RUN_NAME={self.name}", *self.own_words]
        if DEEPSPEED_FILE in self.files:
            words.append(f"DEEPSPEED_CONFIG={folder}/{DEEPSPEED_FILE}")
        if self.command != "train":
            words.append(f"NUM_GPUS={processes}")
        if self.pods > 1:
            words += [
                f"NUM_NODES={self.pods}",
                f"MASTER_PORT={self.settings.port}",
                f"LAUNCH_JOIN_SECONDS={self.join_seconds}",
            ]
        return words


def documents(spec: Spec) -> list[Document]:
    """Return the ConfigMap and the objects of the job."""
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(spec, f"{spec.name}-config"),
        "data": dict(spec.files),
    }
    return [config, *{"pytorchjob": _pytorchjob, "trainjob": _trainjob, "job": _job}[spec.settings.kind](spec)]


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
    """Return the claims to create, which outlive the job and so do not have its labels."""
    settings = spec.settings
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": _metadata(spec, claim)
            | {"labels": {"app.kubernetes.io/name": "sft-play", "sft-play/role": ".".join(roles)}},
            "spec": {
                "accessModes": [access_mode(spec)],
                "storageClassName": settings.storage_class,
                "resources": {"requests": {"storage": settings.storage_size}},
            },
        }
        for claim, roles in (claims(spec) if settings.create_claims else {}).items()
    ]


def variables(spec: Spec) -> dict[str, str]:
    """Return the variables that do not depend on the kind of job: paths, the limit of restarts, and NCCL's."""
    settings = spec.settings
    values = {
        "RUNS_DIR": PLACES["runs"],
        **{name: PLACES["models"] + part for name, part in IN_MODELS.items()},
    }
    if settings.max_restarts:
        values[LIMIT] = str(settings.max_restarts)
    if settings.tracking_claim:
        values["AIM_REPO"] = PLACES["tracking"]
    if spec.device == "cuda" and sum(spec.processes) > 1:
        values["NCCL_DEBUG"] = "WARN"
        if settings.infiniband:
            values["NCCL_IB_DISABLE"] = "0"
        if settings.hca:
            values["NCCL_IB_HCA"] = settings.hca
    return values


def _labels(spec: Spec) -> dict[str, str]:
    return {"app.kubernetes.io/name": "sft-play", RUN_LABEL: spec.name, "app.kubernetes.io/managed-by": "sft-play"}


def _metadata(spec: Spec, name: str | None = None, *, queued: bool = False) -> Document:
    """Return the metadata of an object; `queued`: the object that Kueue suspends until there is room."""
    metadata: Document = {"name": name or spec.name}
    if spec.settings.namespace:
        metadata["namespace"] = spec.settings.namespace
    queue = {"kueue.x-k8s.io/queue-name": spec.settings.queue} if queued and spec.settings.queue else {}
    return metadata | {"labels": _labels(spec) | queue}


def _pod(
    spec: Spec, container: str, *, pod: int = 0, env: Mapping[str, str] | None = None, **of_kind: str | None
) -> Document:
    """Return the template of pod number `pod`; the kind of job sets its container's name and the fields `of_kind`."""
    settings = spec.settings
    optional = {
        **of_kind,
        "nodeSelector": dict(spec.selectors[pod]),
        "tolerations": [
            {k: int(v) if k == "tolerationSeconds" else v for k, v in toleration.items()}
            for toleration in settings.tolerations
        ],
        "imagePullSecrets": [{"name": settings.pull_secret}] if settings.pull_secret else [],
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {RUN_LABEL: spec.name}},
            }
        ]
        if spec.pods > 1
        else [],
    }
    volumes = [
        {"name": roles[0], "persistentVolumeClaim": {"claimName": claim}} for claim, roles in claims(spec).items()
    ]
    return {
        "metadata": {"labels": _labels(spec), "annotations": {"sidecar.istio.io/inject": "false"}},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,  # a Service's variables would be taken for ours
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            **{name: value for name, value in optional.items() if value},
            "containers": [_container(spec, container, spec.processes[pod], env or {})],
            "volumes": [
                {"name": "config", "configMap": {"name": f"{spec.name}-config"}},
                # Counts against the pod's memory.
                {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shm}},
                *volumes,
            ],
        },
    }


def _container(spec: Spec, name: str, processes: int, env: Mapping[str, str]) -> Document:
    settings = spec.settings
    # Requests equal limits: a pod with less than the plan assumes would be killed, or slow the others down.
    resources = {"cpu": str(settings.cpus), "memory": settings.memory}
    capabilities: Document = {"drop": ["ALL"]}
    if spec.device == "cuda":
        resources[settings.gpu_resource] = str(processes)
    if settings.infiniband:
        resources[settings.rdma_resource] = str(settings.rdma_count)
        capabilities["add"] = ["IPC_LOCK"]  # pinned memory for the adapters; PodSecurity `restricted` does not allow it
    container: Document = {
        "name": name,
        "image": settings.image,
        "command": list(ENTRY),
        "args": spec.words(processes),
        "env": _environment(spec, env),
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "securityContext": {"allowPrivilegeEscalation": False, "privileged": False, "capabilities": capabilities},
        "volumeMounts": [
            {"name": "config", "mountPath": SETTINGS, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            *(
                {"name": roles[0], "mountPath": PLACES[role]} | ({"subPath": role} if len(roles) > 1 else {})
                for roles in claims(spec).values()
                for role in roles
            ),
        ],
    }
    if spec.pods > 1:
        container["ports"] = [
            {"name": "pytorchjob-port" if name == "pytorch" else "master", "containerPort": settings.port}
        ]
    return container


def _environment(spec: Spec, of_kind: Mapping[str, str]) -> list[Document]:
    own, token = spec.settings.env, spec.settings.token_secret
    plain = {name: text for name, text in {**variables(spec), **of_kind}.items() if name not in own}
    entries: list[Document] = [{"name": name, "value": text} for name, text in {**plain, **own}.items()]
    if spec.pods > 1:
        entries.append({"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
        entries.append(
            {"name": KEY, "valueFrom": {"secretKeyRef": {"name": f"{spec.name}-key", "key": KEY, "optional": True}}}
        )
    if token:
        entries.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": token, "key": "HF_TOKEN"}}})
    return entries


def _pytorchjob(spec: Spec) -> list[Document]:
    """Return a PyTorchJob of the Training Operator (v1): a Master and Workers, or for one node a Master only.

    `ExitCode` restarts pods for exit codes from 128: a lost peer (75, which the entry point turns into 175), a stop
    that saved (143), a kill by the kernel (137). `backoffLimit` would not limit this (kubeflow/trainer#2045), since
    pods are recreated instead of restarted; the Master's entry point counts tries (`schedulers.entry`) and ends the
    job.
    """
    restart = "ExitCode" if spec.settings.max_restarts else "Never"
    replicas = {"Master": {"replicas": 1, "restartPolicy": restart, "template": _pod(spec, "pytorch")}}
    if spec.pods > 1:
        replicas["Worker"] = {
            "replicas": spec.pods - 1,
            "restartPolicy": restart,
            "template": _pod(spec, "pytorch", pod=1),
        }
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": _metadata(spec, queued=True),
            "spec": {
                **({"nprocPerNode": str(spec.processes[0])} if len(set(spec.processes)) == 1 else {}),
                "runPolicy": {"cleanPodPolicy": "Running", "ttlSecondsAfterFinished": spec.settings.finished_seconds},
                "pytorchReplicaSpecs": replicas,
            },
        }
    ]


def _permanent(container: str) -> Document:
    """Return the rule that fails a job whose pod ended with a permanent error."""
    return {
        "action": "FailJob",
        "onExitCodes": {"containerName": container, "operator": "In", "values": list(PERMANENT_CODES)},
    }


def _job(spec: Spec) -> list[Document]:
    """Return a plain indexed Job, for clusters without an operator, whose pods find the first by a headless Service.

    It restarts single pods. The remaining pods notice the lost one within 30 s, exit with 175 and are restarted too, so
    that all meet again and continue from the newest checkpoint; each of them counts as a failure. A pod that the
    cluster evicted does not.
    """
    several = spec.pods > 1
    env = {"MASTER_ADDR": f"{spec.name}-0.{spec.name}"} if several else {}
    disrupted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    service: Document = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(spec),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # the others resolve rank 0 before it is ready, since it waits for them
            "selector": {RUN_LABEL: spec.name},
            "ports": [{"name": "master", "port": spec.settings.port}],
        },
    }
    job: Document = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(spec, queued=True),
        "spec": {
            "completionMode": "Indexed",
            "completions": spec.pods,
            "parallelism": spec.pods,
            "backoffLimit": spec.settings.max_restarts * spec.pods,
            "podReplacementPolicy": "Failed",  # never two pods of one rank
            "podFailurePolicy": {"rules": [disrupted, _permanent("train")]},
            "ttlSecondsAfterFinished": spec.settings.finished_seconds,
            "template": _pod(spec, "train", env=env, restartPolicy="Never", subdomain=spec.name if several else None),
        },
    }
    return [service, job] if several else [job]


def _trainjob(spec: Spec) -> list[Document]:
    """Return a TrainJob of Trainer v2 with its own TrainingRuntime, since the field that patches a shared one was
    renamed twice (2.1, 2.2).

    The JobSet restarts all pods together, unless one ended with a permanent error. There is no
    `ttlSecondsAfterFinished`: the operator would recreate the removed JobSet (kubeflow/trainer#3779). The torch plugin
    looks for a job and container named `node`.
    """
    node: Document = {
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": [_permanent("node")]},
        "template": _pod(spec, "node", restartPolicy="Never"),
    }
    jobs: Document = {
        "failurePolicy": {
            "maxRestarts": spec.settings.max_restarts,
            "rules": [
                {
                    "name": "permanent",
                    "action": "FailJobSet",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                    "targetReplicatedJobs": ["node"],
                }
            ],
        },
        "replicatedJobs": [
            {
                "name": "node",
                "template": {"metadata": {"labels": {f"{TRAINER}/trainjob-ancestor-step": "trainer"}}, "spec": node},
            }
        ],
    }
    metadata = _metadata(spec)
    metadata["labels"] |= {f"{TRAINER}/framework": "torch"}
    runtime: Document = {
        "apiVersion": f"{TRAINER}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": metadata,
        "spec": {"mlPolicy": {"numNodes": spec.pods, "torch": {}}, "template": {"spec": jobs}},
    }
    return [
        runtime,
        {
            "apiVersion": f"{TRAINER}/v1alpha1",
            "kind": "TrainJob",
            "metadata": _metadata(spec, queued=True),
            "spec": {
                "runtimeRef": {"apiGroup": TRAINER, "kind": "TrainingRuntime", "name": spec.name},
                "trainer": {"numNodes": spec.pods, "numProcPerNode": spec.processes[0]},
            },
        },
    ]
