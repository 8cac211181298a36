"""A run whose checkpoints someone has deleted does not begin again without a word."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sft_play.errors import CheckpointError
from sft_play.launch.resume import choose_checkpoint
from sft_play.runs.folder import RunFolder
from tests.unit.test_stamp import stamp as stamp_of_a_run


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


@pytest.mark.parametrize("metrics", [None, bytes(range(256)) * 9])
@pytest.mark.parametrize("stamp", [None, "{", "whole"])
def test_a_model_is_not_written_over_where_checkpoints_and_metrics_are_lost(
    tmp_path: Path, metrics: bytes | None, stamp: str | None
) -> None:
    run = RunFolder(tmp_path)
    run.model.mkdir()
    if metrics:
        run.metrics.write_bytes(metrics)
    if stamp == "whole":
        replace(stamp_of_a_run(), step=30).save(run.model)
    elif stamp:
        (run.model / "stamp.json").write_text(stamp)
    with pytest.raises(CheckpointError, match="would write over the model") as refused:
        choose_checkpoint(run)
    assert ("made in 30 steps" in refused.value.message) == (stamp == "whole")
    assert refused.value.place == str(run.model) and "move `model/` away" in (refused.value.hint or "")
    run.model.rename(tmp_path / "away")
    assert choose_checkpoint(run) is None
