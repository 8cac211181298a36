"""Which rows an epoch has, in which order (every row once, or sources mixed by weights), and how they are packed; the
same on every world size.

An epoch of a mixture. Source s has R rows, T tokens and weight w; its size is T (`data.mix_by: tokens`) or R (`rows`).
An epoch of size E takes E * w / sum(w) of each source. `data.exhausted: repeat` chooses the E at which the last source
has been seen once, so smaller ones (for their weight) begin again; `stop` the E at which the first source runs dry, so
none is seen twice. In rows: the source that decides gives exactly R, the others E * w / sum(w) divided by their tokens
per row, rounded, 1 at least.

Each source is an endless sequence of permutations of its rows, made from seed, source and pass; epoch e takes its next
rows. So a source that gives half of its rows per epoch has given all after two, and none twice before each was given
once. Within an epoch the next row comes from the source that has given least for its weight, so every prefix is near
the weights, by a row.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil
from statistics import fmean
from typing import Any, Literal

from sft_play.config.schema import DataConfig
from sft_play.errors import DataError, UserError
from sft_play.plan import choices
from sft_play.plan.batch import Batch, even_micro_batches, in_words, rank_rows, spans
from sft_play.plan.plan import Setup
from sft_play.plan.request import Request, global_rows
from sft_play.plan.shape import FLATTENED_TOKENS
from sft_play.runs.prepared import PreparedSplit, SourceFacts, row_integers
from sft_play.text import figure, plural


def permutation(rows: int, seed: int, epoch: int) -> list[int]:
    """Return an epoch's order of all rows."""
    order = list(range(rows))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


MANY_TIMES = 10
"""Repetitions of a row in an epoch from which on they are warned of."""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Sources with weights."""

    names: tuple[str, ...]
    rows: tuple[int, ...]
    """Of each source."""
    tokens: tuple[int, ...]
    weights: tuple[float, ...]
    """Shares, which add up to 1."""
    by: Literal["tokens", "rows"]
    exhausted: Literal["repeat", "stop"]

    @cached_property
    def epoch_rows(self) -> tuple[int, ...]:
        """Rows that each source gives to an epoch."""
        sizes = self.tokens if self.by == "tokens" else self.rows
        shares = [
            (size / share, index) for index, (size, share) in enumerate(zip(sizes, self.weights, strict=True)) if share
        ]
        epoch, decides = max(shares) if self.exhausted == "repeat" else min(shares)
        found = []
        for index, (rows, size, share) in enumerate(zip(self.rows, sizes, self.weights, strict=True)):
            wanted = max(1, round(epoch * share * rows / size)) if share else 0
            wanted = min(wanted, rows) if self.exhausted == "stop" else wanted
            found.append(rows if index == decides else wanted)
        return tuple(found)

    def order(self, source_of_row: Sequence[int], lengths: Sequence[int], seed: int, epoch: int) -> list[int]:
        """Return the row indices of an epoch."""
        members: list[list[int]] = [[] for _ in self.rows]
        for row, source in enumerate(source_of_row):
            members[source].append(row)
        streams = [self._stream(members[s], count, seed, epoch, s) for s, count in enumerate(self.epoch_rows)]
        # (what the source has given for its weight, source): the least comes next.
        heap = [(0.0, s) for s, count in enumerate(self.epoch_rows) if count]
        order: list[int] = []
        while heap:
            given, source = heapq.heappop(heap)
            row = next(streams[source], -1)
            if row < 0:
                continue
            order.append(row)
            heapq.heappush(heap, (given + (lengths[row] if self.by == "tokens" else 1) / self.weights[source], source))
        return order

    def _stream(self, members: list[int], count: int, seed: int, epoch: int, source: int) -> Iterator[int]:
        """Yield the rows that epoch `epoch` takes of a source's endless sequence of permutations."""
        at, end = epoch * count, (epoch + 1) * count
        while at < end:
            turn, start = divmod(at, len(members))
            rows = list(members)
            random.Random(f"{seed}/{source}/{turn}").shuffle(rows)
            taken = rows[start : start + end - at]
            yield from taken
            at += len(taken)

    @property
    def repeats(self) -> tuple[float, ...]:
        """How often an epoch takes each source's rows."""
        return tuple(rows / max(1, whole) for rows, whole in zip(self.epoch_rows, self.rows, strict=True))

    def describe(self) -> list[str]:
        """Return an epoch of each source in words."""
        given = [
            rows * size / max(1, whole)
            for rows, size, whole in zip(self.epoch_rows, self.tokens, self.rows, strict=True)
        ]
        found = []
        for name, rows, whole, tokens in zip(self.names, self.epoch_rows, self.rows, given, strict=True):
            share = tokens / max(1.0, sum(given)) if self.by == "tokens" else rows / max(1, sum(self.epoch_rows))
            found.append(
                f"{name}: {rows:,} rows an epoch ({rows / max(1, whole):.3g} x its {whole:,}), about {tokens:,.0f}"
                f" tokens, {share:.1%} of the {self.by}"
            )
        found += [
            f"warning: every row of {name} comes {times:.0f} times an epoch and may be learnt by heart: lower its"
            " weight, or set `data.exhausted: stop`"
            for name, times in zip(self.names, self.repeats, strict=True)
            if times >= MANY_TIMES
        ]
        return found


