"""How the rows of a step are divided among ranks, by memory and by forecast; and whether fewer machines would be
faster. Pure.

Speeds are measured (`make bench`) or priors; of cards whose speed is not known, those with more memory are taken for
the faster ones, in proportion, until training has measured them (`training/balance.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from sft_play.plan import choices
from sft_play.plan.batch import (
    Batch,
    Cost,
    Slots,
    choose_batch,
    equal_shares,
    halve_batch,
    share_out,
    spans,
    step_seconds,
)
from sft_play.plan.epoch import Division, choose_packing, gaining_packs, rows_data
from sft_play.plan.hardware import Device
from sft_play.plan.network import check_gathering, exchange_seconds, link_of
from sft_play.plan.plan import RankPlan, Setup
from sft_play.plan.request import MOST_ROWS, Request
from sft_play.plan.shape import BY_LENGTHS
from sft_play.plan.throughput import Forecast, forecast, optimizer_seconds, paces_of, padded_tokens, step_flops
from sft_play.text import figure, plural

SHARED = "shares by speed and memory"
"""How the reason begins that says what each rank gets."""
WORTH = 1.01
"""Shares that a forecast does not find faster by more than this factor stay as they are."""
GAIN = 1.02
"""What is not faster than this is as fast: then the larger micro-batch is taken, and rows in one line; and no machine
is left out.
"""
UNEQUAL = 1.1
"""Ranks of which one computes longer than another by more than this factor are worth a warning."""
NAMED = 8
"""Ranks whose shares are told one by one, at most."""
LEAST_PADDING = 0.01
"""Share of tokens below which padding is not worth a word."""
MOST_TOGETHER = {"cuda": 64, "cpu": 4}
"""Rows of a micro-batch beyond which nothing is gained; on a CPU matrices are large enough then, and memory grows."""
TYPICAL_FLOPS, TYPICAL_BANDWIDTH, TYPICAL_NETWORK = 1e14, 1e12, 1e9
"""Of cards and networks whose speed is not known: enough to compare, never shown."""

Seconds = Callable[[Division], float]
"""Forecast of a step, infinite where nothing is known."""


def divide(request: Request, setup: Setup, fitting: tuple[int, ...], reasons: list[str]) -> Division:
    """Return micro-batch, accumulation, packing, layout and loss chunks, by memory and by the forecast. Raise
    `UserError`.

    `fitting`: the rows that each rank's memory holds.
    """
    config, launch, train = request.config, request.launch, request.config.train
    # What fits under packing are packs; and before the data are known, rows of the greatest length must not refuse what
    # was typed.
    if train.packing == "on" or (launch.early and train.grad_accum != "auto"):
        fitting = (MOST_ROWS,) * len(fitting)
    comparable = _comparable(request)
    most = MOST_TOGETHER[setup.device]

    def seconds(division: Division) -> float:
        return forecast(comparable, division).seconds_per_step or math.inf

    whole = choose_batch(train, fitting, most, request.unit)
    plain = _fastest(request, setup, whole, fitting, seconds)
    laid = _with_layout(request, setup, plain, seconds, [])
    division = choose_packing(request, laid, plain, most, seconds, reasons)
    # Larger micro-batches than these gain no speed, or a forecast found them slower.
    if division.setup.pack_tokens:
        together = max(gaining_packs(division, most), *division.batch.micro_batches)
    else:
        together = (
            most if not request.divides or plain.micro_batches == whole.micro_batches else max(plain.micro_batches)
        )
    division = _with_shares(request, division, costs_of(comparable, division, together), seconds, reasons)
    batch = halve_batch(division.batch, launch.halvings, request.unit)
    reasons += batch.reasons[len(division.batch.reasons) :]
    setup = _with_layout(request, division.setup, batch, seconds, reasons)
    data = rows_data(request, division)
    padding = 1 - data.row_tokens / padded_tokens(data, max(batch.micro_batches))
    if setup.layout != "flattened" and padding >= LEAST_PADDING:
        reasons.append(
            f"padding {padding:.0%} of all tokens by forecast: rows are as long as the longest of their micro-batch"
        )
    setup = replace(setup, accumulates=batch.accumulation > 1)
    division = replace(division, setup=setup, batch=batch)
    check_gathering(request, setup, division.micro_steps, forecast(comparable, division).computing_seconds)

    def fits(larger: Setup) -> bool:
        recovers = launch.halvings or launch.force_checkpointing  # memory ran out: the plan had promised too much
        return not recovers and request.fits(larger, tuple(max(1, rows) for rows in batch.micro_batches))

    chunks = choices.settle_chunks(config, request.shape, setup, max(batch.micro_batches), fits, reasons)
    return replace(division, setup=chunks)


def _comparable(request: Request) -> Request:
    """Return the request with the speeds of typical cards and networks where they are not known, so that choices can be
    compared.

    Of unlike ones those with more memory are taken for the faster, in proportion: 12 and 8 GB cards of one time differ
    by about that.
    """
    hardware, launch, ranks = request.hardware, request.launch, request.ranks
    if launch.num_nodes > 1 and not hardware.network_bytes_per_second:
        hardware = replace(hardware, network_bytes_per_second=TYPICAL_NETWORK)
    unknown = [device for device in ranks.devices if not device.peak_flops]
    if hardware.kind == "cpu" or not unknown:
        return replace(request, hardware=hardware)
    mean = sum(device.memory_bytes for device in unknown) / len(unknown)

    def typical(device: Device) -> Device:
        times = device.memory_bytes / mean
        bandwidth = device.bandwidth or times * TYPICAL_BANDWIDTH
        return device if device.peak_flops else replace(device, peak_flops=times * TYPICAL_FLOPS, bandwidth=bandwidth)

    devices = tuple(map(typical, ranks.devices))
    nodes = tuple(tuple(devices[rank] for rank in ranks.ranks_of(node)) for node in range(len(ranks.nodes)))
    return replace(request, hardware=replace(hardware, devices=devices), launch=replace(launch, node_devices=nodes))


def _fastest(request: Request, setup: Setup, whole: Batch, fitting: tuple[int, ...], seconds: Seconds) -> Batch:
    """Return `whole`, the batch with the largest micro-batch, or a smaller one that is faster, unless something else
    was typed.
    """
    largest, unknown = max(whole.micro_batches), not all(device.peak_flops for device in request.ranks.devices)
    if not request.divides or request.config.train.packing == "on" or largest == 1:
        return whole
    if unknown and request.hardware.kind == "cuda" and len(set(fitting)) > 1:
        return whole  # the larger of unequal cards are mostly the faster ones
    tried = {whole.micro_batches: whole}
    for power in range((largest - 1).bit_length()):
        batch = choose_batch(request.config.train, fitting, 2**power, request.unit)
        tried.setdefault(batch.micro_batches, batch)
    times = {
        micros: seconds(Division(setup=_with_layout(request, setup, batch, seconds, []), batch=batch))
        for micros, batch in tried.items()
    }
    chosen = max((micros for micros in tried if times[micros] <= GAIN * min(times.values())), key=sum)
    if chosen == whole.micro_batches:
        return whole
    reason = (
        f"micro-batch {max(chosen)}, not {largest}: by forecast a step then takes {figure(times[chosen])} s instead of "
        f"{figure(times[whole.micro_batches])} s; the time goes into padding, or a mask over all rows"
    )
    return replace(tried[chosen], reasons=(*tried[chosen].reasons, reason))


def _with_layout(request: Request, setup: Setup, batch: Batch, seconds: Seconds, reasons: list[str]) -> Setup:
    """Return the setup with the layout of its rows: in one line where that is exact, fits, and is not slower than
    padding.
    """
    if setup.pack_tokens:
        return setup
    padded, rows = replace(setup, layout=choices.padded_layout(request)), max(batch.micro_batches)
    layout = choices.choose_layout(request, setup, rows, setup.row_tokens, reasons)
    flattened = replace(setup, layout=layout)
    if layout != "flattened" or rows == 1 or setup.attn_implementation in BY_LENGTHS:
        return flattened
    if not request.fits(flattened, batch.micro_batches) and request.fits(padded, batch.micro_batches):
        reasons[-1] = f"rows padded: the mask of {rows * setup.row_tokens} flattened tokens would not fit"
        return padded
    before, after = (seconds(Division(setup=case, batch=batch)) for case in (flattened, padded))
    if before > GAIN * after:
        slower = before / after - 1
        reasons[-1] = (
            f"rows padded: in one line, under a mask over all of them, a step would take {slower:.0%} longer by"
            " forecast"
        )
        return padded
    return flattened


# Ranks on unlike devices.


def costs_of(request: Request, division: Division, most: int) -> tuple[Cost, ...]:
    """Return what a row (or pack) costs each rank in micro-batches of `most` at most; nothing where the speed of one is
    not known.

    A micro-step's time is taken for a straight line between one row and the most that fit.
    """
    config, shape, setup, data = request.config, request.shape, division.setup, rows_data(request, division)
    paces = paces_of(request, setup, data)
    if paces is None:
        return ()

    def cost(device: Device, fitting: int) -> Cost:
        rows = max(1, min(most, fitting))
        far = max(rows, 2)
        one, whole = (paces[device].seconds(step_flops(config, shape, setup, count, 1, data), 1) for count in (1, far))
        # Where launching the kernels takes longer than computing so many rows, each costs next to nothing.
        row = (whole - one) / (far - 1) if whole > one else one / 1000
        fixed, row = (one - row, row) if one > row else (0.0, whole / far)
        return Cost(fixed_seconds=fixed, row_seconds=row, most_rows=rows)

    return tuple(map(cost, request.data_devices, request.largest(setup)))


def _with_shares(
    request: Request, division: Division, costs: Sequence[Cost], seconds: Seconds, reasons: list[str]
) -> Division:
    """Return the division with shares by cost where ranks are unlike, nobody typed shares, and a step is faster by
    forecast.
    """
    same = division.setup.strategy != "ddp"
    if not request.divides or len(set(costs)) < 2 or not all(cost.most_rows for cost in costs):
        return division
    equal = _with_slots(division, equal_shares(division.rows, costs, same_steps=same))
    if request.config.launch.balance == "off":
        if len(set(division.batch.micro_batches)) == 1:
            return division
        told = f"equal shares, as `launch.balance: off` says: {_rows_of_ranks(equal)} of {division.rows} a step"
        _replace_reasons(reasons, told)
        return equal
    chosen = _with_slots(division, share_out(division.rows, costs, same_steps=same))
    after = seconds(chosen)
    if seconds(division) <= WORTH * after:
        return division
    _replace_reasons(reasons, _shares_in_words(chosen, [cost.most_rows for cost in costs]))
    if request.hardware.kind == "cuda" and not all(device.peak_flops for device in request.ranks.devices):
        reasons.append(
            "the speed of these cards is not known: more memory is taken for more speed, in proportion, until training"
            " has measured it (`launch.balance: off` gives equal shares)"
        )
        return chosen
    before = seconds(equal)
    counts = f" ({_rows_of_ranks(chosen)} instead of {_rows_of_ranks(equal)})" if len(costs) <= NAMED else ""
    reasons.append(
        f"unequal shares: {figure(before)} s -> {figure(after)} s a step, {before / after:.2f} times as fast as equal"
        f" ones{counts}"
    )
    return chosen


def _replace_reasons(reasons: list[str], reason: str) -> None:
    """Put a reason in the place of those of the micro-batch that shares replace."""
    reasons[:] = [*(one for one in reasons if not one.startswith(("micro-batch ", "accumulation "))), reason]


def _with_slots(division: Division, shares: tuple[Slots, ...]) -> Division:
    """Return the division with these slots; with packing, so many micro-steps that the fullest step fits."""
    if division.setup.pack_tokens:
        bound = division.packs.bound if division.packs else division.batch.global_batch
        more = max(1.0, bound / sum(micro * steps for micro, steps in shares))
        shares = tuple((micro, math.ceil(steps * more)) for micro, steps in shares)
    return replace(division, batch=replace(division.batch, slots=shares))


def _rows_of_ranks(division: Division) -> str:
    return ", ".join(map(str, spans(division.rows, division.batch.slots)))


def _shares_in_words(division: Division, most_rows: Sequence[int]) -> str:
    """Return what each rank gets; `most_rows`: the largest micro-batch that each one's memory holds."""
    unit = "pack" if division.setup.pack_tokens else "row"
    counts, total = spans(division.rows, division.batch.slots), plural(division.rows, unit)
    if len(counts) > NAMED:
        return f"{SHARED}: {min(counts)} to {max(counts)} of {total} a step for each rank"
    parts = [
        (
            f"rank {rank} {plural(rows, unit)} in {plural(steps, 'micro-step')} of up to {micro} ({most} would fit)"
            if rows
            else f"rank {rank} nothing, since the others are done with all of them before it is with one"
        )
        for rank, ((micro, steps), rows, most) in enumerate(zip(division.batch.slots, counts, most_rows, strict=True))
    ]
    return f"{SHARED}, of {total} a step: " + "; ".join(parts)


