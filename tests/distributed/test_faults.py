"""Other faults around a run, with real processes: each is one clear error, or the run continues unchanged."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sft_play.files import read_json_lines
from sft_play.runs.folder import RunFolder
from tests.conftest import Done, metrics
from tests.launcher import SECONDS, Launcher, can_mount
from tests.programs import need
from tests.tiny_models import build_tiny_llama

pytestmark = pytest.mark.broad


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    """Return commands with a separate base model and cache."""
    launcher_of_base = Launcher(tmp_path, build_tiny_llama(tmp_path / "base"))
    launcher_of_base.environment["SFT_PLAY_CACHE"] = str(tmp_path / "cache")
    return launcher_of_base


def require_one_error(done: Done, code: int, *parts: str) -> None:
    done.refused(code, *parts)
    assert len(re.findall(r"^error: ", done.err, re.M)) == 1, done.err


@pytest.mark.long
def test_resume_and_train_are_refused_while_the_run_is_running(launcher: Launcher) -> None:
    words = ("train", f"CONFIG={launcher.config}", "RUN_NAME=busy")
    with launcher.start(*words[:2], "TRAIN_MAX_STEPS=4000", "TRAIN_SAVE_STEPS=1000", name="busy") as launch:
        launch.wait_for_step(1)
        in_use = f"the run `busy` is in use: process {launch.process.pid} trains it"
        require_one_error(launcher("resume", "RUN=busy"), 2, in_use)
        require_one_error(launcher(*words), 2, "the run `busy` exists already")
        require_one_error(launcher(*words, "LAUNCH_AUTO_RESUME=true"), 2, in_use)
        assert launch.process.poll() is None, "the run itself continues"
        launch.process.send_signal(signal.SIGTERM)
        assert launch.end()[0] == 143


def test_a_run_that_is_removed_while_it_trains_ends_and_leaves_nothing_new(launcher: Launcher, tmp_path: Path) -> None:
    """Its scores would recreate the folder, and its end look like a success."""
    words = ("train", f"CONFIG={launcher.config}", "TRAIN_MAX_STEPS=4000", "TRAIN_SAVE_STEPS=40")
    with launcher.start(*words, name="gone") as launch:
        launch.wait_for_step(1)
        launch.run.rename(tmp_path / "moved")  # a folder that is written to cannot be removed at once
        code, text = launch.end()
    assert code == 3 and "the run's folder is gone: was it moved or deleted while it trained?" in text, text
    assert "done: " not in text and text.count("error: ") == 1, text
    assert not any((launch.run / name).exists() for name in ("config.json", "plan.json", "report.html", "model"))


@pytest.mark.long
def test_rows_of_metrics_are_as_durable_as_their_checkpoint(launcher: Launcher, tmp_path: Path) -> None:
    """The disk forgets what was not synced, as at a power cut."""
    need("mkfs.ext4")
    image, disk = tmp_path / "disk", tmp_path / "mounted"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(300 * 2**20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    mount = ["mount", "-o", "loop,commit=600", str(image), str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no loop device can be mounted here")
    launcher.environment["RUNS_DIR"] = str(disk / "runs")
    words = (
        "train",
        f"CONFIG={launcher.config}",
        "TRAIN_MAX_STEPS=100000",
        "TRAIN_SAVE_STEPS=1",
        "TRAIN_EVAL_STRATEGY=no",
        "TRAIN_EVAL_STEPS=null",
    )
    try:
        with launcher.start(*words, name="cut") as launch:
            launch.wait_for_step(6)
            subprocess.run(["mount", "-o", "remount,abort", str(disk)], check=False, capture_output=True)
            for process in launch.family():
                process.kill()
            launch.process.wait(30)
        subprocess.run(["umount", str(disk)], check=True)
        subprocess.run(mount, check=True)
        saved = max(int(path.name[5:]) for path in launch.run.glob("checkpoints/step-*"))
        rows = [
            row["step"]
            for row in read_json_lines(launch.run / "metrics.jsonl")
            if row["kind"] == "train" and row["step"] <= saved
        ]
        assert saved >= 3 and rows == list(range(1, saved + 1))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False, capture_output=True)


def test_a_base_model_or_rows_that_have_changed_are_refused(launcher: Launcher) -> None:
    done = launcher("train", f"CONFIG={launcher.config}", "RUN_NAME=half", "TRAIN_MAX_STEPS=4", "TRAIN_SAVE_STEPS=2")
    assert done.code == 0, done.err
    run = RunFolder(launcher.runs / "half")
    for lost in (run.checkpoint(4), run.model):  # as a kill in step 3 leaves it
        shutil.rmtree(lost)
    checkpoints = {path: path.lstat().st_mtime_ns for path in run.checkpoints.rglob("*")}
    base, rows = launcher.folder / "base", launcher.folder / "rows.jsonl"
    weights = base / "model.safetensors"
    before, original = weights.read_bytes(), rows.read_text()
    weights.write_bytes(before[:-4] + bytes([before[-4] ^ 1]) + before[-3:])
    require_one_error(launcher("resume", "RUN=half"), 5, "`base_fingerprint`", "restore them")
    weights.unlink()
    require_one_error(launcher("resume", "RUN=half"), 4, str(base))
    weights.write_bytes(before)
    rows.write_text(original.replace("I say 3 now", "I say three now"))
    require_one_error(launcher("resume", "RUN=half"), 5, "`train_data`")
    assert {path: path.lstat().st_mtime_ns for path in run.checkpoints.rglob("*")} == checkpoints


@pytest.mark.long
@pytest.mark.skipif(not can_mount(), reason="needs root and namespaces")
def test_a_run_resumes_under_another_host_name(launcher: Launcher) -> None:
    """Two local processes use the loopback if the host name does not resolve."""
    words = ("train-distributed", f"CONFIG={launcher.config}", "RUN_NAME=moved", "NUM_GPUS=2")
    for name, typed in (("one", words), ("two", ("resume", "RUN=moved", "TRAIN_MAX_STEPS=3"))):
        done = launcher.in_namespace("-u", f'hostname nobody-knows-{name} && exec "$@"', *typed)
        assert done.code == 0, done.err
    assert [row["step"] for row in metrics(launcher.runs / "moved")] == [1, 2, 3]


def test_an_unusable_cache_is_one_error(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "inside"
    done = launcher("train", f"CONFIG={launcher.config}", "RUN_NAME=none", SFT_PLAY_CACHE=str(cache))
    require_one_error(done, 3, str(cache), "SFT_PLAY_CACHE")
    assert not (launcher.runs / "none").exists()


STRANGER = ["unshare", "-U", "--map-user=12345"]
"""Without an entry in `/etc/passwd`, as containers run with `runAsUser`."""


def as_stranger(launcher: Launcher, *words: str, **environment: str) -> Done:
    if (
        shutil.which(STRANGER[0]) is None
        or subprocess.run([*STRANGER, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("needs user namespaces")
    readable = {
        k: v
        for k, v in launcher.environment.items()
        if k not in ("HOME", "USER", "LOGNAME", "SFT_PLAY_CACHE", "HF_HOME")
    }
    return launcher.run_command([*STRANGER, sys.executable, "-m", "sft_play", *words], readable | environment)


@pytest.mark.parametrize("home", [None, "/gone", "/proc"])
def test_a_user_without_a_home_is_told_which_variables_replace_it(launcher: Launcher, home: str | None) -> None:
    for command in ("train", "plan", "runs"):
        words = () if command == "runs" else (f"CONFIG={launcher.config}",)
        done = as_stranger(launcher, command, *words, **({"HOME": home} if home else {}))
        require_one_error(done, 3, "SFT_PLAY_CACHE=", "HF_HOME=", home or "`/etc/passwd`")
    assert as_stranger(launcher, "help").code == 0


def test_places_that_a_user_may_not_enter_are_named(launcher: Launcher, tmp_path: Path) -> None:
    """An image's `HOME=/root` for another user, a colleague's file."""
    locked = tmp_path / "locked"
    locked.mkdir(mode=0)
    words = ("data", f"CONFIG={launcher.config}")
    places = {"SFT_PLAY_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hub")}
    for done, name in (
        (as_stranger(launcher, *words, HOME=f"{locked}/home"), "SFT_PLAY_CACHE="),
        (as_stranger(launcher, "plan", *words[1:], **{**places, "HF_HOME": f"{locked}/hub"}), f"{locked}/hub"),
        (as_stranger(launcher, *words, f"DATA_TRAIN_PATH={locked}/rows.jsonl", **places), f"{locked}/rows.jsonl"),
    ):
        require_one_error(done, 3, name)
    assert "cannot be read or written: Permission denied" in done.err and "the cache is" not in done.err


def test_a_user_without_a_home_trains(launcher: Launcher, tmp_path: Path) -> None:
    caches = {"SFT_PLAY_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hub")}
    before = set(tmp_path.iterdir())
    done = as_stranger(
        launcher, "train-distributed", f"CONFIG={launcher.config}", "NUM_GPUS=2", "RUN_NAME=one", **caches
    )
    assert done.code == 0, done.err
    assert [row["step"] for row in metrics(launcher.runs / "one")] == [1, 2]
    assert {path.name for path in set(tmp_path.iterdir()) - before} == {"cache", "runs"}, "no folder called `~`"
    assert as_stranger(launcher, "infer", "RUN=one", "PROMPT=hi", **caches).code == 0


def test_processes_that_load_data_meet_in_a_short_folder(launcher: Launcher, tmp_path: Path) -> None:
    """A socket's path has at most 107 letters; otherwise the run would wait for its first batch forever."""
    folder = tmp_path / "x" / ("y" * 100)
    folder.mkdir(parents=True)
    words = ("train", f"CONFIG={launcher.config}", "TRAIN_DATALOADER_NUM_WORKERS=2", "RUN_NAME=one")
    done = launcher(*words, TMPDIR=str(folder))
    assert done.code == 0 and len(metrics(launcher.runs / "one")) == 2, done.err


