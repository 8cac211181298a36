"""The plan as a pure function of configuration, hardware, model and data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from sft_play.config.schema import Config
from sft_play.errors import HardwareError
from sft_play.plan import choices, network, nodes, strategies
from sft_play.plan.batch import Batch, count, halve, halved, said_aloud
from sft_play.plan.calibration import Calibration
from sft_play.plan.catalogue import energy_kwh
from sft_play.plan.fastest import Rows, choose_rows, comparable, with_layout
from sft_play.plan.fit import DoesNotFitError, Fit, Memory, Remedy, wanted_rows
from sft_play.plan.hardware import GIB, HEADROOM, Device, Hardware
from sft_play.plan.losses import settle_chunks, with_chunks
from sft_play.plan.memory import NF4_BYTES, Setup, host_bytes, loading_host_bytes, nf4_experts, rank_memory, trainable_parameters
from sft_play.plan.packing import Division, choose_packing, insisted
from sft_play.plan.plan import Plan, RankPlan
from sft_play.plan.rank_plans import (
    Start,
    computing_seconds,
    costs_of,
    exchanges,
    longest_row,
    most_together,
    rank_plans,
    tight,
    uneven,
    waiting,
)  # fmt: skip
from sft_play.plan.remedies import Case, Override, planned, remedies, with_remedies
from sft_play.plan.request import LaunchRequest
from sft_play.plan.rows import label_share, row_tokens, rows_data, step_count
from sft_play.plan.scratch import label
from sft_play.plan.shape import ModelShape, check_length
from sft_play.plan.throughput import Forecast, forecast, padded_tokens
from sft_play.plan.trace_case import setup_of
from sft_play.plan.unequal import with_shares
from sft_play.runs.prepared import Prepared

EXPANDABLE = (
    "allocator: expandable_segments for workers, so that freed memory serves blocks of any size; PYTORCH_ALLOC_CONF overrides it"
)
NATIVE = "allocator: no expandable_segments, for which WSL2's driver fails at the first allocation; more is lost between blocks"

SWITCHED_CHIPS, SWITCHED_RANKS, SWITCHED_BYTES = {(9, 0), (10, 0)}, 4, GIB
"""Where NCCL reduces inside NVLink's switch (H100, H200 and B200, so many or more on a board) it takes about so much more of each card (0.9
to 1.5 GiB in all on eight H100 were seen elsewhere; unverified here)."""
LEAST_PADDING = 0.01
"""Share of tokens below which padding is not worth a word."""
MOST_TOGETHER = {"cuda": 64, "cpu": 4}
"""Rows of a micro-batch beyond which nothing is gained; on a CPU matrices are large enough then, and memory grows."""


def make_plan(
    config: Config,
    typed: Callable[[str], bool],
    hardware: Hardware,
    shape: ModelShape,
    *,
    launch: LaunchRequest,
    prepared: Prepared | None,
    calibration: Calibration | None = None,
    memory: Memory = rank_memory,
) -> Plan:
    """Returns every decision about a run with its reason. Raises `UserError` or `HardwareError` for what cannot be.

    `calibration` is what was measured on these very devices: without it, speeds are priors. `memory` is the best source of a rank's
    memory: the closed formulas, or those corrected by a trace or a probe.
    """
    hardware = nodes.with_network(config, hardware, launch)
    launch = nodes.met(hardware, launch)
    calibration = nodes.measured_on_all(launch, calibration)
    case = Case(
        config=config, typed=typed, hardware=hardware, shape=shape, launch=launch, prepared=prepared, calibration=calibration, memory=memory
    )  # fmt: skip
    try:
        plan = _decide(case)
    except DoesNotFitError as error:
        raise with_remedies(case, _decide, error) from None
    over = max(plan.ranks, key=lambda rank: rank.peak_bytes - rank.capacity_bytes)
    if over.peak_bytes <= over.capacity_bytes:
        return plan
    found = remedies(case, _decide, setup_of(plan), over.micro_batch, over.peak_bytes)
    return replace(plan, remedies=(*map(str, found), *plan.remedies))


def ways_out(config: Config, shape: ModelShape, plan: Plan, request: LaunchRequest, rank: RankPlan) -> tuple[Remedy, ...]:
    """Returns what would need less than a rank of this plan, where memory ran out although it should have fitted; by formula."""
    devices = nodes.devices_of(plan)
    here = devices[0][:1] if plan.device == "cpu" else devices[0]  # its processes share it
    free = sum(device.free_bytes for device in here)
    hardware = Hardware(
        kind=plan.device, devices=here, cpu_threads=len(devices[0]), ram_bytes=free, ram_known=False, described=True
    )
    launch = replace(request, node_devices=devices if plan.num_nodes > 1 else ())
    case = Case(
        config=config, typed=lambda _: False, hardware=hardware, shape=shape, launch=launch, prepared=None, calibration=None,
        memory=rank_memory,
    )  # fmt: skip
    need = rank_memory(config, shape, setup_of(plan), rank.micro_batch)
    return remedies(case, _decide, setup_of(plan), rank.micro_batch, sum(need.values()))


def _decide(case: Case) -> Plan:
    """Returns the plan without the remedies of what does not fit. Raises as `make_plan`."""
    config, hardware, shape, launch = case.config, case.hardware, case.shape, case.launch
    reasons: list[str] = []
    fit = Fit(config=config, shape=shape, memory=case.memory)
    check_length(config.model, shape.max_positions)
    choices.check_targets(config, shape)
    start = _start(case, fit, reasons)
    setup, devices, room, kind = start.setup, start.devices, start.room, hardware.kind
    setup, fitting = _checkpointing(fit, setup, room, reasons, forced=launch.force_checkpointing)

    def replan(request: LaunchRequest) -> Plan:
        return _decide(replace(case, launch=request))

    settled = strategies.settle(fit, hardware, launch, setup, room, fitting, [d.name for d in devices], replan, reasons)
    if isinstance(settled, Plan):
        return settled
    setup, fitting = settled
    _check_loading(case, setup, start.ranks.local)
    fitting = tuple(max(1, rows) for rows in fitting)
    division = _divided(case, fit, start, setup, fitting, reasons)
    batch, setup = division.batch, division.setup
    rate = choices.scale_learning_rate(config, start.rate, batch.global_batch, reasons)
    costs = costs_of(case, fit, start, division, devices, max(batch.micro_batches))
    ranks = rank_plans(case, fit, start, division, costs)
    reasons += [*_reduced(config, shape, setup, batch.accumulation), *waiting(case, setup, batch.accumulation), *tight(ranks)]
    reasons += [*choices.adapted(config, shape), *_experts(config, shape, setup)]
    reasons += _margin(setup)
    kernels = choices.choose_kernels(config, shape, devices, kind, reasons)
    if workers := choices.loader_workers(config, kind):
        reasons.append(
            f"loader: {count(workers, 'process')} per rank, which make batches while the {'GPU' if kind == 'cuda' else 'rank'} computes"
        )
    lacking = _on_the_host(case, setup, start.ranks.local, reasons)
    steps, per_epoch = step_count(config, case.prepared, batch.global_batch, reasons)
    speed = _speed(case, devices, division)
    uneven(case, fit, start, division, ranks, costs, speed, reasons)
    per_step = speed.seconds_per_step
    total = per_step * steps if per_step and steps else None
    return Plan(
        world_size=len(devices), num_nodes=launch.num_nodes, device=kind, backend=cast(Any, start.backend),
        strategy=cast(Any, setup.strategy), source="formula", precision=cast(Any, setup.precision), weights_dtype=setup.weights_dtype,
        nf4_experts=nf4_experts(config, shape, setup.strategy),
        attn_implementation=setup.attention, layout=cast(Any, setup.layout), node_ranks=start.ranks.unequal_nodes, most_rows=min(fitting),
        longest_row=longest_row(fit, setup, ranks, shape), row_tokens=setup.row_tokens, label_share=setup.label_share,
        loss_chunk=setup.loss_chunk, kernels=kernels, pack_tokens=division.pack_tokens, gradient_checkpointing=setup.gradient_checkpointing,
        optim=setup.optim, learning_rate=rate, ranks=ranks, offload_optimizer=setup.offload_optimizer,
        offload_parameters=setup.offload_parameters, global_batch_size=batch.global_batch, steps=steps, steps_per_epoch=per_epoch,
        warmup_steps=choices.warmup(config, steps), eval_batch_size=halve(_eval_batch(config, kind, fitting), launch.halvings),
        reasons=tuple(reasons), remedies=tuple(lacking), tokens_per_second=speed.tokens_per_second, expandable_segments=setup.expandable_segments,
        communication_share=speed.communication_share, seconds_per_step=per_step, total_seconds=total,
        exchanges=exchanges(case, setup, speed), communication_seconds=speed.communication_seconds, mfu=speed.mfu, speed_basis=speed.basis,
        notices=tuple(filter(None, [said_aloud(config.train, len(devices), start.unit)])),
        epoch_seconds=per_step * per_epoch if per_step and per_epoch else None, energy_kwh=energy_kwh(devices, total),
    )  # fmt: skip


def _start(case: Case, fit: Fit, reasons: list[str]) -> Start:
    """Returns devices, strategy and types, and why. Raises `UserError` or `HardwareError`."""
    config, hardware, launch, kind = case.config, case.hardware, case.launch, case.hardware.kind
    ranks = nodes.ranks_of(hardware, launch)
    reasons += ["for hardware as described, not for this machine"] if hardware.described else []
    reasons += [hardware.unused] if hardware.unused else []
    reasons += [*nodes.in_words(hardware, launch, ranks), *nodes.unheard_network(config, case.typed, hardware)]
    devices = ranks.devices
    strategy = strategies.choose_strategy(config, case.typed, launch, hardware, len(devices), reasons)
    backend = choices.choose_backend(config, kind, len(devices), reasons)
    precision = choices.choose_precision(config, hardware, devices, strategy, reasons)
    dtype = choices.choose_weights_dtype(config, kind, precision, reasons)
    attention = choices.choose_attention(config, case.shape, kind, devices, precision, reasons)
    setup = Setup(
        device=kind, strategy=strategy, world_size=len(devices), precision=precision, weights_dtype=dtype, optim=config.train.optim,
        gradient_checkpointing=False, layout=choices.padded_layout(config, case.shape), attention=attention,
        label_share=label_share(case.prepared),
        row_tokens=row_tokens(config, case.prepared), offload_optimizer=launch.offload_optimizer,
        offload_parameters=launch.offload_parameters, expandable_segments=all(device.expandable_segments for device in devices),
    )  # fmt: skip
    least = min(device.memory_bytes for device in devices)
    setup = replace(setup, optim=choices.choose_optimizer(config, case.shape, setup, least, reasons))
    network.check_precision(config, setup)
    reasons += network.without_effect(config, setup)
    return Start(
        ranks=ranks, backend=backend, rate=choices.choose_learning_rate(config, reasons),
        setup=with_chunks(config, case.shape, insisted(fit, setup, case.prepared.train if case.prepared else None)),
        room=[_capacity(device, kind, ranks.on_node_of(rank)) for rank, device in enumerate(devices)],
    )  # fmt: skip


def _divided(case: Case, fit: Fit, start: Start, setup: Setup, fitting: tuple[int, ...], reasons: list[str]) -> Division:
    """Returns micro-batch, accumulation, packing, layout and loss chunks, by memory and by the forecast. Raises `UserError`."""
    config, launch, room = case.config, case.launch, start.room
    # What fits under packing are packs; and before the data are known, rows of the greatest length must not refuse what was typed.
    unknown = config.train.packing == "on" or (launch.early and config.train.grad_accum != "auto")
    hardware, devices = comparable(case.hardware, start.devices, launch.num_nodes)
    alike = replace(case, hardware=hardware)
    most = MOST_TOGETHER[setup.device]
    rows = Rows(
        train=config.train, room=room, fitting=(2**20,) * len(room) if unknown else fitting, most=most, unit=start.unit,
        known=devices == start.devices,
    )  # fmt: skip

    def seconds(setup: Setup, batch: Batch) -> float:
        return _speed(alike, devices, Division(setup=setup, batch=batch)).seconds_per_step or math.inf

    plain = choose_rows(fit, setup, rows, seconds)
    division = choose_packing(
        fit, with_layout(fit, setup, plain, room, seconds, []), plain, room, case.prepared.train if case.prepared else None, most=most,
        unit=start.unit, gave_up=launch.unpack, reasons=reasons,
        seconds=lambda division: _speed(alike, devices, division).seconds_per_step,
    )  # fmt: skip
    costs = costs_of(alike, fit, start, division, devices, most_together(config, division, plain, rows))
    division = with_shares(
        config,
        division,
        costs,
        lambda found: _speed(alike, devices, found).seconds_per_step,
        measured=rows.known,
        reasons=reasons,
    )
    division, batch = _halved(division, launch.halvings, start.unit, reasons)
    setup = with_layout(fit, division.setup, batch, room, seconds, reasons)
    data = rows_data(config, case.prepared, setup)
    padding = 1 - data.row_tokens / padded_tokens(data, max(batch.micro_batches))
    if setup.layout != "flattened" and padding >= LEAST_PADDING:
        reasons.append(f"padding {padding:.0%} of all tokens by forecast: rows are as long as the longest of their micro-batch")
    setup = replace(setup, accumulates=batch.accumulation > 1)
    computing = computing_seconds(_speed(alike, devices, replace(division, setup=setup)))
    network.check_gathering(fit, setup, case.hardware, division.micro_steps, computing)

    def fits(larger: Setup) -> bool:
        recovers = launch.halvings or launch.force_checkpointing  # memory ran out: the plan had promised too much
        return not recovers and all(
            fit.need(larger, max(1, rows)) <= size for rows, size in zip(batch.micro_batches, room, strict=True)
        )

    return replace(division, setup=settle_chunks(config, case.shape, setup, max(batch.micro_batches), fits, reasons))


def _speed(case: Case, devices: tuple[Device, ...], division: Division) -> Forecast:
    batch, data = division.batch, rows_data(case.config, case.prepared, division.setup)
    return forecast(
        case.config, case.shape, division.setup, case.hardware, devices, rows=division.rows, micro_batches=batch.micro_batches,
        accumulation=division.micro_steps, data=division.data(data), nodes=case.launch.num_nodes, calibration=case.calibration,
        own_steps=division.own_steps,
    )  # fmt: skip


def _experts(config: Config, shape: ModelShape, setup: Setup) -> list[str]:
    """Returns how QLoRA holds fused experts."""
    if config.tuning.mode != "qlora" or not shape.expert_parameters or shape.quantized_bits:
        return []
    if nf4_experts(config, shape, setup.strategy):
        return ["experts: nf4 like linear layers, and expanded a layer at a time"]
    plain, packed = (shape.expert_parameters * size / GIB for size in (setup.weight_bytes, NF4_BYTES))
    return [
        f"experts: {setup.weights_dtype}, {plain:.2f} GiB in all instead of {packed:.2f} in nf4: int8, FSDP2, ZeRO-3, adapters on experts and "
        "unsloth leave them as they are"
    ]


def _margin(setup: Setup) -> list[str]:
    """Returns what is kept free, and how a GPU's memory is kept from falling to pieces."""
    share = HEADROOM[setup.device]
    kept = f"memory: {share:.0%} of what is free is planned for, {1 - share:.0%} stay as the margin"
    return [kept, EXPANDABLE if setup.expandable_segments else NATIVE] if setup.device == "cuda" else [kept]


