"""Which evaluation was the best so far, and when training ends early because none is better any more."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import EarlyStoppingCallback
from transformers.optimization import GreedyLR

from sft_play.errors import DataError
from sft_play.files import append_json_line, read_json_lines
from sft_play.runs.folder import RunFolder
from sft_play.runs.space import side_file
from sft_play.training.metrics import rows_until
from sft_play.training.ranks import from_rank_0


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


class Patience(EarlyStoppingCallback):
    """transformers' early stopping, that says why, saves where it stops, and counts on after a resume.

    What earlier evaluations found is read again from `metrics.jsonl` at the start: an epoch's last checkpoint is written before the
    epoch's evaluation, and cannot hold what that found.
    """

    def __init__(self, run: RunFolder, patience: int | None, threshold: float) -> None:
        """`patience`: evaluations in a row without a better value; `None` never stops, and only the best is remembered."""
        super().__init__(early_stopping_patience=patience or 0, early_stopping_threshold=threshold)
        self.run, self.patience = run, patience
        self.reason: str | None = None
        """Why training ended early; `None` where it did not."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Finds best value and count from the evaluations up to this step."""
        self.early_stopping_patience_counter, self.reason = 0, None
        if args.metric_for_best_model is None or not state.global_step:
            return
        key = metric_key(args.metric_for_best_model)
        found = [row for row in rows_until(self.run.metrics, state.global_step) if row.get(key) is not None and row["step"] > 0]
        rows = from_rank_0(found)
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

    def _recorded(self, step: int) -> bool:
        return any(row.get("event") == "stopped_early" and row.get("step") == step for row in read_json_lines(self.run.events))

    def _stop(self, state: Any, control: Any, name: str, value: float) -> None:
        """Ends training after this step, says why, and records it once."""
        control.should_training_stop = True
        times = "evaluation" if self.patience == 1 else "evaluations in a row"
        better = f" by more than {self.early_stopping_threshold:g}" if self.early_stopping_threshold else ""
        self.reason = (
            f"stopped early at step {state.global_step} of {state.max_steps}: {self.patience} {times} without a better"
            f" `{name}`{better}; best {state.best_metric:.4f} at step {state.best_global_step}, now {value:.4f}"
        )
        if state.is_world_process_zero:
            print(self.reason, flush=True)
            if self._recorded(state.global_step):  # before it was resumed
                return
            event = {"event": "stopped_early", "time": time.time(), "node": 0, "step": state.global_step, "reason": self.reason}
            with side_file(self.run.events, "the event `stopped_early`"):
                append_json_line(self.run.events, event)
