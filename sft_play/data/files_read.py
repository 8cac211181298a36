"""Reads the rows of one file by its ending, row by row and in bounded memory; only a `.json` list and a document are loaded whole."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from sft_play.config.types import kind_of, names_of
from sft_play.data.datasets import read_arrow, read_parquet
from sft_play.data.documents import DOCUMENTS, Skipped, read_document
from sft_play.data.example import LeftOut, shown
from sft_play.data.unpack import (
    COMPRESSED,
    CONVERT,
    damage_told,
    is_compressed,
    kind,
    open_bytes,
    plain_name,
    printable,
    refuse_wide,
)
from sft_play.errors import DataError

Placed = tuple[str, Mapping[str, Any] | DataError]
"""A row and where it stands: `file:line`, or `file, row n`. A line that is no row is its error, so that later ones are read too."""

TEXTS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
TABLES = (*TEXTS, ".parquet", ".arrow")
HEADER_BYTES = 1 << 16
QUOTES = "a value that holds the separator, a line end or a quote stands in quotes, and a quote in it is written twice"
OF_A_ROW = ("messages", "conversations", "prompt", "completion", "tools")
"""Lists of objects that one row has."""
MARKS = {"\t": "tabs", ",": "commas"}
ENDINGS = "json, jsonl, csv, tsv, parquet, arrow, txt, md, html, docx or pdf"


def read_file(path: Path, left: LeftOut | None = None) -> Iterator[Placed]:
    """Yields the rows of one file. Raises `DataError`; a document without text is added to `left`."""
    readers: dict[str, Callable[[Path], Iterator[Placed]]] = {
        ".jsonl": _read_jsonl, ".ndjson": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".tsv": _read_csv,
        ".parquet": read_parquet, ".arrow": read_arrow,
    }  # fmt: skip
    ending = kind(path)
    reader = readers.get(ending)
    if ending in DOCUMENTS:
        reader = _document_reader(left if left is not None else LeftOut())
    if reader is None:
        raise DataError(
            f"files ending in `{ending}` are not read" if ending else "a file whose name has no ending is not read", place=str(path),
            hint=f"plain text is `.txt`; all that is read: {', '.join((*TABLES, *DOCUMENTS))}; each may be compressed "
            f"({', '.join(COMPRESSED)})",
        )  # fmt: skip
    with damage_told(path):
        if ending in TEXTS:
            with open_bytes(path) as stream:
                refuse_wide(stream.read(4), str(path))
        try:
            yield from reader(path)
        except UnicodeDecodeError as error:
            line, byte = _undecodable(path)
            place = f"{path}:{line}" if line else str(path)
            raise DataError(f"is not UTF-8 text: byte {byte} of the line", place=place, hint=CONVERT) from error


def _undecodable(path: Path) -> tuple[int, int]:
    """Returns the line and byte, from 1, of the first byte that is not UTF-8; a decoder that reads in pieces tells neither."""
    with open_bytes(path) as stream:
        for number, line in enumerate(stream, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return number, error.start + 1
    return 0, 0


def _read_jsonl(path: Path) -> Iterator[Placed]:
    with open_bytes(path) as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                text = line.rstrip(b"\r\n").decode("utf-8-sig" if number == 1 else "utf-8")
                yield _object(_parse(text, path, number), place)
            except UnicodeDecodeError as error:
                yield place, DataError(f"is not UTF-8 text: byte {error.start + 1} of the line", place=place, hint=CONVERT)
            except DataError as error:
                yield place, error


def _read_json(path: Path) -> Iterator[Placed]:
    with open_bytes(path) as stream:
        lines = (line.removeprefix(b"\xef\xbb\xbf").strip() for line in stream)
        first, more = [*islice((line for line in lines if line), 2), b"", b""][:2]
    if not first:
        return
    if (
        first.startswith(b"{") and first.endswith(b"}") and (more or not _rows_in(_parse(first.decode("utf-8"), path, 1)))
    ):  # JSON lines
        yield from _read_jsonl(path)
        return
    with open_bytes(path) as stream:
        rows = _parse(stream.read().decode("utf-8-sig"), path, 1)
    name = "row"
    if isinstance(rows, dict):  # an export: its rows, beside what else is said of them
        lists = _rows_in(rows)
        if len(lists) != 1:
            found = f"lists in it are {names_of(dict.fromkeys(lists))}" if lists else "no list in it holds rows"
            raise DataError(f"is one JSON object over several lines; expected a list of rows: {found}", place=str(path))
        name = f"row of `{lists[0]}`"
        rows = rows[lists[0]]
    if not isinstance(rows, list):
        raise DataError("is neither a list of rows nor one JSON object a line", place=str(path))
    for index, row in enumerate(rows):
        place = f"{path}, {name} {index + 1}"
        try:
            yield _object(row, place)
        except DataError as error:
            yield place, error


def _rows_in(found: Any) -> list[str]:
    """Returns the names of an object's lists of objects that are no turns."""
    lists = [name for name, value in found.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    return [name for name in lists if name not in OF_A_ROW]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object whose keys are all different. Raises `DataError`: of two values one would be lost."""
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"the key `{twice}` is there more than once", hint=f"only the last would be read: {shown(made)}")
    return made


_DECODER = json.JSONDecoder(object_pairs_hook=_once)


def _parse(text: str, path: Path, line: int) -> Any:
    try:
        return _DECODER.decode(text)
    except DataError as error:  # a key that is there twice
        error.place = f"{path}:{line}" if "\n" not in text else str(path)
        raise
    except json.JSONDecodeError as error:
        raise DataError(
            f"is not JSON: {error.msg}",
            place=f"{path}:{line + error.lineno - 1}:{error.colno}",
            hint=f"the line reads: {printable(text.strip()[:100])}",
        ) from None
    except RecursionError:
        raise DataError("is not JSON that can be read: nested too deep", place=f"{path}:{line}") from None
    except ValueError as error:  # a number of more digits than Python converts
        raise DataError(f"is not JSON that can be read: {str(error).split(';')[0]}", place=f"{path}:{line}") from None


def _object(row: Any, place: str) -> Placed:
    if not isinstance(row, dict):
        raise DataError(f"the row is {kind_of(row)}; expected an object with named columns", place=place)
    return place, row


def _read_csv(path: Path) -> Iterator[Placed]:
    csv.field_size_limit(2**31 - 1)
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="") as stream:
        # Strict: else a quote that is never closed takes in all that follows.
        mark = _separator(path)
        reader = csv.DictReader(stream, strict=True, delimiter=mark)
        last = 0
        try:
            header = reader.fieldnames or []
            twice = sorted({name for name in header if header.count(name) > 1})
            if twice:
                raise DataError(f"the header names `{twice[0]}` more than once", place=f"{path}:{reader.line_num}")
            last = reader.line_num
            for row in reader:
                last = reader.line_num
                if None in row or None in row.values():
                    place, have = f"{path}:{last}", _values(row)
                    by = MARKS.get(mark, f"`{mark}`")
                    problem = (
                        f"the row has another number of columns than the header: {have} and not {len(header)}, separated by {by}"
                    )
                    yield place, DataError(problem, place=place, hint=QUOTES)
                    continue
                # A quoted value may span lines; the row is looked for where it begins.
                yield f"{path}:{last - sum(_line_ends(value) for value in row.values())}", row
        except csv.Error as error:
            if "unexpected end" in str(error):
                problem = "a quote is opened in the row that begins here, and never closed"
                raise DataError(problem, place=f"{path}:{last + 1}", hint=QUOTES) from None
            place = f"{path}:{reader.line_num + 1}"  # only lines that were read to their end are counted
            raise DataError(f"is not CSV: {error}", place=place, hint=QUOTES) from None


def _separator(path: Path) -> str:
    """Returns what separates the columns: the first mark that gives the header several and the row after it as many, else a comma."""
    if kind(path) == ".tsv":
        return "\t"
    with open_bytes(path) as stream:
        beginning = stream.read(HEADER_BYTES).decode("utf-8-sig", "replace")
    found = {}
    for mark in ",;\t|":
        rows = list(islice((row for row in csv.reader(io.StringIO(beginning, newline=""), delimiter=mark) if row), 2))
        found[mark] = [len(row) for row in rows]
    several = [mark for mark, columns in found.items() if columns and columns[0] > 1]
    return next((mark for mark in several if len(set(found[mark])) == 1), several[0] if several else ",")


def _values(row: Mapping[Any, Any]) -> int:
    """Returns how many values a row of a `DictReader` had: surplus ones are a list under `None`, missing ones are `None`."""
    return len(row.get(None) or []) + sum(value is not None for name, value in row.items() if name is not None)


def _line_ends(value: str) -> int:
    return value.count("\r") + value.count("\n") - value.count("\r\n")


def _document_reader(left: LeftOut) -> Callable[[Path], Iterator[Placed]]:
    def read(path: Path) -> Iterator[Placed]:
        data = None
        if is_compressed(path):
            with open_bytes(path) as stream:
                data = stream.read()
        try:
            document = read_document(plain_name(path), data)
        except DataError as error:
            if is_compressed(path) and error.place:
                error.place = error.place.replace(str(plain_name(path)), str(path), 1)
            raise
        if isinstance(document, Skipped):
            left.add(document.reason, str(path))
        else:
            if document.note:
                print(f"note: {path}: {document.note}", file=sys.stderr, flush=True)
            yield str(path), document.row()

    return read
