"""The plan and its forecast as text, with the cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from sft_play.errors import UserError, typed_here
from sft_play.plan.batch import spans
from sft_play.plan.hardware import GIB, Hardware
from sft_play.plan.memory import LABELS, MOVING, STATES
from sft_play.plan.network import show_exchanges
from sft_play.plan.plan import Plan, RankPlan, tightest
from sft_play.plan.request import DoesNotFitError
from sft_play.runs.folder import RunFolder
from sft_play.runs.gate import read_facts
from sft_play.text import duration, energy, figure, gib, list_some, plural

ORDER = (*STATES, "buffers", *MOVING, "context", "fragmentation")
BAR = 40
MOST_LISTED = 32
MOST_SHOWN = 8
"""Largest number of ranks in the heading of a block of bars."""


def show_plan(plan: Plan, *, why: bool = True, details: bool = False) -> str:
    """Return a summary in five lines, with reasons if `why`, with memory bars of every kind of rank if `details`."""
    first = plan.ranks[0]
    names = Counter(rank.device_name for rank in plan.ranks)
    where = " + ".join(f"{number} x {name}" if number > 1 else name for name, number in names.items())
    if plan.device == "cpu" and plan.world_size > 1:
        where = f"{plan.world_size} processes of {first.device_name}"
    lines = [f"plan: {_layout(plan)} on {where}, {plan.precision}, by {plan.source}"]
    lines.append(f"  batch    {_batch(plan, _span(rank.micro_batch for rank in plan.ranks))}")
    lines += [f"  note     {notice}" for notice in plan.notices]
    lines.append(f"  steps    {_steps(plan)}")
    worst = tightest(plan.ranks)
    lines.append(
        f"  memory   {gib(worst.peak_bytes)} of {gib(worst.capacity_bytes)} at the peak of rank {worst.rank}:"
        f" {_parts(worst)}"
    )
    speed = show_speed(plan)
    if why:
        lines += [f"  room     {_room(plan)}"]
        lines += ["  speed    " + speed[0], *(f"           {line}" for line in speed[1:])]
        if plan.exchanges:
            lines += ["", *show_exchanges(plan.exchanges), ""]
        lines += [f"  {'because' if not number else '':<9}{why}" for number, why in enumerate(plan.reasons.values())]
    else:
        lines.append(
            f"  speed    {speed[0]}" + (f", {duration(plan.total_seconds)} in all" if plan.total_seconds else "")
        )
        lines += [f"           {line}" for line in (*_assumed(plan), *_communication(plan), *_cost(plan))]
    if details:
        lines += ["", *_ranks(plan), *_bars(plan)]
    return typed_here("\n".join(lines))


def _layout(plan: Plan) -> str:
    """Return how ranks share a model, and the strategy between groups: `tensor parallel 4, ddp of 2 groups`."""
    layers, groups = ", ".join(map(str, plan.stages)), plan.data_world
    within = [f"pipeline of {len(plan.stages)} stages ({layers} layers)"] if plan.stages else []
    within += [
        f"{name} parallel {ranks}"
        for name, ranks in (("tensor", plan.tensor_parallel), ("sequence", plan.sequence_parallel))
        if ranks > 1
    ]
    whole = not within or (plan.sequence_parallel > 1 and plan.strategy != "ddp")  # shards lie over all ranks
    between = [plan.strategy] if whole else [f"{plan.strategy} of {groups} groups"] if groups > 1 else []
    return ", ".join([*within, *between])


def _batch(plan: Plan, micro: str) -> str:
    """Return how the rows of a step are divided; for packs, with the largest number of micro-steps."""
    accumulation = max(rank.accumulation for rank in plan.ranks)
    groups, unit = plan.data_world, "rank" if plan.group_size == 1 else "group"
    if plan.pack_tokens:
        where = f" on each of {plural(groups, unit)}" if groups > 1 else ""
        packs = f"{micro} {'pack' if micro == '1' else 'packs'} of up to {plan.row_tokens:,} tokens"
        return (
            f"{plan.global_batch_size} rows a step, in at most {plural(accumulation, 'micro-step')} of {packs}{where}"
        )
    empty = sum(map(math.prod, plan.slots)) > plan.global_batch_size
    steps = _span(rank.accumulation for rank in plan.ranks)
    whole = f"{plan.global_batch_size} rows a step = micro-batch {micro} x accumulation {steps} x {groups}"
    whole += f" {'groups' if groups > 1 else 'group'} of {plan.group_size}" if plan.group_size > 1 else ""
    return whole + (" (some slots empty)" if empty else "")


def _span(values: Iterable[int]) -> str:
    """Return `4`, or `2 to 4` for values that differ."""
    distinct = sorted(set(values))
    return str(distinct[0]) if len(distinct) == 1 else f"{distinct[0]} to {distinct[-1]}"


def _ranks(plan: Plan) -> list[str]:
    """Return a table of each rank's part of a step; empty if all parts are equal."""
    if len({(rank.micro_batch, rank.accumulation, rank.device_name) for rank in plan.ranks}) == 1:
        return []
    unit = "packs" if plan.pack_tokens else "rows"
    counts = spans(plan.global_batch_size, plan.slots) if not plan.pack_tokens else None
    lines = [f"  {'rank':>6}  {'device':<26}{'micro-batch':>12}{'micro-steps':>12}{unit:>8}{'would fit':>11}"]
    for rank in plan.ranks[:MOST_LISTED]:
        rows = counts[rank.rank // plan.group_size] if counts else f"{rank.micro_batch * rank.accumulation} max"
        lines.append(
            f"  {rank.rank:>6} "
            f" {rank.device_name[:25]:<26}{rank.micro_batch:>12}{rank.accumulation:>12}{rows:>8}{rank.most_rows:>11}"
        )
    rest = len(plan.ranks) - MOST_LISTED
    return [*lines, *([f"  and {rest} more"] if rest > 0 else []), ""]


def _steps(plan: Plan) -> str:
    if plan.steps is None:
        return f"known when the data are prepared ({_counted(plan)})"
    epoch = f", {plan.steps_per_epoch} an epoch" if plan.steps_per_epoch else ""
    return (
        f"{plan.steps}{epoch}, learning rate {plan.learning_rate:g} after"
        f" {plural(plan.warmup_steps or 0, 'warm-up step')}"
    )


def _counted(plan: Plan) -> str:
    """Return what makes the number of steps known."""
    return f"TRAIN_MAX_STEPS = rows x epochs / {plan.global_batch_size}, or `make data CONFIG=...`"


def _room(plan: Plan) -> str:
    """Return the largest batch and the longest rows that would fit."""
    if plan.pack_tokens:
        return f"for packs of up to {plan.longest_row:,} tokens"
    if len({rank.micro_batch for rank in plan.ranks}) > 1:
        return f"rows of up to {plan.longest_row:,} tokens would fit in these micro-batches"
    rows = f"up to {plural(plan.most_rows, 'row')} of {plan.row_tokens:,} tokens would fit"
    if plan.longest_row == plan.row_tokens:
        return rows
    return f"{rows}, or {plural(plan.ranks[0].micro_batch, 'row')} of up to {plan.longest_row:,} tokens"


def _parts(rank: RankPlan) -> str:
    largest = sorted(((name, rank.memory_bytes.get(name, 0)) for name in ORDER), key=lambda part: -part[1])[:4]
    return ", ".join(f"{LABELS.get(name, name)} {gib(size)}" for name, size in largest if size)


def _bars(plan: Plan) -> list[str]:
    """Return a block of bars for each kind of rank, of the fullest one.

    Inner stages of as many layers are one kind, although the first ones keep more micro-batches.
    """
    lines: list[str] = []
    kinds: dict[tuple[str, int, int, str], list[RankPlan]] = {}
    for rank in plan.ranks:
        stage, last = rank.rank % plan.stage_count, plan.stage_count - 1
        inner = f"{plan.stages[stage]} layers" if 0 < stage < last else ""
        kinds.setdefault((rank.device_name, rank.micro_batch, 0 if inner else rank.peak_bytes, inner), []).append(rank)
    for (name, micro, _, inner), members in kinds.items():
        fullest, who = tightest(members), _who([rank.rank for rank in members])
        peak, capacity, most = fullest.peak_bytes, fullest.capacity_bytes, "at most " if inner and members[1:] else ""
        lines.append(f"  {who}: {name}, micro-batch {micro}, {most}{gib(peak)} of {gib(capacity)}")
        lines += _part_bars(fullest.memory_bytes, max(capacity, peak, 1))
    return lines


def _who(members: Sequence[int]) -> str:
    """Return `rank 0`, or `ranks 0, 2, 3`; many are cut short."""
    return f"rank{'s' if len(members) > 1 else ''} {list_some(list(map(str, members)), MOST_SHOWN)}"


def _part_bars(parts: Mapping[str, int], scale: int) -> list[str]:
    """Return a bar for each part; `scale` bytes have the full length."""
    return [
        f"    {LABELS.get(name, name):<17}{gib(parts[name]):>9}  {'#' * max(1, round(BAR * parts[name] / scale))}"
        for name in (*ORDER, "free")
        if parts.get(name)
    ]


def show_misfit(error: DoesNotFitError) -> str:
    """Return the memory that a rank would need by part, and each remedy with its saving."""
    need = sum(error.parts.values())
    lines = [f"needs {gib(need)}, may use {gib(error.capacity_bytes)}", *_part_bars(error.parts, need), ""]
    fits = any(remedy.fits for remedy in error.remedies)
    rows = plural(error.micro_batch, "row")
    lines.append(
        f"to make {rows} a micro-batch fit (a plan takes more if it can)"
        if fits
        else "no change fits, nor do two together"
    )
    return typed_here("\n".join([*lines, *(f"  {remedy}" for remedy in error.remedies)]))


def misfit_json(error: DoesNotFitError) -> dict[str, Any]:
    """Return the content of `show_misfit` as plain data."""
    return {
        "fits": False,
        "error": error.message,
        "memory_bytes": error.parts,
        "peak_bytes": sum(error.parts.values()),
        "capacity_bytes": error.capacity_bytes,
        "micro_batch": error.micro_batch,
        "remedies": [asdict(remedy) for remedy in error.remedies],
    }


# The forecast as text: speed, time, communication and cost.


UNKNOWN = (
    "unknown until these devices have trained (`make bench`), or the plan knows cards and network by name:"
    " HARDWARE=2xRTX4090@1Gbit, LAUNCH_NETWORK=1Gbit"
)


def show_speed(plan: Plan) -> list[str]:
    """Return lines about expected speed, time and cost; where they are not known, how to find out."""
    communication = _communication(plan)
    if plan.tokens_per_second is None or plan.seconds_per_step is None:
        return [*_unknown(plan), *communication]
    lines = [f"about {plan.tokens_per_second:,.0f} tokens/s ({plan.speed_basis})"]
    lines[0] += f", {figure(plan.seconds_per_step)} s a step" + (
        f", MFU {plan.mfu:.0%}" if plan.mfu is not None else ""
    )
    times = [f"{duration(plan.total_seconds)} in all"] if plan.total_seconds is not None else []
    times += [f"{duration(plan.seconds_per_step * plan.steps_per_epoch)} an epoch"] if plan.steps_per_epoch else []
    lines += [", ".join(times) + ", without loading, evaluation and saving"] if times else []
    return [*lines, *_assumed(plan), *communication, *_cost(plan)]


def _assumed(plan: Plan) -> list[str]:
    """Return which rows a speed is forecast for, as long as their lengths are not known."""
    if plan.seconds_per_step is None or plan.steps_per_epoch:
        return []
    return [f"if every row had {plan.row_tokens:,} tokens; `make data CONFIG=...` measures them"]


def _cost(plan: Plan) -> list[str]:
    return [f"costs {figure(plan.cost)} at PRICE_PER_HOUR"] if plan.cost is not None else []


def _communication(plan: Plan) -> list[str]:
    """Return a line about communication in a step; empty if ranks do not communicate."""
    seconds, share = plan.communication_seconds, plan.communication_share
    if seconds is None or share == 0:
        return []
    of_it = "" if share is None else f" ({share:.0%})" if share >= 0.01 else " (under 1 %)"
    return [f"{figure(seconds, 2)} s of each step{of_it} go into communication, unless computation hides it"]


def _unknown(plan: Plan) -> list[str]:
    """Return how to find out an unknown speed."""
    if plan.offload_optimizer or plan.offload_parameters:
        return ["unknown with offloading: states cross PCIe in every micro-step, and the CPU makes the update; slow"]
    return [UNKNOWN]


MOST_CHANGE = 3.0
"""Relative change beyond which no percentage is shown."""


def beside_forecast(run: RunFolder) -> str:
    """Return lines that compare speed, time and memory of a finished run with its forecast; empty without metrics."""
    measured = read_facts(run.training_metrics)
    # Another machine than rank 0's, and a run of an earlier version, have no forecast.
    if not (forecast := measured.get("forecast")):
        return ""
    in_all = " in all, also before it was resumed" if measured.get("resumed") else ""
    rows = [
        ("speed", "tokens_per_second", lambda value: f"{value:,.0f} tokens/s"),
        ("time", "training_seconds", lambda value: f"{duration(value)} of steps{in_all}"),
        ("energy", "energy_kwh", energy),
        ("memory", "peak_memory_bytes", lambda value: f"{value / GIB:.2f} GiB"),
    ]
    lines = [
        f"  {label:<9}{_pair(measured[key], forecast.get(key), write)}"
        for label, key, write in rows
        if measured.get(key)
    ]
    if lines and measured.get("peak_memory_bytes") and forecast.get("peak_memory_bytes"):
        lines[-1] += " for a micro-batch of the longest rows"
    return "".join(f"{line}\n" for line in lines)


def _pair(measured: float, forecast: float | None, write: Any) -> str:
    if not forecast:
        return str(write(measured))
    change = f" ({measured / forecast - 1:+.0%})" if abs(measured / forecast - 1) < MOST_CHANGE else ""
    return f"{write(measured)}, forecast {write(forecast)}{change}"


def parse_price(text: str | None) -> float | None:
    """Return the price of a machine-hour, if any. Raise `UserError` for anything but a number of 0 or more."""
    if text is None:
        return None
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not (math.isfinite(price) and price >= 0):
        raise UserError(
            f"`PRICE_PER_HOUR` is `{text}`; expected a number such as `2.5`: what one machine costs an hour, in any"
            " currency"
        )
    return price


def with_cost(plan: Plan, hardware: Hardware, price: float | None) -> Plan:
    """Return the plan with the cost of all steps at `price` per hour."""
    if price is None:
        return plan
    if plan.total_seconds is None:
        unknown = "the speed is" if plan.seconds_per_step is None else f"the number of steps is ({_counted(plan)})"
        return replace(plan, notices=(*plan.notices, f"cost: unknown, since {unknown}"))
    # Where only a stated network connects the devices of a node, each device is a separate machine.
    apart = hardware.network is not None and plan.num_nodes == 1 and hardware.nodes == 1
    machines = plan.world_size if apart else plan.num_nodes
    return replace(plan, cost=price * machines * plan.total_seconds / 3600)
