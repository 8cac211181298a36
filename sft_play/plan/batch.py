"""The division of a step's rows: micro-batch and accumulation from the global batch, and shares of unequal ranks. Pure.

Shares let the slowest rank finish as early as possible: each row goes to the rank that would finish it first, and a
rank takes its rows in the fewest micro-steps that its memory allows. Under DDP, ranks synchronise once per step, so
each has its own number of micro-steps. Under ZeRO and FSDP they synchronise in every micro-step: all make the fewest
that memory allows, and each micro-step is divided by speed.

Ranks take contiguous spans of a step's rows in proportion to their slots (`spans`), as `data/batches.py` cuts them.
All functions depend on their arguments alone, so every rank computes the same shares from the same costs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from sft_play.config.schema import TrainConfig
from sft_play.errors import UserError
from sft_play.plan.request import DEFAULT_GLOBAL_BATCH, global_rows
from sft_play.text import plural

Slots = tuple[int, int]
"""Rows (with packing: packs) per micro-step, micro-steps per optimizer step; (0, 1) for a rank without rows."""
NOTHING: Slots = (0, 1)
MOST_SETTLED = 48
"""Largest number of ranks for which shares are corrected for the row that rounding to slots moves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What rows cost one rank."""

    row_seconds: float
    """Time per row (with packing: pack), above 0; any unit will do where only ranks are compared."""
    most_rows: int
    """Rows of the largest micro-batch that fits its memory; 0 for a rank that can take none."""


def share_out(rows: int, costs: Sequence[Cost], *, same_steps: bool) -> tuple[Slots, ...]:
    """Return the slots of each rank for a step of `rows`, never slower by `step_seconds` than `equal_shares`.

    With `same_steps` all ranks run equally many micro-steps (ZeRO, FSDP); otherwise (DDP) each has its own number.
    Slots hold at least `rows` in total, each rank's micro-batch at most its `most_rows`. At least one rank must be able
    to take a row.
    """
    if len(set(costs)) == 1:
        return equal_shares(rows, costs, same_steps=same_steps)
    if same_steps:
        steps = -(-rows // sum(cost.most_rows for cost in costs))
        shares = tuple((micro, steps) for micro in _pour(-(-rows // steps), costs, [cost.most_rows for cost in costs]))
    else:
        counts = _pour(rows, costs, [rows if cost.most_rows else 0 for cost in costs])
        shares = tuple(map(_slots, costs, counts))
    for rank, cost in enumerate(costs if len(costs) <= MOST_SETTLED else ()):
        micro, steps = shares[rank]
        larger = (*shares[:rank], (min(micro + 1, cost.most_rows), steps), *shares[rank + 1 :])
        shares = min(shares, larger, key=lambda slots: step_seconds(rows, slots, costs))
    if all(cost.most_rows for cost in costs):
        equal = equal_shares(rows, costs, same_steps=same_steps)
        if step_seconds(rows, equal, costs) <= step_seconds(rows, shares, costs):
            return equal
    return shares


def equal_shares(rows: int, costs: Sequence[Cost], *, same_steps: bool) -> tuple[Slots, ...]:
    """Return the slots of ranks with equal numbers of rows; the first ranks take one more each of a remainder.

    Under DDP each rank has its own micro-batch size, otherwise all have that of the smallest. Every rank must be able
    to take a row.
    """
    ranks, most = len(costs), min(cost.most_rows for cost in costs)
    if same_steps:
        steps = -(-rows // (ranks * most))
        return ((-(-rows // (ranks * steps)), steps),) * ranks
    each, rest = divmod(rows, ranks)
    return tuple(_slots(cost, each + (index < rest)) for index, cost in enumerate(costs))


def step_seconds(rows: int, shares: Sequence[Slots], costs: Sequence[Cost]) -> float:
    """Return the computing time of the slowest rank in a step of `rows`."""
    return max(count * cost.row_seconds for count, cost in zip(spans(rows, shares), costs, strict=True))


def spans(rows: int, shares: Sequence[Slots]) -> tuple[int, ...]:
    """Return the number of rows of each rank in a step: cuts are at floor(rows x slots so far / all slots)."""
    reached = list(accumulate((micro * steps for micro, steps in shares), initial=0))
    cuts = [rows * slots // reached[-1] for slots in reached]
    return tuple(end - start for start, end in pairwise(cuts))


def _slots(cost: Cost, rows: int) -> Slots:
    """Return the fewest micro-steps for `rows`, with the smallest micro-batch that they allow."""
    if not rows:
        return NOTHING
    steps = -(-rows // cost.most_rows)
    return -(-rows // steps), steps


def _pour(rows: int, costs: Sequence[Cost], most: Sequence[int]) -> list[int]:
    """Return each rank's part of `rows`, at most `most`: every row goes to the rank that would finish it first."""
    counts = [0] * len(costs)
    queue = [(cost.row_seconds, rank) for rank, cost in enumerate(costs) if most[rank]]
    heapq.heapify(queue)
    for _ in range(rows):
        _, rank = heapq.heappop(queue)
        counts[rank] += 1
        if counts[rank] < most[rank]:
            heapq.heappush(queue, ((counts[rank] + 1) * costs[rank].row_seconds, rank))
    return counts


