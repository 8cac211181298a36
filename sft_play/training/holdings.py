"""What a rank really holds and did, counted from its own tensors: the proof that sharding happened."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def local_elements(tensor: Tensor) -> int:
    """Returns the elements that this rank holds of a tensor (the shard of a DTensor, the partition of ZeRO-3)."""
    partition = getattr(tensor, "ds_tensor", None)
    if partition is not None:  # a ZeRO-3 parameter: the tensor itself is empty between uses
        return int(partition.numel())
    local = getattr(tensor, "_local_tensor", None)
    return int((tensor if local is None else local).numel())


def parameters_held(model: Any) -> dict[str, int]:
    """Returns elements of trainable and frozen parameters on this rank."""
    held = {"trainable": 0, "frozen": 0}
    for parameter in model.parameters():
        held["trainable" if parameter.requires_grad else "frozen"] += local_elements(parameter)
    return held


def optimizer_held(optimizer: Any) -> int:
    """Returns elements of the optimizer's moments on this rank (two for each trained weight under Adam)."""
    inner = getattr(optimizer, "optimizer", optimizer)
    inner = getattr(inner, "optimizer", inner)  # accelerate's wrapper, then DeepSpeed's
    total = 0
    for state in inner.state.values():
        total += sum(local_elements(v) for v in state.values() if torch.is_tensor(v) and v.dim() > 0)
    return total


def gradients_held(model: Any, optimizer: Any) -> int:
    """Returns elements of gradients on this rank just before the update."""
    averaged = getattr(optimizer, "averaged_gradients", None)
    if averaged:  # ZeRO keeps this rank's share of the reduced gradients here
        return sum(int(g.numel()) for group in averaged.values() if group for g in group if g is not None)
    return sum(local_elements(p.grad) for p in model.parameters() if p.grad is not None)
