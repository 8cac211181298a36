"""Programs that threads of a command wait for, such as rsync: a command that is stopped ends them, or it would wait for them."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from typing import Any

_running: set[subprocess.Popen[Any]] = set()
_stopped = False


@contextlib.contextmanager
def waited_for(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Keeps a program among those that are ended when this command is stopped, while the body waits for it."""
    _running.add(process)
    try:
        if _stopped:
            process.kill()
        yield
    finally:
        _running.discard(process)


@contextlib.contextmanager
def ended_with_us() -> Iterator[None]:
    """Ends them when the body is left by an exception, a signal's included. Enter it inside the pool of threads, which waits for them."""
    global _stopped  # noqa: PLW0603 - threads of this process are what it is about
    _stopped = False
    try:
        yield
    except BaseException:
        _stopped = True
        for process in list(_running):
            process.kill()
        raise
