"""From a conversation to tokens and an exact label mask, by rendering the model's own chat template.

The whole conversation is rendered and tokenised once. The characters of each answer are found by rendering the conversation up
to it (with the generation prompt, which is what the model will see when it answers) and up to its end; tokens between the two
are trained up to and including the one that ends the turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sft_play.data.formats import Message
from sft_play.errors import DataError

IGNORED = -100


@dataclass(frozen=True, slots=True)
class Encoded:
    """A conversation in tokens."""

    input_ids: list[int]
    labels: list[int]
    """The token where it is trained, else -100; same length as `input_ids`."""
    prompt_ids: list[int]
    """Everything up to where the last answer begins."""
    reference: str
    """The last answer."""


class Renderer:
    """Encodes conversations with one tokenizer and its template."""

    def __init__(self, tokenizer: Any, stops: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.stops = frozenset(stops)

    def encode(self, messages: Sequence[Message]) -> Encoded:
        """Returns the tokens of a conversation that ends with an answer. Raises `DataError` where a mask cannot be exact."""
        text = self._render(messages)
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = list(encoding["input_ids"]), encoding["offset_mapping"]
        self._check_bos(ids)
        labels = [IGNORED] * len(ids)
        start = 0
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                start, end = self._span(messages, index, text)
                self._train(ids, offsets, labels, start, end)
        prompt = self._ids(text[:start])
        return Encoded(ids, labels, prompt, messages[-1]["content"])

    def _span(self, messages: Sequence[Message], index: int, text: str) -> tuple[int, int]:
        """Returns where the answer of message `index` begins and where its turn ends, in characters of `text`."""
        before = self._render(messages[:index], prompt=True)
        after = text if index == len(messages) - 1 else self._render(messages[: index + 1])
        if not text.startswith(before):
            before = self._render(messages[:index])  # some templates put something else before an answer that is known
        if not (text.startswith(before) and text.startswith(after)):
            raise DataError(
                f"the chat template changes turn {index + 1} when later ones are added, so its mask cannot be exact",
                hint="split the conversation into rows that end at each answer",
            )
        return len(before), len(after)

    def _train(self, ids: list[int], offsets: Sequence[tuple[int, int]], labels: list[int], start: int, end: int) -> None:
        inside = [i for i, (low, high) in enumerate(offsets) if low >= start and high <= end and high > low]
        last = next((i for i in reversed(inside) if ids[i] in self.stops), None)
        if last is None:
            raise DataError(
                "the chat template writes no end-of-turn token after an answer, so the model would never learn to stop",
                hint="use a template that ends each answer with the tokenizer's eos token",
            )
        for i in inside:
            if i <= last:
                labels[i] = ids[i]

    def _render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        import jinja2

        try:
            return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt))
        except (jinja2.TemplateError, TypeError, KeyError, IndexError) as error:
            roles = ", ".join(m["role"] for m in messages)
            raise DataError(f"the chat template does not take this conversation ({roles}): {error}") from error

    def _ids(self, text: str) -> list[int]:
        # The template writes its own special tokens; the tokenizer must not add a second BOS.
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _check_bos(self, ids: Sequence[int]) -> None:
        bos = self.tokenizer.bos_token_id
        if bos is not None and bos not in self.stops and list(ids[:2]) == [bos, bos]:
            raise DataError("the chat template writes the beginning-of-sequence token twice")
