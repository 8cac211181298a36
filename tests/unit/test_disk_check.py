"""The second reading of a checkpoint, on which the removal of older ones waits, and what may be removed then."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

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


def saver(run: RunFolder, *, best: int | None) -> Saver:
    """What `tidy` needs of a trainer."""
    trainer: Any = SimpleNamespace(state=SimpleNamespace(best_global_step=best))
    return Saver(context_of(run.path, train={"save_total_limit": 1}), trainer, dict)


def steps(run: RunFolder) -> list[str]:
    return sorted(path.name for path in run.checkpoints.glob("step-*"))


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
