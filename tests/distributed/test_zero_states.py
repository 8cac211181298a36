"""DeepSpeed in bf16: the float32 copy of the weights and all states come back exactly on another number of ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from sft_play.runs.manifest import read_facts
from sft_play.training.states.files import StateFiles
from tests.distributed.zero_engine import ENGINES
from tests.numerics.rank_processes import run_ranks

ENGINE = "tests.distributed.zero_engine"
SHAPES = {"first.weight": (13, 7), "first.bias": (13,), "second.weight": (5, 13), "second.bias": (5,)}


def whole(folder: Path) -> dict[str, torch.Tensor]:
    """Return every state of every parameter, put together."""
    state_files = StateFiles(folder, range(read_facts(folder).files))
    states = {}
    for name, shape in SHAPES.items():
        assert sorted(state_files.states(name)) == ["exp_avg", "exp_avg_sq", "master", "step"]
        states[f"{name} step"] = state_files.whole(state_files.pieces(name, "step")[0])
        for state in ("exp_avg", "exp_avg_sq", "master"):
            states[f"{name} {state}"] = torch.full((math.prod(shape),), math.nan)
            state_files.fill(states[f"{name} {state}"], name, state, 0, math.prod(shape))
    return states


@pytest.mark.long
@pytest.mark.parametrize("name", ENGINES)
def test_master_weights_are_restored_on_another_world_size(name: str, tmp_path: Path) -> None:
    first, second = tmp_path / "step-000003", tmp_path / "step-000004"
    run_ranks(2, ENGINE, "write", name, str(first))
    run_ranks(3, ENGINE, "read", name, str(first), str(second))
    before, after = whole(first), whole(second)
    for state, values in before.items():
        assert values.dtype == torch.float32 and torch.equal(after[state], values), state
    weights = json.loads((second / "weights.json").read_text())
    assert weights == json.loads((first / "weights.json").read_text())
    for parameter in SHAPES:
        master = before[f"{parameter} master"]
        assert master.bfloat16().float().tolist() == weights[parameter]
        assert parameter.endswith("bias") or master.bfloat16().float().tolist() != master.tolist()
    facts = [read_facts(folder) for folder in (first, second)]
    assert facts[0].groups == facts[1].groups and facts[0].groups[0]["lr"] == 0.03125
    assert facts[0].engine == facts[1].engine and facts[1].world_size == 3
