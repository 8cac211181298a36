"""One measurement of another trainer in a fresh process: `python -m benchmarks.baselines KIND SPEC.json OUT.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

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


def main() -> int:
    """Trains on the rows of SPEC in their order and writes `{"seconds", "losses", "label_tokens", "device_peak_bytes"}`."""
    kind, spec_path, out = sys.argv[1:]
    spec = json.loads(Path(spec_path).read_text())
    rows = datasets.load_from_disk(spec["rows"]).select_columns(["input_ids", "labels"]).select(spec["order"])
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    set_seed(spec["seed"])
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=getattr(torch, spec["weights_dtype"]))
    model.config.use_cache = False
    model.requires_grad_(False)
    set_seed(spec["seed"])
    lora = LoraConfig(r=spec["r"], lora_alpha=spec["alpha"], target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = TRAINERS[kind](get_peft_model(model, lora), tokenizer, rows, spec)
    metrics = trainer.train().metrics
    result = {
        "seconds": metrics["train_runtime"],
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "label_tokens": sum(label != -100 for labels in rows["labels"] for label in labels[1:]),
        "device_peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
    }
    Path(out).write_text(json.dumps(result))
    return 0


def _arguments(spec: dict[str, Any]) -> dict[str, Any]:
    """Returns what all trainers must share for the same work: rows, order, steps, optimizer, precision."""
    return {
        "output_dir": spec["folder"],
        "per_device_train_batch_size": spec["batch_size"],
        "max_steps": spec["steps"],
        "learning_rate": spec["learning_rate"],
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "optim": spec["optim"],
        "seed": spec["seed"],
        "bf16": spec["bf16"],
        "use_cpu": spec["cpu"],
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def _plain_trainer(model: Any, tokenizer: Any, rows: Any, spec: dict[str, Any]) -> Any:
    """transformers' `Trainer` as its examples use it: rows padded to the longest of the batch, all its defaults."""
    return Trainer(
        model=model,
        args=TrainingArguments(**_arguments(spec)),
        train_dataset=rows,
        data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True, label_pad_token_id=-100),
        processing_class=tokenizer,
    )


def _trl(model: Any, tokenizer: Any, rows: Any, spec: dict[str, Any]) -> Any:
    """TRL's `SFTTrainer` with its defaults (recomputes activations), on the same labels."""
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(
        model=model,
        args=SFTConfig(**_arguments(spec), max_length=None),
        train_dataset=rows,
        processing_class=tokenizer,
    )


def _trl_without_recomputation(model: Any, tokenizer: Any, rows: Any, spec: dict[str, Any]) -> Any:
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(
        model=model,
        args=SFTConfig(**_arguments(spec), max_length=None, gradient_checkpointing=False),
        train_dataset=rows,
        processing_class=tokenizer,
    )


TRAINERS = {"trainer": _plain_trainer, "trl": _trl, "trl-no-recompute": _trl_without_recomputation}

if __name__ == "__main__":
    sys.exit(main())
