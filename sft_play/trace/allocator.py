"""A model of CUDA's caching allocator as workers run it, with `expandable_segments:True`: what it must map for a
sequence of allocations.

After torch's `CUDACachingAllocator`: small blocks (up to 1 MiB) and large ones have one range of addresses each, in
which pages of 2 and of 20 MiB are mapped when they are needed. Best fit among free mapped blocks, else the lowest
addresses where unmapped ones make room; any rest of 512 B is split off. At the limit whole free pages are given back,
wherever they are: gaps cost little, but no block moves.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

MIB = 2**20
SMALL = MIB
PAGE = {True: 2 * MIB, False: 20 * MIB}
"""Bytes that are mapped at a time, for small blocks and for large ones."""
LEAST_REST = 512
TOLERANCE = 16 * MIB
ENDLESS = 2**60

Event = tuple[int, int, int]
"""+1 or -1, block number, bytes"""


class OverBudgetError(Exception):
    """The limit is too small."""


@dataclass(slots=True, eq=False)
class Block:
    """Addresses that are in use, free, or not mapped."""

    start: int
    size: int
    mapped: bool = False
    used: bool = False
    before: Block | None = None
    after: Block | None = None

    @property
    def reach(self) -> int:
        """Bytes up to which a free block can grow in place."""
        after = self.after
        return self.size + (after.size if after is not None and not after.mapped else 0)

    def cut(self, size: int) -> Block:
        """Shorten the block to `size` bytes and return the rest."""
        rest = Block(self.start + size, self.size - size, mapped=self.mapped, before=self, after=self.after)
        if self.after is not None:
            self.after.before = rest
        self.after, self.size = rest, size
        return rest

    def take_next(self) -> None:
        """Grow over the block after this one."""
        assert self.after is not None
        self.size += self.after.size
        self.after = self.after.after
        if self.after is not None:
            self.after.before = self


class AddressRange:
    """The addresses of one kind of blocks."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.first = Block(0, ENDLESS)
        self.free: list[tuple[int, int, Block]] = []
        """Free mapped blocks by size."""

    def blocks(self) -> Iterator[Block]:
        """Yield all blocks by address."""
        block: Block | None = self.first
        while block is not None:
            yield block
            block = block.after

    def best(self, size: int) -> Block | None:
        """Return the free mapped block that fits best, the one that can grow least where several do."""
        index = bisect.bisect_left(self.free, (size, -1))
        if index == len(self.free):
            return None
        while index + 1 < len(self.free) and self.free[index + 1][2].reach < self.free[index][2].reach:
            index += 1
        return self.free.pop(index)[2]

    def room(self, size: int) -> tuple[Block, int]:
        """Return where unmapped addresses make room for `size`, and the bytes to be mapped for it."""
        for unmapped in self.blocks():
            if unmapped.mapped:
                continue
            start = unmapped.before if unmapped.before is not None and not unmapped.before.used else unmapped
            covered, block, to_map = 0, start, 0
            while covered < size and block is not None and not block.used:
                if not block.mapped:
                    to_map += -(-min(block.size, size - covered) // self.page) * self.page
                covered += block.size
                block = block.after  # type: ignore[assignment]
            if covered >= size:
                return start, to_map
        raise AssertionError("addresses have an end")

    def map(self, block: Block, size: int) -> Block:
        """Map free addresses from `block` on until `size` bytes are, and return them as one block that is not
        listed.
        """
        self._map_some(block, size)
        while block.size < size:
            assert block.after is not None
            self._map_some(block.after, size - block.size)
            block.take_next()
        return self._join(block)

    def _map_some(self, block: Block, size: int) -> None:
        """Take a free block off the list, or map the first whole pages of an unmapped one."""
        if block.mapped:
            self._unlist(block)
            return
        length = -(-size // self.page) * self.page
        if length < block.size:
            block.cut(length)
        block.mapped = True

    def split(self, block: Block, size: int) -> None:
        """List what a block has beyond `size` as free."""
        if block.size - size >= LEAST_REST:
            self._list(block.cut(size))

    def release(self, block: Block) -> None:
        """List a block as free, joined with free mapped neighbours."""
        block.used = False
        self._list(self._join(block))

    def give_back(self) -> int:
        """Unmap every whole page that is free; return their bytes."""
        total = 0
        for size, start, block in list(self.free):
            low, high = -(-start // self.page) * self.page, (start + size) // self.page * self.page
            if high <= low:
                continue
            self._unlist(block)
            self.split(block, high - start)
            if low > start:
                pages = block.cut(low - start)
                self._list(block)
                block = pages  # noqa: PLW2901
            block.mapped = False
            self._join(block)
            total += high - low
        return total

    def _join(self, block: Block) -> Block:
        """Return a block that is not in use, joined with neighbours that are mapped as it is."""
        for first in (block, block.before):
            second = first.after if first is not None else None
            if first is None or second is None or first.used or second.used or first.mapped != second.mapped:
                continue
            if first.mapped:
                self._unlist(second if first is block else first)
            first.take_next()
            block = first
        return block

    def _list(self, block: Block) -> None:
        bisect.insort(self.free, (block.size, block.start, block))

    def _unlist(self, block: Block) -> None:
        self.free.pop(bisect.bisect_left(self.free, (block.size, block.start)))


@dataclass(slots=True)
class CachingAllocator:
    """Replays allocations under a limit of mapped bytes (none: `None`)."""

    limit: int | None = None
    reserved: int = 0
    most: int = 0
    ranges: dict[bool, AddressRange] = field(
        default_factory=lambda: {small: AddressRange(page) for small, page in PAGE.items()}
    )
    live: dict[int, tuple[AddressRange, Block]] = field(default_factory=dict)

    def allocate(self, number: int, size: int) -> None:
        """Raise `OverBudgetError`."""
        where = self.ranges[size <= SMALL]
        block = where.best(size)
        if block is None:
            start, unmapped = where.room(size)
            if self.limit is not None and self.reserved + unmapped > self.limit:
                self.reserved -= sum(each.give_back() for each in self.ranges.values())
                start, unmapped = where.room(size)
                if self.reserved + unmapped > self.limit:
                    raise OverBudgetError
            self.reserved += unmapped
            block = where.map(start, size)
        block.used = True
        where.split(block, size)
        self.live[number] = where, block
        self.most = max(self.most, self.reserved)

    def release(self, number: int) -> None:
        """Give a block back."""
        where, block = self.live.pop(number)
        where.release(block)


def replay(events: Sequence[Event], limit: int | None = None) -> int:
    """Return the most bytes that are mapped. Raise `OverBudgetError`."""
    pool = CachingAllocator(limit)
    for sign, number, size in events:
        if size and sign > 0:
            pool.allocate(number, size)
        elif size:
            pool.release(number)
    return pool.most


def most_allocated(events: Sequence[Event]) -> int:
    """Return the most bytes that are in use."""
    allocated = most = 0
    for sign, _, size in events:
        allocated += sign * size
        most = max(most, allocated)
    return most


def lost_bytes(events: Sequence[Event]) -> int:
    """Return what is lost between blocks, to 16 MiB, at the smallest limit that the sequence survives."""
    in_use = low = most_allocated(events)
    high = replay(events)
    while high - low > TOLERANCE:
        middle = (low + high) // 2
        try:
            replay(events, middle)
            high = middle
        except OverBudgetError:
            low = middle
    return max(0, high - in_use)
