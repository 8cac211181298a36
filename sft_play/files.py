"""Files: atomic writes, hashes and locks, and disks that are full or gone. Standard library only."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import math
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from sft_play.errors import HardwareError, causes

LONGEST_PATH, LONGEST_PART = 4_095, 255
"""Most bytes of a path and of each of its parts, on Linux and macOS."""


def write_text(path: Path, text: str) -> None:
    """Write `text` to a temporary file, sync it and rename it; the old file survives any failure."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write bytes like `write_text`. Raise `OSError` for a pipe or a device, which the file would replace."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, NOT_PLAIN, str(path))
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
    except OSError as error:  # the error has no path, or the temporary file's
        error.filename, error.filename2 = str(path), None
        raise


UNFOLLOWED = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags for files of a run, which follow no link and wait for no pipe."""
NOT_PLAIN = "it is not a plain file"
DEEPEST = 100
LARGEST_JSON_BYTES, LARGEST_LINES_BYTES, LONGEST_LINE_BYTES = 256 * 2**20, 4 * 2**30, 16 * 2**20
TOO_DEEP = "it is nested too deeply"


def open_plain(path: Path, *, follow: bool = False) -> BinaryIO:
    """Open a regular file for reading. Raise `OSError` for a pipe or a device, which would never end, and for a link.

    `follow` accepts links, as the hub's cache has them; in a run they could lead to any file of this user.
    """
    return open(_checked(path, os.O_RDONLY | UNFOLLOWED & ~(os.O_NOFOLLOW if follow else 0)), "rb")


def tail(path: Path, limit: int = 200_000, *, since: int = 0) -> str:
    """Return at most the last `limit` bytes of a file, from `since` on; empty without a file."""
    if not path.is_file():
        return ""
    with open_plain(path) as stream:
        stream.seek(0, os.SEEK_END)
        stream.seek(max(since, stream.tell() - limit))
        return stream.read().decode("utf-8", errors="replace")


def open_own(path: Path, *, empty: bool = False) -> FileIO:
    """Open or create a file of ours for appending, or with `empty` truncated.

    Raise `OSError` for a link, even if it was created after the check of the run, for a hard link, a pipe and a device.
    """
    descriptor = _checked(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | UNFOLLOWED, alone=True)
    if empty:
        os.ftruncate(descriptor, 0)
    return FileIO(descriptor, "ab+")


def _checked(path: Path, flags: int, *, alone: bool = False) -> int:
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.EINVAL, "it is a link", str(path)) from None
    status = os.fstat(descriptor)
    reason = "it is a hard link" if status.st_nlink > 1 and alone else ""
    if not stat.S_ISREG(status.st_mode):
        reason = NOT_PLAIN
    if reason:
        os.close(descriptor)
        raise OSError(errno.EINVAL, reason, str(path))
    return descriptor


def remove_half_written(path: Path) -> None:
    """Remove the temporary files of killed writers of `path`, which no process may be writing."""
    for partial in path.parent.glob(f".{glob.escape(path.name)}.????????"):
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Publish `value` as indented JSON with a final newline. Raise `ValueError` for NaN and infinity."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path, *, follow: bool = True) -> Any:
    """Return the parsed JSON of `path`. Raise `OSError` or `ValueError`. `follow`: see `open_plain`."""
    with open_plain(path, follow=follow) as stream:
        if os.fstat(stream.fileno()).st_size > LARGEST_JSON_BYTES:
            raise ValueError(f"it has more than {LARGEST_JSON_BYTES // 2**20} MiB")
        text = stream.read().decode("utf-8")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    if is_deep(value):
        raise ValueError(TOO_DEEP)
    return value


def read_object(path: Path, *, follow: bool = False) -> dict[str, Any]:
    """Return the JSON object of `path`, or an empty one if the file is incomplete, missing, a link or something
    else.
    """
    with contextlib.suppress(OSError, ValueError):
        content = read_json(path, follow=follow)
        return content if isinstance(content, dict) else {}
    return {}


def is_deep(value: Any) -> bool:
    """Return whether parsed JSON is nested so deep that recursion over it would overflow the stack."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for container in level
            if isinstance(container, (dict, list))
            for inner in (container.values() if isinstance(container, dict) else container)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def finite(value: Any) -> Any:
    """Return `value` with NaN and infinity, which JSON lacks, replaced by `None` at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file with one per line, skipping other lines.

    A crash or a full disk may cut the last line anywhere, even inside a letter. Empty without a file; other `OSError`s
    are raised.
    """
    rows: list[dict[str, Any]] = []
    with contextlib.suppress(FileNotFoundError), open_plain(path) as stream:
        while line := stream.readline(LONGEST_LINE_BYTES):
            rows += json_rows([line])
            if stream.tell() > LARGEST_LINES_BYTES:
                raise OSError(errno.EFBIG, f"it has more than {LARGEST_LINES_BYTES // 2**30} GiB", str(path))
    return rows


