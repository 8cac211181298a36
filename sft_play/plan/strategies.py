"""The strategy of a run: that of its command, and what `auto` turns to when a replica does not fit. Pure.

`auto` tries in this order: DDP, with recomputed activations if necessary; FSDP2 shards; where these do not fit or the
network between ranks is slow, slices of sequences or layers within a machine, or a pipeline; on one machine, 8-bit
optimizer states; ZeRO-3 with everything offloaded, where host memory holds it. Weights never travel over a slow network
unless the user asks for it. Machines that have not met keep their strategy: each plans by itself, from its own memory,
and all must arrive at the same run. A typed `tuning.mode` is never quantised; quantisation is only proposed.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from sft_play.config.rules import network_keys
from sft_play.config.schema import Config, LoraSettings, TuningConfig
from sft_play.errors import HardwareError, UserError
from sft_play.plan.hardware import GIB
from sft_play.plan.memory import host_bytes
from sft_play.plan.network import (
    GATHERING,
    check_gathering,
    gathering_arithmetic,
    have_nvlink,
    may_quantise,
    slow_network,
)
from sft_play.plan.plan import COMMANDS, LaunchRequest, Plan, Setup, Strategy, command_of
from sft_play.plan.ranks import visible_variable
from sft_play.plan.request import Decide, DoesNotFitError, Request, try_plan
from sft_play.runs.adapters import MUTATING, embeddings_of

HOST_SHARE = 0.8
"""Share of host memory that offloading may take."""
SMALL_OPTIMIZER = "adamw_bnb_8bit"


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
    if configured != "auto" and not obeys.get(command, True):
        matching = "train-distributed" if configured in ("ddp", "pipeline") else command_of(configured)
        here = "`ACCELERATE_CONFIG` asks for `ddp`" if command == "ddp" else f"`make {COMMANDS[command]}` was called"
        raise UserError(
            f"`launch.strategy` is `{configured}`, but {here}",
            hint=f"use `make {matching}`, or set `launch.strategy: auto`",
        )
    if command == "zero" and launch.zero_stage:
        chosen, why = f"zero{launch.zero_stage}", "the DeepSpeed JSON's stage"
    elif command == "zero":
        chosen, why = ("zero2", "`make train-deepspeed`") if configured == "auto" else (configured, "`launch.strategy`")
    elif command == "fsdp2":
        chosen, why = "fsdp2", "`make train-fsdp`"
    elif configured == "pipeline" and command in ("auto", "ddp"):
        chosen, why = "ddp", f"a pipeline of {request.stages} stages (`launch.strategy: pipeline`)"
    elif command == "single" or (len(request.ranks.devices) == 1 and configured in ("auto", "ddp")):
        chosen, why = "single", "one process"
    elif configured == "auto":
        chosen, why = "ddp", "each rank holds a complete replica, and only gradients are exchanged"
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
    if conflict := conflict_for(config.tuning, strategy, len(config.data.new_tokens)):
        raise UserError(conflict)
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
    if config.train.spike_guard == "skip" and chosen.startswith("zero"):
        raise UserError(
            f"`train.spike_guard` is `skip`, but under {chosen} DeepSpeed makes the update before its gradient norm is"
            " known",
            hint="TRAIN_SPIKE_GUARD=report, or skip updates with `make train-distributed` or `make train-fsdp`",
        )
    profile = config.train.profile
    if profile.memory and hardware.kind == "cpu":
        raise UserError("`train.profile.memory` records allocations of GPUs, and this plan has none", hint="omit it")
    if absent := [rank for rank in profile.ranks if rank >= world]:
        raise UserError(f"`train.profile.ranks` names rank {absent[0]}, but the ranks are 0 to {world - 1}")
    if chosen not in ("single", "ddp") and (changed := network_keys(config)):
        key, value = changed[0]
        raise UserError(
            f"`{key}` is {value}, but {chosen} has its own way to exchange",
            hint=f"use `make train-distributed`, where every rank holds a replica, or omit `{key}`",
        )


def settle(
    request: Request, setup: Setup, fitting: tuple[int, ...], decide: Decide, reasons: dict[str, str]
) -> Plan | tuple[Setup, tuple[int, ...]]:
    """Return setup and rows per rank when they fit, or the plan of another strategy that `auto` chooses when not.

    `fitting` is the number of rows that each rank's memory holds. Raise `DoesNotFitError`.
    """
    config, launch = request.config, request.launch
    one_machine = launch.num_nodes == 1 and not slow_network(request)
    too_large = min(fitting) < request.required_rows
    may_change = (
        is_automatic(config, launch) and setup.strategy == "ddp" and setup.copies == setup.sequence_parallel == 1
    )
    may_change = may_change and not network_keys(config)
    sharded: Plan | DoesNotFitError | None = None
    all_known = request.hardware.described or launch.node_devices
    if may_change and too_large and (launch.num_nodes == 1 or all_known):
        sharded = _share_model(request, setup, fitting, decide)
    if isinstance(sharded, Plan):
        return sharded
    # Several nodes plan by themselves, and with different optimizers they would train different models.
    if one_machine and too_large and config.train.optim == "auto":
        setup, fitting = _small_optimizer(request, setup, fitting, reasons)
    if (
        may_change
        and one_machine
        and min(fitting) < request.required_rows
        and (offloaded := _offload(request, setup, fitting, decide))
    ):
        return offloaded
    try:
        request.require(setup, fitting)
    except DoesNotFitError as error:
        raise _refusal(request, error, sharded, fitting) from None
    check_gathering(request, setup)
    network = slow_network(request)
    if setup.strategy in GATHERING and network:
        who = "`launch.strategy`" if config.launch.strategy != "auto" else "the command"
        smaller = "TUNING_MODE=qlora, " if may_quantise(config) else ""
        reasons["slow"] = (
            f"SLOW: {who} forces {setup.strategy} over {network}: {gathering_arithmetic(request, setup)}. Replicas"
            f" (`ddp`) would send gradients alone: {smaller}shorter rows or a smaller model make them fit. A pipeline"
            " (`LAUNCH_STRATEGY=pipeline`) sends hidden states alone"
        )
    return setup, fitting


def is_automatic(config: Config, launch: LaunchRequest) -> bool:
    """Return whether the strategy is left to the plan."""
    return launch.command_strategy == "auto" and config.launch.strategy == "auto"


def _share_model(
    request: Request, setup: Setup, fitting: tuple[int, ...], decide: Decide
) -> Plan | DoesNotFitError | None:
    """Return the plan of the first way to share the model, or its rows, that fits; otherwise FSDP2's error, if any."""
    replica, network = _replica(request, setup, fitting), slow_network(request)
    shards = None if network else _shards(request, decide)
    if isinstance(shards, Plan):
        why = f"{replica}, so weights are sharded{_if_quantised(request, setup)}"
        return _rename_strategy(shards, shards.strategy, why)
    for way, changed in _ways(request):
        plan = try_plan(request, changed, decide)
        if isinstance(plan, Plan):
            why = f"{way}, since {replica}"
            if network:
                why += f"; fsdp2 over {network}: {gathering_arithmetic(request, replace(setup, strategy='fsdp2'))}"
            elif shards:
                why += f"; with weights sharded by fsdp2 still {shards.need_bytes / GIB:.1f} GiB"
            return _rename_strategy(plan, plan.strategy, why)
    return shards


