"""An evaluation reads a quantised base and leaves it as it was.

On CPUs with AVX512-BF16, bitsandbytes 0.50 repacks nf4 weights the first time they are used in evaluation mode, and rounds
their scales to bf16 for good: training would go on over another base, and differently on each machine.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sft_play.config.schema import Config, LoraSettings, ModelConfig, TuningConfig
from sft_play.model.load import load_for_training
from tests.plans import prepared_model, simple_plan
from tests.tiny_models import build_tiny_llama


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_evaluating_does_not_change_a_quantised_model(quantization: str, tmp_path: Path) -> None:
    tiny = build_tiny_llama(tmp_path)
    tuning = TuningConfig(mode="qlora", quantization=quantization, lora=LoraSettings(r=4))
    config = Config(model=ModelConfig(name=str(tiny)), tuning=tuning)
    model, _ = load_for_training(config, simple_plan(), prepared_model(tiny))
    model.train()
    ids = torch.arange(4, 40)[None]
    before = model(input_ids=ids).logits.detach()
    model.eval()
    with torch.no_grad():
        evaluated = model(input_ids=ids).logits
    model.train()
    again = model(input_ids=ids).logits.detach()
    assert torch.equal(before, again), "training goes on over the same base"
    # int8 multiplies in another type outside training, on every machine; nf4 computes as in training.
    assert torch.allclose(before, evaluated, atol=1e-5 if quantization == "nf4" else 0.05)
