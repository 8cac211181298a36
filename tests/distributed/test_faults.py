"""What else goes wrong around a run, with real processes: each time one clear error, or the run goes on as if nothing had been."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sft_play.runs.folder import RunFolder
from tests.conftest import metrics
from tests.launcher import Launcher, can_mount
from tests.tiny_models import build_tiny_llama
from tests.waiting import until

SECONDS = 240
EXACT = ("step", "loss", "grad_norm", "learning_rate", "rank_loss")
needs_mounts = pytest.mark.skipif(not can_mount(), reason="needs root and mount namespaces")


@pytest.fixture(scope="module")
def own_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model that these tests may change and put back."""
    return build_tiny_llama(tmp_path_factory.mktemp("faults") / "base")


@pytest.fixture
def launcher(tmp_path: Path, own_model: Path) -> Launcher:
    made = Launcher(tmp_path, own_model)
    made.environment["SFT_PLAY_CACHE"] = str(tmp_path / "cache")
    return made


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory, own_model: Path) -> tuple[Launcher, list[list[object]]]:
    """A run of 4 steps that has lost its end, as a kill in step 3 leaves it, and the rows it had."""
    made = Launcher(tmp_path_factory.mktemp("half"), own_model)
    made.environment["SFT_PLAY_CACHE"] = str(made.folder / "cache")
    done = made("train", f"CONFIG={made.config}", "RUN_NAME=half", "TRAIN_MAX_STEPS=4", "TRAIN_SAVE_STEPS=2")
    assert done.returncode == 0, done.stderr
    run = RunFolder(made.runs / "half")
    whole = exact(run)
    shutil.rmtree(run.checkpoint(4))
    shutil.rmtree(run.model)
    return made, whole


@pytest.fixture
def torn(half: tuple[Launcher, list[list[object]]], tmp_path: Path) -> tuple[Launcher, RunFolder, list[list[object]]]:
    """A copy of `half` in a folder of its own, with the cache."""
    made, whole = half
    shutil.copytree(made.runs, tmp_path / "runs", symlinks=True)
    mine = Launcher(tmp_path, Path(json.loads((made.runs / "half" / "prepared.json").read_text())["model"]["path"]))
    mine.environment = {**made.environment, "RUNS_DIR": str(mine.runs), "SFT_PLAY_CACHE": str(made.folder / "cache")}
    return mine, RunFolder(mine.runs / "half"), whole


def exact(run: RunFolder) -> list[list[object]]:
    return [[row[key] for key in EXACT] for row in metrics(run.path)]


def one_error(text: str) -> str:
    """Returns the error, after it was seen to be one and no traceback."""
    assert "Traceback" not in text, text
    assert len(re.findall(r"^error: ", text, re.M)) == 1, text
    return text.partition("error: ")[2]


def started(
    launcher: Launcher, command: str, *words: str, name: str, somewhere: Callable[[RunFolder], bool]
) -> subprocess.Popen[str]:
    """Starts a long run and waits until it has come somewhere."""
    process = launcher.start(command, f"CONFIG={launcher.config}", f"RUN_NAME={name}", "TRAIN_MAX_STEPS=4000", *words)
    until(lambda: somewhere(RunFolder(launcher.runs / name)), process=process, seconds=SECONDS)
    return process


# ---- Two launchers


@pytest.mark.long
def test_resume_and_train_of_a_run_that_is_running(launcher: Launcher) -> None:
    process = started(launcher, "train", "TRAIN_SAVE_STEPS=1000", name="busy", somewhere=lambda run: run.metrics.is_file())
    try:
        resumed = launcher("resume", "RUN=busy")
        assert resumed.returncode == 2
        assert f"the run `busy` is in use: process {process.pid} trains it" in one_error(resumed.stderr)
        again = launcher("train", f"CONFIG={launcher.config}", "RUN_NAME=busy")
        assert again.returncode == 2
        assert "the run `busy` exists already" in one_error(again.stderr)
        other = launcher("train", f"CONFIG={launcher.config}", "RUN_NAME=busy", "LAUNCH_AUTO_RESUME=true")
        assert other.returncode == 2
        assert "is in use" in one_error(other.stderr)
        assert process.poll() is None, "the run itself goes on"
    finally:
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=SECONDS)
    assert process.returncode == 143, error


# ---- Before a resume


