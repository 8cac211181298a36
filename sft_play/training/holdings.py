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


def bytes_held(model: Any, optimizer: Any) -> dict[str, int]:
    """Returns the bytes of distinct storages on this rank: weights, and what the optimizer keeps (states, fp32 masters).

    Gradients are counted where they exist, by `gradients_held`.
    """
    engine = getattr(optimizer, "optimizer", optimizer)
    inner = getattr(engine, "optimizer", engine)
    weights = [local_part(parameter) for parameter in model.parameters()]
    mine = {_identity(tensor) for tensor in weights}
    kept = [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]
    kept += [parameter for group in inner.param_groups for parameter in group["params"]]
    kept += getattr(engine, "fp32_partitioned_groups_flat", [])  # ZeRO-3's masters
    others = [tensor for tensor in map(local_part, kept) if _identity(tensor) not in mine]
    return {"weights": _storage_bytes(weights), "optimizer": _storage_bytes(others)}


def local_part(tensor: Tensor) -> Tensor:
    """Returns the plain tensor with what this rank holds of `tensor`: a DTensor's shard, ZeRO-3's partition, else the tensor."""
    partition = getattr(tensor, "ds_tensor", None)
    local: Tensor = getattr(tensor, "_local_tensor", tensor) if partition is None else partition
    return local


def _identity(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _storage_bytes(tensors: list[Tensor]) -> int:
    return sum({_identity(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())
