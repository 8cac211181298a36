"""Reads the rows of one file by its ending, row by row and in bounded memory; only a `.json` list and a document are loaded completely."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import logging
import lzma
import re
import sys
import unicodedata
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

from sft_play.config.reader import kind_of, names_of
from sft_play.errors import DataError, first_line
from sft_play.model.tokenizer import in_time

Placed = tuple[str, Mapping[str, Any] | DataError]
"""A row and where it stands: `file:line`, or `file, row n`. A line that is no row is its error, so that later ones are read too."""

TEXTS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
TABLES = (*TEXTS, ".parquet", ".arrow")
SHOWN_CHARACTERS, SHOWN_COLUMNS = 60, 8
"""Of a row in a message."""
HEADER_BYTES = 1 << 16
QUOTES = "a value that holds the separator, a line end or a quote is quoted, and a quote in it is written twice"
OF_A_ROW = ("messages", "conversations", "prompt", "completion", "tools")
"""Lists of objects that one row has."""
MARKS = {"\t": "tabs", ",": "commas"}
ENDINGS = "json, jsonl, csv, tsv, parquet, arrow, txt, md, html, docx or pdf"


def read_file(path: Path, skip: Callable[[str, str], None] = lambda *_: None) -> Iterator[Placed]:
    """Yield the rows of one file. Raise `DataError`; tell `skip` the reason and the place of a document without text."""
    ending = kind(path)
    if ending not in TABLES and ending not in DOCUMENTS:
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
            yield from READERS[ending](path) if ending in TABLES else _read_document(path, skip)
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


def show_row(row: Mapping[str, Any]) -> str:
    """Return a row as JSON with long values cut, for messages."""
    values = {
        name: value if len(text := str(value)) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
        for name, value in islice(row.items(), SHOWN_COLUMNS)
    }
    return json.dumps(values, ensure_ascii=False, default=str)


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


def _read_document(path: Path, skip: Callable[[str, str], None]) -> Iterator[Placed]:
    with open_bytes(path) as stream:
        document = read_document(stream.read(), kind(path), str(path))
    if isinstance(document, str):
        skip(document, str(path))
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
    stream = open_bytes(path)
    if path.suffix.lower() not in COMPRESSED:
        return stream
    with stream:
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


def _open_zstd(path: Path) -> Any:
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")


COMPRESSED: Mapping[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zstd}
"""Ending of a compressed file, after the ending of what is in it (`rows.jsonl.gz`), and what opens it."""


def kind(path: Path) -> str:
    """Return the ending of a file in small letters, without that of its compression: `.jsonl` for `rows.JSONL.gz`."""
    ending = path.suffix.lower()
    return path.with_suffix("").suffix.lower() if ending in COMPRESSED else ending


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file for reading its uncompressed bytes from the first to the last. Raise `OSError`; reading may raise `DataError`."""
    opener = COMPRESSED.get(path.suffix.lower())
    return path.open("rb") if opener is None else io.BufferedReader(_Unpacked(path, opener(path)), 1 << 18)


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


# Documents (txt, md, rst, html, docx, pdf) to clean text, by a library for each kind.


SCANNED = "pictures without text: it must be read by OCR first"
EMPTY = "no text"
"""Why a document gives nothing to learn."""
OLE = b"\xd0\xcf\x11\xe0"
"""How Office files begin that are encrypted, or of the kind before 2007."""

