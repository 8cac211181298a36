"""The model of CUDA's allocator with expandable segments. No torch."""

from __future__ import annotations

from sft_play.trace.allocator import MIB, Event, lost_bytes, most_allocated


def test_gaps_between_blocks_are_given_back_as_pages() -> None:
    """Forty blocks of 30 MiB, every other one freed: 600 MiB of gaps serve a block of 500 only where pages can move."""
    events: list[Event] = [(1, n, 30 * MIB) for n in range(40)] + [(-1, n, 30 * MIB) for n in range(0, 40, 2)]
    events += [(1, 40, 500 * MIB)]
    assert most_allocated(events) + lost_bytes(events) <= 1500 * MIB
