"""Thoughts of a reasoning model in its turns, and which of them a chat template leaves out of what is learnt."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sft_play.data.example import Message
from sft_play.data.template import RowText, learnt

OPEN, CLOSE = "<think>", "</think>"
_EMPTY = re.compile(rf"\s*{OPEN}\s*{CLOSE}")


def thought_of(message: Message) -> str:
    """Returns what an assistant turn thinks, in `reasoning_content` or before `</think>`; nothing where it does not."""
    given = message.get("reasoning_content")
    if given:
        return given.strip()
    before, closed, _ = message["content"].partition(CLOSE)
    return before.rpartition(OPEN)[2].strip() if closed else ""


def lost_thoughts(messages: Sequence[Message], rows: Sequence[RowText], loss_on: str) -> int:
    """Returns how many thoughts of turns that are learnt stand in no learnt part of the conversation's rows.

    Qwen3 leaves thoughts out of earlier turns: such turns have a row of their own, with the thought, so none is lost; only with
    `train.loss_on: all`, which is one row, they are. A template that knows no thoughts (ChatML) loses all in `reasoning_content`.
    """
    if not any("reasoning_content" in message or CLOSE in message["content"] for message in messages):
        return 0
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("train") is not False]
    chosen = turns if loss_on == "all" else learnt(messages, loss_on)
    thoughts = [thought for index in chosen if (thought := thought_of(messages[index]))]
    text = "\0".join(_learnt_text(row) for row in rows)
    return sum(thought not in text for thought in thoughts)


def empty_thoughts(rows: Sequence[RowText]) -> int:
    """Returns how many answers that are learnt begin with a thought without words, as Qwen3's template writes it."""
    return sum(bool(_EMPTY.match(row.answer)) + sum(bool(_EMPTY.match(row.prompt, s.start)) for s in row.earlier) for row in rows)


def _learnt_text(row: RowText) -> str:
    if row.everything:
        return row.prompt + row.answer
    return "\0".join([*(row.prompt[span.start : span.end] for span in row.earlier), row.answer])
