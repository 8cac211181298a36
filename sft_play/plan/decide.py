"""The decision of a plan, step by step, each choice with its reason, and what `auto` turns to where a replica does not
fit. Pure.

`auto` tries in this order: DDP, with recomputed activations if necessary; FSDP2 shards; where these do not fit or the
network between ranks is slow, slices of sequences or layers within a machine, or a pipeline; on one machine, 8-bit
optimizer states; ZeRO-3 with everything offloaded, where host memory holds it. Weights never travel over a slow network
unless the user asks for it. Machines that have not met keep their strategy: each plans by itself, from its own memory,
and all must arrive at the same run. A typed `tuning.mode` is never quantised; quantisation is only proposed.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any, cast

from sft_play.config.rules import check_rules, network_keys
from sft_play.errors import HardwareError, UserError
from sft_play.plan import choices, network
from sft_play.plan.architecture import check_length, label
from sft_play.plan.batch import Division, divide, explain_global_batch, halve, pack_if_typed, rows_each
from sft_play.plan.epoch import label_share, row_tokens, step_count
from sft_play.plan.hardware import GIB, HEADROOM, HOST_SHARE
from sft_play.plan.memory import (
    NF4_BYTES,
    host_bytes,
    loading_host_bytes,
    nf4_experts,
    trainable_parameters,
)
from sft_play.plan.plan import Plan, RankPlan, Setup, Strategy, tightest
from sft_play.plan.ranks import visible_names
from sft_play.plan.request import MOST_ROWS, DoesNotFitError, Request, describe_machines
from sft_play.plan.shape import check_patterns, check_targets, describe_adapters
from sft_play.plan.strategies import choose_strategy, has_bitsandbytes, is_automatic
from sft_play.plan.throughput import with_forecast
from sft_play.text import figure, plural

GAIN = 1.02
"""Speed-ups below this factor count as none."""
SMALL_OPTIMIZER = "adamw_bnb_8bit"
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


def decide(request: Request) -> Plan:
    """Return the plan of a request, without remedies for what does not fit. Raise `UserError` or `HardwareError`."""
    plan = _decide(request)
    # Computation hides the traffic of a fast network.
    slow = plan.gathers and network.slow_network(request)
    return network.check_gathering(request, plan, _less_sent(request, plan)) if slow else plan


def _decide(request: Request) -> Plan:
    """Return the plan, whatever waits for weights over a slow network. Raise `UserError` or `HardwareError`.

    Functions that receive `reasons` append what they decide, and why.
    """
    config, hardware, shape, launch = request.config, request.hardware, request.shape, request.launch
    kind, reasons, warnings = hardware.kind, dict[str, str](), list[str]()

    # Where ranks run, and by which strategy.
    check_length(config.model, shape.max_positions)
    check_targets(config, shape, kind)
    check_patterns(config, shape)
    reasons |= network.check_slices(request) | describe_machines(request)
    ranks = request.ranks
    strategy = choose_strategy(request, reasons)
    backend = choices.choose_backend(config, kind, len(ranks.devices), reasons)

    # How they compute.
    setup = _first_setup(request, strategy, reasons)
    rate = choices.choose_learning_rate(config, reasons)
    setup = pack_if_typed(request, setup)

    # What fits: recomputation first, then another strategy.
    setup, rows_that_fit = _choose_recomputation(request, setup, reasons)
    settled = _settle(request, setup, rows_that_fit, reasons)
    if isinstance(settled, Plan):
        return settled
    setup, rows_that_fit = settled[0], tuple(max(1, rows) for rows in settled[1])
    _check_loading(request, setup)

    # How much at a time: micro-batches, micro-steps and packs, with the memory that they take.
    division = divide(request, setup, rows_that_fit, reasons)
    setup = division.setup
    choices.check_schedule(config, rate)
    rank_plans = _rank_plans(request, division)
    reasons |= _explain_memory(request, setup, division.accumulation, rank_plans)
    if workers := choices.loader_workers(config, kind):
        who = "GPU" if kind == "cuda" else "rank"
        reasons["loader"] = (
            f"loader: {plural(workers, 'process')} per rank, which make batches while the {who} computes"
        )
    _on_the_host(request, setup, max(division.micro_batches), warnings)

    # How long: steps, and the forecast at the end.
    steps, per_epoch = step_count(request, reasons)
    eval_rows = 8 if kind == "cpu" else max(1, min(32, 2 * min(rows_that_fit)))
    eval_rows = eval_rows if config.eval.batch_size == "auto" else config.eval.batch_size
    warnings += _notices(request, setup)
    plan = Plan(
        **asdict(setup),
        num_nodes=launch.num_nodes,
        node_ranks=ranks.nodes if len(set(ranks.nodes)) > 1 else (),
        backend=cast(Any, backend),
        ranks=rank_plans,
        source="formula",
        nf4_experts=nf4_experts(config, shape, setup.strategy),
        global_batch_size=request.global_batch,
        most_rows=min(rows_that_fit),
        eval_batch_size=halve(eval_rows, launch.halvings),
        learning_rate=rate,
        warmup_steps=choices.warmup(config, steps),
        steps=steps,
        steps_per_epoch=per_epoch,
        reasons=reasons,
        notices=tuple(warnings),
    )
    return with_forecast(plan, request, division)


def _notices(request: Request, setup: Setup) -> Iterator[str]:
    """Yield what the user may not expect: a batch that grows, losses and optimizers other than those typed."""
    train, cards = request.config.train, len(request.hardware.devices)
    if request.hardware.network and request.launch.num_nodes == 1 and 0 < request.hardware.listed < cards:
        yield f"`HARDWARE` names a network, so each of the {cards} cards is in a separate machine; NUM_NODES=1: one"
    if notice := explain_global_batch(train, len(request.data_devices), request.unit):
        yield notice
    if request.shape.router_loss:
        yield ROUTER_LOSS
    for key, value in network_keys(request.config) if setup.world_size == 1 else ():
        yield f"`{key}` {value} has no effect: one process shares nothing"
    if train.loss != "nll" or train.label_smoothing_factor:
        smoothed = f", smoothed by {train.label_smoothing_factor:g}" if train.label_smoothing_factor else ""
        yield f"what is minimised is `{train.loss}`{smoothed}; evaluation measures the cross-entropy"
    if request.config.tuning.mode == "full" and setup.weight_bytes < 4 and not setup.zero:
        yield f"weights in {setup.weights_dtype} {choices.ROUNDED}"
    yield from other_optimizer(request, setup)


def other_optimizer(request: Request, setup: Setup) -> list[str]:
    """Return a notice if another optimizer runs than the typed one."""
    typed = request.config.train.optim
    if typed in ("auto", setup.optim):
        return []
    return [
        f"`train.optim: {typed}` does not run: its states cannot be sharded by {setup.strategy}; {setup.optim} does"
    ]


def _first_setup(request: Request, strategy: Strategy, reasons: dict[str, str]) -> Setup:
    """Return the setup with types, attention, optimizer and stages; rows are padded and nothing is recomputed."""
    config, hardware, devices = request.config, request.hardware, request.ranks.devices
    precision = choices.choose_precision(request, strategy, reasons)
    dtype = choices.choose_weights_dtype(config, hardware.kind, strategy, precision, reasons)
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
        kernels=choices.choose_kernels(request, reasons),
        label_share=label_share(request.train_split),
        row_tokens=row_tokens(request),
        offload_optimizer=request.launch.offload_optimizer,
        offload_parameters=request.launch.offload_parameters,
        expandable_segments=all(device.expandable_segments for device in devices),
        sequence_parallel=config.launch.sequence_parallel,
        tensor_parallel=config.launch.tensor_parallel,
    )
    setup = replace(setup, optim=choices.choose_optimizer(request, setup, reasons))
    setup = choices.with_chunks(config, request.shape, setup)
    network.check_local_steps(config, setup)
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
    if asked == "auto" and setup.offload_parameters:
        share = rows_each(request.global_batch, setup.data_world)
        if min(share, *(larger := request.largest(saving))) > min(plain):
            reasons["recomputation"] = (
                "gradient checkpointing on: with larger micro-batches the weights cross PCIe less often"
            )
            return saving, larger
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
            division.slots[group],
            request.rank_room[rank] if division.setup.stages else request.room[group],
        )
        parts = request.parts(division.setup.on(rank), max(1, micro))
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


def _explain_memory(request: Request, setup: Setup, micro_steps: int, ranks: tuple[RankPlan, ...]) -> dict[str, str]:
    """Return notes on how memory is used, and on a rank that may run short."""
    config, shape, kind, notes = request.config, request.shape, request.hardware.kind, dict[str, str]()
    if setup.strategy == "fsdp2" and micro_steps > 1:
        gradient_gib = 4 * trainable_parameters(config, shape) / GIB
        notes["gradients"] = (
            f"gradients reduced in each of {micro_steps} micro-steps: else every rank would hold {gradient_gib:.1f} GiB"
            " of them in fp32 until the last"
        )
    fullest = tightest(ranks)
    if fullest.peak_bytes > fullest.capacity_bytes:
        notes["room"] = (
            f"rank {fullest.rank} may run short: {fullest.peak_bytes / GIB:.1f} of"
            f" {fullest.capacity_bytes / GIB:.1f} GiB"
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


def _on_the_host(request: Request, setup: Setup, micro_batch: int, warnings: list[str]) -> None:
    """Report what is kept in host memory. Raise `HardwareError` if that is too small."""
    hardware, processes = request.hardware, request.ranks.local
    if not (need := processes * host_bytes(request.config, request.shape, setup, micro_batch)):
        if setup.activation_offload:
            warnings.append("`train.activation_offload` moves nothing here: a CPU computes in the machine's memory")
        return
    share = f"{need / GIB:.1f} GiB for {plural(processes, 'process')}"
    if hardware.ram_known:
        share += f", of {hardware.ram_bytes / GIB:.1f} GiB"
    if hardware.ram_known and need > HOST_SHARE * hardware.ram_bytes:
        share += "; that leaves little for loading and for other programs"
    warnings.append(f"offloaded to this machine's memory: {share}")
    if not hardware.ram_known or need <= hardware.ram_bytes or request.launch.early:
        return
    smaller = {"full": "TUNING_MODE=lora, or ", "lora": "TUNING_MODE=qlora without offloading, or "}
    what, hint = "offloading", f"{smaller.get(request.config.tuning.mode, '')}a machine with more memory"
    if setup.activation_offload:
        what, hint = "`train.activation_offload`", "a smaller TRAIN_BATCH_SIZE, or TRAIN_ACTIVATION_OFFLOAD=off"
    raise HardwareError(
        f"{what} needs {need / GIB:.1f} GiB of this machine's memory for micro-batches of {plural(micro_batch, 'row')},"
        f" and it has {hardware.ram_bytes / GIB:.1f} GiB",
        hint=hint,
    )


def _check_loading(request: Request, setup: Setup) -> None:
    """Raise `HardwareError` if loading in this machine's processes needs more memory than the machine has."""
    config, hardware, processes = request.config, request.hardware, request.ranks.local
    need = loading_host_bytes(config, request.shape, setup, processes)
    if hardware.ram_known and need > hardware.ram_bytes:
        raise HardwareError(
            f"`{label(config.model)}` cannot be loaded under {setup.strategy}: each of {plural(processes, 'process')}"
            f" holds all weights {'in fp32' if config.tuning.mode == 'full' else 'quantised'} before they are"
            f" sharded, {need / GIB:.1f} GiB of this machine's memory, which has {hardware.ram_bytes / GIB:.1f} GiB",
            hint="TUNING_MODE=lora; or make train-deepspeed CONFIG=... LAUNCH_STRATEGY=zero3, if the shards fit",
        )


