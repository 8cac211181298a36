"""Reads the rows of one file by its ending, row by row and in bounded memory; only a `.json` list and a document are loaded completely."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

from sft_play.config.reader import kind_of, names_of
from sft_play.data.documents import DOCUMENTS, read_document, refuse_wide, utf8
from sft_play.data.example import LeftOut, show_row
from sft_play.errors import DataError, first_line

Placed = tuple[str, Mapping[str, Any] | DataError]
"""A row and where it stands: `file:line`, or `file, row n`. A line that is no row is its error, so that later ones are read too."""

TEXTS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
TABLES = (*TEXTS, ".parquet", ".arrow")
HEADER_BYTES = 1 << 16
QUOTES = "a value that holds the separator, a line end or a quote is quoted, and a quote in it is written twice"
OF_A_ROW = ("messages", "conversations", "prompt", "completion", "tools")
"""Lists of objects that one row has."""
MARKS = {"\t": "tabs", ",": "commas"}
ENDINGS = "json, jsonl, csv, tsv, parquet, arrow, txt, md, html, docx or pdf"


def read_file(path: Path, left: LeftOut | None = None) -> Iterator[Placed]:
    """Yield the rows of one file. Raise `DataError`; add a document without text to `left`."""
    readers: dict[str, Callable[[Path], Iterator[Placed]]] = {
        ".jsonl": _read_jsonl, ".ndjson": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".tsv": _read_csv,
        ".parquet": _read_parquet, ".arrow": _read_arrow,
        **dict.fromkeys(DOCUMENTS, partial(_read_document, left=left if left is not None else LeftOut())),
    }  # fmt: skip
    ending = kind(path)
    reader = readers.get(ending)
    if reader is None:
        raise DataError(
            f"files ending in `{ending}` are not read" if ending else "a file whose name has no ending is not read", place=str(path),
            hint=f"plain text is `.txt`; all that is read: {', '.join((*TABLES, *DOCUMENTS))}; each may be compressed "
            f"({', '.join(COMPRESSED)})",
        )  # fmt: skip
    with report_damage(path):
        if ending in TEXTS:
            with open_bytes(path) as stream:
                refuse_wide(stream.read(4), str(path))
        try:
            yield from reader(path)
        except UnicodeDecodeError:  # a decoder that reads in pieces does not know the line
            if ending not in TEXTS:
                raise
            with open_bytes(path) as stream:
                for number, line in enumerate(stream, 1):
                    utf8(line, f"{path}:{number}")
            raise


def _read_jsonl(path: Path) -> Iterator[Placed]:
    with open_bytes(path) as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                text = utf8(line.rstrip(b"\r\n"), place).removeprefix("\ufeff" if number == 1 else "")
                yield _object(_parse(text, path, number), place)
            except DataError as error:
                yield place, error


def _read_json(path: Path) -> Iterator[Placed]:
    with open_bytes(path) as stream:
        lines = (line.removeprefix(b"\xef\xbb\xbf").strip() for line in stream)
        first, more = [*islice((line for line in lines if line), 2), b"", b""][:2]
    if not first:
        return
    if first[:1] + first[-1:] == b"{}" and (more or not _rows_in(_parse(utf8(first, str(path)), path, 1))):  # JSON lines
        yield from _read_jsonl(path)
        return
    with open_bytes(path) as stream:
        rows = _parse(stream.read().decode("utf-8-sig"), path, 1)
    name = "row"
    if isinstance(rows, dict) and len(lists := _rows_in(rows)) == 1:  # an export: its rows, beside what else is said of them
        name, rows = f"row of `{lists[0]}`", rows[lists[0]]
    if not isinstance(rows, list):
        said = f"; it has {names_of(rows)}" if isinstance(rows, dict) else ""
        raise DataError(f"is neither a list of rows, nor an object with one, nor one JSON object a line{said}", place=str(path))
    for index, row in enumerate(rows):
        yield _object(row, f"{path}, {name} {index + 1}")


def _rows_in(found: Any) -> list[str]:
    """Return the names of an object's lists of objects that are no turns."""
    lists = [name for name, value in found.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    return [name for name in lists if name not in OF_A_ROW]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object whose keys are all different. Raise `DataError`: of two values one would be lost."""
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"the key `{twice}` is there more than once", hint=f"only the last would be read: {show_row(made)}")
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
            hint=f"the line reads: {' '.join(text[:200].split())[:100]}",
        ) from None
    except (RecursionError, ValueError) as error:  # nested too deep, or a number of more digits than Python converts
        raise DataError(f"is not JSON that can be read: {str(error).split(';')[0]}", place=f"{path}:{line}") from None


def _object(row: Any, place: str) -> Placed:
    if not isinstance(row, dict):
        return place, DataError(f"the row is {kind_of(row)}; expected an object with named columns", place=place)
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
                if None in row or None in row.values():  # surplus values are a list under `None`; missing ones are `None`
                    have = len(row.pop(None, None) or []) + sum(value is not None for value in row.values())
                    place, by = f"{path}:{last}", MARKS.get(mark, f"`{mark}`")
                    problem = (
                        f"the row has another number of columns than the header: {have} and not {len(header)}, separated by {by}"
                    )
                    yield place, DataError(problem, place=place, hint=QUOTES)
                    continue
                text = "|".join(row.values())  # a quoted value may span lines; the row is looked for where it begins
                ends = text.count("\r") + text.count("\n") - text.count("\r\n")
                yield f"{path}:{last - ends}", row
        except csv.Error as error:
            if "unexpected end" in str(error):
                problem = "a quote is opened in the row that begins here, and never closed"
                raise DataError(problem, place=f"{path}:{last + 1}", hint=QUOTES) from None
            place = f"{path}:{reader.line_num + 1}"  # only lines that were read to their end are counted
            raise DataError(f"is not CSV: {error}", place=place, hint=QUOTES) from None


def _separator(path: Path) -> str:
    """Return what separates the columns: the first mark that gives the header several and the row after it as many, else a comma."""
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


def _read_document(path: Path, left: LeftOut) -> Iterator[Placed]:
    with open_bytes(path) as stream:
        document = read_document(stream.read(), kind(path), str(path))
    if isinstance(document, str):
        left.add(document, str(path))
    else:
        if document.note:
            print(f"note: {path}: {document.note}", file=sys.stderr, flush=True)
        yield str(path), {"text": document.text, "path": str(path), "title": document.title}


# Parquet and Arrow files.


BATCH_ROWS = 1024
"""Rows that are in memory at once."""
FILE_MARK = b"ARROW1"
"""How an Arrow file begins; a stream has no mark."""


def _read_parquet(path: Path) -> Iterator[Placed]:
    from pyarrow import parquet

    with _seekable(path) as stream:
        yield from _rows(parquet.ParquetFile(stream).iter_batches(batch_size=BATCH_ROWS), path)


def _read_arrow(path: Path) -> Iterator[Placed]:
    """Yield the rows of an Arrow file, or of an Arrow stream, as `datasets` keeps them."""
    from pyarrow import ipc

    with _seekable(path) as stream:
        mark = stream.read(len(FILE_MARK))
        stream.seek(0)
        if mark == FILE_MARK:
            file = ipc.open_file(stream)
            batches = (file.get_batch(index) for index in range(file.num_record_batches))
        else:
            batches = ipc.open_stream(stream) if mark else iter(())
        # In parts: writers may put a complete table into one batch.
        yield from _rows((b.slice(start, BATCH_ROWS) for b in batches for start in range(0, b.num_rows, BATCH_ROWS)), path)


def _seekable(path: Path) -> IO[bytes]:
    """Open a file that is read back and forth; a compressed one is unpacked in memory."""
    if not is_compressed(path):
        return path.open("rb")
    with open_bytes(path) as stream:
        return io.BytesIO(stream.read())


def _rows(batches: Iterator[Any], path: Path) -> Iterator[Placed]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield f"{path}, row {number}", {name: without_nulls(value) for name, value in row.items()}


def without_nulls(value: Any) -> Any:
    """Return nested mappings without their null entries: Arrow gives every mapping of a column the keys of all others."""
    if isinstance(value, dict):
        return {name: without_nulls(entry) for name, entry in value.items() if entry is not None}
    nested = isinstance(value, list) and value and isinstance(value[0], (dict, list))
    return [without_nulls(entry) for entry in value] if nested else value


# Files as streams of bytes, compressed ones too, without unpacking them to the disk.


LEAST_UNPACKED, MOST_EXPANSION = 64 * 2**20, 200
"""Bytes that any compressed file may unpack to, and the largest ratio beyond them. Text shrinks to a tenth, repeated rows to a fiftieth."""
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
"""Endings of compressed files, after the ending of what is in them: `rows.jsonl.gz`."""


def kind(path: Path) -> str:
    """Return the ending of a file in small letters, without that of its compression: `.jsonl` for `rows.JSONL.gz`."""
    return (path.with_suffix("") if is_compressed(path) else path).suffix.lower()


def is_compressed(path: Path) -> bool:
    """Whether a file is compressed, by its ending."""
    return path.suffix.lower() in COMPRESSED


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file for reading its uncompressed bytes from the first to the last. Raise `OSError`; reading may raise `DataError`."""
    openers = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zstd}
    opener = openers.get(path.suffix.lower())
    return path.open("rb") if opener is None else io.BufferedReader(_Unpacked(path, cast(Any, opener)(path)), 1 << 18)


