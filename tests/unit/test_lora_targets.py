"""Where adapters go: every linear layer of the text model but the head, whatever the architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sft_play.config.schema import LoraSettings
from sft_play.errors import UserError
from sft_play.model.lora import add_adapters, find_targets, linear_names, text_prefix
from sft_play.runs.prepared import ResolvedModel
from tests.tiny_models import build_tiny_gemma3, build_tiny_gpt2, build_tiny_llama, build_tiny_mixtral

LLAMA = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    builders = {"llama": build_tiny_llama, "gpt2": build_tiny_gpt2, "mixtral": build_tiny_mixtral, "gemma3": build_tiny_gemma3}
    folder = tmp_path_factory.mktemp("models")
    return {name: AutoModelForCausalLM.from_pretrained(build(folder / name)) for name, build in builders.items()}


def leaves(names: list[str]) -> set[str]:
    return {name.rsplit(".", 1)[-1] for name in names}


def adapted(model: Any, **settings: Any) -> Any:
    base = ResolvedModel(
        name="base", path=str(Path("base")), source="folder", revision=None, fingerprint="", tokenizer_fingerprint=""
    )
    return add_adapters(model, LoraSettings(r=2, **settings), base, torch.float32)[0]


def adapted_names(model: Any) -> set[str]:
    return {n.split(".lora_A")[0].removeprefix("base_model.model.") for n, _ in model.named_parameters() if "lora_A" in n}


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


def test_fused_experts_can_be_typed(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(build_tiny_mixtral(tmp_path))
    targets = find_targets(model, ["q_proj", "experts.gate_up_proj"])
    assert targets.parameters == [f"model.layers.{i}.mlp.experts.gate_up_proj" for i in (0, 1)]
    assert len(targets.modules) == 2
    trained = adapted(model, target_modules=["q_proj", "experts.gate_up_proj"])
    ids = torch.arange(4, 20)[None]
    trained(input_ids=ids).logits.float().sum().backward()
    grown = [name for name, p in trained.named_parameters() if p.requires_grad and p.grad is not None]
    assert any("experts" in name for name in grown)
    assert any("q_proj" in name for name in grown)


def test_names_that_match_nothing_are_listed_beside_what_there_is(models: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        find_targets(models["llama"], ["q_proj", "query", "c_attn"])
    assert "`query`, `c_attn`" in caught.value.message
    assert caught.value.hint is not None
    assert all(f"`{name}`" in caught.value.hint for name in LLAMA)


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_a_head_that_shares_its_weight_with_the_embeddings_is_refused(models: dict[str, Any], name: str) -> None:
    with pytest.raises(UserError, match="share one weight"):
        find_targets(models["llama"], ["q_proj", name])


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "gemma3"])
def test_adapters_start_as_nothing_and_alone_require_gradients(name: str, tmp_path: Path) -> None:
    build = {"llama": build_tiny_llama, "gpt2": build_tiny_gpt2, "mixtral": build_tiny_mixtral, "gemma3": build_tiny_gemma3}[name]
    model = AutoModelForCausalLM.from_pretrained(build(tmp_path)).eval()
    expected = set(linear_names(model))
    ids = torch.arange(4, 20)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        trained = adapted(model).eval()
        assert torch.equal(trained(input_ids=ids).logits, before)
    assert adapted_names(trained) == expected
    assert all(("lora_" in n) == p.requires_grad for n, p in trained.named_parameters())
