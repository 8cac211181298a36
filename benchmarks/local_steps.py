"""Measure the effect of compression and local steps on the loss of a real model and data (docs/slow-networks.md).

    python -m benchmarks.local_steps [steps=32] [rows=8] [length=96] [held=48] [seed=42] [ways=7] [write=table.md]

Trains the embedded model of 135 million weights (LoRA, r 16) on functions of the standard library with 2 ranks, through
`python -m sft_play train-distributed`, as a user does. Every run sees the same rows in the same order; what differs is
what the ranks send.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.harness import MODEL, date_and_machine, markdown, options_of, publish, rows_of, train, write_rows

WAYS: Mapping[str, Mapping[str, Any]] = {
    "every step shared (H = 1)": {},
    "`local_steps: 4`, outer step 0.7, momentum 0.9": {
        "local_steps": 4,
        "outer_learning_rate": 0.7,
        "outer_momentum": 0.9,
    },
    "`local_steps: 4`": {"local_steps": 4},
    "`local_steps: 16`, outer step 0.7, momentum 0.9": {
        "local_steps": 16,
        "outer_learning_rate": 0.7,
        "outer_momentum": 0.9,
    },
    "`local_steps: 16`": {"local_steps": 16},
    "`compression: fp16`": {"compression": "fp16"},
}
LAST = 8
"""Last steps over which the training loss is averaged."""


def main(arguments: Sequence[str]) -> int:
    """Measure and publish."""
    numbers, document = options_of(arguments, steps=32, rows=8, length=96, held=48, seed=42, ways=len(WAYS))
    results = {}
    with tempfile.TemporaryDirectory(prefix="bench-local-", dir=os.environ.get("RUNS_DIR") or None) as folder:
        for index, (name, launch) in enumerate(list(WAYS.items())[: numbers["ways"]]):
            losses, held_out = results[name] = measure(Path(folder), f"way{index}", launch, numbers)
            print(f"{name}: held-out loss {held_out:.4f}, last {losses[-1]:.4f}", file=sys.stderr, flush=True)
    publish(table(results, numbers), document)
    return 0


def measure(
    folder: Path, name: str, launch: Mapping[str, Any], numbers: Mapping[str, int]
) -> tuple[list[float], float]:
    """Train once; return the loss of each step and the final held-out loss, in nats per token."""
    settings = {
        "model": {"name": MODEL, "max_seq_len": numbers["length"]},
        "tuning": {"mode": "lora", "lora": {"r": 16, "alpha": 32}},
        "data": {
            "train_path": write_rows(folder / "rows.jsonl", 4 * numbers["steps"] * numbers["rows"]),
            "val_path": write_rows(folder / "held.jsonl", numbers["held"], "validation"),
            "overlong": "drop",
        },
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
    run = train(folder, name, settings, "train-distributed", "NUM_GPUS=2")
    return [row["loss"] for row in rows_of(run, "train")], rows_of(run, "eval")[-1]["eval_loss"]


def table(results: Mapping[str, tuple[list[float], float]], numbers: Mapping[str, int]) -> str:
    """Return the results as Markdown."""
    first_losses, base = next(iter(results.values()))
    head = ["what ranks send", f"training loss, last {LAST} steps", "held-out loss at the end", "beyond H = 1"]
    rows = [
        [name, f"{fmean(losses[-LAST:]):.4f}", f"{held_out:.4f}", f"{held_out - base:+.4f}"]
        for name, (losses, held_out) in results.items()
    ]
    heading = (
        f"{date_and_machine()}; 2 ranks, {numbers['steps']} steps of {numbers['rows']} rows of up to"
        f" {numbers['length']} tokens, LoRA r 16, learning rate 1e-3, {numbers['held']} held-out rows, seed"
        f" {numbers['seed']}; loss of the first step {first_losses[0]:.3f}:"
    )
    return "\n".join([heading, "", *markdown(head, rows)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
