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


def test_unknown_run(tensorboard: TensorBoard) -> None:
    outcome = tensorboard.command("tensorboard", "RUN=none")
    assert outcome.returncode == 5
    assert "there is no run `none`" in outcome.stderr
    assert not tensorboard.runs.exists()
