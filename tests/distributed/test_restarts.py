"""A launch goes on by itself after a lost rank (`launch.max_restarts`), to the metrics of a run that nobody disturbed."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from tests.fault_runs import learnt, start, tiny_config
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="processes are watched by what Linux has")]
TWO = ("train-distributed", "NUM_GPUS=2", "LAUNCH_MAX_RESTARTS=1")


@pytest.fixture(scope="module")
def config(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"CONFIG={tiny_config(tmp_path_factory.mktemp('lost'), tiny)}"


@pytest.fixture(scope="module")
def undisturbed(variables: dict[str, str], config: str) -> list[tuple[int, float, float, float]]:
    with start(variables, *TWO, config, name="undisturbed") as launch:
        code, error = launch.end()
        assert code == 0, error
        assert json.loads((launch.run / "training_metrics.json").read_text())["restarts"] == []
        return learnt(launch.run)


def test_a_killed_rank(variables: dict[str, str], config: str, undisturbed: list[tuple[int, float, float, float]]) -> None:
    with start(variables, *TWO, config, name="killed") as launch:
        launch.wait_for_step(7)
        launch.workers()[1].kill()
        code, error = launch.end()
        assert code == 0, error
        assert f"restarting: rank 1 ({socket.gethostname()}) was killed by SIGKILL" in error
        assert "(restart 1 of 1)" in error
        assert learnt(launch.run) == undisturbed
        events = launch.events()
        assert [event["event"] for event in events] == ["started", "restarted", "finished"]
        assert (events[1]["rank"], events[1]["cause"]) == (1, "killed")
        assert events[1]["checkpoint"].startswith("step-0000")
        (restart,) = json.loads((launch.run / "training_metrics.json").read_text())["restarts"]
        assert restart == {key: events[1][key] for key in ("rank", "cause", "error", "checkpoint")}


@pytest.mark.long
def test_damaged_checkpoints_are_told_and_none_means_no_restart(variables: dict[str, str], config: str) -> None:
    with start(variables, *TWO, config, name="damaged") as launch:
        launch.wait_for_step(12)
        workers = launch.workers()
        for worker in workers.values():
            worker.suspend()
        saved = sorted((launch.run / "checkpoints").glob("step-*"))
        for checkpoint in saved:
            with (checkpoint / "adapter_model.safetensors").open("r+b") as stream:
                stream.seek(-1, 2)
                last = stream.read(1)
                stream.seek(-1, 2)
                stream.write(bytes([last[0] ^ 1]))
        workers[1].kill()
        workers[0].resume()
        code, error = launch.end()
        assert code == 5, error
        assert saved and all(f"skipped: {checkpoint.name}: " in error for checkpoint in saved), error
        assert "no valid checkpoint to continue from" in error and f"rank 1 ({socket.gethostname()}) was killed" in error
        assert [event["event"] for event in launch.events()] == ["started", "failed"]


@pytest.mark.long
def test_a_frozen_rank_leaves_with_a_killed_launcher(variables: dict[str, str], config: str) -> None:
    with start(variables, *TWO, config, "TRAIN_MAX_STEPS=100000", name="orphan") as launch:
        launch.wait_for_step(7)
        launch.workers()[1].suspend()
        launch.process.kill()
        until(lambda: not launch.left(), said=launch.left)
