"""Pieces of optimizer states: which range of which parameter's state stands where. Arithmetic only.

A parameter is counted element by element in row order, from 0 to its number of elements, whatever its shape. A piece holds the
elements `[start, end)` of one state of one parameter. Any world size can then take what it needs from pieces that another one wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from sft_play.errors import CheckpointError

Kind = Literal["slice", "whole", "rank"]
"""`slice`: elements of the parameter's range; `whole`: the same on every rank; `rank`: of this rank's layout only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Where one tensor of a state file belongs."""

    key: str
    """The tensor's name in its file."""
    parameter: str
    state: str
    """`exp_avg`, `step`, ...; `master` and `weight` are the parameter's own values."""
    kind: Kind
    start: int
    end: int
    shape: tuple[int, ...]
    """Of the whole parameter."""
    dtype: str
    file: str = ""
    """Name of the file that holds it."""

    def facts(self) -> dict[str, Any]:
        """Returns what the index of a file keeps."""
        return {name: value for name, value in asdict(self).items() if name != "file"}

    @staticmethod
    def read(facts: Mapping[str, Any], file: str) -> Piece:
        """The opposite of `facts`. Raises `CheckpointError` for what is no piece."""
        try:
            return Piece(**{**facts, "shape": tuple(facts["shape"]), "file": file})
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"the index of `{file}` is not one of ours: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """Elements `[begin, end)` of a piece's own tensor, and where they go, counted from the start of what is wanted."""

    piece: Piece
    begin: int
    end: int
    into: int


def reads(start: int, end: int, pieces: Iterable[Piece], what: str) -> list[Read]:
    """Returns how to fill the elements `[start, end)` from `pieces`, which may overlap.

    Raises `CheckpointError` where an element stands in no piece; `what` names the state for the message.
    """
    found: list[Read] = []
    position = start
    for piece in sorted(pieces, key=lambda one: (one.start, -one.end)):
        if piece.end <= position or piece.start >= end:
            continue
        if piece.start > position:
            break
        until = min(end, piece.end)
        found.append(Read(piece=piece, begin=position - piece.start, end=until - piece.start, into=position - start))
        position = until
    if position < end:
        raise CheckpointError(
            f"the checkpoint lacks elements {position} to {end} of {what}",
            hint="its files do not belong together; take an earlier one",
        )
    return found


def overlap(start: int, end: int, other_start: int, other_end: int) -> tuple[int, int] | None:
    """Returns the range that two ranges share, `None` where they share nothing."""
    first, last = max(start, other_start), min(end, other_end)
    return (first, last) if first < last else None


def flat_shares(sizes: Iterable[int], offsets: Iterable[int], start: int, end: int) -> list[tuple[int, int, int, int]]:
    """Returns the parts of parameters inside elements `[start, end)` of a buffer in which they lie one after the other.

    `sizes` and `offsets` count elements. Each part is (index of the parameter, first element, end, offset in the range); what is
    only padding belongs to none.
    """
    parts = []
    for index, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        shared = overlap(offset, offset + size, start, end)
        if shared is not None:
            parts.append((index, shared[0] - offset, shared[1] - offset, shared[0] - start))
    return parts


def partition(numel: int, rank: int, world: int) -> tuple[int, int, int]:
    """Returns (first element, end, size with padding) of a rank's share where each gets an equal part, rounded up (ZeRO-3)."""
    size = -(-numel // world)
    return min(rank * size, numel), min((rank + 1) * size, numel), size
