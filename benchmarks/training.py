"""`make bench-training`: compare time and memory with transformers' `Trainer` and TRL's `SFTTrainer`.

    python -m benchmarks.training [pairs=5] [steps=8] [write=docs/benchmarks.md]

Every measurement is a new process. The others get our prepared rows, labels, order, adapters and optimizer, and all
losses must agree, so the same work is timed. One measurement of each, in turn, makes a pair; medians are compared.
`python -m benchmarks.training KIND SPEC.json OUT.json` is one measurement of another trainer.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import (
    MODEL,
    date_and_machine,
    markdown,
    options_of,
    publish,
    rows_of,
    run_measured,
    train,
    write_rows,
)
from sft_play.files import read_json, write_json
from sft_play.plan.epoch import RowOrder
from sft_play.plan.plan import Plan
from sft_play.runs.folder import RunFolder
from sft_play.runs.prepared import Prepared

BATCH_SIZE = 4
SEED = 42
LORA = {"r": 16, "alpha": 32}
LEARNING_RATE = 1e-4
LOSS_TOLERANCE = 1e-3
OURS = "SFT-Play"
NAMES = {
    OURS: OURS,
    "trainer": "transformers `Trainer`",
    "trl": "TRL `SFTTrainer`",
    "trl-no-recompute": "TRL `SFTTrainer` without recomputation",
}
GOALS = {"trainer": (0.75, 0.7), "trl": (0.55, 0.5)}
"""Other trainer -> the largest allowed share of its time, and the share that we aim at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One training in one process."""

    seconds: float
    """The training loop, without loading."""
    peak_bytes: int
    """Peak resident memory of the training process, or GPU memory if there is a GPU."""
    losses: tuple[float, ...]


def main(arguments: Sequence[str]) -> int:
    """Measure and publish; return 1 if losses differ or a bound is missed."""
    if arguments and arguments[0] in NAMES:
        return train_other(*arguments)
    numbers, document = options_of(arguments, pairs=5, steps=8)
    with tempfile.TemporaryDirectory(prefix="bench-training-") as folder:
        measurements = measure(Path(folder), numbers["pairs"], numbers["steps"])
    text, good = table(measurements, numbers["pairs"], numbers["steps"])
    publish(text, document)
    return 0 if good else 1


def measure(folder: Path, pairs: int, steps: int) -> dict[str, list[Measurement]]:
    """Return `pairs` measurements of each trainer, interleaved."""
    settings = {
        "model": {"name": MODEL, "max_seq_len": 512},
        "tuning": {"mode": "lora", "lora": LORA},
        "data": {"train_path": write_rows(folder / "rows.jsonl", steps * BATCH_SIZE)},
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
    measurements: dict[str, list[Measurement]] = {name: [] for name in NAMES}
    for pair in range(pairs):
        run = train(folder, f"pair-{pair}", settings)
        metrics = read_json(run.training_metrics)
        ours = Measurement(
            seconds=metrics["train_runtime"],
            peak_bytes=metrics["peak_memory_bytes"],
            losses=tuple(row["loss"] for row in rows_of(run, "train")),
        )
        for name in NAMES:
            measurement = ours if name == OURS else measure_other(name, folder, run, steps)
            measurements[name].append(measurement)
            memory = measurement.peak_bytes / 2**30
            print(
                f"pair {pair + 1}: {name:<18}{measurement.seconds:7.2f} s  {memory:5.2f} GiB",
                file=sys.stderr,
                flush=True,
            )
    return measurements


def measure_other(kind: str, folder: Path, run: RunFolder, steps: int) -> Measurement:
    """Train with another trainer on the rows that our run prepared, in our order."""
    spec, out = folder / "spec.json", folder / "other.json"
    write_json(spec, spec_of(run, folder, steps))
    peak = run_measured([sys.executable, "-m", "benchmarks.training", kind, str(spec), str(out)], {})
    result = read_json(out)
    return Measurement(
        seconds=result["seconds"], peak_bytes=result["device_peak_bytes"] or peak, losses=tuple(result["losses"])
    )


def spec_of(run: RunFolder, folder: Path, steps: int) -> dict[str, Any]:
    """Return the specification by which `train_other` repeats `run`: rows, order, model, precision and optimizer."""
    plan, prepared = Plan.load(run.plan), Prepared.load(run.prepared)
    assert prepared.train is not None
    shared = {
        "output_dir": str(folder / "other"),
        "per_device_train_batch_size": BATCH_SIZE,
        "max_steps": steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "optim": plan.optim,
        "seed": SEED,
        "bf16": plan.precision == "bf16",
        "use_cpu": plan.device == "cpu",
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return {
        "rows": prepared.train.path,
        "order": RowOrder(rows=prepared.train.rows, seed=SEED)(0),
        "model": prepared.model.path,
        "weights_dtype": plan.weights_dtype,
        "arguments": shared,
    }


def train_other(kind: str, spec_path: str, out: str) -> int:
    """Train on the rows of a specification in their order and write `{"seconds", "losses", "device_peak_bytes"}`."""
    import datasets
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    spec = read_json(Path(spec_path))
    rows = datasets.load_from_disk(spec["rows"]).select_columns(["input_ids", "labels"]).select(spec["order"])
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    set_seed(SEED)
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=getattr(torch, spec["weights_dtype"]))
    model.config.use_cache = False
    model.requires_grad_(False)
    set_seed(SEED)
    lora = LoraConfig(r=LORA["r"], lora_alpha=LORA["alpha"], target_modules="all-linear", task_type="CAUSAL_LM")
    parts = {"model": get_peft_model(model, lora), "train_dataset": rows, "processing_class": tokenizer}
    if kind == "trainer":  # as in transformers' examples: rows padded to the longest of the batch, with all defaults
        collator = DataCollatorForSeq2Seq(tokenizer, padding=True, label_pad_token_id=-100)
        trainer = Trainer(args=TrainingArguments(**spec["arguments"]), data_collator=collator, **parts)
    else:  # with its defaults, which recompute activations
        from trl import SFTConfig, SFTTrainer

        own = {"gradient_checkpointing": False} if kind == "trl-no-recompute" else {}
        trainer = SFTTrainer(args=SFTConfig(**spec["arguments"], max_length=None, **own), **parts)
    metrics = trainer.train().metrics
    result = {
        "seconds": metrics["train_runtime"],
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "device_peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
    }
    Path(out).write_text(json.dumps(result))
    return 0


def table(measurements: dict[str, list[Measurement]], pairs: int, steps: int) -> tuple[str, bool]:
    """Return the table as markdown, and whether losses agree and all bounds hold."""
    ours, rows, good = measurements[OURS], list[list[str]](), True
    our_seconds, our_memory = median(m.seconds for m in ours), median(m.peak_bytes for m in ours)
    for name, values in measurements.items():
        seconds, memory = median(m.seconds for m in values), median(m.peak_bytes for m in values)
        shares = [our_seconds / seconds, our_memory / memory]
        difference = max(
            abs(a - b) for mine in ours for other in values for a, b in zip(mine.losses, other.losses, strict=True)
        )
        compared = ["", "", ""] if name == OURS else [*(f"{share:.2f}" for share in shares), f"{difference:.1e}"]
        rows.append([NAMES[name], f"{seconds:.1f}", compared[0], f"{memory / 2**30:.2f} GiB", *compared[1:]])
        bound = GOALS.get(name, (1.0, 1.0))[0]
        good = good and shares[0] <= bound and difference <= LOSS_TOLERANCE and (name != "trainer" or shares[1] <= 1.0)
    bounds = ", ".join(f"{NAMES[name]} {bound} (goal {goal})" for name, (bound, goal) in GOALS.items())
    head = [
        "trainer",
        "seconds",
        "ours / theirs",
        "peak memory",
        "ours / theirs",
        "largest difference of a step's loss",
    ]
    lines = [f"{date_and_machine()}; {steps} steps of {BATCH_SIZE} rows, medians of {pairs} interleaved pairs:", ""]
    lines += [*markdown(head, rows), ""]
    lines.append(
        f"Bounds on our time: {bounds}; memory at most the `Trainer`'s. {'All hold.' if good else 'NOT ALL HOLD.'}"
    )
    return "\n".join(lines), good


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
