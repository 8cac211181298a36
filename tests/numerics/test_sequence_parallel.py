"""Ranks with slices of a line compute what one process does with all of it, for every family (contract B16)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sft_play.plan.shape import SLICED_MODEL_TYPES
from tests.conftest import ROOT
from tests.families import MIXTURES

EXACT = 2e-5


def found(folder: Path, world: int, families: list[str]) -> dict[str, Any]:
    """Returns what rank 0 of `tests.numerics.slice_ranks` found."""
    variables = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    each = [sys.executable, "-m", "tests.numerics.slice_ranks"]
    started = [
        subprocess.Popen(
            [*each, str(rank), str(world), *map(str, (folder / "meeting", folder / f"{rank}.json")), *families],
            cwd=ROOT, env=variables, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=500)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert not any(process.returncode for process in started), "\n".join(text[-2000:] for text in said)
    ranks: dict[str, Any] = json.loads((folder / "0.json").read_text())
    return ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "families"),
    [
        (2, ["llama", "gpt_oss"]),
        pytest.param(4, ["llama", "deepseek_v3", "gemma3_text", "gpt_oss", "qwen3"], marks=pytest.mark.long),
        pytest.param(2, sorted(SLICED_MODEL_TYPES), marks=pytest.mark.long),
    ],
)
def test_slices_are_exact_and_rows_stay_apart_to_the_bit(world: int, families: list[str], tmp_path: Path) -> None:
    """Logits and gradients; with 4 ranks 2 grouped keys are repeated. Another token in the first row changes no bit of the others' logits.

    Mixtures of experts multiply all tokens of an expert together: how many they are decides how the last bits are rounded.
    """
    result = found(tmp_path, world, families)
    limits = {kind: EXACT if kind in MIXTURES else 0.0 for kind in families}
    wrong = {
        kind: one for kind, one in result.items() if one["worst"] > EXACT or one["leak"] > limits[kind] or not one["changed"]
    }
    assert wrong == {}