def test_a_base_model_that_has_changed_is_refused(torn: tuple[Launcher, RunFolder, list[list[object]]], own_model: Path) -> None:
    launcher, run, _ = torn
    weights = own_model / "model.safetensors"
    before = weights.read_bytes()
    checkpoints = {path: path.lstat().st_mtime_ns for path in run.checkpoints.rglob("*")}
    try:
        weights.write_bytes(before[:-4] + bytes([before[-4] ^ 1]) + before[-3:])
        done = launcher("resume", "RUN=half")
        assert done.returncode == 5, done.stderr
        assert "`base_fingerprint`" in one_error(done.stderr) and "restore them" in done.stderr
        weights.unlink()
        done = launcher("resume", "RUN=half")
        assert done.returncode in (4, 5), done.stderr
        assert str(own_model) in one_error(done.stderr)
    finally:
        weights.write_bytes(before)
    assert {path: path.lstat().st_mtime_ns for path in run.checkpoints.rglob("*")} == checkpoints


def test_training_rows_that_have_changed_are_refused(
    torn: tuple[Launcher, RunFolder, list[list[object]]], half: tuple[Launcher, list[list[object]]]
) -> None:
    launcher, _, _ = torn
    rows = half[0].folder / "rows.jsonl"
    before = rows.read_text()
    try:
        rows.write_text(before.replace("I say 3 now", "I say three now"))
        done = launcher("resume", "RUN=half")
        assert done.returncode == 5, done.stderr
        assert "`train_data`" in one_error(done.stderr)
    finally:
        rows.write_text(before)


@pytest.mark.long
@pytest.mark.parametrize("harm", ["deleted", "changed"])
def test_prepared_data_that_are_gone_or_changed_are_made_again(
    harm: str, torn: tuple[Launcher, RunFolder, list[list[object]]], tmp_path: Path
) -> None:
    launcher, run, whole = torn
    cache = tmp_path / "cache"
    shutil.copytree(launcher.environment["SFT_PLAY_CACHE"], cache)
    launcher.environment["SFT_PLAY_CACHE"] = str(cache)
    arrow = next((cache / "data").glob("train-*/*.arrow"))
    content = arrow.read_bytes()
    if harm == "deleted":
        shutil.rmtree(cache)
    else:  # another token in every row, the file as long as before
        arrow.write_bytes(
            bytes(b ^ 1 if place % 97 == 0 and 600 < place < len(content) - 600 else b for place, b in enumerate(content))
        )
    done = launcher("resume", "RUN=half")
    assert done.returncode == 0, done.stderr
    assert exact(run) == whole
    assert (cache / "data").is_dir()


@pytest.mark.long
@needs_mounts
def test_a_run_resumes_under_another_host_name(torn: tuple[Launcher, RunFolder, list[list[object]]]) -> None:
    """Two processes and a name that nothing resolves: what is local goes over the loopback."""
    launcher, run, _ = torn
    words = [sys.executable, "-m", "sft_play", "train-distributed", f"CONFIG={launcher.config}", "RUN_NAME=moved", "NUM_GPUS=2"]
    script = 'hostname "nobody-knows-$1" && shift && exec "$@"'
    for name, command in (
        ("one", words),
        ("two", [sys.executable, "-m", "sft_play", "resume", "RUN=moved", "TRAIN_MAX_STEPS=3"]),
    ):
        done = subprocess.run(
            ["unshare", "-u", "sh", "-c", script, "sh", name, *command], env=launcher.environment, cwd=launcher.folder,
            capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert [row["step"] for row in metrics(launcher.runs / "moved")] == [1, 2, 3]
    assert run.path.is_dir()


# ---- During a run


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Lays a read-only mount of a folder over itself, as a file system does that the kernel has found errors in."""
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True, timeout=30)
    try:
        words = ["mount", "-o", "remount,bind,ro", str(folder)]
        until(
            lambda: not subprocess.run(words, capture_output=True, timeout=30, check=False).returncode
        )  # refused while a file is open
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=30)


@needs_mounts
def test_a_cache_that_cannot_be_written(launcher: Launcher, tmp_path: Path) -> None:
    cache = tmp_path / "fixed"
    cache.mkdir()
    with read_only(cache):
        done = launcher("train", f"CONFIG={launcher.config}", "RUN_NAME=none", SFT_PLAY_CACHE=str(cache))
    assert done.returncode == 3, done.stderr
    assert str(cache) in one_error(done.stderr) and "SFT_PLAY_CACHE" in done.stderr
    assert not (launcher.runs / "none").exists()
    (tmp_path / "file").touch()
    done = launcher("train", f"CONFIG={launcher.config}", "RUN_NAME=none", SFT_PLAY_CACHE=str(tmp_path / "file" / "inside"))
    assert done.returncode == 3, done.stderr
    assert "SFT_PLAY_CACHE" in one_error(done.stderr)
