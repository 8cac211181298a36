"""What readers give: a training example, read and not yet in tokens; its values in words; and what was skipped, and why."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sft_play.config.types import kind_of
from sft_play.errors import DataError
from sft_play.files import text_sha256

Message = dict[str, Any]
"""`role` and `content`; optionally `train` (`False`: this turn is not learnt), `tool_calls`, `tool_call_id`, `name`,
`reasoning_content`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """Exactly one of `messages`, `text` and `input_ids` is given."""

    place: str
    """`file:line`, or `file, row n`."""
    form: str
    """The format that it was read as: a key of `data.formats.FORMATS`."""
    source: int
    """Index into the split's sources."""
    messages: list[Message] | None = None
    """A conversation that ends with an answer."""
    tools: list[Any] | None = None
    """Descriptions of the functions that the conversation may call, for the chat template."""
    text: str | None = None
    """A document, or a piece of plain text."""
    input_ids: list[int] | None = None
    """Already tokenised."""
    labels: list[int] | None = None
    """With `input_ids`: -100 where not trained; `None` trains all."""
    group: str | None = None
    """The value of `data.group_by`."""

    @property
    def key(self) -> str:
        """A hash of the content."""
        content = [self.messages, self.tools, self.text, self.input_ids, self.labels]
        return text_sha256(json.dumps(content, ensure_ascii=False, sort_keys=True))


# What a single value of a row is: text, a kind of thing in words, a row short enough to print.


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


# What a reader left out, and why; and what it read, where a path does not say that.


SCANNED = "pictures without text: it must be read by OCR first"
EMPTY = "no text"
"""Why a document gives nothing to learn."""
BAD = "bad row"
"""With `data.bad_rows: drop`, whatever is wrong with it."""
SHOWN_PLACES = 20
"""Of what was left out for one reason."""


class LeftOut:
    """Counts rows and files that were read and are no part of the data, by reason, with the first places of each."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.places: dict[str, list[str]] = {}
        self.there: int | None = None
        """How many rows there were, where `rows` asks for more."""
        self.commit: str | None = None
        """Of a hub dataset, the commit that was read."""

    def add(self, reason: str, place: str) -> None:
        """Counts one."""
        self.counts[reason] += 1
        places = self.places.setdefault(reason, [])
        if len(places) < SHOWN_PLACES:
            places.append(place)
