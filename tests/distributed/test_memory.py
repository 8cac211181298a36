"""Resident memory of real steps of SmolLM2 grows by what the plan says (docs/memory.md has all cases)."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.memory import CASES, compare, measure


@pytest.mark.long
@pytest.mark.parametrize("name", ["LoRA, 1 row", "LoRA, 4 rows", "LoRA, 8 rows"])
def test_three_batch_sizes_grow_as_planned(name: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SFT_PLAY_CACHE", str(cache))
    row, held = compare(name, measure(CASES[name], tmp_path), on_gpu=False)
    assert held, row
