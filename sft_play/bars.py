"""How far long work is: on a terminal a bar, elsewhere a line now and then."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

SECONDS_BETWEEN_LINES = 10.0

Show = Callable[[int, int | None], None]
"""Takes how many are done, and of how many where that is known."""
_shown: list[Any] = []
"""The one `rich.progress.Progress` on the terminal, with the bars of all threads; empty while there is none."""
_lock = threading.Lock()


def on_terminal() -> bool:
    """Whether stderr is a terminal on which a line can be written over."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


@contextlib.contextmanager
def bar(what: str, unit: str) -> Iterator[Show]:
    """Yields what shows the progress of `what`, counted in `unit`s; what is printed meanwhile appears above the bar."""
    if not on_terminal():
        yield _lines(what, unit)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"), TimeRemainingColumn())
    with _lock:
        if not _shown:
            _shown.append(Progress(*columns, console=Console(stderr=True), transient=True))
            _shown[0].start()
        progress, task = _shown[0], _shown[0].add_task(what, total=None, count="")
    try:
        yield lambda done, total: progress.update(task, completed=done, total=total, count=_count(done, total, unit))
    finally:
        with _lock:
            if len(progress.tasks) > 1:
                progress.remove_task(task)
            else:
                _shown.pop().stop()


def _count(done: int, total: int | None, unit: str) -> str:
    return f"{done:,} of {total:,} {unit}" if total else f"{done:,} {unit}"


def _lines(what: str, unit: str) -> Show:
    began = shown = time.monotonic()

    def show(done: int, total: int | None) -> None:
        nonlocal shown
        if (now := time.monotonic()) - shown >= SECONDS_BETWEEN_LINES:
            shown = now
            print(f"{what}: {_count(done, total, unit)}, {done / (now - began):,.3g} a second", file=sys.stderr, flush=True)

    return show
