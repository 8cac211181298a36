"""Write and read optimizer states in pieces, each a range of a parameter."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sft_play.errors import CheckpointError
from sft_play.model.published import tensor_files
from sft_play.runs.manifest import optimizer_file

Kind = Literal["slice", "columns", "whole", "rank"]
"""`slice`: a range of the parameter's elements; `columns`: a range of its columns, all rows; `whole`: the same on every
rank; `rank`: specific to this rank's layout.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The elements `[start, end)` of a parameter (or columns of all its rows), at `offset` of their bundle."""

    name: str
    shape: tuple[int, ...]
    start: int
    end: int
    offset: int = 0
    columns: bool = False

    @property
    def elements(self) -> int:
        """Number of elements."""
        return (self.end - self.start) * (self.shape[0] if self.columns else 1)

    @classmethod
    def complete(cls, name: str, shape: tuple[int, ...]) -> Share:
        """Return the share of a rank that holds all of a parameter."""
        return cls(name=name, shape=shape, start=0, end=math.prod(shape))


@dataclass(frozen=True, kw_only=True, slots=True)
class StatePiece:
    """The place of a state file's tensor in a parameter's state."""

    key: str
    """The tensor's name in its file."""
    parameter: str
    state: str
    """`exp_avg`, `step`, ...; `master` and `weight` are the parameter's own values."""
    kind: Kind
    start: int
    end: int
    shape: tuple[int, ...]
    """Shape of the complete parameter."""
    dtype: str
    file: str = ""
    """Name of the file that holds it."""

    def facts(self) -> dict[str, Any]:
        """Return the entry for the index of a file."""
        return {name: value for name, value in asdict(self).items() if name != "file"}


def reads(start: int, end: int, pieces: Iterable[StatePiece], what: str) -> Iterator[tuple[StatePiece, int, int, int]]:
    """Yield how to fill the elements `[start, end)` from `pieces`, which may overlap.

    Each part is (piece, start and end in its own elements, target offset from `start`). Raise `CheckpointError` if an
    element is in no piece; `what` names the state in the message.
    """
    position = start
    for piece in sorted(pieces, key=lambda part: (part.start, -part.end)):
        if piece.end <= position or piece.start >= end:
            continue
        if piece.start > position:
            break
        until = min(end, piece.end)
        yield piece, position - piece.start, until - piece.start, position - start
        position = until
    if position < end:
        raise CheckpointError(
            f"the checkpoint lacks elements {position} to {end} of {what}",
            hint="its files do not belong together; use an earlier checkpoint",
        )


NAMES = {dtype: name for name, dtype in safetensors.torch._TYPES.items()}
INDEX = "index"
"""Metadata key of a state file: JSON with its pieces, and with the values that are not tensors."""


