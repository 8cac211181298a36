"""`train-cluster` without a second machine: what is refused, what a machine's other end does, and how a launcher there is watched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from sft_play.cluster import task
from sft_play.cluster.inventory import Host, Inventory
from sft_play.cluster.status import run_named
from sft_play.cluster.task import Task, control_run, controlled_runs
from sft_play.config.call import Call
from sft_play.config.layers import Override
from sft_play.config.load import load_config
from sft_play.errors import CheckpointError, UserError
from sft_play.runs.folder import RunFolder
from tests.cluster_facts import OWN

MASTER, LAPTOP = Host(name="desktop", address="127.0.0.1"), Host(name="laptop", address="192.0.2.11")
INVENTORY = Inventory(hosts=(MASTER,), path=Path("home.yaml"))


def task_of(folder: Path, *overrides: tuple[str, str], resuming: bool = False) -> Task:
    path = folder / "c.yaml"
    path.write_text("model: {name: demo}\ndata: {train_path: rows.jsonl}\n")
    loaded = load_config(path, [Override(key=key, text=text, origin="typed") for key, text in overrides], {})
    inventory = replace(INVENTORY, hosts=(MASTER, LAPTOP))
    return Task(
        call=Call(command="train-cluster"), inventory=inventory, loaded=loaded, run=RunFolder(folder / "runs" / "demo"), resuming=resuming
    )  # fmt: skip


def test_every_fault_is_told_also_of_hosts_that_answer_where_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first host is this machine, with an interface that it has not; one states GPUs it has not, and two cannot be asked at all."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    answer = json.dumps(asdict(replace(OWN, gpu_count=0, packages={"torch": "2.12.0"})))
    ssh.write_text(
        "#!/bin/sh\nremark='Could not chdir to home directory /nonexistent: No such file or directory'\n"
        f"case \"$*\" in *192.0.2.11*) read -r x; read -r x; read -r x; echo '{answer}';;\n"
        "*192.0.2.12*) echo 'This account is currently not available.'; echo \"$remark\" >&2; exit 1;;\n"
        "*) echo 'ssh: connect to host x port 22: Connection refused' >&2; exit 255;; esac\n"
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}{os.pathsep}{os.environ['PATH']}")
    for name, folder in (("RUNS_DIR", "runs"), ("SFT_PLAY_CACHE", "cache")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    barred, off = Host(name="third", address="192.0.2.12", user="nobody"), Host(name="fourth", address="192.0.2.13")
    asked = task_of(tmp_path)
    hosts = (replace(MASTER, interface="eth7"), replace(LAPTOP, gpus=2), barred, off)
    with pytest.raises(UserError) as caught:
        task.choose_machines(replace(asked, inventory=replace(asked.inventory, hosts=hosts)))
    said = caught.value.render()
    for part in (
        "host `desktop`: there is no interface `eth7`; it has `lo`", "host `laptop`: `gpus: 2` in the inventory, but its driver shows 0",
        "host `laptop`: other versions than on `desktop`: ",
        "host `third`: user `nobody` may not log in there: This account is currently not available.", "no sshd listens",
    ):  # fmt: skip
        assert part in said, said
    assert said.count("hint: ") >= 5, said
    assert caught.value.exit_code == 3


def test_a_run_that_was_killed_before_its_start_begins_in_its_folder(tmp_path: Path) -> None:
    asked = task_of(tmp_path, resuming=True)
    assert task.take_over(asked) is asked, "there is no folder"
    asked.run.path.mkdir(parents=True)
    asked.run.config.write_text("{}")
    assert task.take_over(asked).loaded.config.launch.auto_resume
    assert not task.take_over(task_of(tmp_path)).loaded.config.launch.auto_resume, "a new run's name is taken"


def test_a_command_that_is_stopped_before_its_workers_live_says_so(tmp_path: Path) -> None:
    """`cluster-stop` sends SIGTERM while hosts are asked, prepared for or sent to."""
    card, rows = tmp_path / "bin" / "nvidia-smi", tmp_path / "rows.jsonl"
    card.parent.mkdir()
    card.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked; exec sleep 5\n")
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


# ---- A launcher on another machine


def test_a_run_is_found_while_its_data_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    run = RunFolder(tmp_path / "runs" / "early")
    with pytest.raises(CheckpointError):
        run_named("early")
    with control_run(run, Path("home.yaml")):
        assert run_named("early").path == run.path
        assert [found.name for found in controlled_runs()] == ["early"]
    assert controlled_runs() == []
