"""Bases whose files hold more than their class takes: heads that predict further tokens, biases, layers, scales."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.families import build_family

Tensors = dict[str, torch.Tensor]


def weights(folder: Path) -> Tensors:
    """Return all tensors of a folder's safetensors files."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def change_config(folder: Path, **values: Any) -> None:
    """Change keys of `config.json`; `None` removes one."""
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )


def build_with(folder: Path, family: str, add: Callable[[Tensors], Tensors], **config: Any) -> Path:
    """Write a tiny model of a family, add the tensors that `add` makes from them, and return `folder`."""
    build_family(folder, family, **config)
    own = weights(folder)
    torch.manual_seed(5)
    save_file(own | add(own), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def predicting_layer(own: Tensors, layer: int = 2) -> Tensors:
    """Return a layer number `layer` that predicts the token after the next, as in DeepSeek V3 and GLM 4.5."""
    tensors = {
        name.replace(f"layers.{layer - 1}.", f"layers.{layer}."): torch.randn_like(tensor) * 0.1
        for name, tensor in own.items()
        if f"layers.{layer - 1}." in name
    }
    here = f"model.layers.{layer}"
    norms = {f"{here}.{name}.weight": 1 + torch.randn(64) * 0.1 for name in ("enorm", "hnorm", "shared_head.norm")}
    shared = {
        f"{here}.embed_tokens.weight": own["model.embed_tokens.weight"].clone(),
        f"{here}.shared_head.head.weight": own["lm_head.weight"].clone(),
    }
    return tensors | norms | shared | {f"{here}.eh_proj.weight": torch.randn(64, 128) * 0.1}


def predicting_head(own: Tensors) -> Tensors:
    """Return a prediction head as in Qwen 3.5."""
    return {
        "mtp.fc.weight": torch.randn(64, 128),
        "mtp.norm.weight": torch.randn(64),
        "mtp.pre_fc_norm_embedding.weight": torch.randn(64),
        "mtp.pre_fc_norm_hidden.weight": torch.randn(64),
        "mtp.layers.0.self_attn.q_proj.weight": torch.randn(64, 64),
    }


def predicting_part(own: Tensors) -> Tensors:
    """Return a prediction layer and its input projection, as in Mellum."""
    layer = {
        name.replace("model.layers.1.", "mtp.layers.0."): torch.randn_like(tensor) * 0.1
        for name, tensor in own.items()
        if "model.layers.1." in name
    }
    norms = {
        f"mtp.{name}.weight": 1 + torch.randn(64) * 0.1
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    }
    return layer | norms | {"mtp.fc.weight": torch.randn(64, 128) * 0.1}


def layer_again(own: Tensors) -> Tensors:
    """Return a copy of the model's kind of layer as an additional one."""
    return {
        re.sub(r"\b(layers|h)\.1\.", r"\1.2.", name): t.clone()
        for name, t in own.items()
        if re.search(r"\b(layers|h)\.1\.", name)
    }


def extra(name: str, *shape: int) -> Callable[[Tensors], Tensors]:
    """Return a function that adds a tensor of this shape, or one per layer if the name has a `*`."""
    names = [name.replace("*", str(layer)) for layer in range(2)] if "*" in name else [name]
    return lambda _: {full_name: torch.randn(*shape) for full_name in names}
