"""The sections `slurm` and `kubernetes`: their keys, and rules about names, sizes and what their files can contain."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from sft_play.config.reader import Conflict, FromZero, Pattern, Positive, Range, fields_of, pattern_of, quoted
from sft_play.errors import HUB_LOGIN, SECRET_VARIABLE, without_tokens

NAME = re.compile(r"[\w.,@:+/-]+")
"""A name of the cluster's (partition, account, ...), or several between commas."""
ONE_NAME = re.compile(r"[\w.-]+")
ARRAY = Pattern(
    re.compile(r"(?=.)(\d+(-\d+(:[1-9]\d*)?)?(,\d+(-\d+(:[1-9]\d*)?)?)*)?(%[1-9]\d*)?", re.ASCII),
    "indices such as `0-3`, `1,5,7` or `1-10%1`",
)
LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
"""RFC 1035: names of a Service, a namespace and an operator's job."""
SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
"""RFC 1123: claims, Secrets, storage classes."""
QUALIFIED = re.compile(r"([a-z0-9][-a-z0-9.]{0,251}/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?", re.ASCII)
"""Keys of labels."""
RESOURCE = re.compile(r"(?=[^/]*/)" + QUALIFIED.pattern, re.ASCII)
IMAGE = re.compile(r"[a-z0-9][\w./:@-]*", re.ASCII)
ADAPTERS = re.compile(r"[=^]{0,2}[\w.:,-]+", re.ASCII)
Claim = Annotated[str, Pattern(SUBDOMAIN, "small letters, digits, `-` and `.`, at most 253")]
Resource = Annotated[str, Pattern(RESOURCE, "a resource's name such as `nvidia.com/gpu`")]


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmConfig:
    """What `make slurm` asks the scheduler for. Nodes and GPUs come from the plan."""

    partition: Annotated[str, Pattern(NAME, "the name of a partition, as `sinfo -s` lists them")] | None = None
    """Default: the cluster's."""
    account: Annotated[str, Pattern(NAME, "the name of an account")] | None = None
    """Account to charge."""
    qos: Annotated[str, Pattern(NAME, "the name of a quality of service")] | None = None
    """Quality of service."""
    time: str = "24:00:00"
    """Time limit (`days-hours:minutes:seconds`)."""
    gpu_type: Annotated[str, Pattern(ONE_NAME, "the cluster's name of a GPU, such as `h100`")] | None = None
    """GPU type (`--gpus-per-node=TYPE:COUNT`)."""
    cpus_per_gpu: Positive = 8
    """Cores per GPU; without GPUs per process; unless typed, no more than a node like this one has."""
    memory: (
        Annotated[str, Pattern(re.compile(r"[0-9]+[KMGT]"), "a number with `K`, `M`, `G` or `T`, such as `200G`")]
        | None
    ) = None
    """Memory per node (`200G`); default: the partition's."""
    constraint: (
        Annotated[str, Pattern(re.compile(r"[\w.,@:+/&|*()\[\]-]+"), "features without spaces, such as `ib&h100`")]
        | None
    ) = None
    """Feature the nodes must have."""
    warning_seconds: Annotated[int, Range(minimum=30, maximum=65_535)] = 120
    """Save and stop this long before the limit."""
    max_requeues: FromZero = 20
    """Most requeues."""
    array: Annotated[str, ARRAY] | None = None
    """Job array (`0-3`, `1-10%1`): each task is a run `RUN_NAME-INDEX`; for a sweep `%2`, two runs at a time."""
    setup: list[str] = field(default_factory=list)
    """Shell lines before the launch (`module load cuda`)."""
    options: list[str] = field(default_factory=list)
    """Further sbatch options (`--exclusive`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesConfig:
    """What `make kubernetes` renders. Pods and GPUs come from the plan."""

    kind: Literal["pytorchjob", "trainjob", "job"] = "pytorchjob"
    """What is [written](kubernetes.md)."""
    image: Annotated[str, Pattern(IMAGE, "an image such as `registry.example/sft-play:1.0`")] = "sft-play:latest"
    """Made by the `Dockerfile`."""
    namespace: (
        Annotated[str, Pattern(LABEL, "small letters, digits and `-`, at most 63, the first a letter")] | None
    ) = None
    """Default: the current context's."""
    models_claim: Claim | None = "models"
    """PersistentVolumeClaim for models and prepared data."""
    runs_claim: Claim | None = "runs"
    """The same for run folders."""
    tracking_claim: Claim | None = None
    """The same for a tracker, at `/tracking`."""
    create_claims: bool = False
    """Render the claims; needs `kubernetes.storage_class`."""
    storage_class: Claim | None = None
    """Storage class of rendered claims."""
    access_mode: Literal["auto", "ReadWriteMany", "ReadWriteOnce"] = "auto"
    """Of rendered claims; `auto`: `ReadWriteMany` for several pods."""
    storage_size: str = "200Gi"
    """Size of each rendered claim."""
    token_secret: Claim | None = None
    """Secret with the hub's token as key `HF_TOKEN`."""
    pull_secret: Claim | None = None
    """Secret for pulling the image."""
    gpu_resource: Resource = "nvidia.com/gpu"
    """Resource name of GPUs."""
    cpus: Literal["auto"] | Positive = "auto"
    """Cores per pod; `auto`: 8 per GPU."""
    memory: str = "auto"
    """Memory per pod, with `/dev/shm`; `auto`: 64Gi per GPU."""
    shm: str = "16Gi"
    """Size of `/dev/shm`."""
    port: Annotated[int, Range(minimum=1024, maximum=65535)] = 29500
    """Port where ranks meet."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    """Labels the nodes must have."""
    tolerations: list[Mapping[str, str]] = field(default_factory=list)
    """`[{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]`."""
    infiniband: bool = False
    """Request InfiniBand devices and unlimited locked memory."""
    rdma_resource: Resource = "rdma/ib"
    """Their resource name."""
    rdma_count: Positive = 1
    """Their number per pod."""
    hca: (
        Annotated[str, Pattern(ADAPTERS, "adapters as NCCL takes them: `mlx5`, `=mlx5_0:1,mlx5_1:1`, `^mlx5_3`")] | None
    ) = None
    """`NCCL_IB_HCA`, such as `mlx5`."""
    max_restarts: FromZero = 10
    """Restarts in a row without a newer checkpoint."""
    finished_seconds: FromZero = 604800
    """Seconds until a finished PyTorchJob or Job is removed."""
    queue: Annotated[str, Pattern(SUBDOMAIN, "the name of a Kueue LocalQueue")] | None = None
    """Kueue queue."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables; no secrets."""


