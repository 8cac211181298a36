"""How far long work is: on a terminal a bar, elsewhere a line now and then."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator

SECONDS_BETWEEN_LINES = 10.0

Show = Callable[[int, int | None], None]
"""Takes how many are done, and of how many where that is known."""


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
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None, count="")
        yield lambda done, total: progress.update(task, completed=done, total=total, count=_count(done, total, unit))


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