def _open_zstd(path: Path) -> Any:
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")


class _Unpacked(io.RawIOBase):
    """What a compressed file holds, up to a size that rows and documents can have: a few bytes must not become all of the memory."""

    def __init__(self, path: Path, stream: IO[bytes]) -> None:
        self._path, self._stream = path, stream
        self._left = max(LEAST_UNPACKED, MOST_EXPANSION * path.stat().st_size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raise `DataError` beyond `MOST_EXPANSION` times the compressed size."""
        block = self._stream.read(len(buffer))
        self._left -= len(block)
        if self._left < 0:
            raise DataError(
                f"unpacks to more than {MOST_EXPANSION} times its size, as no text does", place=str(self._path),
                hint="unpack it yourself, if you trust it, and name the result",
            )  # fmt: skip
        buffer[: len(block)] = block
        return len(block)

    def close(self) -> None:
        self._stream.close()
        super().close()


@contextmanager
def report_damage(path: Path) -> Iterator[None]:
    """Turn what the libraries raise for a file that cannot be opened, unpacked or decoded into `DataError`."""
    try:
        yield
    except (EOFError, lzma.LZMAError, zlib.error, ValueError, OSError) as error:  # pyarrow's are `ValueError` and `OSError`
        if isinstance(error, OSError) and error.errno is not None:
            raise DataError(f"cannot be read: {error.strerror or error}", place=str(path)) from None
        raise DataError(
            f"is not what its ending `{''.join(path.suffixes[-2:])}` says, or is damaged: {first_line(error)}",
            place=str(path),
            hint="copy or save it again",
        ) from None
