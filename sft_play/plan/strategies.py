"""How a run is shared out: the strategy of a command, and what `auto` turns to when a replica does not fit.

`auto` on one machine: DDP when a replica fits (recomputing activations if it must); else FSDP2 shards; else 8-bit optimizer states;
else ZeRO-3 with everything offloaded, where the machine's memory holds it. Over a slow network weights are never shared out unless
someone says so, and on several machines nothing is changed at all: each plans by itself, from memory of its own, and all must come
to the same run. A typed `tuning.mode` is never quantised; that is proposed. Pure.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace

from sft_play.config.rules import network_keys
from sft_play.config.schema import Config
from sft_play.errors import HardwareError, UserError
from sft_play.plan.backends import UNSLOTH_HINT, conflict_for, may_quantise, missing_for
from sft_play.plan.choices import showing
from sft_play.plan.exchange import GATHERING, gathering_passes, gathering_seconds
from sft_play.plan.fit import DoesNotFitError, Fit, wanted_rows
from sft_play.plan.hardware import GIB, Hardware
from sft_play.plan.memory import Setup, host_bytes, sent_weights
from sft_play.plan.plan import Plan, Strategy
from sft_play.plan.request import LaunchRequest
from sft_play.plan.words import figure, rate_in_words

SLOW_NETWORK = 10e9
"""Bytes per second below which weights are not shared out unasked: PCIe carries more, Ethernet mostly less."""
EXAMPLE_NETWORK = 117.5e6
"""What 1 Gbit/s carries, for the arithmetic where a network's speed is not known."""
HOST_SHARE = 0.8
"""Share of a machine's memory that offloading may take."""
SMALL_OPTIMIZER = "adamw_bnb_8bit"


def choose_strategy(
    config: Config, typed: Callable[[str], bool], request: LaunchRequest, hardware: Hardware, ranks: int, reasons: list[str]
) -> Strategy:
    """Returns the strategy of a command. Raises `UserError` where the configuration contradicts it."""
    wanted, command = config.launch.strategy, request.command_strategy
    if command == "zero":
        stage = f"zero{request.zero_stage}" if request.zero_stage else (wanted if wanted.startswith("zero") else "zero2")
        if wanted != "auto" and not wanted.startswith("zero"):
            raise _contradiction(
                "make train-deepspeed", wanted, "make train-fsdp" if wanted == "fsdp2" else "make train-distributed"
            )
        chosen: Strategy = _strategy(stage)
        reasons.append(f"strategy {chosen}: " + ("the DeepSpeed JSON's stage" if request.zero_stage else "`make train-deepspeed`"
                       if wanted == "auto" else "`launch.strategy`"))  # fmt: skip
    elif command == "fsdp2":
        if wanted not in ("auto", "fsdp2"):
            raise _contradiction(
                "make train-fsdp", wanted, "make train-deepspeed" if wanted.startswith("zero") else "make train-distributed"
            )
        chosen = "fsdp2"
        reasons.append("strategy fsdp2: `make train-fsdp`")
    elif command == "ddp" and wanted not in ("auto", "ddp"):
        raise UserError(
            f"`launch.strategy` is `{wanted}`, but `ACCELERATE_CONFIG` asks for `ddp`",
            hint=f"use {_command_for(wanted)} without it, or set `launch.strategy: auto`",
        )
    elif command == "single" and wanted != "auto" and typed("launch.strategy"):
        raise UserError(
            f"`launch.strategy` is `{wanted}`, but `make train` runs one process",
            hint=f"use {'make train-distributed' if wanted == 'ddp' else _command_for(wanted)}, or LAUNCH_STRATEGY=auto",
        )
    elif command == "single" or (ranks == 1 and wanted in ("auto", "ddp")):
        chosen = "single"
        reasons.append("strategy single: one process")
    else:
        chosen = "ddp" if command == "ddp" or wanted == "auto" else _strategy(wanted)
        why = "each rank holds a whole replica, and gradients alone are exchanged" if wanted == "auto" else "`launch.strategy`"
        reasons.append(f"strategy {chosen}: {why}")
    needs_backend = config.tuning.mode == "qlora" or config.tuning.backend == "unsloth"
    # What is installed here says nothing about a machine that is only described.
    if needs_backend and not hardware.described and (missing := missing_for(config.tuning.backend, hardware)):
        raise HardwareError(missing, hint=UNSLOTH_HINT if config.tuning.backend == "unsloth" else None)
    if conflict := conflict_for(config.tuning.backend, config.tuning.mode, config.tuning.quantization, chosen):
        raise UserError(conflict)
    if config.train.spike_guard == "skip" and chosen.startswith("zero"):
        raise UserError(
            f"`train.spike_guard` is `skip`, but under {chosen} DeepSpeed makes the update before its gradient norm is known",
            hint="TRAIN_SPIKE_GUARD=report, or leave updates out with make train-distributed or make train-fsdp",
        )
    if chosen not in ("single", "ddp") and (changed := network_keys(config)):
        key, value = changed[0]
        raise UserError(
            f"`{key}` is {value}, but {chosen} exchanges in a way of its own",
            hint=f"use make train-distributed, where every rank holds a replica, or leave `{key}` out",
        )
    return chosen


