"""When training ends: at its last step, on request (all ranks together), without a better evaluation, at a NaN or a
spike.
"""

from __future__ import annotations

import json
import math
import signal
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DefaultFlowCallback, EarlyStoppingCallback, Trainer, TrainerCallback, TrainerControl
from transformers.trainer_callback import ExportableState

from sft_play.errors import DataError
from sft_play.files import append_json_line, read_json_lines, side_file, write_json, write_text
from sft_play.runs.progress import notify
from sft_play.training.faults import open_store
from sft_play.training.metrics import rows_until
from sft_play.training.ranks import Ranks, TrainContext
from sft_play.training.saving import Saver
from sft_play.training.states.facts import loss_scaler
from sft_play.training.stop_request import StopRequest

LEFT_OUT_LIMIT = 20
"""Updates in a row that a loss scaler may leave out: from its first scale, 65536, it comes down to 1 by halving 16
times.
"""


class Finite:
    """Stops a run whose loss or gradient norm is no number: before the update, except under DeepSpeed, which leaves it
    out by itself.
    """

    def __init__(self, context: TrainContext, trainer: Trainer, saver: Saver) -> None:
        self.context, self.trainer, self.saver = context, trainer, saver
        self.rows: list[int] = []
        """Of the step that is being made, on this rank; the trainer sets it."""
        self.left_out = 0
        """Updates in a row that the loss scaler left out."""

    def require_finite_loss(self, value: Tensor) -> None:
        """Raise `DataError` when this rank's loss is no number, and keep the ids of its rows."""
        if not math.isfinite(float(value)):
            self._keep_rows()
            raise self._error("loss", float(value))

    def require_finite_norm(self, value: float, loss: Tensor) -> None:
        """Raise `DataError` on all ranks when the gradient norm, the same on each, is no number.

        A loss scaler (fp16) looks for its scale by trying: it leaves such an update out and halves. There the run stops
        when `LEFT_OUT_LIMIT` updates in a row were left out, or when the scale has come down to 1, where nothing is
        scaled any more.
        """
        if math.isfinite(value):
            self.left_out = 0
            return
        self.left_out += 1
        scale = scale_of(self.trainer) if self.trainer.args.fp16 else None
        if scale is None:
            self._stop(value, loss, "")
        elif self.left_out >= LEFT_OUT_LIMIT or scale <= 1:
            times = f"{self.left_out} updates in a row" if self.left_out > 1 else "this update"
            self._stop(value, loss, f" (fp16's loss scaler has skipped {times}, its scale is {scale:g})")

    def _stop(self, norm: float, loss: Tensor, why: str) -> None:
        """Names the ranks whose loss is no number, where there are such: theirs are the bad rows. Collective."""
        self.saver.finish()  # what is being written meanwhile is published
        ranks, mine = self.context.ranks, float(loss)
        blamed = [rank for rank, (found,) in enumerate(ranks.table([mine])) if not math.isfinite(found)]
        if not blamed or ranks.rank in blamed:
            self._keep_rows()
        if blamed:
            raise self._error("loss", mine if ranks.rank in blamed else math.nan, blamed=blamed)
        raise self._error("gradient norm", norm, why=why)

    def _keep_rows(self) -> None:
        path = self.context.run.bad_rows(self.context.ranks.rank)
        with side_file(path, "the rows of a step that is no number"):
            write_json(path, {"step": self.trainer.state.global_step + 1, "rows": self.rows})

    def _error(self, what: str, value: float, *, blamed: Sequence[int] = (), why: str = "") -> DataError:
        mine, step = self.context.ranks.rank, self.trainer.state.global_step + 1
        who = f" on rank{'s' if len(blamed) > 1 else ''} {', '.join(map(str, blamed))}" if blamed else ""
        return DataError(
            f"the {what} of step {step} is {value}{who}{why}; training has stopped; {self.saver.name_newest()}",
            place=str(self.context.run.bad_rows(blamed[0] if blamed and mine not in blamed else mine)),
            hint=(
                "lower TRAIN_LEARNING_RATE, look at the rows named there, or set TRAIN_BF16=true instead of fp16; then"
                " `make resume`; docs/troubleshooting.md#loss-is-nan"
            ),
        )