# Micro-batch and accumulation of like ranks, with their reasons.


def choose_batch(
    train: TrainConfig, fitting: tuple[int, ...], most: int, reasons: dict[str, str], unit: str = "device"
) -> tuple[Slots, ...]:
    """Return the slots of ranks whose memory holds `fitting` rows each. Raise `UserError` with the arithmetic.

    `most` is the largest micro-batch; only a typed one may exceed it. The global batch depends on the number of ranks
    only where it is `auto` and a typed micro-batch determines it: together with a typed accumulation, or where more
    rows run at once than the default has.
    """
    world, micro_batch, accumulation = len(fitting), train.batch_size, train.grad_accum
    units, rows, typed = plural(world, unit), global_rows(train, world), train.global_batch_size != "auto"
    raised = explain_global_batch(train, world, unit)
    if micro_batch != "auto" and accumulation != "auto":
        arithmetic = f"{micro_batch} per {unit} x {accumulation} accumulation x {units} = {rows}"
        if typed and train.global_batch_size != rows:
            raise UserError(
                f"{arithmetic} rows per optimizer step, but `train.global_batch_size` is {train.global_batch_size}",
                hint="leave one of TRAIN_BATCH_SIZE, TRAIN_GRAD_ACCUM and TRAIN_GLOBAL_BATCH_SIZE to `auto`",
            )
        reasons["global batch"] = raised or f"global batch {arithmetic}, as configured"
        return ((micro_batch, accumulation),) * world
    if typed and micro_batch != "auto" and micro_batch > rows_each(rows, world):
        at_once = micro_batch * world
        raise UserError(
            f"{micro_batch} per {unit} x {units} = {at_once} rows at once, but `train.global_batch_size` is {rows}: "
            f"{at_once - rows} of them would stay empty",
            hint=f"TRAIN_BATCH_SIZE={rows_each(rows, world)} at most, or TRAIN_GLOBAL_BATCH_SIZE={at_once}",
        )
    whole = (
        f"global batch {rows} rows per optimizer step ({'as configured' if typed else 'the default'}), on any number"
        f" of {_units(unit)}"
    )
    reasons["global batch"] = raised or whole
    if accumulation != "auto":
        if accumulation > rows:
            raise UserError(
                f"`train.grad_accum` is {accumulation}, but a step has {rows} rows: {accumulation - rows}"
                " micro-steps would be empty",
                hint=f"TRAIN_GRAD_ACCUM={rows} at most, or TRAIN_GLOBAL_BATCH_SIZE={accumulation}",
            )
        micro, steps, least = rows_each(rows, accumulation * world), accumulation, min(fitting)
        if micro > least:
            raise UserError(
                f"`train.grad_accum` {accumulation} needs {micro} rows per {unit} = {rows} global / "
                f"({accumulation} x {units}), but only {least} fit",
                hint=f"set TRAIN_GRAD_ACCUM to {rows_each(rows, least * world)} or more, or leave it to `auto`",
            )
        micros = (micro,) * world
        reasons["micro-batch"] = (
            f"micro-batch {micro} = {rows} global / ({accumulation} accumulation, as configured, x {units})"
        )
    else:
        micros, why = (
            ((micro_batch,) * world, ", as configured") if micro_batch != "auto" else _auto(rows, fitting, most)
        )
        reasons["micro-batch"] = f"micro-batch {in_words(micros)} per {unit}{why}"
        steps = math.ceil(rows / sum(micros))
        total, empty = f"{micros[0]} per {unit} x {units}", steps * sum(micros) - rows
        total = total if len(set(micros)) == 1 else " + ".join(map(str, micros))
        slots = f", {empty} of the {rows + empty} slots stay empty" if empty else ""
        reasons["accumulation"] = f"accumulation {steps} = {rows} global / ({total}){slots}"
    if world > rows:
        reasons["idle"] = (
            f"{world - rows} of {units} have nothing to do: a step has {rows} rows; raise TRAIN_GLOBAL_BATCH_SIZE"
        )
    return tuple((micro, steps) for micro in micros)


