"""A command as a process: signals that end it, children that end with it, and a console that may close."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast

STOPS = (
    signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGXCPU,
    signal.SIGALRM, *([signal.SIGPWR] if sys.platform == "linux" else []),
)  # fmt: skip
"""Signals that ask a command to stop: Ctrl-C, Ctrl-\\, `kill` or a scheduler, the early warnings of Slurm and LSF, a
closed terminal, the limit of processor time (`ulimit -S -t`), Flux's limit of time, and a failing power supply.
"""
REPEATED_SECONDS = 2.0
"""A repeated signal within this time is the same request, sent to this process and to all of its group."""
_heard: list[int] = []
"""Signals received inside `end_by_signals` that have not ended it yet."""


def signals_to_hear() -> list[signal.Signals]:
    """Return `STOPS`, without SIGHUP if `nohup` ignores it."""
    return [number for number in STOPS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def leave_stops_to_parent() -> None:
    """Ignore `STOPS` in a child process, since they may be sent to all; its parent ends it by SIGTERM."""
    for number in STOPS:
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)


def stop_code(number: int) -> int:
    """Return the exit code of a stop by a signal."""
    return 130 if number == signal.SIGINT else 143


class StoppedBySignal(SystemExit):
    """Exit with the code of a stop by a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(stop_code(number))
        self.signal = signal.Signals(number).name


@contextlib.contextmanager
def end_by_signals() -> Iterator[None]:
    """Turn `STOPS` into an orderly exit with code 143 (SIGINT: 130), which stops children and cleans up.

    Python drops an exception that a handler raises inside a callback (around a fork, in a finaliser), so long loops
    call `raise_what_was_heard` to lose no signal, including Ctrl-C.
    """
    first = 0.0

    def end(number: int, _frame: FrameType | None) -> None:
        nonlocal first
        again = bool(_heard) and time.monotonic() - first < REPEATED_SECONDS
        if not again:  # a second exception would only disturb the clean-up
            _heard.append(number)
            first = time.monotonic()
            raise_what_was_heard()

    with hear_signals(end):
        try:
            yield
        finally:
            _heard.clear()


@contextlib.contextmanager
def hear_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle signals that ask to stop by `handler` during the body."""
    previous = {number: signal.signal(number, handler) for number in signals_to_hear()}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def raise_what_was_heard() -> None:
    """Raise `KeyboardInterrupt` or `StoppedBySignal` if a signal was received, on every call."""
    if _heard:
        raise KeyboardInterrupt if _heard[0] == signal.SIGINT else StoppedBySignal(_heard[0])


SET_PARENT_DEATH_SIGNAL = 1
"""`PR_SET_PDEATHSIG` of prctl(2)."""
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def bind_to_parent(number: signal.Signals) -> Callable[[], None] | None:
    """Return a `preexec_fn` for `subprocess.Popen` that sends the child a signal when this process ends.

    The child must be started in the main thread, since the kernel watches the thread that created it. `None` except on
    Linux.
    """
    if _libc is None:
        return None
    libc, parent = _libc, os.getpid()

    def bind() -> None:
        libc.prctl(SET_PARENT_DEATH_SIGNAL, int(number), 0, 0, 0)
        if os.getppid() != parent:  # the parent was killed in between
            os._exit(128 + int(number))

    return bind


class Console:
    """A text stream that drops what is written after its reader has closed it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._may_go():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._may_go():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _may_go(self) -> Iterator[None]:
        try:
            yield
        except OSError:  # EPIPE of a pipe, EIO of a terminal; from here on, what is left and children write to nowhere
            with contextlib.suppress(OSError), Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())


@contextlib.contextmanager
def console_may_go() -> Iterator[None]:
    """Keep a closed stdout or stderr from ending this process during the body."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = out, err = cast(TextIO, Console(streams[0])), cast(TextIO, Console(streams[1]))
    try:
        yield
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = streams
