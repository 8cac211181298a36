"""Inputs of recomputed layers that wait elsewhere: copied away and back, gradients are the same to the bit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from sft_play.trace.build import decoder_layers
from sft_play.training.offload import offload_inputs
from tests.families import FAMILIES, tiny_model

IDS = torch.arange(2, 42).reshape(2, 20)


def gradients(model: Any) -> list[Tensor | None]:
    """Return the gradients of one pass, always with the same random numbers."""
    model.zero_grad()
    torch.manual_seed(0)
    model(input_ids=IDS, use_cache=False).logits.float().square().mean().backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_layers_send_their_inputs_away_and_get_them_back(family: str) -> None:
    model = tiny_model(family).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    resident, sent = gradients(model), list[Tensor]()

    def away(tensor: Tensor) -> Tensor:
        sent.append(tensor)
        return tensor.clone()

    offload_inputs(model, lambda: saved_tensors_hooks(away, Tensor.clone))
    moved = gradients(model)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(resident, moved, strict=True))
    # Gemma's layers have small inputs of their own too.
    hidden = [tensor for tensor in sent if tensor.shape[-1] == model.config.get_text_config().hidden_size]
    assert len(hidden) == len(decoder_layers(model)) >= len(sent) / 2
