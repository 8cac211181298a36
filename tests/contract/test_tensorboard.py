"""TensorBoard as a user starts and ends it: on 127.0.0.1, on the next free port, once, and ended by its own id only."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from sft_play.runs.folder import RunFolder
from sft_play.training.trackers import Curves
from tests.conftest import Program


@pytest.fixture
def tensorboard(program: Program) -> Iterator[Program]:
    yield program
    program("tensorboard-stop")


def ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_tensorboard_starts_once_and_stops(tensorboard: Program) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        taken = busy.getsockname()[1]
        first = tensorboard("tensorboard", f"TENSORBOARD_PORT={taken}", "JSON=1").json
    port = int(first["url"].rstrip("/").rpartition(":")[2])
    assert taken < port < taken + 100 and f"port {taken} is taken" in first["note"]
    with urllib.request.urlopen(first["url"], timeout=240) as response:
        assert response.status == 200
    (listener,) = {
        c.laddr.ip for c in psutil.Process(first["pid"]).net_connections("tcp") if c.status == psutil.CONN_LISTEN
    }
    assert listener == "127.0.0.1"
    again = tensorboard("tensorboard").out
    assert "already runs" in again and first["url"] in again

    second = tensorboard("tensorboard", f"TENSORBOARD_PORT={taken}", "JSON=1").json
    assert ended(first["pid"]) and second["url"].endswith(f":{taken}/"), "a typed port counts"
    assert str(second["pid"]) in tensorboard("tensorboard-stop").out and ended(second["pid"])
    assert "no TensorBoard" in tensorboard("tensorboard-stop").out


def test_stop_spares_a_process_that_got_the_same_pid(tensorboard: Program, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        (runs := tmp_path / "runs").mkdir()
        memory = {
            "pid": other.pid,
            "started": psutil.Process(other.pid).create_time() - 60,
            "url": "http://x/",
            "folder": "x",
        }
        (runs / ".tensorboard.json").write_text(json.dumps(memory))
        assert "no TensorBoard" in tensorboard("tensorboard-stop").out
        assert other.poll() is None
        other.communicate(b"\n", timeout=240)


def test_tensorboard_shows_curves(tensorboard: Program, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "one")
    logged = {"loss": 1.5, "rank_loss": [1.0, 2.0], "node_network_mb_s": [3.0], "eval_loss": 2.5}
    curves, state = Curves(run), SimpleNamespace(global_step=0)
    curves.on_train_begin(None, state, None)
    state.global_step = 2
    curves.on_log(None, state, None, logs=logged)
    url = tensorboard("tensorboard", "TENSORBOARD_PORT=16006", "JSON=1").json["url"]
    with urllib.request.urlopen(f"{url}data/plugin/scalars/tags", timeout=240) as answer:
        shown = json.load(answer)["one/tb"]
    assert {"train/loss", "rank/loss/0", "rank/loss/1", "node/network_mb_s/0", "eval/loss"} <= shown.keys()
