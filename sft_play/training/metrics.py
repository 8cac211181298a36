"""`metrics.jsonl`: one row per logging step and evaluation, each step once, also after a resume."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from sft_play.files import append_json_line, write_text

TRAIN_KEYS = ("loss", "rank_loss", "rank_tokens", "grad_norm", "learning_rate", "tokens_per_second")


def rows_until(path: Path, step: int) -> list[dict[str, Any]]:
    """Returns the whole rows of a metrics file up to and including `step`; a torn last line is left out."""
    rows = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").split("\n"):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if row.get("step", 0) <= step:
                rows.append(row)
    return rows


def finite(value: Any) -> Any:
    """Returns `value` with what JSON cannot say (NaN, infinity) as `None`."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


class MetricsFile(TrainerCallback):
    """Appends what is logged to `metrics.jsonl`; drops rows of steps that a resumed run makes again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # From the start again nothing is kept, not even an evaluation before the first step.
        rows = rows_until(self.path, state.global_step) if state.global_step else []
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in rows))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        logs = logs or {}
        if "rank_loss" in logs:
            row = {"kind": "train", "step": state.global_step, "epoch": logs.get("epoch")}
            append_json_line(self.path, row | {key: finite(logs.get(key)) for key in TRAIN_KEYS})
        elif "eval_loss" in logs:
            row = {"kind": "eval", "step": state.global_step, "epoch": logs.get("epoch")}
            append_json_line(self.path, row | {k: finite(v) for k, v in logs.items() if k.startswith("eval_")})
