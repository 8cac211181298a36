"""The live panel of a run, with facts from its files below rank 0's lines; `make watch RUN=` shows it of any run."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from sft_play.config.call import Call
from sft_play.files import json_rows, open_plain
from sft_play.launch.run_folder import find_named_run
from sft_play.launch.runs import age_of, node_of, state_of
from sft_play.runs.folder import WHOLE_BYTES, RunFolder, measured, metric_rows
from sft_play.runs.gate import read_facts
from sft_play.runs.progress import clock, findings, line_of, seconds_left
from sft_play.text import figure, tell

if TYPE_CHECKING:
    from rich.console import RenderableType

PANEL_SECONDS, LINE_SECONDS = 1.0, 10.0
ALIVE_SECONDS = 120.0
"""A run whose launcher is on another machine counts as running while its files change at least this often."""
MOST_RANKS = 8
UNDER_WAY = ("preparing", "running")


class Follower:
    """Reads the rows of a growing metrics file."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows, self._read = path, list[dict[str, Any]](), 0

    def look(self) -> list[dict[str, Any]]:
        """Return all rows so far, or those of `metric_rows` for a long file; read a file that has shrunk again."""
        with contextlib.suppress(OSError), open_plain(self.path) as stream:
            size = stream.seek(0, os.SEEK_END)
            if size < self._read:
                self.rows, self._read = [], 0
            if not self._read and size > WHOLE_BYTES:  # loses a line that is being written now
                self.rows, self._read = metric_rows(self.path), size
            stream.seek(self._read)
            content = stream.read()
            whole = content.rfind(b"\n") + 1
            self._read += whole
            self.rows += measured(json_rows(content[:whole].splitlines()))
        return self.rows


