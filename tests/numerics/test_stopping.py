"""Early stopping stops at the right step, says why, and continues to count after a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from sft_play.training.stopping import Patience, is_better
from tests.contexts import context_of

LOSSES = [3.0, 2.5, 2.45, 2.6, 2.55, 2.0]


def evaluate(patience: Patience, args: TrainingArguments, state: TrainerState, losses: list[float]) -> int | None:
    """Evaluate as the trainer does: log, then ask, then compare; return the step that stopped it, if any."""
    for loss in losses:
        state.global_step += 1
        control = TrainerControl()
        patience.on_evaluate(args, state, control, {"eval_loss": loss})
        if is_better(loss, state.best_metric, greater=False):
            state.best_metric, state.best_global_step = loss, state.global_step
        if control.should_training_stop:
            assert control.should_save
            return state.global_step
    return None


def test_the_best_evaluation_is_named_although_it_is_better_by_less_than_the_threshold(tmp_path: Path) -> None:
    args = TrainingArguments(
        output_dir=str(tmp_path), report_to=[], metric_for_best_model="loss", greater_is_better=False, use_cpu=True
    )
    watch = Patience(context_of(tmp_path, train={"early_stopping_patience": 1, "early_stopping_threshold": 0.5}))
    state = TrainerState(max_steps=9)
    watch.on_train_begin(args, state, TrainerControl())
    assert evaluate(watch, args, state, [3.0, 2.9]) == 2
    assert "best 2.9000 at step 2, now 2.9000" in str(watch.reason)


@pytest.mark.parametrize(
    ("patience", "threshold", "stops"), [(1, 0.0, 4), (2, 0.0, 5), (3, 0.0, None), (2, 0.1, 4), (None, 0.0, None)]
)
@pytest.mark.parametrize("resumed_at", [None, 1, 3])
def test_a_resumed_run_stops_early_at_the_same_step(
    tmp_path: Path, patience: int | None, threshold: float, stops: int | None, resumed_at: int | None
) -> None:
    args = TrainingArguments(
        output_dir=str(tmp_path), report_to=[], metric_for_best_model="loss", greater_is_better=False, use_cpu=True
    )
    state, saved = TrainerState(max_steps=9), None
    parts = [LOSSES[:resumed_at], LOSSES[resumed_at:]] if resumed_at else [LOSSES]
    for part in parts:
        if saved:
            state.stateful_callbacks["Patience"] = saved
        watch = Patience(
            context_of(tmp_path, train={"early_stopping_patience": patience, "early_stopping_threshold": threshold})
        )
        watch.on_train_begin(args, state, TrainerControl())
        stopped = evaluate(watch, args, state, part)
        assert part is parts[-1] or stopped is None
        saved = json.loads(json.dumps(watch.state()))
    assert stopped == stops and state.best_global_step == (6 if stops is None else 3)