def mixture_of(data: DataConfig, sources: Sequence[SourceFacts]) -> Mixture | None:
    """Return how the sources are mixed, `None` where they have no weights. Raise `DataError` for an empty source with a
    weight.
    """
    weights = [source.weight for source in sources]
    if not weights or any(weight is None for weight in weights):
        return None
    shares = [float(weight or 0) for weight in weights]
    total = sum(shares)
    for source in sources:
        if source.weight and not (source.tokens and source.rows):
            raise DataError(
                f"source `{source.name}` has the weight {source.weight:g}, but gave no rows",
                hint="`make inspect` shows why its rows were dropped; leave the source out, or give it the weight 0",
            )
    if total <= 0:
        raise DataError("all weights of `data.sources` are 0, so nothing would be trained", hint="leave them out")
    return Mixture(
        names=tuple(source.name for source in sources),
        rows=tuple(source.rows for source in sources),
        tokens=tuple(source.tokens for source in sources),
        weights=tuple(share / total for share in shares),
        by=data.mix_by,
        exhausted=data.exhausted,
    )


@dataclass(frozen=True, kw_only=True)
class RowOrder:
    """The rows of every epoch, from seed and epoch alone."""

    rows: int
    """Rows an epoch takes, those that come again counted again."""
    seed: int
    mixture: Mixture | None = None
    source_of_row: Sequence[int] = ()
    lengths: Sequence[int] = ()

    def __call__(self, epoch: int) -> list[int]:
        """Return row indices."""
        if self.mixture is None:
            return permutation(self.rows, self.seed, epoch)
        return self.mixture.order(self.source_of_row, self.lengths, self.seed, epoch)


def row_order(data: DataConfig, split: PreparedSplit, seed: int) -> RowOrder:
    """Return the order of a prepared split. Raise `DataError` for a mixture whose rows do not say where they are
    from.
    """
    mixture = mixture_of(data, split.sources)
    if mixture is None:
        return RowOrder(rows=split.rows, seed=seed)
    sources, lengths = row_integers(split, "sources.i32"), row_integers(split, "lengths.i32")
    if sources is None or lengths is None:
        raise DataError(
            "sources have weights, but these rows were prepared by a version that did not keep where each is from",
            place=split.path,
            hint="remove this folder, so that they are prepared again",
        )
    return RowOrder(rows=sum(mixture.epoch_rows), seed=seed, mixture=mixture, source_of_row=sources, lengths=lengths)


def label_share(split: PreparedSplit | None) -> float:
    """Return labels beside tokens of a micro-batch that is worse than any: its rows are the longest, and have most
    labels.
    """
    return min(1.0, (split.most_labels or split.longest) / split.longest) if split and split.longest else 1.0


def row_tokens(request: Request) -> int:
    """Return the tokens of the longest row."""
    most, split = request.config.model.max_seq_len, request.train_split
    return min(most, split.longest) if split else most


def step_count(request: Request, global_batch: int, reasons: list[str]) -> tuple[int | None, int | None]:
    """Return optimizer steps in all and of an epoch, `None` where they are not known yet."""
    config, split = request.config, request.train_split
    mixture = mixture_of(config.data, split.sources) if split else None
    rows = (sum(mixture.epoch_rows) if mixture else split.rows) if split else None
    reasons += [f"mixture: {line}" for line in (mixture.describe() if mixture else [])]
    per_epoch = math.ceil(rows / global_batch) if rows else None
    if config.train.max_steps > 0:
        reasons.append(
            f"steps {config.train.max_steps}: as configured"
            + (f", {config.train.max_steps / per_epoch:.2f} epochs" if per_epoch else "")
        )
        return config.train.max_steps, per_epoch
    if per_epoch is None:
        reasons.append("steps: known when the data are prepared")
        return None, None
    steps = max(1, math.ceil(config.train.epochs * per_epoch))
    reasons.append(
        f"steps {steps} = {config.train.epochs:g} epochs x {per_epoch} ({rows} rows / {global_batch} global,"
        " rounded up)"
    )
    return steps, per_epoch


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """The rows of a step, as far as they are known."""

    row_tokens: float
    """Tokens of an average row."""
    longest: float
    label_share: float
    """Share of tokens that a loss is computed for."""
    inside: float = 0.0
    """With packing, where the above are of packs: tokens of the row that the average token is in."""


