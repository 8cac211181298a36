"""Ranks, agents and launchers that are killed, frozen or made to wait from outside: everyone stops, and the cause is named."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sft_play.launch.liveness import SCALE
from tests.fault_runs import Started, start, tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="processes are watched by what Linux has")]
TWO = ("train-distributed", "NUM_GPUS=2", "TRAIN_MAX_STEPS=100000", "TRAIN_SAVE_STEPS=1000")
"""Two ranks that have enough to do."""


@pytest.fixture(scope="module")
def config(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"CONFIG={tiny_config(tmp_path_factory.mktemp('watched'), tiny, rows=4000)}"


def gone_within(launch: Started, seconds: float) -> float:
    """Waits until no process of a launch lives; returns how long that took."""
    began = time.monotonic()
    while left := launch.left():
        assert time.monotonic() - began < seconds, [process.cmdline() for process in left]
        time.sleep(0.2)
    return time.monotonic() - began


def test_a_killed_launcher_leaves_no_process(variables: dict[str, str], config: str) -> None:
    with start(variables, *TWO, config, name="launcher") as launch:
        launch.wait_for_step(2)
        assert sorted(launch.workers()) == [0, 1]
        launch.process.kill()
        launch.end(within=30)
        gone_within(launch, 30)
        said = "".join(path.read_text() for path in launch.run.glob("logs/rank*.log"))
        assert re.search(r"the launcher is gone; rank \d leaves", said), (
            "the first that looks; the other may see its peer leave before"
        )


def test_a_killed_rank_is_named_and_everything_stops(variables: dict[str, str], config: str) -> None:
    with start(variables, *TWO, config, name="lost") as launch:
        launch.wait_for_step(2)
        launch.workers()[1].kill()
        code, error = launch.end(within=30)
        assert code == 75, error
        assert f"rank 1 ({socket.gethostname()}) was killed" in error and str(launch.run / "logs" / "rank1.log") in error
        assert launch.left() == []
        assert [event["event"] for event in launch.events()] == ["started", "failed"], "nothing shows that memory was short"
        assert launch.events()[-1]["rank"] == 1


@pytest.mark.long
def test_a_killed_agent_is_named(variables: dict[str, str], config: str) -> None:
    with start(variables, *TWO, config, name="agent") as launch:
        launch.wait_for_step(2)
        launch.workers()
        launch.agent().kill()
        code, error = launch.end(within=30)
        assert code == 75, error
        assert "`accelerate launch`) was killed by SIGKILL" in error
        assert launch.left() == []
        assert launch.events()[-1] | {"event": "failed", "code": 75, "rank": None} == launch.events()[-1]


def test_a_second_ctrl_c_kills_but_a_repeated_warning_does_not(variables: dict[str, str], config: str) -> None:
    with start({**variables, SCALE: "1"}, *TWO, config, name="twice") as launch:
        launch.wait_for_step(2)
        for worker in launch.workers().values():
            worker.suspend()
        for number in (signal.SIGUSR1, signal.SIGTERM):  # the second is a scheduler's next word
            launch.process.send_signal(number)
            time.sleep(1)
        assert launch.process.poll() is None
        launch.process.send_signal(signal.SIGINT)
        assert launch.end(within=15)[0] == 143
        assert launch.left() == []


@pytest.mark.parametrize("scale", [0.2, pytest.param(1.0, marks=pytest.mark.long)])
def test_a_frozen_rank_is_named(scale: float, variables: dict[str, str], config: str) -> None:
    with start({**variables, SCALE: str(scale)}, *TWO, config, name=f"frozen-{scale}") as launch:
        launch.wait_for_step(2)
        launch.workers()[1].send_signal(signal.SIGSTOP)
        code, error = launch.end(within=30)
        assert code == 75, error
        assert f"rank 1 ({socket.gethostname()}) is frozen" in error
        assert f"stopped by a signal for {20 * scale:.0f} s" in error
        assert str(launch.run / "logs" / "rank1.log") in error
        assert launch.left() == []


@pytest.mark.long
def test_a_pause_shorter_than_that_is_no_loss(variables: dict[str, str], config: str) -> None:
    with start(variables, *TWO, config, name="pause") as launch:
        launch.wait_for_step(2)
        everyone = [*launch.workers().values(), psutil.Process(launch.process.pid)]
        for process in everyone:  # a computer that sleeps
            process.send_signal(signal.SIGSTOP)
        time.sleep(25)
        for process in everyone:
            process.send_signal(signal.SIGCONT)
        step = launch.run / "metrics.jsonl"
        size = step.stat().st_size
        launch.wait_for(lambda: step.stat().st_size > size)
        time.sleep(3)
        assert launch.process.poll() is None
        launch.process.send_signal(signal.SIGTERM)
        assert launch.end(within=60)[0] == 143


def test_a_rank_that_waits_for_ever_is_named_with_the_stacks_of_all(variables: dict[str, str], config: str) -> None:
    words = ("TRAIN_DATALOADER_NUM_WORKERS=1", "LAUNCH_HANG_SECONDS=8")
    with start(variables, *TWO, config, *words, name="hang") as launch:
        launch.wait_for_step(2)
        helpers = [child for child in launch.workers()[1].children() if "resource_tracker" not in " ".join(child.cmdline())]
        assert helpers
        for helper in helpers:
            helper.send_signal(signal.SIGSTOP)
        code, error = launch.end(within=40)
        assert code == 75, error
        assert f"rank 1 ({socket.gethostname()}) made no step for" in error
        assert "rank 0" in error
        assert "waiting for other ranks" in error
        assert "waiting for the rows of the next" in error
        for rank in range(2):
            assert "train.py" in (launch.run / "logs" / f"stack-rank{rank}.txt").read_text()
            assert json.loads((launch.run / "logs" / f"collectives-rank{rank}.json").read_text())["entries"]
        assert "collective operations begun" in error and "/logs/collectives-rank*.json" in error
        assert launch.left() == []
        assert launch.events()[-1]["rank"] == 1


def test_a_rank_that_does_not_join_is_named(variables: dict[str, str], config: str) -> None:
    with start(variables, *TWO, config, "LAUNCH_TIMEOUT_SECONDS=1", name="absent") as launch:
        launch.wait_for(lambda: 1 in launch.workers())
        slow = launch.workers()[1]
        while launch.process.poll() is None and slow.is_running():  # it lives, and does not get far
            with contextlib.suppress(psutil.NoSuchProcess):
                slow.send_signal(signal.SIGSTOP)
            with contextlib.suppress(subprocess.TimeoutExpired):
                launch.process.wait(timeout=5)
            with contextlib.suppress(psutil.NoSuchProcess):
                slow.send_signal(signal.SIGCONT)
                time.sleep(0.05)
        code, error = launch.end(within=30)
        assert code == 75, error
        assert "rank 1 of 2 did not join within 1 s" in error, error
        assert f"there are: 0 ({socket.gethostname()})" in error
        assert launch.left() == []
