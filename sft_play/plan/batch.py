"""The division of a step's rows: micro-batch and accumulation from the global batch, shares of unlike ranks, rows or
packs, their layout and loss chunks. Pure.

Decisions rest on memory and plain rules. Unlike cards share a step by the speeds in the catalogue, or in proportion to
their memory where a card is not in it, until training has measured them (`training/balance.py`).

Shares let the slowest rank finish as early as possible: each row goes to the rank that would finish it first, and a
rank takes its rows in the fewest micro-steps that its memory allows. Under DDP, ranks synchronise once per step, so
each has its own number of micro-steps. Under ZeRO and FSDP they synchronise in every micro-step: all make the fewest
that memory allows, and each micro-step is divided by speed.

Ranks take contiguous spans of a step's rows in proportion to their slots (`spans`), as `data/batches.py` cuts them.
Functions of shares depend on their arguments alone, so every rank computes the same shares from the same costs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from sft_play.config.schema import Config, TrainConfig
from sft_play.errors import UserError
from sft_play.plan import choices
from sft_play.plan.epoch import AverageRow, Packs, mixture_of, packs_of
from sft_play.plan.plan import Setup
from sft_play.plan.request import DEFAULT_GLOBAL_BATCH, MOST_ROWS, Request, global_rows
from sft_play.plan.shape import BY_LENGTHS, FLATTENED_TOKENS
from sft_play.text import plural

Slots = tuple[int, int]
"""Rows (with packing: packs) per micro-step, micro-steps per optimizer step; (0, 1) for a rank without rows."""
NOTHING: Slots = (0, 1)
MOST_SETTLED = 48
"""Largest number of ranks for which shares are corrected for the row that rounding to slots moves."""
MOST_TOGETHER = {"cuda": 64, "cpu": 4}
"""Largest micro-batch in rows; on a CPU matrices are large enough by then, and only memory would grow."""
WORTH = 0.10
"""Smallest share of micro-steps that packing must save, and of tokens that flattened rows must save where they need a
mask over all rows.
"""
LEAST_PADDING = 0.01
"""Share of tokens below which padding is not mentioned."""
NAMED = 8
"""Largest number of ranks whose shares are listed one by one."""
FILLS = 4
"""Micro-batches per stage where the data allow it, so that filling and draining the pipeline takes at most a fifth of a
step.
"""


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
        packs = ", and counts rows, not packs of them" if train.packing == "on" else ""
        return (
            product + f"batch and accumulation are both given, so it differs with the number of {_units(unit)}{packs}"
        )
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
    capacity = plural(least, "row") if least == max(fitting) else f"{least} to {max(fitting)} rows"
    cap = f", and {most} are the most in a micro-batch" if least > most else ""
    return even_micro_batches(rows_per_step, room), f": memory holds {capacity}{cap}; the work is divided evenly"


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


# The division of a step.


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """How the rows of a step become micro-batches."""

    setup: Setup
    slots: tuple[Slots, ...]
    """Micro-batch and micro-steps of each rank."""
    global_batch: int
    packs: Packs | None = None
    """`None` without packing."""

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Rows (or packs) per micro-step of each rank."""
        return tuple(micro for micro, _ in self.slots)

    @property
    def accumulation(self) -> int:
        """Micro-steps per optimizer step of the rank that makes most."""
        return max(self.steps)

    @property
    def steps(self) -> tuple[int, ...]:
        """Micro-steps per optimizer step of each rank."""
        return tuple(steps for _, steps in self.slots)

    @property
    def own_steps(self) -> tuple[int, ...]:
        """Micro-steps of each rank where they differ, which only DDP allows; otherwise empty."""
        return self.steps if len(set(self.steps)) > 1 else ()

    @property
    def rows(self) -> int:
        """Rows per step, or packs where micro-batches count packs."""
        return self.global_batch if self.packs is None else max(1, round(self.packs.mean))

    @property
    def shares(self) -> tuple[int, ...]:
        """Rows (or packs) of each rank in a step."""
        return spans(self.rows, self.slots)

    @property
    def expected_steps(self) -> tuple[int, ...]:
        """Micro-steps that each rank is expected to make, without the empty ones, which are skipped."""
        if self.packs is None:
            return self.steps
        if not self.own_steps:
            return (max(1, round(self.packs.micro_steps(sum(self.micro_batches)))),) * len(self.slots)
        return tuple(
            max(1, -(-packs // max(1, micro))) for packs, micro in zip(self.shares, self.micro_batches, strict=True)
        )


def divide(request: Request, setup: Setup, fitting: tuple[int, ...], reasons: dict[str, str]) -> Division:
    """Return micro-batch, accumulation, packing, layout and loss chunks. Raise `UserError`.

    `fitting` is the number of rows that each rank's memory holds.
    """
    config, launch, train = request.config, request.launch, request.config.train
    # Under packing, packs must fit, not rows; and before the data are known, the assumption that all rows have the
    # greatest length must not refuse a typed value.
    if train.packing == "on" or (launch.early and train.grad_accum != "auto"):
        fitting = (MOST_ROWS,) * len(fitting)
    slots = choose_batch(train, fitting, most := _most_together(request, setup), reasons, request.unit)
    if most < min(MOST_TOGETHER[setup.device], *fitting):
        reasons["filling"] = (
            f"pipeline: {FILLS} micro-batches or more per stage keep all busy, so {plural(most, 'row')} at most"
        )
    division = _with_layout(request, Division(setup=setup, slots=slots, global_batch=request.global_batch), {})
    division = _with_shares(request, _choose_packing(request, division, reasons), reasons)
    division = _with_layout(request, _halve(division, launch.halvings, request.unit, reasons), reasons)
    setup, padding = replace(division.setup, accumulates=division.accumulation > 1), _padding(request, division)
    if setup.layout != "flattened" and padding >= LEAST_PADDING:
        reasons["padding"] = (
            f"padding about {padding:.0%} of all tokens: rows are as long as the longest of their micro-batch"
        )

    def fits(larger: Setup) -> bool:
        # After memory ran out, the plan's own figures have proven too low to allow anything larger.
        recovers = launch.halvings or launch.force_checkpointing
        return not recovers and request.fits(larger, tuple(max(1, rows) for rows in division.micro_batches))

    chunks = choices.settle_chunks(config, request.shape, setup, max(division.micro_batches), fits, reasons)
    return replace(division, setup=chunks)


def _most_together(request: Request, setup: Setup) -> int:
    """Return the most rows of a micro-batch; in a pipeline few enough to keep all stages busy in a step."""
    most = MOST_TOGETHER[setup.device]
    if not setup.stages or not request.divides:
        return most
    return max(1, min(most, math.floor(request.global_batch / setup.data_world / (FILLS * len(setup.stages)))))


def _halve(division: Division, halvings: int, unit: str, reasons: dict[str, str]) -> Division:
    """Return the division with half the micro-batch (rounded up) and twice the accumulation, `halvings` times (B10).

    The global batch and the rows of each step stay the same; even a typed micro-batch is halved. No rank goes below one
    row, and where all have one already nothing changes.
    """
    slots, together = division.slots, not division.own_steps
    for _ in range(halvings):
        if max(micro for micro, _ in slots) > 1:
            slots = tuple(
                (min(micro, halve(micro, 1)), steps * (2 if together or micro > 1 else 1)) for micro, steps in slots
            )
    halved = replace(division, slots=slots)
    if halved != division:
        before, after = (
            f"{in_words(case.micro_batches)} x {{}}{in_words(case.own_steps or (case.accumulation,))}"
            for case in (division, halved)
        )
        reasons["memory ran out"] = (
            f"memory ran out: micro-batch {before.format('accumulation ')} became {after.format('')} on every {unit},"
            f" the global batch {division.global_batch} as before"
        )
    return halved


# The layout of a micro-batch.


def average_row(request: Request, division: Division) -> AverageRow:
    """Return the average row, or pack, of the prepared data; before they are known, the longest possible row."""
    split, packs, longest = request.train_split, division.packs, division.setup.row_tokens
    if not split or not split.rows or not split.tokens:
        return AverageRow(tokens=longest, longest=longest, label_share=1.0)
    rows, tokens, labels = float(split.rows), float(split.tokens), float(split.label_tokens)
    if mixture := mixture_of(request.config.data, split.sources):
        taken = list(zip(mixture.repeats, mixture.sources, strict=True))
        rows = float(sum(mixture.epoch_rows))
        tokens = sum(times * source.tokens for times, source in taken)
        labels = sum(times * source.label_tokens for times, source in taken)
    if packs is None:
        return AverageRow(tokens=tokens / rows, longest=split.longest, label_share=labels / tokens)
    each = packs.step_tokens / division.rows
    return AverageRow(
        tokens=each, longest=max(each, packs.longest), label_share=labels / tokens, inside=packs.row_tokens
    )


def _padding(request: Request, division: Division) -> float:
    """Return the share of tokens that padding would take."""
    row = average_row(request, division)
    return 1 - row.tokens / row.padded_tokens(max(division.micro_batches))


def _with_layout(request: Request, division: Division, reasons: dict[str, str]) -> Division:
    """Return the division with the layout of its rows.

    Rows are flattened where that is exact and fits, unless it needs a mask over all rows and saves little padding.
    """
    setup = division.setup
    if setup.pack_tokens:
        return division
    padded, rows = replace(setup, layout=choices.padded_layout(request)), max(division.micro_batches)
    flattened = replace(setup, layout="flattened")
    why = choices.why_padded(request, setup, rows, setup.row_tokens)
    needs_mask = rows > 1 and setup.attn_implementation not in BY_LENGTHS
    if not why and needs_mask:
        padding = _padding(request, division)
        if not request.fits(flattened, division.micro_batches) and request.fits(padded, division.micro_batches):
            why = f"the mask of {rows * setup.row_tokens} flattened tokens would not fit"
        elif request.train_split and padding < WORTH:
            why = f"{padding:.0%} of padding costs less than a mask over rows in one line"
    reasons["layout"] = f"rows padded: {why}" if why else "rows flattened: no time and memory for padding"
    return replace(division, setup=padded if why else flattened)


# Rows or packs.


def pack_if_typed(request: Request, setup: Setup) -> Setup:
    """Return the setup with packs for `train.packing: on`, so that all decisions are for packs. Raise `UserError`."""
    config = request.config
    if config.train.packing != "on":
        return setup
    if why := _unpackable(request, setup, 1):
        raise UserError(f"`train.packing` is `on`, but {why}", hint="leave `train.packing` to `auto`, or `off`")
    return _packed(config, setup, packs_of(request))


def _packed(config: Config, setup: Setup, packs: Packs | None) -> Setup:
    """Return the setup whose row is the longest possible pack, with the largest share of labels of any."""
    limit = config.model.max_seq_len
    longest, share = (packs.longest, packs.label_share) if packs else (limit, 1.0)
    return replace(setup, pack_tokens=limit, layout="flattened", row_tokens=longest, label_share=share)


def _choose_packing(request: Request, plain: Division, reasons: dict[str, str]) -> Division:
    """Return the division of packs where these are worth it, otherwise `plain`. Raise `UserError`.

    The setup of `plain` is packed already where `train.packing` is `on`.
    """
    config, wish = request.config, request.config.train.packing

    def off(why: str) -> Division:
        reasons["packing"] = f"packing off: {why}"
        return plain

    # Where one micro-step holds all rows, packing saves nothing.
    if wish == "off" or (wish == "auto" and plain.accumulation == 1):
        return plain
    packs = packs_of(request)
    if wish == "auto":
        if request.launch.unpack:
            return off("memory ran out with it")
        if packs is None:
            return off(
                "the lengths of these rows are not known"
                if request.train_split
                else "decided when the data are prepared"
            )
        if why := _unpackable(request, plain.setup, packs.longest):
            return off(why)
    packed = replace(plain, setup=_packed(config, plain.setup, packs), packs=packs)
    tokens, fitting = packed.setup.row_tokens, request.largest(packed.setup)
    micros = _micro_batches(request, packed, fitting)
    if any(micro > most for micro, most in zip(micros, fitting, strict=True)):
        capacity = f"only {plural(min(fitting), 'pack')}" if min(fitting) else "not one pack"
        if wish == "auto":
            return off(f"{capacity} of {tokens} tokens would fit")
        raise UserError(
            f"`train.packing` is `on`, but {capacity} of {tokens} tokens fits, and a micro-batch has {max(micros)}",
            hint="a smaller `model.max_seq_len`, TRAIN_GRADIENT_CHECKPOINTING=true, or TRAIN_PACKING=off",
        )
    bound, slots = packs.bound if packs else plain.global_batch, sum(micros)
    accumulation = math.ceil(bound / slots)
    arithmetic = (
        f"how much it saves is known when the data are prepared; packs of up to {config.model.max_seq_len} tokens"
    )
    if packs:
        before, after = plain.accumulation, packs.micro_steps(slots)
        saved = 1 - after / before
        arithmetic = (
            f"{packs.rows} rows in {packs.mean:.1f} packs of {packs.limit} tokens, {packs.efficiency:.0%} full;"
            f" {after:.1f} micro-steps instead of {before}" + (f" = {saved:.0%} fewer" if saved > 0 else "")
        )
        if wish == "auto" and saved <= WORTH:
            return off(f"{arithmetic}; worth it from {WORTH:.0%} fewer")
    for kind in ("micro-batch", "accumulation", "idle"):
        reasons.pop(kind, None)
    reasons["packing"] = f"packing on: {arithmetic}" + (", as configured" if wish == "on" else "")
    micro = in_words(micros)
    reasons["micro-batch"] = (
        f"micro-batch {micro} {'pack' if micro == '1' else 'packs'} of up to {tokens} tokens per"
        f" {request.unit}: {plural(min(fitting), 'pack')} would fit; accumulation {accumulation} = at most"
        f" {plural(bound, 'pack')} / {slots}, and micro-steps without any are skipped"
    )
    return replace(packed, slots=tuple((micro, accumulation) for micro in micros))


def _unpackable(request: Request, setup: Setup, longest: int) -> str:
    """Return why rows cannot be packed; empty if they can."""
    # A pack is several flattened rows, such as two of half its length.
    return choices.why_padded(request, setup, 2, -(-longest // 2))


def _micro_batches(request: Request, packed: Division, fitting: tuple[int, ...]) -> tuple[int, ...]:
    """Return the packs per micro-step of each rank."""
    train, world, packs = request.config.train, len(fitting), packed.packs
    per_step = max(packs.counts) if packs else packed.global_batch
    # A typed accumulation must hold for any number of packs that a step may have.
    if train.grad_accum != "auto":
        return (math.ceil((packs.bound if packs else per_step) / (train.grad_accum * world)),) * world
    if train.batch_size != "auto":
        return (min(train.batch_size, math.ceil(per_step / world)),) * world
    most = _most_packs(packed)
    return even_micro_batches(per_step, [min(most, rows) for rows in fitting]) if min(fitting) else (1,) * world


def _most_packs(packed: Division) -> int:
    """Return the number of packs with as many tokens as the largest micro-batch of rows, at least 1."""
    setup, packs = packed.setup, packed.packs
    mean = packs.step_tokens / packs.rows if packs else setup.row_tokens
    most = max(1, int(MOST_TOGETHER[setup.device] * mean) // setup.row_tokens)
    if setup.device == "cuda" and setup.attn_implementation == "sdpa":
        most = min(most, max(1, FLATTENED_TOKENS // setup.row_tokens))
    return most


# Shares of ranks on unlike devices.


def _with_shares(request: Request, division: Division, reasons: dict[str, str]) -> Division:
    """Return the division with shares by speed and memory where ranks are unlike and the batch is `auto`."""
    setup, devices = division.setup, request.data_devices
    same, speeds_known = setup.sharded, all(device.peak_flops for device in devices)
    most = max(_most_packs(division), *division.micro_batches) if setup.pack_tokens else _most_together(request, setup)
    costs = [
        Cost(row_seconds=1 / ((speeds_known and device.peak_flops) or device.memory_bytes), most_rows=min(most, rows))
        for device, rows in zip(devices, request.largest(setup), strict=True)
    ]
    if not request.divides or len(set(costs)) < 2 or not all(cost.most_rows for cost in costs):
        return division
    equal = equal_shares(division.rows, costs, same_steps=same)
    shares = equal if request.config.launch.balance == "off" else share_out(division.rows, costs, same_steps=same)
    counts, even = (", ".join(map(str, spans(division.rows, each))) for each in (shares, equal))
    reasons.pop("micro-batch", None)
    reasons.pop("accumulation", None)
    unit = "pack" if setup.pack_tokens else "row"
    division_text = f"{counts if len(costs) <= NAMED else 'rows'} of {plural(division.rows, unit)} a step"
    if shares == equal:
        off = ", as `launch.balance: off` says" if request.config.launch.balance == "off" else ""
        reasons["shares"] = f"equal shares{off}: {division_text}, in micro-batches by memory"
    else:
        gain = step_seconds(division.rows, equal, costs) / step_seconds(division.rows, shares, costs)
        by_speed = f"speed and memory: {division_text} instead of {even}, {gain:.2f} times as fast by the catalogue"
        by_memory = f"memory, since no speed is known: {division_text} instead of {even}"
        reasons["shares"] = (
            f"shares by {by_speed if speeds_known else by_memory}, until training has measured it"
            " (`launch.balance: off`: equal shares)"
        )
    if setup.pack_tokens:
        # The step with most packs must have room.
        bound = division.packs.bound if division.packs else division.global_batch
        times = max(1.0, bound / sum(micro * steps for micro, steps in shares))
        shares = tuple((micro, math.ceil(steps * times)) for micro, steps in shares)
    return replace(division, slots=shares)
