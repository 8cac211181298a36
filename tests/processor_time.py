"""Processor time of commands against a reference measured at the same time: a busy machine slows both alike."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from typing import TypeVar

from tests import warm

T = TypeVar("T")


def seconds_of(action: Callable[[], T]) -> tuple[float, T]:
    """Return the processor seconds of the processes that `action` starts and waits for, all of them executed, and what
    it returns.
    """
    before, warm_before = resource.getrusage(resource.RUSAGE_CHILDREN), warm.allowed
    warm.allowed = False
    try:
        result = action()
    finally:
        warm.allowed = warm_before
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, result


def importing(module: str) -> float:
    """Return the processor seconds of a Python that imports `module`: about 2 for `torch`, 7 for `peft` and all that
    it imports.
    """
    return seconds_of(lambda: subprocess.run([sys.executable, "-c", f"import {module}"], check=True, timeout=300))[0]