def json_rows(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return the JSON objects among lines, skipping other lines and objects that are nested too deeply."""
    rows: list[dict[str, Any]] = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line.decode("utf-8", errors="replace"))
            rows += [row] if isinstance(row, dict) and not is_deep(row) else []
    return rows


def append_json_line(path: Path, value: Any) -> None:
    """Append one JSON object as a line with `append_text`, and sync it to the disk."""
    append_text(path, json.dumps(value, ensure_ascii=False) + "\n", sync=True)


def append_text(path: Path, text: str, *, sync: bool) -> None:
    """Append complete lines in one write, so that concurrent writers do not mix. An earlier incomplete line is
    terminated first. Raise `OSError` on a full disk, after removing a partial write, so that the next line begins a
    line.
    """
    line = text.encode("utf-8")
    with open_own(path) as stream:
        size = stream.seek(0, os.SEEK_END)
        if size and os.pread(stream.fileno(), 1, size - 1) not in (b"\n", b""):
            line = b"\n" + line
        written = stream.write(line)
        if written < len(line):
            end = stream.tell()
            if os.fstat(stream.fileno()).st_size == end:  # no other process has written since
                os.ftruncate(stream.fileno(), end - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if sync:
            os.fsync(stream.fileno())
    if sync and not size:
        sync_path(path.parent)


def file_sha256(path: Path) -> str:
    """Return the hexadecimal sha256 of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def text_sha256(text: str) -> str:
    """Return the hexadecimal sha256 of a text's UTF-8 bytes."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def is_file_name(name: str) -> bool:
    """Return whether a file system can contain a path of this name: no null character, no lone surrogate, nothing too
    long.
    """
    try:
        written = os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return (
        b"\0" not in written
        and len(written) <= LONGEST_PATH
        and all(len(p) <= LONGEST_PART for p in written.split(b"/"))
    )


def typed_path(text: str) -> Path:
    """Return the path that a user typed, with `~` and `~name` replaced if that user exists."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def current_umask() -> int:
    """Return the process's umask (POSIX offers no way to read it without setting it)."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def lock(path: Path, *, shared: bool = False) -> int | None:
    """Lock a file until the returned descriptor is closed or this process ends; a missing file is created, unless
    `shared`.

    Return `None` while another process holds it. Raise `OSError` for a file that cannot be opened, or a disk without
    locks.
    """
    descriptor = os.open(path, (os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT) | UNFOLLOWED, 0o666)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return None
        raise
    return descriptor


def sync_path(path: Path) -> None:
    """Sync a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Disks that are full, read-only or gone.


FULL_BYTES = 2**20
"""A disk with less free space is full, which explains a failed write, or a rank without a record."""
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
UNWRITABLE = frozenset(
    {
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.EIO,
        errno.ESTALE,
        errno.ENXIO,
        errno.ENODEV,
        errno.EFBIG,
        errno.ENOTDIR,
    }
)
RUST = re.compile(r"os error (\d+)\b")
"""Format of a system error in safetensors' messages."""
_unwritten: set[str] = set()
"""Files that `side_file` has warned about."""


def free_bytes(folder: Path) -> int:
    """Return the bytes that this user may still write on the file system of `folder`; 0 if no more files can be
    created.
    """
    status = os.statvfs(folder)
    if status.f_files and not status.f_favail:
        return 0
    return status.f_bavail * status.f_frsize


def is_full(folder: Path) -> bool:
    """Return whether the disk of `folder` has less than `FULL_BYTES` left; false for a missing folder."""
    try:
        return shutil.disk_usage(folder).free < FULL_BYTES
    except OSError:
        return False


def is_read_only(folder: Path) -> bool:
    """Return whether the file system of `folder` is read-only; false for a missing folder."""
    try:
        return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def is_gone(folder: Path) -> bool:
    """Return whether a folder is missing; false if its disk does not answer."""
    try:
        folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def errno_of(error: BaseException) -> int | None:
    """Return the system's error number of a failed write, even if a library wrapped it; `None` for other errors."""
    for link in causes(error):
        if isinstance(link, OSError) and link.errno is not None:
            return link.errno
        if match := RUST.search(str(link)):
            return int(match.group(1))
    return None


def disk_problem(error: BaseException) -> str:
    """Describe a failed write to the user."""
    number = errno_of(error)
    if number in NO_ROOM:
        return "no space is left on the disk" if number == errno.ENOSPC else "the disk quota is used up"
    if number == errno.EROFS:
        return "the run folder is read-only now"
    if number in UNWRITABLE and number is not None:
        return f"the run folder cannot be written: {os.strerror(number)}"
    return str(error) or type(error).__name__


@contextlib.contextmanager
def translate_disk_errors(place: Path, hint: Callable[[bool, Path], str]) -> Iterator[None]:
    """Turn an `OSError` of a disk that is full or cannot be written into a `HardwareError` at its file, else at
    `place`.

    `hint` is called with whether the disk is full and the place. A permission error without a file is not about a disk
    and passes.
    """
    try:
        yield
    except OSError as error:
        named = isinstance(error.filename, str | bytes | os.PathLike)
        full = error.errno in NO_ROOM
        if not full and (error.errno not in UNWRITABLE or (error.errno in (errno.EACCES, errno.EPERM) and not named)):
            raise
        where = os.fsdecode(error.filename) if named else str(place)
        access = "written" if Path(where).is_relative_to(place) else "read or written"
        text = disk_problem(error) if full else f"cannot be {access}: {error.strerror}"
        raise HardwareError(text, place=where, hint=hint(full, Path(where))) from error


@contextlib.contextmanager
def side_file(path: Path, what: str) -> Iterator[None]:
    """Let the body write a file that the run does not need: a full or read-only disk causes one warning until `what` is
    written again.

    Other errors are raised.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM | UNWRITABLE:
            raise
        if what not in _unwritten:
            print(
                f"warning: {path}: {what} could not be written: {disk_problem(error)}; training continues",
                file=sys.stderr,
                flush=True,
            )
        _unwritten.add(what)
    else:
        _unwritten.discard(what)


# Temporary folders, renamed when complete; those of killed processes are removed by the next process.


def make_once(folder: Path, mark: str, make: Callable[[Path], object]) -> Path:
    """Return `folder`, which `make` fills on first use; it appears atomically, with the file `mark` in it."""
    if (folder / mark).is_file():
        remove_abandoned(folder.parent)
        return folder
    aside = new_folder(folder.parent, "making")
    try:
        make(aside / "made")
        (aside / "made").rename(folder)
        sync_path(folder.parent)
    except OSError:
        if not (folder / mark).is_file():  # else another process has created the same folder
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def new_folder(parent: Path, name: str) -> Path:
    """Return a new folder inside `parent` whose name contains this machine and process."""
    parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(parent)
    return Path(tempfile.mkdtemp(prefix=f".{name}.{socket.gethostname()}.{os.getpid()}.", dir=parent))


def remove_abandoned(folder: Path) -> None:
    """Remove the temporary folders of ended processes of this machine."""
    for path in folder.glob(f".*.{socket.gethostname()}.*.*"):
        owner = path.name.rsplit(".", 2)[1]
        if owner.isdecimal() and not _lives(int(owner)):
            shutil.rmtree(path, ignore_errors=True)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process
        pass
    return True
