"""A child process that the kernel ends with its parent, however that ends, so that nothing of a killed launcher works on (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

SET_PARENT_DEATH_SIGNAL = 1
"""`PR_SET_PDEATHSIG` of prctl(2)."""
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def bound_to_parent(number: signal.Signals) -> Callable[[], None] | None:
    """Returns a `preexec_fn` for `subprocess.Popen`: the child gets the signal `number` when this process has gone.

    Call it in the main thread: the kernel goes by the thread that made the child. `None` where there is no such thing.
    """
    if _libc is None:
        return None
    libc, parent = _libc, os.getpid()

    def bind() -> None:
        libc.prctl(SET_PARENT_DEATH_SIGNAL, int(number), 0, 0, 0)
        if os.getppid() != parent:  # it was killed in between
            os._exit(128 + int(number))

    return bind


def woken_with_parent() -> None:
    """Makes the kernel continue this process (SIGCONT) when its parent has gone: one that was stopped could not notice it, and would
    stay. Harmless to one that runs, and to one whose parent leaves in order while it still saves."""
    if _libc is not None:
        _libc.prctl(SET_PARENT_DEATH_SIGNAL, int(signal.SIGCONT), 0, 0, 0)
