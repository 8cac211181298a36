"""A run whose small files are lost or damaged never restarts over its checkpoints: the missing files are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sft_play.config.call import Call
from sft_play.config.load import LoadedConfig, load_config, save_config
from sft_play.errors import CheckpointError, UserError
from sft_play.files import append_json_line
from sft_play.launch.job import LaunchOptions, read_options
from sft_play.launch.resume import as_resume, choose_checkpoint, existing_run, launch_facts
from sft_play.launch.run_folder import find_run, has_started, record_event, reserve_folder
from sft_play.plan.plan import Plan
from sft_play.runs.folder import RunFolder
from sft_play.runs.manifest import seal
from sft_play.runs.prepared import Prepared
from sft_play.runs.stamp import Stamp
from tests.plans import simple_plan


def config(folder: Path) -> LoadedConfig:
    path = folder / "one.yaml"
    path.write_text("model: {name: x/y}\ndata: {train_path: rows.jsonl}\nlaunch: {auto_resume: true}\n")
    return load_config(path, environ={})


def typed(folder: Path) -> LaunchOptions:
    return read_options(Call(command="train", options={"RUN_NAME": "demo"}), config(folder), "single")[0]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Make a run of one process with a checkpoint."""
    monkeypatch.setenv("RUNS_DIR", str(tmp_path))
    run = RunFolder(tmp_path / "demo")
    run.path.mkdir()
    save_config(config(tmp_path), run.config)
    simple_plan().save(run.plan)
    record_event(run, "started", launch=launch_facts(typed(tmp_path)))
    checkpoint = run.checkpoint(30)
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text("{}")
    seal(checkpoint, ranks=())
    return run


@pytest.mark.parametrize("remaining", ["checkpoints", "metrics", "model"])
def test_a_run_without_its_events_is_never_restarted(run: RunFolder, remaining: str) -> None:
    if remaining != "checkpoints":
        run.checkpoints.rename(run.path / "moved")
    if remaining == "metrics":
        append_json_line(run.metrics, {"kind": "train", "step": 1})
    if remaining == "model":
        run.model.mkdir()
    run.events.unlink()
    folder = run.path.parent
    assert has_started(run) and existing_run(typed(folder), config(folder)) == run
    for too in (True, False):
        with pytest.raises(UserError, match="exists already"), reserve_folder("demo", never_started_too=too):
            pass
    with pytest.raises(CheckpointError, match=r"its `events.jsonl` is missing or damaged") as refused:
        as_resume(Call(command="train", options={"RUN_NAME": "demo"}), typed(folder), config(folder), run)
    assert refused.value.place == str(run.events)
    assert (f"take RUN={run.typed} CHECKPOINT=step-000030" in (refused.value.hint or "")) == (
        remaining == "checkpoints"
    )


def test_a_lost_configuration_is_named(run: RunFolder) -> None:
    run.config.unlink()
    folder = run.path.parent
    asks: list[Callable[[], object]] = [
        lambda: find_run("demo"),
        lambda: find_run(str(run.path)),
        lambda: existing_run(typed(folder), config(folder)),
    ]
    for ask in asks:
        with pytest.raises(CheckpointError, match=r"`demo` has started, but its `config.json` is missing") as refused:
            ask()
        assert refused.value.place == str(run.config) and refused.value.hint
    with pytest.raises(CheckpointError, match="there is no run `other`"):
        find_run("other")


@pytest.mark.parametrize("text", ['{"world_size": 1, "num_no', "{}", "[]"])
@pytest.mark.parametrize("kind", [Plan, Prepared, Stamp])
def test_truncated_and_invalid_files_of_a_run_are_reported(
    kind: type[Plan | Prepared | Stamp], text: str, tmp_path: Path
) -> None:
    path = tmp_path / "stamp.json"
    path.write_text(text)
    with pytest.raises(CheckpointError) as caught:
        kind.load(tmp_path if kind is Stamp else path)
    assert caught.value.place == str(path)
    assert json.dumps(caught.value.message)


def test_checkpoints_that_were_deleted_are_missed(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    saves: list[dict[str, object]] = [{"kind": "save", "step": step} for step in (2, 4)]
    for row in (*saves, {"kind": "save", "step": 6, "failed": "no space"}, {"kind": "train", "step": 7}):
        append_json_line(run.metrics, row)
    with pytest.raises(CheckpointError, match="the last at step 4") as refused:
        choose_checkpoint(run)
    assert refused.value.exit_code == 5 and "new RUN_NAME" in refused.value.render()


def test_a_model_is_not_written_over_where_checkpoints_and_metrics_are_lost(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.model.mkdir()
    with pytest.raises(CheckpointError, match="has a model, and no valid checkpoint"):
        choose_checkpoint(run)
    run.model.rename(tmp_path / "away")
    assert choose_checkpoint(run) is None


def test_the_folder_of_another_node_is_not_trained_from_its_start(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "lan")
    run.path.mkdir(parents=True)
    record_event(run, "started", node_rank=1)
    assert choose_checkpoint(run, first_node=False) is None
    with pytest.raises(CheckpointError, match="its checkpoints are on node 0"):
        choose_checkpoint(run)
