"""From a conversation to tokens and an exact label mask, by rendering the model's own chat template.

The whole conversation is rendered and tokenised once. An answer begins where the conversation before it ends, rendered with the
generation prompt (which is what the model sees when it answers), and ends with the first end-of-turn token after its text. Both
are found in the text of the whole conversation, so the mask is exact also for templates that write an answer differently once
later turns follow (Qwen3 leaves out earlier thoughts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sft_play.data.formats import Message
from sft_play.errors import DataError
from sft_play.model.tokenizer import MARKER

IGNORED = -100

Span = tuple[int, int]
"""First character, and the one after the last."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A conversation in tokens."""

    input_ids: list[int]
    labels: list[int]
    """The token where it is trained, else -100; same length as `input_ids`."""
    prompt_ids: list[int]
    """What the model is given when it writes the last answer."""
    reference: str
    """The last answer."""


class Renderer:
    """Encodes conversations with one tokenizer and its template."""

    def __init__(self, tokenizer: Any, stops: Sequence[int]) -> None:
        """`stops`: the tokens that end a turn (`model.tokenizer.end_of_turn_ids`)."""
        self.tokenizer = tokenizer
        self.stops = frozenset(stops)

    def encode(self, messages: Sequence[Message]) -> Encoded:
        """Returns the tokens of a conversation that ends with an answer. Raises `DataError` where a mask cannot be exact."""
        text = self._render(messages)
        answers = [self._span(messages, i, text) for i, message in enumerate(messages) if message["role"] == "assistant"]
        ids, offsets = self._tokens(text, [start for start, _ in answers])
        self._check_bos(ids)
        labels = [IGNORED] * len(ids)
        for answer in answers:
            self._train(text, ids, offsets, labels, answer)
        prompt, _ = self._tokens(self._render(messages[:-1], prompt=True), [])
        return Encoded(ids, labels, prompt, messages[-1]["content"])

    def _span(self, messages: Sequence[Message], index: int, text: str) -> Span:
        """Returns where in `text` the answer of message `index` begins and where its words end."""
        marked = self._render([*messages[:index], {**messages[index], "content": MARKER}, *messages[index + 1 :]])
        head, found, tail = marked.partition(MARKER)
        if not found or MARKER in tail or not (text.startswith(head) and text.endswith(tail)):
            raise DataError(
                f"the chat template does not write the answer of message {index + 1} in one place, so its mask cannot be exact",
                hint="split the conversation into rows that end at each answer",
            )
        before = self._render(messages[:index], prompt=True)
        # What a template writes between the prompt and the words (an empty thought) is the model's to write, so it is trained.
        start = len(before) if head.startswith(before) else len(head)
        return start, len(text) - len(tail)

    def _tokens(self, text: str, starts: Sequence[int]) -> tuple[list[int], list[Span]]:
        """Returns tokens and their characters, split at an answer's start wherever the prompt alone gives other tokens.

        Byte-level BPE merges what stands on both sides of the start, and splits line ends by what follows them.
        """
        encoding = self._encode(text)
        ids, offsets = list(encoding["input_ids"]), list(encoding["offset_mapping"])
        cuts = [at for at in starts if not _begins(ids, self._encode(text[:at])["input_ids"])]
        if not cuts:
            return ids, offsets
        ids, offsets = [], []
        for low, high in zip([0, *cuts], [*cuts, len(text)], strict=True):
            piece = self._encode(text[low:high])
            ids += piece["input_ids"]
            offsets += [(first + low, last + low) for first, last in piece["offset_mapping"]]
        return ids, offsets

    def _encode(self, text: str) -> Any:
        # The template writes its own special tokens; the tokenizer must not add a second BOS.
        return self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)

    def _train(self, text: str, ids: list[int], offsets: Sequence[Span], labels: list[int], answer: Span) -> None:
        """Labels the tokens from the answer's start up to and including the token that ends its turn."""
        start, words_end = answer
        # `high > start`: a token of spaces only may have an empty span at their end (byte-level BPE with `trim_offsets`).
        first = next((i for i, (low, high) in enumerate(offsets) if low >= start and high > start), len(ids))
        stop = next((i for i in range(first, len(ids)) if offsets[i][0] >= words_end and ids[i] in self.stops), None)
        if stop is None or text[words_end : offsets[stop][0]].strip():
            raise DataError(
                "the chat template writes no end-of-turn token after an answer, so the model would never learn to stop",
                hint="use a template that ends each answer with the tokenizer's eos token",
            )
        labels[first : stop + 1] = ids[first : stop + 1]

    def _render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        import jinja2

        try:
            return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt))
        except (jinja2.TemplateError, TypeError, KeyError, IndexError, ValueError) as error:
            roles = ", ".join(m["role"] for m in messages)
            raise DataError(f"the chat template does not take this conversation ({roles}): {error}") from error

    def _check_bos(self, ids: Sequence[int]) -> None:
        bos = self.tokenizer.bos_token_id
        if bos is not None and bos not in self.stops and list(ids[:2]) == [bos, bos]:
            raise DataError("the chat template writes the beginning-of-sequence token twice")


def _begins(ids: Sequence[int], first: Sequence[int]) -> bool:
    return list(ids[: len(first)]) == list(first)
