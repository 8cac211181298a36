"""Which machines a run goes on with: judged by what they say of themselves, without asking any."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.call import Call, Override
from sft_play.config.cluster import Host, Inventory
from sft_play.config.load import load_config
from sft_play.errors import HardwareError, UserError
from sft_play.launch.cluster import train
from sft_play.launch.cluster.elastic import MOST_REFUSALS, Muster
from sft_play.launch.cluster.facts import Facts
from sft_play.launch.cluster.task import Task
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
        "linux": True, "run_there": None, **changes,
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
