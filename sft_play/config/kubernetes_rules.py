"""Rules of the section `kubernetes`: names as the API server takes them, sizes, what goes together, no secret values. No effects."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from sft_play.config.names import SECRET_VARIABLE
from sft_play.config.rule import Origins, problem
from sft_play.config.schema import Config
from sft_play.config.types import shown
from sft_play.config.yaml_source import Node
from sft_play.errors import UserError

LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
"""RFC 1035: what a Service, a namespace and an operator's job may be called."""
SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
"""RFC 1123: claims, Secrets, storage classes."""
QUALIFIED = re.compile(
    r"((?=[^/]{1,253}/)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?",
    re.ASCII,
)
"""Keys of labels, and names of resources."""
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?", re.ASCII)
QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?")
UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50,
         "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}  # fmt: skip
LEAST = {"memory": 2**30, "shm": 2**20, "storage_size": 2**20}
"""Bytes; less is a slip of the unit: a Python with torch alone has more."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
IMAGE = re.compile(r"[a-z0-9][\w./:@-]*", re.ASCII)
ADAPTERS = re.compile(r"[=^]{0,2}[\w.:,-]+", re.ASCII)
OURS = re.compile(
    r"PET_\w+|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|NODE_RANK|MASTER_(ADDR|PORT|KEY)|JOB_COMPLETION_INDEX|SKYPILOT_\w+|SLURM_\w+|POD_IP|RUNS_DIR"
    r"|SFT_PLAY_MAX_RESTARTS"
)
"""Variables that the manifests or an operator set."""
TOLERATION_KEYS = frozenset({"key", "operator", "value", "effect", "tolerationSeconds"})
TOLERATION = "such as `{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}`"


def quantity(text: str) -> int | None:
    """Returns the bytes (or units) that a quantity of Kubernetes such as `16Gi` means, `None` for text that is none."""
    match = QUANTITY.fullmatch(text)
    return int(float(match.group(1)) * UNITS[match.group(2) or ""]) if match else None


def _problem(origins: Origins, key: str, text: str, hint: str | None = None) -> UserError:
    return problem(origins, f"kubernetes.{key}", text, hint)


def _wrong(origins: Origins, key: str, text: str, expected: str, hint: str | None = None) -> UserError:
    return _problem(origins, key, f"`kubernetes.{key}` is `{shown(Node(text))}`; expected {expected}", hint)


def names(config: Config, origins: Origins) -> Iterator[UserError]:
    """Names that the API server would refuse, or that an operator's web hook would, later."""
    kubernetes = config.kubernetes
    if kubernetes.namespace is not None and not LABEL.fullmatch(kubernetes.namespace):
        yield _wrong(origins, "namespace", kubernetes.namespace, "small letters, digits and `-`, at most 63, the first a letter")
    for key in ("models_claim", "runs_claim", "tracking_claim", "token_secret", "pull_secret", "storage_class"):
        name = getattr(kubernetes, key)
        if name is not None and not SUBDOMAIN.fullmatch(name) and not (key == "storage_class" and not name.strip()):
            hint = "the token itself stands in the Secret: kubectl create secret generic NAME --from-literal=HF_TOKEN=..."
            yield _wrong(
                origins, key, name, "small letters, digits, `-` and `.`, at most 253", hint if key == "token_secret" else None
            )
    for key in ("gpu_resource", "rdma_resource"):
        name = getattr(kubernetes, key)
        if not QUALIFIED.fullmatch(name) or "/" not in name:
            yield _wrong(origins, key, name, "a resource's name such as `nvidia.com/gpu`")
    if kubernetes.queue is not None and (not LABEL_VALUE.fullmatch(kubernetes.queue) or not kubernetes.queue):
        yield _wrong(origins, "queue", kubernetes.queue, "the name of a Kueue LocalQueue")
    if not IMAGE.fullmatch(kubernetes.image):
        yield _wrong(origins, "image", kubernetes.image, "an image such as `registry.example/sft-play:1.0`")
    if kubernetes.hca is not None and not ADAPTERS.fullmatch(kubernetes.hca):
        yield _wrong(origins, "hca", kubernetes.hca, "adapters as NCCL takes them: `mlx5`, `=mlx5_0:1,mlx5_1:1`, `^mlx5_3`")


def sizes(config: Config, origins: Origins) -> Iterator[UserError]:
    """Quantities, and `/dev/shm` inside the memory that it counts against."""
    kubernetes = config.kubernetes
    found = {key: quantity(getattr(kubernetes, key)) for key in ("memory", "shm", "storage_size")}
    for key, size in found.items():
        text = getattr(kubernetes, key)
        if not size:
            yield _wrong(origins, key, text, "a quantity such as `64Gi`")
        elif size < LEAST[key]:
            number = text.rstrip("KMGTPki")
            hint = f"did you mean `{number}Gi`?" if 1 <= float(number) < 1000 else "such as `64Gi`"
            yield _wrong(origins, key, text, f"`{'1Gi' if key == 'memory' else '1Mi'}` or more; a number alone is in bytes", hint)
    memory, shared = found["memory"], found["shm"]
    if memory and shared and shared >= memory >= LEAST["memory"]:
        yield _problem(
            origins, "shm", f"`kubernetes.shm` is {kubernetes.shm}, which leaves nothing of `kubernetes.memory` ({kubernetes.memory})",
            "`/dev/shm` counts against the pod's memory: make it smaller, or the memory larger",
        )  # fmt: skip