def _settle(
    request: Request, setup: Setup, fitting: tuple[int, ...], reasons: dict[str, str]
) -> Plan | tuple[Setup, tuple[int, ...]]:
    """Return setup and rows per rank when they fit, or the plan of another strategy that `auto` chooses when not.

    `fitting` is the number of rows that each rank's memory holds. Raise `DoesNotFitError`.
    """
    config, launch, slow = request.config, request.launch, network.slow_network(request)
    shards: DoesNotFitError | None = None
    if min(fitting) < request.required_rows:
        need, room = request.need(setup, request.required_rows), request.room[fitting.index(min(fitting))]
        replica = f"a complete replica on each needs {need / GIB:.1f} of {room / GIB:.1f} GiB"
        may_change = is_automatic(config, launch) and setup.strategy == "ddp" and setup.group_size == 1
        may_change = may_change and not network_keys(config)
        if may_change and (launch.num_nodes == 1 or request.hardware.described or launch.node_devices):
            shared = _share_model(request, setup, replica)
            if isinstance(shared, Plan):
                return shared
            shards = shared
        # Several nodes plan by themselves, and with different optimizers they would train different models.
        one_machine = launch.num_nodes == 1 and not slow
        if one_machine and config.train.optim == "auto":
            setup, fitting = _small_optimizer(request, setup, fitting, reasons)
        still_too_large = min(fitting) < request.required_rows
        if may_change and one_machine and still_too_large and (plan := _offload(request, setup, replica)):
            return plan
    try:
        request.require(setup, fitting)
    except DoesNotFitError as error:
        raise _refusal(request, error, shards, fitting) from None
    return setup, fitting


