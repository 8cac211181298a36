"""What is kept of every prepared row beside its tokens, read without numpy: lengths, sources, label tokens."""

from __future__ import annotations

import sys
from array import array
from pathlib import Path
from typing import Literal

from sft_play.runs.prepared import PreparedSplit

RowFile = Literal["lengths.i32", "sources.i32", "labels.i32"]
"""Tokens of each row; index of its source in `PreparedSplit.sources`; tokens that a loss is computed for. Little-endian int32."""


def row_integers(split: PreparedSplit, name: RowFile) -> array[int] | None:
    """Returns one number a row, or `None` where an earlier version prepared the split and did not keep them."""
    path = Path(split.path) / name
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) != 4 * split.rows:  # of other rows: as good as none
        return None
    values = array("i", data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