def tell_unequal(
    request: Request,
    division: Division,
    ranks: Sequence[RankPlan],
    costs: Sequence[Cost],
    speed: Forecast,
    reasons: list[str],
    warnings: list[str],
) -> None:
    """Say where ranks wait for a slower one, and when a step would be faster on fewer machines in micro-batches no
    larger than now.
    """
    if any(reason.startswith(SHARED) for reason in reasons):
        told = _shares_in_words(division, [rank.most_rows for rank in ranks])
        reasons[:] = [told if reason.startswith(SHARED) else reason for reason in reasons]
    else:
        reasons += _describe_unequal(request, division, speed)
    everyone = tuple(range(len(ranks)))
    machines = _machines(request)
    link = link_of(request.hardware, request.ranks.devices, request.launch.num_nodes, request.calibration)
    if not machines or request.group_size > 1 or not request.divides or not costs or link is None:
        return
    same = division.setup.strategy != "ddp"
    now = step_seconds(division.rows, division.batch.slots, costs)
    now += _beside_computing(request, division.setup, everyone, division.batch.accumulation)
    options: list[tuple[float, str]] = []
    tried: set[tuple[Cost, ...]] = set()
    for name, alone in machines.items():
        if (kind := tuple(costs[rank] for rank in alone)) in tried:
            continue  # as good as another machine
        tried.add(kind)
        others = tuple(rank for rank in everyone if rank not in alone)
        for staying, words in ((others, f"without {name}"), (alone, f"on {name} alone")):
            if not 0 < len(staying) < len(everyone):
                continue
            rest = [costs[rank] for rank in staying]
            if same:  # where weights or states are shared out, fewer ranks hold more of them
                fewer = replace(division.setup, world_size=len(staying))
                held = [request.largest_in(fewer, request.room[rank]) for rank in staying]
                rest = [
                    replace(cost, most_rows=min(cost.most_rows, most)) for cost, most in zip(rest, held, strict=True)
                ]
            if all(cost.most_rows for cost in rest):
                shares = share_out(division.rows, rest, same_steps=same)
                beside = _beside_computing(request, division.setup, staying, max(steps for _, steps in shares))
                options.append((step_seconds(division.rows, shares, rest) + beside, words))
    best, words = min(options, default=(math.inf, ""))
    if now > GAIN * best:
        warnings.append(f"FASTER {words}: {figure(best)} s a step instead of {figure(now)} s, the network included")


