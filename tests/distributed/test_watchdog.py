"""Ranks, agents and launchers that are killed or frozen from outside: the cause is named, and all stop or restart."""

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
from tests.conftest import metrics
from tests.launcher import start, tiny_config
from tests.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are watched by what Linux has"),
]
TWO = ("train-distributed", "NUM_GPUS=2")
LONG = (*TWO, "TRAIN_MAX_STEPS=100000", "TRAIN_SAVE_STEPS=1000")
"""Two ranks that have enough to do."""
RANK_1 = f"rank 1 ({socket.gethostname()})"


@pytest.fixture(scope="module")
def config(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"CONFIG={tiny_config(tmp_path_factory.mktemp('watched'), tiny, rows=4000)}"


def test_a_killed_launcher_leaves_no_process(variables: dict[str, str], config: str) -> None:
    with start(variables, *LONG, config, name="launcher") as launch:
        launch.wait_for_step(2)
        assert sorted(launch.workers()) == [0, 1]
        launch.process.kill()
        launch.end(within=240)
        until(lambda: not launch.left(), explanation=launch.left)
        log = "".join(path.read_text() for path in launch.run.glob("logs/rank*.log"))
        assert re.search(r"the launcher is gone; rank \d exits", log), (
            "the first that looks; the other may see its peer leave before"
        )


@pytest.mark.parametrize(
    ("target", "number", "scale", "parts"),
    [
        (1, signal.SIGKILL, "1", (f"{RANK_1} was killed", "/logs/rank1.log")),
        pytest.param(
            None, signal.SIGKILL, "1", ("`accelerate launch`) was killed by SIGKILL",), marks=pytest.mark.long
        ),
        (1, signal.SIGSTOP, "0.2", (f"{RANK_1} is frozen", "stopped by a signal for 4 s", "/logs/rank1.log")),
        pytest.param(1, signal.SIGSTOP, "1", ("stopped by a signal for 20 s",), marks=pytest.mark.long),
    ],
)
def test_a_lost_process_is_named_and_everything_stops(
    target: int | None, number: int, scale: str, parts: tuple[str, ...], variables: dict[str, str], config: str
) -> None:
    with start({**variables, SCALE: scale}, *LONG, config, name=f"lost-{target}-{number}-{scale}") as launch:
        launch.wait_for_step(2)
        (launch.workers() | {None: launch.agent()})[target].send_signal(number)
        launch.lost(*parts)
        assert [event["event"] for event in launch.events()] == [
            "started",
            "failed",
        ], "nothing shows that memory was short"
        assert (launch.events()[-1]["rank"], launch.events()[-1]["code"]) == (target, 75)


def loaders(worker: psutil.Process) -> list[psutil.Process]:
    return [child for child in worker.children() if "resource_tracker" not in " ".join(child.cmdline())]


def test_a_run_restarts_if_a_process_that_loads_data_is_killed(variables: dict[str, str], config: str) -> None:
    words = ("TRAIN_MAX_STEPS=40", "TRAIN_DATALOADER_NUM_WORKERS=1", "LAUNCH_MAX_RESTARTS=1")
    with start(variables, *TWO, config, *words, name="loader") as launch:
        launch.wait_for_step(5)
        for loader in loaders(launch.workers()[1]):
            loader.kill()
        code, output = launch.end()
    assert code == 0, output
    assert f"restarting: a process that loads data for {RANK_1} was killed by SIGKILL " in output, output
    assert [row["step"] for row in metrics(launch.run)] == [*range(1, 41)]
    assert [event["event"] for event in launch.events()] == ["started", "restarted", "finished"]


def test_a_second_ctrl_c_kills_but_a_repeated_warning_does_not(variables: dict[str, str], config: str) -> None:
    with start({**variables, SCALE: "1"}, *LONG, config, name="twice") as launch:
        launch.wait_for_step(2)
        for worker in launch.workers().values():
            worker.suspend()
        for number in (signal.SIGUSR1, signal.SIGTERM):  # the second is a scheduler's next word
            launch.process.send_signal(number)
            time.sleep(1)
        assert launch.process.poll() is None
        launch.process.send_signal(signal.SIGINT)
        assert launch.end(within=240)[0] == 143
        assert launch.left() == []


@pytest.mark.long
def test_a_short_pause_does_not_count_as_a_loss(variables: dict[str, str], config: str) -> None:
    with start(variables, *LONG, config, name="pause") as launch:
        launch.wait_for_step(2)
        everyone = [*launch.workers().values(), psutil.Process(launch.process.pid)]
        for process in everyone:  # a computer that sleeps
            process.suspend()
        time.sleep(25)
        for process in everyone:
            process.resume()
        step = launch.run / "metrics.jsonl"
        size = step.stat().st_size
        launch.wait_for(lambda: step.stat().st_size > size)
        time.sleep(3)
        assert launch.process.poll() is None
        launch.process.send_signal(signal.SIGTERM)
        assert launch.end(within=240)[0] == 143


def test_a_rank_that_waits_forever_is_named_with_the_stacks_of_all(variables: dict[str, str], config: str) -> None:
    with start(
        variables, *LONG, config, "TRAIN_DATALOADER_NUM_WORKERS=1", "LAUNCH_HANG_SECONDS=8", name="hang"
    ) as launch:
        launch.wait_for_step(2)
        assert loaders(launch.workers()[1])
        for loader in loaders(launch.workers()[1]):
            loader.suspend()
        launch.lost(
            f"{RANK_1} made no step for",
            "rank 0",
            "waiting for other ranks",
            "waiting for the rows of the next",
            "collective operations begun",
            "/logs/collectives-rank*.json",
        )
        for rank in range(2):
            assert "train.py" in (launch.run / "logs" / f"stack-rank{rank}.txt").read_text()
            assert json.loads((launch.run / "logs" / f"collectives-rank{rank}.json").read_text())["entries"]
        assert launch.events()[-1]["rank"] == 1


def test_a_rank_that_does_not_join_is_named(variables: dict[str, str], config: str) -> None:
    with start(variables, *LONG, config, "LAUNCH_TIMEOUT_SECONDS=1", name="absent") as launch:
        launch.wait_for(lambda: 1 in launch.workers())
        slow = launch.workers()[1]
        while launch.process.poll() is None and slow.is_running():  # it lives, and does not get far
            with contextlib.suppress(psutil.NoSuchProcess):
                slow.suspend()
            with contextlib.suppress(subprocess.TimeoutExpired):
                launch.process.wait(timeout=5)
            with contextlib.suppress(psutil.NoSuchProcess):
                slow.resume()
                time.sleep(0.05)
        launch.lost("rank 1 of 2 did not join within 1 s", f"joined: 0 ({socket.gethostname()})")


# A launch continues by itself after a lost rank (`launch.max_restarts`).


def test_a_killed_rank_restarts_to_the_metrics_of_an_undisturbed_run(variables: dict[str, str], config: str) -> None:
    learnt, reported = [], []
    for name in ("undisturbed", "killed"):
        with start(variables, *TWO, config, "LAUNCH_MAX_RESTARTS=1", name=name) as launch:
            if name == "killed":
                launch.wait_for_step(7)
                launch.workers()[1].kill()
            code, error = launch.end()
        assert code == 0, error
        learnt.append(
            [[row[key] for key in ("step", "loss", "grad_norm", "learning_rate")] for row in metrics(launch.run)]
        )
        reported.append(json.loads((launch.run / "training_metrics.json").read_text())["restarts"])
    assert f"restarting: {RANK_1} was killed by SIGKILL" in error and "(restart 1 of 1)" in error
    assert learnt[0] == learnt[1]
    started, restarted, finished = launch.events()
    assert [started["event"], restarted["event"], finished["event"]] == ["started", "restarted", "finished"]
    assert (restarted["rank"], restarted["cause"]) == (1, "killed") and restarted["checkpoint"].startswith("step-0000")
    assert reported == [[], [{key: restarted[key] for key in ("rank", "cause", "error", "checkpoint")}]]


def test_a_stop_while_a_restart_waits_ends_the_run(variables: dict[str, str], config: str) -> None:
    """No worker lives then, and the run ends as by any other stop: recorded, reported, with the way to continue it."""
    with start(variables, *LONG, config, "LAUNCH_MAX_RESTARTS=3", name="between") as launch:
        launch.wait_for_step(2)
        launch.workers()[1].kill()
        until(lambda: [event["event"] for event in launch.events()] == ["started", "restarted"])
        launch.process.send_signal(signal.SIGTERM)
        code, output = launch.end()
    assert code == 143, output
    assert "stopped by SIGTERM; there is no complete checkpoint" in output
    assert f"make resume RUN={launch.run.name}" in output
    assert (launch.events()[-1]["event"], launch.events()[-1]["signal"]) == ("stopped", "SIGTERM")
    assert (launch.run / "report.html").is_file()


@pytest.mark.long
def test_damaged_checkpoints_are_reported_and_without_one_there_is_no_restart(
    variables: dict[str, str], config: str
) -> None:
    with start(variables, *TWO, config, "LAUNCH_MAX_RESTARTS=1", name="damaged") as launch:
        launch.wait_for_step(12)
        workers = launch.workers()
        for worker in workers.values():
            worker.suspend()
        saved = sorted((launch.run / "checkpoints").glob("step-*"))
        for checkpoint in saved:
            weights = checkpoint / "adapter_model.safetensors"
            content = weights.read_bytes()
            weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        workers[1].kill()
        workers[0].resume()
        code, error = launch.end()
        assert code == 5, error
        assert saved and all(f"skipped: {checkpoint.name}: " in error for checkpoint in saved), error
        assert "no valid checkpoint to continue from" in error and f"{RANK_1} was killed" in error
        assert [event["event"] for event in launch.events()] == ["started", "failed"]
