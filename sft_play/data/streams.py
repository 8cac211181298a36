"""Files as streams of bytes, compressed ones too, without unpacking them to the disk; and what is no UTF-8 text."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from sft_play.config.data_rules import hint_absent
from sft_play.errors import DataError, first_line
from sft_play.text import as_typed

LEAST_UNPACKED, MOST_EXPANSION = 64 * 2**20, 200
"""Bytes that any compressed file may unpack to, and the largest ratio beyond them. Text shrinks to a tenth, repeated
rows to a fiftieth.
"""


def _open_zstd(path: Path) -> Any:
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")


COMPRESSED: Mapping[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstd,
}
"""Ending of a compressed file, after the ending of what is in it (`rows.jsonl.gz`), and what opens it."""


def kind(path: Path) -> str:
    """Return the ending of a file in small letters, without that of its compression: `.jsonl` for `rows.JSONL.gz`."""
    ending = path.suffix.lower()
    return path.with_suffix("").suffix.lower() if ending in COMPRESSED else ending


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file for reading its uncompressed bytes from the first to the last. Raise `OSError`; reading may raise
    `DataError`.
    """
    opener = COMPRESSED.get(path.suffix.lower())
    return path.open("rb") if opener is None else io.BufferedReader(_Unpacked(path, opener(path)), 1 << 18)


class _Unpacked(io.RawIOBase):
    """What a compressed file contains, up to a size that rows and documents can have: a few bytes must not fill the
    memory.
    """

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
                f"unpacks to more than {MOST_EXPANSION} times its size, as no text does",
                place=str(self._path),
                hint="unpack it yourself, if you trust it, and name the result",
            )
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
    except (
        EOFError,
        lzma.LZMAError,
        zlib.error,
        ValueError,
        OSError,
    ) as error:  # pyarrow's are `ValueError` and `OSError`
        if isinstance(error, OSError) and error.errno is not None:
            hint = hint_absent(str(path)) if isinstance(error, FileNotFoundError) else None
            raise DataError(f"cannot be read: {error.strerror or error}", place=str(path), hint=hint) from None
        raise DataError(
            f"is not what its ending `{''.join(path.suffixes[-2:])}` says, or is damaged: {first_line(error)}",
            place=str(path),
            hint="copy or save it again",
        ) from None


# Files that are not UTF-8: which encoding they look like, and how they are converted.


HTML = (".html", ".htm", ".xhtml")
OTHER_KINDS = (
    (rb"version https://git-lfs", "only says where Git LFS keeps the file", "`git lfs pull` brings it", ()),
    (rb"\x1f\x8b", "is compressed by gzip", "give it the ending `.gz`", ()),
    (rb"PK\x03\x04", "is a zip archive", "unpack it, or save it as text", (".docx",)),
    (rb"PAR1", "is Parquet", "give it the ending `.parquet`", (".parquet", ".pq")),
    (rb"\x28\xb5\x2f\xfd", "is compressed by zstd", "give it the ending `.zst`", ()),
    (rb"BZh", "is compressed by bzip2", "give it the ending `.bz2`", ()),
    (rb"\xfd7zXZ", "is compressed by xz", "give it the ending `.xz`", ()),
    (rb"\xd0\xcf\x11\xe0", "is a file of Microsoft Office", "save it as CSV in UTF-8, or as text", (".docx",)),
    (rb"SQLite format 3", "is a database of SQLite", "`sqlite3 -json OLD 'select ...' > NEW.json` writes rows", ()),
    (rb"\s*\{\\rtf", "is RTF", "save it as plain text or docx", ()),
    (rb"%PDF-", "is a PDF", "give it the ending `.pdf`", (".pdf",)),
    (rb"%!PS", "is PostScript", "`ps2pdf` makes a PDF of it", ()),
    (
        rb"\s*<(?:!doctype html|html)",
        "is HTML, in place of data most likely a page with an error or a login",
        "open it in a browser and load the file again, or give it the ending `.html`",
        HTML,
    ),
    (rb"\s*<\?xml", "is XML", "it may be a message of a server: load the file again", (*HTML, ".txt", ".md", ".rst")),
)
"""How files begin whose ending says otherwise, what they are, what to do, and the endings that are right."""


def refuse_other_kind(start: bytes, ending: str, place: str) -> None:
    """Raise `DataError` for a file that is not what its ending says, by its first bytes."""
    for mark, problem, hint, endings in OTHER_KINDS:
        if ending not in endings and re.match(mark, start, re.IGNORECASE):
            raise DataError(problem, place=place, hint=hint)


CONTROLS = bytes({*range(32)} - {*b"\t\n\v\f\r\x1b"})
LEAST_TEXT = 0.9
"""Share of a text's bytes that are no control characters."""


def refuse_other_text(data: bytes, place: str) -> None:
    """Raise `DataError` for a plain text that is of another kind, whose marks would be learnt."""
    if b"\x1b$B" in data or b"\x1b$@" in data:
        raise DataError("is ISO-2022-JP, and not UTF-8 text", place=place, hint="`iconv -f ISO-2022-JP` reads it")
    printed = data.translate(None, CONTROLS)
    if printed.strip() and len(printed) < LEAST_TEXT * len(data):
        raise DataError(
            "has so many control characters that it is no UTF-8 text",
            place=place,
            hint="text in UTF-16 can be converted: `iconv -f UTF-16LE -t UTF-8 OLD > NEW`",
        )
    lines = data.strip().split(b"\n", 1)
    for text in (lines[0], data) if lines[0][:1] in (b"{", b"[") else ():
        try:
            rows = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if rows and all(isinstance(row, dict) for row in (rows if isinstance(rows, list) else [rows])):
            raise DataError("contains rows as JSON", place=place, hint="give it the ending `.jsonl`, or `.json`")


def refuse_wide(start: bytes, place: str) -> None:
    """Raise `DataError` for a text in UTF-16 or UTF-32, by its first four bytes; decoded as UTF-8 each line would be an
    error.
    """
    name = json.detect_encoding(start).upper()
    if not name.startswith("UTF-8"):
        name = re.sub("-([BL]E)", r"\1", name)  # as `iconv` writes it
        raise DataError(
            f"is {name}, and not UTF-8 text", place=place, hint=f"convert it: `iconv -f {name} -t UTF-8 {place} > NEW`"
        )


def to_utf8(path: str, text: bytes = b"") -> str:
    """Return how a file is converted that is most likely in the encoding of Excel in Western Europe, unless a `text` of
    it cannot be.
    """
    old, new = as_typed(path), as_typed(f"{path}.new")  # which a folder does not yield
    try:
        text.decode("cp1252")
    except UnicodeDecodeError:
        way = f"iconv -c -f UTF-8 -t UTF-8 {old} > {new}; mv {new} {old}"
        return f"it seems to be damaged there; `{way}` deletes such bytes"
    way = f"iconv -f WINDOWS-1252 -t UTF-8 {old} > {new} && mv {new} {old}"
    return f"convert it: `{way}`, with the encoding it was written in"


def utf8(line: bytes, place: str) -> str:
    """Return the text of a line. Raise `DataError` with the first byte, from 1, that is not UTF-8."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"is not UTF-8 text: byte {error.start + 1} of the line",
            place=place,
            hint=to_utf8(place.rpartition(":")[0] or place, line),
        ) from None
