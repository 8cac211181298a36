"""Space for a checkpoint on the disk and in memory, and the temporary folders in which it is made before it gets its name."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sft_play.errors import HardwareError
from sft_play.runs.folder import RunFolder

SPARE_BYTES = 2**20
"""Small files of a checkpoint that nothing foresees: JSON, the tokenizer's settings, folders."""
SPARE_SHARE = 0.02
"""What a file system takes beside the content: blocks, indirect blocks, journals."""
SPARE_MEMORY_BYTES = 512 * 2**20
"""Host memory that stays free when states are copied."""
FULL_BYTES = 2**20
"""A disk with less free is full: a write that failed, or a rank that left no record, is explained by it."""
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
UNWRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ENXIO, errno.ENODEV, errno.EFBIG})
RUST = re.compile(r"os error (\d+)\b")
"""How safetensors names an error of the system."""
_unwritten: set[str] = set()
"""What `side_file` has warned of."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a checkpoint would need beside what there is, in bytes."""

    needed: int
    free: int

    @property
    def enough(self) -> bool:
        return self.free >= self.needed

    def __str__(self) -> str:
        return f"it needs {size(self.needed)} and {size(self.free)} are free"


def with_spare(predicted: int) -> int:
    """Returns the bytes that must be free for files of `predicted` bytes."""
    return predicted + int(predicted * SPARE_SHARE) + SPARE_BYTES


def free_bytes(folder: Path) -> int:
    """Returns the bytes that this user may still write on the file system of `folder`; 0 where no file can be made any more."""
    found = os.statvfs(folder)
    if found.f_files and not found.f_favail:
        return 0
    return found.f_bavail * found.f_frsize


def is_full(folder: Path) -> bool:
    """Whether the disk of `folder` has less than `FULL_BYTES` left; not for a folder that is gone."""
    try:
        return shutil.disk_usage(folder).free < FULL_BYTES
    except OSError:
        return False


def is_read_only(folder: Path) -> bool:
    """Whether the file system of `folder` takes no writes any more; not for a folder that is gone."""
    try:
        return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def is_gone(folder: Path) -> bool:
    """Whether there is no such folder any more; not for one whose disk does not answer."""
    try:
        folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def errno_of(error: BaseException) -> int | None:
    """Returns the system's error number of a failed write, also where a library has wrapped it; `None` for other errors."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, OSError) and link.errno is not None:
            return link.errno
        if match := RUST.search(str(link)):
            return int(match.group(1))
        link = link.__cause__ or link.__context__
    return None


def describe(error: BaseException) -> str:
    """Returns what the user reads of a write that failed."""
    number = errno_of(error)
    if number in NO_ROOM:
        return "no space is left on the disk" if number == errno.ENOSPC else "the disk quota is used up"
    if number == errno.EROFS:
        return "the run folder is read-only now"
    if number in UNWRITABLE and number is not None:
        return f"the run folder cannot be written: {os.strerror(number)}"
    return str(error) or type(error).__name__


@contextlib.contextmanager
def side_file(path: Path, what: str) -> Iterator[None]:
    """Lets the body write a file that the run can do without: a full or read-only disk gives one warning until `what` is written again.

    Other errors are raised.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM | UNWRITABLE:
            raise
        if what not in _unwritten:
            print(
                f"warning: {path}: {what} could not be written: {describe(error)}; training goes on", file=sys.stderr, flush=True
            )
        _unwritten.add(what)
    else:
        _unwritten.discard(what)


def free_memory_bytes() -> int | None:
    """Returns the host memory that may still be used, a limit of this process's cgroup (v2) kept; `None` where unknown."""
    free: int | None = None
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    for group in _cgroups():
        with contextlib.suppress(OSError, ValueError):  # `max` is no limit
            left = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()) + _reclaimable(group)
            free = left if free is None else min(free, left)
    return None if free is None else max(0, free)


def _cgroups() -> list[Path]:
    root = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                own = root / line[3:].strip().lstrip("/")
                return [path for path in (own, *own.parents) if path.is_relative_to(root)]
    return [root]


def _reclaimable(group: Path) -> int:
    """Returns the file pages that the kernel drops before it runs out."""
    with contextlib.suppress(OSError, ValueError):
        for line in (group / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "inactive_file":
                return int(value)
    return 0


def size(count: int) -> str:
    """Returns bytes for a person: `12.3 MiB`."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


# Folders in which something is made before it gets its name; those of processes that were killed meanwhile are removed by the next.


@contextmanager
def made_aside(parent: Path, name: str) -> Iterator[Path]:
    """Yields a new folder inside `parent`, and removes what is left of it in the end, as of those that were abandoned there."""
    folder = new_folder(parent, name)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def new_folder(parent: Path, name: str) -> Path:
    """Returns a new folder inside `parent` whose name says which process on which machine makes it."""
    parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(parent)
    return Path(tempfile.mkdtemp(prefix=f".{name}.{socket.gethostname()}.{os.getpid()}.", dir=parent))


def remove_abandoned(folder: Path) -> None:
    """Removes what processes of this machine that live no more have left half-written."""
    for path in folder.glob(f".*.{socket.gethostname()}.*.*"):
        owner = path.name.rsplit(".", 2)[1]
        if owner.isdigit() and not _lives(int(owner)):
            shutil.rmtree(path, ignore_errors=True)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def folder_gone(run: RunFolder) -> HardwareError:
    """Returns the error of a run whose folder was there when it started."""
    return HardwareError(
        "the run's folder is gone: was it moved or deleted while it trained?",
        place=str(run.path),
        hint=f"where it was moved, put it back, then: make resume RUN={run.name} (or, as it is now: make resume RUN=FOLDER)",
    )