def _describe_unequal(request: Request, division: Division, speed: Forecast) -> list[str]:
    """Return a warning where some ranks wait for a slower one, with what sharing out the rows by speed would save."""
    each = zip(speed.rank_seconds, division.shares, request.data_devices, strict=False)
    working = sorted((spent, rows, device.name) for spent, rows, device in each if rows)
    if not working or working[-1][0] <= UNEQUAL * working[0][0]:
        return []
    (fast, _, faster), (slow, _, slower) = working[0], working[-1]
    even = sum(rows for _, rows, _ in working) / sum(rows / spent for spent, rows, _ in working)
    return [
        f"unequal GPUs: {slower} computes {figure(slow)} s of each step and {faster} {figure(fast)} s, so a step is "
        f"{slow / even - 1:.0%} longer than rows shared out by speed would"
    ]


def _machines(request: Request) -> Mapping[str, tuple[int, ...]]:
    """Return name -> ranks of what could be left out: a machine, or a device of several that only a network joins, or
    that differ.
    """
    ranks = request.ranks
    if len(ranks.nodes) > 1:
        return {f"node {node} ({ranks.name_of(node)})": ranks.ranks_of(node) for node in range(len(ranks.nodes))}
    if request.hardware.network_bytes_per_second is None and len(set(ranks.devices)) == 1:
        return {}
    return {f"rank {rank} ({device.name})": (rank,) for rank, device in enumerate(ranks.devices)}


def _beside_computing(request: Request, setup: Setup, staying: tuple[int, ...], micro_steps: int) -> float:
    """Return the seconds of a step's exchange and update where these ranks take part."""
    ranks, hardware, devices = request.ranks, request.hardware, tuple(request.ranks.devices[rank] for rank in staying)
    nodes = len({node for node in range(len(ranks.nodes)) if set(ranks.ranks_of(node)) & set(staying)})
    if nodes == 1 and len(ranks.nodes) > 1:
        hardware = replace(hardware, network_bytes_per_second=None)
    link = link_of(hardware, devices, nodes, request.calibration)
    assert link is not None, "a link that several machines have"
    fewer = replace(setup, world_size=len(staying))
    return exchange_seconds(request, fewer, micro_steps, link) + optimizer_seconds(request, fewer, devices)
