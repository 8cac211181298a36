"""Image and text models as language models: their text part computes as it does alone, trains alone, and is reloaded as
it was saved.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sft_play.config.schema import ModelConfig
from sft_play.model import lora
from sft_play.model.load import read_model
from sft_play.model.published import model_class
from sft_play.plan.shape import TEXT_WITHIN
from tests import families

QUICK = {"glm4v", "lfm2_vl", "mistral3", "qwen3_vl"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in sorted(TEXT_WITHIN)]
)
def test_the_text_part_trains_alone(name: str, tmp_path: Path) -> None:
    config = families.tiny_config(name)
    torch.manual_seed(0)
    model = model_class(config).from_config(config).eval()
    prefix = lora.free_text_part(model)
    short, long = torch.randint(5, 1000, (1, 9)), torch.randint(5, 1000, (1, 14))
    ids, mask = torch.full((2, 14), 3), torch.ones(2, 14, dtype=torch.long)
    ids[0, :9], ids[1], mask[0, 9:] = short[0], long[0], 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    alone = model(input_ids=short, use_cache=False).logits
    both = model(
        input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=torch.arange(14)
    ).logits
    assert float((both[0, :9] - alone[0]).detach().abs().max() / alone.detach().abs().max()) < 2e-6
    both[mask.bool()].logsumexp(-1).sum().backward()
    without = {n for n, p in model.named_parameters() if p.grad is None}
    assert without and not any(
        n.startswith(f"{prefix}.") and p.grad is None for n, p in model.named_parameters() if "experts" not in n
    )
    assert all(n in without for n, p in model.named_parameters() if not p.requires_grad)
    model.save_pretrained(tmp_path)
    again = read_model(tmp_path, ModelConfig(name="again"), dtype=torch.float32).eval()
    assert torch.allclose(again(input_ids=short, use_cache=False).logits, alone, atol=1e-6)
