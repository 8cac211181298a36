"""What fits: the memory of a rank from the best source there is, the largest batch, the longest rows. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from sft_play.config.schema import Config
from sft_play.errors import HardwareError
from sft_play.plan.batch import count, global_rows
from sft_play.plan.hardware import GIB
from sft_play.plan.memory import Setup, rank_memory
from sft_play.plan.shape import ModelShape

Memory = Callable[[Config, ModelShape, Setup, int], dict[str, int]]
"""(configuration, shape, setup, micro-batch) -> bytes of every part of a rank at its worst moment."""
SHORTEST_ROW = 8
MOST_ROWS = 2**20
"""Where the search for the largest micro-batch ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """One way to need less memory."""

    override: str
    """What to type."""
    need_bytes: int
    saving_bytes: int
    fits: bool
    slower: float | None
    """Time of a token over what it takes without the remedy, by arithmetic; `None` where that says nothing."""

    def __str__(self) -> str:
        notes = [f"{self.saving_bytes / GIB:.1f} less"]
        if self.slower is not None and abs(self.slower - 1) >= 0.01:
            notes.append(_change(self.slower))
        return f"{self.override}: {self.need_bytes / GIB:.1f} GiB ({', '.join(notes)})" + (
            "" if self.fits else ", still too much"
        )


def _change(slower: float) -> str:
    return f"{slower - 1:.0%} slower" if slower > 1 else f"{1 - slower:.0%} faster"


class DoesNotFitError(HardwareError):
    """Not even what was asked for, or one row, fits; carries what `make plan` shows."""

    def __init__(
        self,
        message: str,
        *,
        setup: Setup,
        micro_batch: int,
        parts: dict[str, int],
        capacity_bytes: int,
        remedies: tuple[Remedy, ...] = (),
        notes: tuple[str, ...] = (),
    ) -> None:
        hint = "; ".join(map(str, remedies[:5])) or "use a smaller model, or more memory"
        super().__init__(message, hint="; ".join([hint, *notes]))
        self.setup, self.micro_batch = setup, micro_batch
        self.parts, self.capacity_bytes, self.remedies, self.notes = parts, capacity_bytes, remedies, notes

    @property
    def over_bytes(self) -> int:
        """What is lacking."""
        return sum(self.parts.values()) - self.capacity_bytes

    def with_remedies(
        self, remedies: tuple[Remedy, ...] = (), *, notes: tuple[str, ...] = (), after: str = ""
    ) -> DoesNotFitError:
        """Returns the error with ways to need less and notes added, and `after` at the end of its message."""
        return DoesNotFitError(
            self.message + after, setup=self.setup, micro_batch=self.micro_batch, parts=self.parts, capacity_bytes=self.capacity_bytes,
            remedies=self.remedies + remedies, notes=self.notes + notes,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Questions about the memory of one configuration."""

    config: Config
    shape: ModelShape
    memory: Memory = rank_memory

    def parts(self, setup: Setup, micro_batch: int) -> dict[str, int]:
        """Returns the bytes of every part."""
        return self.memory(self.config, self.shape, setup, micro_batch)

    def need(self, setup: Setup, micro_batch: int) -> int:
        """Returns the bytes of all parts."""
        return sum(self.parts(setup, micro_batch).values())

    def largest(self, setup: Setup, capacity: int) -> int:
        """Returns the most rows that fit: exactly, by bisection, for memory that grows with them in any way."""

        def fits(rows: int) -> bool:
            return self.need(setup, rows) <= capacity

        if not fits(1):
            return 0
        # Memory is nearly linear: the answer is near where a line through one row and two arrives.
        low, step = 1, max(1, (capacity - self.need(setup, 1)) // max(1, self.need(setup, 2) - self.need(setup, 1)))
        while low < MOST_ROWS and fits(low + step):
            low += step
        high = min(low + step, MOST_ROWS + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def longest(self, setup: Setup, micro_batch: int, capacity: int, most: int) -> int:
        """Returns the tokens, at most `most`, of the longest rows of which `micro_batch` fit; 0 when none do."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.need(replace(setup, row_tokens=middle), micro_batch) <= capacity:
                low = middle
            else:
                high = middle - 1
        return low

    def require(self, setup: Setup, room: list[int], fitting: tuple[int, ...], names: list[str], *, early: bool) -> None:
        """Raises `DoesNotFitError` with the parts when what was asked for, or not even one row, fits.

        `early`, before the data are known, one row counts as the shortest there can be: its length is not known yet.
        """
        rank = min(range(len(room)), key=lambda i: fitting[i])
        wanted = wanted_rows(self.config, setup.world_size)
        if early:
            wanted, setup = 1, replace(setup, row_tokens=min(SHORTEST_ROW, setup.row_tokens))
            if self.largest(setup, room[rank]) >= 1:
                return
        if fitting[rank] >= wanted:
            return
        parts = self.parts(setup, wanted)
        listed = ", ".join(f"{n} {size / GIB:.1f}" for n, size in sorted(parts.items(), key=lambda p: -p[1]) if size > GIB / 20)
        rows = f"a micro-batch of {wanted} rows of" if wanted > 1 else "not even one row of"
        asked = _asked(self.config, setup.world_size) if wanted > 1 else ""
        raise DoesNotFitError(
            f"{rows} {setup.row_tokens} tokens {'does not fit' if wanted > 1 else 'fits'}{asked}: rank {rank} ({names[rank]}) needs "
            f"{sum(parts.values()) / GIB:.1f} GiB of {room[rank] / GIB:.1f} GiB ({listed} GiB)",
            setup=setup,
            micro_batch=wanted,
            parts=parts,
            capacity_bytes=room[rank],
        )


def wanted_rows(config: Config, world: int) -> int:
    """Returns the rows per rank that must fit: the micro-batch that was typed, or that a typed accumulation needs; else one."""
    train = config.train
    if train.batch_size != "auto":
        return train.batch_size
    if train.grad_accum == "auto" or train.packing == "on":  # what fits there are packs, not known yet
        return 1
    return math.ceil(global_rows(train, world) / (train.grad_accum * world))


def _asked(config: Config, world: int) -> str:
    """Returns why so many rows must fit, for an error: the arithmetic of a typed accumulation."""
    train = config.train
    if train.batch_size != "auto" or train.grad_accum == "auto":
        return ""
    rows = global_rows(train, world)
    return f" (`train.grad_accum` {train.grad_accum} needs it: {rows} global / ({train.grad_accum} x {count(world, 'rank')}))"