def panel(run: RunFolder, rows: list[dict[str, Any]], state: str) -> RenderableType:
    """Return the facts of a run as a panel."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    plan = read_facts(run.plan)
    train, evaluations = ([row for row in rows if row.get("kind") == kind] for kind in ("train", "eval"))
    last, steps = train[-1] if train else {}, plan.get("steps")
    phase = read_facts(run.phase).get("phase", "loading") if state == "running" and not node_of(run) else state
    remaining = seconds_left(rows, steps)
    top = Table.grid(expand=True, padding=(0, 1))
    top.add_column(ratio=1)
    top.add_column(justify="right")
    top.add_row(
        ProgressBar(total=steps or 1, completed=last.get("step", 0)),
        f"{last.get('step', 0)}/{steps or '?'}"
        + (f"  {clock(remaining)} left" if remaining is not None and state in UNDER_WAY else ""),
    )
    facts = Table.grid(padding=(0, 2))
    for label, text in _facts(run, train, evaluations):
        facts.add_row(Text(label, style="dim"), text)
    memory = Table.grid(padding=(0, 2))
    used, limits = (last.get(f"rank_memory_{name}") or [] for name in ("gib", "limit_gib"))
    for rank, (size, limit) in enumerate(list(zip(used, limits, strict=False))[:MOST_RANKS]):
        bar = ProgressBar(total=limit or 1, completed=size or 0, width=24)
        readings = [(last.get(name) or [None] * len(used), unit) for name, unit in READINGS]
        device = " ".join(
            f"{values[rank]:.0f}{unit}" for values, unit in readings if rank < len(values) and values[rank] is not None
        )
        memory.add_row(Text(f"rank {rank}", style="dim"), bar, f"{size or 0:.2f} of {limit:.1f} GiB", device)
    rest = [Text(f"and {len(used) - MOST_RANKS} more ranks", style="dim")] if len(used) > MOST_RANKS else []
    words = [Text(f"! {finding.text}", style="yellow") for finding in findings(rows)]
    return Panel(
        Group(top, facts, memory, *rest, *words), title=f"{run.name}: {phase}", title_align="left", border_style="cyan"
    )


READINGS = (("rank_utilisation", "%"), ("rank_temperature", "°C"), ("rank_power_watts", " W"))


def _facts(run: RunFolder, train: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    if train:
        row = train[-1]
        pace = f", {figure(row['step_seconds'])} s a step" if row.get("step_seconds") else ""
        yield "training", f"{line_of(train, None)}{pace}" + (f", MFU {row['mfu']:.1%}" if row.get("mfu") else "")
    if evaluations:
        yield "evaluation", line_of(evaluations, None)
    if saved := sorted(path.parent.name for path in run.checkpoints.glob("step-*/manifest.json")):
        yield "checkpoint", saved[-1]


def is_terminal(console: TextIO) -> bool:
    """Return whether the console can show a panel."""
    return console.isatty() and os.environ.get("TERM", "dumb") != "dumb"


@contextlib.contextmanager
def show_live(run: RunFolder, console: TextIO, *, enabled: bool) -> Iterator[int]:
    """Yield the descriptor that rank 0 prints to: if `enabled`, a pipe to a live panel, otherwise the console's."""
    if not enabled:
        yield console.fileno()
        return
    from rich.text import Text

    out, into = os.pipe()
    with live_panel(console, run, lambda: "running") as live:

        def relay() -> None:
            with os.fdopen(out, encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    live.console.print(Text.from_ansi(line.rstrip("\n")), highlight=False)

        thread = threading.Thread(target=relay, name="relay", daemon=True)
        thread.start()
        try:
            yield into
        finally:
            os.close(into)
            thread.join(2 * PANEL_SECONDS)


@contextlib.contextmanager
def live_panel(console: TextIO, run: RunFolder, state: Callable[[], str]) -> Iterator[Any]:
    """Show the panel on a terminal and update it in a thread; output of the body appears above it."""
    from rich.console import Console
    from rich.live import Live

    rows, over = Follower(run.metrics), threading.Event()

    def show(live: Live) -> None:
        while not over.wait(PANEL_SECONDS):
            live.update(panel(run, rows.look(), state()), refresh=True)

    with Live(panel(run, rows.look(), state()), console=Console(file=console), auto_refresh=False) as live:
        thread = threading.Thread(target=show, args=[live], name="panel", daemon=True)
        thread.start()
        try:
            yield live
        finally:
            over.set()
            thread.join(2 * PANEL_SECONDS)
            live.update(panel(run, rows.look(), state()), refresh=True)


def main(call: Call) -> int:
    """Show the panel of a run until it ends, or without a terminal its progress lines, with `JSON=1` its rows.

    Return 0.
    """
    run = find_named_run(call)
    if node := node_of(run):
        tell(f"note: this is node {node} of `{run.name}`; its steps are recorded on node 0: type the command there")
    if not call.json and is_terminal(sys.stdout):
        with live_panel(sys.stdout, run, lambda: _state_seen(run)):
            while _state_seen(run) in UNDER_WAY:
                time.sleep(PANEL_SECONDS)
    else:
        _print_lines(call, run)
    return 0


def _state_seen(run: RunFolder) -> str:
    """Return the state of a run; one whose launcher is not visible here counts as running while its files change."""
    state = state_of(run)
    return "running" if state == "killed" and age_of(run) < ALIVE_SECONDS else state


def _print_lines(call: Call, run: RunFolder) -> None:
    rows, shown, printed_at = Follower(run.metrics), 0, 0.0
    while True:
        state = _state_seen(run)  # read before the rows, so that the last ones are not missed
        rows_so_far = rows.look()
        shown = min(shown, len(rows_so_far))
        latest = max((n for n, row in enumerate(rows_so_far) if row.get("kind") == "train"), default=-1)
        for place in range(shown, len(rows_so_far)):
            row = rows_so_far[place]
            due = time.monotonic() - printed_at > LINE_SECONDS if state in UNDER_WAY else place == latest
            if call.json:
                print(json.dumps(row), flush=True)
            elif row.get("kind") == "eval" or (row.get("kind") == "train" and due):
                printed_at = time.monotonic()
                print(line_of(rows_so_far[: place + 1], read_facts(run.plan).get("steps")), flush=True)
        shown = len(rows_so_far)
        if state not in UNDER_WAY:
            break
        time.sleep(PANEL_SECONDS)
    if not call.json:
        print(
            *(f"warning: {finding.text}" for finding in findings(rows_so_far)),
            f"`{run.name}`: {state}",
            sep="\n",
        )
