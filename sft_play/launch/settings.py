"""Accelerate's config file: reading a user's strictly, writing a run's, and `make setup-accelerate`, which writes one
for this machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from sft_play.config.call import LARGEST_PORT, Call
from sft_play.config.reader import INVALID, FromZero, Mismatch, Positive, Range, closest_word, convert
from sft_play.config.yaml_files import YamlNode, dump_yaml, fill, read_plain_yaml, read_yaml
from sft_play.errors import HardwareError, UserError, raise_all, typed_here
from sft_play.files import open_plain, typed_path, write_text
from sft_play.launch.deepspeed import TEMPLATES, UserDeepSpeed, check_settings, load_user_json
from sft_play.launch.environment import PORT, Node
from sft_play.plan.detect import detect
from sft_play.plan.hardware import Hardware
from sft_play.plan.plan import DISTRIBUTED_TYPE, CommandStrategy, Plan, Precision, Strategy, command_of
from sft_play.runs.folder import RunFolder
from sft_play.text import plural

NO_FILE = "none"
"""Value of `ACCELERATE_CONFIG` that ignores even accelerate's default file."""
NO_DEFAULT_FILE = f"ACCELERATE_CONFIG={NO_FILE}"
"""Option for commands that a scheduler or another machine starts, whose plan does not consider a default file there."""
WRITTEN = "# Written by `make setup-accelerate`"
DEFAULT_OUT = "accelerate_configs/local.yaml"
PRECISIONS: Mapping[str, Precision] = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
STRATEGIES: Mapping[str, CommandStrategy] = {
    "NO": "single",
    "MULTI_GPU": "ddp",
    "MULTI_CPU": "ddp",
    "DEEPSPEED": "zero",
    "FSDP": "fsdp2",
}
TAKEN: Mapping[str, Any] = {
    "distributed_type": Literal["NO", "MULTI_GPU", "MULTI_CPU", "DEEPSPEED", "FSDP"],
    "num_processes": Positive | None,
    "num_machines": Positive | None,
    "machine_rank": FromZero | None,
    "main_process_ip": str | None,
    "main_process_port": Annotated[int, Range(minimum=0, maximum=LARGEST_PORT)] | None,
    "mixed_precision": Literal["no", "bf16", "fp16"] | bool | None,
    "deepspeed_config": dict | None,
    "deepspeed_config.deepspeed_config_file": str | None,
    "fsdp_config": dict | None,
    "fsdp_config.fsdp_activation_checkpointing": bool | None,
    "fsdp_config.fsdp_reshard_after_forward": bool | None,
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": str | None,
}
"""Keys that are used -> their types; DeepSpeed and FSDP check the values in their sections."""
Only = Mapping[str, tuple[tuple[Any, ...], str]]
"""Key of a section -> its only allowed values, and the reason for refusing others."""
FROM_FILE: Mapping[str, str] = {
    **dict.fromkeys(("bf16", "fp16"), "mixed_precision"),
    "gradient_checkpointing": "fsdp_config.fsdp_activation_checkpointing",
}
"""Key of `train.` -> the key that decides it."""
NOTHING: tuple[Any, ...] = (None, False, "", [], {})
WITHOUT_COMPILER: tuple[Any, ...] = ("NO", "no", False, None)
YES_OR_NO = "expected true or false"
ONLY: Only = {
    "compute_environment": (("LOCAL_MACHINE",), "only `LOCAL_MACHINE` is supported"),
    "use_cpu": ((True, False, None), YES_OR_NO),
    "debug": (NOTHING, "`debug` is not supported; the rank logs say what failed"),
    "main_training_function": (("main", None), "the program that runs is `sft_play.train`"),
    "rdzv_backend": (("static", None), "only the static rendezvous is used: ranks keep to their machines"),
    "same_network": ((True, False, None), YES_OR_NO),
    "gpu_ids": (("all", None), "set CUDA_VISIBLE_DEVICES instead of `gpu_ids`"),
    "enable_cpu_affinity": (NOTHING, "CPU affinity is not supported"),
    "downcast_bf16": (("no", *NOTHING), "it is for TPUs"),
    "dynamo_config": (
        (*NOTHING, *({"dynamo_backend": no} for no in WITHOUT_COMPILER)),
        "torch.compile is not supported",
    ),
    "dynamo_backend": (WITHOUT_COMPILER, "torch.compile is not supported"),
    "fp8_config": (NOTHING, "fp8 is not supported"),
    "megatron_lm_config": (NOTHING, "Megatron-LM is not supported"),
    "parallelism_config": (NOTHING, "the plan decides; `launch.sequence_parallel` cuts lines into slices"),
    "ipex_config": (NOTHING, "IPEX is not used"),
    "mpirun_config": (NOTHING, "mpirun is not used; torch's wheels lack MPI"),
    **dict.fromkeys(
        ("tpu_env", "tpu_use_cluster", "tpu_use_sudo", "tpu_name", "tpu_zone"), (NOTHING, "TPUs are not supported")
    ),
}
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
DEEPSPEED_ONLY: Only = {
    "deepspeed_multinode_launcher": (("standard",), "every node starts its own processes: expected `standard`"),
    "zero3_init_flag": ((True, False, None), YES_OR_NO),  # the worker decides where weights are placed at first
}
LAYERS = "fsdp_transformer_layer_cls_to_wrap"
FSDP_READ = frozenset(key.partition(".")[2] for key in TAKEN if key.startswith("fsdp_config."))
FSDP_ONLY: Only = {
    "fsdp_version": ((2,), ""),
    "fsdp_auto_wrap_policy": (("TRANSFORMER_BASED_WRAP", None), "layers are wrapped one by one"),
    "fsdp_state_dict_type": (
        ("SHARDED_STATE_DICT", "FULL_STATE_DICT", None),
        "checkpoints have one form for every strategy",
    ),
    "fsdp_cpu_ram_efficient_loading": (
        (True, False, None),
        "every rank reads the weights itself, which is safe for quantised and tied ones",
    ),
    "fsdp_offload_params": ((False, None), "offloading is done by ZeRO-3 (`deepspeed/zero3_offload.json`)"),
    "fsdp_use_orig_params": ((True, None), "FSDP2 always keeps the original parameters"),
    "fsdp_sync_module_states": ((True, None), "all ranks start from the same weights"),
    "fsdp_backward_prefetch": (("BACKWARD_PRE", "NO_PREFETCH", None), "FSDP2 has no such setting"),
    "fsdp_forward_prefetch": ((False, None), "FSDP2 has no such setting"),
}
WITHOUT_EFFECT = (("fsdp_state_dict_type", "FULL_STATE_DICT"), ("fsdp_cpu_ram_efficient_loading", True))


