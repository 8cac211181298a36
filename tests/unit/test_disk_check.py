"""The second reading of a checkpoint, on which the removal of older ones waits, and what may be removed then."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sft_play.runs.checkpoints import link
from sft_play.runs.folder import RunFolder
from sft_play.runs.manifest import seal
from sft_play.training.saving import Saver
from sft_play.training.writing import DiskCheck

NO_SUCH_STACK_BYTES = 2**47
"""More than a process has addresses for, so that the system itself refuses to start a thread."""


def saved(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "weights").write_text("as they were")
    seal(folder, ranks=())
    return folder


def unreadable(folder: Path) -> DiskCheck:
    """Returns the check of a whole checkpoint in the middle of which no thread could be started."""
    text = (saved(folder) / "manifest.json").read_text()
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    check = DiskCheck(folder)  # waits for the manifest
    before = threading.stack_size(NO_SUCH_STACK_BYTES)
    try:
        (folder / "manifest.json").write_text(text)
        assert check.ended(wait_seconds=30)
    finally:
        threading.stack_size(before)
    return check


def saver(run: RunFolder, *, best: int | None) -> Saver:
    """What `tidy` needs of a trainer."""
    trainer: Any = SimpleNamespace(
        run=run,
        plan=SimpleNamespace(world_size=1),
        config=SimpleNamespace(train=SimpleNamespace(save_total_limit=1)),
        state=SimpleNamespace(best_global_step=best),
        is_world_process_zero=lambda: True,
    )
    return Saver(trainer)


def steps(run: RunFolder) -> list[str]:
    return sorted(path.name for path in run.checkpoints.glob("step-*"))


def test_a_checkpoint_is_read_to_its_end(tmp_path: Path) -> None:
    check = DiskCheck(saved(tmp_path / "step-000002"))
    assert check.ended(wait_seconds=30) and check.damage is None
    (tmp_path / "step-000002" / "weights").write_text("as they wear")
    again = DiskCheck(tmp_path / "step-000002")
    assert again.ended(wait_seconds=30) and again.damage is not None and "another checksum" in again.damage


def test_a_check_that_failed_does_not_count_as_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunFolder(tmp_path)
    saved(run.checkpoint(2))
    one = saver(run, best=None)
    one._check = unreadable(run.checkpoint(4))
    assert one._check.damage == "it could not be read: can't start new thread"
    one.tidy()
    assert steps(run) == ["step-000002", "step-000004"]
    assert "it could not be read: can't start new thread; older ones stay" in capsys.readouterr().err
    event = json.loads(run.events.read_text())
    assert (event["event"], event["checkpoint"]) == ("checkpoint_damaged", "step-000004")


@pytest.mark.parametrize("linkable", [True, False])
def test_the_best_checkpoint_stays_though_its_link_could_not_be_made(tmp_path: Path, linkable: bool) -> None:
    run = RunFolder(tmp_path)
    for step in (2, 4, 6, 8):
        saved(run.checkpoint(step))
    link(run.best, run.checkpoint(2))  # that to 4, which was better, failed
    if not linkable:
        (run.checkpoints / ".best.new").mkdir()  # in its way again
    one = saver(run, best=4)
    one._check = DiskCheck(run.checkpoint(8))
    one.tidy(wait_seconds=30)
    assert run.best.resolve() == run.checkpoint(4 if linkable else 2)
    assert steps(run) == ["step-000004", "step-000008"] if linkable else ["step-000002", "step-000004", "step-000008"]
