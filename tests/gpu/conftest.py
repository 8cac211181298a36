"""Fixtures of tests on a real card."""

from __future__ import annotations

from pathlib import Path

import pytest

from sft_play.plan.detect import detect
from tests.conftest import ragged_rows


@pytest.fixture
def two_gpus() -> None:
    if len(detect().devices) < 2:
        pytest.skip("needs two GPUs")


def written(folder: Path, model: Path, lines: str) -> str:
    """Write rows and a configuration; return it as a word of a command."""
    data = ragged_rows(folder / "train.jsonl", 32)
    (folder / "run.yaml").write_text(
        f"model: {{name: {model}, max_seq_len: 256}}\ndata: {{train_path: {data}}}\n{lines}\n"
    )
    return f"CONFIG={folder / 'run.yaml'}"