@dataclass(frozen=True, kw_only=True, slots=True)
class AccelerateChoices:
    """The decisions of an accelerate config; `None` or empty where it decides nothing."""

    path: Path | None = None
    strategy: CommandStrategy | None = None
    num_gpus: int | None = None
    """Processes on this machine."""
    num_nodes: int | None = None
    node_rank: int | None = None
    master_address: str | None = None
    master_port: int | None = None
    deepspeed: UserDeepSpeed | None = None
    fsdp: Mapping[str, Any] = field(default_factory=dict)
    cpu: bool = False
    """Whether it asks to ignore GPUs."""
    train: Mapping[str, Any] = field(default_factory=dict)
    """Values of `train.` keys: `bf16`, `fp16`, `gradient_checkpointing`."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Their lines."""
    notices: tuple[str, ...] = ()


def machines_and_strategy(path: Path) -> tuple[int, str]:
    """Return the number of machines in a file, and its strategy unless that is plain data parallelism.

    A file that cannot be read counts as one machine without a strategy.
    """
    try:
        settings = read_plain_yaml(path)
    except UserError:
        settings = None
    if not isinstance(settings, dict):
        return 1, ""
    machines, kind = settings.get("num_machines"), str(settings.get("distributed_type", "NO"))
    return machines if type(machines) is int else 1, "" if STRATEGIES.get(kind) in ("single", "ddp") else kind


