"""Pieces of optimizer states in files: which range of which parameter stands where, written and read range by range."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sft_play.errors import CheckpointError
from sft_play.files import read_json
from sft_play.runs.manifest import optimizer_file

Kind = Literal["slice", "columns", "whole", "rank"]
"""`slice`: elements of the parameter's range; `columns`: a range of its columns, all rows; `whole`: the same on every rank; `rank`: of
this rank's layout only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Where one tensor of a state file belongs."""

    key: str
    """The tensor's name in its file."""
    parameter: str
    state: str
    """`exp_avg`, `step`, ...; `master` and `weight` are the parameter's own values."""
    kind: Kind
    start: int
    end: int
    shape: tuple[int, ...]
    """Of the whole parameter."""
    dtype: str
    file: str = ""
    """Name of the file that holds it."""

    def facts(self) -> dict[str, Any]:
        """Returns what the index of a file keeps."""
        return {name: value for name, value in asdict(self).items() if name != "file"}

    @staticmethod
    def read(facts: Mapping[str, Any], file: str) -> Piece:
        """The opposite of `facts`. Raises `CheckpointError` for what is no piece."""
        try:
            return Piece(**{**facts, "shape": tuple(facts["shape"]), "file": file})
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"the index of `{file}` is not one of ours: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """Elements `[begin, end)` of a piece's own tensor, and where they go, counted from the start of what is wanted."""

    piece: Piece
    begin: int
    end: int
    into: int


def reads(start: int, end: int, pieces: Iterable[Piece], what: str) -> list[Read]:
    """Returns how to fill the elements `[start, end)` from `pieces`, which may overlap.

    Raises `CheckpointError` where an element stands in no piece; `what` names the state for the message.
    """
    found: list[Read] = []
    position = start
    for piece in sorted(pieces, key=lambda one: (one.start, -one.end)):
        if piece.end <= position or piece.start >= end:
            continue
        if piece.start > position:
            break
        until = min(end, piece.end)
        found.append(Read(piece=piece, begin=position - piece.start, end=until - piece.start, into=position - start))
        position = until
    if position < end:
        raise CheckpointError(
            f"the checkpoint lacks elements {position} to {end} of {what}",
            hint="its files do not belong together; take an earlier one",
        )
    return found


def flat_shares(sizes: Iterable[int], offsets: Iterable[int], start: int, end: int) -> list[tuple[int, int, int, int]]:
    """Returns the parts of parameters inside elements `[start, end)` of a buffer in which they lie one after the other.

    `sizes` and `offsets` count elements. Each part is (index of the parameter, first element, end, offset in the range); what is
    only padding belongs to none.
    """
    parts = []
    for index, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        first, last = max(offset, start), min(offset + size, end)
        if first < last:
            parts.append((index, first - offset, last - offset, first - start))
    return parts


def partition(numel: int, rank: int, world: int) -> tuple[int, int, int]:
    """Returns (first element, end, size with padding) of a rank's share where each gets an equal part, rounded up (ZeRO-3)."""
    size = -(-numel // world)
    return min(rank * size, numel), min((rank + 1) * size, numel), size


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
        pieces, what = self.pieces(parameter, state), f"`{state}` of `{parameter}`"
        if pieces and pieces[0].kind == "columns":
            self._fill_rows(target, pieces, start, end, what)
            return
        for read in reads(start, end, pieces, what):
            with readable(self.checkpoint / read.piece.file):
                part = self._open[read.piece.file].get_slice(read.piece.key)[read.begin : read.end]
            target[read.into : read.into + read.end - read.begin].copy_(part)

    def _fill_rows(self, target: Tensor, pieces: list[Piece], start: int, end: int, what: str) -> None:
        """Puts columns side by side, for the rows that the range touches."""
        width = math.prod(pieces[0].shape[1:])
        first, last = start // width, -(-end // width)
        block = torch.empty(last - first, width, dtype=target.dtype)
        for read in reads(0, width, pieces, f"the columns of {what}"):
            with readable(self.checkpoint / read.piece.file):
                part = self._open[read.piece.file].get_slice(read.piece.key)[first:last]
            block[:, read.into : read.into + read.end - read.begin].copy_(part[:, read.begin : read.end])
        target.copy_(block.view(-1)[start - first * width : end - first * width])

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


NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes CPU tensors as safetensors, one by one: no copy of all in memory. Raises `OSError`; the file may then be incomplete.

    The library's own `save_file` builds the file in memory first and reports a full disk as another error. The format: 8 bytes with the
    header's length, the header as JSON (name -> type, shape, offsets), the tensors' bytes without gaps
    (https://github.com/huggingface/safetensors#format).
    """
    # Widest types first, so that every tensor starts at a multiple of its item size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for name, tensor in ordered:
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(header, ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for _, tensor in ordered:
            if tensor.numel():
                stream.write(memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()))
