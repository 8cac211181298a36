"""Checkpoints appear complete or not at all, and a reader checks before it trusts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from sft_play.runs import checkpoints
from sft_play.runs.checkpoints import newest_valid, partial_folder, publish, remove_leftovers, rotate
from sft_play.runs.folder import RunFolder
from sft_play.runs.manifest import verify


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "demo")
    run.checkpoints.mkdir(parents=True)
    return run


def save(run: RunFolder, step: int, content: str = "weights") -> Path:
    partial = partial_folder(run, step)
    (partial / "inner").mkdir(parents=True)
    (partial / "weights.safetensors").write_text(f"{content} of step {step}")
    (partial / "inner" / "state.pt").write_text("state")
    return publish(run, step)


def test_a_published_checkpoint_is_whole_and_lists_every_file(run: RunFolder) -> None:
    saved = save(run, 40)
    assert saved.name == "step-000040"
    assert verify(saved) is None
    listed = json.loads((saved / "manifest.json").read_text())["files"]
    assert set(listed) == {"weights.safetensors", "inner/state.pt"}
    assert listed["inner/state.pt"]["bytes"] == 5
    assert run.last.resolve() == saved.resolve()
    assert str(run.last.readlink()) == "step-000040", "a link that survives moving the run"


def test_the_newest_by_number_is_taken_not_the_newest_by_name_or_time(run: RunFolder) -> None:
    newest = save(run, 1_000_000)
    save(run, 999_999)
    save(run, 5)
    assert newest_valid(run) == (newest, [])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda c: (c / "weights.safetensors").write_text("wei"), "3 bytes, not"),
        (lambda c: (c / "weights.safetensors").write_text("WEIGHTS of step 8"), "another checksum"),
        (lambda c: (c / "weights.safetensors").unlink(), "is missing"),
        (lambda c: (c / "inner" / "state.pt").unlink(), "`inner/state.pt` is missing"),
        (lambda c: (c / "manifest.json").unlink(), "no manifest"),
        (lambda c: (c / "manifest.json").write_text("{"), "cannot be read"),
        (lambda c: (c / "manifest.json").write_text("[]"), "cannot be read"),
        (lambda c: (c / "manifest.json").write_text('{"files": {"weights.safetensors": {}}}'), "cannot be checked"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_its_reason(run: RunFolder, damage, words: str) -> None:
    older, damaged = save(run, 4), save(run, 8)
    damage(damaged)
    found, skipped = newest_valid(run)
    assert found == older
    assert len(skipped) == 1
    assert skipped[0].startswith("step-000008: ")
    assert words in skipped[0]


def test_a_half_written_checkpoint_is_never_a_checkpoint(run: RunFolder) -> None:
    older = save(run, 4)
    partial = partial_folder(run, 8)
    partial.mkdir()
    (partial / "weights.safetensors").write_text("half")
    assert newest_valid(run) == (older, [])
    remove_leftovers(run)
    assert not partial.exists()
    assert verify(older) is None


def test_a_run_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert newest_valid(RunFolder(tmp_path / "nothing")) == (None, [])


def test_a_step_that_is_reached_again_replaces_the_old_folder(run: RunFolder) -> None:
    save(run, 8, "older")
    again = save(run, 8, "newer")
    assert (again / "weights.safetensors").read_text() == "newer of step 8"
    assert verify(again) is None
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["last", "step-000008"]


def test_rotation_keeps_the_newest_and_the_best(run: RunFolder) -> None:
    for step in (2, 4, 6, 8):
        save(run, step)
    checkpoints.link(run.best, run.checkpoint(2))
    removed = rotate(run, 1)
    assert sorted(p.name for p in removed) == ["step-000004", "step-000006"]
    assert sorted(p.name for p in run.checkpoints.glob("step-*")) == ["step-000002", "step-000008"]
    assert run.best.resolve().name == "step-000002"
    assert rotate(run, None) == []


def test_rotation_to_nothing_still_keeps_the_last(run: RunFolder) -> None:
    save(run, 2)
    save(run, 4)
    rotate(run, 0)
    assert [p.name for p in run.checkpoints.glob("step-*")] == ["step-000004"]


CRASH = """
import os, sys
from pathlib import Path
from sft_play.runs import checkpoints
from sft_play.runs.folder import RunFolder
run, call, wanted = RunFolder(Path(sys.argv[1])), [0], int(sys.argv[2])
def dying(function):
    def wrapper(*arguments, **named):
        call[0] += 1
        if call[0] == wanted:
            os._exit(9)
        return function(*arguments, **named)
    return wrapper
for name in ("rename", "replace", "symlink_to", "unlink", "mkdir"):
    setattr(Path, name, dying(getattr(Path, name)))
os.replace, os.fsync, os.rename = dying(os.replace), dying(os.fsync), dying(os.rename)
checkpoints.publish(run, 8)
checkpoints.rotate(run, 1)
"""


def test_a_process_that_dies_anywhere_while_publishing_leaves_a_valid_checkpoint(run: RunFolder) -> None:
    """Every system call that changes the folder is tried as the last one."""
    import shutil
    import subprocess

    for wanted in range(1, 40):
        shutil.rmtree(run.checkpoints)
        save(run, 4)
        partial = partial_folder(run, 8)
        partial.mkdir()
        (partial / "weights.safetensors").write_text("whole")
        code = subprocess.run([sys.executable, "-c", CRASH, str(run.path), str(wanted)], timeout=60, check=False).returncode
        found, _ = newest_valid(run)
        assert found is not None, f"nothing valid after dying at call {wanted}"
        assert verify(found) is None
        if code == 0:
            assert found.name == "step-000008"
            return
        assert code == 9
    pytest.fail("publishing never came to its end")
