"""End training: at its last step, on request (all ranks together), without a better evaluation, or at a NaN."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DefaultFlowCallback, EarlyStoppingCallback, Trainer, TrainerCallback, TrainerControl

from sft_play.errors import DataError
from sft_play.files import append_json_line, side_file, write_json
from sft_play.text import numbered
from sft_play.training.metrics import rows_until
from sft_play.training.ranks import Ranks, TrainContext
from sft_play.training.saving import Saver
from sft_play.training.states.facts import loss_scaler
from sft_play.training.stop_request import StopRequest

SKIPPED_LIMIT = 20
"""Consecutive updates that a loss scaler may skip: 16 halvings take it from its first scale, 65536, to 1."""


class Finite:
    """Stop a run whose loss or gradient norm is not finite, before the update; DeepSpeed skips that update itself."""

    def __init__(self, context: TrainContext, trainer: Trainer, saver: Saver) -> None:
        self.context, self.trainer, self.saver = context, trainer, saver
        self.rows: list[int] = []
        """Row ids of the current step on this rank, set by the trainer."""
        self.skipped = 0
        """Consecutive updates that the loss scaler skipped."""

    def require_finite_loss(self, value: Tensor) -> None:
        """Raise `DataError` if this rank's loss is not finite, and record the ids of its rows."""
        if not math.isfinite(float(value)):
            self._keep_rows()
            raise self._error("loss", float(value))

    def require_finite_norm(self, value: float, loss: Tensor) -> None:
        """Raise `DataError` on all ranks if the gradient norm, the same on each, is not finite.

        A loss scaler (fp16) finds its scale by trial: it skips such an update and halves the scale. With it the run
        stops after `SKIPPED_LIMIT` consecutive skipped updates, or when the scale is down to 1, which scales nothing.
        """
        if math.isfinite(value):
            self.skipped = 0
            return
        self.skipped += 1
        scale = scale_of(self.trainer) if self.trainer.args.fp16 else None
        if scale is None:
            self._stop(value, loss, "")
        elif self.skipped >= SKIPPED_LIMIT or scale <= 1:
            times = f"{self.skipped} updates in a row" if self.skipped > 1 else "this update"
            self._stop(value, loss, f" (fp16's loss scaler has skipped {times}, its scale is {scale:g})")

    def _stop(self, norm: float, loss: Tensor, why: str) -> None:
        """Raise `DataError`, naming the ranks whose loss is not finite: the bad rows are theirs. Collective."""
        self.saver.finish()  # publishes a checkpoint that is being written in the background
        ranks, mine = self.context.ranks, float(loss)
        blamed = [rank for rank, (loss_there,) in enumerate(ranks.table([mine])) if not math.isfinite(loss_there)]
        if not blamed or ranks.rank in blamed:
            self._keep_rows()
        if blamed:
            raise self._error("loss", mine if ranks.rank in blamed else math.nan, blamed=blamed)
        raise self._error("gradient norm", norm, why=why)

    def _keep_rows(self) -> None:
        path = self.context.run.bad_rows(self.context.ranks.rank)
        with side_file(path, "the rows of a step that is not finite"):
            write_json(path, {"step": self.trainer.state.global_step + 1, "rows": self.rows})

    def _error(self, what: str, value: float, *, blamed: Sequence[int] = (), why: str = "") -> DataError:
        mine, step = self.context.ranks.rank, self.trainer.state.global_step + 1
        who = f" on {numbered('rank', blamed)}" if blamed else ""
        return DataError(
            f"the {what} of step {step} is {value}{who}{why}; training has stopped; {self.saver.name_newest()}",
            place=str(self.context.run.bad_rows(blamed[0] if blamed and mine not in blamed else mine)),
            hint=(
                "lower TRAIN_LEARNING_RATE, look at the rows named there, or set TRAIN_BF16=true instead of fp16; then"
                " `make resume`; docs/troubleshooting.md#loss-is-nan"
            ),
        )


def scale_of(trainer: Trainer) -> float | None:
    """Return the loss scaler's factor, or `None` if there is no scaler to skip a bad update."""
    scaler = loss_scaler(trainer)
    if scaler is None:
        return None
    return float(scaler.loss_scale if trainer.is_deepspeed_enabled else scaler.get_scale())


AGREE_SECONDS = 0.5
"""Interval at which ranks agree between the batches of an evaluation."""


