"""`make bench-training`: training on ragged instruction data beside transformers' `Trainer` and TRL's `SFTTrainer`.

    python -m benchmarks.training [pairs=5] [steps=8] [write=docs/benchmarks.md]

Every measurement is a fresh process. The competitors get our prepared rows, labels, order, adapters and optimizer, and the
losses of all must agree, so the same work is timed. One measurement of each, in turn, makes a pair; the medians are compared.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.options import options_of
from sft_play.data.batches import GlobalBatchSampler
from sft_play.data.datasets import read_builtin
from sft_play.files import read_json, write_json, write_text
from sft_play.plan.hardware import cpu_threads
from sft_play.plan.plan import Plan
from sft_play.runs.folder import RunFolder
from sft_play.runs.prepared import Prepared

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
BATCH_SIZE = 4
SEED = 42
LORA = {"r": 16, "alpha": 32}
LEARNING_RATE = 1e-4
TIMEOUT_SECONDS = 1800
LOSS_TOLERANCE = 1e-3
OURS = "SFT-Play"
NAMES = {
    OURS: OURS,
    "trainer": "transformers `Trainer`",
    "trl": "TRL `SFTTrainer`",
    "trl-no-recompute": "TRL `SFTTrainer` without recomputation",
}
GOALS = {"trainer": (0.75, 0.7), "trl": (0.55, 0.5)}
"""Competitor -> the most that our share of its time may be, and what we aim at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One training in one process."""

    seconds: float
    """The training loop, without loading."""
    peak_bytes: int
    """Most resident memory of the training process; of the GPU where there is one."""
    losses: tuple[float, ...]


def main(arguments: Sequence[str]) -> int:
    """Measures, prints the table, and writes it when asked; 1 when losses differ or a goal is missed."""
    options = options_of(arguments, pairs=5, steps=8)
    if options is None:
        return 2
    numbers, document = options
    pairs, steps = numbers["pairs"], numbers["steps"]
    with tempfile.TemporaryDirectory(prefix="bench-training-") as folder:
        found = measure(Path(folder), pairs, steps)
    text, good = table(found, pairs, steps)
    print(text)
    if document:
        write_text(Path(document), page(text))
    return 0 if good else 1


def measure(folder: Path, pairs: int, steps: int) -> dict[str, list[Measurement]]:
    """Returns `pairs` measurements of each trainer, interleaved."""
    config = write_config(folder, steps)
    found: dict[str, list[Measurement]] = {name: [] for name in NAMES}
    for pair in range(pairs):
        for name in NAMES:
            run = RunFolder(folder / "runs" / f"pair-{pair}")
            one = measure_ours(config, run) if name == OURS else measure_other(name, folder, run, steps)
            found[name].append(one)
            memory = one.peak_bytes / 2**30
            print(f"pair {pair + 1}: {name:<18}{one.seconds:7.2f} s  {memory:5.2f} GiB", file=sys.stderr, flush=True)
    return found


def write_config(folder: Path, steps: int) -> Path:
    """Writes the rows and the configuration of our own training."""
    rows = [row for _, row in zip(range(steps * BATCH_SIZE), read_builtin("docstrings", "train"), strict=False)]
    write_text(folder / "rows.jsonl", "".join(json.dumps(dict(row)) + "\n" for _, row in rows))
    config = {
        "model": {"name": MODEL, "max_seq_len": 512},
        "tuning": {"mode": "lora", "lora": LORA},
        "data": {"train_path": str(folder / "rows.jsonl")},
        "train": {
            "batch_size": BATCH_SIZE,
            "grad_accum": 1,
            "max_steps": steps,
            "learning_rate": LEARNING_RATE,
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
            "gradient_checkpointing": False,
            "save_strategy": "no",
            "eval_strategy": "no",
            "seed": SEED,
        },
    }
    write_json(folder / "bench.yaml", config)  # JSON is YAML
    return folder / "bench.yaml"


def measure_ours(config: Path, run: RunFolder) -> Measurement:
    """Trains through `python -m sft_play train`, as a user does, with all its logging."""
    command = [sys.executable, "-m", "sft_play", "train", f"CONFIG={config}", f"RUN_NAME={run.name}"]
    run_measured(command, {"RUNS_DIR": str(run.path.parent)})
    metrics = read_json(run.training_metrics)
    rows = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    return Measurement(
        seconds=metrics["train_runtime"],
        peak_bytes=metrics["peak_memory_bytes"],
        losses=tuple(row["loss"] for row in rows if row["kind"] == "train"),
    )


def measure_other(kind: str, folder: Path, run: RunFolder, steps: int) -> Measurement:
    """Trains with another trainer on the rows that our run prepared, in our order."""
    write_json(folder / "spec.json", spec_of(run, folder, steps))
    out = folder / "other.json"
    peak = run_measured([sys.executable, "-m", "benchmarks.baselines", kind, str(folder / "spec.json"), str(out)], {})
    result = read_json(out)
    return Measurement(seconds=result["seconds"], peak_bytes=result["device_peak_bytes"] or peak, losses=tuple(result["losses"]))


def spec_of(run: RunFolder, folder: Path, steps: int) -> dict[str, Any]:
    """Returns what `benchmarks.baselines` reads to do what `run` did: its rows in its order, its model, precision and optimizer."""
    plan, prepared = Plan.load(run.plan), Prepared.load(run.prepared)
    assert prepared.train is not None
    sampler = GlobalBatchSampler(prepared.train.rows, BATCH_SIZE, [(BATCH_SIZE, 1)], rank=0, seed=SEED)
    return {
        **LORA,
        "rows": prepared.train.path,
        "order": sampler.order(),
        "model": prepared.model.path,
        "folder": str(folder / "other"),
        "seed": SEED,
        "weights_dtype": plan.weights_dtype,
        "bf16": plan.precision == "bf16",
        "cpu": plan.device == "cpu",
        "batch_size": BATCH_SIZE,
        "steps": steps,
        "learning_rate": LEARNING_RATE,
        "optim": plan.optim,
    }


def run_measured(arguments: Sequence[str], extra: dict[str, str]) -> int:
    """Runs a command to its end and returns the most resident memory (bytes) of any process of it. Raises on failure."""
    environment = {**os.environ, "HF_HUB_DISABLE_TELEMETRY": "1", **extra}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(arguments, env=environment, stdout=output, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline:
                process.kill()
            time.sleep(0.1)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            sys.stderr.write(output.read().decode(errors="replace")[-4000:])
            raise SystemExit(f"failed with code {process.returncode}: {' '.join(arguments)}")
    return _peak(usage)


def _peak(usage: resource.struct_rusage) -> int:
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def table(found: dict[str, list[Measurement]], pairs: int, steps: int) -> tuple[str, bool]:
    """Returns the table as markdown, and whether losses agree and all bounds hold."""
    ours = found[OURS]
    work = f"{steps} steps of {BATCH_SIZE} rows, medians of {pairs} interleaved pairs"
    lines = [
        f"{time.strftime('%Y-%m-%d')}, {describe_machine()}; {work}:",
        "",
        "| trainer | seconds | ours / theirs | peak memory | ours / theirs | largest difference of a step's loss |",
        "|---|---|---|---|---|---|",
    ]
    good = True
    for name, values in found.items():
        seconds, memory = median(v.seconds for v in values), median(v.peak_bytes for v in values)
        row = f"| {NAMES[name]} | {seconds:.1f} "
        if name == OURS:
            lines.append(f"{row}| | {memory / 2**30:.2f} GiB | | |")
            continue
        time_share = median(v.seconds for v in ours) / seconds
        memory_share = median(v.peak_bytes for v in ours) / memory
        difference = loss_difference(ours, values)
        lines.append(f"{row}| {time_share:.2f} | {memory / 2**30:.2f} GiB | {memory_share:.2f} | {difference:.1e} |")
        bound, _ = GOALS.get(name, (1.0, 1.0))
        good = good and time_share <= bound and difference <= LOSS_TOLERANCE and (name != "trainer" or memory_share <= 1.0)
    bounds = ", ".join(f"{NAMES[name]} {bound} (goal {goal})" for name, (bound, goal) in GOALS.items())
    lines += ["", f"Bounds on our time: {bounds}; memory at most the `Trainer`'s. {'All hold.' if good else 'NOT ALL HOLD.'}"]
    return "\n".join(lines), good


def loss_difference(ours: Sequence[Measurement], theirs: Sequence[Measurement]) -> float:
    """Returns the largest difference between losses of the same step over all measurements."""
    assert len({len(m.losses) for m in (*ours, *theirs)}) == 1, "all trained the same number of steps"
    return max(abs(a - b) for mine in ours for other in theirs for a, b in zip(mine.losses, other.losses, strict=True))


def describe_machine() -> str:
    """Returns what the figures depend on: processors, GPU, versions."""
    import torch
    import transformers

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU, fp32"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    return f"{cpu_threads()} cores ({platform.machine()}), {device}, {versions}"


def page(text: str) -> str:
    """Return `docs/benchmarks.md`."""
    return f"{introduction('benchmarks.md')}\n\n{text}\n"


def introduction(name: str) -> str:
    """Return the part of a page of `docs/` that is written by hand, up to and including its mark."""
    before, mark, _ = (Path(__file__).parents[1] / "docs" / name).read_text(encoding="utf-8").partition("<!-- measured -->")
    return before + mark


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
