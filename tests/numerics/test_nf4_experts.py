"""Fused experts in nf4: a quarter of the bytes and the results of the dequantised weights, trained and continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit

from sft_play.config.schema import Config, ModelConfig, TuningConfig
from sft_play.model.load import load_for_training
from sft_play.model.lora import expert_names
from tests.families import build_family, tiny_model
from tests.plans import prepared_model, simple_plan

IDS = torch.randint(10, 1000, (2, 40), generator=torch.Generator().manual_seed(1))


def load(folder: Path, name: str, **changes: Any) -> Any:
    """Return the model that training of `mode: qlora` gets."""
    build_family(folder / name, name)
    config = Config(model=ModelConfig(name=str(folder / name)), tuning=TuningConfig(mode="qlora"))
    return load_for_training(config, simple_plan(nf4_experts=True, **changes), prepared_model(folder / name))[0]


def plain_of(model: Any, name: str) -> Any:
    """Return the unquantised model with the dequantised weights of another."""
    plain, base = tiny_model(name), model.get_base_model()
    with torch.no_grad():
        for parameter in expert_names(plain):
            plain.get_parameter(parameter).copy_(
                getattr(base.get_submodule(parameter.rpartition(".")[0]), parameter.rpartition(".")[2])
            )
        for layer, module in base.named_modules():
            if isinstance(module, Linear4bit):
                weight = plain.get_submodule(layer.replace(".base_layer", "")).weight
                weight.copy_(dequantize_4bit(module.weight.data, module.weight.quant_state))
    return plain


@pytest.mark.parametrize("name", ["glm4_moe", "gpt_oss", "nemotron_h", "qwen3_moe"])
def test_quantised_experts_take_a_quarter_and_compute_the_same(name: str, tmp_path: Path) -> None:
    model = load(tmp_path, name, attn_implementation="eager")
    original, base = tiny_model(name), model.get_base_model()
    assert sorted(expert_names(base)) == sorted(expert_names(original))
    assert expert_names(original)
    for parameter in expert_names(original):
        packed = base.get_parameter(parameter.replace("experts.", "experts.parametrizations.") + ".original")
        assert packed.nbytes == original.get_parameter(parameter).numel() / 2
        assert not packed.requires_grad
    plain = plain_of(model, name).eval()
    with torch.no_grad():
        computed, expected, full = (network(input_ids=IDS).logits for network in (model.eval(), plain, original.eval()))
    assert (computed - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (computed - full).abs().mean() < 0.5 * full.abs().mean(), "within the error of four bits"


def test_adapters_over_quantised_experts_have_the_gradients_of_the_plain_model(tmp_path: Path) -> None:
    gradients = {}
    for recomputed in (False, True):
        model = load(tmp_path / str(recomputed), "qwen3_moe", gradient_checkpointing=recomputed)
        if recomputed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for parameter in (p for n, p in model.named_parameters() if "lora_B" in n):
            torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(3))
        losses = []
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model.train()(input_ids=IDS, labels=IDS).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[2] < losses[0]
        gradients[recomputed] = [p.grad for p in model.parameters() if p.requires_grad]
    for expected_gradient, other in zip(gradients[False], gradients[True], strict=True):
        torch.testing.assert_close(expected_gradient, other, rtol=1e-4, atol=1e-6)
