"""Packing: rows put into as few sequences as best-fit decreasing finds, whether that pays, and the micro-batch of packs."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from statistics import fmean

from sft_play.config.schema import Config
from sft_play.errors import UserError
from sft_play.plan import choices
from sft_play.plan.balance import spans
from sft_play.plan.batch import Batch, count, global_rows
from sft_play.plan.fit import Fit
from sft_play.plan.layouts import FLATTENED_TOKENS
from sft_play.plan.memory import Setup
from sft_play.plan.mixture import RowOrder, row_order
from sft_play.plan.throughput import Data, rank_rows
from sft_play.plan.words import figure
from sft_play.runs.prepared import PreparedSplit, row_integers

WORTH = 0.10
"""`auto` packs where it saves more than this share of the micro-steps."""
MOST_ROWS = 50_000
"""Rows of the first epoch that are packed to see what packing gives; more change nothing that counts."""


def best_fit(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Returns packs of indices into `lengths`, none with more than `limit` tokens: best-fit decreasing (Johnson 1973).

    The longest row comes first, each into the fullest pack that has room for it; equal ones in their order. O(n log n). Never more
    packs than rows, and never twice the fewest there can be. Raises `ValueError` for a row that is longer than `limit`.
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
    """Returns the most packs that best fit makes of `rows` rows with `tokens` tokens: any two together overflow a pack."""
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
        """Returns the mean micro-steps of a step when all ranks together hold `slots` packs at a time."""
        return fmean(-(-count // slots) for count in self.counts)


def packs_of(config: Config, split: PreparedSplit | None, global_batch: int) -> Packs | None:
    """Returns what packing makes of a prepared split; `None` where its rows' lengths are not known."""
    if split is None or not split.rows:
        return None
    order = row_order(config.data, split, config.train.seed)
    return _packed(split, order.mixture is not None, config.model.max_seq_len, global_batch, _Order(order))


class _Order:
    """An order that compares by what made it, so that what was found for it can be kept."""

    def __init__(self, order: RowOrder) -> None:
        self.order = order
        mixture = order.mixture
        self.key = (order.rows, order.seed, mixture and (mixture.weights, mixture.by, mixture.exhausted))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Order) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@lru_cache(maxsize=32)
def _packed(split: PreparedSplit, mixed: bool, limit: int, global_batch: int, order: _Order) -> Packs | None:
    lengths = row_integers(split, "lengths.i32")
    if lengths is None or max(lengths) > limit:
        return None
    rows = order.order(0)[:MOST_ROWS]
    sizes = [lengths[row] for row in rows]
    starts = range(0, max(1, len(rows) - global_batch + 1), global_batch)
    steps = [sizes[start : start + global_batch] for start in starts]
    # With weights a small source may come twice in a step, so its longest row too.
    largest = [max(lengths)] * global_batch if mixed else sorted(lengths, reverse=True)[:global_batch]
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


# Whether rows are packed, and the micro-batch and accumulation of packs. Pure but for the lengths of prepared rows, which it reads.


