"""Rules of the sections `slurm` and `kubernetes`: what their files can hold, sizes, names, no secret."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from sft_play.config.names import SECRET_VARIABLE
from sft_play.config.rule import Origins, problem
from sft_play.config.schema import Config
from sft_play.config.types import shown
from sft_play.config.yaml_files import Node
from sft_play.errors import HUB_LOGIN, UserError, without_tokens

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


def indices(config: Config, origins: Origins) -> Iterator[UserError]:
    """Ranges of an array that sbatch would refuse: those that run backwards, or without a step."""
    array = config.slurm.array
    for low, high, step in RANGE.findall(array) if array and ARRAY.fullmatch(array) else ():
        text = f"`slurm.array` is `{_shown(str(array))}`, "
        if int(high) < int(low):
            yield problem(
                origins, "slurm.array", f"{text}whose range `{low}-{high}` runs backwards", f"did you mean `{high}-{low}`?"
            )
        elif step and not int(step):
            yield problem(
                origins,
                "slurm.array",
                f"{text}whose range `{low}-{high}` has a step of 0",
                f"`{low}-{high}:2` is every second index",
            )


def slurm_names(config: Config, origins: Origins) -> Iterator[UserError]:
    """Names, amounts and indices, each as sbatch takes it."""
    slurm = config.slurm
    expected: dict[str, tuple[str | None, re.Pattern[str], str]] = {
        "slurm.partition": (slurm.partition, NAME, "the name of a partition, as `sinfo -s` lists them"),
        "slurm.account": (slurm.account, NAME, "the name of an account"),
        "slurm.qos": (slurm.qos, NAME, "the name of a quality of service"),
        "slurm.gpu_type": (slurm.gpu_type, NAME, "the cluster's name of a GPU, such as `h100`"),
        "slurm.constraint": (slurm.constraint, CONSTRAINT, "features without blanks, such as `ib&h100`"),
        "slurm.memory": (slurm.memory, MEMORY, "a number with `K`, `M`, `G` or `T`, such as `200G`"),
        "slurm.array": (slurm.array, ARRAY, "indices such as `0-3`, `1,5,7` or `1-10%1`"),
    }
    for key, (text, pattern, words) in expected.items():
        if text is not None and not pattern.fullmatch(text):
            yield problem(origins, key, f"`{key}` is `{_shown(text)}`; expected {words}")


def times(config: Config, origins: Origins) -> Iterator[UserError]:
    """The job's time, and room in it for the warning before its end."""
    slurm = config.slurm
    seconds = seconds_of(slurm.time)
    if seconds and (hint := _carried(slurm.time, seconds)):
        text = f"`slurm.time` is `{_shown(slurm.time)}`; expected less than 60 minutes beside hours, and less than 60 seconds beside minutes"
        yield problem(origins, "slurm.time", text, hint)
    elif not seconds:
        text = f"`slurm.time` is `{_shown(slurm.time)}`; expected a time as sbatch takes it"
        yield problem(origins, "slurm.time", text, "`24:00:00`, `2-12` (days-hours) or `90` (minutes)")
    elif seconds <= slurm.warning_seconds:
        key = "slurm.time" if origins.get("slurm.warning_seconds", "default") == "default" else "slurm.warning_seconds"
        text = (
            f"`slurm.warning_seconds` is {slurm.warning_seconds}, and the job ends after {seconds} s (`slurm.time: {slurm.time}`)"
        )
        yield problem(origins, key, text, "ask for more time: the run saves and leaves when it is warned")


def setup(config: Config, origins: Origins) -> Iterator[UserError]:
    """Lines for the shell: any, but for control characters and tokens."""
    for index, line in enumerate(config.slurm.setup):
        name = f"slurm.setup[{index}]"
        if _controls(line.replace("\n", "").replace("\t", "")):
            yield problem(origins, "slurm.setup", f"`{name}` holds a control character")
        elif without_tokens(line) != line:
            hint = f"{HUB_LOGIN} keeps the hub's token in a file that only you can read; a line such as `source ~/.tokens` reads others"
            yield problem(origins, "slurm.setup", f"`{name}` holds what looks like an access token", hint)


def options(config: Config, origins: Origins) -> Iterator[UserError]:
    """Further options: one each, and none that is decided elsewhere."""
    for index, text in enumerate(config.slurm.options):
        name = f"slurm.options[{index}]"
        match = OPTION.fullmatch(text)
        if not match or _controls(text):
            hint = "a long option each: `--exclusive`, `--mail-type=END`; values hold no quotes and no backslash"
            yield problem(origins, "slurm.options", f"`{name}` is `{_shown(text)}`; expected an option of sbatch", hint)
        elif match.group(1) in OF_KEYS:
            hint = f"set `{OF_KEYS[match.group(1)]}`"
            yield problem(origins, "slurm.options", f"`{name}` is `{_shown(text)}`, which has a setting of its own", hint)
        elif match.group(1) in OUR_OPTIONS:
            typed = match.group(1) in TYPED_THERE
            hint = (
                f"type it when you submit: `sbatch --{match.group(1)} SCRIPT`"
                if typed
                else "leave it away: the script needs its own"
            )
            yield problem(origins, "slurm.options", f"`{name}` is `{_shown(text)}`, which is not for the script", hint)


def _controls(text: str) -> bool:
    """Whether a text holds anything that ends a line or moves a terminal's cursor."""
    return any(ord(letter) < 32 or 127 <= ord(letter) < 160 or letter in "\u2028\u2029" for letter in text)


def _shown(text: str) -> str:
    return shown(Node(text))


SLURM_RULES = (slurm_names, indices, times, setup, options)


# Rules of the section `kubernetes`: names as the API server takes them, sizes, what goes together, no secret values. No effects.


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


def _problem(origins: Origins, key: str, text: str, hint: str | None = None) -> UserError:
    return problem(origins, f"kubernetes.{key}", text, hint)


def _wrong(origins: Origins, key: str, text: str, expected: str, hint: str | None = None) -> UserError:
    return _problem(origins, key, f"`kubernetes.{key}` is `{shown(Node(text))}`; expected {expected}", hint)


def kubernetes_names(config: Config, origins: Origins) -> Iterator[UserError]:
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
        elif OUR_VARIABLES.fullmatch(name):
            yield _problem(origins, "env", f"`kubernetes.env` holds `{name}`, which the manifests or the operator set")
        elif "\0" in text:
            yield _problem(origins, "env", f"`{name}` in `kubernetes.env` holds a null character")


KUBERNETES_RULES = (kubernetes_names, sizes, together, labels, tolerations, environment)
