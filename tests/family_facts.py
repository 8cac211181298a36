"""What publishing a tiny model keeps of a family in addition to its weights: a row of the second table in
`docs/models.md`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sft_play.config.schema import ModelConfig
from sft_play.model import lora, published
from sft_play.model.load import read_model
from sft_play.model.tokenizer import load_tokenizer
from sft_play.plan.architecture import has_moving_rope
from sft_play.training.trainer import SftTrainer
from tests.carried_bases import Tensors, build_with, weights

ROUTER_LOSS = ("router_aux_loss_coef", "aux_loss_alpha", "router_z_loss_coef")
"""Keys of `config.json` by which families weigh a loss of their routers."""
OF_BASE = 7
"""A token that ends an answer by the base's `generation_config.json` alone."""
TEMPLATES_END = 2


class Facts(NamedTuple):
    """The cells of a row."""

    carried: str
    stops: str
    router_loss: str
    rope: str
    decayed: str


def left_out(own: Tensors) -> Tensors:
    """Return tensors that no class takes: a head that predicts, and one for scores."""
    return {"mtp.fc.weight": torch.randn(8, 8), "score.weight": torch.randn(1, 64)}


def facts_of(name: str, folder: Path) -> Facts:
    """Publish a tiny model of a family as full tuning and merging do, check it against its base, and return the
    findings.
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
    ignored = {_in_words(pattern) for pattern in model._keys_to_ignore_on_load_unexpected}
    stops = json.loads((out / "generation_config.json").read_text())["eos_token_id"]
    text = model.config.get_text_config()
    return Facts(
        carried=", ".join(sorted(ignored - {""})) or "-",
        stops="template's and base's" if {TEMPLATES_END, OF_BASE} <= set(stops) else "template's",
        router_loss=", ".join(f"`{key}`" for key in ROUTER_LOSS if hasattr(text, key)) or "-",
        rope=_rope(model, text),
        decayed=_decayed(model),
    )


def _in_words(pattern: str) -> str:
    """Return a description of the tensors that a family ignores, by its class's pattern."""
    for part in ("mtp", "visual"):
        if part in pattern:
            return f"`{part}`"
    return "a layer after the last" if re.search(r"layers\\\.\d", pattern) else ""


def _rope(model: Any, text: Any) -> str:
    """Return whether positions are rotary angles, of one kind or by the kind of layer."""
    parameters = getattr(text, "rope_parameters", None)
    if not parameters or not any("inv_freq" in name for name, _ in model.named_buffers()):
        return "-"
    by_layer = all(isinstance(value, dict) or value is None for value in parameters.values())
    return ("by kind of layer" if by_layer else "one kind") + (", moving" if has_moving_rope(text.to_dict()) else "")


def _decayed(model: Any) -> str:
    """Return the trained weights without a matrix that weight decay pulls to 0."""
    lora.free_text_part(model)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    names = [
        name
        for name in SftTrainer.get_decay_parameter_names(SftTrainer.__new__(SftTrainer), model)
        if name in trained and trained[name].ndim < 2
    ]
    ends = dict.fromkeys(".".join(name.removesuffix(".weight").split(".")[-1:]) for name in sorted(names))
    return ", ".join(f"`{end}`" for end in ends) or "-"
