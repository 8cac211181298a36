"""What compression and local steps do to the loss of a real model on real data (docs/slow-networks.md).

    python -m benchmarks.local_steps [steps=32] [rows=8] [length=96] [held=48] [seed=42] [write=table.md]

Trains the embedded model of 135 million weights (LoRA, r 16) on functions of the standard library with 2 ranks, through `python -m
sft_play train-distributed`, as a user does. Every run sees the same rows in the same order; what differs is what the ranks send.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.options import options_of
from benchmarks.training import MODEL, describe_machine, run_measured
from sft_play.data.datasets import read_builtin
from sft_play.files import write_json, write_text
from sft_play.runs.folder import RunFolder

WAYS: Mapping[str, Mapping[str, Any]] = {
    "every step shared (H = 1)": {},
    "`local_steps: 4`, outer step 0.7, momentum 0.9": {"local_steps": 4, "outer_learning_rate": 0.7, "outer_momentum": 0.9},
    "`local_steps: 4`": {"local_steps": 4},
    "`local_steps: 16`, outer step 0.7, momentum 0.9": {"local_steps": 16, "outer_learning_rate": 0.7, "outer_momentum": 0.9},
    "`local_steps: 16`": {"local_steps": 16},
    "`compression: fp16`": {"compression": "fp16"},
    "`compression: powersgd`, rank 4": {"compression": "powersgd"},
}
LAST = 8
"""Steps over which the last training loss is taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Of one run, nats per token."""

    first: float
    """Training loss of the first step, before any update."""
    last: float
    """Mean training loss of the last steps."""
    held_out: float
    """After the last step."""


def main(arguments: Sequence[str]) -> int:
    """Measures, prints the table, and writes it when asked."""
    options = options_of(arguments, steps=32, rows=8, length=96, held=48, seed=42)
    if options is None:
        return 2
    numbers, document = options
    found: dict[str, Found] = {}
    with tempfile.TemporaryDirectory(prefix="bench-local-", dir=os.environ.get("RUNS_DIR") or None) as folder:
        for index, (name, launch) in enumerate(WAYS.items()):
            started = time.perf_counter()
            one = found[name] = measure(Path(folder), f"way{index}", launch, numbers)
            took = time.perf_counter() - started
            print(f"{name}: held-out loss {one.held_out:.4f}, last {one.last:.4f} ({took:.0f} s)", file=sys.stderr, flush=True)
    text = table(found, numbers)
    print(text)
    if document:
        write_text(Path(document), text + "\n")
    return 0


def measure(folder: Path, name: str, launch: Mapping[str, Any], numbers: Mapping[str, int]) -> Found:
    """Trains once; the held-out rows are scored after the last step."""
    run = RunFolder(folder / "runs" / name)
    for split, file, most in (
        ("train", "rows.jsonl", 4 * numbers["steps"] * numbers["rows"]),
        ("validation", "held.jsonl", numbers["held"]),
    ):
        rows = [row for _, row in zip(range(most), read_builtin("docstrings", split), strict=False)]
        write_text(folder / file, "".join(json.dumps(dict(row)) + "\n" for _, row in rows))
    config: dict[str, Any] = {
        "model": {"name": MODEL, "max_seq_len": numbers["length"]},
        "tuning": {"mode": "lora", "lora": {"r": 16, "alpha": 32}},
        "data": {"train_path": str(folder / "rows.jsonl"), "val_path": str(folder / "held.jsonl"), "overlong": "drop"},
        "train": {
            "global_batch_size": numbers["rows"],
            "max_steps": numbers["steps"],
            "learning_rate": 1e-3,
            "warmup_steps": 2,
            "save_strategy": "no",
            "eval_strategy": "steps",
            "eval_steps": numbers["steps"],
            "predict_with_generate": False,
            "seed": numbers["seed"],
        },
        "launch": {**launch, "balance": "off"},
    }
    path = folder / f"{name}.yaml"
    write_json(path, config)  # JSON is YAML
    command = [sys.executable, "-m", "sft_play", "train-distributed", f"CONFIG={path}", f"RUN_NAME={run.name}", "NUM_GPUS=2"]
    run_measured(command, {"RUNS_DIR": str(run.path.parent), "CUDA_VISIBLE_DEVICES": ""})
    lines = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    scores = [line["eval_loss"] for line in lines if line["kind"] == "eval"]
    return Found(first=losses[0], last=fmean(losses[-LAST:]), held_out=scores[-1])


def table(found: Mapping[str, Found], numbers: Mapping[str, int]) -> str:
    """Returns the figures as Markdown."""
    base = next(iter(found.values()))
    lines = [
        f"{time.strftime('%Y-%m-%d')}, {describe_machine()}; 2 ranks, {numbers['steps']} steps of {numbers['rows']} rows of up to "
        f"{numbers['length']} tokens, LoRA r 16, learning rate 1e-3, {numbers['held']} held-out rows, seed {numbers['seed']}; "
        f"loss of the first step {base.first:.3f}:",
        "",
        f"| what ranks send | training loss, last {LAST} steps | held-out loss at the end | beyond H = 1 |",
        "|---|---|---|---|",
    ]
    for name, one in found.items():
        lines.append(f"| {name} | {one.last:.4f} | {one.held_out:.4f} | {one.held_out - base.held_out:+.4f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
