"""`make bench-saving`: measure the time of a save, with and without verification, waiting and in the background.

    python -m benchmarks.saving [steps=6] [every=2] [write=docs/benchmarks-saving.md]

It trains the embedded model of 135 million weights through `python -m sft_play train`, as a user does, and reads the
run's metrics of saves. Training that waits for saves alternates with training that does not.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import MODEL, date_and_machine, markdown, options_of, publish, rows_of, train, write_rows
from sft_play.files import read_json

MODES = {"lora": "LoRA (r 16)", "full": "full tuning"}
BATCH_SIZE, LENGTH = 2, 256
GOAL = 0.10
"""Largest share of verification in a save's time."""


def main(arguments: Sequence[str]) -> int:
    """Measure and publish; return 1 if verification takes more than its goal."""
    numbers, document = options_of(arguments, steps=6, every=2)
    figures: dict[tuple[str, bool], dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-saving-", dir=os.environ.get("RUNS_DIR") or None) as folder:
        for mode in MODES:
            for background in (False, True):
                figures[mode, background] = measure(Path(folder), mode, background=background, **numbers)
    text, good = table(figures, numbers["every"])
    publish(text, document)
    return 0 if good else 1


def measure(folder: Path, mode: str, *, steps: int, every: int, background: bool) -> dict[str, float]:
    """Train with a save every `every` steps; return medians over its saves, in seconds and bytes."""
    settings: dict[str, Any] = {
        "model": {"name": MODEL, "max_seq_len": LENGTH},
        "tuning": {"mode": mode, "lora": {"r": 16, "alpha": 32}},
        "data": {"train_path": write_rows(folder / "rows.jsonl", 4 * BATCH_SIZE), "overlong": "truncate"},
        "train": {
            "batch_size": BATCH_SIZE,
            "grad_accum": 1,
            "max_steps": steps,
            "save_steps": every,
            "save_total_limit": 2,
            "eval_strategy": "no",
            "async_save": background,
        },
    }
    run = train(folder, f"{mode}-{background}", settings)
    saves, totals = rows_of(run, "save"), read_json(run.training_metrics)
    assert saves and all("failed" not in save for save in saves), saves
    figures = {name: median(save[f"{name}_seconds"] for save in saves) for name in ("pause", "write", "verify")}
    figures |= {"step": totals["training_seconds"] / totals["steps"], "bytes": saves[-1]["bytes"]}
    figures["share"] = figures["verify"] / max(figures["pause"], figures["write"] + figures["verify"], 1e-9)
    return figures


def table(figures: Mapping[tuple[str, bool], Mapping[str, float]], every: int) -> tuple[str, bool]:
    """Return the figures as Markdown, and whether verification meets its goal in every run that waits."""
    head = [
        "tuning",
        "saved",
        "checkpoint",
        "a step",
        "pause",
        "pause without verification",
        "pause in steps",
        f"of the time, saving every {every} steps",
        "verification",
        "its share of a save",
    ]
    rows = []
    for (mode, background), row_figures in figures.items():
        pause, step, verify = row_figures["pause"], row_figures["step"], row_figures["verify"]
        rows.append(
            [
                MODES[mode],
                "in the background" if background else "while training waits",
                f"{row_figures['bytes'] / 2**20:,.0f} MiB",
                f"{step:.2f} s",
                f"{pause:.2f} s",
                f"{pause - (0 if background else verify):.2f} s",
                f"{pause / step:.2f}",
                f"{pause / (pause + every * step):.1%}",
                f"{verify:.2f} s",
                f"{row_figures['share']:.1%}",
            ]
        )
    worst = max(row_figures["share"] for (_, background), row_figures in figures.items() if not background)
    good = worst < GOAL
    goal = (
        f"Goal: verification under {GOAL:.0%} of a save while training waits: {'kept' if good else 'missed'}"
        f" ({worst:.1%})."
    )
    lines = [f"{date_and_machine()}:", "", *markdown(head, rows), "", goal]
    return "\n".join(lines), good


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