def _share_model(request: Request, setup: Setup, replica: str) -> Plan | DoesNotFitError | None:
    """Return the plan of the first way to share the model, or its rows, that fits; otherwise FSDP2's error, if any.

    `replica` says why no rank holds the model alone.
    """
    slow = network.slow_network(request)
    fsdp2 = replace(request, launch=replace(request.launch, command_strategy="fsdp2"))
    shards = None if slow else try_plan(request, fsdp2)
    if isinstance(shards, Plan):
        why = f"strategy fsdp2: {replica}, so weights are sharded"
        return shards.with_reason("strategy", why)
    for way, changed in _ways(request):
        plan = try_plan(request, changed)
        if isinstance(plan, Plan):
            why = f"strategy {plan.strategy}: {way}, since {replica}"
            if slow:
                why += f"; fsdp2 over {slow}: {network.gathering_arithmetic(request, replace(setup, strategy='fsdp2'))}"
            elif shards:
                why += f"; with weights sharded by fsdp2 still {shards.need_bytes / GIB:.1f} GiB"
            return plan.with_reason("strategy", why)
    return shards


def _ways(request: Request) -> Iterator[tuple[str, Request]]:
    """Yield requests whose neighbouring ranks share sequences, layers or the model, in the order in which to try them.

    Of the ways that involve all ranks in each layer, slices of sequences send least. Slices of layers need NVLink;
    without it a pipeline, which sends only hidden states, is better.
    """
    near, linked = math.gcd(*request.ranks.nodes), network.have_nvlink(request.ranks.devices)
    sizes = [size for size in range(2, near + 1) if near % size == 0]
    lines, layers = (
        [(f"{key} {size}", request.with_keys({f"launch.{key}": size})) for size in sizes]
        for key in ("sequence_parallel", "tensor_parallel")
    )
    pipeline = [("pipeline", request.with_keys({"launch.strategy": "pipeline"}))]
    yield from (*lines, *layers, *pipeline) if linked else (*lines, *pipeline, *layers)


