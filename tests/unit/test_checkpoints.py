"""Checkpoints appear complete or not at all, and a reader checks before it trusts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from sft_play.runs import checkpoints
from sft_play.runs.checkpoints import clean_up, newest_valid, partial_folder, publish, rotate
from sft_play.runs.folder import RunFolder
from sft_play.runs.manifest import damage, describe, seal


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
    seal(partial, ranks=())
    return publish(run, step)


def test_the_newest_checkpoint_is_that_of_the_highest_step(run: RunFolder) -> None:
    newest = save(run, 1_000_000)
    save(run, 999_999)
    save(run, 5)
    assert newest_valid(run) == (newest, [])


def test_rotation_keeps_the_newest_and_the_best(run: RunFolder) -> None:
    for step in (2, 4, 6, 8):
        save(run, step)
    checkpoints.link(run.best, run.checkpoint(2))
    rotate(run, 1, run.checkpoint(8))
    assert sorted(p.name for p in run.checkpoints.glob("step-*")) == ["step-000002", "step-000008"]
    assert run.best.resolve().name == "step-000002"
    assert rotate(run, None, run.checkpoint(8)) == []


def dies_while_publishing(run: RunFolder, operation: int) -> bool:
    """Publish step 8 in a process that ends at its `operation`-th change of the folder; return whether it did."""
    child = os.fork()
    if child == 0:
        calls = [0]

        def dying(function):
            def wrapper(*arguments, **named):
                calls[0] += 1
                if calls[0] == operation:
                    os._exit(9)
                return function(*arguments, **named)

            return wrapper

        try:
            for name in ("rename", "replace", "symlink_to", "unlink", "mkdir"):
                setattr(Path, name, dying(getattr(Path, name)))
            os.replace, os.fsync, os.rename, shutil.rmtree = map(
                dying, (os.replace, os.fsync, os.rename, shutil.rmtree)
            )
            seal(partial_folder(run, 8), ranks=())
            rotate(run, 1, publish(run, 8))
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


@pytest.mark.parametrize("again", [False, True], ids=["a new step", "a step that is there already"])
def test_a_process_that_dies_anywhere_while_publishing_leaves_a_valid_checkpoint(run: RunFolder, again: bool) -> None:
    """The process ends at each system call that changes the folder."""
    for operation in range(1, 60):
        shutil.rmtree(run.checkpoints)
        save(run, 4)
        if again:
            save(run, 8, "older")
        partial = partial_folder(run, 8)
        partial.mkdir()
        (partial / "weights.safetensors").write_text("whole")
        died = dies_while_publishing(run, operation)
        checkpoint, skipped = newest_valid(run)
        assert checkpoint is not None, f"nothing valid after dying at call {operation}"
        assert skipped == []
        assert checkpoint.name == "step-000008" or not again, (
            f"the step that was there is lost after dying at call {operation}"
        )
        clean_up(run)
        assert {path.name[:5] for path in run.checkpoints.iterdir()} <= {"step-", "last"}
        assert newest_valid(run) == (checkpoint, [])
        if not died:
            assert checkpoint.name == "step-000008"
            assert (checkpoint / "weights.safetensors").read_text() == "whole"
            return
    pytest.fail("publishing never came to its end")


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    content = bytes(range(256)) * 9_000  # several blocks, the last one not full
    path.write_bytes(content)
    facts = describe(tmp_path, [path])
    assert damage(tmp_path, facts) is None
    for place in (0, 2**20 - 1, 2**20, len(content) - 1):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert damage(tmp_path, facts) == "`weights.safetensors` has another checksum than the manifest says"


def test_rotation_never_removes_what_is_newer_than_the_checkpoint_just_verified(run: RunFolder) -> None:
    """After a resume from step 4, since 6 and 8 were damaged, step 5 is saved: 4 may go, not 5, and not what is looked
    at later.
    """
    for step in (4, 6, 8, 5):
        save(run, step)
    for damaged in (6, 8):
        (run.checkpoint(damaged) / "weights.safetensors").write_text("bad")
    assert [path.name for path in rotate(run, 1, run.checkpoint(5))] == ["step-000004"]
    assert newest_valid(run)[0] == run.checkpoint(5)


def test_an_incomplete_checkpoint_takes_the_place_of_no_complete_one(run: RunFolder) -> None:
    for step in (4, 6, 8):
        save(run, step)
    (run.checkpoint(6) / "weights.safetensors").unlink()
    assert [path.name for path in rotate(run, 2, run.checkpoint(8))] == ["step-000006"]


def test_leftovers_of_a_killed_process_are_removed_and_names_freed(run: RunFolder) -> None:
    save(run, 4).rename(run.checkpoints / ".step-000004.replaced")
    partial_folder(run, 8).mkdir()
    assert clean_up(run) == ["step-000008: the process that wrote it ended before it was complete"]
    assert newest_valid(run) == (run.checkpoint(4), [])
    assert not list(run.checkpoints.glob(".*"))