_INVISIBLE = re.compile("[\u00ad\u200b\u2060\ufeff]")
"""Soft hyphen, zero-width space, word joiner, byte order mark. Joiners that scripts and emoji need stay."""
_SPACES = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")
_BLANK_LINES = re.compile(r"\n{3,}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """What a file holds."""

    text: str
    title: str | None = None
    """What html and docx name as their title."""
    pictures: bool = False
    """Whether it has some."""
    note: str | None = None
    """What was left out: `2 of 9 pages are pictures without text`."""


def read_document(content: bytes, ending: str, place: str) -> Document | str:
    """Return a file's content as clean text, or why it gives nothing to learn. Raise `DataError` where it cannot be read."""
    if not content.strip():
        return EMPTY
    found = DOCUMENTS[ending](content, place)
    text = clean(found.text)
    if not text:
        return SCANNED if found.pictures else EMPTY
    return replace(found, text=text, title=" ".join(clean(found.title or "").split()) or None)


def clean(text: str) -> str:
    """Return text in Unicode's composed form with plain spaces and line ends, without control characters.

    Indentation stays, since code and lists mean something by it; spaces at line ends and more than one blank line go.
    """
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", "\n").replace("\v", "\n"))
    text = _SPACES.sub(" ", _INVISIBLE.sub("", text)).replace("\u2028", "\n").replace("\u2029", "\n\n")
    if any(unicodedata.category(mark) == "Cc" for mark in set(text) - {"\n", "\t"}):
        text = "".join(mark for mark in text if mark in "\n\t" or unicodedata.category(mark) != "Cc")
    lines = "\n".join(line.rstrip() for line in text.split("\n"))
    return _BLANK_LINES.sub("\n\n", lines).strip("\n").rstrip()


def _plain(data: bytes, place: str) -> Document:
    refuse_wide(data[:4], place)
    try:
        return Document(text=data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start)
        return Document(text=utf8(data.split(b"\n")[number], f"{place}:{number + 1}"))  # raises, with the byte of the line


def _html(data: bytes, place: str) -> Document:
    """Return the main content of a page without navigation; all its text where no main content is found."""
    import trafilatura
    from lxml import html
    from lxml.etree import LxmlError

    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)  # it logs every page in which it finds nothing
    try:
        tree = html.document_fromstring(data)
    except (LxmlError, ValueError) as error:
        raise DataError(f"is not HTML: {first_line(error)}", place=place) from None
    found, pictures = tree.find(".//title"), tree.find(".//img") is not None
    title = found.text_content() if found is not None else None
    text = trafilatura.extract(data, include_comments=False, include_tables=True) or trafilatura.html2txt(data)
    if not text:  # too short for trafilatura to look at
        for hidden in tree.xpath("//head | //script | //style | //noscript | //template"):
            hidden.drop_tree()
        text = tree.text_content()
    return Document(text=text, title=title, pictures=pictures)


def _docx(data: bytes, place: str) -> Document:
    """Return paragraphs and tables in order; cells of a table's row are separated by ` | `."""
    import docx
    from docx.opc.exceptions import OpcError
    from lxml.etree import LxmlError

    if data.startswith(OLE):
        raise DataError("is encrypted, or of Word before 2007", place=place, hint="save it without a password, as docx")
    try:
        document = docx.Document(io.BytesIO(data))
        text = "\n".join(_block(block) for block in document.iter_inner_content())
        pictures = any("image" in rel.reltype for rel in document.part.rels.values())
        return Document(text=text, title=document.core_properties.title, pictures=pictures)
    except (OpcError, LxmlError, zipfile.BadZipFile, KeyError, ValueError, EOFError, OSError, AttributeError) as error:
        problem = f"is not a docx file that can be read: {first_line(error)}"
        raise DataError(problem, place=place, hint="open and save it again") from None


def _block(block: Any) -> str:
    """Return a paragraph's or a table's text, a blank line after it."""
    from docx.table import Table

    if not isinstance(block, Table):
        return f"{block.text}\n"
    lines = []
    for row in block.rows:
        cells, last = [], None
        for cell in row.cells:
            if cell._tc is last:  # a merged cell is listed once for each column it spans
                continue
            last = cell._tc
            cells.append(" ".join(part for item in cell.iter_inner_content() if (part := " ".join(_block(item).split()))))
        lines.append(" | ".join(cells))
    return "\n".join(lines) + "\n"


# The text of a PDF: pages joined, what repeats on every page left out, hyphens at line ends undone.


LEAST_SECONDS, SECONDS_PER_MIB = 60.0, 60.0
"""CPU time that a file's pages may take; a few KiB may name one page's commands a thousand times."""
REPEATED_PAGES = 3
"""From so many pages on, a first or last line that most of them share is a header or footer."""

_HYPHEN = re.compile(r"(?<![\w-])([^\W\d_]{2,})-\n[ \t]*([^\W\d_]+)")
_HYPHENATED = re.compile(r"(?<![\w-])[^\W\d_]+-[^\W\d_]+(?!\w)")
_SENTENCE_END = re.compile(r"[.!?:;\"'”’)\]]\s*$")


