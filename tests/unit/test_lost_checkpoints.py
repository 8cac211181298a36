"""A run whose checkpoints someone has deleted does not begin again without a word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sft_play.errors import CheckpointError
from sft_play.launch.restarts import nothing_to_go_on_from
from sft_play.launch.resume import choose_checkpoint, saved_once
from sft_play.launch.verdict import Outcome
from sft_play.runs.folder import RunFolder


def with_rows(folder: Path, *rows: dict[str, object]) -> RunFolder:
    run = RunFolder(folder)
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


@pytest.mark.parametrize("folder", [True, False])
def test_checkpoints_that_were_deleted_are_missed(tmp_path: Path, folder: bool) -> None:
    saves: list[dict[str, object]] = [{"kind": "save", "step": step} for step in (2, 4)]
    run = with_rows(tmp_path, *saves, {"kind": "save", "step": 6, "failed": "no space"}, {"kind": "train", "step": 7})
    if folder:
        run.checkpoints.mkdir()
    with pytest.raises(CheckpointError, match="the last at step 4") as refused:
        choose_checkpoint(run)
    assert refused.value.exit_code == 5 and "new RUN_NAME" in refused.value.render()


def test_a_run_that_never_saved_begins_at_its_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert choose_checkpoint(with_rows(tmp_path, {"kind": "save", "step": 2, "failed": "no space"})) is None
    assert "from its start" in capsys.readouterr().err


def test_a_launch_never_begins_anew_where_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    lost = Outcome(
        code=75, rank=1, message="error: rank 1 (node1) was killed by SIGKILL; all other ranks were stopped", cause="killed"
    )
    end = nothing_to_go_on_from(RunFolder(tmp_path / "mine"), lost)
    assert (
        end.code == 5
        and "`mine` has no valid checkpoint" in end.message
        and "rank 1 (node1) was killed by SIGKILL" in end.message
    )


def test_a_launch_never_begins_anew_where_its_checkpoints_are_gone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    run = with_rows(tmp_path / "mine", {"kind": "save", "step": 4}, {"kind": "train", "step": 5})
    lost = Outcome(code=75, rank=1, message="error: rank 1 was killed", cause="killed")
    end = nothing_to_go_on_from(run, lost, gone=saved_once(run))
    assert (
        end.code == 5 and f"{run.checkpoints}: `mine` had saved checkpoints (the last at step 4), and none is left" in end.message
    )
    assert "make resume RUN=mine" in end.message and "why it had ended: rank 1 was killed" in end.message
