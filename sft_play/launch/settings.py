"""Accelerate's config file: a user's own read strictly, and a run's own written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sft_play.config import yaml_source
from sft_play.config.yaml_source import dump_yaml, read_plain_yaml, read_yaml
from sft_play.errors import UserError, raise_all
from sft_play.launch.deepspeed import JsonDocument, UserDeepSpeed, examine_user_json
from sft_play.launch.environment import Node
from sft_play.plan.plan import Plan, Precision, Strategy

NoneType = type(None)
NO_FILE = "none"
"""`ACCELERATE_CONFIG=none`: not even accelerate's default file is read."""
NO_DEFAULT_FILE = f"ACCELERATE_CONFIG={NO_FILE}"
"""For commands that a scheduler or another machine starts: their plan knows nothing of such a file there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AccelerateChoices:
    """What the file decides; `None` and empty where it decides nothing."""

    path: Path | None = None
    strategy: Literal["single", "ddp", "zero", "fsdp2"] | None = None
    num_gpus: int | None = None
    """Processes on this machine."""
    num_nodes: int | None = None
    node_rank: int | None = None
    master_address: str | None = None
    master_port: int | None = None
    deepspeed: UserDeepSpeed | None = None
    fsdp: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `train.` that it sets: `bf16`, `fp16`, `gradient_checkpointing`."""
    notices: tuple[str, ...] = ()


STRATEGIES: Mapping[str, Literal["single", "ddp", "zero", "fsdp2"]] = {
    "NO": "single", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp", "DEEPSPEED": "zero", "FSDP": "fsdp2",
}  # fmt: skip
REFUSED_TYPES: Mapping[str, str] = {
    "XLA": "TPUs are not supported",
    "TPU": "TPUs are not supported",
    "MEGATRON_LM": "Megatron-LM is not supported; ZeRO-3 and FSDP2 shard large models",
    "MULTI_XPU": "only NVIDIA GPUs and CPUs are supported",
    "MULTI_NPU": "only NVIDIA GPUs and CPUs are supported",
    "MULTI_HPU": "only NVIDIA GPUs and CPUs are supported",
}
READ = frozenset({
    "compute_environment", "distributed_type", "num_processes", "num_machines", "machine_rank", "main_process_ip",
    "main_process_port", "mixed_precision", "deepspeed_config", "fsdp_config",
})  # fmt: skip
AGREE: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "use_cpu": (lambda v: v in (False, True, None), ""),
    "debug": (lambda v: v in (False, None), "`debug` is not supported; the rank logs tell what failed"),
    "main_training_function": (lambda v: v in ("main", None), "the program that runs is `sft_play.train`"),
    "rdzv_backend": (lambda v: v in ("static", None), "only the static rendezvous is used: ranks keep to their machines"),
    "same_network": (lambda v: v in (True, False, None), ""),
    "gpu_ids": (lambda v: v in ("all", None), "set CUDA_VISIBLE_DEVICES instead of `gpu_ids`"),
    "enable_cpu_affinity": (lambda v: v in (False, None), "CPU affinity is not supported"),
    "downcast_bf16": (lambda v: v in ("no", False, None), "it is for TPUs"),
    "dynamo_config": (lambda v: not v, "torch.compile is not supported"),
    "dynamo_backend": (lambda v: v in ("NO", "no", None), "torch.compile is not supported"),
    "fp8_config": (lambda v: not v, "fp8 is not supported"),
    "megatron_lm_config": (lambda v: not v, "Megatron-LM is not supported"),
    "parallelism_config": (lambda v: not v, "only data parallelism (DDP, ZeRO, FSDP2) is supported"),
    "mpirun_config": (lambda v: not v, "mpirun is not used; torch's wheels lack MPI"),
    "tpu_env": (lambda v: not v, "TPUs are not supported"),
    "tpu_use_cluster": (lambda v: v in (False, None), "TPUs are not supported"),
    "tpu_use_sudo": (lambda v: v in (False, None), "TPUs are not supported"),
    "tpu_name": (lambda v: v is None, "TPUs are not supported"),
    "tpu_zone": (lambda v: v is None, "TPUs are not supported"),
}
"""Keys that may stand in the file with one meaning only: test, and the reason why another value is refused."""


