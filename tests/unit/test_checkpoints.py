"""Checkpoints appear complete or not at all, and a reader checks before it trusts."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sft_play.runs import checkpoints
from sft_play.runs.checkpoints import claim, clean_up, newest_valid, partial_folder, publish, rotate
from sft_play.runs.folder import RunFolder
from sft_play.runs.manifest import damage, describe, seal, verify, write_part


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
        (lambda c: (c / "manifest.json").write_text('{"files": {}}'), "lists no file"),
        (
            lambda c: (c / "manifest.json").write_text('{"files": {"weights.safetensors": {"bytes": 17, "crc7": "00"}}}'),
            "of an unknown kind: `crc7`",
        ),
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
    assert clean_up(run) == ["step-000008: the process that wrote it ended before it was complete"]
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
    removed = rotate(run, 1, run.checkpoint(8))
    assert sorted(p.name for p in removed) == ["step-000004", "step-000006"]
    assert sorted(p.name for p in run.checkpoints.glob("step-*")) == ["step-000002", "step-000008"]
    assert run.best.resolve().name == "step-000002"
    assert rotate(run, None, run.checkpoint(8)) == []


def test_rotation_keeps_the_best_step_though_its_link_failed(run: RunFolder) -> None:
    for step in (2, 4, 6, 8):
        save(run, step)
    checkpoints.link(run.best, run.checkpoint(2))
    removed = rotate(run, 1, run.checkpoint(8), best=run.checkpoint(4))
    assert [p.name for p in removed] == ["step-000006"] and run.checkpoint(4).is_dir() and run.checkpoint(2).is_dir()
    assert [p.name for p in rotate(run, 1, run.checkpoint(8), best=run.checkpoint(12))] == ["step-000004"], "12 was never saved"


def test_rotation_to_nothing_still_keeps_the_last(run: RunFolder) -> None:
    save(run, 2)
    save(run, 4)
    rotate(run, 0, run.checkpoint(4))
    assert [p.name for p in run.checkpoints.glob("step-*")] == ["step-000004"]


def dies_while_publishing(run: RunFolder, wanted: int) -> bool:
    """Publishes step 8 in a process of its own that ends at the `wanted`-th call that changes the folder; returns whether it did."""
    child = os.fork()
    if child == 0:
        calls = [0]

        def dying(function):
            def wrapper(*arguments, **named):
                calls[0] += 1
                if calls[0] == wanted:
                    os._exit(9)
                return function(*arguments, **named)

            return wrapper

        try:
            for name in ("rename", "replace", "symlink_to", "unlink", "mkdir"):
                setattr(Path, name, dying(getattr(Path, name)))
            os.replace, os.fsync, os.rename, shutil.rmtree = map(dying, (os.replace, os.fsync, os.rename, shutil.rmtree))
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
    """Every system call that changes the folder is tried as the last one."""
    for wanted in range(1, 60):
        shutil.rmtree(run.checkpoints)
        save(run, 4)
        if again:
            save(run, 8, "older")
        partial = partial_folder(run, 8)
        partial.mkdir()
        (partial / "weights.safetensors").write_text("whole")
        died = dies_while_publishing(run, wanted)
        found, skipped = newest_valid(run)
        assert found is not None, f"nothing valid after dying at call {wanted}"
        assert verify(found) is None
        assert skipped == []
        assert found.name == "step-000008" or not again, f"the step that was there is lost after dying at call {wanted}"
        clean_up(run)
        assert {path.name[:5] for path in run.checkpoints.iterdir()} <= {"step-", "last"}
        assert newest_valid(run) == (found, [])
        if not died:
            assert found.name == "step-000008"
            assert (found / "weights.safetensors").read_text() == "whole"
            return
    pytest.fail("publishing never came to its end")


def test_each_rank_lists_its_own_files_and_the_parts_are_joined(run: RunFolder) -> None:
    partial = partial_folder(run, 8)
    partial.mkdir()
    names = [
        "model.safetensors",
        "optimizer-rank0.safetensors",
        "optimizer-rank1.safetensors",
        "rng-rank1.safetensors",
        "README.md",
    ]
    for name in names:
        (partial / name).write_text(f"content of {name}")
    write_part(partial, 0, describe(partial, [partial / name for name in names[:2]]))
    write_part(partial, 1, describe(partial, [partial / name for name in names[2:4]]))
    with pytest.raises(OSError, match="what rank 2, 3 wrote is not in"):
        seal(partial, ranks=range(4))
    assert not (partial / "manifest.json").exists()
    seal(partial, ranks=range(2))
    listed = json.loads((partial / "manifest.json").read_text())["files"]
    assert set(listed) == set(names), "and what no rank has listed"
    assert not list(partial.glob(".*"))
    assert verify(publish(run, 8)) is None


@pytest.mark.parametrize(
    ("change", "words"), [(lambda p: p.write_text("shorter"), "7 bytes, not 16"), (Path.unlink, "No such file")]
)
def test_what_changed_since_its_rank_wrote_it_is_not_sealed(run: RunFolder, change, words: str) -> None:
    partial = partial_folder(run, 8)
    partial.mkdir()
    state = partial / "optimizer-rank1.safetensors"
    state.write_text("states of rank 1")
    write_part(partial, 1, describe(partial, [state]))
    change(state)
    with pytest.raises(OSError, match=words):
        seal(partial, ranks=[1])
    assert not (partial / "manifest.json").exists()
    assert newest_valid(run) == (None, [])


def test_a_file_is_read_back_from_the_disk_and_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    content = bytes(range(256)) * 9_000  # several blocks, the last one not full
    path.write_bytes(content)
    facts = describe(tmp_path, [path])
    assert damage(tmp_path, facts, from_disk=True) is None
    for place in (0, 2**20 - 1, 2**20, len(content) - 1):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert damage(tmp_path, facts, from_disk=True) == "`weights.safetensors` has another checksum than the manifest says"


def test_a_flipped_bit_that_gives_one_file_the_name_of_another_is_found(tmp_path: Path) -> None:
    """`rank0` and `rank1` differ by one bit: the first entry would vanish behind the second, and its file would stand there unchecked."""
    for rank in (0, 1):
        (tmp_path / f"random-rank{rank}.json").write_text(f"{rank}")
    seal(tmp_path, ranks=())
    manifest = tmp_path / "manifest.json"
    content = manifest.read_bytes()
    place = content.index(b"rank0") + len(b"rank")
    manifest.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    assert verify(tmp_path) == "its manifest cannot be read: `random-rank1.json` stands there twice"


def test_the_checksum_is_the_published_one(tmp_path: Path) -> None:
    """XXH3-128 of nothing and of `abc`, as xxHash's own `xxh128sum` prints them."""
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "b").write_bytes(b"abc")
    facts = describe(tmp_path, [tmp_path / "a", tmp_path / "b"])
    assert facts["a"] == {"bytes": 0, "xxh3_128": "99aa06d3014798d86001c324468d497f"}
    assert facts["b"] == {"bytes": 3, "xxh3_128": "06b05ab6733a618578af5f94892f3950"}


