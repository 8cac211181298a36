"""`make setup-accelerate`: writes a config for this machine, says why, takes answers as variables; what it wrote is read back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sft_play.launch.settings import read_accelerate_config

ROOT = Path(__file__).parents[2]


def setup(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "sft_play", "setup-accelerate", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL
    )


def test_it_chooses_and_says_why(tmp_path: Path) -> None:
    outcome = setup(tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    assert "wrote accelerate_configs/local.yaml" in outcome.stdout
    assert "mixed precision no: " in outcome.stdout
    assert "  1 machine: none other was named" in outcome.stdout
    assert "ACCELERATE_CONFIG=accelerate_configs/local.yaml" in outcome.stdout
    choices = read_accelerate_config(tmp_path / "accelerate_configs" / "local.yaml")
    assert choices.num_gpus in (1, 2)
    assert choices.train == {"bf16": False, "fp16": False}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("NUM_GPUS=3", "STRATEGY=ddp"), ("ddp", 3, 1)),
        (("NUM_GPUS=2", "STRATEGY=zero3"), ("zero", 2, 1)),
        (("NUM_GPUS=2", "STRATEGY=fsdp2", "NUM_NODES=2"), ("fsdp2", 2, 2)),
        (("NUM_GPUS=1",), ("single", 1, 1)),
    ],
)
def test_answers_as_variables(tmp_path: Path, arguments: tuple[str, ...], expected: tuple[str, int, int]) -> None:
    outcome = setup(tmp_path, *arguments, "OUT=mine.yaml", "JSON=1")
    assert outcome.returncode == 0, outcome.stderr
    report = json.loads(outcome.stdout)
    assert report["path"] == "mine.yaml"
    assert len(report["reasons"]) == 4
    choices = read_accelerate_config(tmp_path / "mine.yaml")
    assert (choices.strategy, choices.num_gpus, choices.num_nodes) == expected
    if choices.deepspeed:
        assert choices.deepspeed.stage == 3


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (("MIXED_PRECISION=fp8",), 2, "`MIXED_PRECISION` is `fp8`"),
        (("MIXED_PRECISION=fp16",), 3, "CPUs cannot train in"),
        (("STRATEGY=magic",), 2, "`STRATEGY` is `magic`"),
        (("STRATEGY=ddp", "NUM_GPUS=1"), 2, "needs at least 2 processes"),
        (("STRATEGY=single", "NUM_GPUS=2"), 2, "there are 2 processes"),
        (("NUM_GPUS=0",), 2, "`NUM_GPUS` is `0`"),
    ],
)
def test_refusals(tmp_path: Path, arguments: tuple[str, ...], code: int, word: str) -> None:
    outcome = setup(tmp_path, *arguments)
    assert outcome.returncode == code, outcome.stderr
    assert word in outcome.stderr
    assert list(tmp_path.iterdir()) == []


def test_only_an_accelerate_configuration_is_replaced(tmp_path: Path) -> None:
    for name, content in (("notes.txt", "buy: milk\n"), ("broken.yaml", "a: [\n"), ("list.yaml", "- compute_environment\n")):
        (tmp_path / name).write_text(content)
        outcome = setup(tmp_path, f"OUT={name}")
        assert outcome.returncode == 2
        assert f"error: {name}: this is no accelerate configuration" in outcome.stderr
        assert (tmp_path / name).read_text() == content
    (tmp_path / "mine.yaml").write_text("compute_environment: LOCAL_MACHINE\n")
    assert setup(tmp_path, "OUT=mine.yaml").returncode == 0
    assert setup(tmp_path, "OUT=mine.yaml").returncode == 0
    assert "num_processes" in (tmp_path / "mine.yaml").read_text()
