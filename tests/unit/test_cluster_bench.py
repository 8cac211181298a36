"""`make cluster-check BENCH=1`: what each machine's `make bench` found, beside the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from sft_play.cluster import bench
from sft_play.cluster.check import _table
from sft_play.config.cluster import Host, Inventory
from sft_play.config.load import load_config
from tests.conftest import Program

ROWS = [
    {"what": "matmul 2048", "unit": "TFLOP/s", "measured": 1.0, "expected": None},
    {"what": "training", "unit": "tokens/s", "measured": 1234.5, "expected": 1500.0},
    {"what": "the same by this calibration", "unit": "tokens/s", "measured": 1234.5, "expected": 1234.0},
    {"what": "its memory, rank 0", "unit": "GiB", "measured": 7.25, "expected": 8.0},
]


def test_speed_and_memory_stand_beside_the_plan() -> None:
    found = {"a": {"rows": ROWS, "notes": ["busy"]}, "b": {"error": "there is no model"}}
    lines = list(bench.report(found, _table))
    assert [line.split() for line in lines[:2]] == [
        ["alone", "tokens/s", "plan", "memory", "plan"],
        ["a", "1,234", "1,500", "7.2", "GiB", "8.0", "GiB"],
    ]
    assert lines[2:] == ["a: note: busy", "b: no steps: there is no model"]


def test_a_machine_that_cannot_take_part_is_not_tried_and_an_error_is_its_own(tmp_path: Path) -> None:
    """The configuration is sent: this machine answers by its own `make bench`, which refuses the folder that is not there."""
    config = tmp_path / "x.yaml"
    config.write_text(f"model: {{name: ./nowhere}}\ndata: {{train_path: {tmp_path / 'no.jsonl'}}}\n")
    hosts = (Host(name="here", address="127.0.0.1"), Host(name="off", address="192.0.2.1"))
    inventory = Inventory(hosts=hosts, network=None, ssh_config=None, path=tmp_path / "home.yaml")
    found = bench.bench_hosts(inventory, load_config(config), ["here"])
    assert "not tried" in found["off"]["error"]
    assert "there is no such model folder" in found["here"]["error"]


def test_steps_need_a_configuration(in_process: Program, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("hosts: {here: {address: 127.0.0.1}}\n")
    done = in_process("cluster-check", f"CLUSTER={tmp_path / 'c.yaml'}", "BENCH=1")
    assert done.code == 2 and "`BENCH=1` trains some steps, and there is no configuration" in done.err


@pytest.mark.parametrize("word", ["yes please", "2"])
def test_it_is_a_switch(in_process: Program, tmp_path: Path, word: str) -> None:
    (tmp_path / "c.yaml").write_text("hosts: {here: {address: 127.0.0.1}}\n")
    done = in_process("cluster-check", f"CLUSTER={tmp_path / 'c.yaml'}", f"BENCH={word}")
    assert done.code == 2 and "`BENCH` is" in done.err
