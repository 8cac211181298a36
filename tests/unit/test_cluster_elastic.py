"""Which machines a run goes on with: judged by what they say of themselves, without asking any."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from sft_play.cluster import elastic, train
from sft_play.cluster.elastic import MOST_REFUSALS, Muster, Returning
from sft_play.cluster.facts import Facts
from sft_play.cluster.task import Task
from sft_play.config.call import Call, Override
from sft_play.config.cluster import Host, Inventory
from sft_play.config.load import load_config
from sft_play.errors import HardwareError, UserError
from sft_play.runs.folder import RunFolder

MASTER, LAPTOP = Host(name="desktop", address="127.0.0.1"), Host(name="laptop", address="192.0.2.11")
OFF = HardwareError("host `laptop`: `192.0.2.11` cannot be reached")


def task_of(folder: Path, *overrides: tuple[str, str], resuming: bool = False) -> Task:
    path = folder / "c.yaml"
    path.write_text("model: {name: demo}\ndata: {train_path: rows.jsonl}\n")
    loaded = load_config(path, [Override(key=key, text=text, origin="typed") for key, text in overrides], {})
    inventory = Inventory(hosts=(MASTER, LAPTOP), network=None, ssh_config=None, path=folder / "home.yaml")
    known: dict[str, Any] = {"call": Call(command="train-cluster"), "inventory": inventory, "loaded": loaded, "deepspeed": None}
    known |= {"run": RunFolder(folder / "runs" / "demo"), "resuming": resuming}
    return Task(**{item.name: known[item.name] for item in fields(Task)})


def facts(**changes: Any) -> Facts:
    known: dict[str, Any] = {
        "host": "b", "home": "/home/b", "folder": "/srv/sft", "runs": "/srv/runs", "cache": "/srv/cache", "hub": "/srv/hub", "python": "3.11.2",
        "versions": {"torch": "2.13.0"}, "code": True, "gpus": 1, "rsync": True, "shares_runs": False, "shares_cache": False,
        "linux": True, "run_there": None, "interfaces": [], **changes,
    }  # fmt: skip
    return Facts(**{item.name: known[item.name] for item in fields(Facts)})


def judged(muster: Muster, answer: Facts | UserError, *, again: bool = False) -> Facts | UserError:
    muster._judged(MASTER, facts(), again=False)
    return muster._judged(LAPTOP, answer, again=again)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"versions": {"torch": "2.12.0"}}, "other versions"),
        ({"code": False}, "no environment"),
        ({"gpus": 0}, "had 1 GPU, and its driver shows 0 now"),
        ({"rsync": False}, "no `rsync`"),
    ],
)
def test_a_machine_that_is_not_fit_counts_as_missing(tmp_path: Path, changes: dict[str, Any], part: str) -> None:
    muster = Muster(task_of(tmp_path, ("launch.elastic", "1:2")))
    assert isinstance(judged(muster, facts()), Facts)
    assert judged(muster, OFF) is OFF
    answer = judged(muster, facts(**changes))
    assert isinstance(answer, UserError) and part in answer.message
    chosen, missing = muster._choose({"desktop": facts(), "laptop": answer})
    assert (chosen, missing) == ([MASTER], [answer]) and muster._enough(chosen)
    assert isinstance(judged(muster, facts()), Facts), "it is well again"


def test_every_fault_is_told_also_of_hosts_that_answer_where_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first host is this machine, with an interface that it has not; one states GPUs it has not, and two cannot be asked at all."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    answer = json.dumps({**{item.name: getattr(facts(gpus=0), item.name) for item in fields(Facts)}})
    ssh.write_text(
        "#!/bin/sh\nremark='Could not chdir to home directory /nonexistent: No such file or directory'\n"
        f"case \"$*\" in *192.0.2.11*) cat > {tmp_path}/asked; echo '{answer}';;\n"
        "*192.0.2.12*) echo 'This account is currently not available.'; echo \"$remark\" >&2; exit 1;;\n"
        "*) echo 'ssh: connect to host x port 22: Connection refused' >&2; exit 255;; esac\n"
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}{os.pathsep}{os.environ['PATH']}")
    for name, folder in (("RUNS_DIR", "runs"), ("SFT_PLAY_CACHE", "cache")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    barred, off = Host(name="third", address="192.0.2.12", user="nobody"), Host(name="fourth", address="192.0.2.13")
    task = task_of(tmp_path)
    hosts = (replace(MASTER, interface="eth7"), replace(LAPTOP, gpus=2), barred, off)
    with pytest.raises(UserError) as caught:
        Muster(replace(task, inventory=replace(task.inventory, hosts=hosts))).for_start()
    said = caught.value.render()
    for part in (
        "host `desktop` has no interface `eth7`", "host `laptop` has no GPU, and the inventory states 2", "host `laptop` has other versions",
        "host `third`: user `nobody` may not log in there: This account is currently not available.", "no sshd listens",
    ):  # fmt: skip
        assert part in said, said
    assert said.count("hint: ") >= 5, said
    assert caught.value.exit_code == 3


def test_a_machine_that_failed_is_not_tried_again_before_something_has_changed(tmp_path: Path) -> None:
    muster, full = Muster(task_of(tmp_path, ("launch.elastic", "1:2"))), HardwareError("host `laptop`: its disk is full")
    assert isinstance(judged(muster, facts()), Facts)
    muster.refuse(LAPTOP, facts(), full)
    assert [judged(muster, facts()) for _ in range(3)] == [full] * 3
    assert isinstance(judged(muster, facts(), again=True), Facts), "where it cannot be done without"
    assert judged(muster, OFF) is OFF
    assert isinstance(judged(muster, facts()), Facts), "it was switched off and on"
    for _ in range(MOST_REFUSALS - 1):
        muster.refuse(LAPTOP, facts(), full)
    assert judged(muster, OFF) is full and judged(muster, facts(gpus=2), again=True) is full, "that is enough"


def test_our_own_trace_is_no_change_of_a_machine(tmp_path: Path) -> None:
    muster, full = Muster(task_of(tmp_path, ("launch.elastic", "1:2"))), HardwareError("host `laptop`: its disk is full")
    assert isinstance(judged(muster, facts()), Facts)
    muster.task.run.path.mkdir(parents=True)  # the run has begun here, so that its folder there is no stranger's
    muster.refuse(LAPTOP, facts(), full)
    assert judged(muster, facts(run_there="/srv/runs/demo")) is full, "the failed start left the folder"
    assert isinstance(judged(muster, facts(cache="/other")), Facts), "it has changed"
    muster.refuse(LAPTOP, facts(run_there="/srv/runs/demo"), full)
    assert judged(muster, facts()) is full


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that names the `ssh` which waits for an answer of the laptop; none comes."""
    asking = tmp_path / "asking"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(f"#!/bin/sh\necho $$ > {asking}.new; mv {asking}.new {asking}; exec sleep 30\n")
    (tmp_path / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    for name, folder in (("RUNS_DIR", "runs"), ("SFT_PLAY_CACHE", "cache")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.setattr(elastic, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(elastic, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(elastic, "CLOSE_SECONDS", 25.0)  # shorter than the silence, longer than a busy machine needs
    yield asking
    os.kill(int(asking.read_text()), signal.SIGKILL)


def marks(folder: Path) -> list[Path]:
    return [path for name in ("runs", "cache") for path in (folder / name).glob(".seen-*")]


@pytest.mark.parametrize("was_back", [False, True])
def test_the_end_of_a_run_waits_for_no_machine_that_is_asked(tmp_path: Path, silent: Path, was_back: bool) -> None:
    said: list[str] = []
    task = task_of(tmp_path, ("launch.elastic", "1:2"))
    returning = Returning(Muster(task), [], task.run, said.append)
    if was_back:  # fit before, a checkpoint has come since, and it is asked again
        returning.back = [LAPTOP]
        (task.run.checkpoints / "step-000005").mkdir(parents=True)
    returning.missing = [LAPTOP]
    returning.begin()
    until = time.monotonic() + 60
    while not silent.exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert len(marks(tmp_path)) == 2, "it is being asked"
    begun = time.monotonic()
    returning.close()
    assert time.monotonic() - begun < elastic.CLOSE_SECONDS
    assert not marks(tmp_path) and not returning.wanted() and said == []


def test_a_run_that_was_killed_before_its_start_begins_in_its_folder(tmp_path: Path) -> None:
    task = task_of(tmp_path, resuming=True)
    assert train.taken_over(task, 0) is task, "there is no folder"
    task.run.path.mkdir(parents=True)
    task.run.config.write_text("{}")
    assert train.taken_over(task, 0).loaded.config.launch.auto_resume
    assert not train.taken_over(task_of(tmp_path), 0).loaded.config.launch.auto_resume, "a new run's name is taken"
    assert train.taken_over(task_of(tmp_path), 1).loaded.config.launch.auto_resume, "this command's own start left it"


def test_overrides_are_passed_until_the_run_was_resumed(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert train.resumptions(run) == 0
    rows = [{"event": "started", "node": 0}, {"event": "resumed", "node": 1}, {"event": "resumed", "node": 0}]
    run.events.write_text("".join(json.dumps({"time": 1.0, **row}) + "\n" for row in rows))
    assert train.resumptions(run) == 1
