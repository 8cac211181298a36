"""The sections `slurm` and `kubernetes`: their keys, and rules about names, sizes and what their files can hold."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from sft_play.config.reader import Conflict, FromZero, Positive, Range, quoted
from sft_play.errors import HUB_LOGIN, SECRET_VARIABLE, without_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmConfig:
    """What `make slurm` asks the scheduler for. Nodes and GPUs come from the plan."""

    partition: str | None = None
    """Default: the cluster's."""
    account: str | None = None
    """Account to charge."""
    qos: str | None = None
    """Quality of service."""
    time: str = "24:00:00"
    """Time limit (`days-hours:minutes:seconds`)."""
    gpu_type: str | None = None
    """GPU type (`--gpus-per-node=TYPE:COUNT`)."""
    cpus_per_gpu: Positive = 8
    """Cores per GPU; without GPUs per process."""
    memory: str | None = None
    """Memory per node (`200G`); default: the partition's."""
    constraint: str | None = None
    """Feature the nodes must have."""
    warning_seconds: Annotated[int, Range(minimum=30, maximum=65_535)] = 120
    """Save and stop this long before the limit."""
    max_requeues: FromZero = 20
    """Most requeues."""
    array: str | None = None
    """Job array (`0-3`, `1-10%1`): each task is a run `RUN_NAME-INDEX`."""
    setup: list[str] = field(default_factory=list)
    """Shell lines before the launch (`module load cuda`)."""
    options: list[str] = field(default_factory=list)
    """Further sbatch options (`--exclusive`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesConfig:
    """What `make kubernetes` renders. Pods and GPUs come from the plan."""

    kind: Literal["pytorchjob", "trainjob", "job", "skypilot"] = "pytorchjob"
    """What is [written](kubernetes.md)."""
    image: str = "sft-play:latest"
    """Made by the `Dockerfile`; SkyPilot installs this folder unless it is typed."""
    namespace: str | None = None
    """Default: the current context's."""
    models_claim: str | None = "models"
    """PersistentVolumeClaim for models and prepared data; SkyPilot: a volume, if typed."""
    runs_claim: str | None = "runs"
    """The same for run folders."""
    tracking_claim: str | None = None
    """The same for a tracker, at `/tracking`."""
    create_claims: bool = False
    """Render the claims; needs `kubernetes.storage_class`."""
    storage_class: str | None = None
    """Storage class of rendered claims."""
    access_mode: Literal["auto", "ReadWriteMany", "ReadWriteOnce"] = "auto"
    """Of rendered claims; `auto`: `ReadWriteMany` for several pods."""
    storage_size: str = "200Gi"
    """Size of each rendered claim."""
    token_secret: str | None = None
    """Secret with the hub's token as key `HF_TOKEN`."""
    pull_secret: str | None = None
    """Secret for pulling the image."""
    gpu_resource: str = "nvidia.com/gpu"
    """Resource name of GPUs."""
    cpus: Positive = 8
    """Cores per pod."""
    memory: str = "64Gi"
    """Memory per pod, with `/dev/shm`."""
    shm: str = "16Gi"
    """Size of `/dev/shm`."""
    port: Annotated[int, Range(minimum=1024, maximum=65535)] = 29500
    """Port where ranks meet."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    """Labels the nodes must have."""
    replica_selectors: list[Mapping[str, str]] = field(default_factory=list)
    """The same for each pod, by rank."""
    tolerations: list[Mapping[str, str]] = field(default_factory=list)
    """`[{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]`."""
    infiniband: bool = False
    """Request InfiniBand devices and unlimited locked memory."""
    rdma_resource: str = "rdma/ib"
    """Their resource name."""
    rdma_count: Positive = 1
    """Their number per pod."""
    hca: str | None = None
    """`NCCL_IB_HCA`, such as `mlx5`."""
    max_restarts: FromZero = 10
    """Restarts in a row without a newer checkpoint."""
    finished_seconds: FromZero = 604800
    """Seconds until a finished PyTorchJob or Job is removed."""
    queue: str | None = None
    """Kueue queue."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables; no secrets."""


