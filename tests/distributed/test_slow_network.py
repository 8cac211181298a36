"""Slow networks in whole runs (contract B12): local steps that resume to the bit, compressed gradients, bytes as the
interface counts them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from sft_play.plan.plan import Plan
from tests.training_runs import Trained, Trial, column, resume_from, rows, same_to_the_bit

HALVES = ((2, 2), (2, 2))
OFF = 'launch.balance: "off"'
LOCAL = (OFF, "launch.local_steps: 4", "train.save_steps: 3", "train.eval_steps: 3", "tuning.lora.dropout: 0.1")


def test_a_run_with_local_steps_resumes_bit_for_bit_between_two_averages(trained: Trained, tmp_path: Path) -> None:
    """Evaluations and saves between the averages of steps 4 and 8 change nothing."""
    import torch

    run = trained(Trial(strategy="ddp", ranks=HALVES, mode="lora", settings=LOCAL, plan=(("warmup_steps", 1),)))
    assert all(
        len(set(row["rank_grad_norm"])) == 2 and max(row["rank_grad_norm"]) == row["grad_norm"] for row in rows(run)
    )
    for row in rows(run):  # the logged loss is that of all tokens, whoever trained them
        tokens = row["rank_tokens"]
        whole = sum(loss * count for loss, count in zip(row["rank_loss"], tokens, strict=True)) / sum(tokens)
        assert whole == pytest.approx(row["loss"], abs=1e-5)
    again = resume_from(run, tmp_path / "again", 3)
    same_to_the_bit(again, run)
    assert column(again, "rank_grad_norm") == column(run, "rank_grad_norm")
    assert column(again, "eval_loss", "eval") == column(run, "eval_loss", "eval")
    # Ranks differ at step 3, and the checkpoint's own weights are their average.
    folder = run.checkpoints / "step-000003"
    mine, other = (load_file(folder / f"optimizer-rank{rank}.safetensors") for rank in (0, 1))
    name = next(key for key in mine if key.startswith("weight/") and "lora_B" in key)
    assert not torch.equal(mine[name], other[name])
    tokens = json.loads((folder / "states.json").read_text())["own"]["tokens"]
    average = (mine[name] * tokens[0] + other[name] * tokens[1]) / sum(tokens)
    assert torch.allclose(mine[name.replace("weight/", "average/")], average, atol=1e-6)
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        saved = file.get_tensor(name.removeprefix("weight/").replace(".default", ""))
    assert torch.equal(saved.flatten(), mine[name.replace("weight/", "average/")])


@pytest.mark.long
def test_16_bit_compression_is_close(trained: Trained) -> None:
    plain = trained(Trial(strategy="ddp", ranks=HALVES, settings=(OFF,)))
    for kind, gap in (("fp16", 1e-3), ("bf16", 1e-2)):
        narrow = trained(Trial(strategy="ddp", ranks=HALVES, settings=(OFF, f"launch.compression: {kind}")))
        assert column(narrow, "grad_norm") != column(plain, "grad_norm")
        assert column(narrow, "loss") == pytest.approx(column(plain, "loss"), rel=gap)


@pytest.mark.long
def test_local_steps_continue_with_another_number_of_ranks(trained: Trained, tmp_path: Path) -> None:
    """All begin with the average's weights, the mean of the ranks' moments, and the same anchor; so does one rank
    alone.
    """
    run = trained(Trial(strategy="ddp", ranks=HALVES, settings=(OFF, "launch.local_steps: 4", "train.save_steps: 3")))
    for ranks, strategy in ((((2, 2), (1, 2), (1, 2)), "ddp"), (((4, 2),), "single")):
        again = resume_from(run, tmp_path / strategy, 3, Trial(strategy=strategy, ranks=ranks))
        assert Plan.load(again.plan).world_size == len(ranks)
        assert [row["step"] for row in rows(again)] == list(range(1, 9))
        assert column(again, "loss")[3:] == pytest.approx(column(run, "loss")[3:], rel=0.05)
