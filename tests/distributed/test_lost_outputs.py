"""A run whose console goes away, and one whose disk fills: real pipes, and a real small disk."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sft_play.runs.checkpoints import newest_valid
from sft_play.runs.folder import RunFolder
from tests.launcher import Launcher

SECONDS = 240


@pytest.fixture
def launcher(tmp_path: Path, tiny: Path) -> Launcher:
    return Launcher(tmp_path, tiny)


def test_a_console_that_is_closed_does_not_end_the_run(launcher: Launcher) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "sft_play", "train", f"CONFIG={launcher.config}", "RUN_NAME=unread", "TRAIN_MAX_STEPS=6"],
        env=launcher.environment,
        cwd=launcher.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith("run "):
            break
    process.stdout.close()  # as `| head` does; all that the workers say comes after it
    assert process.wait(SECONDS) == 0, "".join(seen)
    run = RunFolder(launcher.runs / "unread")
    assert [event["event"] for event in launcher.events("unread")] == ["started", "finished"]
    assert [json.loads(line)["kind"] for line in run.metrics.read_text().splitlines()].count("train") == 6
    assert "Broken pipe" not in run.rank_log(0).read_text()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 96 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_fills_is_named_and_the_last_checkpoint_stays(launcher: Launcher, small_disk: Path) -> None:
    """Training goes on; asked to stop while the disk is still full, the command says that the newest steps are not kept."""
    process = launcher.start(
        "train",
        f"CONFIG={launcher.config}",
        "RUN_NAME=full",
        "TRAIN_MAX_STEPS=400000",
        "TRAIN_SAVE_STEPS=2",
        RUNS_DIR=str(small_disk),
    )
    run = RunFolder(small_disk / "full")
    launcher.wait_for(run.checkpoint(4), process)
    with contextlib.suppress(OSError), (small_disk / "other").open("wb", buffering=0) as other:
        while True:
            other.write(bytes(2**16) if (small_disk / "other").stat().st_size < 2**26 else bytes(2**12))
    time.sleep(3)  # many intervals go by
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGTERM)
    output, error = process.communicate(timeout=SECONDS)
    assert process.returncode == 3, output + error
    assert "the last save failed" in error
    assert str(run.path) in error
    assert "make resume RUN=full" in error
    assert "Traceback" not in output + error
    assert (output + error).count("was not saved: ") == 1, "one warning for all the intervals"
    assert "the last checkpoint, step-" in output + error
    assert json.loads(run.rank_exit(0).read_text())["code"] == 3
    (small_disk / "other").unlink()
    newest, _ = newest_valid(run)
    assert newest is not None
    reached = int(newest.name.removeprefix("step-"))
    done = launcher("resume", "RUN=full", f"TRAIN_MAX_STEPS={reached + 2}", RUNS_DIR=str(small_disk))
    assert done.returncode == 0, done.stderr
    assert launcher.events("full", small_disk)[-1]["event"] == "finished"