def _pdf(data: bytes, place: str) -> Document:
    import pypdf
    from pypdf.errors import DependencyError, FileNotDecryptedError, PyPdfError

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it repairs small faults, and says each
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):  # many are only protected against changes, with an empty password
            raise FileNotDecryptedError("a password is needed")
        seconds = LEAST_SECONDS + SECONDS_PER_MIB * len(data) / 2**20
        problem = f"is not read after {seconds:.0f} s of computing"
        with in_time(seconds, problem, place=place, hint="take it out of the data, or save its text"):
            pages = [(page.extract_text() or "").replace("\r\n", "\n").replace("\r", "\n") for page in reader.pages]
        pictures = sum(not text.strip() and len(page.images) > 0 for text, page in zip(pages, reader.pages, strict=True))
    except (FileNotDecryptedError, DependencyError) as error:
        raise DataError(f"is encrypted: {error}", place=place, hint="save it without a password (`qpdf --decrypt`)") from None
    # A damaged file meets pypdf's own errors or Python's, depending on where the damage is: 0 columns of a predictor, or 0 units of a
    # font, are divided by; a filter or a method of encryption that pypdf does not know is "not implemented".
    except (PyPdfError, ValueError, TypeError, KeyError, IndexError, AttributeError, OSError, RecursionError, AssertionError,
            ZeroDivisionError, NotImplementedError) as error:  # fmt: skip
        raise DataError(
            f"is not a PDF that can be read: {first_line(error)}", place=place, hint="fetch or save it again"
        ) from None
    note = f"{pictures} of {len(pages)} pages are pictures without text" if pictures else None
    return Document(text=join_pages(pages), pictures=pictures > 0, note=note)


def join_pages(pages: Sequence[str]) -> str:
    """Return the pages as one text: a paragraph that goes on over the page's end is not broken by a blank line."""
    text = ""
    for page in without_running_lines(pages):
        if text and page:
            text += "\n\n" if _SENTENCE_END.search(text) else "\n"
        text += page
    return without_hyphens(text)


def without_running_lines(pages: Sequence[str]) -> list[str]:
    """Leave out headers, footers and page numbers: first or last lines that more than half of the pages share, digits aside."""
    split = [page.strip().split("\n") for page in pages]
    for at in (0, -1) if len(pages) >= REPEATED_PAGES else ():
        shapes = [re.sub(r"\d+", "0", lines[at].strip()) if lines else "" for lines in split]
        counts = Counter(shapes)
        for lines, shape in zip(split, shapes, strict=True):
            if shape and counts[shape] > len(pages) / 2:
                del lines[at]
    return ["\n".join(lines).strip("\n") for lines in split]


def without_hyphens(text: str) -> str:
    """Join words that a line's end broke, careful with real hyphens.

    `docu-⏎ment` becomes `document`. Where the text writes the word with its hyphen elsewhere (`well-known`), or what follows begins
    with a capital (`Franco-⏎Prussian`), the hyphen stays and the word moves up.
    """
    written = set(_HYPHENATED.findall(text))

    def joined(match: re.Match[str]) -> str:
        before, after = match.groups()
        hyphenated = f"{before}-{after}"
        return hyphenated if after[0].isupper() or hyphenated in written else before + after

    return _HYPHEN.sub(joined, text)


# Files that are not UTF-8: which encoding they look like, and how they are converted.


CONVERT = "convert it: `iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW`, with the encoding it was written in"
BYTE_ORDER_MARKS = (
    (b"\xff\xfe\x00\x00", "UTF-32"), (b"\x00\x00\xfe\xff", "UTF-32"), (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"),
)  # fmt: skip
"""Byte order marks, the longer first."""


def refuse_wide(start: bytes, place: str) -> None:
    """Raise `DataError` for a text in UTF-16 or UTF-32, by its first four bytes; decoded as UTF-8 each line would be an error."""
    name = next((name for mark, name in BYTE_ORDER_MARKS if start.startswith(mark)), None)
    if name:
        raise DataError(
            f"is {name}, and not UTF-8 text", place=place, hint=f"convert it: `iconv -f {name} -t UTF-8 {place} > NEW`"
        )


def utf8(line: bytes, place: str) -> str:
    """Return the text of a line. Raise `DataError` with the first byte, from 1, that is not UTF-8."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"is not UTF-8 text: byte {error.start + 1} of the line", place=place, hint=CONVERT) from None


DOCUMENTS: Mapping[str, Callable[[bytes, str], Document]] = {
    **dict.fromkeys((".txt", ".text", ".md", ".markdown", ".rst"), _plain),
    **dict.fromkeys((".html", ".htm", ".xhtml"), _html), ".docx": _docx, ".pdf": _pdf,
}  # fmt: skip
"""Ending of a file that is one document -> what reads it."""
READERS: Mapping[str, Callable[[Path], Iterator[Placed]]] = {
    ".jsonl": _read_jsonl, ".ndjson": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".tsv": _read_csv,
    ".parquet": _read_parquet, ".arrow": _read_arrow,
}  # fmt: skip
"""Ending of a file of rows -> what reads it."""
