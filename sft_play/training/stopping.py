"""When training ends: at its last step, on request (all ranks together), or early because no evaluation is better any more."""

from __future__ import annotations

import signal
import time
from typing import Any

import torch
from transformers import DefaultFlowCallback, EarlyStoppingCallback, TrainerCallback, TrainerControl

from sft_play.errors import DataError
from sft_play.files import append_json_line, side_file
from sft_play.training.faults import open_store
from sft_play.training.metrics import rows_until
from sft_play.training.process import StopRequest
from sft_play.training.ranks import Ranks, TrainContext

AGREE_SECONDS = 0.5
"""How often ranks agree between the batches of an evaluation."""
STORE_SECONDS = 30.0


class StepEnds(TrainerCallback):
    """Lets the last step of an epoch do what is due at the epoch's end: evaluate, then save. So a checkpoint knows its step's evaluation.

    The run's last step is always saved. Wherever a checkpoint may be written there is a row of metrics too: it sums up the steps since the
    one before, which a run that is resumed in between could not repeat.
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
    """Lets the step end when any rank was asked to stop; all agree, save (unless `train.save_strategy` is `no`) and stop."""

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
            self.request.share(lambda: open_store(STORE_SECONDS))  # a separate connection: threads must not wait for each other

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
        control.should_save = args.save_strategy != "no" and state.global_step > 0 and self.request.saved != state.global_step
        control.should_log = control.should_log or control.should_save

    # ---- Evaluations

    def begin_evaluation(self) -> None:
        """Call before the batches of an evaluation, on all ranks."""
        self._batches, self._every, self._looked = 0, 1, time.monotonic()

    def between_batches(self) -> None:
        """Call before each batch, on all ranks equally often. Raise `EvaluationStopped` on all of them together.

        Ranks agree after a number of batches that takes about half a second, so that waiting for each other costs nothing.
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
        """Call after the last batch, on all ranks, where some may have left theirs. Raise `EvaluationStopped` on all of them."""
        if self._agree()[0]:
            raise EvaluationStopped

    def asked_here(self) -> bool:
        """Whether this rank has heard a request; not collective."""
        return self.request.heard is not None


class MissedEvaluation(TrainerCallback):
    """Makes the evaluation that a request to stop ended, at the checkpoint from which a run continues.

    `trainer` is the `SftTrainer`. Must be the last callback: the rows of `metrics.jsonl` after the checkpoint are gone by then.
    """

    def __init__(self, trainer: Any, ends: StepEnds) -> None:
        self.trainer, self.ends = trainer, ends

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not state.global_step:
            return
        args.eval_on_start = False  # it was at the run's start; here it would be a second row of this step
        if control.should_training_stop or not self.ends.evaluation_due(args, state):
            return
        trainer, context = self.trainer, self.trainer.context
        rows = rows_until(context.run.metrics, state.global_step)
        if not context.ranks.broadcast(any(row["kind"] == "eval" and row["step"] == state.global_step for row in rows)):
            trainer._determine_best_metric(trainer._evaluate(None, None), None)
            trainer.saver.link_best()


def value_of(metrics: dict[str, Any], name: str) -> float:
    """Return a metric of an evaluation. Raise `DataError` where it was not measured."""
    key = name if name.startswith("eval_") else f"eval_{name}"
    if metrics.get(key) is None:
        known = ", ".join(f"`{one}`" for one in metrics if one.startswith("eval_"))
        raise DataError(f"the evaluation has not measured `train.metric_for_best_model` (`{name}`)", hint=f"it measured {known}")
    return float(metrics[key])


def is_better(value: float, best: float | None, *, greater: bool) -> bool:
    """Whether `value` is better than the best so far; the first always is."""
    return best is None or (value > best if greater else value < best)


class Patience(EarlyStoppingCallback):
    """transformers' early stopping, that says why, saves where it stops, and counts on after a resume."""

    def __init__(self, context: TrainContext) -> None:
        train = context.config.train
        self.patience: int | None = train.early_stopping_patience
        """Evaluations in a row without a better value; `None` never stops."""
        super().__init__(early_stopping_patience=self.patience or 0, early_stopping_threshold=train.early_stopping_threshold)
        self.run, self.ranks = context.run, context.ranks
        self.reason: str | None = None
        """Why training ended early; `None` where it did not."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take up what the checkpoint holds. A run that had stopped, and was ended before its model was published, makes no step."""
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
            event = {"event": "stopped_early", "time": time.time(), "node": 0, "step": state.global_step, "reason": self.reason}
            with side_file(self.run.events, "the event `stopped_early`"):
                append_json_line(self.run.events, event)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps (the interface of `ExportableState`)."""
        found: dict[str, Any] = super().state()
        found["attributes"]["reason"] = self.reason
        return found
