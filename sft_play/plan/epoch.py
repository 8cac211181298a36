"""The rows of an epoch, their order (every row once, or sources mixed by weights) and their packs, independent of the
world size.

An epoch of a mixture: source s has R rows, T tokens and weight w; its size is T (`data.mix_by: tokens`) or R (`rows`).
An epoch of size E takes E * w / sum(w) of each source. `data.exhausted: repeat` chooses the E at which the last source
has been seen once, so that sources that are small for their weight restart; `stop` chooses the E at which the first
source is exhausted, so that no row is seen twice. In rows, the source that decides contributes exactly R, the others
E * w / sum(w) divided by their tokens per row, rounded, at least 1.

Each source is an endless sequence of permutations of its rows, seeded by seed, source and pass, from which every epoch
takes the next rows. A source that contributes half of its rows per epoch has therefore contributed all of them after
two, and no row twice before each came once. Within an epoch the next row comes from the source that has contributed
least for its weight, so every prefix matches the weights to within a row.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil
from statistics import fmean
from typing import Any, Literal

from sft_play.config.schema import DataConfig
from sft_play.errors import DataError
from sft_play.plan.request import Request
from sft_play.runs.prepared import PreparedSplit, SourceFacts, row_integers

MANY_TIMES = 10
"""Repetitions of a row within an epoch that cause a warning."""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Sources with weights."""

    sources: tuple[SourceFacts, ...]
    weights: tuple[float, ...]
    """Shares of the sources, which add up to 1."""
    by: Literal["tokens", "rows"]
    exhausted: Literal["repeat", "stop"]

    @cached_property
    def epoch_rows(self) -> tuple[int, ...]:
        """Rows that each source contributes to an epoch."""
        sizes = [source.tokens if self.by == "tokens" else source.rows for source in self.sources]
        shares = [
            (size / share, index) for index, (size, share) in enumerate(zip(sizes, self.weights, strict=True)) if share
        ]
        epoch, decides = max(shares) if self.exhausted == "repeat" else min(shares)
        counts = []
        for index, (source, size, share) in enumerate(zip(self.sources, sizes, self.weights, strict=True)):
            count = max(1, round(epoch * share * source.rows / size)) if share else 0
            count = min(count, source.rows) if self.exhausted == "stop" else count
            counts.append(source.rows if index == decides else count)
        return tuple(counts)

    def order(self, source_of_row: Sequence[int], lengths: Sequence[int], seed: int, epoch: int) -> list[int]:
        """Return the row indices of an epoch."""
        members: list[list[int]] = [[] for _ in self.sources]
        for row, source in enumerate(source_of_row):
            members[source].append(row)
        streams = [self._stream(members[s], count, seed, epoch, s) for s, count in enumerate(self.epoch_rows)]
        # (contribution relative to the weight, source): the smallest comes next.
        heap = [(0.0, s) for s, count in enumerate(self.epoch_rows) if count]
        order: list[int] = []
        while heap:
            progress, source = heapq.heappop(heap)
            row = next(streams[source], -1)
            if row < 0:
                continue
            order.append(row)
            heapq.heappush(
                heap, (progress + (lengths[row] if self.by == "tokens" else 1) / self.weights[source], source)
            )
        return order

    def _stream(self, members: list[int], count: int, seed: int, epoch: int, source: int) -> Iterator[int]:
        """Yield the rows that an epoch takes from a source's endless sequence of permutations."""
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
        return tuple(rows / max(1, source.rows) for rows, source in zip(self.epoch_rows, self.sources, strict=True))

    def describe(self) -> list[str]:
        """Return lines that describe each source's part of an epoch, and warnings."""
        tokens = [times * source.tokens for times, source in zip(self.repeats, self.sources, strict=True)]
        sizes: Sequence[float] = tokens if self.by == "tokens" else self.epoch_rows
        trained = [times * source.label_tokens for times, source in zip(self.repeats, self.sources, strict=True)]
        lines, warnings = list[str](), list[str]()
        for index, (source, times) in enumerate(zip(self.sources, self.repeats, strict=True)):
            lines.append(
                f"{source.name}: {self.epoch_rows[index]:,} rows an epoch ({times:.3g} x its {source.rows:,}), about"
                f" {tokens[index]:,.0f} tokens, {sizes[index] / max(1.0, sum(sizes)):.1%} of the {self.by},"
                f" {trained[index] / max(1.0, sum(trained)):.1%} of the trained tokens"
            )
            if times >= MANY_TIMES:
                warnings.append(
                    f"warning: every row of {source.name} comes {times:.0f} times an epoch and may be learnt by heart:"
                    " lower its weight, or set `data.exhausted: stop`"
                )
        return lines + warnings


