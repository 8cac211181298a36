"""`metrics.jsonl`: one row per logging step, evaluation and save, each step once, also after a resume."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from sft_play.files import read_json_lines, write_text
from sft_play.runs.space import describe

TRAIN_KEYS = ("loss", "rank_loss", "rank_tokens", "rank_rows", "grad_norm", "learning_rate", "tokens_per_second")
ROWS_KEPT = 10_000
"""Rows that wait for room on the disk, at most; the oldest go first."""


def rows_until(path: Path, step: int) -> list[dict[str, Any]]:
    """Returns the whole rows of a metrics file up to and including `step`; a torn last line is left out."""
    return [row for row in read_json_lines(path) if "kind" in row and isinstance(row.get("step"), int) and row["step"] <= step]


def saving_totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns what saving took in a whole run, resumes included, of the rows of `metrics.jsonl`: `training_metrics.json` has it as `saving`.

    `pause_seconds`: how long training stood still, for saves that failed too.
    """
    saves = [row for row in rows if row.get("kind") == "save"]
    failed = sum("failed" in row for row in saves)
    parts = ("pause_seconds", "write_seconds", "verify_seconds", "bytes")
    return {"saved": len(saves) - failed, "failed": failed, **{part: sum(row.get(part) or 0 for row in saves) for part in parts}}


def finite(value: Any) -> Any:
    """Returns `value` with what JSON cannot say (NaN, infinity) as `None`."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


class MetricsFile(TrainerCallback):
    """Appends what is logged to `metrics.jsonl`; drops rows of steps that a resumed run makes again.

    Rows for which the disk has no room wait in memory and are written, in their order, when there is some again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: deque[str] = deque(maxlen=ROWS_KEPT)
        self._warned = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step and not self.path.is_file() and state.is_world_process_zero:
            print(
                f"warning: {self.path}: it is gone; it begins again after step {state.global_step}", file=sys.stderr, flush=True
            )
        # From the start again nothing is kept, not even an evaluation before the first step.
        rows = rows_until(self.path, state.global_step) if state.global_step else []
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in rows))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        logs = logs or {}
        if "rank_loss" in logs:
            row = {"kind": "train", "step": state.global_step, "epoch": logs.get("epoch")}
            own = {"rank_grad_norm": finite(logs["rank_grad_norm"])} if "rank_grad_norm" in logs else {}
            self.add(row | {key: finite(logs.get(key)) for key in TRAIN_KEYS} | own)
        elif "eval_loss" in logs:
            row = {"kind": "eval", "step": state.global_step, "epoch": logs.get("epoch")}
            self.add(row | {k: finite(v) for k, v in logs.items() if k.startswith("eval_")})

    def add(self, row: Mapping[str, Any]) -> None:
        """Appends one row, after those that wait."""
        self.waiting.append(json.dumps(row, ensure_ascii=False) + "\n")
        try:
            append_whole(self.path, "".join(self.waiting).encode("utf-8"))
        except OSError as error:
            if not self._warned:
                kept = f"up to {ROWS_KEPT:,} rows wait in memory until there is room; training goes on"
                print(f"warning: {self.path}: {describe(error)}; {kept}", file=sys.stderr, flush=True)
            self._warned = True
            return
        self.waiting.clear()
        self._warned = False


def append_whole(path: Path, content: bytes) -> None:
    """Appends all of `content` in one write or nothing: half a line would spoil the next. Raises `OSError`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        before = os.fstat(descriptor).st_size
        written = os.write(descriptor, content)
        if written < len(content):
            os.ftruncate(descriptor, before)  # takes no space
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)
