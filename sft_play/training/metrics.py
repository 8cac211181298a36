"""`metrics.jsonl` and the progress lines: one row per logging step, evaluation and save, each step once, also after a resume."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from transformers import TrainerCallback

from sft_play.errors import HardwareError
from sft_play.files import append_text, disk_problem, finite, read_json_lines, write_text
from sft_play.runs.progress import line_of

TRAIN_KEYS = ("loss", "grad_norm", "learning_rate", "tokens_per_second", "step_seconds", "mfu")
"""... and whatever is known of each rank (`rank_...`) or machine (`node_...`)."""
ROWS_KEPT = 10_000
"""Rows that wait for room on the disk, at most; the oldest go first."""


def rows_until(path: Path, step: int) -> list[dict[str, Any]]:
    """Returns the complete rows of a metrics file up to and including `step`, without a torn last line."""
    return [row for row in read_json_lines(path) if "kind" in row and isinstance(row.get("step"), int) and row["step"] <= step]


def saving_totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns what saving took in a run, resumes included, from the rows of `metrics.jsonl`; it is `saving` in `training_metrics.json`.

    `pause_seconds`: how long training stood still, for saves that failed too.
    """
    saves = [row for row in rows if row.get("kind") == "save"]
    failed = sum("failed" in row for row in saves)
    parts = ("pause_seconds", "write_seconds", "verify_seconds", "bytes")
    return {"saved": len(saves) - failed, "failed": failed, **{part: sum(row.get(part) or 0 for row in saves) for part in parts}}


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
            self.add(row | {k: finite(v) for k, v in logs.items() if k in TRAIN_KEYS or k.startswith(("rank_", "node_"))})
        elif "eval_loss" in logs:
            row = {"kind": "eval", "step": state.global_step, "epoch": logs.get("epoch")}
            self.add(row | {k: finite(v) for k, v in logs.items() if k.startswith("eval_")})

    def add(self, row: Mapping[str, Any]) -> None:
        """Appends one row, after those that wait."""
        self.waiting.append(json.dumps(row, ensure_ascii=False) + "\n")
        try:
            append_text(self.path, "".join(self.waiting), sync=False)
        except OSError as error:
            if not self._warned:
                kept = f"up to {ROWS_KEPT:,} rows wait in memory until there is room; training continues"
                print(f"warning: {self.path}: {disk_problem(error)}; {kept}", file=sys.stderr, flush=True)
            self._warned = True
            return
        self.waiting.clear()
        self._warned = False


SECONDS_BETWEEN_LINES = 10.0


class Progress(TrainerCallback):
    """A plain line now and then, in the log and on the console; where the launcher shows a panel, the console gets evaluations only."""

    def __init__(self, console: TextIO | None, log: TextIO, *, panel: bool = False) -> None:
        self.console, self.log, self.panel = console, log, panel
        """The rank's log alone: what is written there does not come on the console as well."""
        self.told = 0.0
        self.rows: deque[dict[str, Any]] = deque(maxlen=51)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.told = 0.0
        self.rows.clear()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        row = {**(logs or {}), "step": state.global_step}
        if "rank_loss" in row:
            self.rows.append(row | {"kind": "train"})
            if (
                len(self.rows) == 1
                or state.global_step == state.max_steps
                or time.monotonic() - self.told >= SECONDS_BETWEEN_LINES
            ):
                self.told = time.monotonic()
                self._write(line_of(self.rows, state.max_steps), [self.log] if self.panel else [self.log, self.console])
        elif "eval_loss" in row:
            self._write(line_of([row | {"kind": "eval"}], state.max_steps), [self.log, self.console])

    def _write(self, text: str, streams: Sequence[TextIO | None]) -> None:
        for stream in streams:
            if stream is not None:
                stream.write(text + "\n")
                stream.flush()


SIZE, TRIES = 768, 4
"""A CPU's peak is measured by this many fp32 products of square matrices of this size: about 50 ms."""


def operations_per_token(model: Any) -> int:
    """Returns the operations of one token, forward and backward.

    For a weight 2 forward, 2 for the gradient by its input, and 2 more for its own gradient when it is trained (PaLM, appendix
    B, without attention's own products). An embedding that is not the head too is only looked up. Of a part of a model: the part's.
    """
    looked_up = None if getattr(model.config.get_text_config(), "tie_word_embeddings", False) else model.get_input_embeddings()
    table = next(iter(looked_up.parameters()), None) if looked_up is not None else None
    return sum((6 if p.requires_grad else 4) * weights_in(p) for p in model.parameters() if p is not table)


def weights_in(parameter: Any) -> int:
    """Returns the weights that a parameter stands for: all of a shard's whole, both of a byte's two."""
    packed = getattr(parameter, "quant_state", None)
    if packed is not None:
        return int(torch.Size(packed.shape).numel())
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def peak_operations(device: str) -> float | None:
    """Returns a device's operations per second: a GPU's in bf16 by its data sheet, a CPU's in fp32 by a short measurement.

    `None` for a GPU that the table does not know.
    """
    if device == "cuda":
        from sft_play.plan.detect import detect

        try:
            devices = detect().devices
        except HardwareError:  # the driver's figures are never worth a run
            return None
        return devices[int(os.environ.get("LOCAL_RANK", "0")) % len(devices)].peak_flops
    left, right = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)), torch.eye(SIZE)
    best = float("inf")
    for _ in range(TRIES):
        started = time.perf_counter()
        torch.mm(left, right)
        best = min(best, time.perf_counter() - started)
    return 2 * SIZE**3 / best
