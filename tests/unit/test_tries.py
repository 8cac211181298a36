"""Launches without a newer checkpoint are counted for schedulers without a limit; the last one ends for good."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from sft_play.launch.run_folder import read_events, record_event
from sft_play.runs.folder import RunFolder
from sft_play.schedulers.entry import LIMIT, main, require_progress

WORDS = ["train-distributed", "CONFIG=/config/config.json", "RUN_NAME=demo", "NUM_GPUS=1", "LAUNCH_JOIN_SECONDS=1"]
LOST = 75


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Return the run of `WORDS`, in a pod whose master never gets an address, with at most two restarts."""
    environ = {"RUNS_DIR": str(tmp_path / "runs"), "PET_NNODES": "2", "PET_NODE_RANK": "0", LIMIT: "2"}
    for name, text in (environ | {"PET_MASTER_ADDR": "nobody.invalid"}).items():
        monkeypatch.setenv(name, text)
    folder = RunFolder(tmp_path / "runs" / "demo")
    folder.path.mkdir(parents=True)
    return folder


def launch(run: RunFolder, code: int | None = LOST) -> None:
    """Record a launch of node 0 and of another, and how the first ended; `None`: its pod was killed."""
    for node in (0, 1):
        record_event(run, "resumed", node_rank=node)
    if code is not None:
        record_event(run, "stopped" if code == 143 else "failed", code=code)


def test_restarts_end_with_a_permanent_code(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """Waiting for pods that are not scheduled does not count as a try, the end of a killed pod does."""
    for code in (LOST, None, LOST):
        assert [main(WORDS), main(WORDS)] == [175, 175]
        launch(run, code)
    assert main(WORDS) == 3
    error = capsys.readouterr().err
    assert "3 attempts in a row made no newer checkpoint, and `kubernetes.max_restarts` is 2" in error
    assert "the count starts over" in error and read_events(run)[-1]["code"] == 3
    assert main(WORDS) == 175, "who submits again has looked at it"


def test_pods_that_the_kernel_kills_while_they_prepare_data_count_too(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    run.path.rmdir()  # no launch gets so far as to make it
    for _ in range(3):
        require_progress(WORDS, os.environ)  # and never ends
    assert main(WORDS) == 3 and "3 attempts in a row made no newer checkpoint" in capsys.readouterr().err
    assert [main(WORDS), main(WORDS)] == [175, 175], "who submits again has looked at it"


def test_a_newer_checkpoint_or_a_stop_begins_a_new_row(run: RunFolder) -> None:
    for _ in range(2):
        launch(run)
        launch(run)
        launch(run, 143)
    assert main(WORDS) == 175
    for _ in range(3):
        launch(run)
    run.checkpoint(10).mkdir(parents=True)
    os.utime(run.checkpoint(10), (time.time() + 1,) * 2)
    assert main(WORDS) == 175


def test_memory_that_ran_out_is_not_tried_again(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    record_event(run, "started")
    record_event(run, "failed", code=LOST, cause="out_of_memory")
    assert (
        main(WORDS) == 3
        and "1 attempt in a row made no newer checkpoint, and memory ran out" in capsys.readouterr().err
    )


def test_memory_that_ran_out_after_a_newer_checkpoint_is_tried_again(run: RunFolder) -> None:
    record_event(run, "started")
    run.checkpoint(10).mkdir(parents=True)
    os.utime(run.checkpoint(10), (read_events(run)[0]["time"] + 1e-3,) * 2)
    time.sleep(0.01)
    record_event(run, "failed", code=LOST, cause="out_of_memory")
    assert main(WORDS) == 175