SLOWER = 1.05
"""`auto` does not pack where the forecast of a step is longer by more than this factor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """How rows become micro-batches."""

    setup: Setup
    batch: Batch
    packs: Packs | None = None
    """`None` without packing."""
    pack_tokens: int = 0
    """The most tokens of a pack; 0 without packing."""

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
        """Returns what the average row (with packing: pack) is like, for the forecast."""
        if self.packs is None:
            return plain
        tokens = self.packs.step_tokens / self.rows
        inner = self.packs.row_tokens
        return Data(row_tokens=tokens, longest=max(tokens, self.packs.longest), label_share=plain.label_share, inside=inner)


def insisted(fit: Fit, setup: Setup, split: PreparedSplit | None) -> Setup:
    """Returns the setup with packs for `train.packing: on`, so that everything is planned for them. Raises `UserError`."""
    config = fit.config
    if config.train.packing != "on":
        return setup
    reasons: list[str] = []
    if _layout(fit, setup, 1, 1, reasons) != "flattened":
        raise UserError(
            f"`train.packing` is `on`, but {reasons[-1].removeprefix('rows padded: ')}",
            hint="leave `train.packing` to `auto`, or `off`",
        )
    packs = packs_of(config, split, global_rows(config.train, setup.world_size))
    return packed_setup(setup, config.model.max_seq_len, packs)


def packed_setup(setup: Setup, limit: int, packs: Packs | None) -> Setup:
    """Returns the setup whose row is the longest pack that there can be, with as many labels as any has."""
    longest, share = (packs.longest, packs.label_share) if packs else (limit, 1.0)
    return replace(setup, packed=True, layout="flattened", row_tokens=longest, label_share=share)


def choose_packing(
    fit: Fit, setup: Setup, plain: Batch, room: list[int], split: PreparedSplit | None, *, most: int, unit: str, gave_up: bool,
    seconds: Callable[[Division], float | None], reasons: list[str],
) -> Division:  # fmt: skip
    """Returns how rows become micro-batches, and says why. `most` rows a micro-batch gain speed. Raises `UserError`.

    `setup` is packed already where `train.packing` is `on`; `gave_up` says that memory ran out with packs.
    """
    wish, unpacked = fit.config.train.packing, Division(setup=setup, batch=plain)

    def off(why: str) -> Division:
        reasons.extend([*plain.reasons, f"packing off: {why}"])
        return unpacked

    if wish == "off":
        reasons.extend(plain.reasons)
        return unpacked
    if wish == "auto" and plain.accumulation == 1:
        reasons.extend(plain.reasons)  # nothing to save: one micro-step holds all rows
        return unpacked
    packs = packs_of(fit.config, split, plain.global_batch)
    if wish == "auto":
        if gave_up:
            return off("memory ran out with it")
        if packs is None:
            return off("decided when the data are prepared" if split is None else "the lengths of these rows are not known")
        why: list[str] = []
        if _layout(fit, setup, 1, packs.longest, why) != "flattened":
            return off(why[-1].removeprefix("rows padded: "))
    setup = packed_setup(setup, fit.config.model.max_seq_len, packs)
    chosen = Division(setup=setup, batch=plain, packs=packs, pack_tokens=fit.config.model.max_seq_len)
    fitting = [fit.largest(setup, capacity) for capacity in room]
    micros = _micro_batches(fit, chosen, fitting, most)
    if micros is None:
        return off(f"{_too_few(chosen, min(fitting))} would fit")
    bound = packs.bound if packs else plain.global_batch
    accumulation = math.ceil(bound / sum(micros))
    batch = replace(plain, micro_batches=micros, accumulation=accumulation)
    chosen = replace(chosen, batch=batch)
    arithmetic, saved = _arithmetic(chosen, plain)
    if wish == "auto":
        if saved <= WORTH:
            return off(f"{arithmetic}; worth it from {WORTH:.0%} fewer")
        before, after = seconds(unpacked), seconds(chosen)
        if before and after and after > SLOWER * before:
            return off(
                f"{arithmetic}, but a step would take {figure(after)} s instead of {figure(before)} s by forecast: the mask between rows"
            )
    reasons.extend([*plain.reasons[:1], f"packing on: {arithmetic}" + (", as configured" if wish == "on" else "")])
    micro = str(micros[0]) if len(set(micros)) == 1 else ", ".join(map(str, micros))
    reasons.append(
        f"micro-batch {micro} {'pack' if micro == '1' else 'packs'} of up to {setup.row_tokens} tokens per {unit}: "
        f"{count(min(fitting), 'pack')} would fit; accumulation {accumulation} = at most {count(bound, 'pack')} / {sum(micros)}, and "
        "micro-steps without any are skipped"
    )
    return chosen


def _layout(fit: Fit, setup: Setup, packs: int, tokens: int, reasons: list[str]) -> str:
    """A pack is several rows in one line: as two of half its length."""
    return choices.choose_layout(fit.config, fit.shape, setup.device, setup.attention, 2 * packs, -(-tokens // 2), reasons)


def _micro_batches(fit: Fit, chosen: Division, fitting: list[int], most: int) -> tuple[int, ...] | None:
    """Returns packs per micro-step of each rank, `None` (or an error where packing was insisted on) when they do not fit."""
    train, world, packs = fit.config.train, len(fitting), chosen.packs
    per_step = max(packs.counts) if packs else chosen.batch.global_batch
    if train.grad_accum != "auto":  # it holds at any number of packs that a step may have
        wanted = (math.ceil((packs.bound if packs else chosen.batch.global_batch) / (train.grad_accum * world)),) * world
    elif train.batch_size != "auto":
        wanted = (min(train.batch_size, math.ceil(per_step / world)),) * world
    else:
        gains = gaining(chosen, most)
        room = [min(gains, rows) for rows in fitting]
        if min(room) < 1:
            wanted = (1,) * world
        else:
            steps = math.ceil(per_step / sum(room))
            wanted = tuple(max(1, min(rows, math.ceil(per_step * rows / (steps * sum(room))))) for rows in room)
    if all(packs_wanted <= rows for packs_wanted, rows in zip(wanted, fitting, strict=True)):
        return wanted
    if train.packing == "on":
        raise UserError(
            f"`train.packing` is `on`, but {_too_few(chosen, min(fitting))} of the {max(wanted)} in a micro-batch would fit",
            hint="a smaller `model.max_seq_len`, TRAIN_GRADIENT_CHECKPOINTING=true, or TRAIN_PACKING=off",
        )
    return None


def gaining(chosen: Division, most: int) -> int:
    """Returns the packs that have as many tokens as the largest micro-batch of rows that gains speed, 1 at least."""
    setup, packs = chosen.setup, chosen.packs
    mean = packs.step_tokens / packs.rows if packs else setup.row_tokens
    gains = max(1, int(most * mean) // setup.row_tokens)
    if setup.device == "cuda" and setup.attention == "sdpa":
        gains = min(gains, max(1, FLATTENED_TOKENS // setup.row_tokens))
    return gains


def _too_few(chosen: Division, fitting: int) -> str:
    return f"{'only ' + str(fitting) if fitting else 'not one'} pack of {chosen.setup.row_tokens} tokens"


def _arithmetic(chosen: Division, plain: Batch) -> tuple[str, float]:
    """Returns what packing gives in words, and the share of micro-steps saved."""
    packs, slots = chosen.packs, sum(chosen.batch.micro_batches)
    if packs is None:
        return f"how much it saves is known when the data are prepared; packs of up to {chosen.pack_tokens} tokens", 0.0
    before, after = plain.accumulation, packs.micro_steps(slots)
    saved = 1 - after / before
    words = f"{packs.rows} rows in {packs.mean:.1f} packs of {packs.limit} tokens, {packs.efficiency:.0%} full; {after:.1f} micro-steps"
    return f"{words} instead of {before}" + (f" = {saved:.0%} fewer" if saved > 0 else ""), saved
