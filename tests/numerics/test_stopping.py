"""Early stopping stops where it should, says why, and counts on after a resume as if there had been none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from sft_play.errors import DataError
from sft_play.runs.folder import RunFolder
from sft_play.training.stopping import Patience, catch_up, is_better, value_of
from tests.contexts import context_of

LOSSES = [3.0, 2.5, 2.45, 2.6, 2.55, 2.0]


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    values = {"metric_for_best_model": "loss", "greater_is_better": False, "save_strategy": "steps", "use_cpu": True}
    return TrainingArguments(output_dir=str(folder), report_to=[], **(values | changes))


def patience_of(run: RunFolder, patience: int | None, threshold: float) -> Patience:
    return Patience(context_of(run.path, train={"early_stopping_patience": patience, "early_stopping_threshold": threshold}))


def evaluate(patience: Patience, args: TrainingArguments, state: TrainerState, losses: list[float], run: RunFolder) -> int | None:
    """Evaluates as the trainer does: logged, then asked about, then compared. Returns the step that stopped it, if one did."""
    for loss in losses:
        state.global_step += 1
        with run.metrics.open("a") as file:
            file.write(json.dumps({"kind": "eval", "step": state.global_step, "eval_loss": loss}) + "\n")
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
@pytest.mark.parametrize("resumed_at", [None, 1, 2, 3])
def test_it_stops_at_the_same_step_when_resumed(
    tmp_path: Path, patience: int | None, threshold: float, stops: int | None, resumed_at: int | None, capsys: Any
) -> None:
    run, args = RunFolder(tmp_path), arguments(tmp_path)
    state = TrainerState(max_steps=9)
    watch = patience_of(run, patience, threshold)
    watch.on_train_begin(args, state, TrainerControl())
    if resumed_at:
        assert evaluate(watch, args, state, LOSSES[:resumed_at], run) is None
        # The checkpoint of an epoch's end knows nothing of the evaluation that follows it.
        state = TrainerState(max_steps=9, global_step=resumed_at, best_metric=99.0, best_global_step=0)
        watch = patience_of(run, patience, threshold)
        watch.on_train_begin(args, state, TrainerControl())
        assert state.best_metric == min(LOSSES[:resumed_at])
    assert evaluate(watch, args, state, LOSSES[resumed_at or 0 :], run) == stops
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


@pytest.mark.parametrize("recorded", [True, False])
def test_a_run_that_had_stopped_early_does_not_train_on_when_resumed(tmp_path: Path, recorded: bool) -> None:
    """Killed after its last save and before its model was published."""
    run, args = RunFolder(tmp_path), arguments(tmp_path)
    watch, state = patience_of(run, 2, 0.0), TrainerState(max_steps=9)
    watch.on_train_begin(args, state, TrainerControl())
    assert evaluate(watch, args, state, LOSSES, run) == 5
    said = watch.reason
    if not recorded:
        run.events.unlink()
    state, control = TrainerState(max_steps=9, global_step=5), TrainerControl()
    watch = patience_of(run, 2, 0.0)
    watch.on_train_begin(args, state, control)
    assert control.should_training_stop and not control.should_save
    assert (watch.reason, state.best_global_step, state.best_metric) == (said, 3, 2.45)
    assert len(run.events.read_text().splitlines()) == 1
    earlier, control = TrainerState(max_steps=9, global_step=4), TrainerControl()
    patience_of(run, 2, 0.0).on_train_begin(args, earlier, control)
    assert not control.should_training_stop


@pytest.mark.parametrize("kind", ["reduce_lr_on_plateau", "greedy"])
@pytest.mark.parametrize("seen", [0, 3, 4, 6])
def test_a_schedule_that_goes_by_evaluations_sees_those_that_its_checkpoint_missed(kind: str, seen: int) -> None:
    import torch
    from transformers import get_scheduler

    from sft_play.training.states.facts import groups_of, scheduler_of, set_groups, set_scheduler

    def made() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
        return optimizer, get_scheduler(kind, optimizer, scheduler_specific_kwargs={"patience": 0})

    losses = [3.0, 2.5, 2.6, 2.7, 2.4, 2.45]
    rows = [{"kind": "eval", "step": 0, "eval_loss": 9.0}]  # before the first step
    rows += [{"kind": "eval", "step": 2 * number, "eval_loss": loss} for number, loss in enumerate(losses, start=1)]
    reference, undisturbed = made()
    for loss in losses:
        undisturbed.step(loss)
    optimizer, kept = made()
    for loss in losses[:seen]:
        kept.step(loss)
    resumed, schedule = made()
    set_groups(resumed, json.loads(json.dumps(groups_of(optimizer))))
    set_scheduler(schedule, resumed, json.loads(json.dumps(scheduler_of(kept, optimizer))))
    catch_up(schedule, "loss", rows)
    assert resumed.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
    assert schedule.state_dict() == undisturbed.state_dict()
    catch_up(schedule, "loss", rows)
    assert schedule.state_dict() == undisturbed.state_dict(), "nothing is shown twice"


def test_a_metric_that_was_not_measured_is_named_with_those_that_were() -> None:
    assert value_of({"eval_rougeL": 0.5}, "rougeL") == value_of({"eval_rougeL": 0.5}, "eval_rougeL") == 0.5
    with pytest.raises(DataError, match="not measured") as refused:
        value_of({"eval_loss": 1.0}, "loss/docs")
    assert "`eval_loss`" in refused.value.render()