def _strategy(text: str) -> Strategy:
    known: dict[str, Strategy] = {"ddp": "ddp", "zero1": "zero1", "zero2": "zero2", "zero3": "zero3", "fsdp2": "fsdp2"}
    return known[text]


def _command_for(strategy: str) -> str:
    return "make train-fsdp" if strategy == "fsdp2" else "make train-deepspeed"


def _contradiction(command: str, strategy: str, right: str) -> UserError:
    return UserError(
        f"`launch.strategy` is `{strategy}`, but `{command}` was called", hint=f"use {right}, or set `launch.strategy: auto`"
    )


def is_automatic(config: Config, launch: LaunchRequest) -> bool:
    """Whether nobody said how to share out the work."""
    return launch.command_strategy == "auto" and config.launch.strategy == "auto"


def slow_network(hardware: Hardware, nodes: int, world: int) -> str | None:
    """Returns the network between ranks in words when weights should not travel over it, else `None`."""
    speed = hardware.network_bytes_per_second
    if world == 1 or (speed is None and nodes == 1):
        return None
    if speed is None:
        return "a network of unknown speed"
    return f"a network of {rate_in_words(speed)}" if speed < SLOW_NETWORK else None


def gathering_arithmetic(fit: Fit, setup: Setup, hardware: Hardware) -> str:
    """Returns what sharded weights cost in every micro-step."""
    speed = hardware.network_bytes_per_second or EXAMPLE_NETWORK
    weights = sent_weights(fit.config, fit.shape, setup)
    seconds = gathering_seconds(fit.config, fit.shape, setup, setup.world_size, speed)
    assumed = "" if hardware.network_bytes_per_second else ", if it is 1 Gbit/s"
    world = setup.world_size
    return (
        f"every micro-step waits {figure(seconds)} s for weights = {gathering_passes(setup)} x {figure(weights / 1e9)} GB x {world - 1}/{world} / "
        f"{rate_in_words(speed)}{assumed}"
    )


def settle(
    fit: Fit, hardware: Hardware, launch: LaunchRequest, setup: Setup, room: list[int], fitting: tuple[int, ...], names: list[str],
    replan: Callable[[LaunchRequest], Plan], reasons: list[str],
) -> Plan | tuple[Setup, tuple[int, ...]]:  # fmt: skip
    """Returns setup and rows per rank when they fit, or the plan of another strategy that `auto` takes because they do not.

    `room` and `names` are the ranks' bytes and devices, `fitting` the rows that each holds. Raises `DoesNotFitError`.
    """
    sharded = sharded_instead(fit, hardware, launch, setup, room, fitting, replan)
    if isinstance(sharded, Plan):
        return sharded
    setup, fitting = small_optimizer(fit, hardware, launch, setup, room, fitting, reasons)
    if offloaded := offloaded_instead(fit, hardware, launch, setup, room, fitting, replan):
        return offloaded
    try:
        fit.require(setup, room, fitting, names, early=launch.early)
    except DoesNotFitError as error:
        raise refusal(error, sharded, fit, hardware, launch, fitting) from None
    reasons += forced_over_slow_network(fit, hardware, launch, setup)
    return setup, fitting


