"""What a user should know of what was rendered: what the cluster must have, what stays, what the plan needs that the pods do not get."""

from __future__ import annotations

from collections.abc import Iterator

from sft_play.config.kubernetes_rules import quantity
from sft_play.config.load import LoadedConfig
from sft_play.config.trackers import OWN, PACKAGES, trackers
from sft_play.files import is_file_name, typed_path
from sft_play.launch.key import VARIABLE as KEY
from sft_play.plan.hardware import GIB
from sft_play.plan.memory import Setup, host_bytes
from sft_play.plan.plan import Plan
from sft_play.plan.shape import shape_of
from sft_play.schedulers.kubernetes_spec import MODELS, RUNS, TRACKING, Spec
from sft_play.schedulers.pods import access_mode, claims


def namespace(spec: Spec) -> str:
    """Returns kubectl's words for the namespace, with a blank before them."""
    return f" -n {spec.settings.namespace}" if spec.settings.namespace else ""


def notes(spec: Spec, plan: Plan, loaded: LoadedConfig, *, named: bool) -> Iterator[str]:
    """Yields a line for each. `named`: whether `RUN_NAME` was given."""
    if spec.settings.kind == "skypilot":
        yield from _of_skypilot(spec, loaded)
    else:
        yield from _of_cluster(spec, loaded)
    if not named:
        yield (
            f"RUN_NAME is not given, so job and run are called `{spec.name}` after the configuration: another job of it needs a RUN_NAME of its "
            f"own, and one of this name goes on with the run{_once_deleted(spec)}"
        )
    need, memory = host_need(spec, plan, loaded), quantity(spec.settings.memory) or 0
    if need > memory:
        yield (
            f"the plan puts {need / GIB:.1f} GiB into a pod's memory, and kubernetes.memory is {spec.settings.memory}, /dev/shm included: "
            "raise it, else the kernel ends the pod"
        )
    yield from _paths(loaded)


def host_need(spec: Spec, plan: Plan, loaded: LoadedConfig) -> int:
    """Returns the bytes that the plan keeps in the memory of the largest pod: all of a process on the CPU, what DeepSpeed offloads of a GPU's."""
    if plan.device == "cpu":
        first, needs = 0, []
        for count in spec.processes:
            needs.append(sum(rank.peak_bytes for rank in plan.ranks[first : first + count]))
            first += count
        return max(needs)
    if not (plan.offload_optimizer or plan.offload_parameters):
        return 0
    setup = Setup(
        device=plan.device, strategy=plan.strategy, world_size=plan.world_size, precision=plan.precision, weights_dtype=plan.weights_dtype,
        optim=plan.optim, gradient_checkpointing=plan.gradient_checkpointing, layout=plan.layout, attention=plan.attn_implementation,
        label_share=plan.label_share, row_tokens=plan.row_tokens, offload_optimizer=plan.offload_optimizer,
        offload_parameters=plan.offload_parameters,
    )  # fmt: skip
    return max(spec.processes) * host_bytes(loaded.config, shape_of(loaded.config.model), setup)


def _once_deleted(spec: Spec) -> str:
    if spec.settings.kind == "skypilot":
        return ""
    return f" once the old job is deleted (kubectl delete{namespace(spec)} -f {spec.settings.kind}.yaml), since pods of a job cannot be changed"


