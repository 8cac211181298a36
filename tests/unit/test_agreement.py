"""What the machines of a run must agree on, and the errors for differences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sft_play.config.load import load_config
from sft_play.errors import CheckpointError, DataError, HardwareError, UserError
from sft_play.launch.agreement import compare_facts, compare_prepared, config_here, versions_here
from tests.documents import on_page


def facts(rank: int, **changes: Any) -> dict[str, Any]:
    facts_of_node: dict[str, Any] = {
        "node": f"node {rank} ({'abc'[rank]})",
        "nodes": {"NUM_NODES": 3},
        "run": {"run": "started"},
        "gpus": {"GPUs": "there"},
        "command": {"command": "x"},
        "config": {"train.seed": "1", "train.epochs": "2"},
        "versions": {"torch": "2.13.0"},
        "devices": [],
    }
    return {**facts_of_node, **changes}


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"nodes": {"NUM_NODES": 2}}, UserError, "`NUM_NODES` is `3` on node 0 (a), `2` on node 1 (b)"),
        ({"versions": {"torch": "2.12.0"}}, HardwareError, "`torch` is `2.13.0` on node 0 (a), `2.12.0` on node 1 (b)"),
        ({"config": {"train.epochs": "2"}}, UserError, "`train.seed` is `1` on node 0 (a), `not there` on node 1 (b)"),
        ({"command": {"command": "y"}}, UserError, "the command differs"),
        ({"gpus": {"GPUs": "none"}}, HardwareError, "`GPUs` is `there` on node 0 (a), `none` on node 1 (b)"),
        (
            {"run": {"run": "continued from its start"}, "command": {}},
            CheckpointError,
            "`run` is `started` on node 0 (a), `continued from its start` on node 1 (b)",
        ),
    ],
)
def test_each_difference_is_one_error(change: dict[str, Any], kind: type[UserError], message: str) -> None:
    (error,) = compare_facts([facts(0), facts(1, **change)])
    assert type(error) is kind and message in error.render(), error.render()
    assert "versions" not in change or on_page("different-versions-on-machines", error.render())


def preparation(rank: int, *, apart: bool = False, **prepared: str) -> dict[str, Any]:
    return {"node": f"node {rank} ({'abc'[rank]})", "prepared": {"base model": "m", **prepared}, "apart": apart}


def test_nodes_without_the_shared_run_folder_are_refused() -> None:
    apart = [preparation(0), preparation(1, apart=True), preparation(2, apart=True)]
    for strategy, save in (("ddp", "steps"), ("fsdp2", "no")):
        assert not compare_prepared(apart, strategy=strategy, save_strategy=save)
    (error,) = compare_prepared(apart, strategy="zero2", save_strategy="steps")
    assert isinstance(error, CheckpointError)
    assert "node 1 (b), node 2 (c) cannot see the run folder of node 0" in error.message


def test_nodes_with_different_data_are_refused() -> None:
    here = [
        preparation(0, data="8 rows, 90 tokens, abc"),
        preparation(1, data="9 rows, 95 tokens, def"),
        preparation(2),
    ]
    (error,) = compare_prepared(here, strategy="ddp", save_strategy="steps")
    assert isinstance(error, DataError)
    assert "`data` is `8 rows, 90 tokens, abc` on node 0 (a), `9 rows, 95 tokens, def` on node 1 (b)" in error.message
    assert "`not there` on node 2 (c)" in error.message


def test_nodes_compare_content_and_not_paths(tmp_path: Path) -> None:
    def here(folder: str, extra: str = "") -> dict[str, str]:
        path = tmp_path / "x.yaml"
        path.write_text(f"model:\n  name: {folder}/tiny\ndata:\n  train_path: {folder}/rows.jsonl\n{extra}")
        return config_here(load_config(path))

    node = here("/home/ann")
    assert node == here("/home/bob", "launch:\n  join_seconds: 7\n"), "the content is compared after the preparation"
    assert here("/home/ann", "train:\n  seed: 7\n")["train.seed"] == "7" != node["train.seed"]
    assert {"python", "torch", "sft_play", "deepspeed", "source of sft_play"} <= versions_here("cpu").keys()