def _ways(request: Request) -> Iterator[tuple[str, Request]]:
    """Yield requests whose neighbouring ranks share sequences, layers or the model, in the order in which to try them.

    Of the ways that involve all ranks in each layer, slices of sequences send least. Slices of layers need NVLink;
    without it a pipeline, which sends only hidden states, is better.
    """
    near, linked = math.gcd(*request.ranks.nodes), have_nvlink(request.ranks.devices)
    sizes = [size for size in range(2, near + 1) if near % size == 0]
    lines, layers = (
        [(f"{key} {size}", request.with_keys({f"launch.{key}": size})) for size in sizes]
        for key in ("sequence_parallel", "tensor_parallel")
    )
    pipeline = [("pipeline", request.with_keys({"launch.strategy": "pipeline"}))]
    yield from (*lines, *layers, *pipeline) if linked else (*lines, *pipeline, *layers)


def _shards(request: Request, decide: Decide) -> Plan | DoesNotFitError | None:
    """Return a plan under FSDP2, the error where it does not fit, or `None` if it is refused for another reason."""
    if conflict_for(request.config.tuning, "fsdp2", len(request.config.data.new_tokens)):
        return None
    try:
        return decide(replace(request, launch=replace(request.launch, command_strategy="fsdp2")))
    except DoesNotFitError as error:
        return error
    except HardwareError:
        return None


def _if_quantised(request: Request, setup: Setup) -> str:
    """Return a note that quantised weights would fit on each rank; empty if they would not."""
    if setup.device != "cuda" or not may_quantise(request.config):
        return ""
    quantising = request.with_keys({"tuning.mode": "qlora"})
    frozen = "bfloat16" if setup.precision == "bf16" else "float16"
    case = replace(setup, weights_dtype=frozen, gradient_checkpointing=True)
    quantised = quantising.need(case, request.required_rows)
    return (
        f" (TUNING_MODE=qlora would fit on each rank: {quantised / GIB:.1f} GiB)"
        if quantised <= min(request.room)
        else ""
    )


