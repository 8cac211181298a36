"""The unsloth backend on an NVIDIA GPU: it trains, and its adapter answers under transformers and PEFT too."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from sft_play.config.schema import Config, LoraSettings, ModelConfig, TuningConfig
from tests.plans import prepared_model, simple_plan
from tests.tiny_models import build_tiny_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("unsloth") is None, reason="`unsloth` is not installed"),
]


@pytest.fixture
def model(tmp_path: Path) -> Any:
    from sft_play.model.load import load_for_training

    # Unsloth's kernels want heads of 64 or 128.
    folder = build_tiny_llama(tmp_path / "base", hidden_size=256, intermediate_size=512)
    config = Config(
        model=ModelConfig(name=str(folder), max_seq_len=256),
        tuning=TuningConfig(mode="qlora", backend="unsloth", lora=LoraSettings(r=8)),
    )
    plan = simple_plan(device="cuda", precision="bf16", weights_dtype="bfloat16", layout="padded")
    return load_for_training(config, plan, prepared_model(folder))[0]


def test_it_trains_and_keeps_logits_at_the_wanted_positions_only(model: Any) -> None:
    ids = torch.arange(4, 40, device="cuda")[None].repeat(2, 1)
    mask, keep = torch.ones_like(ids), torch.arange(10, 35, device="cuda")
    full = model(input_ids=ids, attention_mask=mask).logits
    kept = model(input_ids=ids, attention_mask=mask, logits_to_keep=keep).logits
    assert kept.shape[1] == 25
    assert torch.allclose(kept, full[:, keep], atol=1e-2)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    losses = []
    for _ in range(30):
        logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=keep).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, keep + 1].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]


def test_only_adapters_are_trained(model: Any) -> None:
    assert all("lora_" in name for name, p in model.named_parameters() if p.requires_grad)
    assert any(p.requires_grad for p in model.parameters())