def read_accelerate_config(path: Path) -> AccelerateChoices:
    """Return the choices in `path`, whose every key is used, has no other meaning for us, or is refused.

    Raise `UserError` with all refused keys.
    """
    source = read_yaml(path)
    settings = source.plain()
    if not isinstance(settings, dict):
        raise UserError("is not an accelerate config", place=str(path), hint="`make setup-accelerate` writes one")
    problems: list[UserError] = []

    def refuse(key: str, text: str, hint: str | None = None) -> None:
        problems.append(UserError(text, place=source.place(path, key), hint=hint))

    _check_types(source, settings, refuse)
    kind = str(settings.get("distributed_type"))
    for old in sorted(settings.keys() & PRECISIONS.keys()):  # accelerate still reads it
        means = old if settings.pop(old) is True else "no"
        refuse(
            old, f"`{old}` is the old spelling of `mixed_precision`", f"write `mixed_precision: '{means}'` in its place"
        )
    notices = _take_empty(settings)
    _check(settings, "", ONLY, {key for key in TAKEN if "." not in key}, refuse)
    processes, machines = settings.get("num_processes"), settings.get("num_machines") or 1
    if processes is not None and processes % machines:
        text = (
            f"`num_processes` is {processes} for {machines} machines; expected a multiple, the same number on every"
            " machine"
        )
        refuse("num_processes", text)
    if settings.get("num_machines") and (rank := settings.get("machine_rank") or 0) >= machines:
        refuse("machine_rank", f"`machine_rank` is {rank}; expected 0 to {machines - 1}, by `num_machines: {machines}`")
    mixed = settings.get("mixed_precision")
    if mixed is True:
        refuse("mixed_precision", "`mixed_precision` is `true`; expected `no`, `bf16` or `fp16`")
    train: dict[str, Any] = {} if mixed is None else {"bf16": mixed == "bf16", "fp16": mixed == "fp16"}
    deepspeed, fsdp = None, {}
    try:
        node = source.value.get("deepspeed_config", YamlNode({}))
        deepspeed = _deepspeed(path, settings.get("deepspeed_config") or {}, node, kind, refuse)
    except UserError as error:
        problems += getattr(error, "problems", [error])
    if kind == "FSDP":
        fsdp = _fsdp(settings.get("fsdp_config") or {}, train, notices, refuse)
    elif settings.get("fsdp_config"):
        _refuse_section("fsdp_config", "FSDP", kind, refuse)
    raise_all(problems)
    several = machines > 1
    return AccelerateChoices(
        path=path,
        strategy=STRATEGIES[kind],
        num_gpus=processes and processes // machines,
        num_nodes=settings.get("num_machines"),
        node_rank=settings.get("machine_rank") if several else None,
        master_address=settings.get("main_process_ip") if several else None,
        master_port=settings.get("main_process_port") or None,
        deepspeed=deepspeed,
        fsdp=fsdp,
        cpu=settings.get("use_cpu") is True or kind == "MULTI_CPU",
        train=train,
        places={key: source.place(path, FROM_FILE[key]) for key in train},
        notices=tuple(notices),
    )


Refuse = Callable[..., None]


def _check_types(source: YamlNode, settings: dict[str, Any], refuse: Refuse) -> None:
    """Refuse values of a wrong type, and set them to `None`, so that later checks can rely on types."""
    for dotted, annotation in TAKEN.items():
        section, _, key = dotted.rpartition(".")
        values: Any = settings.get(section) if section else settings
        if isinstance(values, dict):
            holder, problems = source.value[section] if section else source, list[Mismatch]()
            value = convert(holder.value.get(key, YamlNode(None)), annotation, dotted, problems)
            for problem in problems:
                refuse(dotted, f"`{problem.key}` {problem.problem}", problem.hint)
            if key in values:
                values[key] = None if value is INVALID else value


