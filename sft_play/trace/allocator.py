"""A model of CUDA's caching allocator: what it must reserve for a sequence of allocations, more than their sum.

After torch's `CUDACachingAllocator`: blocks up to 1 MiB live in segments of 2 MiB, those below 10 MiB in segments of 20 MiB, larger
ones in multiples of 2 MiB; best fit, splitting, merging, and at the limit whole free segments are returned. Streams,
`roundup_power2_divisions` and `max_split_size` are left out.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

KIB, MIB = 2**10, 2**20
SMALL, SMALL_SEGMENT, LARGE_SEGMENT, LEAST_OWN_SEGMENT = MIB, 2 * MIB, 20 * MIB, 10 * MIB
TOLERANCE = 16 * MIB

Event = tuple[int, int, int]
"""+1 or -1, block number, bytes"""


class DoesNotFitError(Exception):
    """The limit is too small."""


@dataclass(slots=True, eq=False)
class _Block:
    start: int
    """Address; those of later segments are higher."""
    size: int
    small: bool
    free: bool = False
    before: _Block | None = None
    after: _Block | None = None


@dataclass(slots=True)
class CachingAllocator:
    """Replays allocations under a limit of reserved bytes (none: `None`)."""

    limit: int | None = None
    reserved: int = 0
    most: int = 0
    _free: dict[bool, list[tuple[int, int, _Block]]] = field(default_factory=lambda: {True: [], False: []})
    _live: dict[int, _Block] = field(default_factory=dict)
    _top: int = 0

    def allocate(self, number: int, size: int) -> None:
        """Raises `DoesNotFitError`."""
        small = size <= SMALL
        block = self._best(size, small) or self._segment(size, small)
        rest = block.size - size
        if rest >= 512 if small else rest > SMALL:
            other = _Block(block.start + size, rest, small, before=block, after=block.after)
            if block.after:
                block.after.before = other
            block.after, block.size = other, size
            self._insert(other)
        self._live[number] = block
        self.most = max(self.most, self.reserved)

    def release(self, number: int) -> None:
        """Gives a block back and joins it with free neighbours."""
        block = self._live.pop(number)
        for neighbour in (block.before, block.after):
            if neighbour is None or not neighbour.free:
                continue
            self._remove(neighbour)
            block.size += neighbour.size
            if neighbour is block.before:
                block.start, block.before = neighbour.start, neighbour.before
                if block.before:
                    block.before.after = block
            else:
                block.after = neighbour.after
                if block.after:
                    block.after.before = block
        self._insert(block)

    def _best(self, size: int, small: bool) -> _Block | None:
        row = self._free[small]
        index = bisect.bisect_left(row, (size, -1))
        if index == len(row):
            return None
        block = row.pop(index)[2]
        block.free = False
        return block

    def _segment(self, size: int, small: bool) -> _Block:
        own = -(-size // (2 * MIB)) * 2 * MIB
        whole = SMALL_SEGMENT if small else LARGE_SEGMENT if size < LEAST_OWN_SEGMENT else own
        if self.limit is not None and self.reserved + whole > self.limit:
            self._return_segments()
            if self.reserved + whole > self.limit:
                raise DoesNotFitError
        self.reserved += whole
        self._top += whole
        return _Block(self._top - whole, whole, small)

    def _return_segments(self) -> None:
        for row in self._free.values():
            for entry in [e for e in row if e[2].before is None and e[2].after is None]:
                row.remove(entry)
                self.reserved -= entry[0]

    def _insert(self, block: _Block) -> None:
        block.free = True
        bisect.insort(self._free[block.small], (block.size, block.start, block))

    def _remove(self, block: _Block) -> None:
        row = self._free[block.small]
        row.pop(bisect.bisect_left(row, (block.size, block.start)))
        block.free = False


class Allocator(Protocol):
    """What replays allocations under a limit."""

    most: int

    def allocate(self, number: int, size: int) -> None: ...
    def release(self, number: int) -> None: ...


Make = Callable[[int | None], Allocator]
"""Returns an allocator under a limit of bytes that it may reserve."""


def replay(events: Sequence[Event], limit: int | None = None, make: Make = CachingAllocator) -> int:
    """Returns the most bytes that are reserved. Raises `DoesNotFitError`."""
    pool = make(limit)
    for sign, number, size in events:
        if size and sign > 0:
            pool.allocate(number, size)
        elif size:
            pool.release(number)
    return pool.most


def least_capacity(events: Sequence[Event], make: Make = CachingAllocator) -> int:
    """Returns the smallest limit that the sequence survives, to 16 MiB."""
    low, high = most_allocated(events), replay(events, make=make)
    while high - low > TOLERANCE:
        middle = (low + high) // 2
        try:
            replay(events, middle, make)
            high = middle
        except DoesNotFitError:
            low = middle
    return high


def most_allocated(events: Sequence[Event]) -> int:
    """Returns the most bytes that are in use."""
    held = most = 0
    for sign, _, size in events:
        held += sign * size
        most = max(most, held)
    return most


def lost_bytes(events: Sequence[Event], make: Make = CachingAllocator) -> int:
    """Returns what is lost between blocks, at the smallest capacity that suffices."""
    return max(0, least_capacity(events, make) - most_allocated(events)) if events else 0
