"""How starts on several machines end, and what their agents do meanwhile: real processes on this machine, no second one."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sft_play.cluster import cause, phase, remote_processes
from sft_play.cluster.agent import Agent, Message, ask
from sft_play.cluster.remote_launch import Launch
from sft_play.cluster.status import run_named
from sft_play.cluster.task import controlling
from sft_play.config.cluster import Host, Inventory
from sft_play.errors import CheckpointError, HardwareError
from sft_play.runs.folder import RunFolder
from tests.unit.test_cluster_parts import RANKS, ended

HERE = Host(name="here", address="127.0.0.1")
INVENTORY = Inventory(hosts=(HERE,), network=None, ssh_config=None, path=Path("home.yaml"))


def test_a_save_that_fails_comes_before_the_request_to_stop(tmp_path: Path) -> None:
    full = {"code": 3, "words": "error: no space is left on the disk"}
    session = ended(tmp_path, full, {"code": 143}, {"code": 143}, asked="signal")
    session.stop.signals.append(15)
    assert cause.judge(session, RANKS).code == 3
    own = {"code": 143, "records": {1: ({"code": 3, "error": "error: no space"}, 0.5)}}
    session = ended(tmp_path, {"code": 143}, own, {"code": 143}, asked="grow")
    outcome = cause.judge(session, RANKS)
    assert (outcome.code, outcome.rank) == (3, 1) and "host `node2`: no space" in outcome.message


def test_a_command_that_is_stopped_before_its_workers_live_says_so(tmp_path: Path) -> None:
    """`cluster-stop` sends SIGTERM while hosts are asked, prepared for or sent to."""
    card, rows = tmp_path / "bin" / "nvidia-smi", tmp_path / "rows.jsonl"
    card.parent.mkdir()
    card.write_text(f'#!/bin/sh\n[ "$1" != -L ] || {{ touch {tmp_path}/asked; exec sleep 5; }}\nexit 9\n')
    card.chmod(0o755)
    rows.write_text('{"prompt": "a", "response": "b"}\n')
    (tmp_path / "c.yaml").write_text(f"model: {{name: demo}}\ndata: {{train_path: {rows}}}\n")
    (tmp_path / "home.yaml").write_text("hosts: {here: 127.0.0.1}\n")
    folders = {"RUNS_DIR": str(tmp_path / "runs"), "SFT_PLAY_CACHE": str(tmp_path / "cache")}
    words = ["train-cluster", f"CLUSTER={tmp_path}/home.yaml", f"CONFIG={tmp_path}/c.yaml", "RUN_NAME=demo"]
    with subprocess.Popen(
        [sys.executable, "-m", "sft_play", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **folders, "PATH": f"{card.parent}{os.pathsep}{os.environ['PATH']}"},
    ) as process:  # fmt: skip
        until = time.monotonic() + 60
        while not (tmp_path / "asked").exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        process.terminate()
        try:
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 143, said
    assert said.splitlines()[-1] == "stopped by SIGTERM", said
    assert not (tmp_path / "runs" / "demo").exists()


def test_a_run_that_was_complete_before_the_stop_ends_with_0(tmp_path: Path) -> None:
    assert cause.judge(ended(tmp_path, *[{"code": 0}] * 3, asked="signal"), RANKS).code == 0


def test_what_was_killed_at_once_was_stopped(tmp_path: Path) -> None:
    session = ended(tmp_path, {"code": 1}, {"code": -9}, {"code": -9}, asked="signal")
    session.stop.signals.extend([2, 2])
    assert cause.judge(session, RANKS).code == 130


def test_a_link_that_ends_after_the_model_was_written_changes_nothing(tmp_path: Path) -> None:
    nodes: tuple[dict[str, Any], ...] = ({"code": 0}, {"code": 143}, {"lost": "its connection has ended"})
    assert cause.judge(ended(tmp_path, *nodes, asked="failure"), RANKS).code == 75, "there is no model"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "stamp.json").write_text("{}")
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": "finished", "time": 1.0, "node": 0}) + "\n")
    assert cause.judge(ended(tmp_path, *nodes, asked="failure"), RANKS).code == 0


def test_on_a_shared_disk_the_plan_says_whose_a_rank_is(tmp_path: Path) -> None:
    all_of_them = {2: ({"code": 4, "error": "error: the rows are damaged"}, 0.5)}
    session = ended(tmp_path, *[{"code": 4, "records": all_of_them}] * 3)
    assert "host `node3`: the rows are damaged" in cause.judge(session, RANKS).message


def test_a_disk_here_that_hangs_is_told() -> None:
    with pytest.raises(HardwareError, match="this machine, did not answer within"):
        ask(HERE, INVENTORY, "status", timeout=0.01)


def test_letters_of_logs_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RUNS_DIR", str(tmp_path))
    log = tmp_path / "run" / "logs" / "rank1.log"
    log.parent.mkdir(parents=True)
    launch = Launch({"run": "run", "node": 1, "token": "letters", "argv": ["sleep", "60"], "stream": True})
    try:
        with log.open("ab") as stream:
            for piece in (b"gr\xc3", b"\xbc\xc3", b"\x9fe \xe2\x82", b"\xac"):
                stream.write(piece)
                stream.flush()
                launch.send_logs()
    finally:
        launch.process.kill()
        launch.process.wait(timeout=10)
        for pipe in (launch.process.stdout, launch.process.stderr):
            assert pipe is not None
            pipe.close()
    assert "".join(json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()) == "gr\u00fc\u00dfe \u20ac"


def test_a_disk_that_stalls_is_no_lost_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that is a pipe without a writer: opening it waits for ever, as a network disk may."""
    monkeypatch.setenv("RUNS_DIR", str(tmp_path))
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    os.mkfifo(logs / "rank0.log")
    inbox: queue.Queue[Message] = queue.Queue()
    agent = Agent(0, HERE, INVENTORY, inbox, token="stalled", run="run", stream=True, argv=["sleep", "30"])
    beats, until = 0, time.monotonic() + 20
    try:
        while beats < 3:
            message = inbox.get(timeout=max(0.1, until - time.monotonic()))
            beats += "beat" in message.facts
    finally:
        agent.close()


SAVER = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: None)
folder = pathlib.Path(sys.argv[1])
folder.mkdir(parents=True)
print("ready", flush=True)
for _ in range(15):
    (folder / "state").write_text("x")
    time.sleep(0.2)
sys.exit(7)
"""


def test_a_launcher_that_saves_is_not_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNS_DIR", str(tmp_path))
    run = tmp_path / "run"
    words = [sys.executable, "-c", SAVER, str(run / "checkpoints" / ".step-000002.partial")]
    with subprocess.Popen(
        words, env={**os.environ, remote_processes.TOKEN: "saver"}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        facts = {"machine": remote_processes.machine(), "launcher": process.pid, "token": "saver", "node": 0}
        remote_processes.pid_file(run, 0).write_text(json.dumps(facts))
        remote_processes.end({"run": "run", "grace": 0.5})
        assert process.wait(timeout=10) == 7, "it ended by itself"


def test_a_run_is_found_while_its_data_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    run = RunFolder(tmp_path / "runs" / "early")
    with pytest.raises(CheckpointError):
        run_named("early")
    with controlling(run), phase.noting(run, "sending"):
        assert run_named("early").path == run.path
        assert [(found.name, state) for found, state in phase.noted()] == [("early", "sending")]
    assert phase.noted() == []
