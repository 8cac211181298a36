"""Where adapters go: every linear layer of the text model but the head, whatever the architecture."""

from __future__ import annotations

from typing import Any

import pytest

from sft_play.errors import UserError
from sft_play.model.lora import find_targets, text_prefix
from tests.families import tiny_model

LLAMA = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: tiny_model(name, "meta") for name in ("llama", "mixtral", "gemma3")}


def leaves(names: list[str]) -> set[str]:
    return {name.rsplit(".", 1)[-1] for name in names}


def test_auto_is_every_linear_layer_of_a_llama_but_the_head(models: dict[str, Any]) -> None:
    targets = find_targets(models["llama"], "auto")
    assert leaves(targets.modules) == LLAMA
    assert len(targets.modules) == 2 * 7
    assert not targets.conv1d


def test_auto_leaves_the_tower_and_the_projector_of_a_multimodal_model_alone(models: dict[str, Any]) -> None:
    model = models["gemma3"]
    assert text_prefix(model) == "model.language_model"
    found = find_targets(model, "auto").modules
    assert len(found) == 2 * 7
    assert not any("vision" in name or "projector" in name for name in found)


def test_fused_experts_stay_frozen_under_auto_and_that_is_said(models: dict[str, Any]) -> None:
    targets = find_targets(models["mixtral"], "auto")
    assert leaves(targets.modules) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert not targets.parameters
    assert "stay frozen" in targets.notes[0]
    assert "experts.down_proj, experts.gate_up_proj" in targets.notes[0]


def test_names_that_match_nothing_are_listed_beside_what_there_is(models: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        find_targets(models["llama"], ["q_proj", "query", "c_attn"])
    assert "`query`, `c_attn`" in caught.value.message
    assert caught.value.hint is not None
    assert all(f"`{name}`" in caught.value.hint for name in LLAMA)
