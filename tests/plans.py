"""Plans and prepared models for tests that drive one layer alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sft_play.plan.plan import Plan
from sft_play.runs.prepared import Prepared, ResolvedModel


def simple_plan(**changes: Any) -> Plan:
    """Returns the plan of one fp32 process on the CPU, with `changes`."""
    values: dict[str, Any] = {
        "world_size": 1, "num_nodes": 1, "device": "cpu", "backend": "none", "strategy": "single", "source": "formula",
        "precision": "fp32", "weights_dtype": "float32", "attn_implementation": "sdpa", "layout": "flattened",
        "gradient_checkpointing": False, "optim": "adamw_torch", "learning_rate": 2e-4, "ranks": (), "global_batch_size": 8,
        "steps": 4, "steps_per_epoch": 4, "warmup_steps": 0, "eval_batch_size": 4, "tokens_per_second": None,
        "communication_share": None, "seconds_per_step": None, "total_seconds": None, "reasons": (), "remedies": (),
    }  # fmt: skip
    return Plan(**(values | changes))


def prepared_model(folder: Path, **changes: Any) -> Prepared:
    """Returns what preparation says about a model folder, without data."""
    values: dict[str, Any] = {
        "name": str(folder), "path": str(folder), "source": "folder", "revision": None, "fingerprint": "f",
        "tokenizer_fingerprint": "t",
    }  # fmt: skip
    return Prepared(model=ResolvedModel(**(values | changes)), train=None, validation=None)
