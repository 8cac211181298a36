"""Which rows of a source are taken (`columns`, `filter`, `rows`), on which side of a split they fall, and which are copies."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sft_play.config.filters import Condition
from sft_play.config.schema import DataSource
from sft_play.config.types import names_of
from sft_play.data.example import LeftOut
from sft_play.data.files_read import Placed
from sft_play.errors import DataError
from sft_play.files import text_sha256

FILTERED = "not in the filter"
NOT_CHOSEN = "not chosen by `rows`"


def select(rows: Iterator[Placed], source: DataSource, *, seed: int, left: LeftOut) -> Iterator[Placed]:
    """Yields the rows that the source takes, in their order, with its columns renamed; counts the others in `left`.

    Raises `DataError` for a condition that cannot be read; what cannot be applied to a row is that row's error.
    """
    if source.columns or source.filter is not None:
        rows = _fitting(rows, source, left)
    if source.rows is None:
        yield from rows
    elif source.streaming:
        yield from _first(rows, source.rows, left)
    else:
        yield from _chosen(rows, source.rows, seed, left)


def _fitting(rows: Iterator[Placed], source: DataSource, left: LeftOut) -> Iterator[Placed]:
    condition = Condition(source.filter) if source.filter is not None else None
    read = kept = 0
    for place, row in rows:
        read += 1
        if isinstance(row, DataError):
            kept += 1
            yield place, row
            continue
        try:
            renamed = rename(row, source.columns) if source.columns else row
            # Both names work, so that a filter may be written with the file open or with the formats in mind.
            keep = condition is None or condition({**row, **renamed} if source.columns else row)
        except DataError as error:
            error.place = error.place or place
            kept += 1
            yield place, error
            continue
        if keep:
            kept += 1
            yield place, renamed
        else:
            left.add(FILTERED, place)
    if read and not kept:
        raise DataError(f"`filter: {source.filter}` keeps none of the {read:,} rows", place=source.path)


def rename(row: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    """Returns a row under new names: `columns` is new name -> the file's. Raises `DataError` for a column that is not there.

    Names with a dot are those within the turns: `messages.role: from`, and of their values, `messages.role.user: customer|visitor`.
    """
    of_turns = {*row, *columns}
    within = {new: old for new, old in columns.items() if "." in new and new.partition(".")[0] in of_turns}
    columns = {new: old for new, old in columns.items() if new not in within}
    row = {**row, **_inside(row, columns.values())}
    missing = sorted({name for name in columns.values() if name not in row})
    if missing:
        raise DataError(
            f"`columns` names {', '.join(f'`{name}`' for name in missing)}, which the row lacks; its columns are {names_of(row)}",
            hint=f"the other way round: `columns: {{{', '.join(f'{new}: {old}' for old, new in columns.items())}}}`"
            if all(name in row for name in columns)
            else "`columns` is written `{question: name in the file}`",
        )
    used = set(columns.values())
    kept = {name: value for name, value in row.items() if name not in used}
    made = kept | {new: row[name] for new, name in columns.items()}
    for column in {new.partition(".")[0] for new in within}:
        if isinstance(turns := made.get(column), list):
            names = {new.removeprefix(f"{column}."): old for new, old in within.items() if new.startswith(f"{column}.")}
            made[column] = [_turn(turn, names) if isinstance(turn, Mapping) else turn for turn in turns]
    return made


def _inside(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Returns name -> value of those names that lead into a column: `conversation.messages`."""
    found = {}
    for name in names:
        head, dot, rest = name.partition(".")
        if dot and name not in row and isinstance(row.get(head), Mapping) and rest in row[head]:
            found[name] = row[head][rest]
    return found


def _turn(turn: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Returns a turn under new names, `role` -> the file's, and with new values, `role.user` -> the file's, `|` between several."""
    keys = {old: new for new, old in names.items() if "." not in new}
    made = {keys.get(key, key): value for key, value in turn.items() if key in keys or key not in keys.values()}
    for new, old in names.items():
        key, dot, value = new.partition(".")
        if dot and made.get(key) in old.split("|"):
            made[key] = value
    return made


def _first(rows: Iterator[Placed], count: int, left: LeftOut) -> Iterator[Placed]:
    number = 0
    for number, placed in enumerate(rows, 1):
        yield placed
        if number == count:
            return
    left.there = number


def _chosen(rows: Iterator[Placed], count: int, seed: int, left: LeftOut) -> Iterator[Placed]:
    """Yields `count` rows: those with the smallest of as many random numbers as there are rows, one for each in order.

    A row's number depends on the seed and its position alone, so a larger `count` takes the same rows and more. Only the chosen rows
    are in memory. A row that cannot be read is yielded at once, as its error.
    """
    draw = random.Random(seed).random
    heap: list[tuple[float, int, Placed]] = []  # the largest number first, as its negative; no two share an index
    for index, placed in enumerate(rows):
        number = draw()
        if isinstance(placed[1], DataError):
            yield placed
        elif len(heap) < count:
            heapq.heappush(heap, (-number, index, placed))
        else:
            out = heapq.heappushpop(heap, (-number, index, placed))
            left.add(NOT_CHOSEN, out[2][0])
    if len(heap) < count:
        left.there = len(heap)
    for _, _, placed in sorted(heap, key=lambda entry: entry[1]):
        yield placed


# Which side of a split a row falls on, which rows are copies, and what training and validation share. Standard library only.


KEY_BYTES = 16
"""Of a row's content hash, what is kept to find copies: a chance meeting among 10 million rows has a probability of 1e-25."""
POSITION_DIGITS = 12
"""Hexadecimal digits of a hash that tell a row's place between 0 and 1."""


def position(value: str) -> float:
    """Returns where `value` lies in [0, 1): always the same for the same text, and evenly spread over texts."""
    return int(text_sha256(value)[:POSITION_DIGITS], 16) / 16**POSITION_DIGITS


def is_held_out(key: str, group: str | None, fraction: float) -> bool:
    """Whether a row belongs to validation: decided by its group where it has one, else by its content, and by nothing else.

    So a row keeps its side when rows are added, removed or moved, and a larger `fraction` only adds rows to validation. `key` is
    `Example.key`; `group` is the value of `data.group_by`; `fraction` is in [0, 1).
    """
    return position(f"row {key}" if group is None else f"group {group}") < fraction


class Seen:
    """The contents met so far in one split: about 100 bytes of memory a row."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def is_copy(self, key: bytes) -> bool:
        """Whether `key` was met before; from now on it was."""
        before = len(self._keys)
        self._keys.add(key)
        return len(self._keys) == before

    def __contains__(self, key: object) -> bool:
        return key in self._keys


def keys_in(content: bytes) -> Iterator[bytes]:
    """Yields the keys that stand one after another in a prepared split's `keys.bin`."""
    for start in range(0, len(content), KEY_BYTES):
        yield content[start : start + KEY_BYTES]


def overlap(train: bytes, validation: bytes) -> int:
    """Returns how many rows of validation have a content that training has too. Both are contents of `keys.bin`."""
    known = set(keys_in(train))
    return sum(key in known for key in keys_in(validation))