def _on_the_host(case: Case, setup: Setup, processes: int, reasons: list[str]) -> list[str]:
    """Says what DeepSpeed keeps in the machine's memory, and returns what to do when that is too small for it."""
    need, hardware = processes * host_bytes(case.config, case.shape, setup), case.hardware
    if not need:
        return []
    reasons.append(f"offloaded to this machine's memory: {need / GIB:.1f} GiB for {count(processes, 'process')}")
    if not hardware.ram_known or need <= hardware.ram_bytes:
        return []
    reasons.append(f"that is more than it has ({hardware.ram_bytes / GIB:.1f} GiB)")
    return [*_loaded_with_less(case)[:1], "a machine with more memory"]


def _loaded_with_less(case: Case) -> list[str]:
    """Returns what to type, adapters first, where the machine's memory is too small for all weights; each is planned."""
    adapters = replace(case.config, tuning=replace(case.config.tuning, mode="lora"))
    shards = replace(case.config, launch=replace(case.config.launch, strategy="zero3"))
    request = replace(case.launch, command_strategy="zero", zero_stage=None)
    options = [Override(text="TUNING_MODE=lora", config=adapters, launch=case.launch, keys=frozenset({"tuning.mode"}))]
    options *= case.config.tuning.mode != "lora"
    if case.launch.command_strategy != "zero":
        text = "make train-deepspeed LAUNCH_STRATEGY=zero3"
        options.append(Override(text=text, config=shards, launch=request, keys=frozenset({"launch.strategy"})))
    found = ((option.text, planned(case, _decide, option)) for option in options)
    return [text for text, plan in found if isinstance(plan, Plan) and not plan.remedies]


