"""Ranks with slices of the layers compute what one process does, for every family that the plan allows (contract
B16).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sft_play.model.parallel import STYLES
from sft_play.plan.shape import TENSOR_PARALLEL_MODEL_TYPES
from tests.families import COMPOSITE, FAMILIES
from tests.numerics.rank_processes import results_of_ranks

EXACT = 1e-5
OTHERS = {"gemma3n_text"}
"""Its layers have further inputs, which the plan's formulas do not know."""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "lora"])
@pytest.mark.parametrize(
    "families",
    [["gemma3", "qwen3", "starcoder2"], pytest.param(sorted(TENSOR_PARALLEL_MODEL_TYPES), marks=pytest.mark.long)],
    ids=["three", "all"],
)
def test_slices_of_layers_are_exact(mode: str, families: list[str], tmp_path: Path) -> None:
    result = results_of_ranks("layer_ranks", tmp_path, 2, [mode, *families])[0]
    wrong = {
        kind: facts for kind, facts in result.items() if max(facts["loss"], facts["gradients"], facts["norm"]) > EXACT
    }
    assert result.keys() == set(families) and wrong == {}
    assert all(facts["apart"] and facts["alike"] for facts in result.values()), result
    assert all(facts["held"] < 0.95 for facts in result.values()), "no rank holds all weights"


@pytest.mark.slow
def test_the_list_names_every_family_whose_plan_is_understood() -> None:
    understood = set()
    for family in FAMILIES:
        text = COMPOSITE[family][0] if family in COMPOSITE else family
        plan = getattr(CONFIG_MAPPING[text], "base_model_tp_plan", None)
        if plan and set(plan.values()) <= STYLES:
            understood.add(family)
    assert understood - OTHERS == TENSOR_PARALLEL_MODEL_TYPES
