"""What is wrong with rows: raised together, or left out and said (`data.bad_rows: drop`)."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from sft_play.config.yaml_files import scalar_text
from sft_play.data.sources import SHOWN_FAULTS
from sft_play.errors import DataError, MissingColumn, raise_all
from sft_play.text import tell

BAD = "bad row"
"""With `data.bad_rows: drop`, why a row is left out, whatever is wrong with it."""


NAMES = re.compile(r"(?<=`)\w+(?=[`\[.])|(?<=\]\.)\w+(?=`)|(?<=: )\w+(?=[^{}`]*\})|(?<=json\()\w+(?=\))")
"""Names of columns and of a turn's keys in a message, and in the `columns` of a hint."""
ADVISED = re.compile(r"(?<=columns: \{)[^{}]*(?=\})")


def as_in_file(error: DataError, columns: Mapping[str, str]) -> DataError:
    """Return an error about a renamed row with the file's names of its columns, and with all `columns` in its hint."""
    if error.message.startswith("`columns`"):  # it could not be renamed
        return error
    texts, names = (error.message, error.hint or ""), {new.partition(".")[2]: old for new, old in columns.items()}
    names |= columns
    message, hint = (NAMES.sub(lambda name: names.get(name[0], name[0]), text) for text in texts)

    def with_others(advised: re.Match[str]) -> str:
        pairs = [pair.split(": ") for pair in advised[0].split(", ")]
        others = {new: old for new, old in columns.items() if all(new != on[0] and old not in on[1:] for on in pairs)}
        return ", ".join(filter(None, (scalar_text(others)[1:-1], advised[0])))

    if len({advised.partition(":")[0] for advised in ADVISED.findall(hint)}) == 1:  # no choice between formats
        hint = ADVISED.sub(with_others, hint)
    return type(error)(message, place=error.place, hint=hint or None)


class Faults:
    """What is wrong with rows: the first of each kind, numbers aside, with how many there are."""

    def __init__(self) -> None:
        self._alike: dict[str, tuple[DataError, int]] = {}
        self.rows = 0

    def add(self, error: DataError) -> None:
        """Count one row; of more than `SHOWN_FAULTS` kinds the first are kept, since a file may hold a million."""
        self.rows += 1
        kind = re.sub(r"\d+", "0", error.message)
        if kind in self._alike or len(self._alike) < SHOWN_FAULTS:
            first, rows = self._alike.get(kind, (error, 0))
            self._alike[kind] = first, rows + 1

    def errors(self) -> list[DataError]:
        """Return one error for each kind."""
        return [
            DataError(
                f"{error.message} ({rows:,} such rows; the first is here)" if rows > 1 else error.message,
                place=error.place,
                hint=error.hint,
            )
            for error, rows in self._alike.values()
        ]


class RowProblems:
    """Gathers bad rows: to raise them together, or with `drop` to say what was skipped (`data.bad_rows`)."""

    def __init__(self, file: Path, *, drop: bool = False) -> None:
        """`file`: gets a line for each row, `place: reason`; it is made with the first one."""
        self.file, self.drop = file, drop
        self._stream: IO[str] | None = None
        self._faults = Faults()
        self.good = Counter[int]()
        """By source: rows that nothing is wrong with, so far."""
        self._lacking = defaultdict[int, Faults](Faults)
        """By source: rows without a column that the configuration names."""
        self.ended: list[DataError] = []
        """What ended the reading of a source, which is never skipped."""

    @property
    def stops(self) -> bool:
        """Whether something was found that ends the preparation, so that nothing needs to be written."""
        return bool(self.ended) or (not self.drop and self._faults.rows > 0)

    def add(self, error: DataError, source: int) -> None:
        if self._stream is None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._stream = self.file.open("w", encoding="utf-8", errors="backslashreplace")
        self._stream.write(" ".join(f"{error.place}: {error.message}".split()) + "\n")
        self._faults.add(error)
        if isinstance(error, MissingColumn):
            self._lacking[source].add(error)

    def end(self) -> None:
        """Raise `DataError` for what cannot be skipped; say which rows were, and where all of them are named."""
        # A column that no row of a source has is a mistake in the configuration.
        wrong = [
            error for source, faults in self._lacking.items() if not self.good[source] for error in faults.errors()
        ]
        if self._stream is not None:
            self._stream.close()
            skips = "; left out" if self.drop else "; DATA_BAD_ROWS=drop skips them"
            what = skips if self.good.total() and not wrong else ""
            tell(f"bad rows: {self._faults.rows:,}, each with its reason in {self.file}{what}")
        errors = self._faults.errors()
        if wrong or not self.drop:
            raise_all([*(wrong if self.drop else errors), *self.ended])
        for error in errors:
            tell(f"left out: {error.place}: {error.message}")
        raise_all(self.ended)
