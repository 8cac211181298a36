"""Tries without a newer checkpoint are counted where a scheduler knows no limit, and the last one ends for good."""

from __future__ import annotations

from pathlib import Path

import pytest

from sft_play.errors import HardwareError
from sft_play.launch.run_folder import record_event
from sft_play.runs.folder import RunFolder
from sft_play.schedulers.entry import LIMIT, Tries, begin_try, main

WORDS = ("train-distributed", "CONFIG=/config/config.json", "RUN_NAME=demo")
LOST = 75


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """The run of `WORDS`, whose folder is not there yet."""
    monkeypatch.setenv("RUNS_DIR", str(tmp_path / "runs"))
    return RunFolder(tmp_path / "runs" / "demo")


def one(*more: str, limit: int = 2) -> Tries:
    tries = begin_try([*WORDS, *more], {LIMIT: str(limit)})
    assert tries is not None
    return tries


def lost(*, limit: int = 2, code: int = LOST) -> int:
    """One try whose workers were started, and which ended by `code`; returns what the container ends with."""
    tries = one(limit=limit)
    tries.run.path.mkdir(parents=True, exist_ok=True)
    record_event(tries.run, "started")
    return tries.end(code)


def test_so_many_restarts_and_then_a_permanent_code(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert [lost() for _ in range(3)] == [LOST, LOST, 3]
    said = capsys.readouterr().err
    assert "3 tries in a row made no checkpoint, and `kubernetes.max_restarts` is 2" in said and "the count starts over" in said
    assert not run.tries.exists()
    assert lost() == LOST, "who submits again has looked at it"


def test_a_newer_checkpoint_begins_the_count_anew(run: RunFolder) -> None:
    assert [lost() for _ in range(2)] == [LOST, LOST]
    third = one()
    record_event(run, "resumed")
    run.checkpoint(10).mkdir(parents=True)
    assert third.end(LOST) == LOST
    assert [lost() for _ in range(3)] == [LOST, LOST, 3]


def test_pods_that_the_kernel_kills_count_too(run: RunFolder) -> None:
    run.checkpoint(40).mkdir(parents=True)
    for _ in range(3):
        one()  # and never ends
    with pytest.raises(HardwareError, match="3 tries in a row made no newer checkpoint than that of step 40"):
        one()
    assert [lost(code=137) for _ in range(3)] == [137, 137, 3]


@pytest.mark.parametrize("code", [130, 143])
def test_a_stop_that_was_asked_for_is_no_failure(run: RunFolder, code: int) -> None:
    assert lost() == LOST
    assert [one().end(code) for _ in range(5)] == [code] * 5
    assert [lost() for _ in range(2)] == [LOST, 3]


def test_waiting_for_pods_that_are_not_scheduled_is_no_try(run: RunFolder) -> None:
    """The Master waits and leaves, and again; when the Workers come at last, the run has all its tries."""
    assert [one().end(LOST) for _ in range(5)] == [LOST] * 5
    assert not run.path.exists(), "a run that never began has no folder"
    assert lost() == LOST
    assert [one().end(LOST) for _ in range(5)] == [LOST] * 5, "nor in a run that has begun"
    record_event(run, "failed", node_rank=1, code=LOST)  # the other node's last word comes late
    assert one().end(LOST) == LOST
    assert [lost(), lost()] == [LOST, 3]


def test_the_entry_point_ends_for_good(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The master's name never gets an address: 175 each time; with tries that were killed it is 3, which no scheduler tries again."""
    for name, text in {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "nobody.invalid", LIMIT: "1"}.items():
        monkeypatch.setenv(name, text)
    words = [*WORDS, "NUM_GPUS=1", "LAUNCH_JOIN_SECONDS=1"]
    assert [main(words) for _ in range(2)] == [175, 175]
    for _ in range(2):
        one(limit=1)
    assert [main(words) for _ in range(2)] == [3, 175]
    assert "2 tries in a row" in capsys.readouterr().err
