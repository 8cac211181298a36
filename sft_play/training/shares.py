"""Which held-out rows are answered, and which rank answers which of them. No torch."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any


def choose_rows(count: int, samples: int, seed: int) -> list[int]:
    """Returns the indices (ascending) of the rows to answer: all, or `samples` of `count` chosen by `seed`."""
    if samples >= count:
        return list(range(count))
    return sorted(random.Random(seed).sample(range(count), samples))


def share_size(count: int, batch_size: int) -> int:
    """Returns how many prompts are given to a rank together, where `batch_size` at once are answered and others wait.

    Four to eight batches, or one where rows are few. The more of them, the less a batch runs half empty at its end; but there are at
    least four shares for the ranks. Does not depend on the number of ranks, so neither do the answers.
    """
    batches = min(8, count // (4 * batch_size))
    return batch_size * (batches if batches >= 4 else 1)


def share_batches(
    lengths: Sequence[int],
    batch_size: int,
    rank: int,
    world_size: int,
    *,
    groups: Sequence[int] | None = None,
    spread_by: int | None = None,
) -> tuple[list[list[int]], int]:
    """Returns this rank's batches of row indices, and how many batches every rank must run.

    Batches hold rows of similar length, the longest first, so that a shortage of memory shows at once; with `groups` (one number
    a row) each holds rows of one group only. Batch i goes to rank i modulo `world_size`. A seed in `spread_by` keeps the batches
    and changes their order: any first part of it is spread evenly over all lengths, each batch as likely to be in it as any other.
    """
    kinds = groups or [0] * len(lengths)
    batches = []
    for kind in sorted(set(kinds)):
        order = sorted((i for i, own in enumerate(kinds) if own == kind), key=lambda index: (-lengths[index], index))
        batches += [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    if spread_by is not None:
        batches = [batches[index] for index in spread(len(batches), spread_by)]
    return batches[rank::world_size], math.ceil(len(batches) / world_size)


def spread(count: int, seed: int) -> list[int]:
    """Returns a permutation of `range(count)` of which any first part is spread evenly: van der Corput's order, begun anywhere."""
    bits = max(1, (count - 1).bit_length())
    places = (int(f"{index:0{bits}b}"[::-1], 2) for index in range(2**bits))
    start = random.Random(seed).randrange(count) if count else 0
    return [(place + start) % count for place in places if place < count]


def answerable(rows: Any) -> list[int]:
    """Returns the indices of the rows that ask for an answer; documents and plain text do not."""
    return [index for index, prompt in enumerate(rows["prompt_ids"]) if len(prompt)]
