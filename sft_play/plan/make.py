"""The plan as a pure function of a request: every decision in the order in which it is made, each with its reason."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any, cast

from sft_play.config.schema import Config
from sft_play.errors import HardwareError
from sft_play.plan import choices, network, remedies, strategies
from sft_play.plan.architecture import check_length, label
from sft_play.plan.batch import explain_global_batch, halve
from sft_play.plan.division import Division, divide, pack_if_typed, rows_data
from sft_play.plan.epoch import label_share, row_tokens, step_count
from sft_play.plan.hardware import GIB, HEADROOM, Hardware, energy_kwh
from sft_play.plan.memory import (
    NF4_BYTES,
    host_bytes,
    loading_host_bytes,
    nf4_experts,
    rank_memory,
    trainable_parameters,
)
from sft_play.plan.plan import LaunchRequest, Plan, RankPlan, Setup, Strategy, least_room
from sft_play.plan.ranks import devices_of
from sft_play.plan.request import (
    MOST_ROWS,
    DoesNotFitError,
    Remedy,
    Request,
    describe_machines,
    try_plan,
    with_machines,
)
from sft_play.plan.shape import ModelShape, check_targets, describe_adapters
from sft_play.plan.throughput import forecast
from sft_play.text import figure, plural

EXPANDABLE = (
    "allocator: expandable_segments for workers, so that freed memory serves blocks of any size; PYTORCH_ALLOC_CONF"
    " overrides it"
)
NATIVE = (
    "allocator: no expandable_segments, for which WSL2's driver fails at the first allocation; more is lost between"
    " blocks"
)
ROUTER_LOSS = (
    "the router's balancing loss (`output_router_logits: true` in `config.json`) is off: it is not a sum over"
    " micro-batches"
)
LONGEST_ROW = 2**22
"""Where the search for the longest row ends, for models without a limit of positions."""


def make_plan(request: Request) -> Plan:
    """Return every decision about a run with its reason. Raise `UserError` or `HardwareError` for an impossible one."""
    request = with_machines(request)
    try:
        plan = _decide(request)
    except DoesNotFitError as error:
        raise remedies.with_remedies(request, _decide, error) from None
    plan = replace(plan, notices=(*_faster_ways(request, plan), *plan.notices))
    tightest = least_room(plan.ranks)
    if tightest.peak_bytes <= tightest.capacity_bytes:
        return plan
    ways = remedies.remedies(request, _decide, plan, tightest.micro_batch, tightest.peak_bytes)
    return replace(plan, remedies=tuple(map(str, ways)))


def _decide(request: Request) -> Plan:
    """Return the plan without remedies for what does not fit. Raise like `make_plan`.

    Functions that receive `reasons` append what they decide, and why.
    """
    config, hardware, shape, launch = request.config, request.hardware, request.shape, request.launch
    kind, reasons, warnings = hardware.kind, dict[str, str](), list[str]()

    # Where ranks run, and by which strategy.
    check_length(config.model, shape.max_positions)
    check_targets(config, shape, kind)
    reasons |= network.check_slices(request) | describe_machines(request)
    ranks = request.ranks
    strategy = strategies.choose_strategy(request, reasons)
    backend = choices.choose_backend(config, kind, len(ranks.devices), reasons)

    # How they compute.
    setup = _first_setup(request, strategy, reasons)
    rate = choices.choose_learning_rate(config, reasons)
    setup = choices.with_chunks(config, shape, pack_if_typed(request, setup))

    # What fits: recomputation first, then another strategy.
    setup, rows_that_fit = _choose_recomputation(request, setup, reasons)
    settled = strategies.settle(request, setup, rows_that_fit, _decide, reasons)
    if isinstance(settled, Plan):
        return settled
    setup, rows_that_fit = settled[0], tuple(max(1, rows) for rows in settled[1])
    _check_loading(request, setup)

    # How much at a time: micro-batches, micro-steps and packs, with the memory that they take.
    division = divide(request, setup, rows_that_fit, reasons)
    batch, setup = division.batch, division.setup
    rate = choices.scale_learning_rate(config, rate, batch.global_batch, reasons)
    choices.check_schedule(config, rate)
    rank_plans = _rank_plans(request, division)
    reasons |= _explain_memory(request, setup, batch.accumulation, rank_plans)
    kernels = choices.choose_kernels(request, reasons)
    if workers := choices.loader_workers(config, kind):
        who = "GPU" if kind == "cuda" else "rank"
        reasons["loader"] = (
            f"loader: {plural(workers, 'process')} per rank, which make batches while the {who} computes"
        )
    _on_the_host(request, setup, max(batch.micro_batches), reasons, warnings)

    # How long: steps, speed, energy.
    steps, per_epoch = step_count(request, batch.global_batch, reasons)
    speed = forecast(request, division)
    reasons |= network.describe_traffic(request, setup, max(division.shares) * rows_data(request, division).row_tokens)
    seconds = speed.seconds_per_step
    total = seconds * steps if seconds and steps else None

    eval_rows = 8 if kind == "cpu" else max(1, min(32, 2 * min(rows_that_fit)))
    eval_rows = eval_rows if config.eval.batch_size == "auto" else config.eval.batch_size
    if notice := explain_global_batch(config.train, len(request.data_devices), request.unit):
        warnings.append(notice)
    if shape.router_loss:
        warnings.append(ROUTER_LOSS)
    if config.train.loss != "nll" or config.train.label_smoothing_factor:
        smoothed = (
            f", smoothed by {config.train.label_smoothing_factor:g}" if config.train.label_smoothing_factor else ""
        )
        warnings.append(f"what is minimised is `{config.train.loss}`{smoothed}; evaluation measures the cross-entropy")
    if config.train.optim not in ("auto", setup.optim):
        warnings.append(
            f"`train.optim: {config.train.optim}` does not run: its states cannot be sharded by {setup.strategy};"
            f" {setup.optim} does"
        )
    return Plan(
        **asdict(setup),
        num_nodes=launch.num_nodes,
        node_ranks=ranks.nodes if len(set(ranks.nodes)) > 1 else (),
        backend=cast(Any, backend),
        ranks=rank_plans,
        source="formula",
        kernels=kernels,
        nf4_experts=nf4_experts(config, shape, setup.strategy),
        global_batch_size=batch.global_batch,
        most_rows=min(rows_that_fit),
        longest_row=_longest_row(request, setup, rank_plans),
        eval_batch_size=halve(eval_rows, launch.halvings),
        learning_rate=rate,
        warmup_steps=choices.warmup(config, steps),
        steps=steps,
        steps_per_epoch=per_epoch,
        tokens_per_second=speed.tokens_per_second,
        mfu=speed.mfu,
        speed_basis=speed.basis,
        seconds_per_step=seconds,
        total_seconds=total,
        epoch_seconds=seconds * per_epoch if seconds and per_epoch else None,
        energy_kwh=energy_kwh(ranks.devices, total),
        communication_share=speed.communication_share,
        communication_seconds=speed.communication_seconds,
        work=speed.work,
        exchanges=network.exchanges(request, setup, speed.computing_seconds),
        reasons=reasons,
        remedies=(),
        notices=tuple(warnings),
    )


def _first_setup(request: Request, strategy: Strategy, reasons: dict[str, str]) -> Setup:
    """Return the setup with types, attention and optimizer; rows are padded and nothing is recomputed."""
    config, hardware, devices = request.config, request.hardware, request.ranks.devices
    precision = choices.choose_precision(request, strategy, reasons)
    dtype = choices.choose_weights_dtype(config, hardware.kind, precision, reasons)
    attention = choices.choose_attention(request, precision, reasons)
    setup = Setup(
        device=hardware.kind,
        strategy=strategy,
        world_size=len(devices),
        precision=precision,
        weights_dtype=dtype,
        optim=config.train.optim,
        gradient_checkpointing=False,
        layout=choices.padded_layout(request),
        attn_implementation=attention,
        label_share=label_share(request.train_split),
        row_tokens=row_tokens(request),
        offload_optimizer=request.launch.offload_optimizer,
        offload_parameters=request.launch.offload_parameters,
        expandable_segments=all(device.expandable_segments for device in devices),
        sequence_parallel=config.launch.sequence_parallel,
        tensor_parallel=config.launch.tensor_parallel,
    )
    setup = replace(setup, optim=choices.choose_optimizer(request, setup, reasons))
    reasons |= network.check_slow_network_keys(config, setup)
    return replace(setup, stages=network.stages_of(request, setup, reasons))


def _choose_recomputation(request: Request, setup: Setup, reasons: dict[str, str]) -> tuple[Setup, tuple[int, ...]]:
    """Return the setup, with recomputation if configured or needed for the required rows, and the rows that fit."""
    asked, rows = request.config.train.gradient_checkpointing, request.required_rows
    offload = request.config.train.activation_offload == "on"
    plain = request.largest(setup)
    saving = replace(setup, gradient_checkpointing=True, activation_offload=offload)
    if offload and asked == "auto":
        reasons["recomputation"] = "gradient checkpointing on: `train.activation_offload` needs it"
        return saving, request.largest(saving)
    if asked == "auto" and request.launch.force_checkpointing and min(plain) >= rows:
        reasons["recomputation"] = "gradient checkpointing on: memory ran out without it"
        # What recomputation saves must not go into a larger micro-batch.
        return saving, plain
    if asked is True or (asked == "auto" and min(plain) < rows):
        why = "as configured" if asked is True else f"{plural(rows, 'row')} per device would not fit without it"
        reasons["recomputation"] = f"gradient checkpointing on: {why}"
        return saving, request.largest(saving)
    if asked == "auto":
        extra_time = "a third more time" if request.config.tuning.mode == "full" else "half as much time again"
        reasons["recomputation"] = (
            f"gradient checkpointing off: activations fit, and recomputing them takes {extra_time}"
        )
    return setup, plain


def _rank_plans(request: Request, division: Division) -> tuple[RankPlan, ...]:
    """Return what each rank does and needs."""
    largest = request.largest(division.setup)
    plans = []
    for rank in range(len(request.ranks.devices)):
        group = rank // request.group_size
        (micro, steps), room = (
            division.batch.slots[group],
            request.rank_room[rank] if division.setup.stages else request.room[group],
        )
        parts = request.parts(request.on(division.setup, rank), max(1, micro))
        peak, most = sum(parts.values()), max(1, min(MOST_ROWS, largest[group]))
        plans.append(
            RankPlan(
                rank=rank,
                device="cpu" if request.hardware.kind == "cpu" else f"cuda:{request.ranks.places[rank]}",
                device_name=request.ranks.devices[rank].name,
                micro_batch=micro,
                accumulation=steps,
                memory_bytes={**parts, "free": max(0, room - peak)},
                peak_bytes=peak,
                capacity_bytes=room,
                most_rows=max(micro, halve(most, request.launch.halvings)),
            )
        )
    return tuple(plans)


def _longest_row(request: Request, setup: Setup, ranks: tuple[RankPlan, ...]) -> int:
    """Return the tokens of the longest rows with which the planned micro-batches fit every rank."""
    most = min(request.shape.max_positions, LONGEST_ROW)
    cases = [setup]
    if setup.layout == "flattened" and not setup.pack_tokens:
        # Flattened rows are padded where their mask would not fit.
        cases.append(replace(setup, layout=choices.padded_layout(request)))
    kinds = {(request.on(setup, rank.rank).stage, rank.micro_batch, rank.capacity_bytes): rank for rank in ranks}
    return min(
        max(request.longest(request.on(case, rank.rank), rank.micro_batch, rank.capacity_bytes, most) for case in cases)
        for rank in kinds.values()
    )


def _explain_memory(request: Request, setup: Setup, micro_steps: int, ranks: tuple[RankPlan, ...]) -> dict[str, str]:
    """Return notes on how memory is used, and on a rank that may run short."""
    config, shape, kind, notes = request.config, request.shape, request.hardware.kind, dict[str, str]()
    if setup.strategy == "fsdp2" and micro_steps > 1:
        gradient_gib = 4 * trainable_parameters(config, shape) / GIB
        notes["gradients"] = (
            f"gradients reduced in each of {micro_steps} micro-steps: else every rank would hold {gradient_gib:.1f} GiB"
            " of them in fp32 until the last"
        )
    tightest = least_room(ranks)
    if tightest.peak_bytes > tightest.capacity_bytes:
        notes["room"] = (
            f"rank {tightest.rank} may run short: {tightest.peak_bytes / GIB:.1f} of"
            f" {tightest.capacity_bytes / GIB:.1f} GiB"
        )
    notes |= describe_adapters(config, shape)
    if config.tuning.mode == "qlora" and shape.expert_parameters and not shape.quantized_bits:
        plain, packed = (shape.expert_parameters * size / GIB for size in (setup.weight_bytes, NF4_BYTES))
        notes["experts"] = (
            "experts: nf4 like linear layers, and expanded a layer at a time"
            if nf4_experts(config, shape, setup.strategy)
            else (
                f"experts: {setup.weights_dtype}, {plain:.2f} GiB in all instead of {packed:.2f} in nf4: int8, FSDP2,"
                " ZeRO-3, adapters on experts and unsloth leave them as they are"
            )
        )
    notes["memory"] = (
        f"memory: {HEADROOM[kind]:.0%} of what is free is planned for, {1 - HEADROOM[kind]:.0%} stay as the margin"
    )
    return notes | ({"allocator": EXPANDABLE if setup.expandable_segments else NATIVE} if kind == "cuda" else {})


def _on_the_host(
    request: Request, setup: Setup, micro_batch: int, reasons: dict[str, str], warnings: list[str]
) -> None:
    """Report what is kept in host memory. Raise `HardwareError` if that is too small."""
    hardware, processes = request.hardware, request.ranks.local

    def needed(rows: int) -> int:
        return processes * host_bytes(request.config, request.shape, setup, rows)

    if not (need := needed(micro_batch)):
        if setup.activation_offload:
            warnings.append("`train.activation_offload` moves nothing here: a CPU computes in the machine's memory")
        return
    reasons["offloaded"] = (
        f"offloaded to this machine's memory: {need / GIB:.1f} GiB for {plural(processes, 'process')}"
    )
    if not hardware.ram_known or need <= hardware.ram_bytes or request.launch.early:
        return
    have, size, hint = f"{hardware.ram_bytes / GIB:.1f} GiB", "", "TUNING_MODE=lora, or a machine with more memory"
    if setup.activation_offload:
        size = f" for micro-batches of {plural(micro_batch, 'row')}"
        fewer = next((rows for rows in range(micro_batch - 1, 0, -1) if needed(rows) <= hardware.ram_bytes), 0)
        hint = (f"TRAIN_BATCH_SIZE={fewer}, or " if fewer else "") + "TRAIN_ACTIVATION_OFFLOAD=off"
    what = "`train.activation_offload`" if setup.activation_offload else "offloading"
    raise HardwareError(
        f"{what} needs {need / GIB:.1f} GiB of this machine's memory{size}, and it has {have}", hint=hint
    )


GAIN = 1.02
"""Speed-ups below this factor count as none."""
MOST_TRIED = 8
"""Largest number of smaller sets of cards or machines that are planned to see whether fewer are faster."""
RECOMPUTED = {"train.gradient_checkpointing": True}
ALONE = {"launch.strategy": "auto", "launch.stages": "auto", "launch.tensor_parallel": 1, "launch.sequence_parallel": 1}


def _faster_ways(request: Request, plan: Plan) -> list[str]:
    """Return a note where the forecast says that the same step is made sooner by fewer cards or machines, or by
    recomputation, whose larger micro-batches gather shards less often.
    """
    speeds: list[tuple[float, str]] = []
    tried = sorted(_fewer(request), key=lambda way: len(way[1].ranks.devices))[:MOST_TRIED]
    if request.config.train.gradient_checkpointing == "auto" and not plan.gradient_checkpointing:
        tried.append(("with TRAIN_GRADIENT_CHECKPOINTING=true", request.with_keys(RECOMPUTED)))
    for words, changed in tried if plan.seconds_per_step else ():
        other = try_plan(request, changed, _decide)
        if isinstance(other, Plan) and other.global_batch_size == plan.global_batch_size:
            speeds.append((other.seconds_per_step or math.inf, words))
    best, words = min(speeds, default=(math.inf, ""))
    if not plan.seconds_per_step or plan.seconds_per_step <= GAIN * best:
        return []
    return [f"FASTER {words}: {figure(best)} s a step instead of {figure(plan.seconds_per_step)} s"]


def _fewer(request: Request) -> list[tuple[str, Request]]:
    """Return requests with one machine (or, on a single machine, one card) removed, and with it alone.

    Like units count once, and of like cards in one machine only a single card is considered.
    """
    ranks, hardware, cpu = request.ranks, request.hardware, request.hardware.kind == "cpu"
    several, network = len(ranks.nodes) > 1, request.hardware.network_bytes_per_second
    groups = list(map(ranks.ranks_of, range(len(ranks.nodes)))) if several else [(rank,) for rank in range(ranks.local)]
    units = [tuple(ranks.devices[rank] for rank in group) for group in groups]
    requests: list[tuple[str, Request]] = []
    for place, unit in enumerate(units):
        if len(units) < 2 or (cpu and not several) or unit in units[:place]:
            continue
        name = f"node {place} ({ranks.name_of(place)})" if several else f"rank {place} ({unit[0].name})"
        others = [*units[:place], *units[place + 1 :]]
        apart = several or network is not None or len(set(units)) > 1
        ways = [(f"on {name} alone", [unit])]
        ways += [(f"without {name}", others)] if apart and len(others) > 1 else []
        for words, staying in ways:
            devices = tuple(device for unit_devices in staying for device in unit_devices)
            nodes = len(staying) if several else 1
            launch = replace(
                request.launch,
                num_gpus=len(devices) if cpu else None,
                num_nodes=nodes,
                node_rank=0,
                node_devices=tuple(staying) if nodes > 1 else (),
            )
            alone = replace(
                launch, command_strategy="single", zero_stage=None, offload_optimizer=False, offload_parameters=False
            )
            fewer = replace(
                request,
                launch=launch if len(devices) > 1 else alone,
                hardware=replace(
                    hardware,
                    devices=devices[:1] if cpu else devices,
                    described=True,
                    network_bytes_per_second=network if len(staying) > 1 else None,
                ),
            )
            requests.append((words, fewer if len(devices) > 1 else fewer.with_keys(ALONE)))
    return requests


def _check_loading(request: Request, setup: Setup) -> None:
    """Raise `HardwareError` if loading in this machine's processes needs more memory than the machine has."""
    config, hardware, processes = request.config, request.hardware, request.ranks.local
    need = loading_host_bytes(config, request.shape, setup, processes)
    if hardware.ram_known and need > hardware.ram_bytes:
        raise HardwareError(
            f"`{label(config.model)}` cannot be loaded under {setup.strategy}: each of {plural(processes, 'process')}"
            f" holds all weights {'in fp32' if config.tuning.mode == 'full' else 'quantised'} before they are"
            f" sharded, {need / GIB:.1f} GiB of this machine's memory, which has {hardware.ram_bytes / GIB:.1f} GiB",
            hint="; or ".join(remedies.remedies_for_loading(request, _decide)) or "a machine with more memory",
        )


def ways_out(
    config: Config, shape: ModelShape, plan: Plan, launch: LaunchRequest, rank: RankPlan
) -> tuple[Remedy, ...]:
    """Return what would need less memory than a rank of this plan, which ran out although it should have fitted.

    Sizes come from the formulas.
    """
    devices = devices_of(plan)
    # Processes on a CPU share its memory.
    here = devices[0][:1] if plan.device == "cpu" else devices[0]
    free = sum(device.free_bytes for device in here)
    hardware = Hardware(
        kind=plan.device, devices=here, cpu_threads=len(devices[0]), ram_bytes=free, ram_known=False, described=True
    )
    launch = replace(launch, node_devices=devices if plan.num_nodes > 1 else ())
    request = Request(config=config, hardware=hardware, shape=shape, launch=launch)
    need = rank_memory(config, shape, plan, rank.micro_batch)
    return remedies.remedies(request, _decide, plan, rank.micro_batch, sum(need.values()))