def sharded_instead(
    fit: Fit, hardware: Hardware, launch: LaunchRequest, setup: Setup, room: list[int], fitting: tuple[int, ...],
    replan: Callable[[LaunchRequest], Plan],
) -> Plan | DoesNotFitError | None:  # fmt: skip
    """Returns a plan under FSDP2 (or what it lacks) where `auto` came to DDP on one machine, replicas do not fit and shards do; else `None`."""
    config = fit.config
    if not _may_change(fit, hardware, launch, setup, fitting):
        return None
    if conflict_for(config.tuning.backend, config.tuning.mode, config.tuning.quantization, "fsdp2"):
        return None
    why = f"{_replica(fit, setup, room, fitting)}, so weights are shared out"
    quantised = _quantised(fit, setup)
    if quantised is not None and quantised <= min(room):
        why += f" (TUNING_MODE=qlora would fit whole: {quantised / GIB:.1f} GiB)"
    try:
        return _renamed(replan(replace(launch, command_strategy="fsdp2")), "fsdp2", why)
    except DoesNotFitError as error:
        return error
    except HardwareError:
        return None


def small_optimizer(
    fit: Fit, hardware: Hardware, launch: LaunchRequest, setup: Setup, room: list[int], fitting: tuple[int, ...], reasons: list[str]
) -> tuple[Setup, tuple[int, ...]]:  # fmt: skip
    """Returns setup and rows with 8-bit Adam where its states alone are what does not fit, and nobody chose an optimizer."""
    wanted = wanted_rows(fit.config, setup.world_size)
    replicas = setup.device == "cuda" and setup.strategy in ("single", "ddp") and setup.optim.startswith("adamw_torch")
    # Nodes plan by themselves: one with 8-bit states beside one with full ones would train different models.
    alone = launch.num_nodes == 1 and not slow_network(hardware, launch.num_nodes, setup.world_size)
    if not (replicas and alone) or fit.config.train.optim != "auto" or min(fitting) >= wanted:
        return setup, fitting
    if not hardware.described and missing_for("bnb", hardware):
        return setup, fitting
    smaller = replace(setup, optim=SMALL_OPTIMIZER)
    rows = tuple(fit.largest(smaller, capacity) for capacity in room)
    if min(rows) < wanted:
        return setup, fitting
    rank = min(range(len(room)), key=lambda i: fitting[i])
    before, after = (fit.parts(case, wanted).get("optimizer", 0) / GIB for case in (setup, smaller))
    reasons[:] = [reason for reason in reasons if not reason.startswith("optimizer ")]
    reasons.append(
        f"optimizer {SMALL_OPTIMIZER}: with {setup.optim} a rank needs {fit.need(setup, wanted) / GIB:.1f} of {room[rank] / GIB:.1f} GiB; "
        f"8-bit states take {after:.1f} GiB instead of {before:.1f}"
    )
    return smaller, rows


def offloaded_instead(
    fit: Fit, hardware: Hardware, launch: LaunchRequest, setup: Setup, room: list[int], fitting: tuple[int, ...],
    replan: Callable[[LaunchRequest], Plan],
) -> Plan | None:  # fmt: skip
    """Returns a plan under ZeRO-3 with all states in the machine's memory, where that holds them and nothing else fits."""
    config = fit.config
    if setup.device != "cuda" or not _may_change(fit, hardware, launch, setup, fitting):
        return None
    if config.tuning.mode == "qlora" or config.tuning.backend == "unsloth":  # offloaded quantised weights were never tried
        return None
    if not hardware.ram_known or not (hardware.described or importlib.util.find_spec("deepspeed")):
        return None
    offloading = replace(setup, strategy="zero3", offload_optimizer=True, offload_parameters=True)
    need = setup.world_size * host_bytes(config, fit.shape, offloading)
    if need > HOST_SHARE * hardware.ram_bytes:
        return None
    request = replace(launch, command_strategy="zero", zero_stage=3, offload_optimizer=True, offload_parameters=True)
    why = f"{_replica(fit, setup, room, fitting)} and shards do not fit either, so this machine's memory holds them: "
    why += f"{need / GIB:.1f} of {hardware.ram_bytes / GIB:.1f} GiB; slow"
    try:
        return _renamed(replan(request), "zero3", why)
    except HardwareError:
        return None


