"""Callbacks that watch a run: the last save, what a rank holds, losses that are no numbers, steps whose gradient norm jumps."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from sft_play.errors import DataError
from sft_play.files import append_json_line, read_json_lines, write_json, write_text
from sft_play.runs.space import side_file
from sft_play.training.holdings import bytes_held, gradients_held, optimizer_held, parameters_held

LEFT_OUT_LIMIT = 20
"""Updates in a row that a loss scaler may leave out: from its first scale, 65536, it comes down to 1 by halving 16 times."""


class SaveAtEnd(TrainerCallback):
    """Writes a checkpoint at the last step, and a row of metrics wherever a checkpoint may be written.

    A row sums up the steps since the one before: a run that is resumed from a checkpoint between two rows could not repeat it.
    """

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= state.max_steps:
            control.should_log = True
            control.should_save = control.should_save or args.save_strategy != "no"
        self._log_too(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._log_too(control)

    def _log_too(self, control: Any) -> None:
        control.should_log = control.should_log or control.should_save or control.should_evaluate


class Holdings(TrainerCallback):
    """Counts what this rank holds at its first update."""

    def __init__(self) -> None:
        self.counts: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **references: Any) -> None:
        self.counts["parameters"] = parameters_held(references["model"])
        engine = getattr(references["optimizer"], "optimizer", None)
        if hasattr(engine, "averaged_gradients"):  # DeepSpeed steps inside the backward pass, out of reach of callbacks
            self._count_before_step(engine, references["model"])

    def _count_before_step(self, engine: Any, model: Any) -> None:
        step = engine.step

        def counted(*arguments: Any, **named: Any) -> Any:
            self.counts["gradients"] = gradients_held(model, engine)
            engine.step = step
            return step(*arguments, **named)

        engine.step = counted

    def on_substep_end(self, args: Any, state: Any, control: Any, **references: Any) -> None:
        if "gradients_between" not in self.counts:  # what FSDP2 keeps unsharded has no place that could be counted here
            self.counts["gradients_between"] = gradients_held(references["model"], references["optimizer"])

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **references: Any) -> None:
        if "gradients" not in self.counts:
            self.counts["gradients"] = gradients_held(references["model"], references["optimizer"])

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **references: Any) -> None:
        if "optimizer" not in self.counts:
            self.counts["optimizer"] = optimizer_held(references["optimizer"])
            self.counts["bytes"] = bytes_held(references["model"], references["optimizer"])

    def save(self, path: Path, *, rows_trained: Iterable[int], rows_scored: Iterable[int]) -> None:
        """Writes the counts with the ids of the (newest) rows that this rank trained and scored."""
        with side_file(path, "what a rank holds"):
            write_json(path, self.counts | {"rows_trained": sorted(rows_trained), "rows_scored": sorted(rows_scored)})


class Finite:
    """Stops a run whose loss or gradient norm is no number: before the update, except under DeepSpeed, which leaves it out by itself."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.left_out = 0
        """Updates in a row that the loss scaler left out."""

    def loss(self, value: Any) -> None:
        """Raises `DataError` when this rank's loss is no number, and keeps the ids of its rows."""
        if not math.isfinite(float(value)):
            self._keep_rows()
            raise self._error("loss", float(value))

    def norm(self, value: float) -> None:
        """Raises `DataError` on all ranks when the gradient norm, the same on each, is no number.

        A loss scaler (fp16) looks for its scale by trying: it leaves such an update out and halves. There the run stops when
        `LEFT_OUT_LIMIT` updates in a row were left out, or when the scale has come down to 1, where nothing is scaled any more.
        """
        if math.isfinite(value):
            self.left_out = 0
            return
        self.left_out += 1
        scale = scale_of(self.trainer) if self.trainer.args.fp16 else None
        if scale is None:
            self._stop(value, "")
        elif self.left_out >= LEFT_OUT_LIMIT or scale <= 1:
            times = f"{self.left_out} updates in a row" if self.left_out > 1 else "this update"
            self._stop(value, f" (the loss scaler of fp16 has left out {times}, its scale is {scale:g})")

    def _stop(self, norm: float, why: str) -> None:
        """Names the ranks whose loss is no number, where there are such: theirs are the bad rows. Collective."""
        trainer = self.trainer
        trainer.saver.finish()  # what is being written meanwhile is published
        mine = int(trainer.args.process_index)
        bad = trainer._gather((~torch.isfinite(trainer._window[:1])).double())[:, 0]
        blamed = [rank for rank, flag in enumerate(bad.tolist()) if flag]
        if not blamed or mine in blamed:
            self._keep_rows()
        if blamed:
            raise self._error("loss", float(trainer._window[0]) if mine in blamed else math.nan, ranks=blamed)
        raise self._error("gradient norm", norm, why=why)

    def _keep_rows(self) -> None:
        trainer = self.trainer
        path = trainer.run.bad_rows(trainer.args.process_index)
        with side_file(path, "the rows of a step that is no number"):
            write_json(path, {"step": trainer.state.global_step + 1, "rows": trainer._step_rows})

    def _error(self, what: str, value: float, *, ranks: Sequence[int] = (), why: str = "") -> DataError:
        trainer = self.trainer
        mine, step = int(trainer.args.process_index), trainer.state.global_step + 1
        who = f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""
        return DataError(
            f"the {what} of step {step} is {value}{who}{why}; training has stopped; {trainer.saver.kept()}",
            place=str(trainer.run.bad_rows(ranks[0] if ranks and mine not in ranks else mine)),
            hint="lower TRAIN_LEARNING_RATE, look at the rows named there, or set TRAIN_BF16=true instead of fp16; then `make resume`; "
            "docs/troubleshooting.md#loss-is-nan",
        )


