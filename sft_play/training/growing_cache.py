"""Keys and values in tensors with room to spare, so that a new token is written beside the others and nothing is copied.

transformers' own `DynamicLayer` concatenates: every step of every answer copies all keys and values of the batch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

SPARE = 64
"""Tokens of room that are taken at a time."""


class GrowingLayer(DynamicLayer):
    """`keys` and `values` [B, H, T, D] are views of the first T tokens of larger tensors, until someone replaces them."""

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._rooms: tuple[Tensor | None, Tensor | None] = (None, None)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Adds the keys and values of new tokens; returns those of all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys, keys = _appended(self.keys, self._rooms[0], key_states)
        self.values, values = _appended(self.values, self._rooms[1], value_states)
        self._rooms = (keys, values)
        return self.keys, self.values


def growing_cache(model: Any) -> DynamicCache | None:
    """Returns an empty cache for a model that keeps keys and values of all tokens in every layer; `None` for any other."""
    if not model._supports_default_dynamic_cache():
        return None
    cache = DynamicCache(config=model.config)
    if not cache.layers or any(type(layer) is not DynamicLayer for layer in cache.layers):
        return None
    cache.layers = [GrowingLayer() for _ in cache.layers]
    return cache


def _appended(have: Tensor, room: Tensor | None, new: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `have` with `new` after it, and the tensor that it is a view of; `room` is used again where `have` lies in it."""
    start = have.shape[-2] if have.numel() else 0
    end = start + new.shape[-2]
    lies_there = room is not None and start and room.data_ptr() == have.data_ptr() and len(room) == len(have)
    if room is None or not lies_there or end > room.shape[-2]:
        room = new.new_empty((*new.shape[:-2], end + SPARE, new.shape[-1]))
        if start:
            room[..., :start, :] = have
    room[..., start:end, :] = new
    return room[..., :end, :], room