def _reduced(config: Config, shape: ModelShape, setup: Setup, micro_steps: int) -> list[str]:
    """Says why FSDP2 reduces gradients in every micro-step, which costs the exchange that is counted, where there are several."""
    if setup.strategy != "fsdp2" or micro_steps == 1:
        return []
    held = 4 * trainable_parameters(config, shape) / GIB
    return [
        f"gradients reduced in each of {micro_steps} micro-steps: else every rank would hold {held:.1f} GiB of them in fp32 until the last"
    ]


def _check_loading(case: Case, setup: Setup, processes: int) -> None:
    """Raises `HardwareError` where the processes of this machine need more of its memory to load than it has."""
    config, hardware = case.config, case.hardware
    need = loading_host_bytes(config, case.shape, setup, processes)
    if hardware.ram_known and need > hardware.ram_bytes:
        raise HardwareError(
            f"`{label(config.model)}` cannot be loaded under {setup.strategy}: each of {count(processes, 'process')} holds all weights "
            f"{'in fp32' if config.tuning.mode == 'full' else 'quantised'} before they are shared out, {need / GIB:.1f} GiB of this machine's "
            f"memory, which has {hardware.ram_bytes / GIB:.1f} GiB",
            hint="; or ".join(_loaded_with_less(case)) or "a machine with more memory",
        )


