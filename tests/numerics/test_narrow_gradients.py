"""bf16 on two ranks: what the gradients of many micro-steps lose when they are reduced and added up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.numerics.rank_processes import run_ranks


@pytest.mark.parametrize(
    "strategy",
    ["fsdp2", "zero2", pytest.param("zero1", marks=pytest.mark.long), pytest.param("zero3", marks=pytest.mark.long)],
)
def test_micro_steps_in_bf16_add_up_in_fp32(strategy: str, tmp_path: Path) -> None:
    result = tmp_path / "found.json"
    run_ranks(2, "tests.numerics.narrow_gradients", strategy, str(result))
    deviations = json.loads(result.read_text())
    assert deviations["dtype"] == "torch.float32" and deviations["error"] < 1e-6, deviations