def scale_of(trainer: Any) -> float | None:
    """Returns the factor of the loss scaler, accelerate's or DeepSpeed's; `None` where nothing leaves a bad update out."""
    if trainer.is_deepspeed_enabled:
        scaler = getattr(trainer.model_wrapped.optimizer, "loss_scaler", None)
        return None if scaler is None else float(scaler.loss_scale)
    scaler = getattr(trainer.accelerator, "scaler", None)
    return None if scaler is None else float(scaler.get_scale())


# Steps whose gradient norm jumps (`train.spike_guard`): written down with their rows, and left out where that is asked.


WINDOW, LEAST = 50, 10
"""Finite norms that are compared with at most, and at least."""
WHAT = "the rows of a step whose gradient norm jumps"


class SpikeGuard(TrainerCallback, ExportableState):
    """Compares each step's gradient norm with the median of those before it.

    The norm is that of the gradients over all ranks, so every rank decides alike. The norms seen so far are part of a checkpoint: a
    resumed run decides as the uninterrupted one would. A jump counts among the norms too: a new level is one after 25 steps.
    """

    def __init__(self, mode: str, factor: float, path: Path, rank: int) -> None:
        """`path`: `logs/spikes.jsonl`, to which each rank appends a line for its own rows."""
        self.mode, self.factor, self.path, self.rank = mode, factor, path, rank
        self.norms: list[float] = []
        self.found: list[int] = []
        """Steps that jumped."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Takes up what the checkpoint holds, and forgets lines of steps that come again."""
        held = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None
        attributes = (held or {}).get("attributes", {})
        self.norms, self.found = list(attributes.get("norms", [])), list(attributes.get("found", []))
        if self.rank == 0 and self.path.is_file():
            lines = read_json_lines(self.path)
            kept = [line for line in lines if isinstance(line.get("step"), int) and line["step"] <= state.global_step]
            with side_file(self.path, WHAT):
                write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def jumps(self, norm: float, *, step: int, rows: list[int]) -> bool:
        """Takes up the norm of a step; returns whether its update is to be left out. A norm that is no number is not judged here."""
        if self.mode == "off" or not math.isfinite(norm):
            return False
        before = self.norms[-WINDOW:]
        self.norms = [*before, norm][-WINDOW:]
        if len(before) < LEAST:
            return False
        median = statistics.median(before)
        if norm <= self.factor * median:
            return False
        skipped = self.mode == "skip"
        self.found.append(step)
        facts = {
            "step": step,
            "norm": norm,
            "median": median,
            "skipped": skipped,
            "rank": self.rank,
            "rows": rows,
            "time": time.time(),
        }
        with side_file(self.path, WHAT):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_json_line(self.path, facts)
        if self.rank == 0:
            done = "its update is left out" if skipped else "the update is made"
            times = f"{norm / median:.1f} times the median {median:.3g}" if median else f"the median is {median:.3g}"
            print(f"step {step}: the gradient norm jumps to {norm:.3g}, {times}; {done}; rows: {self.path}", flush=True)
        return skipped

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps (the interface of `ExportableState`)."""
        return {"args": {}, "attributes": {"norms": self.norms, "found": self.found}}