# Rules of `slurm`.


TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::([0-5]?\d))?(?::([0-5]?\d))?", re.ASCII)
"""`days-hours[:minutes[:seconds]]`, `minutes[:seconds]` or `hours:minutes:seconds`: what sbatch takes. It also adds up
`25:99`, a slip.
"""
OPTION = re.compile(r"--([a-z][a-z0-9-]*)(=[^\"\\]+)?")
OF_KEYS: Mapping[str, str] = {
    "partition": "slurm.partition",
    "account": "slurm.account",
    "qos": "slurm.qos",
    "time": "slurm.time",
    "mem": "slurm.memory",
    "constraint": "slurm.constraint",
    "array": "slurm.array",
    "signal": "slurm.warning_seconds",
    "cpus-per-task": "slurm.cpus_per_gpu",
    "nodes": "NUM_NODES",
    "gpus-per-node": "NUM_GPUS",
    "job-name": "RUN_NAME",
    "output": "OUT",
}
"""Options of sbatch -> the key or variable that sets them here."""
OUR_OPTIONS = frozenset({
    "ntasks", "ntasks-per-node", "ntasks-per-gpu", "gpus", "gpus-per-task", "gpus-per-socket", "gres", "cpus-per-gpu",
    "requeue", "no-requeue", "open-mode", "export", "export-file", "get-user-env", "error", "input", "chdir", "wrap",
    "parsable", "test-only", "wait", "hold",
})  # fmt: skip
"""Options that the script decides, or that only a person who types `sbatch` can use."""


def seconds_of(time: str) -> int | None:
    """Return a time in seconds as sbatch reads it; `None` for text that is not a time."""
    match = TIME.fullmatch(time)
    if not match:
        return None
    days, first, second, third = (int(part) if part else 0 for part in match.groups())
    if match.group(1) or match.group(4):
        return days * 86400 + first * 3600 + second * 60 + third
    return first * 60 + second


AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt])(i?)b?", re.IGNORECASE)
"""A number of bytes as people write it."""


def _meant_amount(text: str, fits: Callable[[str], object]) -> str | None:
    """Return the hint with what `64GB` or `200 GiB` means in the way of a scheduler."""
    match = AMOUNT.fullmatch(text)
    ways = [match[1] + match[2].upper() + end for end in (match[3].lower(), "")] if match else []
    return next((f"write `{way}`" for way in ways if fits(way)), None)


def texts(section: SlurmConfig | KubernetesConfig) -> Iterator[Conflict]:
    """Check names, amounts and indices against the scheduler's patterns."""
    record: Any = type(section)
    name = "slurm" if record is SlurmConfig else "kubernetes"
    for key, annotation in fields_of(record).items():
        text, pattern = getattr(section, key), pattern_of(annotation)
        if pattern and text is not None and not pattern.regex.fullmatch(text):
            yield Conflict(f"{name}.{key}", f"; expected {pattern.words}", _meant_amount(text, pattern.regex.fullmatch))


def times(slurm: SlurmConfig) -> Iterator[Conflict]:
    """Check the job's time, which must exceed the warning before its end."""
    seconds = seconds_of(slurm.time)
    if not seconds:
        yield Conflict(
            "slurm.time", "; expected a time as sbatch takes it", "`24:00:00`, `2-12` (days-hours) or `90` (minutes)"
        )
    elif seconds <= slurm.warning_seconds:
        text = f", and the job ends after {seconds} s (`slurm.time: {slurm.time}`)"
        hint = "ask for more time: the run saves and leaves when it is warned"
        yield Conflict("slurm.warning_seconds", text, hint, or_key="slurm.time")


def slurm_lines(slurm: SlurmConfig) -> Iterator[Conflict]:
    """Refuse shell lines with tokens, and entries that are not a single option or that are decided elsewhere."""
    for index, line in enumerate(slurm.setup):
        name = f"slurm.setup[{index}]"
        if without_tokens(line) != line:
            hint = (
                f"{HUB_LOGIN} keeps the hub's token in a file that only you can read; a line such as `source ~/.tokens`"
                " reads others"
            )
            yield Conflict(name, f"`{name}` contains what looks like an access token", hint)
    for index, text in enumerate(slurm.options):
        name, match = f"slurm.options[{index}]", OPTION.fullmatch(text)
        if not match or not text.isprintable():
            hint = "a long option each: `--exclusive`, `--mail-type=END`; values contain no quotes and no backslash"
            yield Conflict(name, "; expected an option of sbatch", hint)
        elif match[1] in OF_KEYS:
            yield Conflict(name, ", which has its own setting", f"set `{OF_KEYS[match[1]]}`")
        elif match[1] in OUR_OPTIONS:
            yield Conflict(
                name, ", which is not for the script", f"omit it, or type `sbatch --{match[1]}` when you submit"
            )


SLURM_RULES = (texts, times, slurm_lines)


# Rules of `kubernetes`: what the API server or an operator's webhook would refuse later.


LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?", re.ASCII)
QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?")
UNITS = {
    "": 1,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
    "Pi": 2**50,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "P": 10**15,
}
LEAST_BYTES = 2**20
"""A smaller size has the wrong unit."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OUR_VARIABLES = re.compile(
    r"PET_\w+|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|NODE_RANK|MASTER_(ADDR|PORT|KEY)|JOB_COMPLETION_INDEX|POD_IP|RUNS_DIR"
    r"|SFT_PLAY_MAX_RESTARTS"
)
"""Names of variables that the manifests or an operator set."""
TOLERATION_KEYS = frozenset({"key", "operator", "value", "effect", "tolerationSeconds"})


def pod_memory(kubernetes: KubernetesConfig, processes: int) -> str:
    """Return the quantity of a pod's memory."""
    return f"{64 * processes}Gi" if kubernetes.memory == "auto" else kubernetes.memory


def quantity(text: str) -> int | None:
    """Return the bytes (or units) of a Kubernetes quantity such as `16Gi`; `None` for other text."""
    match = QUANTITY.fullmatch(text)
    return int(float(match.group(1)) * UNITS[match.group(2) or ""]) if match else None


EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


def labels(kubernetes: KubernetesConfig) -> Iterator[Conflict]:
    """Check the labels and tolerations that choose nodes."""
    for name, value in kubernetes.node_selector.items():
        if not QUALIFIED.fullmatch(name) or not LABEL_VALUE.fullmatch(value):
            text = (
                f"`kubernetes.node_selector` is `{quoted(f'{name}={value}')}`; expected a label and its value, such as"
            )
            yield Conflict("kubernetes.node_selector", f"{text} `nvidia.com/gpu.product: NVIDIA-L40S`")
    for toleration in kubernetes.tolerations:
        wrong = (
            toleration.get("operator", "Equal") not in ("Equal", "Exists")
            or toleration.get("effect", EFFECTS[0]) not in EFFECTS
            or not toleration.get("tolerationSeconds", "0").isdecimal()
        )
        if wrong or not toleration.keys() <= TOLERATION_KEYS:
            line = "{" + ", ".join(f"{key}: {text}" for key, text in toleration.items()) + "}"
            hint = (
                "such as `{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}`; `tolerationSeconds` is an"
                " integer"
            )
            yield Conflict(
                "kubernetes.tolerations", f"`kubernetes.tolerations` contains `{line}`, which is not valid", hint
            )


def sizes(kubernetes: KubernetesConfig) -> Iterator[Conflict]:
    """Check quantities."""
    for key in ("memory", "shm", "storage_size"):
        text = getattr(kubernetes, key)
        if text != "auto" and (quantity(text) or 0) < LEAST_BYTES:
            yield Conflict(
                f"kubernetes.{key}",
                "; expected a quantity such as `64Gi`; a number alone is in bytes",
                _meant_amount(text, quantity),
            )


def together(kubernetes: KubernetesConfig) -> Iterator[Conflict]:
    """Refuse keys without the key that they need, so that nothing typed has no effect."""
    has_storage_class = kubernetes.storage_class is not None
    if kubernetes.create_claims and not has_storage_class:
        text = "`kubernetes.create_claims` is `true`, and `kubernetes.storage_class` is not given"
        hint = "`kubectl get storageclass` lists them; several pods need one that gives ReadWriteMany"
        yield Conflict("kubernetes.storage_class", text, hint, or_key="kubernetes.create_claims")
    without_effect = {
        "storage_class": (has_storage_class and not kubernetes.create_claims, "create_claims"),
        "access_mode": (kubernetes.access_mode != "auto" and not kubernetes.create_claims, "create_claims"),
        "hca": (kubernetes.hca is not None and not kubernetes.infiniband, "infiniband"),
        "rdma_count": (kubernetes.rdma_count != 1 and not kubernetes.infiniband, "infiniband"),
    }
    for key, (wrong, needed) in without_effect.items():
        if wrong:
            needs = f"`kubernetes.{needed}: true`"
            yield Conflict(f"kubernetes.{key}", f", which needs {needs}", f"set {needs}, or omit it")
    for key in ("models_claim", "runs_claim"):
        if getattr(kubernetes, key) is None:
            hint = (
                f"name a claim; `kubernetes.create_claims: true` renders it: kubernetes.{key}:"
                f" {key.removesuffix('_claim')}"
            )
            yield Conflict(
                f"kubernetes.{key}", f"`kubernetes.{key}` is null, and pods keep nothing without a claim", hint
            )


def environment(kubernetes: KubernetesConfig) -> Iterator[Conflict]:
    """Refuse variables of the pods that are secrets or that decide a pod's place."""
    key = "kubernetes.env"
    for name in kubernetes.env:
        if not VARIABLE.fullmatch(name):
            yield Conflict(key, f"`{key}` is `{quoted(name)}`; expected names of environment variables")
        elif SECRET_VARIABLE.search(name):
            text = f"`{key}` contains `{name}`, a secret by its name, which would be written to the manifest"
            yield Conflict(key, text, "put the hub's token into a Secret and name that: `kubernetes.token_secret`")
        elif OUR_VARIABLES.fullmatch(name):
            yield Conflict(key, f"`{key}` contains `{name}`, which the manifests or the operator set")


KUBERNETES_RULES = (texts, labels, sizes, together, environment)