def _less_sent(request: Request, plan: Plan) -> str:
    """Return the fastest way without gathering that fits, and what it gains over this plan; empty if there is none."""
    launch, ways = request.launch.without_json("auto"), list[tuple[float, str]]()
    now = plan.seconds_per_step or plan.communication_seconds or math.inf
    for strategy, what in (("ddp", "gradients"), ("pipeline", "hidden states")):
        other = try_plan(request, replace(request, launch=launch).with_keys({"launch.strategy": strategy}))
        if not isinstance(other, Plan):
            continue
        seconds = other.seconds_per_step or other.communication_seconds or 0.0
        gain = f": {figure(seconds)} s a step instead of {figure(now)} s" if seconds > 0 and now < math.inf else ""
        words = f"LAUNCH_STRATEGY={strategy} (make train-distributed) sends {what} alone{gain}"
        ways += [(seconds, words)] if GAIN * seconds <= now else []
    return min(ways, key=lambda way: way[0], default=(0.0, ""))[1]


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


def _offload(request: Request, setup: Setup, replica: str) -> Plan | None:
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
    plan = try_plan(request, replace(request, launch=request.launch.with_offloading()))
    why = (
        f"strategy zero3: {replica} and shards do not fit either, so this machine's memory holds them:"
        f" {need / GIB:.1f} of {hardware.ram_bytes / GIB:.1f} GiB; slow"
    )
    return plan.with_reason("strategy", why) if isinstance(plan, Plan) else None


