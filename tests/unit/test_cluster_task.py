"""What `train-cluster` refuses before anything is sent, and what a disk or a lock that fails says."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from sft_play.__main__ import COMMANDS
from sft_play.cluster.inventory import Host
from sft_play.cluster.status import run_named
from sft_play.cluster.task import Task, control_run, controlled_runs, node_variables, read_task, take_over, unfit
from sft_play.config.call import parse_call
from sft_play.errors import CheckpointError, UserError
from sft_play.runs.folder import RunFolder
from tests.cluster_facts import OWN

WORKER = Host(name="old", address="192.0.2.1", place="home.yaml:4")


def call(tmp_path: Path, *words: str, network: str | None = None) -> Task:
    speed = f"network: {network}\n" if network else ""
    (tmp_path / "home.yaml").write_text(f"{speed}hosts: {{a: {{address: 127.0.0.1}}}}\n")
    return read_task(parse_call(["train-cluster", f"CLUSTER={tmp_path / 'home.yaml'}", *words], COMMANDS, {}))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    return RunFolder(tmp_path / "runs" / "one")


def test_a_deepspeed_file_is_read_before_anything_is_sent(tmp_path: Path, run: RunFolder) -> None:
    words = ("CONFIG=configs/quickstart.yaml", "RUN_NAME=one")
    with pytest.raises(UserError, match=r"typo.json` cannot be read: no such file"):
        call(tmp_path, *words, f"DEEPSPEED_CONFIG={tmp_path / 'typo.json'}")
    own = tmp_path / "ds.json"
    own.write_text('{"zero_optimization": {"stage": 2},} // mine')
    assert json.loads(call(tmp_path, *words, f"DEEPSPEED_CONFIG={own}").deepspeed or "") == {
        "zero_optimization": {"stage": 2}
    }
    assert call(tmp_path, *words).deepspeed is None


def test_a_run_that_goes_on_keeps_what_its_start_was_given(tmp_path: Path, run: RunFolder) -> None:
    run.path.mkdir(parents=True)
    run.config.write_text("{}")
    with pytest.raises(
        UserError, match="`DEEPSPEED_CONFIG` cannot be given with it: a run keeps its DeepSpeed settings"
    ) as error:
        call(tmp_path, "RUN=one", "DEEPSPEED_CONFIG=typo.json", "CLUSTER_NETWORK=100Mbit")
    assert "LAUNCH_NETWORK changes it" in error.value.message and "CLUSTER_NETWORK=100Mbit: " in error.value.render()


def test_a_name_that_a_worker_still_has_is_refused(tmp_path: Path, run: RunFolder) -> None:
    task = call(tmp_path, "CONFIG=configs/quickstart.yaml", "RUN_NAME=one")
    facts = replace(OWN, run_there="/srv/runs/one")
    [error] = unfit(task, WORKER, facts)
    assert error.message == "host `old` still has a run `one`, of another start: `/srv/runs/one`"
    assert error.place == "home.yaml:4" and "RUN_NAME" in (error.hint or "")
    assert not list(unfit(task, WORKER, replace(facts, shares_runs=True))) and not list(unfit(task, WORKER, OWN))
    run.path.mkdir(parents=True)
    assert not list(unfit(task, WORKER, facts))


def test_a_second_command_is_refused_and_takes_another_name_where_none_was_typed(
    tmp_path: Path, run: RunFolder
) -> None:
    named = call(tmp_path, "CONFIG=configs/quickstart.yaml", "RUN_NAME=one")
    with (
        control_run(named),
        pytest.raises(UserError, match=f"is in use: process {os.getpid()} trains it"),
        control_run(named),
    ):
        pass
    unnamed = call(tmp_path, "CONFIG=configs/quickstart.yaml")
    with control_run(unnamed) as first, control_run(unnamed) as second:
        assert (first.run, second.run.name) == (unnamed.run, f"{unnamed.run.name}.2")
    unnamed.run.path.mkdir(parents=True)
    with control_run(unnamed) as third:
        assert third.run.name == f"{unnamed.run.name}.2"


def test_the_networks_speed_of_the_inventory_reaches_the_plan(tmp_path: Path, run: RunFolder) -> None:
    words = ("CONFIG=configs/quickstart.yaml", "RUN_NAME=one")
    of_inventory = call(tmp_path, *words, network="2.5Gbit").loaded
    assert of_inventory.config.launch.network == "2.5Gbit"
    assert of_inventory.origins["launch.network"] == str(tmp_path / "home.yaml")
    typed = call(tmp_path, *words, "LAUNCH_NETWORK=100Mbit", network="2.5Gbit").loaded
    assert typed.config.launch.network == "100Mbit" and "home.yaml" not in typed.origins["launch.network"]
    of_file = call(tmp_path, "CONFIG=configs/home_lan.yaml", "RUN_NAME=one", network="2.5Gbit").loaded
    assert of_file.config.launch.network == "1Gbit" and "home_lan.yaml" in of_file.origins["launch.network"]


def test_the_inventorys_interface_is_named_to_the_letter(tmp_path: Path, run: RunFolder) -> None:
    """To NCCL a name alone is a prefix: `eth1` would be `eth10` too; without one nothing is pinned here."""
    task = call(tmp_path, "CONFIG=configs/quickstart.yaml", "RUN_NAME=one")
    given = node_variables(task, replace(WORKER, interface="eth1"), OWN)
    assert (given["GLOO_SOCKET_IFNAME"], given["NCCL_SOCKET_IFNAME"]) == ("eth1", "=eth1")
    assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & set(node_variables(task, WORKER, OWN))


def test_a_run_that_was_killed_before_its_start_begins_in_its_folder(tmp_path: Path, run: RunFolder) -> None:
    new = call(tmp_path, "CONFIG=configs/quickstart.yaml", "RUN_NAME=one")
    again = replace(new, resuming=True)
    assert take_over(again) is again, "there is no folder"
    run.path.mkdir(parents=True)
    run.config.write_text("{}")
    assert take_over(again).loaded.config.launch.auto_resume
    assert not take_over(new).loaded.config.launch.auto_resume, "a new run's name is taken"


def test_a_run_is_found_while_its_data_are_sent(tmp_path: Path, run: RunFolder) -> None:
    with pytest.raises(CheckpointError):
        run_named("one")
    with control_run(call(tmp_path, "CONFIG=configs/quickstart.yaml", "RUN_NAME=one")):
        assert run_named("one").path == run.path
        assert [found.name for found in controlled_runs()] == ["one"]
    assert controlled_runs() == []
