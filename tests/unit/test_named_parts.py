"""What `RUN=` and `CHECKPOINT=` name in a run: links that leave it are refused by their target, other folders by what
they are.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sft_play.errors import CheckpointError
from sft_play.files import write_json
from sft_play.launch.run_folder import find_run
from sft_play.runs.checkpoints import checkpoint_names, weights_folder
from sft_play.runs.folder import RunFolder
from sft_play.runs.manifest import seal
from sft_play.stamps import find


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Make a run with checkpoints of steps 20 and 30, the latter as `last`."""
    monkeypatch.setenv("RUNS_DIR", str(tmp_path))
    run = RunFolder(tmp_path / "demo")
    for step in (20, 30):
        run.checkpoint(step).mkdir(parents=True)
        write_json(run.checkpoint(step) / "config.json", {"model_type": "llama"})
        seal(run.checkpoint(step), ranks=())
    run.last.symlink_to("step-000030")
    write_json(run.config, {"config": {}, "origins": {}})
    return run


def test_a_link_within_the_run_is_followed(run: RunFolder) -> None:
    assert weights_folder(run, "last") == find("demo@last") == run.checkpoint(30).resolve()
    assert (
        weights_folder(run, "20") == weights_folder(run, "step-20") == find("demo@20") == run.checkpoint(20).resolve()
    )
    assert checkpoint_names(run) == ["last", "step-000020", "step-000030"], "there is no best"
    for path in ("../../other", "/etc", "step-000020/.."):
        with pytest.raises(CheckpointError, match="has no checkpoint"):
            weights_folder(run, path)


@pytest.mark.parametrize("name", ["last", "step-000040"])
@pytest.mark.parametrize("target", ["../../elsewhere/step-000007", "/nowhere/step-000007", ".."])
def test_a_link_out_of_the_run_is_refused_with_its_target(run: RunFolder, name: str, target: str) -> None:
    (run.path.parent / "elsewhere" / "step-000007").mkdir(parents=True)
    link = run.checkpoints / name
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    for ask in (lambda: find_run(str(run.path)), lambda: find(f"demo@{name}")):
        with pytest.raises(CheckpointError, match="is a link to") as refused:
            ask()
        assert refused.value.place == str(link) and f"`{link.readlink()}`" in refused.value.message
        assert f"rm {link}" in (refused.value.hint or "")
    with pytest.raises(CheckpointError, match=f"no checkpoint `{name}`"):
        weights_folder(run, name)


def test_a_checkpoint_is_not_a_run(run: RunFolder) -> None:
    with pytest.raises(CheckpointError, match="is a checkpoint, not a run") as refused:
        find_run(str(run.checkpoint(20)))
    assert f"RUN={run.path}" in (refused.value.hint or "")
