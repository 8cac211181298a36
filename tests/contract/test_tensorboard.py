"""TensorBoard as a user starts and ends it: on 127.0.0.1, on the next free port, once, and ended by its own id only."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]


class TensorBoard:
    """Runs the commands with a runs folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.runs = folder / "runs"
        self.environment = {**os.environ, "RUNS_DIR": str(self.runs), "PYTHONPATH": str(ROOT)}

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sft_play", *arguments]
        return subprocess.run(
            command, env=self.environment, cwd=self.runs.parent, capture_output=True, text=True, timeout=120, check=False
        )


@pytest.fixture
def tensorboard(tmp_path: Path) -> Iterator[TensorBoard]:
    server = TensorBoard(tmp_path)
    yield server
    server.command("tensorboard-stop")


def test_start_again_and_stop(tensorboard: TensorBoard) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        wanted = busy.getsockname()[1]
        first = tensorboard.command("tensorboard", f"TENSORBOARD_PORT={wanted}", "JSON=1")
    assert first.returncode == 0, first.stderr
    server = json.loads(first.stdout)
    port = int(server["url"].rstrip("/").rpartition(":")[2])
    assert wanted < port < wanted + 100
    assert f"port {wanted} is taken" in server["note"]
    with urllib.request.urlopen(server["url"], timeout=10) as response:
        assert response.status == 200
    (listener,) = {c.laddr.ip for c in psutil.Process(server["pid"]).net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert listener == "127.0.0.1"

    again = tensorboard.command("tensorboard")
    assert again.returncode == 0
    assert "already runs" in again.stdout
    assert server["url"] in again.stdout

    stopped = tensorboard.command("tensorboard-stop")
    assert stopped.returncode == 0
    assert str(server["pid"]) in stopped.stdout
    assert not psutil.pid_exists(server["pid"]) or psutil.Process(server["pid"]).status() == psutil.STATUS_ZOMBIE
    assert "no TensorBoard" in tensorboard.command("tensorboard-stop").stdout


def test_another_port_or_run_replaces_the_one_that_runs(tensorboard: TensorBoard) -> None:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        ports = [s.getsockname()[1] for s in (one, two)]
    first = json.loads(tensorboard.command("tensorboard", f"TENSORBOARD_PORT={ports[0]}", "JSON=1").stdout)
    second = json.loads(tensorboard.command("tensorboard", f"TENSORBOARD_PORT={ports[1]}", "JSON=1").stdout)
    assert not psutil.pid_exists(first["pid"]) or psutil.Process(first["pid"]).status() == psutil.STATUS_ZOMBIE
    assert second["url"].endswith(f":{ports[1]}/") and first["url"] in second["note"]

    (tensorboard.runs / "q").mkdir()
    (tensorboard.runs / "q" / "config.json").write_text("{}")
    of_run = json.loads(tensorboard.command("tensorboard", "RUN=q", "JSON=1").stdout)
    assert of_run["url"] == second["url"] and of_run["pid"] != second["pid"]
    assert of_run["folder"] == str(tensorboard.runs.resolve() / "q" / "tb")
    again = json.loads(tensorboard.command("tensorboard", "RUN=q", f"TENSORBOARD_PORT={ports[1]}", "JSON=1").stdout)
    assert again["pid"] == of_run["pid"] and "already runs" in again["note"]


def test_stop_spares_a_process_that_got_the_same_pid(tensorboard: TensorBoard) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        tensorboard.runs.mkdir()
        memory = {"pid": other.pid, "started": psutil.Process(other.pid).create_time() - 60, "url": "http://x/", "folder": "x"}
        (tensorboard.runs / ".tensorboard.json").write_text(json.dumps(memory))
        assert "no TensorBoard" in tensorboard.command("tensorboard-stop").stdout
        assert other.poll() is None
        other.communicate(b"\n", timeout=10)


def test_curves_answers_and_plan(tensorboard: TensorBoard) -> None:
    from sft_play.runs.folder import RunFolder
    from sft_play.training.trackers import Curves

    run = RunFolder(tensorboard.runs / "one")
    answers = run.evaluation(2)
    answers.mkdir(parents=True)
    run.config.write_text(json.dumps({"config": {"train": {"epochs": 2}}}))
    run.plan.write_text('{"strategy": "ddp"}')
    (answers / "predictions.jsonl").write_text(
        json.dumps({"row": 4, "prompt": "<b>what?</b>", "answer": "that", "reference": "this"})
    )
    logged = {"loss": 1.5, "rank_loss": [1.0, 2.0], "node_network_mb_s": [3.0], "eval_loss": 2.5}
    curves, state = Curves(run), SimpleNamespace(global_step=0)
    curves.on_train_begin(None, state, None)
    state.global_step = 2
    curves.on_log(None, state, None, logs=logged)
    curves.on_evaluate(None, state, None)
    url = json.loads(tensorboard.command("tensorboard", "TENSORBOARD_PORT=16006", "JSON=1").stdout)["url"]

    def asked(path: str) -> Any:
        with urllib.request.urlopen(f"{url}data/plugin/{path}", timeout=20) as answer:
            return json.load(answer)

    shown = asked("scalars/tags")["one/tb"]
    assert {"train/loss", "rank/loss/0", "rank/loss/1", "node/network_mb_s/0", "eval/loss"} <= shown.keys()
    texts = asked("text/tags")["one/tb"]
    assert (
        any("answers" in name for name in texts)
        and any("plan" in name for name in texts)
        and any("config" in name for name in texts)
    )