# Rules of `slurm`.


NAME = re.compile(r"[\w.,@:+/-]+")
"""A name of the cluster's (partition, account, ...), or several between commas."""
CONSTRAINT = re.compile(r"[\w.,@:+/&|*()\[\]-]+")
MEMORY = re.compile(r"[0-9]+[KMGT]?")
TIME = re.compile(r"(?:(\d+)-(\d+)(?::(\d+)(?::(\d+))?)?|(\d+)(?::(\d+)(?::(\d+))?)?)", re.ASCII)
"""`days-hours[:minutes[:seconds]]`, `minutes[:seconds]` or `hours:minutes:seconds`: what sbatch takes."""
ARRAY = re.compile(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%[1-9]\d*)?", re.ASCII)
RANGE = re.compile(r"(\d+)-(\d+)(?::(\d+))?", re.ASCII)
OPTION = re.compile(r"--([a-z][a-z0-9-]*)(=[^\"\\]+)?")
OF_KEYS: Mapping[str, str] = {
    "partition": "slurm.partition", "account": "slurm.account", "qos": "slurm.qos", "time": "slurm.time", "mem": "slurm.memory",
    "constraint": "slurm.constraint", "array": "slurm.array", "signal": "slurm.warning_seconds", "cpus-per-task": "slurm.cpus_per_gpu",
    "nodes": "NUM_NODES", "gpus-per-node": "NUM_GPUS", "job-name": "RUN_NAME", "output": "OUT",
}  # fmt: skip
"""Options of sbatch -> the key or variable that sets them here."""
OUR_OPTIONS = frozenset({
    "ntasks", "ntasks-per-node", "ntasks-per-gpu", "gpus", "gpus-per-task", "gpus-per-socket", "gres", "cpus-per-gpu", "requeue", "no-requeue",
    "open-mode", "export", "export-file", "get-user-env", "error", "input", "chdir", "wrap", "parsable", "test-only", "wait", "overcommit",
    "no-kill", "kill-on-invalid-dep", "hold", "help", "usage", "version", "ignore-pbs", "clusters", "quiet", "verbose",
})  # fmt: skip
"""Options that the script decides, or that are for whoever types `sbatch`."""
TYPED_THERE = frozenset({"hold", "wait", "clusters", "test-only", "parsable", "quiet", "verbose", "kill-on-invalid-dep"})


def seconds_of(time: str) -> int | None:
    """Returns the seconds of a time as sbatch reads it; `None` where it is none."""
    match = TIME.fullmatch(time)
    if not match:
        return None
    days, hours, minutes, seconds, first, second, third = (int(part) if part else 0 for part in match.groups())
    if match.group(1) is not None:
        return days * 86400 + hours * 3600 + minutes * 60 + seconds
    if match.group(7) is not None:
        return first * 3600 + second * 60 + third
    return first * 60 + second


