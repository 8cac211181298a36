"""The processes that make a rank's batches: where they meet, which signals they hear, and that none of them fails in
silence.
"""

from __future__ import annotations

import multiprocessing.queues
import multiprocessing.util
import os
import signal
import sys
import tempfile
from pathlib import Path

from sft_play.errors import HardwareError
from sft_play.launch.process import STOPS

SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
LONGEST_FOLDER = 103 - len("/pymp-12345678/listener-4194304-1000-12345678")
"""Bytes of a folder below which multiprocessing opens a socket, whose path has at most 107 on Linux and 103 on macOS
(`sun_path`).
"""


def shorten_sockets() -> None:
    """Let this process and its children share tensors by sockets in a short folder where TMPDIR is too long for them.

    Raise `HardwareError` where there is none.
    """
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
        multiprocessing.util.get_temp_dir()  # made once and kept, for children too
    finally:
        tempfile.tempdir = usual


def begin_loading(_worker: int = 0) -> None:
    """For processes that load data (`worker_init_fn`): where all processes of a job get the signal, they must live
    until the save.

    A batch that cannot be handed over ends the process, of which its rank hears at once. Python would print why, and
    the rank would wait.
    """
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_end_loading)  # type: ignore[attr-defined]


def _end_loading(error: Exception, _batch: object) -> None:
    print(f"a batch could not be handed over: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(1)
