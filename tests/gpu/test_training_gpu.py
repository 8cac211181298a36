"""What only a GPU can show: bf16 training, nf4 on the device, memory beside the plan, two GPUs over NCCL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sft_play.plan.detect import detect
from tests.conftest import metrics, ragged_rows

pytestmark = pytest.mark.gpu


@pytest.fixture
def config(tiny: Path, tmp_path: Path) -> Path:
    rows = ragged_rows(tmp_path / "train.jsonl", 32)
    path = tmp_path / "gpu.yaml"
    path.write_text(
        f"model: {{name: {tiny}, max_seq_len: 256}}\ndata: {{train_path: {rows}}}\n"
        "train: {global_batch_size: 8, max_steps: 6, learning_rate: 5.0e-3}\n",
        encoding="utf-8",
    )
    return path


@pytest.mark.parametrize("mode", ["lora", "qlora", "full"])
def test_one_gpu_trains_in_bf16_within_the_plan(mode: str, config: Path, program, tmp_path: Path) -> None:
    done = program("train", f"CONFIG={config}", "RUN_NAME=gpu", f"TUNING_MODE={mode}")
    assert done.code == 0, done.out + done.err
    run = tmp_path / "runs" / "gpu"
    plan = json.loads((run / "plan.json").read_text())
    rows = metrics(run)
    assert plan["device"] == "cuda" and plan["precision"] in ("bf16", "fp16")
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert json.loads((run / "training_metrics.json").read_text())["peak_memory_bytes"] <= plan["ranks"][0]["peak_bytes"]


@pytest.mark.parametrize("command", ["train-distributed", "train-deepspeed", "train-fsdp"])
def test_two_gpus_give_the_losses_of_one(command: str, config: Path, program, tmp_path: Path) -> None:
    if len(detect().devices) < 2:
        pytest.skip("needs two GPUs")
    precise = ["TRAIN_BF16=false", "TUNING_MODE=full"]
    assert program("train", f"CONFIG={config}", "RUN_NAME=one", *precise).code == 0
    done = program(command, f"CONFIG={config}", "RUN_NAME=two", "NUM_GPUS=2", *precise)
    assert done.code == 0, done.out + done.err
    one, two = (metrics(tmp_path / "runs" / name) for name in ("one", "two"))
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one], abs=1e-4)