def together(config: Config, origins: Origins) -> Iterator[UserError]:
    """Keys that need each other, so that nothing that was typed is without effect."""
    kubernetes = config.kubernetes
    if kubernetes.create_claims and not (kubernetes.storage_class or "").strip():
        empty = origins.get("kubernetes.storage_class", "default") != "default"
        yield _problem(
            origins, "storage_class" if empty else "create_claims",
            "`kubernetes.create_claims` is `true`, and `kubernetes.storage_class` is " + ("empty" if empty else "not given"),
            "`kubectl get storageclass` lists them; several pods need one that gives ReadWriteMany",
        )  # fmt: skip
    elif kubernetes.storage_class is not None and not kubernetes.create_claims:
        yield _without_effect(origins, "storage_class", "kubernetes.create_claims: true", kubernetes.storage_class)
    if kubernetes.access_mode != "auto" and not kubernetes.create_claims:
        yield _without_effect(origins, "access_mode", "kubernetes.create_claims: true", kubernetes.access_mode)
    if not kubernetes.infiniband and kubernetes.hca is not None:
        yield _without_effect(origins, "hca", "kubernetes.infiniband: true", kubernetes.hca)
    if not kubernetes.infiniband and kubernetes.rdma_count != 1:
        yield _without_effect(origins, "rdma_count", "kubernetes.infiniband: true", str(kubernetes.rdma_count))
    for key in ("models_claim", "runs_claim"):
        if kubernetes.kind != "skypilot" and getattr(kubernetes, key) is None:
            yield _problem(
                origins, key, f"`kubernetes.{key}` is null, and pods keep nothing without a claim",
                f"name a claim; `kubernetes.create_claims: true` renders it: kubernetes.{key}: {key.removesuffix('_claim')}",
            )  # fmt: skip


def _without_effect(origins: Origins, key: str, needed: str, text: str) -> UserError:
    return _problem(
        origins, key, f"`kubernetes.{key}` is `{shown(Node(text))}`, which needs `{needed}`", f"set `{needed}`, or leave it out"
    )


def labels(config: Config, origins: Origins) -> Iterator[UserError]:
    """Selectors of nodes."""
    kubernetes = config.kubernetes
    selectors = {"node_selector": [kubernetes.node_selector], "replica_selectors": kubernetes.replica_selectors}
    for key, found in selectors.items():
        for name, text in (pair for selector in found for pair in selector.items()):
            if not QUALIFIED.fullmatch(name) or not LABEL_VALUE.fullmatch(text):
                yield _wrong(
                    origins, key, f"{name}={text}", "a label and its value, such as `nvidia.com/gpu.product: NVIDIA-L40S`"
                )


def tolerations(config: Config, origins: Origins) -> Iterator[UserError]:
    """Tolerations, as `validation.go` of Kubernetes takes them."""
    for given in config.kubernetes.tolerations:
        if problem := _toleration_problem(given):
            yield _problem(origins, "tolerations", f"`kubernetes.tolerations` holds `{_in_a_line(given)}`: {problem}", TOLERATION)


def _in_a_line(given: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{key}: {text}" for key, text in given.items()) + "}"


def _toleration_problem(given: Mapping[str, str]) -> str | None:
    if unknown := sorted(set(given) - TOLERATION_KEYS):
        return f"there is no `{unknown[0]}`, only {', '.join(sorted(TOLERATION_KEYS))}"
    operator, seconds = given.get("operator", "Equal"), given.get("tolerationSeconds")
    if operator not in ("Equal", "Exists"):
        return "`operator` is Equal or Exists"
    if given.get("effect", "NoExecute") not in ("NoSchedule", "PreferNoSchedule", "NoExecute"):
        return "`effect` is NoSchedule, PreferNoSchedule or NoExecute"
    if not given.get("key") and operator != "Exists":
        return "without `key` the operator is Exists"
    if given.get("key") and not QUALIFIED.fullmatch(given["key"]):
        return "`key` is no name of a taint"
    if operator == "Exists" and given.get("value"):
        return "with Exists there is no `value`"
    if not LABEL_VALUE.fullmatch(given.get("value", "")):
        return "`value` is none that a taint may have"
    if seconds is not None and (not re.fullmatch(r"[0-9]{1,9}", seconds) or given.get("effect") != "NoExecute"):
        return "`tolerationSeconds` is an integer, and goes with `effect: NoExecute`"
    return None


def environment(config: Config, origins: Origins) -> Iterator[UserError]:
    """Variables of the pods: no secret's value, none that decides a pod's place."""
    for name, text in config.kubernetes.env.items():
        if not VARIABLE.fullmatch(name):
            yield _wrong(origins, "env", name, "names of environment variables")
        elif SECRET_VARIABLE.search(name):
            yield _problem(
                origins, "env", f"`kubernetes.env` holds `{name}`, a secret by its name, which would stand in the manifest",
                "put the hub's token into a Secret and name that: `kubernetes.token_secret`",
            )  # fmt: skip
        elif OURS.fullmatch(name):
            yield _problem(origins, "env", f"`kubernetes.env` holds `{name}`, which the manifests or the operator set")
        elif "\0" in text:
            yield _problem(origins, "env", f"`{name}` in `kubernetes.env` holds a null character")


RULES = (names, sizes, together, labels, tolerations, environment)