def _check(section: Mapping[str, Any], prefix: str, only: Only, read: Set[str], refuse: Refuse) -> None:
    """Refuse unknown keys of a section, and values other than the allowed ones in `only`."""
    for key, value in section.items():
        if key in only and value not in only[key][0]:
            refuse(f"{prefix}{key}", f"`{prefix}{key}` is `{value}`: {only[key][1]}")
    names = sorted(read | only.keys())
    if unknown := sorted(section.keys() - read - only.keys(), key=str):
        listed = ", ".join(f"`{prefix}{key}`" for key in unknown)
        close = [word for key in unknown if (word := closest_word(str(key), names))]
        meant = f"did you mean {', '.join(f'`{prefix}{word}`' for word in close)}?"
        refuse(f"{prefix}{unknown[0]}", f"keys that are not understood: {listed}", meant if close else "take them out")


def _take_empty(settings: dict[str, Any]) -> list[str]:
    """Take out top-level keys that are not used and ask for nothing; return a notice on each."""
    empty = []
    for key, value in settings.items():
        allowed = ONLY.get(key, ((), ""))[0]
        if key not in TAKEN and value not in allowed and {} in (allowed or NOTHING) and _asks_nothing(value):
            empty.append(key)
    for key in empty:
        del settings[key]
    return [f"`{key}` has no effect here" for key in empty]


def _asks_nothing(value: Any) -> bool:
    return all(map(_asks_nothing, value.values())) if isinstance(value, dict) else value in (*NOTHING, "no", "NO")


def _refuse_section(section: str, of: str, kind: str, refuse: Refuse) -> None:
    text = f"`{section}` is given, but `distributed_type` is `{kind}`"
    refuse(section, text, f"make it `{of}` or take the section out")


def _deepspeed(
    path: Path, section: Mapping[str, Any], node: YamlNode, kind: str, refuse: Refuse
) -> UserDeepSpeed | None:
    if kind != "DEEPSPEED":
        if section:
            _refuse_section("deepspeed_config", "DEEPSPEED", kind, refuse)
        return None
    _check(section, "deepspeed_config.", DEEPSPEED_ONLY, {"deepspeed_config_file", *DEEPSPEED_KEYS}, refuse)
    if (file := section.get("deepspeed_config_file")) is not None:
        for key in sorted(section.keys() & DEEPSPEED_KEYS.keys()):
            dotted = f"deepspeed_config.{key}"
            refuse(dotted, f"`{dotted}` is next to `deepspeed_config_file`, of which accelerate uses only the file")
        if not Path(file).is_file():
            hint = "accelerate resolves a path from the folder in which it is started, here that of `make`"
            refuse(
                "deepspeed_config.deepspeed_config_file",
                f"`deepspeed_config_file` is `{file}`, and there is no such file",
                hint,
            )
            return None
        return load_user_json(Path(file))
    value: dict[str, Any] = {"zero_optimization": {"stage": 2}}
    written = YamlNode({}, line=node.line)
    for key, dotted in DEEPSPEED_KEYS.items():
        if section.get(key) not in (None, "none"):
            target, around = value, written
            *parents, leaf = dotted.split(".")
            for parent in parents:
                target = target.setdefault(parent, {})
                around = around.value.setdefault(parent, YamlNode({}, line=node.line))
            target[leaf], around.value[leaf] = section[key], node.value[key]
    return check_settings(value, written, path)