class StateFiles:
    """A checkpoint's files: pieces of states, from any rank, and complete weights."""

    def __init__(self, checkpoint: Path, ranks: Iterable[int], *, mean: bool = False) -> None:
        """Read the indices of the state files of `ranks`; with `mean` states are averaged over them."""
        self.checkpoint, self.mean = checkpoint, mean
        self._open: dict[str, Any] = {}
        self._pieces: dict[str, dict[str, list[StatePiece]]] = {}
        self._values: dict[str, dict[str, Any]] = {}
        for name in map(optimizer_file, ranks):
            with readable(checkpoint / name, MALFORMED):
                self._read_index(name)

    def _read_index(self, name: str) -> None:
        index = json.loads(self._file(name).metadata()[INDEX])
        for facts in index["pieces"]:
            piece = StatePiece(**{**facts, "shape": tuple(facts["shape"]), "file": name})
            self._pieces.setdefault(piece.parameter, {}).setdefault(piece.state, []).append(piece)
        for parameter, values in index["values"].items():
            self._values[parameter] = values | self._values.get(parameter, {})

    def states(self, parameter: str) -> list[str]:
        """Return the names of a parameter's tensor states, in the order in which the optimizer created them."""
        return list(self._pieces.get(parameter, ()))

    def values(self, parameter: str) -> dict[str, Any]:
        """Return a parameter's states that are not tensors."""
        return self._values.get(parameter, {})

    def pieces(self, parameter: str, state: str) -> list[StatePiece]:
        """Return the pieces of one state."""
        return self._pieces.get(parameter, {}).get(state, [])

    @functools.cached_property
    def _weights(self) -> dict[str, str]:
        """Name of a weight -> the file of the model that holds it."""
        return {name: path.name for name, path in tensor_files(self.checkpoint).items()}

    def weight(self, name: str) -> list[StatePiece]:
        """Return a weight of the model's files as a single piece, or nothing if there is no such weight."""
        file = self._weights.get(name)
        if file is None:
            return []
        shape = self._shape(file, name)
        whole = math.prod(shape)
        return [
            StatePiece(
                key=name,
                parameter=name,
                state="weight",
                kind="slice",
                start=0,
                end=whole,
                shape=shape,
                dtype="",
                file=file,
            )
        ]

    def fill(self, target: Tensor, parameter: str, state: str, start: int, end: int) -> None:
        """Write elements `[start, end)` of a state into `target`. Raise `CheckpointError` if one is missing."""
        pieces, what = self.pieces(parameter, state), f"`{state}` of `{parameter}`"
        if not (self.mean and target.is_floating_point()):
            self.fill_from(pieces, target, start, end, what)
            return
        total, part = torch.zeros(target.shape, dtype=torch.float64), torch.empty(target.shape, dtype=target.dtype)
        files = {piece.file for piece in pieces}
        for file in sorted(files):
            self.fill_from([piece for piece in pieces if piece.file == file], part, start, end, what)
            total += part
        target.copy_(total / len(files))

    def fill_from(self, pieces: list[StatePiece], target: Tensor, start: int, end: int, what: str) -> None:
        """Do as `fill` does, from the `pieces` of a state; `what` names it in errors."""
        if not pieces or pieces[0].kind != "columns":
            for piece, first, last, into in reads(start, end, pieces, what):
                target[into : into + last - first].copy_(self._elements(piece, first, last))
            return
        width = math.prod(pieces[0].shape[1:])
        top, bottom = start // width, -(-end // width)
        block = torch.empty(bottom - top, width, dtype=target.dtype)
        for piece, first, last, into in reads(0, width, pieces, f"the columns of {what}"):
            rows = self._rows(piece, top, bottom)
            block[:, into : into + last - first].copy_(rows[:, first:last])
        target.copy_(block.view(-1)[start - top * width : end - top * width])

    def _shape(self, file: str, key: str) -> tuple[int, ...]:
        return tuple(self._file(file).get_slice(key).get_shape())

    def _elements(self, piece: StatePiece, start: int, end: int) -> Tensor:
        """Return elements of a piece's own tensor, reading only the rows that contain them."""
        shape = self._shape(piece.file, piece.key)
        if not shape:
            return self.whole(piece).reshape(1)
        width = max(math.prod(shape[1:]), 1)
        first = start // width
        return self._rows(piece, first, -(-end // width)).reshape(-1)[start - first * width : end - first * width]

    def _rows(self, piece: StatePiece, start: int, end: int) -> Tensor:
        rows: Tensor = self._file(piece.file).get_slice(piece.key)[start:end]
        return rows

    def whole(self, piece: StatePiece) -> Tensor:
        """Return a piece's own tensor."""
        tensor: Tensor = self._file(piece.file).get_tensor(piece.key)
        return tensor

    def _file(self, name: str) -> Any:
        if name not in self._open:
            with readable(self.checkpoint / name):
                self._open[name] = safe_open(self.checkpoint / name, framework="pt", device="cpu")
        return self._open[name]


UNREADABLE = (OSError, SafetensorError)
MALFORMED = (*UNREADABLE, KeyError, TypeError, ValueError)
"""Errors of a file that cannot be read, and of one without the content that ours have."""


@contextlib.contextmanager
def readable(path: Path, errors: tuple[type[Exception], ...] = UNREADABLE) -> Iterator[None]:
    """Raise `CheckpointError` with the path for these errors in the body."""
    try:
        yield
    except errors as error:
        raise CheckpointError(
            f"it cannot be read: {error}", place=str(path), hint="use an earlier checkpoint"
        ) from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write CPU tensors as safetensors, one by one, without a copy of the file in memory.

    Raise `OSError`, which may leave an incomplete file. The library's own `save_file` builds the file in memory and
    reports a full disk as another error. The format: 8 bytes with the header's length, the header as JSON (name ->
    type, shape, offsets), the tensors' bytes without gaps (https://github.com/huggingface/safetensors#format).
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
