"""Waits for a condition in a test."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any


def until(
    happened: Callable[[], object],
    *,
    process: subprocess.Popen[Any] | None = None,
    seconds: float = 240,
    pause: float = 0.02,
    explanation: Callable[[], object] = str,
) -> None:
    """Return once `happened()` is true; fail after `seconds`, or if `process` ends first, with its output or
    `explanation()`.
    """
    deadline = time.monotonic() + seconds
    while not happened():
        if process is not None and process.poll() is not None:
            raise AssertionError(process.communicate() if explanation is str else explanation())
        assert time.monotonic() < deadline, explanation()
        time.sleep(pause)
