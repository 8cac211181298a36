"""Early stopping stops where it should, says why, and counts on after a resume as if there had been none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from sft_play.runs.folder import RunFolder
from sft_play.training.stopping import Patience, is_better
from tests.contexts import context_of

LOSSES = [3.0, 2.5, 2.45, 2.6, 2.55, 2.0]


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    values = {"metric_for_best_model": "loss", "greater_is_better": False, "save_strategy": "steps", "use_cpu": True}
    return TrainingArguments(output_dir=str(folder), report_to=[], **(values | changes))


def patience_of(run: RunFolder, patience: int | None, threshold: float) -> Patience:
    return Patience(context_of(run.path, train={"early_stopping_patience": patience, "early_stopping_threshold": threshold}))


def evaluate(patience: Patience, args: TrainingArguments, state: TrainerState, losses: list[float]) -> int | None:
    """Evaluates as the trainer does: logged, then asked about, then compared. Returns the step that stopped it, if one did."""
    for loss in losses:
        state.global_step += 1
        control = TrainerControl()
        patience.on_evaluate(args, state, control, {"eval_loss": loss})
        if is_better(loss, state.best_metric, greater=False):
            state.best_metric, state.best_global_step = loss, state.global_step
        if control.should_training_stop:
            assert control.should_save == (args.save_strategy != "no")
            return state.global_step
    return None


@pytest.mark.parametrize(
    ("patience", "threshold", "stops"), [(1, 0.0, 4), (2, 0.0, 5), (3, 0.0, None), (2, 0.1, 4), (None, 0.0, None)]
)
@pytest.mark.parametrize("resumed_at", [None, 1, 3])
def test_it_stops_at_the_same_step_when_resumed(
    tmp_path: Path, patience: int | None, threshold: float, stops: int | None, resumed_at: int | None, capsys: Any
) -> None:
    run, args = RunFolder(tmp_path), arguments(tmp_path)
    state = TrainerState(max_steps=9)
    watch = patience_of(run, patience, threshold)
    watch.on_train_begin(args, state, TrainerControl())
    if resumed_at:
        assert evaluate(watch, args, state, LOSSES[:resumed_at]) is None
        state.stateful_callbacks["Patience"] = json.loads(json.dumps(watch.state()))
        watch = patience_of(run, patience, threshold)
        watch.on_train_begin(args, state, TrainerControl())
    assert evaluate(watch, args, state, LOSSES[resumed_at or 0 :]) == stops
    assert state.best_global_step == (6 if stops is None else 3)
    if stops is None:
        assert watch.reason is None
        return
    assert (
        watch.reason is not None
        and f"stopped early at step {stops} of 9" in watch.reason
        and "best 2.4500 at step 3" in watch.reason
    )
    assert watch.reason in capsys.readouterr().out
    event = json.loads(run.events.read_text())
    assert (event["event"], event["step"], event["reason"]) == ("stopped_early", stops, watch.reason)
