"""What is said of a write that failed, and how much room a save asks for."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest

from sft_play.files import append_text, disk_problem, errno_of, free_bytes
from sft_play.runs.manifest import Room, free_memory_bytes, with_spare


@pytest.mark.parametrize(
    ("error", "number", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), errno.ENOSPC, "no space is left on the disk"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), errno.EDQUOT, "the disk quota is used up"),
        (OSError(errno.EROFS, "Read-only file system"), errno.EROFS, "the run folder is read-only now"),
        (PermissionError(errno.EACCES, "Permission denied"), errno.EACCES, "cannot be written: Permission denied"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), errno.ENOSPC, "no space is left on the disk"),
        (ValueError("shapes differ"), None, "shapes differ"),
        (KeyError(), None, "KeyError"),
    ],
)
def test_a_failed_write_is_told_from_a_mistake(error: Exception, number: int | None, words: str) -> None:
    assert errno_of(error) == number
    assert words in disk_problem(error)


def test_what_a_library_raises_from_an_error_of_the_system_counts_as_that() -> None:
    try:
        try:
            raise OSError(errno.ENOSPC, "full")
        except OSError as error:
            raise RuntimeError("cannot serialise") from error
    except RuntimeError as outer:
        assert errno_of(outer) == errno.ENOSPC


@pytest.fixture
def limited() -> Iterator[None]:
    """Files of this process end at 64 KiB, by the system's own limit: writes come back short, then with an error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_the_real_error_of_safetensors_is_understood(tmp_path: Path, limited: None) -> None:
    from safetensors.numpy import save_file

    with pytest.raises(Exception) as caught:
        save_file({"a": numpy.zeros(2**16)}, tmp_path / "a.safetensors")
    assert errno_of(caught.value) == errno.EFBIG
    assert disk_problem(caught.value) == "the run folder cannot be written: File too large"


def test_room_is_asked_with_something_to_spare() -> None:
    assert with_spare(100 * 2**20) == 103 * 2**20
    assert not Room(with_spare(0), 2**20 - 1).enough
    assert str(Room(3 * 2**30, 2**19)) == "it needs 3.00 GiB and 0.5 MiB are free"


def test_free_space_and_memory_are_what_the_system_says(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    assert abs(free_bytes(tmp_path) - found.f_bavail * found.f_frsize) < 2**30
    match = re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())
    assert match is not None
    free = free_memory_bytes()
    assert free is not None and 0 < free < int(match.group(1)) * 1024


def test_a_row_is_appended_whole_or_not_at_all(tmp_path: Path, limited: None) -> None:
    path = tmp_path / "metrics.jsonl"
    first = "1" * 40_000 + "\n"
    append_text(path, first, sync=False)
    with pytest.raises(OSError, match="No space left"):
        append_text(path, "2" * 40_000 + "\n", sync=False)  # the system takes 25,535 bytes of it
    assert path.read_text() == first
    append_text(path, "3\n", sync=False)
    assert path.read_text() == first + "3\n"
