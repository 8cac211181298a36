"""Small callbacks that watch a run: the last save, what a rank holds, losses that are no numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from sft_play.errors import DataError
from sft_play.files import write_json
from sft_play.runs.space import side_file
from sft_play.training.holdings import bytes_held, gradients_held, optimizer_held, parameters_held


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


def require_finite(what: str, value: float, *, step: int, rows: list[int], path: Path, kept: Callable[[], str]) -> None:
    """Raises `DataError` when `what` of this step (its loss, its gradient norm) is no number, and keeps the rows' ids."""
    if not math.isfinite(value):
        keep_bad_rows(path, step=step, rows=rows)
        raise no_number(what, value, step=step, path=path, kept=kept())


def keep_bad_rows(path: Path, *, step: int, rows: list[int]) -> None:
    """Writes the ids of the rows of a step that is no number."""
    with side_file(path, "the rows of a step that is no number"):
        write_json(path, {"step": step, "rows": rows})


def no_number(what: str, value: float, *, step: int, path: Path, kept: str, ranks: Sequence[int] = ()) -> DataError:
    """Returns the error; `kept` says what checkpoint there is, `ranks` are those that had the bad rows, where it is known."""
    who = f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""
    return DataError(
        f"the {what} of step {step} is {value}{who}; training has stopped; {kept}",
        place=str(path),
        hint="lower TRAIN_LEARNING_RATE, look at the rows named there, or set TRAIN_BF16=true instead of fp16; then `make resume`",
    )