def _carried(time: str, seconds: int) -> str | None:
    """Returns what was meant by a time with 60 or more minutes or seconds behind a larger unit, `None` for any other.

    Slurm adds them up: `25:99` ends a job after 26 minutes and 39 seconds. `seconds`: what it makes of it.
    """
    match = TIME.fullmatch(time)
    assert match, "the caller has read it"
    _, _, minutes, rest, first, second, third = match.groups()
    if not any(part and int(part) >= 60 for part in (minutes, rest, second, third)):
        return None
    days, hours = divmod(seconds // 3600, 24) if match.group(1) is not None else (0, seconds // 3600)
    clock = f"{hours:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    if second is None or third is not None:
        return f"did you mean `{f'{days}-' if match.group(1) is not None else ''}{clock}`?"
    longer = int(first) * 60 + int(second)
    return f"did you mean `{longer // 60:02}:{longer % 60:02}:00` (hours:minutes:seconds) or `{seconds // 60}:{seconds % 60:02}` (minutes:seconds)?"


def slurm_names(slurm: SlurmConfig) -> Iterator[Conflict]:
    """Names, amounts and indices, each as sbatch takes it."""
    expected: Mapping[str, tuple[re.Pattern[str], str]] = {
        "partition": (NAME, "the name of a partition, as `sinfo -s` lists them"),
        "account": (NAME, "the name of an account"),
        "qos": (NAME, "the name of a quality of service"),
        "gpu_type": (NAME, "the cluster's name of a GPU, such as `h100`"),
        "constraint": (CONSTRAINT, "features without blanks, such as `ib&h100`"),
        "memory": (MEMORY, "a number with `K`, `M`, `G` or `T`, such as `200G`"),
        "array": (ARRAY, "indices such as `0-3`, `1,5,7` or `1-10%1`"),
    }
    for key, (pattern, words) in expected.items():
        text = getattr(slurm, key)
        if text is not None and not pattern.fullmatch(text):
            yield Conflict(f"slurm.{key}", f"; expected {words}")
    array = slurm.array
    for low, high, step in RANGE.findall(array) if array and ARRAY.fullmatch(array) else ():
        if int(high) < int(low):
            yield Conflict("slurm.array", f", whose range `{low}-{high}` runs backwards", f"did you mean `{high}-{low}`?")
        elif step and not int(step):
            hint = f"`{low}-{high}:2` is every second index"
            yield Conflict("slurm.array", f", whose range `{low}-{high}` has a step of 0", hint)


def times(slurm: SlurmConfig) -> Iterator[Conflict]:
    """The job's time, and room in it for the warning before its end."""
    seconds = seconds_of(slurm.time)
    if seconds and (hint := _carried(slurm.time, seconds)):
        text = "; expected less than 60 minutes after hours, and less than 60 seconds after minutes"
        yield Conflict("slurm.time", text, hint)
    elif not seconds:
        yield Conflict("slurm.time", "; expected a time as sbatch takes it", "`24:00:00`, `2-12` (days-hours) or `90` (minutes)")
    elif seconds <= slurm.warning_seconds:
        text = f", and the job ends after {seconds} s (`slurm.time: {slurm.time}`)"
        hint = "ask for more time: the run saves and leaves when it is warned"
        yield Conflict("slurm.warning_seconds", text, hint, or_key="slurm.time")


def slurm_lines(slurm: SlurmConfig) -> Iterator[Conflict]:
    """Lines for the shell: any, but for control characters and tokens. Options: one each, and none that is decided elsewhere."""
    for index, line in enumerate(slurm.setup):
        name = f"slurm.setup[{index}]"
        if _controls(line.replace("\n", "").replace("\t", "")):
            yield Conflict(name, f"`{name}` holds a control character")
        elif without_tokens(line) != line:
            hint = f"{HUB_LOGIN} keeps the hub's token in a file that only you can read; a line such as `source ~/.tokens` reads others"
            yield Conflict(name, f"`{name}` holds what looks like an access token", hint)
    for index, text in enumerate(slurm.options):
        name, match = f"slurm.options[{index}]", OPTION.fullmatch(text)
        if not match or _controls(text):
            hint = "a long option each: `--exclusive`, `--mail-type=END`; values hold no quotes and no backslash"
            yield Conflict(name, "; expected an option of sbatch", hint)
        elif match[1] in OF_KEYS:
            yield Conflict(name, ", which has its own setting", f"set `{OF_KEYS[match[1]]}`")
        elif match[1] in OUR_OPTIONS:
            typed = f"type it when you submit: `sbatch --{match[1]} SCRIPT`"
            hint = typed if match[1] in TYPED_THERE else "omit it: the script sets its own"
            yield Conflict(name, ", which is not for the script", hint)


def _controls(text: str) -> bool:
    """Whether a text holds anything that ends a line or moves a terminal's cursor."""
    return any(ord(letter) < 32 or 127 <= ord(letter) < 160 or letter in "\u2028\u2029" for letter in text)


SLURM_RULES = (slurm_names, times, slurm_lines)


# Rules of `kubernetes`: names as the API server takes them.


LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
"""RFC 1035: what a Service, a namespace and an operator's job may be called."""
SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
"""RFC 1123: claims, Secrets, storage classes."""
QUALIFIED = re.compile(
    r"((?=[^/]{1,253}/)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?",
    re.ASCII,
)
"""Keys of labels."""
RESOURCE = re.compile(r"(?=[^/]*/)" + QUALIFIED.pattern, re.ASCII)
CLASS = re.compile(rf"\s*|{SUBDOMAIN.pattern}")
"""An empty one is told with `kubernetes.create_claims`."""
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?", re.ASCII)
NO_EMPTY_LABEL = re.compile(r"(?=.)" + LABEL_VALUE.pattern, re.ASCII)
QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?")
UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50,
         "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}  # fmt: skip
LEAST = {"memory": 2**30, "shm": 2**20, "storage_size": 2**20}
"""Bytes; less is a slip of the unit: a Python with torch alone has more."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
IMAGE = re.compile(r"[a-z0-9][\w./:@-]*", re.ASCII)
ADAPTERS = re.compile(r"[=^]{0,2}[\w.:,-]+", re.ASCII)
OUR_VARIABLES = re.compile(
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


def kubernetes_names(kubernetes: KubernetesConfig) -> Iterator[Conflict]:
    """Names that the API server would refuse, or that an operator's web hook would, later."""
    claim, resource = "small letters, digits, `-` and `.`, at most 253", "a resource's name such as `nvidia.com/gpu`"
    secret = "the token itself is in the Secret: kubectl create secret generic NAME --from-literal=HF_TOKEN=..."
    expected: Mapping[str, tuple[re.Pattern[str], str]] = {
        "namespace": (LABEL, "small letters, digits and `-`, at most 63, the first a letter"),
        **dict.fromkeys(("models_claim", "runs_claim", "tracking_claim", "token_secret", "pull_secret"), (SUBDOMAIN, claim)),
        "storage_class": (CLASS, claim), "gpu_resource": (RESOURCE, resource), "rdma_resource": (RESOURCE, resource),
        "queue": (NO_EMPTY_LABEL, "the name of a Kueue LocalQueue"), "image": (IMAGE, "an image such as `registry.example/sft-play:1.0`"),
        "hca": (ADAPTERS, "adapters as NCCL takes them: `mlx5`, `=mlx5_0:1,mlx5_1:1`, `^mlx5_3`"),
    }  # fmt: skip
    for key, (pattern, words) in expected.items():
        text = getattr(kubernetes, key)
        if text is not None and not pattern.fullmatch(text):
            yield Conflict(f"kubernetes.{key}", f"; expected {words}", secret if key == "token_secret" else None)


def sizes(kubernetes: KubernetesConfig) -> Iterator[Conflict]:
    """Quantities, and `/dev/shm` inside the memory that it counts against."""
    found = {key: quantity(getattr(kubernetes, key)) for key in LEAST}
    for key, size in found.items():
        if not size:
            yield Conflict(f"kubernetes.{key}", "; expected a quantity such as `64Gi`")
        elif size < LEAST[key]:
            number = getattr(kubernetes, key).rstrip("KMGTPki")
            hint = f"did you mean `{number}Gi`?" if 1 <= float(number) < 1000 else "such as `64Gi`"
            least = "1Gi" if key == "memory" else "1Mi"
            yield Conflict(f"kubernetes.{key}", f"; expected `{least}` or more; a number alone is in bytes", hint)
    memory, shared = found["memory"], found["shm"]
    if memory and shared and shared >= memory >= LEAST["memory"]:
        text = f"`kubernetes.shm` is {kubernetes.shm}, which uses all of `kubernetes.memory` ({kubernetes.memory})"
        yield Conflict(
            "kubernetes.shm", text, "`/dev/shm` counts against the pod's memory: make it smaller, or the memory larger"
        )


def together(kubernetes: KubernetesConfig) -> Iterator[Conflict]:
    """Keys that need each other, so that nothing that was typed is without effect."""
    given = kubernetes.storage_class is not None
    if kubernetes.create_claims and not (kubernetes.storage_class or "").strip():
        text = f"`kubernetes.create_claims` is `true`, and `kubernetes.storage_class` is {'empty' if given else 'not given'}"
        hint = "`kubectl get storageclass` lists them; several pods need one that gives ReadWriteMany"
        yield Conflict("kubernetes.storage_class", text, hint, or_key="kubernetes.create_claims")
    without_effect = {
        "storage_class": (given and not kubernetes.create_claims, "create_claims"),
        "access_mode": (kubernetes.access_mode != "auto" and not kubernetes.create_claims, "create_claims"),
        "hca": (kubernetes.hca is not None and not kubernetes.infiniband, "infiniband"),
        "rdma_count": (kubernetes.rdma_count != 1 and not kubernetes.infiniband, "infiniband"),
    }
    for key, (wrong, needed) in without_effect.items():
        if wrong:
            needs = f"`kubernetes.{needed}: true`"
            yield Conflict(f"kubernetes.{key}", f", which needs {needs}", f"set {needs}, or leave it out")
    for key in ("models_claim", "runs_claim"):
        if kubernetes.kind != "skypilot" and getattr(kubernetes, key) is None:
            hint = f"name a claim; `kubernetes.create_claims: true` renders it: kubernetes.{key}: {key.removesuffix('_claim')}"
            yield Conflict(f"kubernetes.{key}", f"`kubernetes.{key}` is null, and pods keep nothing without a claim", hint)


def labels(kubernetes: KubernetesConfig) -> Iterator[Conflict]:
    """Selectors of nodes, and tolerations as `validation.go` of Kubernetes takes them."""
    selectors = {"node_selector": [kubernetes.node_selector], "replica_selectors": kubernetes.replica_selectors}
    for key, found in selectors.items():
        for name, value in (pair for selector in found for pair in selector.items()):
            if not QUALIFIED.fullmatch(name) or not LABEL_VALUE.fullmatch(value):
                text = f"`kubernetes.{key}` is `{quoted(f'{name}={value}')}`; expected a label and its value, such as"
                yield Conflict(f"kubernetes.{key}", f"{text} `nvidia.com/gpu.product: NVIDIA-L40S`")
    for given in kubernetes.tolerations:
        if problem := _toleration_problem(given):
            line = "{" + ", ".join(f"{key}: {text}" for key, text in given.items()) + "}"
            yield Conflict("kubernetes.tolerations", f"`kubernetes.tolerations` holds `{line}`: {problem}", TOLERATION)


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
        return "`value` is not valid for a taint"
    if seconds is not None and (not re.fullmatch(r"[0-9]{1,9}", seconds) or given.get("effect") != "NoExecute"):
        return "`tolerationSeconds` is an integer, and goes with `effect: NoExecute`"
    return None


def environment(kubernetes: KubernetesConfig) -> Iterator[Conflict]:
    """Variables of the pods: no secret's value, none that decides a pod's place."""
    key = "kubernetes.env"
    for name in kubernetes.env:
        if not VARIABLE.fullmatch(name):
            yield Conflict(key, f"`{key}` is `{quoted(name)}`; expected names of environment variables")
        elif SECRET_VARIABLE.search(name):
            text = f"`{key}` holds `{name}`, a secret by its name, which would be written to the manifest"
            yield Conflict(key, text, "put the hub's token into a Secret and name that: `kubernetes.token_secret`")
        elif OUR_VARIABLES.fullmatch(name):
            yield Conflict(key, f"`{key}` holds `{name}`, which the manifests or the operator set")


KUBERNETES_RULES = (kubernetes_names, sizes, together, labels, environment)
