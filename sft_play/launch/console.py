"""A console that may go while a run goes on (`make train | head`, a closed window, a lost connection), and without make's own words."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

STOPPED = 128
"""Codes from here on are of a stop, which make hears of too."""


class Console(io.TextIOBase):
    """A text stream until its reader goes; from then on what is written is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.has_gone = False

    def write(self, text: str) -> int:
        with self._may_go():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._may_go():
            self._stream.flush()

    def isatty(self) -> bool:
        return not self.has_gone and self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _may_go(self) -> Iterator[None]:
        if self.has_gone:
            with contextlib.suppress(OSError):
                yield
            return
        try:
            yield
        except OSError:  # EPIPE of a pipe, EIO of a terminal
            self.has_gone = True
            with contextlib.suppress(OSError), Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())  # for the rest of the buffer, and for children


@contextlib.contextmanager
def console_may_go() -> Iterator[None]:
    """Lets nothing that is printed within end this process because nobody reads it."""
    kept = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = out, err = Console(kept[0]), Console(kept[1])
    try:
        yield
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = kept


def end_make(code: int) -> int:
    """Ends make with code 1 where the command failed, and returns what this process is to end with then.

    make prints `*** [Makefile:56: data] Error 4` under whatever a failed command has said; at SIGQUIT it leaves without a word, once
    its child has ended well. Where it does not catch that signal (in the background of a script) it says what it always says.
    """
    parent, quits = Path(f"/proc/{os.getppid()}"), 1 << (signal.SIGQUIT - 1)
    try:
        caught = next(line for line in (parent / "status").read_text().splitlines() if line.startswith("SigCgt:"))
        is_make = (parent / "comm").read_text().strip() in ("make", "gmake") and int(caught.split()[1], 16) & quits
    except (OSError, StopIteration):  # no Linux
        return code
    if not is_make or not 0 < code < STOPPED:
        return code
    sys.stdout.flush()
    os.kill(os.getppid(), signal.SIGQUIT)
    return 0
