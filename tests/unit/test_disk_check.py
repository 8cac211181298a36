"""The second reading of a checkpoint, on which the removal of older ones waits, and what may be removed then."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sft_play.errors import HardwareError
from sft_play.runs.checkpoints import link
from sft_play.runs.folder import RunFolder
from sft_play.runs.manifest import seal
from sft_play.training.checkpoint_files import DiskCheck
from sft_play.training.saving import Saver
from tests.contexts import context_of


def saved(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "weights").write_text("as they were")
    seal(folder, ranks=())
    return folder


def unreadable(folder: Path) -> DiskCheck:
    """Returns the check of a whole checkpoint in the middle of which no thread could be started."""

    def refuse(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    saved(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "_adjust_thread_count", refuse)  # as Python says where the machine has no more
        check = DiskCheck(folder)
        assert check.ended(wait_seconds=30)
    return check


def saver(run: RunFolder, *, best: int | None) -> Saver:
    """What `tidy` needs of a trainer."""
    trainer: Any = SimpleNamespace(state=SimpleNamespace(best_global_step=best))
    return Saver(context_of(run.path, train={"save_total_limit": 1}), trainer, dict)


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


def begun(run: RunFolder) -> tuple[Saver, str | None]:
    """Returns a saver with one process, and what its first save of step 4 says before anything is written."""
    one = saver(run, best=None)
    one._predicted = 1
    return one, one._begin(4)


def test_a_checkpoints_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run = RunFolder(tmp_path / "run")
    assert begun(run)[1] is None
    assert [path.name for path in run.checkpoints.iterdir()] == [".step-000004.partial"]


def test_a_run_folder_that_is_gone_ends_the_run_and_is_not_made_anew(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    one, reason = begun(run)
    assert reason is not None and not run.path.exists()
    with pytest.raises(HardwareError) as ended:
        one._failed(4, reason, pause=0.0)
    said = ended.value.render()
    assert f"{run.path}: the run's folder is gone" in said and "was it moved" in said and "make room" not in said
    assert not run.path.exists() and ended.value.exit_code == 3
