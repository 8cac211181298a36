"""When training ends: at its last step, on request (all ranks together), or early because no evaluation is better any more."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import DefaultFlowCallback, EarlyStoppingCallback, Trainer, TrainerCallback, TrainerControl
from transformers.optimization import GreedyLR

from sft_play.errors import DataError
from sft_play.files import append_json_line, read_json_lines, side_file
from sft_play.training.heartbeat import open_store
from sft_play.training.metrics import rows_until
from sft_play.training.ranks import Ranks, TrainContext
from sft_play.training.requests import StopRequest

AGREE_SECONDS = 0.5
"""How often ranks agree between the batches of an evaluation."""
STORE_SECONDS = 30.0


class SaveAtEnd(TrainerCallback):
    """Writes a checkpoint at the last step, and a row of metrics wherever a checkpoint may be written.

    A row sums up the steps since the one before: a run that is resumed from a checkpoint between two rows could not repeat it.
    """

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= state.max_steps:
            control.should_log = True
            control.should_save = control.should_save or args.save_strategy != "no"
        self.on_epoch_end(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_log = control.should_log or control.should_save or control.should_evaluate


class EvaluationStopped(Exception):
    """Raised on all ranks in the middle of an evaluation, which then counts as not made."""


class StopOnRequest(TrainerCallback):
    """Lets the step end when any rank was asked to stop; all agree, save (unless `train.save_strategy` is `no`) and stop."""

    def __init__(self, request: StopRequest, ranks: Ranks) -> None:
        self.request, self.ranks = request, ranks
        self.stopped = False
        self.code = 130
        """The exit code of the stop: 130 where only Ctrl-C was heard."""
        self._batches, self._every, self._looked = 0, 1, 0.0

    def _agreed(self, seconds: float = 0.0) -> tuple[bool, float]:
        """Returns whether any rank was asked to stop, and the sum of `seconds` over all. Collective."""
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
            self.request.share(lambda: open_store(STORE_SECONDS))  # a separate connection: threads must not wait for each other

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.request.step = state.global_step
        self.request.nothing_to_save = args.save_strategy == "no" and state.global_step < state.max_steps
        if self._agreed()[0]:
            self.stop(args, state, control)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.request.saved = state.global_step
        if not self.stopped and self._agreed()[0]:
            self.stop(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.stopped:  # an evaluation that is due here is made by the resumed run
            control.should_log = control.should_evaluate = control.should_save = False

    def stop(self, args: Any, state: Any, control: Any) -> None:
        """Ends training after this step, which is saved if it is not yet."""
        control.should_evaluate = False
        control.should_training_stop = True
        if args.save_strategy == "no" and state.global_step >= state.max_steps:
            return  # all is trained, and only the model can keep it: it is written, and the run is complete
        self.stopped = True
        control.should_save = args.save_strategy != "no" and state.global_step > 0 and self.request.saved != state.global_step
        control.should_log = control.should_log or control.should_save

    # ---- Evaluations

    def begin_evaluation(self) -> None:
        """Call before the batches of an evaluation, on all ranks."""
        self._batches, self._every, self._looked = 0, 1, time.monotonic()

    def between_batches(self) -> None:
        """Call before each batch, on all ranks equally often. Raises `EvaluationStopped` on all of them together.

        Ranks agree after a number of batches that takes about half a second, so that waiting for each other costs nothing.
        """
        self._batches += 1
        if self._batches < self._every:
            return
        now = time.monotonic()
        asked, total = self._agreed(now - self._looked)
        if asked:
            raise EvaluationStopped
        per_batch = total / self.ranks.world / self._batches
        self._every = max(1, min(4 * self._every, int(AGREE_SECONDS / max(per_batch, 1e-6))))
        self._batches, self._looked = 0, now

    def after_batches(self) -> None:
        """Call after the last batch, on all ranks, where some may have left theirs. Raises `EvaluationStopped` on all of them."""
        if self._agreed()[0]:
            raise EvaluationStopped

    def asked_here(self) -> bool:
        """Whether this rank has heard a request; not collective."""
        return self.request.heard is not None


class MissedEvaluation(TrainerCallback):
    """Makes the evaluation that was due at the checkpoint from which a run continues, when its figures were never written.

    A schedule that goes by evaluations is shown what it has missed. Must be the last callback: the rows of `metrics.jsonl` after the
    checkpoint are gone by then, and the best value so far is known.
    """

    def __init__(self, trainer: Trainer, context: TrainContext) -> None:
        self.trainer, self.context = trainer, context

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not state.global_step:
            return
        args.eval_on_start = False  # it was at the run's start; here it would be a second row of this step
        found = [row for row in rows_until(self.context.run.metrics, state.global_step) if row["kind"] == "eval"]
        rows = self.context.ranks.broadcast(found)
        catch_up(self.trainer.lr_scheduler, args.metric_for_best_model, rows)
        due = evaluation_due(args, state, self.context.plan.steps_per_epoch) and not control.should_training_stop
        if due and not any(row["step"] == state.global_step for row in rows):
            metrics = self.trainer._evaluate(None, None)
            self.trainer._determine_best_metric(metrics, None)


def evaluation_due(args: Any, state: Any, steps_per_epoch: int | None) -> bool:
    """Whether transformers evaluates after the step of `state`: asked of its own rule."""
    control, rule = TrainerControl(), DefaultFlowCallback()
    rule.on_step_end(args, state, control)
    if (steps_per_epoch and state.global_step % steps_per_epoch == 0) or state.global_step >= state.max_steps:
        rule.on_epoch_end(args, state, control)
    return bool(control.should_evaluate)


def catch_up(scheduler: Any, name: str | None, rows: Sequence[dict[str, Any]]) -> None:
    """Shows a scheduler that goes by evaluations those of `rows` that it has not seen when its checkpoint was written.

    An epoch's last checkpoint is written before the epoch's evaluation. `rows`: evaluations of `metrics.jsonl` up to the checkpoint.
    """
    if name is None or not isinstance(scheduler, (ReduceLROnPlateau, GreedyLR)):
        return
    shown = [row for row in rows if row["step"] > 0]  # one before the first step is not shown to it
    for row in shown[scheduler.last_epoch :]:
        value = row.get(metric_key(name))
        scheduler.step(math.nan if value is None else value)


def metric_key(name: str) -> str:
    """Returns a metric's name as logs have it: `eval_rougeL` for `rougeL` too."""
    return name if name.startswith("eval_") else f"eval_{name}"


