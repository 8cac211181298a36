"""Tries without a newer checkpoint are counted for schedulers without a limit; the last one ends for good."""

from __future__ import annotations

from pathlib import Path

import pytest

from sft_play.launch.run_folder import record_event
from sft_play.runs.folder import RunFolder
from sft_play.schedulers.entry import LIMIT, Tries, begin_try, main

WORDS = ("train-distributed", "CONFIG=/config/config.json", "RUN_NAME=demo")
LOST = 75


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Return the run of `WORDS`, whose folder does not exist yet."""
    monkeypatch.setenv("RUNS_DIR", str(tmp_path / "runs"))
    return RunFolder(tmp_path / "runs" / "demo")


def tries_of(limit: int = 2) -> Tries:
    tries = begin_try(list(WORDS), {LIMIT: str(limit)})
    assert tries is not None
    return tries


def lost(event: str = "started") -> int:
    """Make a try whose workers started and ended with `LOST`; return the container's exit code."""
    tries = tries_of()
    tries.run.path.mkdir(parents=True, exist_ok=True)
    record_event(tries.run, event)
    return tries.end(LOST)


def test_restarts_end_with_a_permanent_code(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert [lost() for _ in range(3)] == [LOST, LOST, 3]
    error = capsys.readouterr().err
    assert (
        "3 tries in a row made no checkpoint, and `kubernetes.max_restarts` is 2" in error
        and "the count starts over" in error
    )
    assert lost() == LOST, "who submits again has looked at it"


def test_a_newer_checkpoint_resets_the_count(run: RunFolder) -> None:
    assert [lost(), lost()] == [LOST, LOST]
    run.checkpoint(10).mkdir(parents=True)
    assert [lost("resumed") for _ in range(3)] == [LOST, LOST, 3]


@pytest.mark.parametrize("code", [130, 143])
def test_a_requested_stop_is_not_a_failure(run: RunFolder, code: int) -> None:
    assert lost() == LOST
    assert [tries_of().end(code) for _ in range(5)] == [code] * 5
    assert [lost(), lost()] == [LOST, 3]


def test_waiting_for_unscheduled_pods_does_not_count_as_a_try(run: RunFolder) -> None:
    """The Master waits and leaves, and again; when the Workers come at last, the run has all its tries."""
    assert [tries_of().end(LOST) for _ in range(5)] == [LOST] * 5
    assert not run.path.exists(), "a run that never began has no folder"
    assert lost() == LOST
    assert [tries_of().end(LOST) for _ in range(5)] == [LOST] * 5, "nor in a run that has begun"
    assert [lost(), lost()] == [LOST, 3]


def test_pods_that_the_kernel_kills_count_too(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The master's name never gets an address: 175 each time; after tries that were killed it is 3, which no scheduler
    tries again.
    """
    for name, text in {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "0",
        "PET_MASTER_ADDR": "nobody.invalid",
        LIMIT: "1",
    }.items():
        monkeypatch.setenv(name, text)
    words = [*WORDS, "NUM_GPUS=1", "LAUNCH_JOIN_SECONDS=1"]
    run.checkpoint(40).mkdir(parents=True)
    assert main(words) == 175
    for _ in range(2):
        tries_of(limit=1)  # and never ends
    assert [main(words), main(words)] == [3, 175]
    assert "2 tries in a row made no newer checkpoint than that of step 40" in capsys.readouterr().err
