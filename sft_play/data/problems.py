"""What is wrong with rows, gathered: up to five different problems are shown, each once with its number of rows; one file holds all."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import IO

from sft_play.data.processes import Refusal
from sft_play.errors import DataError, raise_all

SHOWN_PROBLEMS = 5


class RowProblems:
    """Gathers refused rows: to raise them together, or with `drop` to say what was left out (`data.bad_rows`)."""

    def __init__(self, file: Path, *, drop: bool = False) -> None:
        """`file`: gets a line for each row, `place: reason`; it is made with the first one."""
        self.file, self.drop = file, drop
        self._stream: IO[str] | None = None
        self._first: dict[tuple[bool, str], Refusal] = {}
        self._alike: Counter[tuple[bool, str]] = Counter()
        self._rows = 0
        self.good = 0
        """Rows that nothing is wrong with, so far."""
        self._ended: list[DataError] = []

    @property
    def unreadable(self) -> bool:
        """Whether something was found that ends the preparation without a look at tokens: then encoding the rest is wasted time."""
        return bool(self._ended) or (not self.drop and any(reading for reading, _ in self._first))

    def add(self, refusal: Refusal) -> None:
        """Counts one row; of more than `SHOWN_PROBLEMS` different problems the first are kept, since a file may hold a million."""
        if self._stream is None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._stream = self.file.open("w", encoding="utf-8", errors="backslashreplace")
        self._stream.write(" ".join(f"{refusal.place}: {refusal.message}".split()) + "\n")
        self._rows += 1
        key = (refusal.reading, refusal.message)
        if key in self._first or sum(reading == refusal.reading for reading, _ in self._first) < SHOWN_PROBLEMS:
            self._first.setdefault(key, refusal)
            self._alike[key] += 1

    def add_error(self, error: DataError, place: str) -> None:
        """Keeps what ended the reading of a source, which is never left out."""
        self._ended.append(DataError(error.message, place=error.place or place, hint=error.hint))

    def end(self) -> None:
        """Raises `DataError` for what cannot be left out; says which rows were, and where all of them are named.

        What is wrong with tokens is raised only where every row could be read, so that what is told does not depend on how many rows
        happened to be encoded before the first unreadable one was found.
        """
        if self._stream is not None:
            self._stream.close()
            what = "; left out" if self.drop else "; DATA_BAD_ROWS=drop leaves them out" if self.good else ""
            print(f"bad rows: {self._rows:,}, each with its reason in {self.file}{what}", file=sys.stderr, flush=True)
        if self.drop:
            for error in map(self._counted, self._first):
                print(f"left out: {error.place}: {error.message}", file=sys.stderr, flush=True)
            raise_all(self._ended)
            return
        unreadable = self.unreadable
        raise_all([*(self._counted(key) for key in self._first if key[0] == unreadable), *self._ended])

    def _counted(self, key: tuple[bool, str]) -> DataError:
        error, rows = self._first[key].error, self._alike[key]
        if rows == 1:
            return error
        return DataError(f"{error.message} ({rows:,} such rows; the first is here)", place=error.place, hint=error.hint)
