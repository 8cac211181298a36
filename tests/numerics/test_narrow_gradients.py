"""bf16 on two ranks: what the gradients of many micro-steps lose when they are reduced and added up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sft_play.launch.environment import free_port


@pytest.mark.parametrize(
    "strategy", ["fsdp2", "zero2", pytest.param("zero1", marks=pytest.mark.long), pytest.param("zero3", marks=pytest.mark.long)]
)
def test_micro_steps_in_bf16_add_up_in_fp32(strategy: str, tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    done = subprocess.run(
        [sys.executable, *launch, "-m", "tests.numerics.narrow_gradients", strategy, str(tmp_path / "found.json")],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["dtype"] == "torch.float32" and found["error"] < 1e-6, found
