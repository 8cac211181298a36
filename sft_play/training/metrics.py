"""`metrics.jsonl` and the progress lines: one row per logging step, evaluation and save, each step once, also after a resume."""

from __future__ import annotations

import errno
import json
import math
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
from sft_play.files import read_json_lines, write_text
from sft_play.runs.evaluations import label_of_metric
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


# The progress of a run in rank 0's log and on its console: step, loss, tokens/s and time left.


SECONDS_BETWEEN_LINES = 10.0
NOT_OF_ANSWERS = ("loss", "perplexity", "label_tokens", "loss_rows_per_second")


def evaluation_line(logs: Mapping[str, Any]) -> str:
    """Returns an evaluation in one line: loss, loss of each source, every score of answers, how many were answered."""
    parts = [f"held-out loss {logs['eval_loss']:.4f}"]
    parts += [f"{name.removeprefix('eval_loss/')} {value:.4f}" for name, value in logs.items() if name.startswith("eval_loss/")]
    scores = {name.removeprefix("eval_"): value for name, value in logs.items() if name.startswith("eval_")}
    if "answers" in scores:
        names = list(scores)[: list(scores).index("answers")]  # the scores of answers come right before their number
        names = [name for name in names if name.partition("/")[0] not in NOT_OF_ANSWERS]
        parts += [f"{label_of_metric(name)} {scores[name]:.3f}" for name in names]
        if scores["answers"] < scores["answers_asked"]:
            parts.append(f"scored {scores['answers']} of {scores['answers_asked']}")
    return ", ".join(parts)


class Progress(TrainerCallback):
    """A plain line now and then, in the log and on the console; where the console is a terminal it has a bar instead."""

    def __init__(self, console: TextIO | None, log: TextIO) -> None:
        self.console = console
        self.log = log
        """The rank's log alone: what is written there does not come on the console as well."""
        self.bar: Any = None
        self.told = 0.0
        self.first_step = 0
        """The step from which this process went on: 0, or the checkpoint's."""
        self.counted: tuple[int, float] | None = None
        """The first step that ended here, and when: what came before it, start-up and skipped rows, tells nothing of later steps."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.told = 0.0
        self.first_step = state.global_step
        self.counted = None
        if self.console is not None and self.console.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=state.max_steps, initial=state.global_step, file=self.console, unit="step", dynamic_ncols=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.counted is None:
            self.counted = (state.global_step, time.monotonic())
            if self.bar is not None:
                self.bar.initial, self.bar.start_t = state.global_step, time.time()  # what tqdm reckons its rate from

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        logs = logs or {}
        if "rank_loss" in logs:
            facts = f"loss {logs['loss']:.4f}, {logs['tokens_per_second']:,.0f} tokens/s"
            if self.bar is not None:
                self.bar.n = state.global_step
                self.bar.set_postfix_str(facts)
            if self._due(state):
                self._line(f"step {state.global_step}/{state.max_steps}: {facts}{self._left(state)}", in_bar=True)
        elif "eval_loss" in logs:
            self._line(f"step {state.global_step}/{state.max_steps}: {evaluation_line(logs)}")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.bar is not None:
            self.bar.close()

    def _due(self, state: Any) -> bool:
        now = time.monotonic()
        if state.global_step in (self.first_step + 1, state.max_steps) or now - self.told >= SECONDS_BETWEEN_LINES:
            self.told = now
            return True
        return False

    def _line(self, text: str, *, in_bar: bool = False) -> None:
        """Writes a line to the log, and to the console unless a bar there says the same (`in_bar`)."""
        self.log.write(text + "\n")
        self.log.flush()
        if self.bar is not None:
            if not in_bar:
                self.bar.write(text, file=self.console)
        elif self.console is not None:
            self.console.write(text + "\n")
            self.console.flush()

    def _left(self, state: Any) -> str:
        """Returns `, 1:05 left`, or nothing before a second step has ended."""
        if self.counted is None or state.global_step <= self.counted[0]:
            return ""
        step, when = self.counted
        seconds = (time.monotonic() - when) / (state.global_step - step) * (state.max_steps - state.global_step)
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f", {hours}:{minutes:02d}:{rest:02d} left" if hours else f", {minutes}:{rest:02d} left"


# Model FLOPs utilisation: which share of the device's peak the training reaches.


SIZE, TRIES = 768, 4
"""A CPU's peak is measured by this many fp32 products of square matrices of this size: about 50 ms."""


def operations_per_token(model: Any) -> int:
    """Returns the operations of one token, forward and backward.

    For a weight 2 forward, 2 for the gradient by its input, and 2 more for its own gradient when it is trained (PaLM, appendix
    B, without attention's own products). An embedding that is not the head too is only looked up.
    """
    looked_up = None if getattr(model.config.get_text_config(), "tie_word_embeddings", False) else model.get_input_embeddings()
    table = next(iter(looked_up.parameters())) if looked_up is not None else None
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
