"""What a single value of a row is: text, a kind of thing in words, a row short enough to print."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sft_play.config.words import kind_of
from sft_play.errors import DataError

SHOWN_CHARACTERS = 60
"""Of a single value in a message."""
SHOWN_COLUMNS = 8


def text_of(value: Any, name: str) -> str:
    """Returns `value`, which is text that a tokenizer can read. Raises `DataError`."""
    if not isinstance(value, str):
        raise DataError(f"`{name}` is {kind_of(value)}; expected text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:  # JSON can write half of a surrogate pair; no tokenizer can read it
            raise DataError(f"`{name}` holds half of a surrogate pair at character {error.start + 1}, which is no text") from None
    return value


def answer_of(value: Any, name: str) -> str:
    """Returns `value`, which is text with something in it. Raises `DataError`."""
    text = text_of(value, name)
    if not text or text.isspace():
        raise DataError(f"`{name}` is empty, so there is nothing to learn")
    return text


def system_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the system turn of a row's `system` column, or nothing. Raises `DataError`."""
    found = row.get("system")
    if not found:
        return []
    text = text_of(found, "system")
    return [] if text.isspace() else [{"role": "system", "content": text}]


def shown(row: Mapping[str, Any]) -> str:
    """Returns a row as JSON with long values cut, for messages."""
    parts = [f'"{name}": {_short(value)}' for name, value in list(row.items())[:SHOWN_COLUMNS]]
    return "{" + ", ".join(parts) + (", ..." if len(row) > SHOWN_COLUMNS else "") + "}"


def _short(value: object) -> str:
    if isinstance(value, str):
        cut = value if len(value) <= SHOWN_CHARACTERS else value[: SHOWN_CHARACTERS - 3] + "..."
        return json.dumps(cut, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
    if isinstance(value, (list, tuple)):
        return f"[{_short(value[0])}{', ...' if len(value) > 1 else ''}]" if value else "[]"
    text = json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."