def _fsdp(section: Mapping[str, Any], train: dict[str, Any], notices: list[str], refuse: Refuse) -> dict[str, Any]:
    version = section.get("fsdp_version", "missing, which means 1")
    if version != 2:  # keys have other meanings in version 1
        hint = "run `accelerate config` again, or write `fsdp_version: 2`"
        refuse("fsdp_config", f"`fsdp_config.fsdp_version` is {version}; only FSDP2 is supported", hint)
        return {}
    _check(section, "fsdp_config.", FSDP_ONLY, FSDP_READ, refuse)
    for key, value in WITHOUT_EFFECT:
        if section.get(key) == value:
            notices.append(f"`{key}: {value}` has no effect here: {FSDP_ONLY[key][1]}")
    passed = {key: section[key] for key in FSDP_READ if section.get(key) is not None}
    if passed.pop(LAYERS, None):
        notices.append(f"`{LAYERS}` has no effect here: the model itself names its layers")
    if "fsdp_activation_checkpointing" in passed:
        train["gradient_checkpointing"] = passed.pop("fsdp_activation_checkpointing")
    return passed


def accelerate_settings(
    *, strategy: Strategy, device: str, precision: Precision, processes: int, node: Node, deepspeed_file: Path | None
) -> dict[str, Any]:
    """Return the content of an accelerate config file for `processes` in total on `node.count` machines."""
    several, zero = node.count > 1, strategy.startswith("zero")
    in_that_file = deepspeed_file is not None  # precision, stage and offload, which accelerate refuses in both
    facts = {
        "distributed_type": DISTRIBUTED_TYPE[strategy],
        "machines": node.count,
        "processes": processes,
        "use_cpu": device == "cpu" and strategy == "single",
        "master": node.master_address if several else None,
        "rendezvous": "static" if several else None,
        "several": several or None,
        "port": (node.workers_port or node.master_port or None) if processes > 1 else None,
        "zero": zero,
        "deepspeed_file": str(deepspeed_file) if in_that_file else None,
        "stage": int(strategy[-1]) if zero and not in_that_file else None,
        "init_flag": strategy == "zero3",
        "mixed_precision": None if in_that_file else "no" if precision == "fp32" else precision,
        "fsdp": strategy == "fsdp2",
    }
    return dict(fill(read_plain_yaml(TEMPLATES / "accelerate.yaml"), facts))


def accelerate_yaml(plan: Plan, node: Node, run: RunFolder, *, fsdp: Mapping[str, Any]) -> str:
    """Return the text of a run's `accelerate.yaml`; `fsdp` has the different settings of a user's accelerate config."""
    settings = accelerate_settings(
        strategy=plan.strategy,
        device=plan.device,
        precision=plan.precision,
        processes=plan.world_size,
        node=node,
        deepspeed_file=run.deepspeed if plan.zero else None,
    )
    if plan.strategy == "fsdp2":
        settings["fsdp_config"] |= fsdp
    return "# Rendered by SFT-Play for this run; `accelerate launch --config_file` reads it.\n" + dump_yaml(settings)


def main(call: Call) -> int:
    """Write the config file for this machine, and print the choices; return 0. Raise `UserError` or `HardwareError`."""
    path = typed_path(call.options.get("OUT") or DEFAULT_OUT)
    require_ours(path, WRITTEN, call.command)
    hardware, reasons = detect(), list[str]()
    num_gpus, num_nodes = _processes(call, hardware, reasons)
    precision = _precision(call.options.get("MIXED_PRECISION"), hardware, reasons)
    strategy = _strategy(call.options.get("STRATEGY"), num_gpus * num_nodes, reasons)
    content = accelerate_settings(
        strategy=strategy,
        device=hardware.kind,
        precision=precision,
        processes=num_gpus * num_nodes,
        node=Node(count=num_nodes, master_port=PORT if num_nodes > 1 else 0),
        deepspeed_file=None,  # the stage is enough to render a run's DeepSpeed JSON
    )
    if num_nodes > 1:  # these differ between machines, and are options of the command
        del content["main_process_ip"], content["machine_rank"]
    write_text(path, f"{WRITTEN}; used by runs with ACCELERATE_CONFIG=<this file>.\n{dump_yaml(content)}")
    if call.json:
        print(json.dumps({"path": str(path), "settings": content, "reasons": reasons}, indent=2))
    else:
        print("\n  ".join([f"wrote {path}", *reasons]))
        use = f"make {command_of(strategy)} CONFIG=quickstart ACCELERATE_CONFIG={path}"
        print(typed_here(f"it is used only where you name it: {use}"))
    return 0


