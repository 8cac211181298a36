"""The operations behind MFU, against counts by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from sft_play.config.schema import Config, LoraSettings, ModelConfig, TuningConfig
from sft_play.model.load import load_for_training
from sft_play.training.metrics import operations_per_token, peak_operations
from tests.plans import prepared_model, simple_plan
from tests.tiny_models import build_tiny_llama

HEAD = 1024 * 64
BODY = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128) + 5 * 64
"""Two layers of q, o, k, v and the three of the MLP; five norms."""


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mode", ["full", "lora", "qlora"])
def test_each_weight_counts_once_for_each_product(mode: str, tied: bool, tmp_path: Path) -> None:
    folder = build_tiny_llama(tmp_path, tie_word_embeddings=tied)
    tuning = TuningConfig(mode=mode, lora=LoraSettings(r=4, target_modules=["q_proj"]))
    model, _ = load_for_training(Config(model=ModelConfig(name="m"), tuning=tuning), simple_plan(), prepared_model(folder))
    adapters = 0 if mode == "full" else 2 * (64 * 4 + 4 * 64)
    assert operations_per_token(model) == (6 if mode == "full" else 4) * (BODY + HEAD) + 6 * adapters


def test_a_cpu_has_a_measured_peak() -> None:
    peak = peak_operations("cpu")
    assert peak is not None
    assert 1e8 < peak < 1e14
