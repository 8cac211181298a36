"""The project's own worker under `varlen`: packed rows, evaluation and answers, against sdpa and unpacked rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.families import build_family
from tests.training_runs import Trial, make_run, must_train, rows

SETTINGS = (
    "train.max_steps: 4",
    "train.predict_with_generate: true",
    "train.generation_max_new_tokens: 4",
    "train.save_strategy: 'no'",
    'eval.metrics: ["exact_match"]',
)


@pytest.mark.parametrize(("family", "kernel"), [("llama", "sdpa"), ("qwen3_5_text", "sdpa"), ("gpt_oss", "eager")])
def test_packed_rows_train_and_are_scored_as_rows_alone(family: str, kernel: str, tmp_path: Path) -> None:
    """Adapters, with recomputation; a family with linear attention, and one with sinks, which has no sdpa."""
    base = build_family(tmp_path / "base", family)
    packed = (("attn_implementation", "varlen"), ("pack_tokens", 64), ("gradient_checkpointing", True))
    trials = {
        "plain": Trial(
            mode="lora", ranks=((1, 8),), steps=4, settings=SETTINGS, plan=(("attn_implementation", kernel),)
        ),
        "packed": Trial(
            mode="lora",
            ranks=((2, 3),),
            steps=4,
            settings=(*SETTINGS, "train.gradient_checkpointing: true"),
            plan=packed,
        ),
    }
    runs = [must_train(make_run(tmp_path / name, base, trial)) for name, trial in trials.items()]
    for kind, names in {
        "train": ("rank_tokens", "loss", "grad_norm"),
        "eval": ("eval_loss", "eval_exact_match"),
    }.items():
        alone, together = ([[row[name] for name in names] for row in rows(run, kind)] for run in runs)
        assert alone
        for mine, theirs in zip(together, alone, strict=True):
            assert mine[-2:] == pytest.approx(theirs[-2:], rel=1e-4) and mine[:-2] == theirs[:-2]
