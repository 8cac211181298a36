"""Which side of a split a row falls on, which rows are copies, and what training and validation share. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator

from sft_play.files import text_sha256

KEY_BYTES = 16
"""Of a row's content hash, what is kept to find copies: a chance meeting among 10 million rows has a probability of 1e-25."""
POSITION_DIGITS = 12
"""Hexadecimal digits of a hash that tell a row's place between 0 and 1."""


def position(value: str) -> float:
    """Returns where `value` lies in [0, 1): always the same for the same text, and evenly spread over texts."""
    return int(text_sha256(value)[:POSITION_DIGITS], 16) / 16**POSITION_DIGITS


def is_held_out(key: str, group: str | None, fraction: float) -> bool:
    """Whether a row belongs to validation: decided by its group where it has one, else by its content, and by nothing else.

    So a row keeps its side when rows are added, removed or moved, and a larger `fraction` only adds rows to validation. `key` is
    `Example.key`; `group` is the value of `data.group_by`; `fraction` is in [0, 1).
    """
    return position(f"row {key}" if group is None else f"group {group}") < fraction


class Seen:
    """The contents met so far in one split: about 100 bytes of memory a row."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def is_copy(self, key: bytes) -> bool:
        """Whether `key` was met before; from now on it was."""
        before = len(self._keys)
        self._keys.add(key)
        return len(self._keys) == before

    def __contains__(self, key: object) -> bool:
        return key in self._keys


def keys_in(content: bytes) -> Iterator[bytes]:
    """Yields the keys that stand one after another in a prepared split's `keys.bin`."""
    for start in range(0, len(content), KEY_BYTES):
        yield content[start : start + KEY_BYTES]


def overlap(train: bytes, validation: bytes) -> int:
    """Returns how many rows of validation have a content that training has too. Both are contents of `keys.bin`."""
    known = set(keys_in(train))
    return sum(key in known for key in keys_in(validation))
