"""What `train-cluster` refuses before anything is sent, and what it types on each machine."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from sft_play.__main__ import COMMANDS
from sft_play.cluster.inventory import Host
from sft_play.cluster.train import Task, node_variables, node_words, read_task
from sft_play.config.call import parse_call
from sft_play.errors import UserError
from sft_play.launch.run_folder import lock_run
from sft_play.runs.folder import RunFolder
from tests.cluster_facts import OWN

HOST = Host(name="old", address="192.0.2.1", place="home.yaml:4")
NEW = ("CONFIG=configs/quickstart.yaml", "RUN_NAME=one")


def call(tmp_path: Path, *words: str, network: str | None = None) -> Task:
    speed = f"network: {network}\n" if network else ""
    (tmp_path / "home.yaml").write_text(f"{speed}hosts: {{a: {{address: 127.0.0.1}}}}\n")
    task = read_task(parse_call(["train-cluster", f"CLUSTER={tmp_path / 'home.yaml'}", *words], COMMANDS, {}))
    task.facts, task.port = {HOST.name: OWN}, 29501
    return task


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    return RunFolder(tmp_path / "runs" / "one")


def test_a_deepspeed_file_is_read_before_anything_is_sent(tmp_path: Path, run: RunFolder) -> None:
    with pytest.raises(UserError, match=r"typo.json` cannot be read: no such file"):
        call(tmp_path, *NEW, f"DEEPSPEED_CONFIG={tmp_path / 'typo.json'}")
    own = tmp_path / "ds.json"
    own.write_text('{"zero_optimization": {"stage": 2},} // mine')
    task = call(tmp_path, *NEW, f"DEEPSPEED_CONFIG={own}")
    assert task.deepspeed == own.read_text()
    assert node_words(task, HOST, 1)[0] == "train-deepspeed"


def test_a_resumed_run_keeps_the_options_of_its_start(tmp_path: Path, run: RunFolder) -> None:
    run.path.mkdir(parents=True)
    run.config.write_text("{}")
    with pytest.raises(UserError) as error:
        call(tmp_path, "RUN=one", "DEEPSPEED_CONFIG=typo.json")
    assert "DEEPSPEED_CONFIG=typo.json: `DEEPSPEED_CONFIG` cannot be given with `RUN`" in error.value.render()


def test_a_run_that_exists_or_is_in_use_is_refused(tmp_path: Path, run: RunFolder) -> None:
    """Before anything on another machine changes."""
    run.path.mkdir(parents=True)
    run.config.write_text("{}")
    with pytest.raises(UserError, match="the run `one` exists already") as error:
        call(tmp_path, *NEW)
    assert f"make train-cluster CLUSTER={tmp_path / 'home.yaml'} RUN=one" in (error.value.hint or "")
    with lock_run(run), pytest.raises(UserError, match=f"`one` is in use: process {os.getpid()} trains it"):
        call(tmp_path, "RUN=one")


def test_the_networks_speed_of_the_inventory_reaches_the_plan(tmp_path: Path, run: RunFolder) -> None:
    of_inventory = call(tmp_path, *NEW, network="2.5Gbit").loaded
    assert of_inventory.config.launch.network == "2.5Gbit"
    assert of_inventory.origins["launch.network"] == str(tmp_path / "home.yaml")
    typed = call(tmp_path, *NEW, "LAUNCH_NETWORK=100Mbit", network="2.5Gbit").loaded
    assert typed.config.launch.network == "100Mbit" and "home.yaml" not in typed.origins["launch.network"]
    of_file = call(tmp_path, "CONFIG=configs/home_lan.yaml", "RUN_NAME=one", network="2.5Gbit").loaded
    assert of_file.config.launch.network == "1Gbit" and "home_lan.yaml" in of_file.origins["launch.network"]


def test_each_machine_gets_its_command(tmp_path: Path, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """To NCCL an interface's name alone is a prefix: `eth1` would be `eth10` too; without one nothing is pinned."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    task = call(tmp_path, *NEW)
    folder = f"{OWN.cache}/cluster/one/old"
    assert node_words(task, HOST, 0) == [
        "train-distributed",
        f"CONFIG={folder}/config.json",
        "RUN_NAME=one",
        "ACCELERATE_CONFIG=none",
        "NUM_GPUS=1",
        "NUM_NODES=1",
        "MASTER_PORT=29501",
    ]
    variables = node_variables(task, replace(HOST, interface="eth1", gpus=0))
    assert (variables["GLOO_SOCKET_IFNAME"], variables["NCCL_SOCKET_IFNAME"]) == ("eth1", "=eth1")
    assert (variables["CUDA_VISIBLE_DEVICES"], variables["NCCL_DEBUG"]) == ("", "INFO")
    assert not {"GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "HF_TOKEN"} & set(node_variables(task, HOST))
