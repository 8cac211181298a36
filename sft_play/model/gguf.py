"""Reads a GGUF file: its metadata, and its tensors as float32. Only the three tensor types that the embedded model uses.

transformers' own GGUF path takes half a minute and changes the tokenizer; this takes seconds. Layout: the GGUF specification,
version 3 (ggml, docs/gguf.md): header, key-value pairs, tensor descriptions, aligned data.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
F32, Q4_1, Q8_0 = 0, 3, 8
BLOCK = 32
"""Weights that share a scale."""
BLOCK_BYTES = {Q4_1: 20, Q8_0: 34}


class GgufFile:
    """An open GGUF file; `metadata` holds the key-value pairs, `tensors()` yields the weights."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise ValueError(f"{path} is not a GGUF file")
            self._data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 4
        try:
            self._read_header(path)
        except struct.error as error:
            raise ValueError(f"{path} is cut short: {error}") from None

    def _read_header(self, path: Path) -> None:
        version, count, pairs = self._scalar("<I"), self._scalar("<Q"), self._scalar("<Q")
        if version != 3:
            raise ValueError(f"{path} has GGUF version {version}; only 3 is read")
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            name = self._string()
            self.metadata[name] = self._value(self._scalar("<I"))
        self._described = [self._describe() for _ in range(count)]
        alignment = int(self.metadata.get("general.alignment", 32))
        self._start = -(-self._at // alignment) * alignment

    def _scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return value

    def _string(self) -> str:
        length = self._scalar("<Q")
        text = self._data[self._at : self._at + length].decode("utf-8")
        self._at += length
        return text

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            inner, length = self._scalar("<I"), self._scalar("<Q")
            return [self._value(inner) for _ in range(length)]
        return self._scalar(SCALARS[kind])

    def _describe(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        shape = tuple(self._scalar("<Q") for _ in range(self._scalar("<I")))
        return name, shape[::-1], self._scalar("<I"), self._scalar("<Q")

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """Yields (name, float32 array). Raises `ValueError` for a tensor type that is not read here."""
        for name, shape, kind, offset in self._described:
            size = int(np.prod(shape))
            if kind == F32:
                flat: Array = np.frombuffer(self._data, "<f4", size, self._start + offset).copy()
            elif kind in BLOCK_BYTES:
                blocks = size // BLOCK
                raw = np.frombuffer(self._data, np.uint8, blocks * BLOCK_BYTES[kind], self._start + offset)
                flat = (_q4_1 if kind == Q4_1 else _q8_0)(raw.reshape(blocks, BLOCK_BYTES[kind]))
            else:
                raise ValueError(f"tensor `{name}` has GGUF type {kind}, which is not read")
            yield name, flat.reshape(shape)


def _q4_1(blocks: NDArray[np.uint8]) -> Array:
    """Scale and minimum as float16, then 32 values of 4 bits: low halves first, high halves after."""
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    minimum = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    packed = blocks[:, 4:]
    values = np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)
    return np.asarray(values * scale + minimum, dtype=np.float32).reshape(-1)


def _q8_0(blocks: NDArray[np.uint8]) -> Array:
    """Scale as float16, then 32 signed bytes."""
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return np.asarray(blocks[:, 2:].view(np.int8).astype(np.float32) * scale, dtype=np.float32).reshape(-1)