def value_of(metrics: dict[str, Any], name: str) -> float:
    """Returns a metric of an evaluation. Raises `DataError` where it was not measured."""
    key = metric_key(name)
    if metrics.get(key) is None:
        known = ", ".join(f"`{one}`" for one in metrics if one.startswith("eval_"))
        raise DataError(f"the evaluation has not measured `train.metric_for_best_model` (`{name}`)", hint=f"it measured {known}")
    return float(metrics[key])


def is_better(value: float, best: float | None, *, greater: bool) -> bool:
    """Whether `value` is better than the best so far; the first always is."""
    return best is None or (value > best if greater else value < best)


class Patience(EarlyStoppingCallback):
    """transformers' early stopping, that says why, saves where it stops, and counts on after a resume.

    What earlier evaluations found is read again from `metrics.jsonl` at the start: an epoch's last checkpoint is written before the
    epoch's evaluation, and cannot hold what that found.
    """

    def __init__(self, context: TrainContext) -> None:
        train = context.config.train
        self.patience: int | None = train.early_stopping_patience
        """Evaluations in a row without a better value; `None` never stops, and only the best is remembered."""
        super().__init__(early_stopping_patience=self.patience or 0, early_stopping_threshold=train.early_stopping_threshold)
        self.run, self.ranks = context.run, context.ranks
        self.reason: str | None = None
        """Why training ended early; `None` where it did not."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Finds best value and count from the evaluations up to this step."""
        self.early_stopping_patience_counter, self.reason = 0, None
        if args.metric_for_best_model is None or not state.global_step:
            return
        key = metric_key(args.metric_for_best_model)
        found = [row for row in rows_until(self.run.metrics, state.global_step) if row.get(key) is not None and row["step"] > 0]
        rows = self.ranks.broadcast(found)
        if rows:
            state.best_metric, state.best_global_step = None, None
        for row in rows:
            self.check_metric_value(args, state, control, row[key])
            if row is rows[-1] and self._exhausted():  # it had stopped, and was ended before its model was published
                self._stop(state, control, args.metric_for_best_model, row[key])
            if is_better(row[key], state.best_metric, greater=bool(args.greater_is_better)):
                state.best_metric, state.best_global_step = row[key], row["step"]

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, Any], **_: Any) -> None:
        if self.patience is None or state.global_step == 0:
            return
        name = args.metric_for_best_model
        value = value_of(metrics, name)
        self.check_metric_value(args, state, control, value)
        if self._exhausted():
            control.should_save = control.should_save or args.save_strategy != "no"
            self._stop(state, control, name, value)

    def _exhausted(self) -> bool:
        return self.patience is not None and self.early_stopping_patience_counter >= self.patience

    def _stop(self, state: Any, control: Any, name: str, value: float) -> None:
        """Ends training after this step, says why, and records it once."""
        control.should_training_stop = True
        times = "evaluation" if self.patience == 1 else "evaluations in a row"
        better = f" by more than {self.early_stopping_threshold:g}" if self.early_stopping_threshold else ""
        self.reason = (
            f"stopped early at step {state.global_step} of {state.max_steps}: {self.patience} {times} without a better"
            f" `{name}`{better}; best {state.best_metric:.4f} at step {state.best_global_step}, now {value:.4f}"
        )
        if not self.ranks.first:
            return
        print(self.reason, flush=True)
        event = {"event": "stopped_early", "node": 0, "step": state.global_step}
        if any(event.items() <= row.items() for row in read_json_lines(self.run.events)):  # before it was resumed
            return
        with side_file(self.run.events, "the event `stopped_early`"):
            append_json_line(self.run.events, event | {"time": time.time(), "reason": self.reason})
