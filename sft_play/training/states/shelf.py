"""Reads a checkpoint's pieces and whole weights, only the ranges that are asked for."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sft_play.errors import CheckpointError
from sft_play.files import read_json
from sft_play.runs.states_facts import optimizer_file
from sft_play.training.states.pieces import Piece, reads

INDEX = "index"
"""Metadata key of a state file: JSON with its pieces and with the values that are no tensors."""


class Shelf:
    """All optimizer pieces of a checkpoint, whoever wrote them."""

    def __init__(self, checkpoint: Path, files: int, *, only: Path | None = None) -> None:
        """`files`: how many ranks wrote one; `only`: one file alone instead, wherever it is.

        Raises `CheckpointError` for a file that is missing or not ours.
        """
        self.checkpoint = checkpoint
        self.weights = _Weights(checkpoint)
        self._open: dict[str, Any] = {}
        self._pieces: dict[tuple[str, str], list[Piece]] = {}
        self._states: dict[str, list[str]] = {}
        self._values: dict[str, dict[str, Any]] = {}
        for path in [only] if only else [checkpoint / optimizer_file(rank) for rank in range(files)]:
            self._index(path)

    def _index(self, path: Path) -> None:
        name = path.name
        with readable(path):
            file: Any = safe_open(path, framework="pt", device="cpu")
            self._open[name] = file
            index = json.loads((file.metadata() or {})[INDEX])
        for facts in index["pieces"]:
            piece = Piece.read(facts, name)
            self._pieces.setdefault((piece.parameter, piece.state), []).append(piece)
            states = self._states.setdefault(piece.parameter, [])
            if piece.state not in states:
                states.append(piece.state)
        for parameter, values in index["values"].items():
            self._values.setdefault(parameter, {}).update(values)

    def states(self, parameter: str) -> list[str]:
        """Returns the names of a parameter's states that are tensors, in the order in which the optimizer made them."""
        return self._states.get(parameter, [])

    def values(self, parameter: str) -> dict[str, Any]:
        """Returns a parameter's states that are no tensors."""
        return self._values.get(parameter, {})

    def pieces(self, parameter: str, state: str) -> list[Piece]:
        """Returns the pieces of one state."""
        return self._pieces.get((parameter, state), [])

    def fill(self, target: Tensor, parameter: str, state: str, start: int, end: int) -> None:
        """Writes elements `[start, end)` of a state into `target`. Raises `CheckpointError` where one is missing."""
        for read in reads(start, end, self.pieces(parameter, state), f"`{state}` of `{parameter}`"):
            with readable(self.checkpoint / read.piece.file):
                part = self._open[read.piece.file].get_slice(read.piece.key)[read.begin : read.end]
            target[read.into : read.into + read.end - read.begin].copy_(part)

    def whole(self, piece: Piece) -> Tensor:
        """Returns a piece's own tensor."""
        with readable(self.checkpoint / piece.file):
            found: Tensor = self._open[piece.file].get_tensor(piece.key)
        return found


class _Weights:
    """The weights of a checkpoint, `model.safetensors` or its shards, by the names that stand in them."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self._files: dict[str, Any] = {}
        self._open: dict[str, Any] = {}
        index = checkpoint / "model.safetensors.index.json"
        if index.is_file():
            self._files = dict(read_json(index)["weight_map"])
        elif (checkpoint / "model.safetensors").is_file():
            self._files = dict.fromkeys(self._opened("model.safetensors").keys(), "model.safetensors")

    def _opened(self, name: str) -> Any:
        if name not in self._open:
            with readable(self.checkpoint / name):
                self._open[name] = safe_open(self.checkpoint / name, framework="pt", device="cpu")
        return self._open[name]

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def fill(self, target: Tensor, name: str, shape: tuple[int, ...], start: int, end: int) -> None:
        """Writes elements `[start, end)` of a weight into `target`. Raises `CheckpointError` for another shape."""
        file = self._opened(self._files[name])
        with readable(self.checkpoint / self._files[name]):
            part = file.get_slice(name)
            if tuple(part.get_shape()) != shape:
                raise CheckpointError(f"`{name}` has the shape {part.get_shape()}, and the model has {list(shape)}")
            if not shape:
                target.copy_(file.get_tensor(name).reshape(1))
                return
            width = max(math.prod(shape[1:]), 1)
            first = start // width
            rows = part[first : -(-end // width)].reshape(-1)
        target.copy_(rows[start - first * width : end - first * width])


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns a file that cannot be read into a `CheckpointError` with its place."""
    try:
        yield
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"it cannot be read: {error}", place=str(path), hint="take an earlier checkpoint") from error


def dtype_of(piece: Piece) -> torch.dtype:
    """Returns the type of a piece's numbers."""
    found = getattr(torch, piece.dtype, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"the type `{piece.dtype}` of `{piece.state}` is unknown", place=piece.file)
    return found
