"""Infinite gradients under a finite loss: the run stops, with a loss scaler after a long search."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import datasets
import pytest
from safetensors.torch import load_file, save_file

from sft_play.runs.folder import RunFolder
from tests.documents import on_page
from tests.tiny_models import build_tiny_llama
from tests.training_runs import Trial, command, ended_with, logs, make_run, rows, train

HALVES = ((2, 2), (2, 2))
HALVES_OF_A_MODEL = ((4, 2), (4, 2))
STEPS = 30
SETTINGS = ("train.max_steps: 30", "train.eval_strategy: 'no'", "train.eval_steps: null", "train.save_steps: 100")
TOKEN = 4


def spoilt(base: Path, eps: float = 1e-36) -> Path:
    """Build a model with a token whose embedding is zero and norms with a tiny epsilon: as the first of a row it stays
    zero in every layer, where each norm multiplies the gradient by 1e18.
    """
    build_tiny_llama(base, tie_word_embeddings=False, rms_norm_eps=eps)
    weights = load_file(base / "model.safetensors")
    weights["model.embed_tokens.weight"][TOKEN] = 0.0
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    return base


def spoilt_run(path: Path, base: Path, trial: Trial) -> RunFolder:
    """Make a run whose rows all begin with the token."""
    run = make_run(path, base, trial)
    prepared = json.loads(run.prepared.read_text())
    columns = datasets.load_from_disk(prepared["train"]["path"]).to_dict()
    columns["input_ids"] = [[TOKEN, *(max(id, 5) for id in ids[1:])] for ids in columns["input_ids"]]
    prepared["train"]["path"] = str(run.path / "rows" / "other")
    datasets.Dataset.from_dict(columns).save_to_disk(prepared["train"]["path"])
    run.prepared.write_text(json.dumps(prepared))
    return run


def train_scaled(run: RunFolder) -> subprocess.CompletedProcess[str]:
    """Train as `train` does, with a loss scaler."""
    arguments, variables = command(run)
    arguments = ["tests.scaled_worker" if word == "sft_play.train" else word for word in arguments]
    return subprocess.run(arguments, env=variables, capture_output=True, text=True, timeout=400, check=False)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2"])
def test_an_infinite_gradient_stops_at_once_without_a_scaler(strategy: str, tmp_path: Path) -> None:
    trial = Trial(strategy=strategy, ranks=HALVES, steps=STEPS, settings=SETTINGS)
    run = spoilt_run(tmp_path / "run", spoilt(tmp_path / "base"), trial)
    assert train(run).returncode != 0
    end = ended_with(run)
    assert end["code"] == 4, logs(run)
    assert "the gradient norm of step 1 is" in end["error"] and "loss scaler" not in end["error"]
    reports = [json.loads(path.read_text()) for path in run.logs.glob("bad-rows-rank*.json")]
    assert reports and all(report["step"] == 1 and report["rows"] for report in reports)
    assert not run.model.exists()


@pytest.mark.parametrize("ranks", [((4, 2),), pytest.param(HALVES, marks=pytest.mark.long)])
@pytest.mark.broad
def test_a_scaler_that_skips_every_update_ends_the_run(ranks: tuple[tuple[int, int], ...], tmp_path: Path) -> None:
    plan = (("precision", "fp16"),)
    strategy = "single" if len(ranks) == 1 else "ddp"
    run = spoilt_run(
        tmp_path / "run",
        spoilt(tmp_path / "base"),
        Trial(strategy=strategy, ranks=ranks, steps=STEPS, settings=SETTINGS, plan=plan),
    )
    assert train_scaled(run).returncode != 0
    end = ended_with(run)
    assert end["code"] == 4, logs(run)
    assert "the gradient norm of step 17 is" in end["error"], "16 halvings, and once more at a scale of 1"
    assert on_page("loss-is-nan", end["error"])
    assert "has skipped 17 updates in a row, its scale is 1)" in end["error"]
    reports = [json.loads(path.read_text()) for path in run.logs.glob("bad-rows-rank*.json")]
    assert len(reports) == len(ranks) and all(report["step"] == 17 and report["rows"] for report in reports)
    assert len(rows(run)) == 16 and not run.model.exists()


@pytest.mark.parametrize("plan", [(("stages", (1, 1)),), (("tensor_parallel", 2),)])
def test_a_scaler_skips_the_same_updates_on_all_parts_of_a_model(
    plan: tuple[tuple[str, Any], ...], tmp_path: Path
) -> None:
    settings, base, losses = (*SETTINGS, "train.max_steps: 8"), spoilt(tmp_path / "base", eps=1e-8), []
    for name, strategy, ranks, settings_of_ranks in (
        ("whole", "single", ((4, 2),), ()),
        ("parts", "ddp", HALVES_OF_A_MODEL, plan),
    ):
        trial = Trial(
            strategy=strategy, ranks=ranks, steps=8, settings=settings, plan=(("precision", "fp16"), *settings_of_ranks)
        )
        run = spoilt_run(tmp_path / name, base, trial)
        assert train_scaled(run).returncode == 0, logs(run)
        losses.append(rows(run))
    for whole, parts in zip(*losses, strict=True):
        assert (whole["grad_norm"] is None) == (parts["grad_norm"] is None), losses
        assert parts["loss"] == pytest.approx(whole["loss"], abs=2e-3)
    norms = [row["grad_norm"] for row in losses[1]]
    assert None in norms[:2] and None not in norms[-2:], "some updates were skipped, and later ones were made"
