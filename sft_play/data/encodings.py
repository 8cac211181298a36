"""Files that are not UTF-8: which encoding they look like, and how they are converted."""

from __future__ import annotations

from sft_play.errors import DataError

CONVERT = "convert it: `iconv -f WINDOWS-1252 -t UTF-8`, with the encoding it was written in"
MARKS = (
    (b"\xff\xfe\x00\x00", "UTF-32"), (b"\x00\x00\xfe\xff", "UTF-32"), (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"),
)  # fmt: skip
"""Byte order marks, the longer first."""


def refuse_wide(start: bytes, place: str) -> None:
    """Raises `DataError` for a text in UTF-16 or UTF-32, by its first four bytes; decoded as UTF-8 each line would be an error."""
    name = next((name for mark, name in MARKS if start.startswith(mark)), None)
    if name is None and len(start) >= 4:  # without a mark: every second byte of plain letters is 0
        zeros = [byte == 0 for byte in start[:4]]
        name = "UTF-16LE" if zeros == [False, True] * 2 else "UTF-16BE" if zeros == [True, False] * 2 else None
    if name:
        raise DataError(f"is {name}, and not UTF-8 text", place=place, hint=f"convert it: `iconv -f {name} -t UTF-8`")


def printable(text: str) -> str:
    """Returns `text` as a terminal can show it: control characters are escaped."""
    return "".join(mark if mark.isprintable() else repr(mark)[1:-1] for mark in text)
