"""`make bench-saving`: what a save takes, its share of a step, with and without verification, waiting and in the background.

    python -m benchmarks.saving [steps=6] [every=2] [write=docs/benchmarks-saving.md]

Trains the embedded model of 135 million weights through `python -m sft_play train`, as a user does, and reads what the run says of its
saves. Training that waits for its saves and training that does not take turns.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.options import options_of
from benchmarks.training import MODEL, describe_machine, run_measured
from sft_play.data.datasets import read_builtin
from sft_play.files import read_json, write_json, write_text
from sft_play.runs.folder import RunFolder

MODES = {"lora": "LoRA (r 16)", "full": "full tuning"}
BATCH_SIZE, LENGTH = 2, 256
GOAL = 0.10
"""The most that verification may be of a save's time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """One run: medians over its saves, seconds and bytes."""

    step_seconds: float
    """Of a training step, saves left out."""
    pause: float
    """How long training stood still for a save."""
    write: float
    verify: float
    size: int

    @property
    def whole(self) -> float:
        """Writing and verification, wherever they took place."""
        return self.write + self.verify

    @property
    def share(self) -> float:
        """Verification's share of a save."""
        return self.verify / max(self.pause, self.whole, 1e-9)


def main(arguments: Sequence[str]) -> int:
    """Measures, prints the table, and writes it when asked; 1 when verification takes more than its goal."""
    options = options_of(arguments, steps=6, every=2)
    if options is None:
        return 2
    numbers, document = options
    steps, every = numbers["steps"], numbers["every"]
    found: dict[tuple[str, bool], Found] = {}
    with tempfile.TemporaryDirectory(prefix="bench-saving-", dir=os.environ.get("RUNS_DIR") or None) as folder:
        for mode in MODES:
            for background in (False, True):
                started = time.perf_counter()
                one = found[mode, background] = measure(Path(folder), mode, steps, every, background=background)
                said = f"{mode}, {'in the background' if background else 'waiting'}: pause {one.pause:.2f} s"
                said += f", verification {one.verify:.2f} s (all {time.perf_counter() - started:.0f} s)"
                print(said, file=sys.stderr, flush=True)
    text, good = table(found, every)
    print(text)
    if document:
        write_text(Path(document), page(text))
    return 0 if good else 1


def measure(folder: Path, mode: str, steps: int, every: int, *, background: bool) -> Found:
    """Trains `steps` steps with a save after each `every`."""
    run = RunFolder(folder / "runs" / f"{mode}-{background}")
    rows = [row for _, row in zip(range(4 * BATCH_SIZE), read_builtin("docstrings", "train"), strict=False)]
    write_text(folder / "rows.jsonl", "".join(json.dumps(dict(row)) + "\n" for _, row in rows))
    config: dict[str, Any] = {
        "model": {"name": MODEL, "max_seq_len": LENGTH},
        "tuning": {"mode": mode, "lora": {"r": 16, "alpha": 32}},
        "data": {"train_path": str(folder / "rows.jsonl"), "overlong": "truncate"},
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
    write_json(folder / "bench.yaml", config)  # JSON is YAML
    command = [sys.executable, "-m", "sft_play", "train", f"CONFIG={folder / 'bench.yaml'}", f"RUN_NAME={run.name}"]
    run_measured(command, {"RUNS_DIR": str(run.path.parent)})
    lines = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    saves = [line for line in lines if line["kind"] == "save"]
    assert saves and all("failed" not in one for one in saves), saves
    totals = read_json(run.training_metrics)
    return Found(
        step_seconds=totals["training_seconds"] / totals["steps"],
        pause=median(one["pause_seconds"] for one in saves),
        write=median(one["write_seconds"] for one in saves),
        verify=median(one["verify_seconds"] for one in saves),
        size=saves[-1]["bytes"],
    )


def table(found: dict[tuple[str, bool], Found], every: int) -> tuple[str, bool]:
    """Returns the figures as Markdown, and whether verification keeps its goal in every run that waits."""
    lines = [
        "| tuning | saved | checkpoint | a step | pause | pause without verification | pause in steps "
        f"| of the time, saving every {every} steps | verification | its share of a save |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (mode, background), one in found.items():
        without = one.pause if background else one.pause - one.verify
        lines.append(
            f"| {MODES[mode]} | {'in the background' if background else 'while training waits'} | {one.size / 2**20:,.0f} MiB "
            f"| {one.step_seconds:.2f} s | {one.pause:.2f} s | {without:.2f} s | {one.pause / one.step_seconds:.2f} "
            f"| {one.pause / (one.pause + every * one.step_seconds):.1%} | {one.verify:.2f} s | {one.share:.1%} |"
        )
    worst = max(one.share for (_, background), one in found.items() if not background)
    good = worst < GOAL
    lines += [
        "",
        f"Goal: verification under {GOAL:.0%} of a save while training waits: {'kept' if good else 'missed'} ({worst:.1%}).",
    ]
    return "\n".join(lines), good


def page(text: str) -> str:
    """Returns the document."""
    return f"""# Saving: what it takes

Written by `python -m benchmarks.saving write=docs/benchmarks-saving.md`; do not edit by hand. `make bench-saving` prints the same.

{date.today()}, SmolLM2-135M-Instruct, batches of {BATCH_SIZE} rows of up to {LENGTH} tokens, {describe_machine()}. Medians over the saves
of one run each.

{text}

*Pause*: how long training stands still for a save. *Verification*: taking and comparing the checksums of all files. While training waits,
that reads what the kernel holds in memory; in the background the disk is read first.
"""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
