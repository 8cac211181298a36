"""Text for people: tables, counts, figures, sizes, times, findings and progress. Standard library, and rich on a
terminal.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sft_play.errors import by_make, typed_here


def tell(text: str) -> None:
    """Print on stderr, where it does not disturb `JSON=1`, in one write, so that threads do not mix their lines."""
    print(f"{typed_here(text)}\n", end="", file=sys.stderr, flush=True)


def table(rows: Sequence[Sequence[str]], *, widest: int = 1_000) -> Iterator[str]:
    """Yield left-aligned lines; a cell longer than `widest` pushes the rest of its line to the right rather than being
    cut.
    """
    widths = [min(max(map(len, column)), widest) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def as_typed(word: object) -> str:
    """Quote a word so that a shell, and make if commands are typed to it, take it verbatim."""
    return shlex.quote(str(word).replace("$", "$$") if by_make() else str(word))


def list_some(parts: Sequence[str], most: int) -> str:
    """Return the first `most` parts and the number of the others: `a, b and 3 more`."""
    rest = len(parts) - most
    return ", ".join(parts[:most]) + (f" and {rest:,} more" if rest > 0 else "")


def numbered(noun: str, numbers: Sequence[int], most: int = 16) -> str:
    """Return `rank 1`, `ranks 0, 2`, `rows 0, 1 and 3 more`."""
    return f"{noun}{'s' if len(numbers) > 1 else ''} {list_some(list(map(str, numbers)), most)}"


BITS = re.compile(r"(\d+(?:\.\d+)?)\s*([GMgm])(?:[Bb]its?(?:ps)?|bps|b/s|bE)?")


def meant_speed(text: str) -> str | None:
    """Return the hint with the speed that `1Gbps`, `10GbE` or `10G` means; nothing for `1GB`, which counts bytes."""
    match = BITS.fullmatch(text.strip())
    return f"write `{match[1]}{match[2].upper()}bit`" if match and float(match[1]) else None


def plural(count: int, noun: str) -> str:
    """Return `1 error`, `2 errors`, `2 processes`."""
    return f"{count} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact about a machine that a user should know or fix."""

    id: str
    """Stable id, listed in docs/doctor.md or docs/home-cluster.md."""
    severity: Literal["error", "fail", "warning", "note"]
    """`error`: no run can work; `fail`: the host cannot take part; `warning`: some runs fail or are slow; `note`: worth
    knowing.
    """
    text: str
    remedy: str


def finding_lines(findings: Iterable[Finding], where: str = "") -> Iterator[str]:
    """Yield two lines for each finding; `where` names the machine."""
    for finding in findings:
        yield f"{where}{finding.severity}: {finding.text}  [{finding.id}]"
        yield f"    remedy: {typed_here(finding.remedy)}"


def figure(value: float, digits: int = 3) -> str:
    """Return a number with significant digits and without an exponent: `4,590`, `11.8`, `0.00012`."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    rounded = float(f"{value:.{digits}g}")
    places = digits - 1 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:.{places}f}".rstrip("0").rstrip(".") if places > 0 else f"{rounded:,.0f}"


def gib(size: float) -> str:
    """Return bytes as `1.06 GiB`, `120 GiB` or `3.2 MiB`."""
    if size < 2**30 / 100:
        return f"{size / 2**20:.1f} MiB"
    return f"{size / 2**30:.2f} GiB" if size < 100 * 2**30 else f"{size / 2**30:.0f} GiB"


def energy(kwh: float) -> str:
    """Return an energy in the unit that leaves a readable number: `2 kWh`, `35 Wh` or `0.28 J`."""
    unit, size = next(((unit, size) for unit, size in (("kWh", 1.0), ("Wh", 1e3)) if kwh * size >= 0.1), ("J", 3.6e6))
    return f"{figure(kwh * size)} {unit}"


def duration(seconds: float) -> str:
    """Return a time in the largest unit that leaves a readable number."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    if 0 < seconds < 0.1:
        return "< 0.1 s"
    return f"{seconds:.0f} s" if seconds >= 1 or not seconds else f"{seconds:.1g} s"


# Progress of long work: a bar on a terminal, elsewhere occasional lines.


SECONDS_BETWEEN_LINES = 10.0

Show = Callable[[int, int | None], None]
"""Called with the number done and, if known, the total."""
_shown: list[Any] = []
"""The `rich.progress.Progress` on the terminal, shared by the bars of all threads; empty without one."""
_lock = threading.Lock()


def on_terminal() -> bool:
    """Return whether stderr is a terminal on which lines can be overwritten."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


@contextlib.contextmanager
def bar(what: str, unit: str) -> Iterator[Show]:
    """Yield a function that shows the progress of `what` in `unit`s; other output appears above the bar."""
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
            speed = done / (now - began)
            remaining = f", about {duration((total - done) / speed)} left" if total and done else ""
            print(f"{what}: {_count(done, total, unit)}, {speed:,.3g} a second{remaining}", file=sys.stderr, flush=True)

    return show