def _small_optimizer(
    request: Request, setup: Setup, fitting: tuple[int, ...], reasons: dict[str, str]
) -> tuple[Setup, tuple[int, ...]]:
    """Return setup and rows with 8-bit Adam where that makes the run fit."""
    replicas = setup.device == "cuda" and not setup.sharded and setup.optim.startswith("adamw_torch")
    if not replicas or not (request.hardware.described or has_bitsandbytes()):
        return setup, fitting
    smaller, required = replace(setup, optim=SMALL_OPTIMIZER), request.required_rows
    rows = request.largest(smaller)
    if min(rows) < required:
        return setup, fitting
    room = request.room[fitting.index(min(fitting))]
    before, after = (request.parts(case, required).get("optimizer", 0) / GIB for case in (setup, smaller))
    reasons["optimizer"] = (
        f"optimizer {SMALL_OPTIMIZER}: with {setup.optim} a rank needs {request.need(setup, required) / GIB:.1f} of"
        f" {room / GIB:.1f} GiB; 8-bit states take {after:.1f} GiB instead of {before:.1f}"
    )
    return smaller, rows


def _offload(request: Request, setup: Setup, fitting: tuple[int, ...], decide: Decide) -> Plan | None:
    """Return a plan under ZeRO-3 with all states in host memory, where they fit into it."""
    config, hardware = request.config, request.hardware
    # Offloading a quantised base was never tried.
    if setup.device != "cuda" or config.tuning.mode == "qlora" or config.tuning.backend == "unsloth":
        return None
    if not hardware.ram_known or not (hardware.described or importlib.util.find_spec("deepspeed")):
        return None
    offloading = replace(setup, strategy="zero3", offload_optimizer=True, offload_parameters=True)
    need = setup.world_size * host_bytes(config, request.shape, offloading, request.required_rows)
    if need > HOST_SHARE * hardware.ram_bytes:
        return None
    launch = replace(
        request.launch, command_strategy="zero", zero_stage=3, offload_optimizer=True, offload_parameters=True
    )
    why = f"{_replica(request, setup, fitting)} and shards do not fit either, so this machine's memory holds them: "
    why += f"{need / GIB:.1f} of {hardware.ram_bytes / GIB:.1f} GiB; slow"
    try:
        return _rename_strategy(decide(replace(request, launch=launch)), "zero3", why)
    except HardwareError:
        return None


def _refusal(
    request: Request, error: DoesNotFitError, sharded: DoesNotFitError | None, fitting: tuple[int, ...]
) -> DoesNotFitError:
    """Return the error of the attempt that came nearest to fitting, with notes on this hardware.

    `sharded` is the error of what `auto` tried instead of replicas.
    """
    hardware, setup, notes = request.hardware, error.setup, []
    whole = [index for index, rows in enumerate(fitting) if rows >= error.micro_batch]
    if whole and request.launch.num_nodes == 1 and hardware.kind == "cuda" and not hardware.described:
        notes.append(f"{visible_variable(hardware, whole)}: {len(whole)} of {setup.world_size} GPUs hold it")
    network = slow_network(request)
    if network and setup.strategy not in GATHERING:
        unasked = (
            "`auto` does not shard weights"
            if is_automatic(request.config, request.launch)
            else "weights are not sharded"
        )
        allowed = " LAUNCH_SLOW_NETWORK=allow" if hardware.network_bytes_per_second else ""
        why = f"{unasked} over {network}: {gathering_arithmetic(request, replace(setup, strategy='fsdp2'))}"
        notes.append(f"{why}; LAUNCH_STRATEGY=fsdp2{allowed} forces it")
    if sharded and sharded.need_bytes - sharded.capacity_bytes < error.need_bytes - error.capacity_bytes:
        after = f", with weights sharded by fsdp2; a complete replica needs {error.need_bytes / GIB:.1f} GiB"
        return sharded.add(notes=tuple(notes), after=after)
    return error.add(notes=tuple(notes))


def _replica(request: Request, setup: Setup, fitting: tuple[int, ...]) -> str:
    need, room = request.need(setup, request.required_rows), request.room[fitting.index(min(fitting))]
    return f"a complete replica on each needs {need / GIB:.1f} of {room / GIB:.1f} GiB"


def _rename_strategy(plan: Plan, strategy: str, why: str) -> Plan:
    """Return the plan with `why` as the reason of its strategy."""
    return replace(plan, reasons={**plan.reasons, "strategy": f"strategy {strategy}: {why}"})


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
