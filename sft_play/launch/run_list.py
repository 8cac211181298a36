"""`make runs`: every run with its state, steps, last loss, best score and age."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sft_play.config.call import Call
from sft_play.files import read_json, read_json_lines
from sft_play.launch.run_folder import FINAL_EVENTS, read_events
from sft_play.launch.running import holders
from sft_play.runs.folder import RunFolder, runs_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One run."""

    name: str
    state: str
    """`preparing`, `running`, `finished`, `stopped`, `failed`, `killed` (its launcher has gone without a word), `never started`."""
    code: int | None
    """Exit code of its last launch, where that has ended."""
    step: int
    steps: int | None
    loss: float | None
    """Of the last step in `metrics.jsonl`, nats."""
    best: float | None
    """Best value of `train.metric_for_best_model` among its evaluations."""
    metric: str | None
    age_seconds: float
    """Since something last happened to it."""


def main(call: Call) -> int:
    """Prints the runs, the newest first."""
    rows = all_runs()
    if call.json:
        print(json.dumps([asdict(row) for row in rows]))
    elif not rows:
        print(f"no runs in `{runs_folder()}`")
    else:
        print(table(rows))
    return 0


def all_runs() -> list[Row]:
    """Returns the runs in `RUNS_DIR`, the newest first."""
    folders = [path.parent for path in runs_folder().glob("*/config.json")]
    return sorted((row_of(RunFolder(path)) for path in folders), key=lambda row: (row.age_seconds, row.name))


def row_of(run: RunFolder) -> Row:
    """Returns what is known of a run, from its files alone; a file that is torn or missing leaves its cells empty."""
    events = [event for event in read_events(run) if event.get("node", 0) == 0]
    last = events[-1] if events else {}
    metrics = _metrics(run.metrics)
    train = [row for row in metrics if row.get("kind") == "train"]
    plan, train_keys = _read(run.plan), _read(run.config).get("config", {}).get("train", {})
    metric = str(train_keys.get("metric_for_best_model") or "loss").removeprefix("eval_")
    scores = [row[f"eval_{metric}"] for row in metrics if row.get("kind") == "eval" and row.get(f"eval_{metric}") is not None]
    greater = metric.partition("/")[0] not in ("loss", "perplexity")
    return Row(
        name=run.name,
        state=_state(run, last),
        code=last.get("code") if last.get("event") in FINAL_EVENTS else None,
        step=int(train[-1]["step"]) if train else 0,
        steps=plan.get("steps"),
        loss=train[-1].get("loss") if train else None,
        best=(max if greater else min)(scores) if scores else None,
        metric=metric if scores else None,
        age_seconds=max(0.0, time.time() - _touched(run)),
    )


def _state(run: RunFolder, last: dict[str, Any]) -> str:
    if holders(run):
        return "running" if last and last["event"] not in FINAL_EVENTS else "preparing"
    if not last:
        return "never started"
    return str(last["event"]) if last.get("event") in FINAL_EVENTS else "killed"


def _touched(run: RunFolder) -> float:
    times = [path.stat().st_mtime for path in (run.config, run.events, run.metrics) if path.is_file()]
    return max(times, default=time.time())


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = read_json(path)
        return found if isinstance(found, dict) else {}
    return {}


def _metrics(path: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(OSError):
        return [row for row in read_json_lines(path) if isinstance(row.get("step"), int)]
    return []


def table(rows: list[Row]) -> str:
    """Returns the runs as the user reads them."""
    cells = [("run", "state", "step", "loss", "best", "age")]
    for row in rows:
        state = f"{row.state} ({row.code})" if row.code and row.state == "failed" else row.state
        step = f"{row.step}/{row.steps}" if row.steps else str(row.step)
        best = f"{row.best:.4f} {row.metric}" if row.best is not None else "-"
        cells.append((row.name, state, step, f"{row.loss:.4f}" if row.loss is not None else "-", best, age(row.age_seconds)))
    widths = [max(len(line[place]) for line in cells) for place in range(len(cells[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells)


def age(seconds: float) -> str:
    """Returns a time span in its largest unit: `3 h`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
