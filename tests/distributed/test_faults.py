"""What else goes wrong around a run, with real processes: each time one clear error, or the run goes on as if nothing had been."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sft_play.runs.checkpoints import newest_valid, step_of
from sft_play.runs.folder import RunFolder
from sft_play.soak.report import read_curves
from tests.clock import Clock
from tests.conftest import metrics
from tests.launcher import Launcher, can_mount
from tests.tiny_models import build_tiny_llama
from tests.waiting import until

SECONDS = 240
EXACT = ("step", "loss", "grad_norm", "learning_rate", "rank_loss")
DAY = 86_400
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
@pytest.mark.parametrize("harm", ["deleted", "changed", "cut"])
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
    elif harm == "changed":  # another token in every row, the file as long as before
        arrow.write_bytes(
            bytes(b ^ 1 if place % 97 == 0 and 600 < place < len(content) - 600 else b for place, b in enumerate(content))
        )
    else:
        arrow.write_bytes(content[:-50])
    done = launcher("resume", "RUN=half")
    assert done.returncode == 0, done.stderr
    assert exact(run) == whole
    assert (cache / "data").is_dir()


def test_dates_in_the_future_choose_nothing(torn: tuple[Launcher, RunFolder, list[list[object]]]) -> None:
    """Files of an older checkpoint that look newer, events from tomorrow: as after a clock was set back."""
    launcher, run, whole = torn
    shutil.copytree(run.checkpoint(2), run.checkpoint(1))  # an older checkpoint, by its name
    later = time.time() + 30 * DAY
    for path in [
        *run.checkpoint(1).rglob("*"),
        run.checkpoint(1),
        *run.tensorboard.rglob("*"),
        *run.logs.iterdir(),
        run.stamp,
        run.plan,
    ]:
        os.utime(path, (later, later))
    for index, path in enumerate(sorted(run.tensorboard.glob("events*"))):
        path.rename(path.with_name(f"events.out.tfevents.{int(later) + index}.host.1.0"))
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    run.events.write_text("".join(json.dumps({**event, "time": event["time"] + 30 * DAY}) + "\n" for event in events))
    done = launcher("resume", "RUN=half")
    assert done.returncode == 0, done.stderr
    assert "from step-000002" in done.stderr
    assert exact(run) == whole
    assert [step for step, _ in read_curves(run.tensorboard)["train/loss"]] == [1, 2, 3, 4]


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


@pytest.mark.long
def test_a_cache_that_is_deleted_while_a_run_uses_it(launcher: Launcher) -> None:
    process = started(launcher, "train", "TRAIN_SAVE_STEPS=1000", name="cacheless", somewhere=lambda run: run.metrics.is_file())
    run = RunFolder(launcher.runs / "cacheless")
    shutil.rmtree(launcher.environment["SFT_PLAY_CACHE"])
    steps = len(metrics(run.path))
    stopped_after(process, run, steps + 5)  # over the end of an epoch of two steps
    newest, _ = newest_valid(run)
    assert newest is not None
    done = launcher("resume", "RUN=cacheless", f"TRAIN_MAX_STEPS={step_of(newest) + 1}")
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in metrics(run.path)] == list(range(1, step_of(newest) + 2))


def stopped_after(process: subprocess.Popen[str], run: RunFolder, steps: int) -> None:
    """Stops a training by SIGTERM when it has logged so many steps."""
    until(lambda: len(metrics(run.path)) >= steps, process=process, seconds=SECONDS)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=SECONDS)
    assert process.returncode == 143, error


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


@pytest.mark.long
@needs_mounts
def test_a_run_folder_that_becomes_read_only(launcher: Launcher) -> None:
    """As with a full disk the run goes on, warns, and saves again when it can; a stop meanwhile says that nothing could be saved."""
    words = ("TRAIN_SAVE_STEPS=2", "TRAIN_SAVE_TOTAL_LIMIT=2")
    process = started(launcher, "train", *words, name="frozen", somewhere=lambda run: run.checkpoint(4).is_dir())
    run = RunFolder(launcher.runs / "frozen")

    with read_only(run.path):
        until(lambda: run.rank_log(0).read_text().count("read-only now") > 1, process=process, seconds=SECONDS)
        before, skipped = newest_valid(run)
        assert before is not None and not skipped
        time.sleep(2)
        assert newest_valid(run) == (before, [])
    until(
        lambda: (newest := newest_valid(run)[0]) is not None and step_of(newest) > step_of(before),
        process=process,
        seconds=SECONDS,
    )
    with read_only(run.path):
        process.send_signal(signal.SIGTERM)
        output, error = process.communicate(timeout=SECONDS)
    assert process.returncode == 3, error
    assert "read-only" in one_error(error).lower() and str(run.path) in error
    assert "make resume RUN=frozen" in error
    assert "Traceback" not in output
    newest, skipped = newest_valid(run)
    assert newest is not None and not skipped
    done = launcher("resume", "RUN=frozen", f"TRAIN_MAX_STEPS={step_of(newest) + 2}")
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in metrics(run.path)] == list(range(1, step_of(newest) + 3))


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


@pytest.mark.long
@pytest.mark.skipif(not Clock.can_be_made(), reason="needs a C compiler")
def test_a_clock_that_is_set_back_during_a_run_and_before_its_resume(launcher: Launcher, tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    launcher.environment |= clock.variables
    shown = subprocess.run(
        [sys.executable, "-c", "import time; print(time.time())"],
        env=launcher.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert abs(float(shown.stdout) - time.time()) < 60
    process = started(
        launcher,
        "train-distributed",
        "NUM_GPUS=2",
        "TRAIN_SAVE_STEPS=2",
        name="back",
        somewhere=lambda run: run.checkpoint(2).is_dir(),
    )
    run = RunFolder(launcher.runs / "back")
    clock.turn(-DAY)
    steps = len(metrics(run.path))
    stopped_after(process, run, steps + 6)
    clock.turn(-3 * DAY)
    newest, _ = newest_valid(run)
    assert newest is not None
    done = launcher("resume", "RUN=back", f"TRAIN_MAX_STEPS={step_of(newest) + 3}")
    assert done.returncode == 0, done.stderr
    assert f"from {newest.name}" in done.stderr
    times = [event["time"] for event in launcher.events("back")]
    assert times[0] - times[-1] > 2 * DAY, "the clock of the run was set back"
    wanted = list(range(1, step_of(newest) + 4))
    assert [row["step"] for row in metrics(run.path)] == wanted
    assert [step for step, _ in read_curves(run.tensorboard)["train/loss"]] == wanted


# ---- The port


@pytest.mark.long
@pytest.mark.parametrize("listens", [True, False])
def test_a_port_that_is_taken_between_choosing_and_using_it(listens: bool, launcher: Launcher) -> None:
    """Another process takes the port as soon as it stands in the run's accelerate.yaml: the launch takes another.

    A port that answers is seen by accelerate itself; one that is only bound is in the way of torchrun.
    """
    taken: list[int] = []
    other, stop = socket.socket(), threading.Event()

    def take() -> None:
        path = launcher.runs / "port" / "accelerate.yaml"
        while not stop.is_set() and not taken:
            found = re.search(r"main_process_port: (\d+)", path.read_text()) if path.is_file() else None
            if found:
                other.bind(("", int(found[1])))
                if listens:
                    other.listen()
                taken.append(int(found[1]))
            time.sleep(0.005)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    try:
        done = launcher("train-distributed", f"CONFIG={launcher.config}", "NUM_GPUS=2", "RUN_NAME=port")
    finally:
        stop.set()
        thread.join()
        other.close()
    assert taken
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert len(metrics(launcher.runs / "port")) == 2
    if not listens:
        assert f"port {taken[0]} was taken meanwhile; trying another" in done.stderr


@pytest.mark.long
def test_a_typed_port_that_is_taken_meanwhile(launcher: Launcher) -> None:
    """It is kept: one error, worth trying again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    words = ("train-distributed", f"CONFIG={launcher.config}", "NUM_GPUS=2", "RUN_NAME=port", f"MASTER_PORT={port}")
    process = launcher.start(*words)
    launcher.wait_for(launcher.runs / "port", process)
    with socket.socket() as other:
        other.bind(("", port))
        _, error = process.communicate(timeout=SECONDS)
    assert process.returncode == 75, error
    assert "the port on which the workers meet was taken" in one_error(error) and "MASTER_PORT" in error
