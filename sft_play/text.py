"""Text for people: tables. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def table(rows: Sequence[Sequence[str]], *, widest: int = 1_000) -> Iterator[str]:
    """Yields left-aligned lines; a cell longer than `widest` pushes the rest of its line to the right rather than being cut."""
    widths = [min(max(map(len, column)), widest) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
