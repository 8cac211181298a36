"""Packing: rows put into as few sequences as best-fit decreasing finds, whether that pays, and the micro-batch of packs."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from statistics import fmean
from typing import Any

from sft_play.config.schema import DataConfig
from sft_play.errors import UserError
from sft_play.plan import choices
from sft_play.plan.batch import Batch, rank_rows, spans
from sft_play.plan.mixture import Data, row_order
from sft_play.plan.plan import Setup
from sft_play.plan.request import Request, global_rows
from sft_play.plan.shape import FLATTENED_TOKENS
from sft_play.runs.prepared import PreparedSplit, row_integers
from sft_play.text import figure, plural

WORTH = 0.10
"""`auto` packs where it saves more than this share of the micro-steps."""
MOST_ROWS = 50_000
"""Rows of the first epoch that are packed to see what packing gives; more change nothing that counts."""


def best_fit(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Return packs of indices into `lengths`, none with more than `limit` tokens: best-fit decreasing (Johnson 1973).

    The longest row comes first, each into the fullest pack that has room for it; equal ones in their order. O(n log n). Never more
    packs than rows, and never twice the fewest there can be. Raise `ValueError` for a row that is longer than `limit`.
    """
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, pack), ascending
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        if length > limit:
            raise ValueError(f"row {index} has {length} tokens, a pack {limit}")
        at = bisect_left(rooms, (length, -1))
        if at == len(rooms):
            room, pack = limit, len(packs)
            packs.append([])
        else:
            room, pack = rooms.pop(at)
        packs[pack].append(index)
        if room > length:
            insort(rooms, (room - length, pack))
    return packs


