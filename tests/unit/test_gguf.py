"""The GGUF reader against files written by hand, with every value worked out in plain Python."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from sft_play.model.embedded import GgufFile, _restore

F32, F16, Q4_1, Q8_0 = 0, 1, 3, 8
UINT32, FLOAT32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf(path: Path, pairs: list[bytes], tensors: list[tuple[str, tuple[int, ...], int, bytes]]) -> Path:
    """Writes a GGUF 3 file; shapes as numpy has them (the file keeps them the other way round)."""
    described, data = b"", b""
    for name, shape, kind, content in tensors:
        dimensions = b"".join(struct.pack("<Q", size) for size in reversed(shape))
        described += text(name) + struct.pack("<I", len(shape)) + dimensions + struct.pack("<IQ", kind, len(data))
        data += content + bytes(-len(content) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs) + described
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def test_q4_1_is_scale_times_nibble_plus_minimum_low_halves_first(tmp_path: Path) -> None:
    nibbles = [(3 * i + 1) % 16 for i in range(32)]
    block = struct.pack("<ee", 0.25, -1.5) + bytes(nibbles[i] | nibbles[i + 16] << 4 for i in range(16))
    path = gguf(tmp_path / "m.gguf", [], [("w", (2, 32), Q4_1, block + struct.pack("<ee", 2.0, 3.0) + bytes(16))])
    ((name, array),) = GgufFile(path).tensors()
    assert (name, array.shape, array.dtype) == ("w", (2, 32), np.float32)
    assert array[0].tolist() == [0.25 * nibble - 1.5 for nibble in nibbles]
    assert array[1].tolist() == [3.0] * 32


def test_q8_0_is_scale_times_signed_byte(tmp_path: Path) -> None:
    values = [8 * i - 128 for i in range(32)]
    path = gguf(tmp_path / "m.gguf", [], [("w", (32,), Q8_0, struct.pack("<e32b", 0.5, *values))])
    ((_, array),) = GgufFile(path).tensors()
    assert array.tolist() == [0.5 * value for value in values]


def test_tensors_are_found_at_their_aligned_places(tmp_path: Path) -> None:
    first, second = struct.pack("<3f", 1, 2, 3), struct.pack("<4f", 4, 5, 6, 7)
    path = gguf(tmp_path / "m.gguf", [], [("a", (3,), F32, first), ("b", (2, 2), F32, second)])
    found = {name: array.tolist() for name, array in GgufFile(path).tensors()}
    assert found == {"a": [1, 2, 3], "b": [[4, 5], [6, 7]]}


def test_a_tensor_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    path = gguf(tmp_path / "m.gguf", [], [("w", (2,), F16, bytes(4))])
    with pytest.raises(ValueError, match="tensor `w` has GGUF type 1"):
        list(GgufFile(path).tensors())


@pytest.mark.parametrize("length", [0, 3, 4, 12, 30])
def test_a_file_that_breaks_off_is_refused_by_name(length: int, tmp_path: Path) -> None:
    whole = gguf(tmp_path / "whole.gguf", [text("a.number") + struct.pack("<II", UINT32, 7)], [])
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(whole.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"broken\.gguf"):
        GgufFile(broken)


@pytest.mark.parametrize(("part", "heads"), [("attn_q", 4), ("attn_k", 2)])
def test_the_order_of_rotary_rows_is_restored(part: str, heads: int) -> None:
    """llama.cpp's converter (convert_hf_to_gguf.py, `LlamaModel.permute`), written out, then undone."""
    original = np.arange(heads * 8 * 3, dtype=np.float32).reshape(heads * 8, 3)
    permuted = original.reshape(heads, 2, 4, 3).swapaxes(1, 2).reshape(original.shape)
    assert not np.array_equal(permuted, original)
    assert np.array_equal(_restore(f"blk.0.{part}.weight", permuted, 4, 2), original)