def machines_and_strategy(path: Path) -> tuple[int, str]:
    """Returns the machines that a file names, and its strategy where that is not plain data parallelism; 1 and nothing of no such file."""
    try:
        settings = read_plain_yaml(path)
    except UserError:
        return 1, ""
    if not isinstance(settings, dict):
        return 1, ""
    machines, kind = settings.get("num_machines"), str(settings.get("distributed_type", "NO"))
    return machines if isinstance(machines, int) else 1, "" if STRATEGIES.get(kind) in ("single", "ddp") else kind


def read_accelerate_config(path: Path) -> AccelerateChoices:
    """Returns the choices of `path`. Raises `UserError` with every key that cannot be honoured."""
    source = read_yaml(path)
    settings = source.plain()
    if not isinstance(settings, dict):
        raise UserError("is not an accelerate config", place=str(path), hint="`make setup-accelerate` writes one")
    problems: list[UserError] = []

    def refuse(text: str, hint: str | None = None) -> None:
        key = text.partition("`")[2].partition("`")[0]
        problems.append(UserError(text, place=_place(path, source, key), hint=hint))

    kind = str(settings.get("distributed_type", ""))
    if settings.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        refuse(f"`compute_environment` is `{settings['compute_environment']}`; only `LOCAL_MACHINE` is supported")
    if kind not in STRATEGIES:
        refuse(f"`distributed_type` is `{kind}`: {REFUSED_TYPES.get(kind, f'expected one of {sorted(STRATEGIES)}')}")
    for key, value in settings.items():
        if key in AGREE and not AGREE[key][0](value):
            refuse(f"`{key}` is `{value}`: {AGREE[key][1]}")
    unknown = sorted(set(settings) - READ - set(AGREE))
    if unknown:
        refuse(f"keys that are not understood: {', '.join(f'`{key}`' for key in unknown)}", "take them out")
    numbers = {
        key: _number(settings, key, refuse) for key in ("num_processes", "num_machines", "machine_rank", "main_process_port")
    }
    train = _precision(settings.get("mixed_precision"), refuse)
    notices: list[str] = []
    deepspeed = _deepspeed(path, settings.get("deepspeed_config") or {}, kind, notices, refuse)
    fsdp = _fsdp(settings.get("fsdp_config") or {}, train, notices, refuse) if kind == "FSDP" else {}
    raise_all(problems)
    return AccelerateChoices(
        path=path,
        strategy=STRATEGIES[kind],
        num_gpus=_per_node(numbers["num_processes"], numbers["num_machines"], path),
        num_nodes=numbers["num_machines"],
        node_rank=numbers["machine_rank"] if (numbers["num_machines"] or 1) > 1 else None,
        master_address=settings.get("main_process_ip") if (numbers["num_machines"] or 1) > 1 else None,
        master_port=numbers["main_process_port"] or None,
        deepspeed=deepspeed,
        fsdp=fsdp,
        train=train,
        notices=tuple(notices),
    )


Refuse = Callable[..., None]


def _place(path: Path, source: yaml_source.Node, key: str) -> str:
    """Returns `file:line` of a dotted key, or of the section around it, or the file."""
    line: int | None = None
    node = source
    for name in key.split("."):
        if not isinstance(node.value, dict) or name not in node.value:
            break
        node = node.value[name]
        line = node.line or line
    return f"{path}:{line}" if line else str(path)


def _number(settings: Mapping[str, Any], key: str, refuse: Refuse) -> int | None:
    value = settings.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        refuse(f"`{key}` is `{value}`; expected a whole number")
        return None
    return value


