"""From examples to token rows: conversations by the chat template, texts as documents, tokens as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sft_play.config.schema import Config
from sft_play.config.task_rules import refused_format
from sft_play.data.example import Example, Message
from sft_play.data.template import IGNORED, Encoded, Renderer
from sft_play.data.text import TOO_LONG, encode_texts
from sft_play.errors import DataError
from sft_play.model.tokenizer import end_of_turn_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one example."""

    rows: list[Encoded]
    """None where the example was left out or is wrong; several where it was split."""
    dropped: str | None = None
    """Why it was left out."""
    cut: bool = False
    """Whether tokens were left out (`overlong: truncate`)."""
    error: DataError | None = None
    """What is wrong, with its place."""
    overlong: int = 0
    """Tokens of an example that is longer than `model.max_seq_len`; 0 where it is not."""


class Encoder:
    """Encodes examples as a configuration asks: system, style, what is learnt, and what happens to rows that are too long."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.limit, self.policy = config.model.max_seq_len, config.data.overlong
        self.tokenizer = tokenizer
        self.renderer = Renderer(tokenizer, end_of_turn_ids(tokenizer))
        self.vocabulary = len(tokenizer)
        self.task = config.tuning.task

    def encode(self, examples: Sequence[Example]) -> list[Outcome]:
        """Returns one outcome per example, in order. Raises nothing for a bad example: its outcome tells."""
        return [self._one(example) for example in examples]

    def _one(self, example: Example) -> Outcome:
        if refused := refused_format(self.task, example.form):
            return Outcome(
                rows=[], error=DataError(f"the row is `{example.form}`, but {refused[0]}", place=example.place, hint=refused[1])
            )
        try:
            if example.text is not None:
                found = encode_texts([example.text], self.tokenizer, limit=self.limit, overlong=self.policy)[0]
                return Outcome(rows=found.rows, dropped=found.dropped, cut=found.cut)
            row = self._tokens(example) if example.input_ids is not None else self.renderer.encode(example.messages or [])
        except DataError as error:
            error.place = error.place or example.place
            return Outcome(rows=[], error=error)
        row = without_tail(row)
        length = len(row.input_ids)
        if length <= self.limit:
            return Outcome(rows=[row])
        if self.policy == "error":
            refusal = DataError(f"the row has {length} tokens; `model.max_seq_len` is {self.limit}", place=example.place)
            return Outcome(rows=[], error=refusal, overlong=length)
        if self.policy == "truncate" and (cut := self._truncated(example.messages or [], row)) is not None:
            return Outcome(rows=[cut], cut=True, overlong=length)
        return Outcome(rows=[], dropped=TOO_LONG, overlong=length)

    def _truncated(self, messages: Sequence[Message], encoded: Encoded) -> Encoded | None:
        """Cuts a row at the limit; `None` where nothing of an answer would be left.

        Turns after the last answer that begins before the limit go first, so that prompt and reference belong to an answer that is
        trained.
        """
        while len(encoded.prompt_ids) >= self.limit:
            messages = messages[:-1]
            while messages and messages[-1]["role"] != "assistant":
                messages = messages[:-1]
            if not messages:
                return None
            encoded = without_tail(self.renderer.encode(messages))
        labels = encoded.labels[: self.limit]
        if all(label == IGNORED for label in labels[1:]):  # the first token follows nothing, so it is never a target
            return None
        return Encoded(encoded.input_ids[: self.limit], labels, encoded.prompt_ids, encoded.reference)

    def _tokens(self, example: Example) -> Encoded:
        ids = example.input_ids or []
        largest = max(ids, default=0)
        if largest >= self.vocabulary:
            raise DataError(f"`input_ids` holds {largest}, but the tokenizer has {self.vocabulary} tokens")
        return Encoded(ids, ids if example.labels is None else example.labels, [], "")


def without_tail(encoded: Encoded) -> Encoded:
    """Leaves out what follows the last trained token (a newline, with some templates a new header): nothing depends on it."""
    end = len(encoded.labels)
    while end and encoded.labels[end - 1] == IGNORED:
        end -= 1
    return Encoded(encoded.input_ids[:end], encoded.labels[:end], encoded.prompt_ids, encoded.reference)
