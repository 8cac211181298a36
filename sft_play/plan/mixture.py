"""Which rows an epoch has, and in which order: every row once, or sources mixed by weights. Pure; the same on every world size.

An epoch of a mixture. Source s has R rows, T tokens and weight w; its size is T (`data.mix_by: tokens`) or R (`rows`). An epoch of
size E takes E * w / sum(w) of each source. `data.exhausted: repeat` chooses the E at which the last source has been seen once, so
smaller ones (for their weight) begin again; `stop` the E at which the first source runs dry, so none is seen twice. In rows: the
source that decides gives exactly R, the others E * w / sum(w) divided by their tokens per row, rounded, 1 at least.

Each source is an endless sequence of permutations of its rows, made from seed, source and pass; epoch e takes its next rows. So a
source that gives half of its rows per epoch has given all after two, and none twice before each was given once. Within an epoch
the next row comes from the source that has given least for its weight, so every prefix is near the weights, by a row.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from sft_play.config.schema import Config, DataConfig
from sft_play.errors import DataError
from sft_play.plan.plan import Setup
from sft_play.runs.prepared import Prepared, PreparedSplit, SourceFacts, row_integers


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
        shares = [(size / share, index) for index, (size, share) in enumerate(zip(sizes, self.weights, strict=True)) if share]
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
        given = [rows * size / max(1, whole) for rows, size, whole in zip(self.epoch_rows, self.tokens, self.rows, strict=True)]
        found = []
        for name, rows, whole, tokens in zip(self.names, self.epoch_rows, self.rows, given, strict=True):
            share = tokens / max(1.0, sum(given)) if self.by == "tokens" else rows / max(1, sum(self.epoch_rows))
            found.append(
                f"{name}: {rows:,} rows an epoch ({rows / max(1, whole):.3g} x its {whole:,}), about {tokens:,.0f} tokens, "
                f"{share:.1%} of the {self.by}"
            )
        found += [
            f"warning: every row of {name} comes {times:.0f} times an epoch and may be learnt by heart: lower its weight, or set "
            "`data.exhausted: stop`"
            for name, times in zip(self.names, self.repeats, strict=True)
            if times >= MANY_TIMES
        ]
        return found


def mixture_of(data: DataConfig, sources: Sequence[SourceFacts]) -> Mixture | None:
    """Return how the sources are mixed, `None` where they have no weights. Raise `DataError` for an empty source with a weight."""
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
        names=tuple(source.name for source in sources), rows=tuple(source.rows for source in sources),
        tokens=tuple(source.tokens for source in sources), weights=tuple(share / total for share in shares),
        by=data.mix_by, exhausted=data.exhausted,
    )  # fmt: skip


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
    """Return the order of a prepared split. Raise `DataError` for a mixture whose rows do not say where they are from."""
    mixture = mixture_of(data, split.sources)
    if mixture is None:
        return RowOrder(rows=split.rows, seed=seed)
    sources, lengths = row_integers(split, "sources.i32"), row_integers(split, "lengths.i32")
    if sources is None or lengths is None:
        raise DataError(
            "sources have weights, but these rows were prepared by a version that did not keep where each is from",
            place=split.path, hint="remove this folder, so that they are prepared again",
        )  # fmt: skip
    return RowOrder(rows=sum(mixture.epoch_rows), seed=seed, mixture=mixture, source_of_row=sources, lengths=lengths)


def label_share(prepared: Prepared | None) -> float:
    """Return labels beside tokens of a micro-batch that is worse than any: its rows are the longest, and have most labels."""
    split = prepared.train if prepared else None
    if split is None or not split.longest:
        return 1.0
    return min(1.0, (split.most_labels or split.longest) / split.longest)


def rows_data(config: Config, prepared: Prepared | None, setup: Setup) -> Data:
    """Return what the average row is like; memory is planned for the worst instead."""
    split = prepared.train if prepared else None
    if not split or not split.rows or not split.tokens:
        return Data(row_tokens=setup.row_tokens, longest=setup.row_tokens, label_share=1.0)
    rows, tokens, labels = float(split.rows), float(split.tokens), float(split.label_tokens)
    if mixture := mixture_of(config.data, split.sources):
        taken = [(count / source.rows, source) for count, source in zip(mixture.epoch_rows, split.sources, strict=True) if count]
        rows = float(sum(mixture.epoch_rows))
        tokens = sum(times * source.tokens for times, source in taken)
        labels = sum(times * source.label_tokens for times, source in taken)
    return Data(row_tokens=tokens / rows, longest=split.longest, label_share=labels / tokens)


def row_tokens(config: Config, prepared: Prepared | None) -> int:
    """Return the tokens of the longest row."""
    split = prepared.train if prepared else None
    return min(config.model.max_seq_len, split.longest) if split else config.model.max_seq_len


def step_count(config: Config, prepared: Prepared | None, global_batch: int, reasons: list[str]) -> tuple[int | None, int | None]:
    """Return optimizer steps in all and of an epoch, `None` where they are not known yet."""
    split = prepared.train if prepared else None
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
        f"steps {steps} = {config.train.epochs:g} epochs x {per_epoch} ({rows} rows / {global_batch} global, rounded up)"
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