def require_ours(path: Path, mark: str, command: str) -> None:
    """Raise `UserError` if `path` is a file that `command`, which writes `mark` at the top, did not write."""
    try:
        with open_plain(path, follow=True) as file:
            ours = mark.encode() in file.read(300)
    except OSError:  # writing the file will report the problem
        return
    if not ours:
        raise UserError(
            f"`{path}` exists and was not written by `make {command}`",
            place="OUT",
            hint="choose another OUT=, or remove it",
        )


def _processes(call: Call, hardware: Hardware, reasons: list[str]) -> tuple[int, int]:
    """Return the number of processes per machine, and of machines."""
    cuda = hardware.kind == "cuda"
    available = len(hardware.devices) if cuda else hardware.cpu_threads
    names = ", ".join(sorted({device.name for device in hardware.devices}))
    what = names if cuda else f"a CPU with {available} threads"
    typed, nodes = call.integer("NUM_GPUS", minimum=1), call.integer("NUM_NODES", minimum=1)
    if typed and cuda and typed > available:
        raise HardwareError(
            f"`NUM_GPUS` is {typed}, but this machine has {available}: {what}", hint=f"NUM_GPUS=1 to {available}"
        )
    number = typed or (available if cuda else min(2, available))
    kind = ("GPU", "GPUs") if cuda else ("process on the CPU", "processes on the CPU")
    reasons.append(f"{number} {kind[number > 1]}: {'NUM_GPUS' if typed else f'this machine has {what}'}")
    reasons.append(f"{plural(nodes or 1, 'machine')}: {'NUM_NODES' if nodes else 'none other was named'}")
    return number, nodes or 1


def _precision(typed: str | None, hardware: Hardware, reasons: list[str]) -> Precision:
    cuda, without = hardware.kind == "cuda", sorted({device.name for device in hardware.devices if not device.bf16})
    if typed is not None and typed not in PRECISIONS:
        raise UserError(f"`MIXED_PRECISION` is `{typed}`; expected `no`, `bf16` or `fp16`")
    if (typed == "bf16" and cuda and without) or (typed == "fp16" and not cuda):
        text = f"`MIXED_PRECISION` is `{typed}`, which {', '.join(without) if cuda else 'CPUs'} cannot train in"
        raise HardwareError(text, hint="omit it, or MIXED_PRECISION=no")
    if typed is not None:
        chosen, why = typed, "MIXED_PRECISION"
    elif not cuda:
        chosen, why = "no", "on a CPU fp32 is exact, and most have no faster type"
    else:
        chosen, why = ("fp16", "a GPU here lacks bf16") if without else ("bf16", "every GPU computes in bf16")
    reasons.append(f"mixed precision {chosen}: {why}")
    return PRECISIONS[chosen]


def _strategy(typed: str | None, world: int, reasons: list[str]) -> Strategy:
    strategies: Mapping[str, Strategy] = {name: name for name in DISTRIBUTED_TYPE}
    if typed is not None and typed not in strategies:
        raise UserError(f"`STRATEGY` is `{typed}`; expected one of {', '.join(f'`{name}`' for name in strategies)}")
    if typed is not None and (typed == "single") != (world == 1):
        text = f"`STRATEGY` is `{typed}`, and the number of processes is {world}"
        raise UserError(text, hint="omit it; or STRATEGY=single for one process, another one for NUM_GPUS=2 and more")
    unasked = ("single", "one process") if world == 1 else ("ddp", "the simplest; a plan says when it does not fit")
    chosen, why = unasked if typed is None else (typed, "STRATEGY")
    reasons.append(f"strategy {chosen}: {why}")
    return strategies[chosen]
