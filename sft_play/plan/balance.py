"""Shares of unequal ranks: micro-batch and micro-steps of each, so that the slowest is done as early as can be. Pure.

A rank's step of n rows costs T(n) = min over b of floor(n/b) t(b) + t(n mod b), with t(b) = fixed + b x row seconds for a micro-batch
of b rows, at most as many as its memory holds. With such a line the fewest micro-steps are best: T(n) = ceil(n/most) fixed + n row.

Under DDP ranks meet once a step, so each has micro-steps of its own: the least time T* in which all rows are done is found by
bisection over the times that any rank can have, and what is too much is taken back from the slowest. Under ZeRO and FSDP they meet in
every micro-step: for each number k of micro-steps rows are poured in where they take least time, and k max t(b) is made least.

Ranks take contiguous spans of a step's rows in proportion to their slots (`spans`), as `data/batches.py` cuts them. Everything is a
function of its arguments alone, so all ranks come to the same shares from the same costs.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

Slots = tuple[int, int]
"""Rows (with packing: packs) per micro-step, micro-steps per optimizer step. A rank that gets nothing has (0, 1)."""
NOTHING: Slots = (0, 1)
MOST_TRIED = 64
"""Numbers of micro-steps beyond the least that are tried where all ranks must have the same."""
ROUNDS = 8
"""How often shares are looked over for what cutting in proportion to slots loses."""
MOST_SETTLED = 48
"""Ranks beyond which that is left out: it takes time in the square of their number, and a row of so many shares is little."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What rows cost one rank."""

    fixed_seconds: float
    """Of a micro-step, however few its rows; 0 or more."""
    row_seconds: float
    """Of each row (with packing: pack); above 0."""
    most_rows: int
    """Of a micro-batch that its memory holds; 0 for a rank that can take none."""

    def micro_step(self, rows: int) -> float:
        """Returns the seconds of one micro-step; nothing for an empty one."""
        return self.fixed_seconds + rows * self.row_seconds if rows else 0.0

    def step(self, rows: int) -> float:
        """Returns T(rows): the seconds of a step in the fewest micro-steps."""
        return -(-rows // self.most_rows) * self.fixed_seconds + rows * self.row_seconds if rows else 0.0


def share_out(rows: int, costs: Sequence[Cost], *, same_steps: bool, most_steps: int = 0) -> tuple[Slots, ...]:
    """Returns the slots of each rank for a step of `rows`, never slower by `step_seconds` than `equal_shares`.

    `same_steps`: all ranks must run equally many micro-steps (ZeRO, FSDP); else (DDP) each has a number of its own. Slots hold at
    least `rows` in all, each rank's micro-batch at most its `most_rows`. `most_steps` (0: any number) bounds micro-steps that are the same
    on all ranks, where memory lets it. Raises `ValueError` where no rank can take a row.
    """
    _check(rows, costs)
    if len(set(costs)) == 1:
        return equal_shares(rows, costs, same_steps=same_steps)
    found = _same_steps(rows, costs, most_steps or rows) if same_steps else tuple(map(_slots, costs, _counts(rows, costs)))
    if len(costs) <= MOST_SETTLED:
        found = _settled(rows, costs, found, same_steps)
    if all(cost.most_rows for cost in costs):
        equal = equal_shares(rows, costs, same_steps=same_steps)
        if step_seconds(equal, costs, rows=rows) <= step_seconds(found, costs, rows=rows):
            return equal
    return found


def equal_shares(rows: int, costs: Sequence[Cost], *, same_steps: bool) -> tuple[Slots, ...]:
    """Returns the slots of ranks that all get the same number of rows, the first ones one more where that leaves a rest.

    Under DDP each takes them in micro-batches of its own size, else in those of the smallest. Raises `ValueError`.
    """
    _check(rows, costs)
    ranks, most = len(costs), min(cost.most_rows for cost in costs)
    if not most:
        raise ValueError("a rank can take no row, so shares cannot be equal")
    if same_steps:
        steps = -(-rows // (ranks * most))
        return ((-(-rows // (ranks * steps)), steps),) * ranks
    each, rest = divmod(rows, ranks)
    return tuple(_slots(cost, each + (index < rest)) for index, cost in enumerate(costs))


def step_seconds(shares: Sequence[Slots], costs: Sequence[Cost], *, rows: int | None = None) -> float:
    """Returns the seconds of computing until the slowest rank is done with a step of `rows` (default: of full slots)."""
    return max(rank_seconds(shares, costs, rows=rows), default=0.0)


def rank_seconds(shares: Sequence[Slots], costs: Sequence[Cost], *, rows: int | None = None) -> tuple[float, ...]:
    """Returns the seconds that each rank computes in a step of `rows` (default: of full slots); empty micro-steps cost nothing."""
    counts = [micro * steps for micro, steps in shares] if rows is None else spans(rows, shares)
    return tuple(
        min(steps, count) * cost.fixed_seconds + count * cost.row_seconds
        for (_, steps), count, cost in zip(shares, counts, costs, strict=True)
    )


def spans(rows: int, shares: Sequence[Slots]) -> tuple[int, ...]:
    """Returns the rows that each rank gets of a step: the cuts are at floor(rows x slots so far / all slots)."""
    total = sum(micro * steps for micro, steps in shares)
    reached, start, found = 0, 0, []
    for micro, steps in shares:
        reached += micro * steps
        end = rows * reached // total
        found.append(end - start)
        start = end
    return tuple(found)


def _check(rows: int, costs: Sequence[Cost]) -> None:
    if rows < 1 or not any(cost.most_rows for cost in costs):
        raise ValueError(f"no rank of {len(costs)} can take any of {rows} rows")
    if any(cost.fixed_seconds < 0 or cost.row_seconds <= 0 or cost.most_rows < 0 for cost in costs):
        raise ValueError("a rank's cost is not one: fixed seconds and rows of 0 or more, seconds of a row above 0")


def _slots(cost: Cost, rows: int) -> Slots:
    """Returns the fewest micro-steps for `rows`, with no larger micro-batch than those need."""
    if not rows:
        return NOTHING
    steps = -(-rows // cost.most_rows)
    return -(-rows // steps), steps


def _counts(rows: int, costs: Sequence[Cost]) -> list[int]:
    """Returns the rows of each rank that make the slowest one's T(n) least, for ranks with micro-steps of their own."""
    within = range(rows + 1)

    def reached(limit: float) -> list[int]:
        return [bisect_right(within, limit, key=cost.step) - 1 if cost.most_rows else 0 for cost in costs]

    low, high = 0.0, min(cost.step(rows) for cost in costs if cost.most_rows)
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if sum(reached(middle)) >= rows else (middle, high)
    counts = reached(high)
    slowest = [(-cost.step(count), -rank) for rank, (cost, count) in enumerate(zip(costs, counts, strict=True)) if count]
    heapq.heapify(slowest)
    for _ in range(sum(counts) - rows):  # of equals the last one gives back first
        rank = -heapq.heappop(slowest)[1]
        counts[rank] -= 1
        if counts[rank]:
            heapq.heappush(slowest, (-costs[rank].step(counts[rank]), -rank))
    return counts


def _same_steps(rows: int, costs: Sequence[Cost], most_steps: int) -> tuple[Slots, ...]:
    """Returns slots with one number of micro-steps for all ranks that make k max t(b) least."""
    least = -(-rows // sum(cost.most_rows for cost in costs))
    best: tuple[float, list[int], int] | None = None
    for steps in range(least, max(least, min(rows, most_steps, least + MOST_TRIED)) + 1):
        micros = _poured(-(-rows // steps), costs)
        seconds = steps * max(cost.micro_step(micro) for cost, micro in zip(costs, micros, strict=True))
        if best is None or seconds < best[0]:
            best = seconds, micros, steps
    assert best is not None, (rows, costs)
    return tuple((micro, best[2]) for micro in best[1])


def _poured(rows: int, costs: Sequence[Cost]) -> list[int]:
    """Returns micro-batches of `rows` in all: each row goes where the micro-step is then the shortest."""
    micros = [0] * len(costs)
    queue = [(cost.micro_step(1), rank) for rank, cost in enumerate(costs) if cost.most_rows]
    heapq.heapify(queue)
    for _ in range(rows):
        _, rank = heapq.heappop(queue)
        micros[rank] += 1
        if micros[rank] < costs[rank].most_rows:
            heapq.heappush(queue, (costs[rank].micro_step(micros[rank] + 1), rank))
    return micros


def _settled(rows: int, costs: Sequence[Cost], shares: tuple[Slots, ...], same_steps: bool) -> tuple[Slots, ...]:
    """Returns shares of which no single rank's small change makes a step shorter: cutting in proportion moves a row here or there."""
    best = step_seconds(shares, costs, rows=rows), shares
    for _ in range(ROUNDS):
        before = best
        for rank, cost in enumerate(costs):
            for changed in _near(best[1][rank], cost, same_steps):
                tried = (*best[1][:rank], changed, *best[1][rank + 1 :])
                if sum(micro * steps for micro, steps in tried) >= rows:
                    best = min(best, (step_seconds(tried, costs, rows=rows), tried), key=lambda found: found[0])
        if best is before:
            break
    return best[1]


def _near(slots: Slots, cost: Cost, same_steps: bool) -> list[Slots]:
    """Returns slots a little larger and smaller."""
    micro, steps = slots
    if not micro:
        return []
    near = [(micro + 1, steps), (micro - 1, steps)]
    if not same_steps:
        near += [(micro, steps + 1), (micro, steps - 1), (micro - 1, steps + 1), (micro + 1, steps - 1)]
    return [(m, s) for m, s in near if 1 <= m <= cost.most_rows and s >= 1]