WORTH = 0.10
"""`auto` packs where it saves more than this share of the micro-steps."""
MOST_ROWS = 50_000
"""Rows of the first epoch that are packed to see what packing gives; more change nothing that counts."""


def best_fit(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Return packs of indices into `lengths`, none with more than `limit` tokens: best-fit decreasing (Johnson 1973).

    The longest row comes first, each into the fullest pack that has room for it; equal ones in their order. O(n log n).
    Never more packs than rows, and never twice the fewest there can be. Raise `ValueError` for a row that is longer
    than `limit`.
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
    """Return the most packs that best fit makes of `rows` rows with `tokens` tokens: any two together overflow a
    pack.
    """
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
    return _packs(
        split, config.data.mix_by, config.data.exhausted, config.train.seed, config.model.max_seq_len, global_batch
    )


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
    share = (
        max((count / max(1, length) for count, length in zip(labels, lengths, strict=True)), default=1.0)
        if labels
        else 1.0
    )
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
            max(1, -(-packs // max(1, micro)))
            for packs, micro in zip(self.shares, self.batch.micro_batches, strict=True)
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


def rows_data(request: Request, division: Division) -> Data:
    """Return what the average row (with packing: pack) is like; memory is planned for the worst instead."""
    split, packs, longest = request.train_split, division.packs, division.setup.row_tokens
    if not split or not split.rows or not split.tokens:
        return Data(row_tokens=longest, longest=longest, label_share=1.0)
    rows, tokens, labels = float(split.rows), float(split.tokens), float(split.label_tokens)
    if mixture := mixture_of(request.config.data, split.sources):
        taken = [
            (count / source.rows, source)
            for count, source in zip(mixture.epoch_rows, split.sources, strict=True)
            if count
        ]
        rows = float(sum(mixture.epoch_rows))
        tokens = sum(times * source.tokens for times, source in taken)
        labels = sum(times * source.label_tokens for times, source in taken)
    if packs is None:
        return Data(row_tokens=tokens / rows, longest=split.longest, label_share=labels / tokens)
    each = packs.step_tokens / division.rows
    return Data(row_tokens=each, longest=max(each, packs.longest), label_share=labels / tokens, inside=packs.row_tokens)


def pack_if_typed(request: Request, setup: Setup) -> Setup:
    """Return the setup with packs for `train.packing: on`, so that everything is planned for them. Raise
    `UserError`.
    """
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
            return off(
                "the lengths of these rows are not known"
                if request.train_split
                else "decided when the data are prepared"
            )
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
    chosen = replace(chosen, batch=replace(plain, slots=tuple((micro, accumulation) for micro in micros)))
    arithmetic = f"how much it saves is known when the data are prepared; packs of up to {setup.pack_tokens} tokens"
    if packs:
        before, after = plain.accumulation, packs.micro_steps(slots)
        saved = 1 - after / before
        arithmetic = (
            f"{packs.rows} rows in {packs.mean:.1f} packs of {packs.limit} tokens, {packs.efficiency:.0%} full;"
            f" {after:.1f} micro-steps "
        )
        arithmetic += f"instead of {before}" + (f" = {saved:.0%} fewer" if saved > 0 else "")
        if wish == "auto" and saved <= WORTH:
            return off(f"{arithmetic}; worth it from {WORTH:.0%} fewer")
        if wish == "auto" and (slower := seconds(chosen)) > SLOWER * (faster := seconds(unpacked)):
            times = f"a step would take {figure(slower)} s instead of {figure(faster)} s by forecast"
            return off(f"{arithmetic}, but {times}: the mask between rows")
    reasons.extend([*plain.reasons[:1], f"packing on: {arithmetic}" + (", as configured" if wish == "on" else "")])
    micro = in_words(micros)
    reasons.append(
        f"micro-batch {micro} {'pack' if micro == '1' else 'packs'} of up to {setup.row_tokens} tokens per"
        f" {request.unit}: {plural(min(fitting), 'pack')} would fit; accumulation {accumulation} = at most"
        f" {plural(bound, 'pack')} / {slots}, and micro-steps without any are skipped"
    )
    return chosen


def _unpackable(request: Request, setup: Setup, longest: int) -> str:
    """Return why rows cannot be packed, if they cannot: a pack is several rows in one line, as two of half its
    length.
    """
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
    return even_micro_batches(per_step, [min(gains, rows) for rows in fitting]) if min(fitting) else (1,) * world


def gaining_packs(chosen: Division, most: int) -> int:
    """Return the packs that have as many tokens as the largest micro-batch of rows that gains speed, 1 at least."""
    setup, packs = chosen.setup, chosen.packs
    mean = packs.step_tokens / packs.rows if packs else setup.row_tokens
    gains = max(1, int(most * mean) // setup.row_tokens)
    if setup.device == "cuda" and setup.attn_implementation == "sdpa":
        gains = min(gains, max(1, FLATTENED_TOKENS // setup.row_tokens))
    return gains
