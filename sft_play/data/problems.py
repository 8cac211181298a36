"""What is wrong with rows, gathered: up to five different problems are told together, each once with its number of rows."""

from __future__ import annotations

from collections import Counter

from sft_play.data.chunks import Refusal
from sft_play.errors import DataError, raise_all

SHOWN_PROBLEMS = 5


class RowProblems:
    """Gathers refused rows and raises them together."""

    def __init__(self) -> None:
        self._first: dict[tuple[bool, str], Refusal] = {}
        self._alike: Counter[tuple[bool, str]] = Counter()

    @property
    def unreadable(self) -> bool:
        """Whether a row was found that is wrong in itself: then encoding the rest is wasted time."""
        return any(reading for reading, _ in self._first)

    def add(self, refusal: Refusal) -> None:
        """Counts one row; of more than `SHOWN_PROBLEMS` different problems the first are kept, since a file may hold a million."""
        key = (refusal.reading, refusal.message)
        if key in self._first or sum(reading == refusal.reading for reading, _ in self._first) < SHOWN_PROBLEMS:
            self._first.setdefault(key, refusal)
            self._alike[key] += 1

    def add_error(self, error: DataError, place: str) -> None:
        """Counts what ended the reading of a source."""
        self.add(Refusal(place=error.place or place, message=error.message, hint=error.hint, reading=True))

    def raise_all(self) -> None:
        """Raises `DataError` when there is any; what is wrong with tokens only where every row could be read.

        So what is told does not depend on how many rows happened to be encoded before the first unreadable one was found.
        """
        unreadable = self.unreadable
        raise_all([self._counted(key) for key in self._first if key[0] == unreadable])

    def _counted(self, key: tuple[bool, str]) -> DataError:
        error, rows = self._first[key].error, self._alike[key]
        if rows == 1:
            return error
        return DataError(f"{error.message} ({rows:,} such rows; the first is here)", place=error.place, hint=error.hint)
