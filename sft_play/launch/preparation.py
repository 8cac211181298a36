"""Runs the preparation in a process of its own, and gives it time to clear up when it is stopped."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sft_play.errors import DataError, RetryableError, UserError
from sft_play.files import read_json
from sft_play.launch.environment import DROPPED
from sft_play.launch.node import bound_to_parent
from sft_play.runs.folder import RunFolder
from sft_play.runs.prepared import Prepared

END_SECONDS = 6.0
"""Three times this, and everything has ended within the 25 s of a stop on request."""


def end_with_launcher() -> None:
    """Makes the kernel send this process SIGTERM when its launcher dies, however it does (Linux)."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, int(signal.SIGTERM), 0, 0, 0)


def run_preparation(words: Sequence[str]) -> None:
    """Runs a command to its end; raises `SystemExit` with its code where that is not 0, `RetryableError` where a signal killed it.

    Whatever stops us stops it too: it ends the processes that it started and removes what is half-written, for which it has a while. When we are
    killed, the kernel stops it.
    """
    environment = {k: v for k, v in os.environ.items() if k not in DROPPED}
    bound = bound_to_parent(signal.SIGTERM)
    with subprocess.Popen(words, env=environment, stdout=sys.stderr, preexec_fn=bound) as process:  # noqa: PLW1509 - its thread only writes to sockets
        try:
            code = process.wait()
        except BaseException as error:
            _stop(process, told=isinstance(error, KeyboardInterrupt))
            raise
    if code < 0:
        raise RetryableError(
            f"the preparation was killed by {_name(-code)}, by nothing that this program does",
            hint="`dmesg` says whether memory ran out; the same command begins again, and what was ready is kept",
        )
    if code:
        raise SystemExit(code)


def _name(number: int) -> str:
    """Returns a signal's name."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _stop(process: subprocess.Popen[bytes], *, told: bool) -> None:
    """Ends the preparation. `told`: Ctrl-C reached it too, and a second signal would only disturb its clearing up."""
    for ask in (*(() if told else (process.terminate,)), process.poll, process.terminate, process.kill):
        ask()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
            return


DELIVERED = "SFT_PLAY_PREPARED"
"""Variable that names a file: model and data were prepared on another machine and brought to this one (`cluster`)."""


def delivered(run: RunFolder) -> Prepared | None:
    """Returns what another machine has prepared for this run, with where it stands here; `None` where nothing was brought.

    Raises `UserError` where the variable is not meant for this run, `DataError` where what it names is not there.
    """
    if not (name := os.environ.get(DELIVERED)):
        return None
    try:
        found = read_json(Path(name))
        prepared, meant = Prepared.from_json(found["prepared"]), str(found["run"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"`{DELIVERED}` does not name what a cluster's master brought: {error}", place=name) from error
    if meant != run.name:
        raise UserError(
            f"`{DELIVERED}` is meant for the run `{meant}`, not for `{run.name}`", place=name, hint=f"unset {DELIVERED}"
        )
    folders = [prepared.model.path, *(split.path for split in (prepared.train, prepared.validation) if split)]
    if missing := [folder for folder in folders if not Path(folder).is_dir()]:
        raise DataError(f"`{missing[0]}`, which the master should have brought, is not on this machine", place=name)
    return prepared
