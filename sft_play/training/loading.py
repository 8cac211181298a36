"""Set up the processes that load a rank's batches: their sockets, their signals, and their failures."""

from __future__ import annotations

import errno
import multiprocessing.queues
import multiprocessing.util
import os
import signal
import tempfile
from pathlib import Path

from sft_play.errors import HardwareError
from sft_play.launch.process import STOPS
from sft_play.text import tell

SHARED_MEMORY_HINT = "docker run --shm-size=8g, an emptyDir at /dev/shm; or `train.dataloader_num_workers: 0`"
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
LONGEST_FOLDER = 103 - len("/pymp-12345678/listener-4194304-1000-12345678")
"""Bytes of a folder's path in which multiprocessing can open a socket, whose path (`sun_path`) has at most 107 bytes on
Linux and 103 on macOS.
"""


def prepare_loading() -> None:
    """Let this process and its children share tensors by sockets in a short folder if TMPDIR is too long.

    Raise `HardwareError` if no short folder is writable, or no shared memory.
    """
    try:
        multiprocessing.Lock()
    except OSError as error:
        text = f"processes that load data cannot use it: {error.strerror}"
        raise HardwareError(text, place="/dev/shm", hint=SHARED_MEMORY_HINT) from error
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) <= LONGEST_FOLDER:
        return
    short = next(
        (folder for folder in SHORT_FOLDERS if Path(folder).is_dir() and os.access(folder, os.W_OK | os.X_OK)), None
    )
    if short is None:
        raise HardwareError(
            f"TMPDIR is `{usual}`, which is too long for the sockets of processes that load data",
            place="environment",
            hint=f"TMPDIR= of at most {LONGEST_FOLDER} characters, or train.dataloader_num_workers: 0",
        )
    tempfile.tempdir = short
    try:
        multiprocessing.util.get_temp_dir()  # created once and used by children too
    finally:
        tempfile.tempdir = usual


def begin_loading(_worker: int = 0) -> None:
    """Set up a process that loads data (`worker_init_fn`).

    It ignores stop signals, which may reach all processes of a job, because it must live until the save. A batch that
    cannot be passed on ends it, which its rank notices at once; Python would only print the error, and the rank would
    wait.
    """
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_end_loading)  # type: ignore[attr-defined]


def _end_loading(error: Exception, _batch: object) -> None:
    tell(f"a batch could not be passed to its rank: {type(error).__name__}: {error}")
    os._exit(errno.ENOSPC if "No space left on device" in str(error) else 1)
