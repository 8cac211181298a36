"""Opens files as streams of bytes, compressed ones too, without unpacking them to the disk; and which encoding they have."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from sft_play.errors import DataError, first_line

LEAST_UNPACKED, MOST_EXPANSION = 64 * 2**20, 200
"""Bytes that any compressed file may unpack to, and the largest ratio beyond them. Text shrinks to a tenth, repeated rows to a fiftieth."""
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
"""Endings of compressed files, after the ending of what is in them: `rows.jsonl.gz`."""


def kind(path: Path) -> str:
    """Returns the ending of a file in small letters, without that of its compression: `.jsonl` for `rows.JSONL.gz`."""
    return plain_name(path).suffix.lower()


def plain_name(path: Path) -> Path:
    """Returns a path without the ending of its compression."""
    return path.with_suffix("") if is_compressed(path) else path


def is_compressed(path: Path) -> bool:
    """Whether a file is compressed, by its ending."""
    return path.suffix.lower() in COMPRESSED


def open_bytes(path: Path) -> IO[bytes]:
    """Opens a file for reading its uncompressed bytes from the first to the last. Raises `OSError`; reading may raise `DataError`."""
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
        """Raises `DataError` beyond `MOST_EXPANSION` times the compressed size."""
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
def seekable(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file that is read back and forth; a compressed one is unpacked into a temporary file first."""
    if not is_compressed(path):
        with path.open("rb") as stream:
            yield stream
        return
    with open_bytes(path) as packed, tempfile.TemporaryFile() as unpacked:
        shutil.copyfileobj(packed, unpacked, 1 << 20)
        unpacked.seek(0)
        yield unpacked


@contextmanager
def damage_told(path: Path) -> Iterator[None]:
    """Turns what the libraries raise for a file that cannot be opened or unpacked into `DataError`."""
    try:
        yield
    except EOFError:
        raise DataError("breaks off before the end of its compressed data", place=str(path), hint="copy the file again") from None
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"is not what its ending `{path.suffix}` says, or is damaged: {error}", place=str(path)) from None
    except OSError as error:
        if error.errno is None and is_compressed(path):
            said = first_line(error)
            if "truncated" in said.lower():
                raise DataError(
                    "breaks off before the end of its compressed data", place=str(path), hint="copy the file again"
                ) from None
            raise DataError(f"is not what its ending `{path.suffix}` says, or is damaged: {said}", place=str(path)) from None
        raise DataError(f"cannot be read: {error.strerror or error}", place=str(path)) from None


# Files that are not UTF-8: which encoding they look like, and how they are converted.


CONVERT = "convert it: `iconv -f WINDOWS-1252 -t UTF-8`, with the encoding it was written in"
BYTE_ORDER_MARKS = (
    (b"\xff\xfe\x00\x00", "UTF-32"), (b"\x00\x00\xfe\xff", "UTF-32"), (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"),
)  # fmt: skip
"""Byte order marks, the longer first."""


def refuse_wide(start: bytes, place: str) -> None:
    """Raises `DataError` for a text in UTF-16 or UTF-32, by its first four bytes; decoded as UTF-8 each line would be an error."""
    name = next((name for mark, name in BYTE_ORDER_MARKS if start.startswith(mark)), None)
    if name is None and len(start) >= 4:  # without a mark: every second byte of plain letters is 0
        zeros = [byte == 0 for byte in start[:4]]
        name = "UTF-16LE" if zeros == [False, True] * 2 else "UTF-16BE" if zeros == [True, False] * 2 else None
    if name:
        raise DataError(f"is {name}, and not UTF-8 text", place=place, hint=f"convert it: `iconv -f {name} -t UTF-8`")


def printable(text: str) -> str:
    """Returns `text` as a terminal can show it: control characters are escaped."""
    return "".join(mark if mark.isprintable() else repr(mark)[1:-1] for mark in text)
