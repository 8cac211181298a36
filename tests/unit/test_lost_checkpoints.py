"""A run whose checkpoints someone has deleted does not begin again without a word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sft_play.errors import CheckpointError
from sft_play.launch.resume import choose_checkpoint
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
