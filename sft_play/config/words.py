"""A value of a row in words, for messages."""

from __future__ import annotations

from collections.abc import Iterable

KINDS = {
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping",
    "int": "a number",
    "float": "a number",
    "NoneType": "empty",
    "bool": "true or false",
    "str": "text",
}


def kind_of(value: object) -> str:
    """Returns what a value is, in words."""
    name = type(value).__name__
    return KINDS.get(name, name)


def names_of(row: Iterable[str]) -> str:
    """Returns the names of a row's columns, in backticks."""
    return ", ".join(f"`{name}`" for name in row) or "none"
