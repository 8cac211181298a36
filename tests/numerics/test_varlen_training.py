"""The project's own worker under `varlen`: packed rows, evaluation and answers, against sdpa and unpacked rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sft_play import train as worker
from sft_play.config.load import read_config
from sft_play.plan.plan import Plan
from sft_play.runs.folder import RunFolder
from sft_play.runs.prepared import Prepared
from sft_play.training.process import Activity, StopRequest
from tests.families import build_family
from tests.training_runs import Trial, make_run, rows

SETTINGS = (
    "train.max_steps: 4", "train.predict_with_generate: true", "train.generation_max_new_tokens: 4", "train.save_strategy: no",
    "eval.metrics: [\"exact_match\"]",
)  # fmt: skip


def trained(run: RunFolder) -> Any:
    """Trains in this process, as a rank does; returns the trainer."""
    config, plan, prepared = read_config(run.config).config, Plan.load(run.plan), Prepared.load(run.prepared)
    stamp = worker.settle_stamp(run, config, plan, prepared, None)
    request = StopRequest(run=run, rank=0, activity=Activity())
    trainer = worker.build_trainer(request, config, plan, prepared, stamp, None)
    trainer.train()
    return trainer


@pytest.mark.parametrize(("family", "kernel"), [("llama", "sdpa"), ("qwen3_5_text", "sdpa"), ("gpt_oss", "eager")])
def test_packed_rows_train_and_are_scored_as_rows_alone(family: str, kernel: str, tmp_path: Path) -> None:
    """Adapters, with recomputation; a family with linear attention, and one with sinks, which has no sdpa."""
    base = build_family(tmp_path / "base", family)
    packed = (("attn_implementation", "varlen"), ("pack_tokens", 64), ("gradient_checkpointing", True))
    trials = {
        "plain": Trial(mode="lora", ranks=((1, 8),), steps=4, settings=SETTINGS, plan=(("attn_implementation", kernel),)),
        "packed": Trial(mode="lora", ranks=((2, 3),), steps=4, settings=(*SETTINGS, "train.gradient_checkpointing: true"), plan=packed),
    }  # fmt: skip
    runs = {name: make_run(tmp_path / name, base, trial) for name, trial in trials.items()}
    trainers = {name: trained(run) for name, run in runs.items()}
    assert trainers["packed"].model.config._attn_implementation == "varlen"
    for kind, names in {"train": ("rank_tokens", "loss", "grad_norm"), "eval": ("eval_loss", "eval_exact_match")}.items():
        wanted, found = ([[row[name] for name in names] for row in rows(run, kind)] for run in runs.values())
        assert wanted
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine[-2:] == pytest.approx(theirs[-2:], rel=1e-4) and mine[:-2] == theirs[:-2]
