"""Commands on a real card: shards on two, answers and a resume in one run, `make bench`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sft_play.plan.detect import detect
from sft_play.plan.hardware import find_card
from tests.conftest import Program, metrics, ragged_rows
from tests.gpu.conftest import written

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("command", ["train-deepspeed", "train-fsdp"])
@pytest.mark.usefixtures("two_gpus")
def test_two_gpus_give_the_losses_of_one(command: str, tiny: Path, tmp_path: Path, program: Program) -> None:
    config = written(
        tmp_path,
        tiny,
        "tuning: {mode: full}\ntrain: {global_batch_size: 8, max_steps: 6, learning_rate: 5.0e-3, bf16: false}",
    )
    assert program("train", config, "RUN_NAME=one").code == 0
    done = program(command, config, "RUN_NAME=two", "NUM_GPUS=2")
    assert done.code == 0, done.out + done.err
    single, two = ([row["loss"] for row in metrics(tmp_path / "runs" / name)] for name in ("one", "two"))
    assert two == pytest.approx(single, abs=1e-4)


def test_a_run_answers_while_training_and_resumes_to_the_same_losses(
    tiny: Path, tmp_path: Path, program: Program
) -> None:
    config = written(
        tmp_path,
        tiny,
        "train: {global_batch_size: 8, max_steps: 6, save_steps: 3, eval_strategy: steps, eval_steps: 3,"
        " predict_with_generate: true}",
    )
    held_out = ragged_rows(tmp_path / "val.jsonl", 4, seed=1)
    done = program("train", config, f"DATA_VAL_PATH={held_out}", "RUN_NAME=run")
    assert done.code == 0, done.out + done.err
    run = tmp_path / "runs" / "run"
    whole = [row["loss"] for row in metrics(run)]
    assert all("eval_rougeL" in row for row in metrics(run, "eval"))
    shutil.rmtree(run / "checkpoints" / "step-000006")
    shutil.rmtree(run / "model")
    done = program("resume", "RUN=run")
    assert done.code == 0, done.out + done.err
    assert [row["loss"] for row in metrics(run)] == pytest.approx(whole, abs=1e-3)


def test_bench_shows_the_cards_speed_next_to_the_plan(program: Program) -> None:
    done = program("bench", "CONFIG=configs/quickstart.yaml", "JSON=1", timeout=500)
    assert done.code == 0, done.err
    assert done.json["measured"]["steady_tokens_per_second"] > 0
    if find_card(detect().devices[0].name):
        assert done.json["plan"]["tokens_per_second"] > 0
