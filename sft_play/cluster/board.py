"""What the user sees of a cluster run: a line for each machine, beside rank 0's own words; and the ranks' logs, gathered here."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from sft_play.errors import UserError, printable
from sft_play.plan.plan import Plan
from sft_play.runs.folder import RunFolder

LINES_SECONDS = 30.0
"""How often the machines' lines are shown while nothing but the step changes."""
LARGEST_WAITING = 4_000_000
"""Letters of logs that are kept while the run has no folder yet."""


def plan_of(run: RunFolder) -> Plan | None:
    """Returns a run's plan; `None` where there is none yet."""
    with contextlib.suppress(UserError, OSError):
        return Plan.load(run.plan)
    return None


def shares(run: RunFolder, nodes: int) -> list[range]:
    """Returns the ranks of each machine by the run's plan; empty where there is none yet, or one of another number of machines."""
    plan = plan_of(run)
    if plan is None:
        return []
    counts = plan.ranks_by_node
    if len(counts) != nodes:
        return []
    starts = [sum(counts[:k]) for k in range(len(counts))]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def last_row(path: Path, since: float) -> Mapping[str, Any]:
    """Returns the last training row of a `metrics.jsonl` that was written after `since`; empty where there is none."""
    with contextlib.suppress(OSError):
        if path.stat().st_mtime < since:
            return {}
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - 65536))
            lines = stream.read().decode("utf-8", "replace").splitlines()
        for line in reversed(lines):
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and row.get("kind") == "train":
                    return row
    return {}


def host_speeds(row: Mapping[str, Any], ranks: Sequence[range]) -> list[float | None]:
    """Returns the tokens a second of each machine: its ranks' part of the last row's."""
    tokens, speed = row.get("rank_tokens"), row.get("tokens_per_second")
    if not isinstance(tokens, list) or not isinstance(speed, (int, float)) or not ranks or ranks[-1].stop > len(tokens):
        return [None] * len(ranks)
    total = sum(tokens) or 1
    return [speed * sum(tokens[rank] for rank in part) / total for part in ranks]


def lines(
    names: Sequence[str], states: Sequence[str], row: Mapping[str, Any], steps: int | None, speeds: Sequence[float | None]
) -> list[str]:
    """Returns a line for each machine: state, step, tokens a second."""
    width = max(map(len, names), default=0)
    at = f"step {row['step']}{f'/{steps}' if steps else ''}" if "step" in row else ""
    found = []
    for place, (name, state) in enumerate(zip(names, states, strict=True)):
        speed = speeds[place] if place < len(speeds) else None
        parts = [state, at, f"{speed:,.0f} tokens/s" if speed is not None else ""] if state == "training" else [state]
        found.append(f"  {name:<{width}}  {'  '.join(part for part in parts if part)}".rstrip())
    return found


class Board:
    """Prints a machine's line when it has something new, and those of all now and then."""

    def __init__(self, run: RunFolder) -> None:
        self.run, self.begun = run, time.time()
        self._shown: dict[str, str] = {}
        self._at, self._row_at = 0.0, -1
        self._before = last_row(run.metrics, 0.0)  # of an earlier start

    def show(self, states: Mapping[str, str]) -> None:
        """Shows what is new: host -> `running` (which is `loading`, and `training` once a step has ended), or how its launcher ended."""
        row = last_row(self.run.metrics, self.begun)
        row = {} if row == self._before else row
        now = {name: ("training" if row else "loading") if state == "running" else state for name, state in states.items()}
        due = time.monotonic() - self._at > LINES_SECONDS and row.get("step", -1) != self._row_at
        if now == self._shown and not due:
            return
        new = [name for name, state in now.items() if due or self._shown.get(name) != state]
        self._shown, self._row_at = now, row.get("step", -1)
        self._at = time.monotonic() if due or not self._at else self._at
        working = [name for name, state in now.items() if state == "training"]
        plan = plan_of(self.run)
        speeds = dict(zip(working, host_speeds(row, shares(self.run, len(working))), strict=False))
        told = lines(list(now), list(now.values()), row, plan.steps if plan else None, [speeds.get(name) for name in now])
        say("\n".join(line for line, name in zip(told, now, strict=True) if name in new))


def say(text: str) -> None:
    """Tells the user, on stderr."""
    print(text, file=sys.stderr, flush=True)


class Logs:
    """Files in a run's `logs/` that machines send in pieces; kept in memory while the run has no folder."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self._waiting: dict[str, str] = {}
        self._open: dict[str, IO[str]] = {}

    def add(self, name: str, text: str) -> None:
        """Appends to `logs/NAME`. A full disk leaves a log short, and ends nothing."""
        self._waiting[name] = (self._waiting.get(name, "") + text)[-LARGEST_WAITING:]
        self.flush()

    def flush(self) -> None:
        """Writes what waits, where there is a folder by now."""
        if not self._waiting or not self.run.config.is_file():
            return
        for name, text in self._waiting.items():
            with contextlib.suppress(OSError):
                if name not in self._open:
                    self.run.logs.mkdir(parents=True, exist_ok=True)
                    self._open[name] = (self.run.logs / Path(name).name).open("a", encoding="utf-8")
                self._open[name].write(text)
                self._open[name].flush()
        self._waiting.clear()

    def close(self) -> None:
        """Closes the files."""
        for stream in self._open.values():
            with contextlib.suppress(OSError):
                stream.close()
        self._open.clear()


def last_words(text: str, lines_shown: int = 12) -> str:
    """Returns the end of what a launcher printed on stderr, from its last `error:` on."""
    found = printable(text).strip()
    at = found.rfind("error: ")
    return found[at:].strip() if at >= 0 else "\n".join(found.splitlines()[-lines_shown:])