def _per_node(processes: int | None, machines: int | None, path: Path) -> int | None:
    if processes is None:
        return None
    if processes < 1 or processes % (machines or 1):
        text = (
            f"`num_processes` is {processes} for {machines or 1} machines; expected a multiple, the same number on every machine"
        )
        raise UserError(text, place=str(path))
    return processes // (machines or 1)


def _precision(value: Any, refuse: Refuse) -> dict[str, Any]:
    if value in ("no", False):  # a bare `no` is false in YAML 1.1, and accelerate writes 'no'
        return {"bf16": False, "fp16": False}
    if value in ("bf16", "fp16"):
        return {"bf16": value == "bf16", "fp16": value == "fp16"}
    if value is not None:
        refuse(
            f"`mixed_precision` is `{value}`; expected `no`, `bf16` or `fp16`", "fp8 is not supported" if value == "fp8" else None
        )
    return {}


DEEPSPEED_KEYS: Mapping[str, str] = {
    "zero_stage": "zero_optimization.stage",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}


def _deepspeed(path: Path, section: Mapping[str, Any], kind: str, notices: list[str], refuse: Refuse) -> UserDeepSpeed | None:
    if kind != "DEEPSPEED":
        if section:
            refuse(
                f"`deepspeed_config` is given, but `distributed_type` is `{kind}`", "make it `DEEPSPEED` or take the section out"
            )
        return None
    value: dict[str, Any] = {"zero_optimization": {"stage": 2}}
    file = section.get("deepspeed_config_file")
    for key, setting in section.items():
        if key in ("deepspeed_config_file", "zero3_init_flag"):  # the worker decides how weights are first placed
            continue
        if key == "deepspeed_multinode_launcher":
            if setting != "standard":
                refuse(f"`deepspeed_config.{key}` is `{setting}`; every node starts its own processes: expected `standard`")
        elif key not in DEEPSPEED_KEYS:
            refuse(f"`deepspeed_config.{key}` is not understood", "take it out, or name a `deepspeed_config_file`")
        elif file:
            refuse(f"`deepspeed_config.{key}` stands beside `deepspeed_config_file`, of which accelerate uses only the file")
        elif setting not in (None, "none"):
            target = value
            *parents, leaf = DEEPSPEED_KEYS[key].split(".")
            for parent in parents:
                target = target.setdefault(parent, {})
            target[leaf] = setting
    if file:
        return examine_user_json(Path(file))
    stage = value["zero_optimization"]["stage"]
    if stage not in (1, 2, 3):
        refuse(f"`deepspeed_config.zero_stage` is `{stage}`; expected 1, 2 or 3")
        return None
    return UserDeepSpeed(
        document=JsonDocument(path=path, value=value, lines={}), settings=value, stage=stage, notices=tuple(notices)
    )


FSDP_AGREE: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "fsdp_auto_wrap_policy": (("TRANSFORMER_BASED_WRAP", None), "layers are wrapped one by one"),
    "fsdp_state_dict_type": (("SHARDED_STATE_DICT", "FULL_STATE_DICT", None), "checkpoints have one form for every strategy"),
    "fsdp_offload_params": ((False, None), "offloading is done by ZeRO-3 (`deepspeed/zero3_offload.json`)"),
    "fsdp_use_orig_params": ((True, None), "FSDP2 always keeps the original parameters"),
    "fsdp_sync_module_states": ((True, None), "all ranks start from the same weights"),
    "fsdp_backward_prefetch": (("BACKWARD_PRE", "NO_PREFETCH", None), "FSDP2 has no such setting"),
    "fsdp_forward_prefetch": ((False, None), "FSDP2 has no such setting"),
}
FSDP_SAID: Mapping[str, str] = {
    "fsdp_cpu_ram_efficient_loading": "every rank reads the weights itself, which is safe for quantised and tied ones",
    "fsdp_state_dict_type": "checkpoints have one form for every strategy",
}


