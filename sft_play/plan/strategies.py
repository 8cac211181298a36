"""The strategy of a run by its command and configuration, and what cannot be combined with it. Pure."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import cast

from sft_play.config.rules import network_keys
from sft_play.config.schema import Config, LoraSettings, TuningConfig
from sft_play.errors import HardwareError, UserError
from sft_play.plan.plan import COMMANDS, LaunchRequest, Strategy, command_of
from sft_play.plan.request import Request
from sft_play.runs.adapters import MUTATING, embeddings_of


def choose_strategy(request: Request, reasons: dict[str, str]) -> Strategy:
    """Return the strategy of a command. Raise `UserError` if the configuration contradicts it."""
    config, launch = request.config, request.launch
    configured, command = config.launch.strategy, launch.command_strategy
    obeys = {
        "single": not request.typed("launch.strategy"),
        "ddp": configured in ("ddp", "pipeline"),
        "zero": configured.startswith("zero"),
        "fsdp2": configured == "fsdp2",
    }
    of_file = "strategy" in launch.by_accelerate
    if configured != "auto" and not obeys.get(command, True):
        matching = "train-distributed" if configured in ("ddp", "pipeline") else command_of(configured)
        here = f"`ACCELERATE_CONFIG` asks for `{command}`" if of_file else f"`make {COMMANDS[command]}` was called"
        raise UserError(
            f"`launch.strategy` is `{configured}`, but {here}",
            hint=f"use `make {matching}`, or set `launch.strategy: auto`",
        )
    if command == "zero" and launch.zero_stage:
        chosen, why = f"zero{launch.zero_stage}", "the DeepSpeed JSON's stage"
    elif command == "zero":
        chosen, why = ("zero2", "`make train-deepspeed`") if configured == "auto" else (configured, "`launch.strategy`")
    elif command == "fsdp2":
        chosen, why = "fsdp2", "the accelerate config" if of_file else "`make train-fsdp`"
    elif configured == "pipeline" and command in ("auto", "ddp"):
        chosen, why = "ddp", f"a pipeline of {request.stages} stages (`launch.strategy: pipeline`)"
    elif command == "single" or (len(request.ranks.devices) == 1 and configured in ("auto", "ddp")):
        chosen, why = "single", "one process"
    elif configured == "auto":
        steps = config.launch.local_steps
        exchanged = "only gradients are exchanged" if steps == 1 else f"weights are averaged every {steps} steps"
        chosen, why = "ddp", f"each rank holds a complete replica, and {exchanged}"
    else:
        chosen, why = configured, "`launch.strategy`"
    reasons["strategy"] = f"strategy {chosen}: {why}"
    if config.tuning.backend == "unsloth" and request.hardware.kind == "cpu":
        reasons["unsloth"] = "unsloth has no kernels for CPUs: transformers and PEFT compute, row by padded row (slow)"
    _check(request, chosen)
    return cast(Strategy, chosen)


def _check(request: Request, chosen: str) -> None:
    """Raise `UserError` for settings that conflict with a strategy, `HardwareError` for a missing package."""
    config, hardware, world = request.config, request.hardware, len(request.ranks.devices)
    tensor = config.launch.tensor_parallel
    quantises = config.tuning.mode == "qlora" and config.tuning.backend == "bnb"  # Unsloth has a separate environment
    # What is installed here says nothing about a machine that is only described.
    if quantises and not hardware.described and not has_bitsandbytes():
        raise HardwareError("`tuning.backend: bnb` needs the package `bitsandbytes`, which is missing")
    strategy = "pipeline" if chosen == "ddp" and config.launch.strategy == "pipeline" else chosen
    tuning, base = config.tuning, request.shape.quantization
    if base:
        _check_quantised(config, base)
        tuning = replace(tuning, mode="qlora", quantization="int8" if base.endswith("int8") else "nf4")
    if conflict := conflict_for(tuning, strategy, len(config.data.new_tokens)):
        raise UserError(f"the base model is quantised ({base}). {conflict}" if base else conflict)
    if tensor > 1 and chosen.startswith("zero"):
        raise UserError(
            f"`launch.tensor_parallel` is {tensor}, but {chosen} shards the weights itself",
            hint="use `make train-distributed` or `make train-fsdp`, or LAUNCH_TENSOR_PARALLEL=1",
        )
    columns = request.shape.heads * request.shape.head_dim, request.shape.ffn_size
    if tensor > 1 and chosen == "fsdp2" and any(width % world for width in columns):
        raise UserError(
            f"`launch.tensor_parallel` with fsdp2 divides columns among all {world} ranks, and {columns[0]} of"
            f" attention or {columns[1]} of the feed-forward layers cannot be divided evenly",
            hint="a number of ranks that divides both, or LAUNCH_STRATEGY=ddp",
        )
    if absent := [rank for rank in config.train.profile.ranks if rank >= world]:
        raise UserError(f"`train.profile.ranks` names rank {absent[0]}, but the ranks are 0 to {world - 1}")
    if chosen not in ("single", "ddp") and (changed := network_keys(config)):
        key, value = changed[0]
        raise UserError(
            f"`{key}` is {value}, but {chosen} has its own way to exchange",
            hint=f"use `make train-distributed`, where every rank holds a replica, or omit `{key}`",
        )


def _check_quantised(config: Config, base: str) -> None:
    """Raise `UserError` for a base that is quantised by another library than bitsandbytes, and for full tuning."""
    if config.tuning.mode == "full":
        raise UserError(
            f"the base model is quantised ({base}), and `tuning.mode: full` cannot train quantised weights",
            hint="use `tuning.mode: qlora`, or the model's unquantised version",
        )
    if not base.startswith("bitsandbytes"):
        raise UserError(
            f"the base model is quantised by `{base}`, and adapters over such a base are not supported",
            hint="use the model's unquantised version; `tuning.mode: qlora` quantises it",
        )


def is_automatic(config: Config, launch: LaunchRequest) -> bool:
    """Return whether the strategy is left to the plan."""
    return launch.command_strategy == "auto" and config.launch.strategy == "auto"


def has_bitsandbytes() -> bool:
    """Return whether bitsandbytes is installed."""
    return importlib.util.find_spec("bitsandbytes") is not None


def conflict_for(tuning: TuningConfig, strategy: str, new_tokens: int = 0) -> str | None:
    """Return why this backend, quantisation or adapter cannot be combined with a strategy, or `None` if it can.

    `strategy` is `single`, `ddp`, `zero1` to `zero3`, `fsdp2` or `pipeline`. The reasons were measured with the
    pinned versions, as docs/models.md describes.
    """
    backend, int8 = tuning.backend, tuning.mode == "qlora" and tuning.quantization == "int8"
    if backend == "unsloth" and strategy not in ("single", "ddp"):
        return (
            f"`tuning.backend: unsloth` cannot be combined with `{strategy}`: Unsloth replaces the model's forward pass"
            " with kernels that need complete weights on every GPU. It allows one GPU, or `ddp` with a copy on each"
        )
    shape = tuning.lora if tuning.mode != "full" else LoraSettings()
    if shape.init in MUTATING and strategy in ("zero3", "pipeline"):
        return (
            f"`tuning.lora.init: {shape.init}` cannot be combined with `{strategy}`: it decomposes complete weights,"
            " which no rank holds there. Use `ddp`, `zero2` or `fsdp2`"
        )
    if shape.modules_to_save and strategy == "pipeline":
        return "`tuning.lora.modules_to_save` cannot be combined with `pipeline`: a stage has no other stage's modules"
    rows = embeddings_of(shape, new_tokens) if tuning.mode != "full" else "none"
    if (rows == "new" and strategy in ("zero3", "fsdp2")) or (rows != "none" and strategy == "pipeline"):
        return (
            f"`{strategy}` shards the embedding, whose {rows} rows PEFT trains only in a complete one. Use `ddp` or"
            " `zero2`"
        )
    if backend == "unsloth" and int8:
        return (
            "`tuning.backend: unsloth` quantises to nf4: use `tuning.quantization: nf4`, or `tuning.backend: bnb` for"
            " int8"
        )
    if int8 and strategy == "zero3":
        return (
            "int8 and ZeRO-3 cannot be combined: bitsandbytes keeps the complete int8 weights in a second place (`CB`),"
            " so that nothing would be sharded. Use `tuning.quantization: nf4`, or `zero2`"
        )
    if int8 and strategy == "fsdp2":
        return (
            "int8 and FSDP2 cannot be combined: FSDP2 replaces each weight by a shard of it, and bitsandbytes' int8"
            " weights lose their scales by that (`'Parameter' object has no attribute 'CB'`). Use `tuning.quantization:"
            " nf4`, or `ddp`"
        )
    return None
