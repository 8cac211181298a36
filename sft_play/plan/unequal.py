"""Shares of a step for ranks on unlike devices, by their memory and speed (`plan.balance`), and whether fewer machines would be faster.

Pure. Speeds are measured (`make bench`) or priors; of cards whose speed is not known, those with more memory are taken for the faster
ones, in proportion, until training has measured them (`training/balance.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sft_play.config.schema import Config
from sft_play.plan.balance import Cost, Slots, equal_shares, share_out, spans, step_seconds
from sft_play.plan.batch import count
from sft_play.plan.calibration import Calibration
from sft_play.plan.hardware import Device, Hardware
from sft_play.plan.memory import Setup
from sft_play.plan.packing import Division
from sft_play.plan.shape import ModelShape
from sft_play.plan.throughput import Data, paces_of, step_flops
from sft_play.plan.words import figure

SHARED = "shares by speed and memory"
"""How the reason begins that says what each rank gets."""
WORTH = 1.01
"""Shares that a forecast does not find faster by more than this factor stay as they are."""
FASTER = 1.02
"""What leaving a machine out must gain to be worth a word."""
NAMED = 8
"""Ranks whose shares are told one by one, at most."""


def rank_costs(
    config: Config, shape: ModelShape, division: Division, hardware: Hardware, devices: tuple[Device, ...], data: Data,
    most_rows: Sequence[int], *, nodes: int, calibration: Calibration | None,
) -> tuple[Cost, ...] | None:  # fmt: skip
    """Returns what a row (or pack) costs each rank, `None` where the speed of any is not known.

    A micro-step's time is taken for a straight line between one row and the most that fit.
    """
    setup = division.setup
    paces = paces_of(config, shape, setup, hardware, devices, data, nodes, calibration)
    found: dict[tuple[Device, int], Cost] = {}
    for device, most in set(zip(devices, most_rows, strict=True)):
        pace = paces[device]
        if pace is None:
            return None
        far = max(most, 2)
        one, whole = (pace.seconds(step_flops(config, shape, setup, rows, 1, data), 1) for rows in (1, far))
        found[device, most] = _line(one, whole, far, most)
    return tuple(found[key] for key in zip(devices, most_rows, strict=True))


def _line(one: float, whole: float, far: int, most: int) -> Cost:
    """Returns the line through the seconds of a micro-step of one row and of `far` rows; never one that starts below zero."""
    row = (whole - one) / (far - 1)
    if row <= 0:  # launching the kernels takes longer than computing so many rows: each costs next to nothing
        row = one / 1000
    return (
        Cost(fixed_seconds=one - row, row_seconds=row, most_rows=most)
        if one > row
        else Cost(fixed_seconds=0.0, row_seconds=whole / far, most_rows=most)
    )


def with_shares(
    config: Config, division: Division, costs: Sequence[Cost], seconds: Callable[[Division], float | None], *, measured: bool,
    reasons: list[str],
) -> Division:  # fmt: skip
    """Returns the division with shares by cost where ranks are unlike, nobody typed shares, and a step is faster by forecast.

    `measured`: whether costs are seconds, known or by prior, rather than a guess from memory; then the gain is said.
    """
    train = config.train
    typed = train.batch_size != "auto" or train.grad_accum != "auto"
    if typed or len(set(costs)) < 2 or not all(cost.most_rows for cost in costs):
        return division
    same = division.setup.strategy != "ddp"
    if config.launch.balance == "off":
        return _equal(division, costs, same, reasons)
    chosen = _with(division, share_out(division.rows, costs, same_steps=same))
    before, after = seconds(division), seconds(chosen)
    if before is None or after is None or before <= WORTH * after:
        return division
    equal = _with(division, equal_shares(division.rows, costs, same_steps=same))
    _instead(reasons, shares_in_words(chosen, [cost.most_rows for cost in costs]))
    reasons += _gain(chosen, equal, seconds(equal), after) if measured else [_guess()]
    return chosen


def _equal(division: Division, costs: Sequence[Cost], same: bool, reasons: list[str]) -> Division:
    """Returns the division with as many rows for each rank, where memory alone made it another."""
    if len(set(division.batch.micro_batches)) == 1:
        return division
    chosen = _with(division, equal_shares(division.rows, costs, same_steps=same))
    _instead(
        reasons,
        f"equal shares, as `launch.balance: off` says: {_listed(spans(chosen.rows, chosen.batch.slots))} of {division.rows} a step",
    )
    return chosen


def _instead(reasons: list[str], reason: str) -> None:
    """Puts a reason in the place of those of the micro-batch that shares replace."""
    reasons[:] = [one for one in reasons if not one.startswith(("micro-batch ", "accumulation "))]
    reasons.append(reason)


def _with(division: Division, shares: tuple[Slots, ...]) -> Division:
    """Returns the division with these slots; with packing, so many micro-steps that the fullest step fits."""
    micros, steps = tuple(micro for micro, _ in shares), tuple(steps for _, steps in shares)
    if division.packs is not None or division.pack_tokens:
        bound = division.packs.bound if division.packs else division.batch.global_batch
        held = sum(micro * each for micro, each in shares)
        steps = tuple(math.ceil(each * max(1.0, bound / held)) for each in steps)
    own = steps if len(set(steps)) > 1 else ()
    return replace(division, batch=replace(division.batch, micro_batches=micros, accumulation=max(steps), own_steps=own))


def shares_in_words(division: Division, most_rows: Sequence[int]) -> str:
    """Returns what each rank gets; `most_rows`: the largest micro-batch that each one's memory holds."""
    unit = "pack" if division.pack_tokens else "row"
    shares = list(zip(division.batch.slots, spans(division.rows, division.batch.slots), most_rows, strict=True))
    if len(shares) > NAMED:
        counts = [rows for _, rows, _ in shares]
        return f"{SHARED}: {min(counts)} to {max(counts)} of {count(division.rows, unit)} a step for each rank"
    parts = [
        f"rank {rank} {count(rows, unit)} in {count(steps, 'micro-step')} of up to {micro} ({most} would fit)"
        if rows
        else f"rank {rank} nothing, since the others are done with all of them before it is with one"
        for rank, ((micro, steps), rows, most) in enumerate(shares)
    ]
    return f"{SHARED}, of {count(division.rows, unit)} a step: " + "; ".join(parts)