def mixture_of(data: DataConfig, sources: Sequence[SourceFacts]) -> Mixture | None:
    """Return the mixture of the sources, or `None` if they have no weights.

    Raise `DataError` for an empty source with a weight.
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
                hint="`make inspect` shows why its rows were dropped; omit the source, or give it the weight 0",
            )
    return Mixture(
        sources=tuple(sources),
        weights=tuple(share / total for share in shares),
        by=data.mix_by,
        exhausted=data.exhausted,
    )


@dataclass(frozen=True, kw_only=True)
class RowOrder:
    """The order of the rows in every epoch, determined by seed and epoch alone."""

    rows: int
    """Rows of an epoch, counting repetitions."""
    seed: int
    mixture: Mixture | None = None
    source_of_row: Sequence[int] = ()
    lengths: Sequence[int] = ()

    def __call__(self, epoch: int) -> list[int]:
        """Return the row indices of an epoch."""
        if self.mixture is None:
            order = list(range(self.rows))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            return order
        return self.mixture.order(self.source_of_row, self.lengths, self.seed, epoch)


def row_order(data: DataConfig, split: PreparedSplit, seed: int) -> RowOrder:
    """Return the row order of a prepared split. Raise `DataError` for a mixture whose rows lack their source."""
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
    """Return the largest possible share of label tokens in a micro-batch: the most labels over the longest row."""
    return min(1.0, (split.most_labels or split.longest) / split.longest) if split and split.longest else 1.0


def row_tokens(request: Request) -> int:
    """Return the tokens of the longest row."""
    most, split = request.config.model.max_seq_len, request.train_split
    return min(most, split.longest) if split else most


def step_count(request: Request, reasons: dict[str, str]) -> tuple[int | None, int | None]:
    """Return the optimizer steps in total and per epoch, `None` if they are not known yet."""
    config, split = request.config, request.train_split
    mixture = mixture_of(config.data, split.sources) if split else None
    rows = (sum(mixture.epoch_rows) if mixture else split.rows) if split else None
    for number, line in enumerate(mixture.describe() if mixture else [], 1):
        reasons[f"mixture {number}"] = f"mixture: {line}"
    per_epoch = math.ceil(rows / request.global_batch) if rows else None
    if config.train.max_steps > 0:
        epochs = f", {config.train.max_steps / per_epoch:.2f} epochs" if per_epoch else ""
        reasons["steps"] = f"steps {config.train.max_steps}: as configured{epochs}"
        return config.train.max_steps, per_epoch
    if per_epoch is None:
        reasons["steps"] = "steps: known when the data are prepared"
        return None, None
    steps = max(1, math.ceil(config.train.epochs * per_epoch))
    reasons["steps"] = (
        f"steps {steps} = {config.train.epochs:g} epochs x {per_epoch} ({rows} rows / {request.global_batch} global,"
        " rounded up)"
    )
    return steps, per_epoch


MOST_ROWS = 50_000
"""Rows of the first epoch that are packed to estimate the gain; more would not change the estimate noticeably."""


def best_fit(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Return packs of indices into `lengths`, none with more than `limit` tokens: best-fit decreasing (Johnson 1973).

    From the longest row on, each goes into the fullest pack that has room for it; equal rows keep their order.
    O(n log n). There are never more packs than rows, and always fewer than twice the minimum. Raise `ValueError` for a
    row longer than `limit`.
    """
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, pack), ascending
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
    """Return the most packs that best fit makes of `rows` rows with `tokens` tokens: any two packs overflow one."""
    return max(1, min(rows, ceil(2 * tokens / limit) - 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Packs:
    """The packed steps of the first epoch."""

    limit: int
    """Tokens that a pack may have: `model.max_seq_len`."""
    counts: tuple[int, ...]
    """Packs of each complete step, or of the only step where it is incomplete."""
    rows: int
    """Rows of a step."""
    step_tokens: float
    """Mean tokens of a step."""
    longest: int
    """Tokens of the longest possible pack."""
    bound: int
    """Upper bound of the packs per step in any epoch."""
    label_share: float
    """Upper bound of a pack's share of label tokens."""
    row_tokens: float
    """Tokens of the row that the average token is in."""

    @property
    def mean(self) -> float:
        """Mean number of packs per step."""
        return fmean(self.counts)

    @property
    def efficiency(self) -> float:
        """Share of the packs' capacity that holds tokens."""
        return self.step_tokens / (self.mean * self.limit)

    def micro_steps(self, slots: int) -> float:
        """Return the mean micro-steps per step when all ranks together take `slots` packs at a time."""
        return fmean(-(-count // slots) for count in self.counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class AverageRow:
    """The average row of a step, or with packing the average pack; memory is planned for the worst one instead."""

    tokens: float
    longest: float
    """Tokens of the longest of all."""
    label_share: float
    """Share of tokens that have labels."""
    inside: float = 0.0
    """With packing: tokens of the row that the average token is in."""

    def padded_tokens(self, micro: float) -> float:
        """Return the tokens of each of `micro` rows, padded to the longest of them.

        The longest of m rows spread evenly around the mean is (m - 1) / (m + 1) of the way from the mean to the
        longest row of all.
        """
        return self.tokens + max(0.0, self.longest - self.tokens) * max(0.0, micro - 1) / (micro + 1)


def packs_of(request: Request) -> Packs | None:
    """Return the packs of the prepared rows, or `None` if the lengths of the rows are not known."""
    config, split = request.config, request.train_split
    if split is None or not split.rows:
        return None
    return _packs(
        split,
        config.data.mix_by,
        config.data.exhausted,
        config.train.seed,
        config.model.max_seq_len,
        request.global_batch,
    )


@lru_cache(maxsize=32)
def _packs(split: PreparedSplit, by: Any, exhausted: Any, seed: int, limit: int, global_batch: int) -> Packs | None:
    # The cache needs hashable arguments, which a complete configuration is not.
    order = row_order(DataConfig(mix_by=by, exhausted=exhausted), split, seed)
    lengths = row_integers(split, "lengths.i32")
    if lengths is None or max(lengths) > limit:
        return None
    rows = order(0)[:MOST_ROWS]
    sizes = [lengths[row] for row in rows]
    starts = range(0, max(1, len(rows) - global_batch + 1), global_batch)
    steps = [sizes[start : start + global_batch] for start in starts]
    # With weights a small source, and so its longest row, may come several times in a step.
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