def test_manifests_of_earlier_versions_are_still_compared(run: RunFolder) -> None:
    saved = save(run, 4)
    files = {
        path.relative_to(saved).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in saved.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }
    (saved / "manifest.json").write_text(json.dumps({"files": files}))
    assert newest_valid(run) == (saved, [])
    (saved / "weights.safetensors").write_text("WEIGHTS of step 4")
    assert newest_valid(run) == (None, ["step-000004: `weights.safetensors` has another checksum than the manifest says"])


def test_rotation_never_removes_what_is_newer_than_the_checkpoint_just_verified(run: RunFolder) -> None:
    """After a resume from step 4, since 6 and 8 were damaged, step 5 is saved: 4 may go, not 5, and not what is looked at later."""
    for step in (4, 6, 8, 5):
        save(run, step)
    for damaged in (6, 8):
        (run.checkpoint(damaged) / "weights.safetensors").write_text("bad")
    assert [path.name for path in rotate(run, 1, run.checkpoint(5))] == ["step-000004"]
    assert newest_valid(run)[0] == run.checkpoint(5)


WRITER = """
import sys, time
from pathlib import Path
from sft_play.runs.checkpoints import claim, partial_folder
from sft_play.runs.folder import RunFolder
run = RunFolder(Path(sys.argv[1]))
assert claim(run) is not None
partial_folder(run, 8).mkdir()
print("writing", flush=True)
time.sleep(60)
"""


def test_what_a_live_process_writes_is_left_alone_until_it_has_ended(run: RunFolder) -> None:
    save(run, 4).rename(run.checkpoints / ".step-000004.replaced")
    with subprocess.Popen([sys.executable, "-c", WRITER, str(run.path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "writing\n"
        assert clean_up(run) == []
        assert newest_valid(run) == (None, [])
        assert {path.name for path in run.checkpoints.glob(".*")} == {".step-000004.replaced", ".step-000008.partial"}
        assert claim(run) is None, "one writer at a time"
        writer.kill()
        writer.wait(30)
    assert clean_up(run) == ["step-000008: the process that wrote it ended before it was complete"]
    assert newest_valid(run) == (run.checkpoint(4), [])


@pytest.mark.parametrize("what", ["folder", "file"])
def test_a_run_copied_with_its_links_followed_gets_its_links_back(run: RunFolder, what: str) -> None:
    older = save(run, 4)
    for name in (run.last, run.best):
        name.unlink(missing_ok=True)
        shutil.copytree(older, name) if what == "folder" else name.write_text("a disk without links")
    newer = save(run, 8)
    checkpoints.link(run.best, older)
    assert (run.last.resolve(), run.best.resolve()) == (newer.resolve(), older.resolve())
    assert run.last.is_symlink() and run.best.is_symlink()
    assert not list(run.checkpoints.glob(".*"))
    shutil.copytree(older, run.checkpoints / ".last.old")  # its process ended between the two
    clean_up(run)
    assert not list(run.checkpoints.glob(".*"))


@pytest.mark.parametrize(
    "name", ["step-\u0660\u0660\u0660\u0660\u0664\u0660", "step-" + "9" * 20, "step-0000040", "step-40", "step-000040 "]
)
def test_a_name_that_no_run_writes_is_no_checkpoint(run: RunFolder, name: str) -> None:
    older = save(run, 4)
    save(run, 40).rename(run.checkpoints / name)
    assert newest_valid(run) == (older, [])
    assert clean_up(run) == [] and (run.checkpoints / name).is_dir(), "and nothing of it is removed"


@pytest.mark.parametrize(("file", "key"), [("stamp.json", "step"), ("trainer_state.json", "global_step")])
def test_a_renamed_checkpoint_is_passed_over_with_the_step_that_it_says_itself(run: RunFolder, file: str, key: str) -> None:
    newest = save(run, 40)
    partial = partial_folder(run, 30)
    partial.mkdir()
    (partial / file).write_text(json.dumps({key: 30}))
    seal(partial, ranks=())
    renamed = publish(run, 30).rename(run.checkpoint(99))
    found, skipped = newest_valid(run)
    assert found == newest
    assert skipped == [f"step-000099: it is of step 30, by its `{file}`: name it `step-000030` again"]
    renamed.rename(run.checkpoint(30))
    newest.rename(run.checkpoints / "away")
    assert newest_valid(run) == (run.checkpoint(30), [])
