"""A completed run beside the undisturbed one: metrics to the bit, each step once in `metrics.jsonl` and in TensorBoard."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sft_play.runs.checkpoints import newest_valid, published
from sft_play.runs.folder import RunFolder

TIMES = re.compile(r"seconds|per_second|memory|mfu|percent|mb_s")
"""Names of figures that a clock or the machine decides."""
SHOWN = 3
"""How many differences of one kind are told."""


def compare_runs(reference: RunFolder, run: RunFolder) -> tuple[int, list[str]]:
    """Returns how many rows of metrics were compared, and everything that differs."""
    expected, found = read_metrics(reference), read_metrics(run)
    problems = [*differing_rows(expected, found), *differing_curves(reference, run), *leftovers(run)]
    return len(expected), problems


def read_metrics(run: RunFolder) -> list[dict[str, Any]]:
    """Returns the rows of `metrics.jsonl`. Raises `ValueError` for a line that is no JSON."""
    return [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]


def differing_rows(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[str]:
    """Returns the differences between two runs' rows; JSON keeps every bit of a float."""
    problems = []
    for kind in ("train", "eval"):
        before = [_exact(row) for row in expected if row["kind"] == kind]
        after = [_exact(row) for row in found if row["kind"] == kind]
        steps = ([row["step"] for row in before], [row["step"] for row in after])
        if steps[0] != steps[1]:
            problems.append(f"{kind} rows: steps {_ranges(steps[1])} instead of {_ranges(steps[0])}")
        by_step = {row["step"]: row for row in after}
        unequal = [
            f"step {row['step']}: `{name}` {by_step[row['step']].get(name)} instead of {value}"
            for row in before
            if row["step"] in by_step
            for name, value in row.items()
            if by_step[row["step"]].get(name) != value
        ]
        problems += _some(f"{kind} rows", unequal)
    return problems


def _exact(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not TIMES.search(name)}


def differing_curves(reference: RunFolder, run: RunFolder) -> list[str]:
    """Returns the differences between the curves in `tb/`, as TensorBoard itself reads them."""
    if not reference.tensorboard.is_dir():
        return []
    expected, found = read_curves(reference.tensorboard), read_curves(run.tensorboard)
    problems = []
    for name in sorted({*expected, *found}):
        before, after = expected.get(name, []), found.get(name, [])
        if [step for step, _ in before] != [step for step, _ in after]:
            problems.append(f"curve {name}: steps {_ranges([s for s, _ in after])} instead of {_ranges([s for s, _ in before])}")
        elif before != after and not TIMES.search(name):
            problems.append(f"curve {name}: values differ")
    return problems


def read_curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns tag -> (step, value) of every event in the order in which TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of the steps that a resumed run has made void
    events = EventAccumulator(str(folder), size_guidance={SCALARS: 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()[SCALARS]}


def leftovers(run: RunFolder) -> list[str]:
    """Returns what a completed run should not hold: half-written or temporary files, checkpoints that are not whole."""
    problems = _some("left over", [str(path.relative_to(run.path)) for path in half_written(run.path)])
    newest, skipped = newest_valid(run)
    problems += _some("checkpoints", skipped)
    if newest is None or run.last.resolve() != newest.resolve():
        problems.append(f"`last` is {run.last.resolve().name}, the newest valid checkpoint {newest.name if newest else 'none'}")
    if not published(run):
        problems.append("there is no checkpoint")
    return problems


def half_written(folder: Path) -> Iterator[Path]:
    """Yields what begins with a dot inside `folder`, but for the launchers' locks."""
    for path in sorted(folder.rglob(".*")):
        if not path.name.endswith(".lock"):
            yield path


def _some(what: str, problems: list[str]) -> list[str]:
    more = [f"{what}: {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    return [f"{what}: {problem}" for problem in problems[:SHOWN]] + more


def _ranges(steps: list[int]) -> str:
    """Returns steps in short: `1-4, 6, 6-9`."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][1] + 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts) or "none"