def _gain(chosen: Division, equal: Division, before: float | None, after: float) -> list[str]:
    if before is None:
        return []
    counts = (
        f" ({_listed(spans(chosen.rows, chosen.batch.slots))} instead of {_listed(spans(equal.rows, equal.batch.slots))})"
        if len(chosen.batch.slots) <= NAMED
        else ""
    )
    return [
        f"unequal shares: {figure(before)} s -> {figure(after)} s a step, {before / after:.2f} times as fast as equal ones{counts}"
    ]


def _guess() -> str:
    return (
        "the speed of these cards is not known: more memory is taken for more speed, in proportion, until training has measured it "
        "(`launch.balance: off` gives equal shares)"
    )


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """Ranks that could be left out, together: those of a machine, or one device of several that only a network joins."""

    ranks: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    """What they are called, as `node 1 (RTX 3070 Ti)`."""


def fewer_machines(
    costs: Sequence[Cost], division: Division, machines: Machines, around: Callable[[tuple[int, ...], int], float],
    holding: Callable[[tuple[int, ...]], Sequence[int]],
) -> list[str]:  # fmt: skip
    """Returns a line where a step would be faster without one of the machines, or on one alone; none where it would not.

    `around` returns a step's seconds beside computing (exchange and update) for those ranks that stay and so many micro-steps, `holding`
    the largest micro-batch of each of them: where weights or states are shared out, fewer ranks hold more of them.
    """
    rows, everyone = division.rows, tuple(range(len(costs)))
    same = division.setup.strategy != "ddp"
    now = step_seconds(division.batch.slots, costs, rows=rows) + around(everyone, division.batch.accumulation)
    options: list[tuple[float, str]] = []
    tried: set[tuple[Cost, ...]] = set()
    for index, ranks in enumerate(machines.ranks):
        if (kind := tuple(costs[rank] for rank in ranks)) in tried:
            continue  # as good as another machine
        tried.add(kind)
        for staying, words in (
            (_others(everyone, ranks), f"without {machines.names[index]}"),
            (tuple(ranks), f"on {machines.names[index]} alone"),
        ):
            if not 0 < len(staying) < len(everyone):
                continue
            rest = [
                replace(costs[rank], most_rows=min(costs[rank].most_rows, most))
                for rank, most in zip(staying, holding(staying), strict=True)
            ]
            if not all(cost.most_rows for cost in rest):
                continue
            shares = share_out(rows, rest, same_steps=same)
            seconds = step_seconds(shares, rest, rows=rows) + around(staying, max(steps for _, steps in shares))
            options.append((seconds, words))
    best = min(options, default=(math.inf, ""))
    if now <= FASTER * best[0]:
        return []
    return [f"FASTER {best[1]}: {figure(best[0])} s a step instead of {figure(now)} s, the network included"]


def _others(everyone: Sequence[int], ranks: Sequence[int]) -> tuple[int, ...]:
    return tuple(rank for rank in everyone if rank not in ranks)


def fits(setup: Setup, room: Sequence[int], largest: Callable[[Setup, int], int], most: int) -> tuple[int, ...]:
    """Returns the largest micro-batch of each rank: what its memory holds, `most` at most, one at least."""
    known = {capacity: max(1, min(most, largest(setup, capacity))) for capacity in set(room)}
    return tuple(known[capacity] for capacity in room)
