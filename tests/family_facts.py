"""What a published model of a family keeps of its base in addition to trained weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from sft_play.config.schema import ModelConfig
from sft_play.model import lora, published
from sft_play.model.load import read_model
from sft_play.model.tokenizer import load_tokenizer
from sft_play.training.trainer import SftTrainer
from tests.carried_bases import Tensors, build_with, weights

OF_BASE = 7
"""A token that ends an answer by the base's `generation_config.json` alone."""
TEMPLATES_END = 2


def left_out(own: Tensors) -> Tensors:
    """Return tensors that no class takes: a head that predicts, and one for scores."""
    return {"mtp.fc.weight": torch.randn(8, 8), "score.weight": torch.randn(1, 64)}


def check_published(name: str, folder: Path) -> None:
    """Publish a tiny model of a family as full tuning and merging do. Assert that it has all tensors of its base and
    stops where template and base do, and that weight decay pulls matrices only.
    """
    base, out = build_with(folder / "base", name, left_out), folder / "out"
    settings = base / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token_id": [TEMPLATES_END, OF_BASE]}))
    model = read_model(base, ModelConfig(name=str(base)), dtype=torch.float32)
    model.save_pretrained(out)
    tokenizer = load_tokenizer(base, None)
    tokenizer.save_pretrained(out)
    published.complete(model, tokenizer, out)
    before, after = weights(base), weights(out)
    lost = [key for key in before if key not in after or not torch.equal(before[key], after[key])]
    assert not lost, f"{name} loses {lost}"
    assert {TEMPLATES_END, OF_BASE} <= set(json.loads((out / "generation_config.json").read_text())["eos_token_id"])
    assert decayed_vectors(model) == []


def decayed_vectors(model: Any) -> list[str]:
    """Return the trained weights without a matrix that weight decay pulls to 0."""
    lora.free_text_part(model)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    decayed = SftTrainer.get_decay_parameter_names(SftTrainer.__new__(SftTrainer), model)
    return [name for name in decayed if name in trained and trained[name].ndim < 2]
