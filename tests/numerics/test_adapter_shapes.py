"""Every shape of adapter equals PEFT's: in weights, in its start, and as a model that is read again and merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from sft_play.config.schema import LoraSettings, ModelConfig
from sft_play.errors import UserError
from sft_play.model.lora import add_adapters, publish_on_base, read_adapter
from sft_play.plan.architecture import shape_of
from sft_play.runs.adapters import peft_settings
from sft_play.trace.build import BASE
from tests.tiny_models import build_tiny_llama

pytestmark = pytest.mark.slow
IDS = torch.arange(4, 36).view(2, 16)
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dora": ({"variant": "dora"}, {"use_dora": True}),
    "rslora": ({"rslora": True}, {"use_rslora": True}),
    "pissa": ({"init": "pissa"}, {"init_lora_weights": "pissa"}),
    "olora": ({"init": "olora", "rslora": True}, {"init_lora_weights": "olora", "use_rslora": True}),
    "orthogonal": ({"init": "orthogonal"}, {"init_lora_weights": "orthogonal"}),
    "patterns": (
        {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"q_proj": 3.0}},
        {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"q_proj": 3.0}},
    ),
    "pissa-patterns": (
        {"init": "pissa", "rank_pattern": {"down_proj": 2}, "alpha_pattern": {"q_proj": 3.0}},
        {"init_lora_weights": "pissa", "rank_pattern": {"down_proj": 2}, "alpha_pattern": {"q_proj": 3.0}},
    ),
    "embedding": ({"modules_to_save": ["embed_tokens"]}, {"modules_to_save": ["embed_tokens"]}),
    "bias": ({"bias": "all"}, {"bias": "all"}),
    "own-bias": (
        {"bias": "lora_only", "target_modules": ["q_proj"]},
        {"bias": "lora_only", "target_modules": ["q_proj"]},
    ),
}
"""Ours, and what PEFT calls it."""


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("shapes") / "model"
    return build_tiny_llama(place, tie_word_embeddings=request.param, attention_bias=True)


def base(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize(("ours", "theirs"), SHAPES.values(), ids=SHAPES)
def test_a_shape_is_pefts(folder: Path, ours: dict[str, Any], theirs: dict[str, Any], tmp_path: Path) -> None:
    settings = LoraSettings(r=4, alpha=8.0, **ours)
    plain = logits(base(folder))
    torch.manual_seed(1)
    frozen = base(folder).requires_grad_(False)
    model = add_adapters(frozen, settings, BASE, torch.float32)
    torch.manual_seed(1)
    targets = {"target_modules": "all-linear"} | theirs
    tied = (
        {"ensure_weight_tying": True}
        if "modules_to_save" in theirs and folder and frozen.config.tie_word_embeddings
        else {}
    )
    own: Any = get_peft_model(base(folder), LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **targets, **tied))
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    expected = {name: value for name, value in own.named_parameters() if value.requires_grad}
    assert trained.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in trained.items())
    assert (logits(model) - plain).abs().max() < 1e-6
    torch.manual_seed(2)
    for value in trained.values():
        value.data += 0.05 * torch.randn_like(value)
    after = logits(model)
    assert (after - plain).abs().max() > 2e-3
    model.save_pretrained(tmp_path, state_dict=model.state_dict())
    publish_on_base(model, tmp_path)
    again = read_adapter(base(folder), tmp_path).eval()
    assert (logits(again) - after).abs().max() < 3e-6
    merged = again.merge_and_unload()
    assert (logits(merged) - after).abs().max() < 3e-6
    merged.save_pretrained(tmp_path / "merged")
    assert (logits(base(tmp_path / "merged")) - after).abs().max() < 3e-6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank_pattern": {"dwn_proj": 8}}, "`tuning.lora.rank_pattern` names `dwn_proj`"),
        ({"alpha_pattern": {"lm_head": 8.0}}, "`tuning.lora.alpha_pattern` names `lm_head`"),
        ({"modules_to_save": ["embed_token"]}, "`tuning.lora.modules_to_save` names `embed_token`"),
        ({"modules_to_save": ["mlp"]}, "`model.layers.0.mlp.gate_proj` has an adapter"),
    ],
)
def test_a_name_that_means_nothing_is_refused(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        add_adapters(base(folder).requires_grad_(False), LoraSettings(**settings), BASE, torch.float32)
    assert message in caught.value.message


def test_a_saved_module_is_not_one_whose_name_ends_alike(folder: Path) -> None:
    """PEFT compares the ends of words: `norm` would also save `input_layernorm`."""
    settings = LoraSettings(r=4, modules_to_save=["norm"])
    model = add_adapters(base(folder).requires_grad_(False), settings, BASE, torch.float32)
    trained = {name for name, part in model.named_parameters() if part.requires_grad and "lora_" not in name}
    assert trained == {"base_model.model.model.norm.modules_to_save.default.weight"}


def test_the_plan_counts_a_module_that_is_named_twice_once(folder: Path) -> None:
    settings = LoraSettings(r=4, embeddings="all", modules_to_save=["embed_tokens"])
    model = add_adapters(base(folder).requires_grad_(False), settings, BASE, torch.float32)
    trained = {id(part): part.numel() for part in model.parameters() if part.requires_grad}
    shape = shape_of(ModelConfig(name=str(folder)))
    assert shape.adapter_parameters(settings) == sum(trained.values())


def test_the_default_is_plain_lora() -> None:
    config = LoraConfig(**peft_settings(LoraSettings()))
    assert config.to_dict() == LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0).to_dict()


def test_lora_plus_has_the_rates_of_pefts_optimizer(folder: Path, tmp_path: Path) -> None:
    from peft.optimizers import create_loraplus_optimizer
    from transformers import Trainer, TrainingArguments

    from sft_play.training.trainer import split_for_lora_plus

    model = add_adapters(base(folder).requires_grad_(False), LoraSettings(r=4, bias="all"), BASE, torch.float32)
    arguments = TrainingArguments(output_dir=str(tmp_path), learning_rate=1e-3, use_cpu=True, weight_decay=0.1)
    optimizer = Trainer(model, arguments).create_optimizer()
    split_for_lora_plus(optimizer, model, 16.0)
    own = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16.0)

    def rates(optimizer: Any) -> dict[int, float]:
        return {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}

    assert rates(optimizer) == rates(own)