def _of_cluster(spec: Spec, loaded: LoadedConfig) -> Iterator[str]:
    settings = spec.settings
    if not loaded.typed("kubernetes.image"):
        yield f"the image is `{settings.image}`: build it by the Dockerfile, push it where the cluster pulls from, and set kubernetes.image"
    for name in trackers(loaded.config):
        if name in PACKAGES and name != OWN:
            built = f"an image that was built with --build-arg TRACKERS={PACKAGES[name][1]}"
            yield f"`train.report_to` names `{name}`, which is in {built}, and not in the default one: kubernetes.image is {settings.image}"
    if settings.create_claims:
        yield from _of_claims(spec)
    else:
        several = ", each mounted by all pods at once (ReadWriteMany)" if spec.pods > 1 else ""
        yield f"these claims must exist: {', '.join(claims(spec))}{several}"
    if spec.pods > 1:
        yield (
            f"make the run's key once, without which nobody joins it: "
            f"openssl rand -hex 32 | kubectl create secret generic{namespace(spec)} {spec.name}-key --from-file={KEY}=/dev/stdin"
        )
    if settings.token_secret:
        yield f"this Secret must exist: kubectl create secret generic{namespace(spec)} {settings.token_secret} --from-file=HF_TOKEN=FILE"
    if settings.pull_secret:
        yield f"this Secret must exist: kubectl create secret docker-registry{namespace(spec)} {settings.pull_secret} --docker-server=..."
    if settings.infiniband:
        yield (
            "InfiniBand needs IPC_LOCK, which PodSecurity `restricted` refuses, and nodes whose container runtime allows unlimited locked "
            "memory (LimitMEMLOCK=infinity): a capability that is added does not reach a user who is not root"
        )
    if settings.kind == "pytorchjob" and spec.pods > 1:
        yield "the operator gives Workers an init container that waits for the Master's name (alpine:3.10 unless it is set otherwise)"
    if settings.kind == "trainjob":
        yield f"a finished TrainJob stays until it is deleted: kubectl delete{namespace(spec)} -f trainjob.yaml"


def _of_claims(spec: Spec) -> Iterator[str]:
    """Claims outlive a job, and other runs use them."""
    if access_mode(spec) == "ReadWriteOnce":
        what = "all pods must come to stand on one node" if spec.pods > 1 else "pods of another run must stand on the same node"
        yield f"the claims are ReadWriteOnce, which one node mounts at a time: {what}, or wait; kubernetes.access_mode: ReadWriteMany"
    yield f"the claims {', '.join(claims(spec))} serve all runs that name them, and what they ask for cannot be changed later: apply claims.yaml once"


def _of_skypilot(spec: Spec, loaded: LoadedConfig) -> Iterator[str]:
    settings = spec.settings
    if claims(spec):
        yield f"these SkyPilot volumes must exist (`sky volumes apply`; Kubernetes and RunPod only): {', '.join(claims(spec))}"
    if settings.runs_claim is None:
        yield (
            f"run folders stand on the machine's disk and go with it: a machine that is replaced begins anew, and a lost peer ends the task. "
            f"kubernetes.runs_claim keeps them on a volume; on other clouds mount a bucket at {RUNS} (`file_mounts`)"
        )
    if spec.pods > 1 and settings.runs_claim is None:
        yield (
            f"each of the {spec.pods} machines fetches the model and prepares the data for itself; ZeRO and FSDP2 need one {RUNS} for all, or "
            "train.save_strategy: no"
        )
    if loaded.typed("kubernetes.image"):
        yield (
            "SkyPilot installs openssh-server in a container, as root or by sudo: the Dockerfile's image has neither and cannot start there. "
            "Build one of it that ends with `USER root` (docs/kubernetes.md)"
        )


def _paths(loaded: LoadedConfig) -> Iterator[str]:
    """Yields the files of this machine that pods will look for under the same name, and may not find."""
    config = loaded.config
    sources = [*config.data.sources, *(config.data.validation if isinstance(config.data.validation, list) else [])]
    named = [config.model.name, config.model.tokenizer, config.data.chat_template, *(source.path for source in sources)]
    local = {text for text in named if text and (text.startswith(("/", "~", "./", "../")) or _is_here(text))}
    seen = (MODELS + "/", RUNS + "/", TRACKING + "/", "examples/")
    missing = sorted(text for text in local if not text.startswith(seen))
    if missing:
        yield f"pods see {MODELS} and {RUNS} (claims) and the image's examples/; copy these there and name them so: {', '.join(missing)}"


def _is_here(text: str) -> bool:
    return is_file_name(text) and typed_path(text).exists()
