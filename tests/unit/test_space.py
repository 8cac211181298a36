"""What is said of a write that failed, and how much room a save asks for."""

from __future__ import annotations

import errno
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest

from sft_play.files import append_text, disk_problem, errno_of


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


def test_a_row_is_appended_whole_or_not_at_all(tmp_path: Path, limited: None) -> None:
    path = tmp_path / "metrics.jsonl"
    first = "1" * 40_000 + "\n"
    append_text(path, first, sync=False)
    with pytest.raises(OSError, match="No space left"):
        append_text(path, "2" * 40_000 + "\n", sync=False)  # the system takes 25,535 bytes of it
    assert path.read_text() == first
    append_text(path, "3\n", sync=False)
    assert path.read_text() == first + "3\n"
