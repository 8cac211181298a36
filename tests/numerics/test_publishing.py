"""The best checkpoint is compared with its manifest before it becomes `model/`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sft_play.runs.checkpoints import link, partial_folder, publish
from sft_play.runs.folder import RunFolder
from sft_play.runs.manifest import seal
from sft_play.training.checkpoint_files import choose


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "demo")
    for step in (2, 4, 6):
        partial = partial_folder(run, step)
        partial.mkdir(parents=True)
        (partial / "model.safetensors").write_text(f"weights of step {step}")
        seal(partial, ranks=())
        publish(run, step)
    return run


def flip(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_text("WEIGHTS of step 4")


def remove(checkpoint: Path) -> None:
    checkpoint.rename(checkpoint.with_name("elsewhere"))


def test_the_best_step_counts_more_than_a_link_that_is_behind(run: RunFolder) -> None:
    assert choose(run, None)[0] is None
    link(run.best, run.checkpoint(2))
    assert choose(run, 4)[0] == run.checkpoint(4)
    assert choose(run, None)[0] == run.checkpoint(2)


@pytest.mark.parametrize(("harm", "words"), [(flip, "another checksum"), (remove, "it is not there")])
def test_a_best_checkpoint_that_is_not_whole_is_passed_over_and_named(
    run: RunFolder, harm: Callable[[Path], None], words: str
) -> None:
    link(run.best, run.checkpoint(4))
    harm(run.checkpoint(4))
    for best_step in (4, None):
        checkpoint, lost = choose(run, best_step)
        assert checkpoint is None
        assert len(lost) == 1 and lost[0].startswith("step-000004: ") and words in lost[0]
    link(run.best, run.checkpoint(2))
    assert choose(run, 4)[0] == run.checkpoint(2) and choose(run, 4)[1]
