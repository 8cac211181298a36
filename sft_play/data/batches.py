"""Which rows make up each micro-batch of each rank. Pure Python; the same order on every world size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from sft_play.plan.mixture import permutation
from sft_play.plan.packing import best_fit

Item = TypeVar("Item")
Slots = tuple[int, int]
"""Rows (with packing: packs) per micro-step, micro-steps per optimizer step."""


class GlobalBatchSampler:
    """Yields lists of row indices: one rank's micro-batches, `accumulation` of them per optimizer step.

    Every optimizer step takes the next `global_batch` rows of an order that depends on seed and epoch only, so the rows of
    step n are the same for every world size. The last step of an epoch takes what is left: no row is dropped. Ranks take
    contiguous spans in proportion to their slots; a list may be empty (a dummy micro-step), so that all ranks run equally many.

    With `pack_tokens` the rows of each global batch are put into packs of at most so many tokens, and slots hold packs: as few
    micro-steps as hold them all, after micro-steps that are empty on every rank.
    """

    def __init__(
        self,
        rows: int,
        global_batch: int,
        ranks: Sequence[Slots],
        rank: int,
        seed: int,
        *,
        order: Callable[[int], list[int]] | None = None,
        lengths: Sequence[int] = (),
        pack_tokens: int = 0,
    ) -> None:
        """`order` returns the `rows` indices of an epoch (default: a permutation); `lengths` are needed for packing."""
        capacity = sum(micro * steps for micro, steps in ranks)
        if rows < 1 or global_batch < 1 or (capacity < global_batch and not pack_tokens):
            raise ValueError(f"{rows} rows in global batches of {global_batch} do not fit {capacity} slots")
        self.rows = rows
        self.global_batch = global_batch
        self.ranks = tuple(ranks)
        self.rank = rank
        self.seed = seed
        self.epoch = 0
        self.lengths = lengths
        self.pack_tokens = pack_tokens
        self._order = order

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
        """Returns this epoch's row indices."""
        return self._order(self.epoch) if self._order else permutation(self.rows, self.seed, self.epoch)

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order()
        for start in range(0, self.rows, self.global_batch):
            yield from self.share(order[start : start + self.global_batch])

    def share(self, batch: Sequence[int]) -> list[list[int]]:
        """Returns this rank's micro-batches of one global batch."""
        if self.pack_tokens:
            return self._share_packs(batch)
        mine = _cut(batch, [micro * steps for micro, steps in self.ranks])[self.rank]
        return _cut(mine, [1] * self.ranks[self.rank][1])

    def _share_packs(self, batch: Sequence[int]) -> list[list[int]]:
        sizes = [self.lengths[row] for row in batch]
        packs = best_fit(sizes, self.pack_tokens)
        # Fullest first: packs that ranks work on at the same time are about as long.
        packs.sort(key=lambda pack: -sum(sizes[index] for index in pack))
        most = max(steps for _, steps in self.ranks)
        slots = [sum(micro for micro, steps in self.ranks if steps > turn) for turn in range(most)]
        turns = next((turn + 1 for turn in range(most) if sum(slots[: turn + 1]) >= len(packs)), 0)
        if not turns:
            raise ValueError(f"{len(packs)} packs do not fit {sum(slots)} slots")
        found = []
        for turn, span in enumerate(_cut(packs, slots[:turns])):
            weights = [micro if steps > turn else 0 for micro, steps in self.ranks]
            mine = _cut(span, weights)[self.rank]
            found.append([batch[index] for pack in mine for index in pack])
        found = found[: self.ranks[self.rank][1]]
        # Empty ones first, so that the last micro-step, which updates, is a real one on as many ranks as can be.
        return [[]] * (self.ranks[self.rank][1] - len(found)) + found


def _cut(rows: Sequence[Item], weights: Sequence[int]) -> list[list[Item]]:
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