@pytest.mark.skipif(not can_mount(), reason="needs root and mount namespaces")
@pytest.mark.parametrize(
    ("mount", "message"), [("size=64k", "no space is left for batches"), ("ro", "cannot use it: Read-only file system")]
)
def test_shared_memory_that_processes_that_load_data_cannot_use_is_named(
    launcher: Launcher, mount: str, message: str
) -> None:
    script = f'umount -l /dev/shm; mount -t tmpfs -o {mount} none /dev/shm && exec "$@"'
    words = ("train", f"CONFIG={launcher.config}", "RUN_NAME=one", "TRAIN_DATALOADER_NUM_WORKERS=1")
    done = launcher.in_namespace("-m", script, *words)
    assert done.code == 3 and "error: /dev/shm: " in done.err and message in done.err, done.err


@pytest.mark.cold
def test_libraries_do_not_run_under_python_without_docstrings(launcher: Launcher) -> None:
    done = launcher("train", f"CONFIG={launcher.config}", "RUN_NAME=one", PYTHONOPTIMIZE="2")
    assert done.code == 0 and len(metrics(launcher.runs / "one")) == 2, done.err


def test_a_batch_that_cannot_be_transferred_ends_the_wait_at_once() -> None:
    from torch.utils.data import DataLoader

    from sft_play.training.loading import begin_loading

    loader = DataLoader(
        [1, 2], num_workers=1, collate_fn=lambda _: lambda: None, worker_init_fn=begin_loading
    )  # nothing pickles that
    with pytest.raises(RuntimeError, match=r"DataLoader worker .* exited unexpectedly"):
        next(iter(loader))


def test_a_console_that_is_closed_does_not_end_the_run(launcher: Launcher) -> None:
    words = [
        sys.executable,
        "-m",
        "sft_play",
        "train",
        f"CONFIG={launcher.config}",
        "RUN_NAME=unread",
        "TRAIN_MAX_STEPS=6",
    ]
    process = subprocess.Popen(
        words, env=launcher.environment, cwd=launcher.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    while not process.stdout.readline().startswith("run "):
        assert process.poll() is None
    process.stdout.close()  # as `| head` does; all that the workers say comes after it
    process.stderr.close()
    assert process.wait(SECONDS) == 0
    run = RunFolder(launcher.runs / "unread")
    assert [event["event"] for event in launcher.events("unread")] == ["started", "finished"]
    assert len(metrics(run.path)) == 6 and "Broken pipe" not in run.rank_log(0).read_text()