def _fsdp(section: Mapping[str, Any], train: dict[str, Any], notices: list[str], refuse: Refuse) -> dict[str, Any]:
    passed: dict[str, Any] = {}
    if section.get("fsdp_version", 1) != 2:
        version = section.get("fsdp_version", "missing, which means 1")
        refuse(
            f"`fsdp_config.fsdp_version` is {version}; only FSDP2 is supported",
            "run `accelerate config` again, or write `fsdp_version: 2`",
        )
        return passed  # the keys of version 1 have other meanings
    for key, value in section.items():
        name = key if key.startswith("fsdp_") else f"fsdp_{key}"
        if name == "fsdp_version":
            continue
        if name == "fsdp_reshard_after_forward" and isinstance(value, bool):
            passed[name] = value
        elif name == "fsdp_transformer_layer_cls_to_wrap" and isinstance(value, (str, NoneType)):
            passed |= {name: value} if value else {}
        elif name == "fsdp_activation_checkpointing" and isinstance(value, bool):
            train["gradient_checkpointing"] = value
        elif name in FSDP_SAID and (name not in FSDP_AGREE or value in FSDP_AGREE[name][0]):
            if value not in (False, "SHARDED_STATE_DICT", None):
                notices.append(f"`{key}: {value}` has no effect here: {FSDP_SAID[name]}")
        elif name not in FSDP_AGREE:
            refuse(f"`fsdp_config.{key}` is not understood", "take it out")
        elif value not in FSDP_AGREE[name][0]:
            refuse(f"`fsdp_config.{key}` is `{value}`: {FSDP_AGREE[name][1]}")
    return passed


DISTRIBUTED_TYPE: Mapping[Strategy, str] = {
    "single": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP", "zero1": "DEEPSPEED", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED",
}  # fmt: skip
MIXED_PRECISION: Mapping[Precision, str] = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


def accelerate_settings(
    *, strategy: Strategy, device: str, precision: Precision, processes: int, node: Node, deepspeed_file: Path | None
) -> dict[str, Any]:
    """Returns the content of an accelerate config file for `processes` in all over `node.count` machines.

    `MULTI_GPU` on a CPU is no slip: with `MULTI_CPU` or `use_cpu` accelerate starts one process; the workers' environment
    says what the device is.
    """
    settings: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": DISTRIBUTED_TYPE[strategy],
        "num_machines": node.count,
        "num_processes": processes,
        "machine_rank": node.rank if node.count == 1 else 0,
        "use_cpu": device == "cpu" and strategy == "single",
        "main_training_function": "main",
        "debug": False,
    }
    if node.count > 1:
        settings |= {"main_process_ip": node.master_address, "rdzv_backend": "static", "same_network": True}
    if processes > 1 and node.master_port:
        settings["main_process_port"] = node.master_port
    if strategy.startswith("zero"):
        assert deepspeed_file is not None, "ZeRO needs a DeepSpeed file"
        # Precision, stage and offload stand in that file; accelerate refuses them in both. Its own default launcher is pdsh.
        settings["deepspeed_config"] = {
            "deepspeed_config_file": str(deepspeed_file),
            "deepspeed_multinode_launcher": "standard",
            "zero3_init_flag": strategy == "zero3",
        }
        return settings
    settings["mixed_precision"] = MIXED_PRECISION[precision]
    if strategy == "fsdp2":
        settings["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": False,
            "fsdp_offload_params": False,
            # Recomputation is the trainer's own, one switch for every strategy.
            "fsdp_activation_checkpointing": False,
        }
    return settings


def accelerate_yaml(plan: Plan, node: Node, *, deepspeed_file: Path | None, fsdp: Mapping[str, Any]) -> str:
    """Returns the text of a run's `accelerate.yaml`; `fsdp` holds what a user's own accelerate config says differently."""
    settings = accelerate_settings(
        strategy=plan.strategy,
        device=plan.device,
        precision=plan.precision,
        processes=plan.world_size,
        node=node,
        deepspeed_file=deepspeed_file,
    )
    if plan.strategy == "fsdp2":
        settings["fsdp_config"] |= fsdp
    return "# Rendered by SFT-Play for this run; `accelerate launch --config_file` reads it.\n" + dump_yaml(settings)
