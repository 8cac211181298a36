"""Inputs of recomputed layers in host memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu


def offload_inputs(model: nn.Module, moved: Callable[[], AbstractContextManager[Any]] | None = None) -> None:
    """Let the layers of a model that recomputes keep their inputs in host memory, pinned where there is a GPU.

    What all layers share (masks, rotary angles) stays. `moved` replaces torch's way to move what is saved.
    """
    moved = moved or partial(save_on_cpu, pin_memory=torch.cuda.is_available())
    for module in model.modules():
        if checkpoint := getattr(module, "_gradient_checkpointing_func", None):
            # transformers' `offload=True` does the same, but fails on a CPU (5.23), which has no pinned memory.
            module._gradient_checkpointing_func = partial(_recomputed, moved, checkpoint)


def _recomputed(moved: Callable[[], AbstractContextManager[Any]], checkpoint: Any, layer: Any, *inputs: Any) -> Any:
    with moved():
        return checkpoint(layer, *inputs)
