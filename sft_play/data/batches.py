"""Which rows make up each micro-batch of each rank. Pure Python; the same order on every world size."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

Slots = tuple[int, int]
"""Rows per micro-step, micro-steps per optimizer step."""


class GlobalBatchSampler:
    """Yields lists of row indices: one rank's micro-batches, `accumulation` of them per optimizer step.

    Every optimizer step takes the next `global_batch` rows of a permutation that depends on seed and epoch only, so the rows of
    step n are the same for every world size. The last step of an epoch takes what is left: no row is dropped. Ranks take
    contiguous spans in proportion to their slots; a list may be empty (a dummy micro-step), so that all ranks run equally many.
    """

    def __init__(self, rows: int, global_batch: int, ranks: Sequence[Slots], rank: int, seed: int) -> None:
        capacity = sum(micro * steps for micro, steps in ranks)
        if rows < 1 or global_batch < 1 or capacity < global_batch:
            raise ValueError(f"{rows} rows in global batches of {global_batch} do not fit {capacity} slots")
        self.rows = rows
        self.global_batch = global_batch
        self.ranks = tuple(ranks)
        self.rank = rank
        self.seed = seed
        self.epoch = 0

    @property
    def steps(self) -> int:
        """Optimizer steps per epoch."""
        return -(-self.rows // self.global_batch)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the permutation; called by accelerate's loader at the start of each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.steps * self.ranks[self.rank][1]

    def order(self) -> list[int]:
        """Returns this epoch's permutation of all rows."""
        order = list(range(self.rows))
        random.Random(f"{self.seed}/{self.epoch}").shuffle(order)
        return order

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order()
        for start in range(0, self.rows, self.global_batch):
            yield from self.share(order[start : start + self.global_batch])

    def share(self, batch: Sequence[int]) -> list[list[int]]:
        """Returns this rank's micro-batches of one global batch."""
        mine = _cut(batch, [micro * steps for micro, steps in self.ranks])[self.rank]
        return _cut(mine, [1] * self.ranks[self.rank][1])


def _cut(rows: Sequence[int], weights: Sequence[int]) -> list[list[int]]:
    """Cuts `rows` into contiguous spans in proportion to `weights`.

    With no more rows than the weights' sum, no span is longer than its weight (rounded up in equal shares): the boundaries are
    floor(n * W_i / W), so a span holds at most ceil(n * w_i / W) rows.
    """
    total, reached, spans, start = sum(weights), 0, [], 0
    for weight in weights:
        reached += weight
        end = len(rows) * reached // total
        spans.append(list(rows[start:end]))
        start = end
    return spans