def scale_of(trainer: Trainer) -> float | None:
    """Return the factor of the loss scaler; `None` where nothing leaves a bad update out."""
    scaler = loss_scaler(trainer)
    if scaler is None:
        return None
    return float(scaler.loss_scale if trainer.is_deepspeed_enabled else scaler.get_scale())


WINDOW, LEAST = 50, 10
"""Finite norms that are compared with at most, and at least."""
WHAT = "the rows of a step whose gradient norm jumps"


class SpikeGuard(TrainerCallback, ExportableState):
    """Compares each step's gradient norm with the median of those before it (`train.spike_guard`); steps that jump may
    be left out.

    The norm is that of the gradients over all ranks, so every rank decides alike. The norms seen so far are part of a
    checkpoint: a resumed run decides as the uninterrupted one would. A jump counts among the norms too: a new level is
    one after 25 steps.
    """

    def __init__(self, context: TrainContext) -> None:
        train = context.config.train
        self.mode, self.factor, self.rank = train.spike_guard, train.spike_factor, context.ranks.rank
        self.run, self.notify = context.run, context.config.launch.notify
        self.path = context.run.logs / "spikes.jsonl"
        """Each rank appends a line for its own rows."""
        self.norms: list[float] = []
        self.found: list[int] = []
        """Steps that jumped."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Read what the checkpoint holds, and drops lines of steps that come again."""
        held = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None
        attributes = (held or {}).get("attributes", {})
        self.norms, self.found = list(attributes.get("norms", [])), list(attributes.get("found", []))
        if self.rank == 0 and self.path.is_file():
            lines = read_json_lines(self.path)
            kept = [line for line in lines if isinstance(line.get("step"), int) and line["step"] <= state.global_step]
            with side_file(self.path, WHAT):
                write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def jumps(self, norm: float, *, step: int, rows: list[int]) -> bool:
        """Notes the norm of a step; return whether its update is to be left out. A norm that is no number is not judged
        here.
        """
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
        facts = {"step": step, "norm": norm, "median": median, "skipped": skipped, "rank": self.rank, "rows": rows}
        with side_file(self.path, WHAT):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_json_line(self.path, facts | {"time": time.time()})
        if self.rank == 0:
            done = "its update is skipped" if skipped else "the update is made"
            times = f"{norm / median:.1f} times the median {median:.3g}" if median else f"the median is {median:.3g}"
            said = f"step {step}: the gradient norm jumps to {norm:.3g}, {times}; {done}"
            print(f"{said}; rows: {self.path}", flush=True)
            if len(self.found) == 1:
                notify(self.notify, self.run, "spike", f"{self.run.name}: {said}")
        return skipped

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps (the interface of `ExportableState`)."""
        return {"args": {}, "attributes": {"norms": self.norms, "found": self.found}}


AGREE_SECONDS = 0.5
"""How often ranks agree between the batches of an evaluation."""
STORE_SECONDS = 30.0


class StepEnds(TrainerCallback):
    """Lets the last step of an epoch do what is due at the epoch's end: evaluate, then save. So a checkpoint knows its
    step's evaluation.

    The run's last step is always saved. Wherever a checkpoint may be written there is a row of metrics too: it sums up
    the steps since the one before, which a run that is resumed in between could not repeat.
    """

    def __init__(self, steps_per_epoch: int | None) -> None:
        self.steps_per_epoch = steps_per_epoch

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        last = state.global_step >= state.max_steps
        if last or (self.steps_per_epoch and state.global_step % self.steps_per_epoch == 0):
            DefaultFlowCallback().on_epoch_end(args, state, control)
        control.should_save = control.should_save or (last and args.save_strategy != "no")
        control.should_log = control.should_log or control.should_save or control.should_evaluate

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_log = control.should_evaluate = control.should_save = False

    def evaluation_due(self, args: Any, state: Any) -> bool:
        """Whether there is an evaluation after the step of `state`."""
        control = TrainerControl()
        DefaultFlowCallback().on_step_end(args, state, control)
        self.on_step_end(args, state, control)
        return bool(control.should_evaluate)


class EvaluationStopped(Exception):
    """Raised on all ranks in the middle of an evaluation, which then counts as not made."""


class StopOnRequest(TrainerCallback):
    """Lets the step end when any rank was asked to stop; all agree, save (unless `train.save_strategy` is `no`) and
    stop.
    """

    def __init__(self, request: StopRequest, ranks: Ranks) -> None:
        self.request, self.ranks = request, ranks
        self.stopped = False
        self.code = 130
        """The exit code of the stop: 130 where only Ctrl-C was heard."""
        self._batches, self._every, self._looked = 0, 1, 0.0

    def _agree(self, seconds: float = 0.0) -> tuple[bool, float]:
        """Return whether any rank was asked to stop, and the sum of `seconds` over all. Collective."""
        heard = self.request.heard
        found = [seconds, float(heard == signal.SIGINT), float(heard not in (None, signal.SIGINT))]
        if self.ranks.world > 1:  # a single process need not ask its GPU
            found = self.ranks.total(torch.tensor(found, dtype=torch.float32, device=self.ranks.device)).tolist()
        total, interrupted, asked = found
        self.code = 143 if asked else 130
        if (interrupted or asked) and heard is None:  # another rank's request: this one must end in time too
            self.request.hear(signal.SIGTERM if asked else signal.SIGINT)
        return bool(interrupted or asked), total

    # ---- Steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.request.step = self.request.first_step = state.global_step
        self.request.saved = state.global_step or None
        if self.ranks.world > 1:
            self.request.share(
                lambda: open_store(STORE_SECONDS)
            )  # a separate connection: threads must not wait for each other

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.request.step = state.global_step
        self.request.nothing_to_save = args.save_strategy == "no" and state.global_step < state.max_steps
        if self._agree()[0]:
            self.stop(args, state, control)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.request.saved = state.global_step
        if not self.stopped and self._agree()[0]:
            self.stop(args, state, control)

    def stop(self, args: Any, state: Any, control: Any) -> None:
        """End training after this step, which is saved if it is not yet."""
        control.should_evaluate = False
        control.should_training_stop = True
        if args.save_strategy == "no" and state.global_step >= state.max_steps:
            return  # all is trained, and only the model can keep it: it is written, and the run is complete
        self.stopped = True
        control.should_save = (
            args.save_strategy != "no" and state.global_step > 0 and self.request.saved != state.global_step
        )
        control.should_log = control.should_log or control.should_save

    # ---- Evaluations

    def begin_evaluation(self) -> None:
        """Call before the batches of an evaluation, on all ranks."""
        self._batches, self._every, self._looked = 0, 1, time.monotonic()

    def between_batches(self) -> None:
        """Call before each batch, on all ranks equally often. Raise `EvaluationStopped` on all of them together.

        Ranks agree after a number of batches that takes about half a second, so that waiting for each other costs
        nothing.
        """
        self._batches += 1
        if self._batches < self._every:
            return
        now = time.monotonic()
        asked, total = self._agree(now - self._looked)
        if asked:
            raise EvaluationStopped
        per_batch = total / self.ranks.world / self._batches
        self._every = max(1, min(4 * self._every, int(AGREE_SECONDS / max(per_batch, 1e-6))))
        self._batches, self._looked = 0, now

    def after_batches(self) -> None:
        """Call after the last batch, on all ranks, where some may have left theirs. Raise `EvaluationStopped` on all of
        them.
        """
        if self._agree()[0]:
            raise EvaluationStopped

    def asked_here(self) -> bool:
        """Whether this rank has heard a request; not collective."""
        return self.request.heard is not None


class MissedEvaluation(TrainerCallback):
    """Takes up the evaluation that came after the checkpoint from which a run continues, or makes it where a stop or a
    fault ended it.

    `trainer` is the `SftTrainer`. Must be the last callback: the rows of `metrics.jsonl` after the checkpoint are gone
    by then.
    """

    def __init__(self, trainer: Any, ends: StepEnds) -> None:
        self.trainer, self.ends = trainer, ends

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not state.global_step:
            return
        args.eval_on_start = False  # it was at the run's start; here it would be a second row of this step
        known = any(row.get("step") == state.global_step and "eval_loss" in row for row in state.log_history)
        if known or control.should_training_stop or not self.ends.evaluation_due(args, state):
            return
        trainer, context = self.trainer, self.trainer.context
        rows = rows_until(context.run.metrics, state.global_step)
        made = [row for row in rows if row["kind"] == "eval" and row["step"] == state.global_step]
        trainer.score(context.ranks.broadcast(made[-1] if made else None))


def value_of(metrics: dict[str, Any], name: str) -> float | None:
    """Return a metric of an evaluation; `None` where this one could not measure it, or it is no number."""
    value = metrics.get(name if name.startswith("eval_") else f"eval_{name}")
    return None if value is None or not math.isfinite(value) else float(value)


def is_better(value: float, best: float | None, *, greater: bool) -> bool:
    """Whether `value` is better than the best so far; the first always is."""
    return best is None or (value > best if greater else value < best)


class Patience(EarlyStoppingCallback):
    """transformers' early stopping, that says why, saves where it stops, and counts on after a resume."""

    def __init__(self, context: TrainContext) -> None:
        train = context.config.train
        self.patience: int | None = train.early_stopping_patience
        """Evaluations in a row without a better value; `None` never stops."""
        super().__init__(
            early_stopping_patience=self.patience or 0, early_stopping_threshold=train.early_stopping_threshold
        )
        self.run, self.ranks = context.run, context.ranks
        self.reason: str | None = None
        """Why training ended early; `None` where it did not."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take up what the checkpoint holds. A run that had stopped, and was ended before its model was published,
        makes no step.
        """
        kept = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None
        attributes = (kept or {}).get("attributes", {})
        self.early_stopping_patience_counter = attributes.get("early_stopping_patience_counter", 0)
        self.reason = attributes.get("reason")
        control.should_training_stop = control.should_training_stop or self.reason is not None

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, Any], **_: Any) -> None:
        if self.patience is None or state.global_step == 0:
            return
        name = args.metric_for_best_model
        value = value_of(metrics, name)
        if value is None:
            return
        self.check_metric_value(args, state, control, value)
        if self.early_stopping_patience_counter < self.patience:
            return
        control.should_save = control.should_save or args.save_strategy != "no"
        control.should_training_stop = True
        times = "evaluation" if self.patience == 1 else "evaluations in a row"
        better = f" by more than {self.early_stopping_threshold:g}" if self.early_stopping_threshold else ""
        self.reason = (
            f"stopped early at step {state.global_step} of {state.max_steps}: {self.patience} {times} without a better"
            f" `{name}`{better}; best {state.best_metric:.4f} at step {state.best_global_step}, now {value:.4f}"
        )
        if self.ranks.first:
            print(self.reason, flush=True)
            event = {
                "event": "stopped_early",
                "time": time.time(),
                "node": 0,
                "step": state.global_step,
                "reason": self.reason,
            }
            with side_file(self.run.events, "the event `stopped_early`"):
                append_json_line(self.run.events, event)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps (the interface of `ExportableState`)."""
        found: dict[str, Any] = super().state()
        found["attributes"]["reason"] = self.reason
        return found