class StepEnds(TrainerCallback):
    """Evaluate and save at the last step of an epoch instead of after it, so that a checkpoint knows its evaluation.

    The run's last step is always saved. Each step that may be saved also logs a row of metrics: the row sums up the
    steps since the previous one, which a run that is resumed in between could not repeat.
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
        """Return whether an evaluation is due after the step of `state`."""
        control = TrainerControl()
        DefaultFlowCallback().on_step_end(args, state, control)
        self.on_step_end(args, state, control)
        return bool(control.should_evaluate)


class EvaluationStopped(Exception):
    """Raised on all ranks in the middle of an evaluation, which then does not count."""


class StopOnRequest(TrainerCallback):
    """Finish the step, save (unless `train.save_strategy` is `no`) and stop all ranks when any was asked to stop."""

    def __init__(self, request: StopRequest, ranks: Ranks) -> None:
        self.request, self.ranks = request, ranks
        self.stopped = False
        self.code = 130
        """The exit code of the stop: 130 if only Ctrl-C was received."""
        self._batches, self._every, self._looked = 0, 1, 0.0

    def _agree(self, seconds: float = 0.0) -> tuple[bool, float]:
        """Return whether any rank was asked to stop, and the sum of `seconds` over all. Collective."""
        heard = self.request.heard
        sums = [seconds, float(heard == signal.SIGINT), float(heard not in (None, signal.SIGINT))]
        if self.ranks.world > 1:  # a single process need not wait for its GPU
            sums = self.ranks.total(torch.tensor(sums, dtype=torch.float32, device=self.ranks.device)).tolist()
        total, interrupted, asked = sums
        self.code = 143 if asked else 130
        if (interrupted or asked) and heard is None:  # this rank must end in time for another rank's request too
            self.request.hear(signal.SIGTERM if asked else signal.SIGINT)
        return bool(interrupted or asked), total

    # ---- Steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.request.step = self.request.first_step = state.global_step
        self.request.saved = state.global_step or None

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
        """End training after this step, and save the step unless it is saved already."""
        control.should_evaluate = False
        control.should_training_stop = True
        if args.save_strategy == "no" and state.global_step >= state.max_steps:
            return  # training is done and only `model/` will hold it: write that, and the run is complete
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
        """Call before each batch, equally often on all ranks. Raise `EvaluationStopped` on all of them together.

        Ranks agree only about every half second, so that waiting for each other costs next to nothing.
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
        """Call on all ranks after the last batch, which some may not have reached. Raise `EvaluationStopped` on all."""
        if self._agree()[0]:
            raise EvaluationStopped

    def asked_here(self) -> bool:
        """Return whether this rank has received a request; not collective."""
        return self.request.heard is not None


class MissedEvaluation(TrainerCallback):
    """Apply the evaluation that followed the checkpoint a run resumes from, or run it if a stop or fault ended it.

    `trainer` is the `SftTrainer`. This must be the last callback: by then the rows of `metrics.jsonl` after the
    checkpoint have been dropped.
    """

    def __init__(self, trainer: Any, ends: StepEnds) -> None:
        self.trainer, self.ends = trainer, ends

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not state.global_step:
            return
        args.eval_on_start = False  # done when the run started; here it would add a second row for this step
        evaluated = any(row.get("step") == state.global_step and "eval_loss" in row for row in state.log_history)
        if evaluated or control.should_training_stop or not self.ends.evaluation_due(args, state):
            return
        trainer, context = self.trainer, self.trainer.context
        rows = rows_until(context.run.metrics, state.global_step)
        evaluations = [row for row in rows if row.get("kind") == "eval" and row["step"] == state.global_step]
        trainer.score(context.ranks.broadcast(evaluations[-1] if evaluations else None))


def value_of(metrics: dict[str, Any], name: str) -> float | None:
    """Return a metric of an evaluation, or `None` if it was not measured or is not finite."""
    value = metrics.get(name if name.startswith("eval_") else f"eval_{name}")
    return None if value is None or not math.isfinite(value) else float(value)


def is_better(value: float, best: float | None, *, greater: bool) -> bool:
    """Return whether `value` is better than the best so far; the first value always is."""
    return best is None or (value > best if greater else value < best)


class Patience(EarlyStoppingCallback):
    """transformers' early stopping, which also gives the reason, saves where it stops, and survives a resume."""

    def __init__(self, context: TrainContext) -> None:
        train = context.config.train
        self.patience: int | None = train.early_stopping_patience
        """Consecutive evaluations without a better value; `None` never stops."""
        super().__init__(
            early_stopping_patience=self.patience or 0, early_stopping_threshold=train.early_stopping_threshold
        )
        self.run, self.ranks = context.run, context.ranks
        self.reason: str | None = None
        """Why training ended early, or `None`."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the state of the checkpoint; a run that stopped early but did not publish its model makes no step."""
        saved = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None
        attributes = (saved or {}).get("attributes", {})
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
        best, best_step = state.best_metric, state.best_global_step
        if is_better(value, best, greater=bool(args.greater_is_better)):  # by less than the threshold
            best, best_step = value, state.global_step
        self.reason = (
            f"stopped early at step {state.global_step} of {state.max_steps}: {self.patience} {times} without a better"
            f" `{name}`{better}; best {best:.4f} at step {best_step}, now {value:.4f}"
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
        """Return the state for a checkpoint (the interface of `ExportableState`)."""
        state: dict[str, Any] = super().state()
        state["attributes"]["reason"] = self.reason
        return state
