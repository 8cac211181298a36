"""The model of CUDA's allocator with expandable segments. No torch."""

from __future__ import annotations

import itertools
import random

import pytest

from sft_play.trace.allocator import MIB, CachingAllocator, DoesNotFitError, Event, lost_bytes, most_allocated, replay


def some_events(seed: int, count: int = 600) -> list[Event]:
    """Allocations of 512 B to 64 MiB in any order, released in any other."""
    chance, live, events = random.Random(seed), {}, []
    for number in range(count):
        size = 512 * chance.randint(1, chance.choice([16, 2048, 65536, 131072]))
        live[number] = size
        events.append((1, number, size))
        while live and chance.random() < 0.48:
            gone = chance.choice(list(live))
            events.append((-1, gone, live.pop(gone)))
    return events + [(-1, number, size) for number, size in live.items()]


@pytest.mark.parametrize("seed", range(6))
def test_blocks_that_are_in_use_never_overlap_and_fit_into_what_is_mapped(seed: int) -> None:
    events = some_events(seed)
    limit = int(1.3 * most_allocated(events))
    pool = CachingAllocator(limit=limit)
    sizes: dict[int, int] = {}
    for sign, number, size in events:
        if sign < 0:
            pool.release(number)
            del sizes[number]
            continue
        try:
            pool.allocate(number, size)
        except DoesNotFitError:
            return
        sizes[number] = size
        for where in pool.ranges.values():
            spans = sorted((pool.live[n][1].start, s) for n, s in sizes.items() if pool.live[n][0] is where)
            assert all(start + length <= after for (start, length), (after, _) in itertools.pairwise(spans))
        assert sum(sizes.values()) <= pool.reserved <= limit


def test_gaps_between_blocks_are_given_back_as_pages() -> None:
    """Forty blocks of 30 MiB, every other one freed: 600 MiB of gaps serve a block of 500 only where pages can move."""
    events: list[Event] = [(1, n, 30 * MIB) for n in range(40)] + [(-1, n, 30 * MIB) for n in range(0, 40, 2)]
    events += [(1, 40, 500 * MIB)]
    assert most_allocated(events) + lost_bytes(events) <= 1500 * MIB


def test_a_limit_that_is_too_small_is_told() -> None:
    with pytest.raises(DoesNotFitError):
        replay([(1, 0, 50 * MIB)], 40 * MIB)
