"""What ranks tell each other outside the gradients: JSON in tensors of bytes, never pickles, which would run a peer's code."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, distributed

MOST_BYTES = 256 * 2**20
"""Bytes that one rank may send at once: a peer's number must not decide how much memory is taken."""


def gather(value: Any) -> list[Any]:
    """Returns each rank's `value`, which JSON can hold, in the order of the ranks. Collective; tuples arrive as lists."""
    if not _several():
        return [value]
    data = _bytes_of(value)
    sizes = [torch.zeros(1, dtype=torch.int64, device=data.device) for _ in range(distributed.get_world_size())]
    distributed.all_gather(sizes, _size_of(data))
    longest = _checked(max(int(size) for size in sizes))
    parts = [torch.empty(longest, dtype=torch.uint8, device=data.device) for _ in sizes]
    distributed.all_gather(parts, torch.nn.functional.pad(data, (0, longest - data.numel())))
    return [_value_of(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]


def from_rank_0(value: Any) -> Any:
    """Returns rank 0's `value`, which JSON can hold, on every rank. Collective; tuples arrive as lists."""
    if not _several():
        return value
    data = _bytes_of(value if distributed.get_rank() == 0 else None)
    size = _size_of(data)
    distributed.broadcast(size, src=0)
    if distributed.get_rank() != 0:
        data = torch.empty(_checked(int(size)), dtype=torch.uint8, device=data.device)
    distributed.broadcast(data, src=0)
    return _value_of(data)


def _several() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _bytes_of(value: Any) -> Tensor:
    device = torch.device("cuda" if distributed.get_backend() == "nccl" else "cpu")
    data = bytearray(json.dumps(value).encode())
    _checked(len(data))
    return torch.frombuffer(data, dtype=torch.uint8).to(device)


def _size_of(data: Tensor) -> Tensor:
    return torch.full((1,), data.numel(), dtype=torch.int64, device=data.device)


def _value_of(data: Tensor) -> Any:
    return json.loads(data.cpu().numpy().tobytes())


def _checked(size: int) -> int:
    if not 0 <= size <= MOST_BYTES:
        raise ValueError(f"a rank would send {size:,} bytes; at most {MOST_BYTES:,} are taken")
    return size
