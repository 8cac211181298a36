"""Packing: rows of a global batch put into as few sequences as best-fit decreasing finds, and whether that is worth it. Pure.

The rows of a step stay the same, and so does its update (contract B5); what changes is how many micro-steps it takes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from statistics import fmean

from sft_play.config.schema import Config
from sft_play.plan.mixture import RowOrder, row_order
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