def _refusal(
    request: Request, error: DoesNotFitError, sharded: DoesNotFitError | None, fitting: tuple[int, ...]
) -> DoesNotFitError:
    """Return the error of the attempt that came nearest to fitting, with notes on this hardware.

    `sharded` is the error of what `auto` tried instead of replicas.
    """
    hardware, setup, notes = request.hardware, error.setup, []
    whole = [index for index, rows in enumerate(fitting) if rows >= error.micro_batch]
    if whole and request.launch.num_nodes == 1 and hardware.kind == "cuda" and not hardware.described:
        names = ",".join(visible_names(hardware.devices, whole))
        notes.append(f"CUDA_VISIBLE_DEVICES={names}: {len(whole)} of {setup.world_size} GPUs hold it")
    slow = network.slow_network(request)
    if slow and not setup.gathers:
        typed = request.config.launch.strategy
        unasked = f"`launch.strategy: {typed}` does not shard weights"
        if typed == "auto":
            automatic = is_automatic(request.config, request.launch)
            unasked = "`auto` does not shard weights" if automatic else "weights are not sharded"
        allowed = " LAUNCH_SLOW_NETWORK=allow" if hardware.network_bytes_per_second else ""
        why = f"{unasked} over {slow}: {network.gathering_arithmetic(request, replace(setup, strategy='fsdp2'))}"
        launch = request.launch.without_json("fsdp2")
        forced = replace(request, launch=launch).with_keys({"launch.strategy": "fsdp2"})
        fits = isinstance(try_plan(request, forced, _decide), Plan)
        notes.append(f"{why}; " + (f"LAUNCH_STRATEGY=fsdp2{allowed} forces it" if fits else "nor would they fit so"))
    if sharded and sharded.need_bytes - sharded.capacity_bytes < error.need_bytes - error.capacity_bytes:
        after = f", with weights sharded by fsdp2; a complete replica needs {error.need_bytes / GIB:.1f} GiB"
        return sharded.add(notes=tuple(notes), after=after)
    return error.add(notes=tuple(notes))


def try_plan(
    request: Request, changed: Request, decision: Callable[[Request], Plan] = decide
) -> Plan | DoesNotFitError | None:
    """Return the changed plan, or the error with how far it is from fitting; `None` if the rules would refuse it."""
    before, after = ({conflict.message for conflict in check_rules(case.config, {})} for case in (request, changed))
    if after - before:
        return None
    try:
        return decision(changed)
    except DoesNotFitError as error:
        return error
    except UserError:
        return None
