"""One training example, read and understood, not yet in tokens: what readers give and encoders take."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

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