def _halved(division: Division, halvings: int, unit: str, reasons: list[str]) -> tuple[Division, Batch]:
    """Returns the division after memory ran out `halvings` times."""
    before = division.batch
    batch = halved(before, halvings, unit)
    reasons += batch.reasons[len(before.reasons) :]
    return replace(division, batch=batch), batch


def _capacity(device: Device, kind: str, processes: int) -> int:
    """Returns the bytes that one of a machine's `processes` may use; those on a CPU share its memory."""
    if kind == "cpu":
        return int(device.free_bytes * HEADROOM[kind] / processes)
    switched = processes >= SWITCHED_RANKS and (device.compute_capability or (0, 0)) in SWITCHED_CHIPS
    return int(device.free_bytes * HEADROOM[kind]) - (SWITCHED_BYTES if switched else 0)


def _checkpointing(
    fit: Fit, setup: Setup, room: list[int], reasons: list[str], *, forced: bool = False
) -> tuple[Setup, tuple[int, ...]]:
    """Turns recomputation on when asked for, or when the wanted rows do not fit without it."""
    asked = fit.config.train.gradient_checkpointing
    plain = tuple(fit.largest(setup, capacity) for capacity in room)
    saving = replace(setup, gradient_checkpointing=True)
    smaller = tuple(fit.largest(saving, capacity) for capacity in room)
    wanted = wanted_rows(fit.config, setup.world_size)
    if asked == "auto" and forced and min(plain) >= wanted:
        reasons.append("gradient checkpointing on: memory ran out without it")
        return saving, plain  # what it saves is not for a larger micro-batch
    if asked is True or (asked == "auto" and min(plain) < wanted):
        why = "as configured" if asked is True else f"{count(wanted, 'row')} per device would not fit without it"
        reasons.append(f"gradient checkpointing on: {why}")
        return saving, smaller
    if asked == "auto":
        more = "a third more time" if fit.config.tuning.mode == "full" else "half as much time again"
        reasons.append(f"gradient checkpointing off: activations fit, and recomputing them takes {more}")
    return setup, plain


def _eval_batch(config: Config, kind: str, fitting: tuple[int, ...]) -> int:
    if config.eval.batch_size != "auto":
        return config.eval.batch_size
    return 8 if kind == "cpu" else max(1, min(32, 2 * min(fitting)))