def forced_over_slow_network(fit: Fit, hardware: Hardware, launch: LaunchRequest, setup: Setup) -> list[str]:
    """Returns the warning of a run that shares out weights over a slow network because someone said so."""
    network = slow_network(hardware, launch.num_nodes, setup.world_size)
    if setup.strategy not in GATHERING or network is None:
        return []
    who = "`launch.strategy`" if fit.config.launch.strategy != "auto" else "the command"
    smaller = "TUNING_MODE=qlora, " if may_quantise(fit.config) else ""
    return [
        f"SLOW: {who} forces {setup.strategy} over {network}: {gathering_arithmetic(fit, setup, hardware)}. "
        f"Replicas (`ddp`) would send gradients alone: {smaller}shorter rows or a smaller model make them fit"
    ]


def refusal(
    error: DoesNotFitError, sharded: DoesNotFitError | None, fit: Fit, hardware: Hardware, launch: LaunchRequest, fitting: tuple[int, ...]
) -> DoesNotFitError:  # fmt: skip
    """Returns the error of what came nearest (`sharded`: what `auto` tried beside replicas), with notes on this hardware."""
    setup, notes = error.setup, []
    network = slow_network(hardware, launch.num_nodes, setup.world_size)
    whole = [index for index, rows in enumerate(fitting) if rows >= error.micro_batch]
    if whole and launch.num_nodes == 1 and hardware.kind == "cuda" and not hardware.described:
        notes.append(f"{showing(hardware, whole)}: {len(whole)} of {setup.world_size} GPUs hold it")
    if network and setup.strategy not in GATHERING:
        shares = replace(setup, strategy="fsdp2")
        unasked = "`auto` does not share out weights" if is_automatic(fit.config, launch) else "weights are not shared out"
        allowed = " LAUNCH_SLOW_NETWORK=allow" if hardware.network_bytes_per_second else ""
        why = f"{unasked} over {network}: {gathering_arithmetic(fit, shares, hardware)}"
        notes.append(f"{why}; LAUNCH_STRATEGY=fsdp2{allowed} forces it")
    if sharded is not None and sharded.over_bytes < error.over_bytes:
        after = f", with weights shared out by fsdp2; a whole replica needs {sum(error.parts.values()) / GIB:.1f} GiB"
        return sharded.with_remedies(notes=tuple(notes), after=after)
    return error.with_remedies(notes=tuple(notes))


def _may_change(fit: Fit, hardware: Hardware, launch: LaunchRequest, setup: Setup, fitting: tuple[int, ...]) -> bool:
    """Whether `auto` came to replicas that do not fit, where another strategy may be taken unasked."""
    one_machine = setup.strategy == "ddp" and launch.num_nodes == 1
    unasked = is_automatic(fit.config, launch) and one_machine and not network_keys(fit.config)
    return (
        unasked and min(fitting) < wanted_rows(fit.config, setup.world_size) and not slow_network(hardware, 1, setup.world_size)
    )


def _replica(fit: Fit, setup: Setup, room: list[int], fitting: tuple[int, ...]) -> str:
    rank = min(range(len(room)), key=lambda i: fitting[i])
    need = fit.need(setup, wanted_rows(fit.config, setup.world_size))
    return f"a whole replica on each needs {need / GIB:.1f} of {room[rank] / GIB:.1f} GiB"


def _quantised(fit: Fit, setup: Setup) -> int | None:
    """Returns what a replica would need over a quantised base; `None` where the base is quantised, or this is no GPU."""
    if not may_quantise(fit.config) or setup.device != "cuda":
        return None
    config = replace(fit.config, tuning=replace(fit.config.tuning, mode="qlora"))
    frozen = "bfloat16" if setup.precision == "bf16" else "float16"
    case = replace(setup, weights_dtype=frozen, gradient_checkpointing=True)
    return sum(fit.memory(config, fit.shape, case, wanted_rows(config, setup.world_size)).values())


def _renamed(plan: Plan, strategy: str, why: str) -> Plan:
    """Returns the plan with `why` as the reason of its strategy."""
    named = (f"strategy {strategy}: {why}" if reason.startswith("strategy ") else reason for reason in plan.reasons)
    return replace(plan, reasons=tuple(named))
