"""The fused adapter layer computes PEFT's numbers, and falls back to PEFT otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from sft_play.model.lora import fuse_adapters
from tests.tiny_models import build_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("fused") / "tiny", attention_bias=True)


def adapted(folder: Path, **lora: Any) -> Any:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = {"r": 4, "lora_alpha": 12, "target_modules": "all-linear", "init_lora_weights": False, **lora}
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings)).train()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    ids = torch.arange(300, 340)[None]
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return {
        "loss": loss.detach(),
        **{name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
    }


@pytest.mark.parametrize("checkpointing", [False, True])
def test_loss_and_gradients_are_those_of_peft(folder: Path, checkpointing: bool) -> None:
    model = adapted(folder)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    expected = gradients(model)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    assert fuse_adapters(model) == 14
    fused = gradients(model)
    assert fused.keys() == expected.keys()
    assert len(fused) == 29
    for name, value in expected.items():
        torch.testing.assert_close(fused[name], value, rtol=1e-4, atol=1e-6, msg=name)
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


@torch.no_grad()
def test_disabled_and_merged_adapters_behave_as_before(folder: Path) -> None:
    model = adapted(folder).eval()
    ids = torch.arange(300, 320)[None]
    with model.disable_adapter():
        bare = model(input_ids=ids).logits
    tuned = model(input_ids=ids).logits
    fuse_adapters(model)
    with model.disable_adapter():
        assert torch.equal(model(input_ids=ids).logits, bare)
    torch.testing.assert_close(model(input_ids=ids).logits, tuned, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.merge_and_unload()(input_ids=ids).logits, tuned, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("base", [torch.bfloat16, torch.float32])
def test_gradients_in_bf16_are_as_exact_as_those_of_peft(folder: Path, base: torch.dtype) -> None:
    """fp32 adapters over a bf16 base, as LoRA runs on a GPU, and over one in fp32."""
    exact, model = adapted(folder), adapted(folder)
    for parameter, frozen in zip(model.parameters(), exact.parameters(), strict=True):
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(base)
            frozen.data = parameter.data.float()
    reference = gradients(exact)

    def error() -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            computed = gradients(model)
        pairs = [(computed[name].float(), value) for name, value in reference.items() if "lora_" in name]
        return sum(float((gradient - other).norm() / other.norm()) for gradient, other in pairs) / len(pairs)

    plain = error()
    assert fuse_adapters(model) == 14
    assert 0 < error() < 1.1 * plain < 0.1
