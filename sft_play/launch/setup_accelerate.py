"""`make setup-accelerate`: looks at the hardware, writes an accelerate config for it, and says what it chose and why."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.config.call import Call
from sft_play.config.yaml_source import dump_yaml, read_plain_yaml
from sft_play.errors import HardwareError, UserError
from sft_play.files import write_text
from sft_play.launch.environment import Node
from sft_play.launch.settings import accelerate_settings
from sft_play.plan.detect import detect
from sft_play.plan.hardware import Hardware
from sft_play.plan.plan import Precision, Strategy

DEFAULT_OUT = "accelerate_configs/local.yaml"
STRATEGIES: tuple[Strategy, ...] = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp2")
PRECISIONS: dict[str, Precision] = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
HEADER = "# Written by `make setup-accelerate`; used by runs with ACCELERATE_CONFIG=<this file>.\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """What the file will say, and why."""

    strategy: Strategy
    precision: Precision
    num_gpus: int
    """Processes on each machine."""
    num_nodes: int
    device: str
    reasons: tuple[str, ...]


def main(call: Call) -> int:
    """Writes the file; prints the choices, or JSON."""
    path = Path(call.options.get("OUT") or DEFAULT_OUT)
    require_replaceable(path)
    choices = choose(call, detect())
    content = settings(choices)
    write_text(path, HEADER + dump_yaml(content))
    if call.json:
        print(json.dumps({"path": str(path), "settings": content, "reasons": list(choices.reasons)}, indent=2))
        return 0
    print(f"wrote {path}")
    for reason in choices.reasons:
        print(f"  {reason}")
    command = {"single": "train", "fsdp2": "train-fsdp"}.get(
        choices.strategy, "train-deepspeed" if choices.strategy.startswith("zero") else "train-distributed"
    )
    print(f"it is used only where you name it: make {command} CONFIG=... ACCELERATE_CONFIG={path}")
    return 0


def require_replaceable(path: Path) -> None:
    """Raises `UserError` where `path` holds anything but an accelerate configuration, which may be written again."""
    if not path.exists():
        return
    try:
        found = read_plain_yaml(path) if path.is_file() else None
    except UserError:
        found = None
    if not isinstance(found, Mapping) or "compute_environment" not in found:
        message = "this is no accelerate configuration, so it is not replaced"
        raise UserError(message, place=str(path), hint="name a file that does not exist with OUT=, or move this one away")


def choose(call: Call, hardware: Hardware) -> Choices:
    """Returns the choices for `hardware`; typed answers win. Raises `UserError` and `HardwareError`."""
    reasons = []
    available = len(hardware.devices) if hardware.kind == "cuda" else hardware.cpu_threads
    what = ", ".join(sorted({d.name for d in hardware.devices})) if hardware.kind == "cuda" else f"a CPU with {available} threads"
    num_nodes = call.integer("NUM_NODES", minimum=1) or 1
    typed = call.integer("NUM_GPUS", minimum=1)
    if typed and hardware.kind == "cuda" and typed > available:
        raise HardwareError(f"`NUM_GPUS` is {typed}, but this machine has {available}: {what}", hint=f"NUM_GPUS=1 to {available}")
    num_gpus = typed or (available if hardware.kind == "cuda" else min(2, available))
    kind = ("GPU", "GPUs") if hardware.kind == "cuda" else ("process on the CPU", "processes on the CPU")
    reasons.append(f"{num_gpus} {kind[num_gpus > 1]}: {'NUM_GPUS' if typed else f'this machine has {what}'}")
    reasons.append(
        f"{num_nodes} machine{'s' if num_nodes > 1 else ''}: {'NUM_NODES' if 'NUM_NODES' in call.options else 'none other was named'}"
    )
    precision = _precision(call.options.get("MIXED_PRECISION"), hardware, reasons)
    strategy = _strategy(call.options.get("STRATEGY"), num_gpus * num_nodes, reasons)
    return Choices(
        strategy=strategy,
        precision=precision,
        num_gpus=num_gpus,
        num_nodes=num_nodes,
        device=hardware.kind,
        reasons=tuple(reasons),
    )


def _precision(typed: str | None, hardware: Hardware, reasons: list[str]) -> Precision:
    bf16 = hardware.kind == "cuda" and all(device.bf16 for device in hardware.devices)
    if typed is not None:
        if typed not in PRECISIONS:
            raise UserError(f"`MIXED_PRECISION` is `{typed}`; expected `no`, `bf16` or `fp16`")
        if typed == "bf16" and hardware.kind == "cuda" and not bf16:
            names = ", ".join(sorted({d.name for d in hardware.devices if not d.bf16}))
            raise HardwareError(f"`MIXED_PRECISION` is `bf16`, which {names} cannot compute", hint="MIXED_PRECISION=fp16 or no")
        if typed == "fp16" and hardware.kind == "cpu":
            raise HardwareError("`MIXED_PRECISION` is `fp16`, which CPUs cannot train in", hint="MIXED_PRECISION=no")
        reasons.append(f"mixed precision {typed}: MIXED_PRECISION")
        return PRECISIONS[typed]
    if hardware.kind == "cpu":
        reasons.append("mixed precision no: on a CPU fp32 is exact, and most have no faster type")
        return "fp32"
    chosen: Precision = "bf16" if bf16 else "fp16"
    reasons.append(f"mixed precision {chosen}: {'every GPU computes in bf16' if bf16 else 'a GPU here lacks bf16'}")
    return chosen


def _strategy(typed: str | None, world: int, reasons: list[str]) -> Strategy:
    if typed is None:
        reasons.append(
            "strategy single: one process" if world == 1 else "strategy ddp: the simplest; a plan says when it does not fit"
        )
        return "single" if world == 1 else "ddp"
    for strategy in STRATEGIES:
        if typed == strategy:
            if world == 1 and typed != "single":
                raise UserError(
                    f"`STRATEGY` is `{typed}`, which needs at least 2 processes", hint="NUM_GPUS=2, or STRATEGY=single"
                )
            if world > 1 and typed == "single":
                raise UserError(f"`STRATEGY` is `single`, but there are {world} processes", hint="NUM_GPUS=1 NUM_NODES=1")
            reasons.append(f"strategy {typed}: STRATEGY")
            return strategy
    raise UserError(f"`STRATEGY` is `{typed}`; expected one of {', '.join(f'`{s}`' for s in STRATEGIES)}")


def settings(choices: Choices) -> dict[str, Any]:
    """Returns the file's content. ZeRO stands in it by its stage; a run's own DeepSpeed JSON is rendered from that."""
    node = Node(count=choices.num_nodes, master_address="127.0.0.1", master_port=29500 if choices.num_nodes > 1 else 0)
    content = accelerate_settings(
        strategy=choices.strategy,
        device=choices.device,
        precision=choices.precision,
        processes=choices.num_gpus * choices.num_nodes,
        node=node,
        deepspeed_file=Path("unused"),
    )
    if choices.num_nodes > 1:  # each machine's own, given with the command
        del content["main_process_ip"], content["machine_rank"]
    if choices.strategy.startswith("zero"):
        stage = int(choices.strategy[-1])
        content["deepspeed_config"] = {
            "zero_stage": stage,
            "zero3_init_flag": stage == 3,
            "deepspeed_multinode_launcher": "standard",
        }
        content["mixed_precision"] = {"fp32": "no"}.get(choices.precision, choices.precision)
    return content
