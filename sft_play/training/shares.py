"""Which held-out rows are answered, and which rank answers which of them. No torch."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence


def choose_rows(count: int, samples: int, seed: int) -> list[int]:
    """Returns the indices (ascending) of the rows to answer: all, or `samples` of `count` chosen by `seed`."""
    if samples >= count:
        return list(range(count))
    return sorted(random.Random(seed).sample(range(count), samples))


def share_batches(lengths: Sequence[int], batch_size: int, rank: int, world_size: int) -> tuple[list[list[int]], int]:
    """Returns this rank's batches of row indices, and how many batches every rank must run.

    Batches hold prompts of similar length, the longest first, so that a shortage of memory shows at once. Batch i goes to
    rank i modulo `world_size`.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    return batches[rank::world_size], math.ceil(len(batches) / world_size)