def rows_each(rows: int, world: int) -> int:
    """Return the micro-batch with which `world` ranks take a step of `rows` rows at once; a larger one only adds empty
    slots.
    """
    return math.ceil(rows / world)


def explain_global_batch(train: TrainConfig, world: int, unit: str = "device") -> str:
    """Return how a typed micro-batch changes a global batch that was left to `auto`; empty if it does not."""
    rows = global_rows(train, world)
    if train.batch_size == "auto" or train.global_batch_size != "auto":
        return ""
    if train.grad_accum != "auto":
        product = (
            f"global batch {rows} = {train.batch_size} per {unit} x {train.grad_accum} accumulation x"
            f" {plural(world, unit)}: "
        )
        return product + f"batch and accumulation are both given, so it differs with the number of {_units(unit)}"
    if rows == DEFAULT_GLOBAL_BATCH:
        return ""
    return (
        f"global batch {rows} = {train.batch_size} per {unit} x {plural(world, unit)}: more at once than the default of"
        f" {DEFAULT_GLOBAL_BATCH}"
    )


def halve(rows: int, times: int) -> int:
    """Return `rows` halved and rounded up, `times` times; at least 1."""
    return (rows + (1 << times) - 1) >> times


def _auto(rows_per_step: int, fitting: tuple[int, ...], most: int) -> tuple[tuple[int, ...], str]:
    """Return the smallest micro-batches with the fewest micro-steps that memory allows, and the reason."""
    least, room = min(fitting), tuple(min(most, rows) for rows in fitting)
    capacity = f"up to {plural(least, 'row')}" if least == max(fitting) else f"{least} to {max(fitting)} rows"
    why = f": {capacity} {'fits' if capacity == 'up to 1 row' else 'fit'}"
    why += f", and {most} are the most in a micro-batch" if least > most else ""
    return even_micro_batches(rows_per_step, room), f"{why}; the work is divided evenly"


def even_micro_batches(total: int, room: Sequence[int]) -> tuple[int, ...]:
    """Return the smallest micro-batches, in proportion to `room`, that need no more micro-steps than the largest.

    32 rows with room for 12 make 3 steps of 11, not 12, 12 and 8.
    """
    slots = -(-total // sum(room)) * sum(room)
    return tuple(max(1, -(-rows * total // slots)) for rows in room)


def in_words(micros: tuple[int, ...]) -> str:
    """Return each rank's number in words, written once where all are the same."""
    return str(micros[0]) if len(set(micros)) == 1 else ", ".join(map(str, micros))


def _units(unit: str) -> str:
    """Return `devices` or `processes`."""
    return plural(2, unit).removeprefix("2 ")
