"""A model of CUDA's caching allocator with `expandable_segments:True`, as workers run: what it must map for a sequence of allocations.

After torch's `CUDACachingAllocator`: small blocks (up to 1 MiB) and large ones have one range of addresses each, in which pages of 2 and
of 20 MiB are mapped when they are needed. Best fit among free mapped blocks, else the lowest addresses where unmapped ones make room;
any rest of 512 B is split off. At the limit whole free pages are given back, wherever they are: gaps cost little, but no block moves.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from sft_play.trace.allocator import MIB, SMALL, DoesNotFitError

PAGE = {True: 2 * MIB, False: 20 * MIB}
"""Bytes that are mapped at a time, for small blocks and for large ones."""
ENDLESS = 2**60


@dataclass(slots=True, eq=False)
class _Block:
    start: int
    size: int
    mapped: bool = False
    used: bool = False
    before: _Block | None = None
    after: _Block | None = None

    @property
    def reach(self) -> int:
        """Bytes up to which a free block can grow in place."""
        after = self.after
        return self.size + (after.size if after is not None and not after.mapped else 0)


class _Range:
    """The addresses of one kind of blocks."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.first = _Block(0, ENDLESS)
        self.free: list[tuple[int, int, _Block]] = []
        self.unmapped: list[tuple[int, _Block]] = [(0, self.first)]

    def best(self, size: int) -> _Block | None:
        """Returns the free mapped block that fits best, the one that can grow least where several do."""
        index = bisect.bisect_left(self.free, (size, -1))
        if index == len(self.free):
            return None
        while index + 1 < len(self.free) and self.free[index + 1][2].reach < self.free[index][2].reach:
            index += 1
        return self.free.pop(index)[2]

    def missing(self, size: int) -> tuple[_Block, int]:
        """Returns where unmapped addresses make room for `size`, and the bytes to be mapped for it."""
        for _, unmapped in self.unmapped:
            start = unmapped.before if unmapped.before is not None and not unmapped.before.used else unmapped
            found, block, more = 0, start, 0
            while found < size and block is not None and not block.used:
                if not block.mapped:
                    more += -(-min(block.size, size - found) // self.page) * self.page
                found += block.size
                block = block.after  # type: ignore[assignment]
            if found >= size:
                return start, more
        raise AssertionError("addresses have an end")

    def map(self, block: _Block, size: int) -> _Block:
        """Maps free addresses from `block` on until `size` bytes are, and returns them as one block that is in no list."""
        if block.mapped:
            self._drop(block)
        else:
            block = self._map_some(block, size)
        while block.size < size:
            after = block.after
            assert after is not None and not after.used
            if after.mapped:
                self._drop(after)
            else:
                after = self._map_some(after, size - block.size)
            self._join(block, after)
        if block.after is not None and block.after.mapped and not block.after.used:
            self._drop(block.after)
            self._join(block, block.after)
        return block

    def _map_some(self, block: _Block, size: int) -> _Block:
        """Maps the first whole pages of an unmapped block."""
        self.unmapped.remove((block.start, block))
        length = min(block.size, -(-size // self.page) * self.page)
        if length < block.size:
            self._cut(block, length)
        block.mapped = True
        return block

    def cut(self, block: _Block, size: int) -> None:
        """Lists what a block has beyond `size` as free."""
        if block.size - size >= 512:
            rest = self._cut(block, size, listed=False)
            rest.mapped = True
            bisect.insort(self.free, (rest.size, rest.start, rest))

    def _cut(self, block: _Block, size: int, *, listed: bool = True) -> _Block:
        rest = _Block(block.start + size, block.size - size, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        if listed:
            bisect.insort(self.unmapped, (rest.start, rest))
        return rest

    def release(self, block: _Block) -> None:
        """Lists a block as free, joined with free mapped neighbours."""
        block.used = False
        for neighbour in (block.after, block.before):
            if neighbour is not None and neighbour.mapped and not neighbour.used:
                self._drop(neighbour)
                first, second = (neighbour, block) if neighbour is block.before else (block, neighbour)
                self._join(first, second)
                block = first
        bisect.insort(self.free, (block.size, block.start, block))

    def give_back(self) -> int:
        """Unmaps every whole page that is free; returns their bytes."""
        total = 0
        for size, start, block in list(self.free):
            low, high = -(-start // self.page) * self.page, (start + size) // self.page * self.page
            if high <= low:
                continue
            self._drop(block)
            if start + size > high:
                tail = self._cut(block, high - start, listed=False)
                tail.mapped = True
                bisect.insort(self.free, (tail.size, tail.start, tail))
            middle = block
            if low > start:
                middle = self._cut(block, low - start, listed=False)
                bisect.insort(self.free, (block.size, block.start, block))
            self._unmap(middle)
            total += high - low
        return total

    def _unmap(self, block: _Block) -> None:
        block.mapped = False
        for neighbour in (block.after, block.before):
            if neighbour is not None and not neighbour.mapped:
                self.unmapped.remove((neighbour.start, neighbour))
                first, second = (neighbour, block) if neighbour is block.before else (block, neighbour)
                self._join(first, second)
                block = first
        bisect.insort(self.unmapped, (block.start, block))

    def _join(self, first: _Block, second: _Block) -> None:
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first

    def _drop(self, block: _Block) -> None:
        self.free.pop(bisect.bisect_left(self.free, (block.size, block.start)))


@dataclass(slots=True)
class ExpandableAllocator:
    """Replays allocations under a limit of mapped bytes (none: `None`)."""

    limit: int | None = None
    reserved: int = 0
    most: int = 0
    _ranges: dict[bool, _Range] = field(default_factory=lambda: {small: _Range(page) for small, page in PAGE.items()})
    _live: dict[int, tuple[_Range, _Block]] = field(default_factory=dict)

    def allocate(self, number: int, size: int) -> None:
        """Raises `DoesNotFitError`."""
        where = self._ranges[size <= SMALL]
        block = where.best(size)
        if block is None:
            start, more = where.missing(size)
            if self.limit is not None and self.reserved + more > self.limit:
                self.reserved -= sum(each.give_back() for each in self._ranges.values())
                start, more = where.missing(size)
                if self.reserved + more > self.limit:
                    raise DoesNotFitError
            self.reserved += more
            block = where.map(start, size)
        block.used = True
        where.cut(block, size)
        self._live[number] = where, block
        self.most = max(self.most, self.reserved)

    def release(self, number: int) -> None:
        """Gives a block back."""
        where, block = self._live.pop(number)
        where.release(block)
