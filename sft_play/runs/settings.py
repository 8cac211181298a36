"""The keys of a configuration that a run keeps to its end: a stamp holds their values, and a resume may change only the others."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from sft_play.config.schema import Config

CHANGEABLE = frozenset({
    "train.max_steps", "train.epochs", "train.save_strategy", "train.save_steps", "train.save_total_limit",
    "train.logging_steps", "train.eval_strategy", "train.eval_steps", "train.dataloader_num_workers",
    "train.dataloader_pin_memory", "train.batch_size", "train.grad_accum", "train.gradient_checkpointing", "eval.batch_size",
    "train.async_save", "train.kernels", "train.spike_guard", "train.spike_factor",
    "launch.timeout_seconds", "launch.max_oom_retries", "launch.hang_seconds", "launch.max_restarts", "launch.auto_resume",
    "launch.balance", "launch.elastic", "launch.join_seconds", "launch.network", "launch.slow_network",
})  # fmt: skip
"""Keys that a resumed run may change: none of them changes an update that has been made."""
STAMPED = ("model.", "tuning.", "data.", "train.seed", "train.global_batch_size", "launch.strategy")
"""Keys that the stamp holds in fields of their own: comparing those gives the better message."""
SECTIONS = ("train", "eval", "launch")
"""Sections whose other keys a stamp holds one by one."""
AS_PLANNED = frozenset({"train.packing"})
"""Keys that a repeated run is given as the plan decided them (`make stamp`, `run it again`); the plan's facts stand in the stamp."""


def kept_settings(config: Config) -> dict[str, Any]:
    """Returns dotted key -> value, as JSON has it, of what a run keeps and no other field of its stamp holds."""
    found: dict[str, Any] = {}
    for name in SECTIONS:
        section = getattr(config, name)
        for item in fields(section):
            key = f"{name}.{item.name}"
            if key not in CHANGEABLE | AS_PLANNED and not key.startswith(STAMPED):
                value = getattr(section, item.name)
                found[key] = json.loads(json.dumps(dict(value) if item.name == "extra" else value))
    return found