def most_packs(rows: int, tokens: int, limit: int) -> int:
    """Return the most packs that best fit makes of `rows` rows with `tokens` tokens: any two together overflow a pack."""
    return max(1, min(rows, ceil(2 * tokens / limit) - 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Packs:
    """What packing makes of the data: the first epoch's steps, packed."""

    limit: int
    """Tokens that a pack may have: `model.max_seq_len`."""
    counts: tuple[int, ...]
    """Packs of each whole step (of the only one where there is none)."""
    rows: int
    """Rows of a step."""
    step_tokens: float
    """Mean tokens of a step."""
    longest: int
    """Tokens of the longest pack that there can be."""
    bound: int
    """No step of any epoch has more packs."""
    label_share: float
    """No pack has a larger share of label tokens."""
    row_tokens: float
    """Tokens of the row that the average token is in."""

    @property
    def mean(self) -> float:
        """Packs of a step."""
        return fmean(self.counts)

    @property
    def efficiency(self) -> float:
        """Share of the packs' room that holds tokens."""
        return self.step_tokens / (self.mean * self.limit)

    def micro_steps(self, slots: int) -> float:
        """Return the mean micro-steps of a step when all ranks together hold `slots` packs at a time."""
        return fmean(-(-count // slots) for count in self.counts)


def packs_of(request: Request, global_batch: int) -> Packs | None:
    """Return what packing makes of the prepared rows; `None` where their lengths are not known."""
    config, split = request.config, request.train_split
    if split is None or not split.rows:
        return None
    return _packs(split, config.data.mix_by, config.data.exhausted, config.train.seed, config.model.max_seq_len, global_batch)


@lru_cache(maxsize=32)
def _packs(split: PreparedSplit, by: Any, exhausted: Any, seed: int, limit: int, global_batch: int) -> Packs | None:
    order = row_order(DataConfig(mix_by=by, exhausted=exhausted), split, seed)  # a whole configuration has no hash
    lengths = row_integers(split, "lengths.i32")
    if lengths is None or max(lengths) > limit:
        return None
    rows = order(0)[:MOST_ROWS]
    sizes = [lengths[row] for row in rows]
    starts = range(0, max(1, len(rows) - global_batch + 1), global_batch)
    steps = [sizes[start : start + global_batch] for start in starts]
    # With weights a small source may come twice in a step, so its longest row too.
    largest = [max(lengths)] * global_batch if order.mixture else sorted(lengths, reverse=True)[:global_batch]
    labels = row_integers(split, "labels.i32")
    share = max((count / max(1, length) for count, length in zip(labels, lengths, strict=True)), default=1.0) if labels else 1.0
    return Packs(
        limit=limit,
        counts=tuple(len(best_fit(step, limit)) for step in steps),
        rows=len(steps[0]),
        step_tokens=fmean(sum(step) for step in steps),
        longest=min(limit, sum(largest)),
        bound=most_packs(len(steps[0]), sum(largest), limit),
        label_share=min(1.0, share),
        row_tokens=sum(size * size for size in sizes) / max(1, sum(sizes)),
    )


SLOWER = 1.05
"""`auto` does not pack where the forecast of a step is longer by more than this factor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """How rows become micro-batches."""

    setup: Setup
    batch: Batch
    packs: Packs | None = None
    """`None` without packing."""

    @property
    def micro_steps(self) -> int:
        """Micro-steps that a step is expected to need: empty ones are skipped."""
        if self.packs is None:
            return self.batch.accumulation
        if self.own_steps:
            return max(self.own_steps)
        return max(1, round(self.packs.micro_steps(sum(self.batch.micro_batches))))

    @property
    def own_steps(self) -> tuple[int, ...]:
        """Micro-steps that each rank is expected to make, where they are not the same; else empty."""
        if self.packs is None or not self.batch.own_steps:
            return self.batch.own_steps
        return tuple(
            max(1, -(-packs // max(1, micro))) for packs, micro in zip(self.shares, self.batch.micro_batches, strict=True)
        )

    @property
    def rows(self) -> int:
        """What a step has of what a micro-batch counts: rows, or packs."""
        return self.batch.global_batch if self.packs is None else max(1, round(self.packs.mean))

    @property
    def shares(self) -> list[int]:
        """The most rows (or packs) that each rank gets of a step."""
        if self.batch.own_steps:
            return list(spans(self.rows, self.batch.slots))
        return rank_rows(self.rows, self.batch.micro_batches)

    def data(self, plain: Data) -> Data:
        """Return what the average row (with packing: pack) is like, for the forecast."""
        if self.packs is None:
            return plain
        tokens = self.packs.step_tokens / self.rows
        inner = self.packs.row_tokens
        return Data(row_tokens=tokens, longest=max(tokens, self.packs.longest), label_share=plain.label_share, inside=inner)


def pack_if_typed(request: Request, setup: Setup) -> Setup:
    """Return the setup with packs for `train.packing: on`, so that everything is planned for them. Raise `UserError`."""
    config = request.config
    if config.train.packing != "on":
        return setup
    if why := _unpackable(request, setup, 1):
        raise UserError(f"`train.packing` is `on`, but {why}", hint="leave `train.packing` to `auto`, or `off`")
    return packed_setup(setup, config.model.max_seq_len, packs_of(request, global_rows(config.train, setup.data_world)))


def packed_setup(setup: Setup, limit: int, packs: Packs | None) -> Setup:
    """Return the setup whose row is the longest pack that there can be, with as many labels as any has."""
    longest, share = (packs.longest, packs.label_share) if packs else (limit, 1.0)
    return replace(setup, pack_tokens=limit, layout="flattened", row_tokens=longest, label_share=share)


def choose_packing(
    request: Request, setup: Setup, plain: Batch, most: int, seconds: Callable[[Division], float], reasons: list[str]
) -> Division:
    """Return how rows become micro-batches, and say why. `most` rows a micro-batch gain speed. Raise `UserError`.

    `setup` is packed already where `train.packing` is `on`.
    """
    config, unpacked = request.config, Division(setup=setup, batch=plain)
    wish = config.train.packing

    def off(why: str) -> Division:
        reasons.extend([*plain.reasons, f"packing off: {why}"])
        return unpacked

    if wish == "off" or (wish == "auto" and plain.accumulation == 1):  # nothing to save: one micro-step holds all rows
        reasons.extend(plain.reasons)
        return unpacked
    packs = packs_of(request, plain.global_batch)
    if wish == "auto":
        if request.launch.unpack:
            return off("memory ran out with it")
        if packs is None:
            return off("the lengths of these rows are not known" if request.train_split else "decided when the data are prepared")
        if why := _unpackable(request, setup, packs.longest):
            return off(why)
    setup = packed_setup(setup, config.model.max_seq_len, packs)
    chosen = Division(setup=setup, batch=plain, packs=packs)
    fitting = request.largest(setup)
    micros = _micro_batches(request, chosen, fitting, most)
    if any(wanted > rows for wanted, rows in zip(micros, fitting, strict=True)):
        held = f"{'only ' + str(min(fitting)) if min(fitting) else 'not one'} pack of {setup.row_tokens} tokens"
        if wish == "auto":
            return off(f"{held} would fit")
        raise UserError(
            f"`train.packing` is `on`, but {held} of the {max(micros)} in a micro-batch would fit",
            hint="a smaller `model.max_seq_len`, TRAIN_GRADIENT_CHECKPOINTING=true, or TRAIN_PACKING=off",
        )
    bound, slots = packs.bound if packs else plain.global_batch, sum(micros)
    accumulation = math.ceil(bound / slots)
    chosen = replace(chosen, batch=replace(plain, micro_batches=micros, accumulation=accumulation))
    arithmetic = f"how much it saves is known when the data are prepared; packs of up to {setup.pack_tokens} tokens"
    if packs:
        before, after = plain.accumulation, packs.micro_steps(slots)
        saved = 1 - after / before
        arithmetic = f"{packs.rows} rows in {packs.mean:.1f} packs of {packs.limit} tokens, {packs.efficiency:.0%} full; {after:.1f} micro-steps "
        arithmetic += f"instead of {before}" + (f" = {saved:.0%} fewer" if saved > 0 else "")
        if wish == "auto" and saved <= WORTH:
            return off(f"{arithmetic}; worth it from {WORTH:.0%} fewer")
        if wish == "auto" and (slower := seconds(chosen)) > SLOWER * (faster := seconds(unpacked)):
            times = f"a step would take {figure(slower)} s instead of {figure(faster)} s by forecast"
            return off(f"{arithmetic}, but {times}: the mask between rows")
    reasons.extend([*plain.reasons[:1], f"packing on: {arithmetic}" + (", as configured" if wish == "on" else "")])
    micro = str(micros[0]) if len(set(micros)) == 1 else ", ".join(map(str, micros))
    reasons.append(
        f"micro-batch {micro} {'pack' if micro == '1' else 'packs'} of up to {setup.row_tokens} tokens per {request.unit}: "
        f"{plural(min(fitting), 'pack')} would fit; accumulation {accumulation} = at most {plural(bound, 'pack')} / {slots}, and "
        "micro-steps without any are skipped"
    )
    return chosen


def _unpackable(request: Request, setup: Setup, longest: int) -> str:
    """Return why rows cannot be packed, if they cannot: a pack is several rows in one line, as two of half its length."""
    why: list[str] = []
    tokens = -(-longest // 2)
    layout = choices.choose_layout(request, setup, 2, tokens, why)
    return "" if layout == "flattened" else why[-1].removeprefix("rows padded: ")


def _micro_batches(request: Request, chosen: Division, fitting: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return the packs per micro-step that each rank should have."""
    train, world, packs = request.config.train, len(fitting), chosen.packs
    per_step = max(packs.counts) if packs else chosen.batch.global_batch
    if train.grad_accum != "auto":  # it holds at any number of packs that a step may have
        return (math.ceil((packs.bound if packs else per_step) / (train.grad_accum * world)),) * world
    if train.batch_size != "auto":
        return (min(train.batch_size, math.ceil(per_step / world)),) * world
    gains = gaining_packs(chosen, most)
    room = [min(gains, rows) for rows in fitting]
    if min(room) < 1:
        return (1,) * world
    steps = math.ceil(per_step / sum(room))
    return tuple(max(1, min(rows, math.ceil(per_step * rows / (steps * sum(room))))) for rows in room)


def gaining_packs(chosen: Division, most: int) -> int:
    """Return the packs that have as many tokens as the largest micro-batch of rows that gains speed, 1 at least."""
    setup, packs = chosen.setup, chosen.packs
    mean = packs.step_tokens / packs.rows if packs else setup.row_tokens
    gains = max(1, int(most * mean) // setup.row_tokens)
    if setup.device == "cuda" and setup.attn_implementation == "sdpa":
        gains = min(gains, max(1, FLATTENED_TOKENS // setup.row_tokens))
    return gains
