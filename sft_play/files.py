"""Writing files so that a reader never sees half of one, and hashing them. Standard library only."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

LONGEST_PATH, LONGEST_PART = 4_095, 255
"""Bytes of a path and of each of its parts, on Linux and macOS."""


def write_text(path: Path, text: str) -> None:
    """Writes `text` aside, syncs it to the disk and publishes it by rename; the old file survives any failure."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Like `write_text`, for bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.chmod(0o666 & ~current_umask())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:  # a failed write does not say where, and the name aside means nothing to anybody
        error.filename, error.filename2 = str(path), None
        raise


def remove_half_written(path: Path) -> None:
    """Removes what writers of `path` left beside it that were killed. Nobody may be writing it."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.????????"):
        left.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Publishes `value` as indented JSON with a final newline. Raises `ValueError` for NaN and infinity."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path, *, unique: bool = False) -> Any:
    """Returns the parsed JSON of `path`; `unique` refuses an object that has a key twice. Raises `OSError` or `ValueError`.

    Only plain files are read: a pipe or a device would never end.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"`{next(key for key in found if keys.count(key) > 1)}` stands there twice")
    return found


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the JSON objects of a file that has one on each line; what is none is left out.

    A crash or a full disk may cut the last line anywhere, inside a letter too. Empty where there is no file; raises other `OSError`s.
    """
    rows = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_bytes().decode("utf-8", errors="replace").split("\n"):
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                rows += [row] if isinstance(row, dict) else []
    return rows


def append_json_line(path: Path, value: Any) -> None:
    """Appends one JSON object as a line in a single write, so that concurrent writers do not mix, and syncs it to the disk.

    A line that was cut short before stays alone.

    Raises `OSError` on a full disk; what a part of the line has taken there is given back, so that the next line begins a line.
    """
    line = (json.dumps(value, ensure_ascii=False) + "\n").encode("utf-8")
    with path.open("ab+", buffering=0) as stream:
        size = stream.seek(0, os.SEEK_END)
        if size and os.pread(stream.fileno(), 1, size - 1) not in (b"\n", b""):
            line = b"\n" + line
        written = stream.write(line)
        if written < len(line):
            end = stream.tell()
            if os.fstat(stream.fileno()).st_size == end:  # nobody has written after it
                os.ftruncate(stream.fileno(), end - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(stream.fileno())
    if not size:
        sync_folder(path.parent)


def file_sha256(path: Path) -> str:
    """Returns the hexadecimal sha256 of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def text_sha256(text: str) -> str:
    """Returns the hexadecimal sha256 of a text's UTF-8 bytes."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def is_file_name(name: str) -> bool:
    """Whether a file system can hold a path of this name: no null character, no half of a surrogate pair, nothing too long."""
    try:
        written = os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return b"\0" not in written and len(written) <= LONGEST_PATH and all(len(p) <= LONGEST_PART for p in written.split(b"/"))


def typed_path(text: str) -> Path:
    """Returns the path that a user typed, `~` and `~name` replaced where there is such a user."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def current_umask() -> int:
    """Returns the process's umask (POSIX offers no way to read it without setting it)."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def sync_folder(path: Path) -> None:
    """Makes renames inside `path` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
