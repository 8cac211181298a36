"""From examples to token rows: conversations by the chat template, texts as documents, tokens as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sft_play.config.data_rules import refused_format
from sft_play.config.schema import Config
from sft_play.data.chat import IGNORED, Encoded, Renderer, RowText, empty_thoughts, lost_thoughts
from sft_play.data.example import Example, Message
from sft_play.data.tokens import Cut, RowTokens, chunks, cut_tokens, loses_end, split, truncated
from sft_play.errors import DataError
from sft_play.model.tokenizer import end_of_turn_ids

ANSWER_TOO_LONG = "whose answer, with what cannot be cut before it, does not fit into model.max_seq_len"
TEXT_END = frozenset({"the end of a text"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one example."""

    rows: list[Encoded]
    """None where the example was left out or is wrong; several where it was split."""
    dropped: str | None = None
    """Why it was left out."""
    lost: frozenset[str] = frozenset()
    """What was cut off a row that is kept, in words: kinds of turns, or parts of one."""
    answers_cut: int = 0
    """Answers that lost their end: no token that ends a turn is learnt from them."""
    thoughts: int = 0
    """Thoughts of learnt turns that the chat template writes nowhere in the example's rows: they are not learnt."""
    empty_thoughts: int = 0
    """Learnt answers that the template begins with an empty thought."""
    error: DataError | None = None
    """What is wrong, with its place."""
    overlong: int = 0
    """Tokens of an example that is longer than `model.max_seq_len`; 0 where it is not, and for documents made into chunks."""


class Encoder:
    """Encodes examples as a configuration asks: what is learnt, and what happens to rows that are too long.

    `data.system` and `data.style` are part of the tokenizer's template already (`model.tokenizer.load_tokenizer`).
    """

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.limit, self.policy, self.loss_on = config.model.max_seq_len, config.data.overlong, config.train.loss_on
        self.task, self.tokenizer = config.tuning.task, tokenizer
        self.vocabulary = len(tokenizer)
        stops = end_of_turn_ids(tokenizer)
        self.renderer = Renderer(tokenizer, stops)
        self.tokens = RowTokens(tokenizer, stops)

    def encode(self, examples: Sequence[Example]) -> list[Outcome]:
        """Returns one outcome per example, in order. Raises nothing for a bad example: its outcome tells."""
        outcomes: list[Outcome | None] = [None] * len(examples)
        chats: list[int] = []
        texts: list[int] = []
        groups: list[list[RowText]] = []
        thoughts: list[tuple[int, int]] = []
        for index, example in enumerate(examples):
            try:
                self._check_task(example)
                if example.text is not None:
                    texts.append(index)
                    continue
                if example.messages is None:
                    outcomes[index] = self._given(example)
                    continue
                texts_of_rows = self.renderer.rows(example.messages, example.tools, self.loss_on)
                groups.append(texts_of_rows)
                lost = lost_thoughts(example.messages, texts_of_rows, self.loss_on)
                thoughts.append((lost, empty_thoughts(texts_of_rows)))
                chats.append(index)
            except DataError as error:
                outcomes[index] = _failed(error, example)
        for index, found, (lost, empty) in zip(chats, self.tokens.rows(groups), thoughts, strict=True):
            outcome = self._chat(examples[index], found)
            outcomes[index] = (
                replace(outcome, thoughts=lost, empty_thoughts=empty) if outcome.rows and (lost or empty) else outcome
            )
        for index, outcome in zip(texts, self._texts([examples[index] for index in texts]), strict=True):
            outcomes[index] = outcome
        return [outcome for outcome in outcomes if outcome is not None]

    def _check_task(self, example: Example) -> None:
        """Raises `DataError` for a row that `tuning.task` does not learn."""
        if refused := refused_format(self.task, example.form):
            raise DataError(f"the row is `{example.form}`, but {refused[0]}", hint=refused[1])

    def conversation(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[Encoded]:
        """Returns the rows of one conversation, however long. Raises `DataError`."""
        found = self.tokens.rows([self.renderer.rows(messages, tools, self.loss_on)])[0]
        if isinstance(found, DataError):
            raise found
        return found

    def _chat(self, example: Example, found: list[Encoded] | DataError) -> Outcome:
        if isinstance(found, DataError):
            return _failed(found, example)
        rows = [without_tail(row) for row in found]
        length = max(len(row.input_ids) for row in rows)
        if length <= self.limit:
            return Outcome(rows=rows)
        if self.policy == "error":
            return self._too_long(example, length)
        if self.policy == "drop":
            return Outcome(rows=[], dropped=TOO_LONG, overlong=length)

        def encode(messages: Sequence[Message]) -> list[Encoded]:
            return [without_tail(row) for row in self.conversation(messages, example.tools)]

        try:
            messages = example.messages or []
            found_cut: Cut | None
            if self.policy == "split" and self.loss_on != "last":
                found_cut = split(messages, self.limit, encode, self._count)
            else:
                cut_answers = self.policy == "truncate_answers"
                found_cut = truncated(messages, self.limit, encode, self._count, answers=cut_answers)
        except DataError as error:
            return _failed(error, example)
        if found_cut is None or not found_cut.rows:
            return Outcome(rows=[], dropped=ANSWER_TOO_LONG, overlong=length)
        return Outcome(rows=found_cut.rows, lost=found_cut.lost(messages), answers_cut=found_cut.answers_cut, overlong=length)

    def _texts(self, examples: Sequence[Example]) -> list[Outcome]:
        try:
            found = encode_texts([e.text or "" for e in examples], self.tokenizer, limit=self.limit, overlong=self.policy)
        except DataError as error:
            return [Outcome(rows=[], error=DataError(error.message, place=e.place, hint=error.hint)) for e in examples]
        return [
            Outcome(rows=text.rows, dropped=text.dropped, lost=TEXT_END if text.cut else frozenset(), overlong=text.overlong)
            for text in found
        ]

    def _given(self, example: Example) -> Outcome:
        """Returns what became of an example that is tokens already."""
        ids = example.input_ids or []
        largest = max(ids, default=0)
        if largest >= self.vocabulary:
            raise DataError(
                f"`input_ids` holds {largest}, but the tokenizer has {self.vocabulary} tokens",
                hint="were the rows made with another tokenizer?",
            )
        row = without_tail(Encoded(ids, ids if example.labels is None else example.labels, [], ""))
        length = len(row.input_ids)
        if length < 2:
            raise DataError("the row has fewer than two tokens, so there is nothing to learn")
        if length <= self.limit:
            return Outcome(rows=[row])
        if self.policy == "error":
            return self._too_long(example, length)
        if self.policy == "drop":
            return Outcome(rows=[], dropped=TOO_LONG, overlong=length)
        answer = row.labels[:2] == [IGNORED, IGNORED]  # tokens that are learnt from the beginning are a text
        if self.policy == "split" and not answer:
            return Outcome(rows=chunks(row, self.limit), overlong=length)
        ends = int(answer and loses_end(row, self.limit))
        if ends and self.policy != "truncate_answers":
            return Outcome(rows=[], dropped=ANSWER_TOO_LONG, overlong=length)
        lost = {"the end of an answer"} if ends else {"the beginning of the tokens"} if answer else TEXT_END
        return Outcome(rows=[cut_tokens(row, self.limit)], lost=frozenset(lost), answers_cut=ends, overlong=length)

    def _count(self, text: str) -> int:
        return max(1, len(self.tokens.batch([text])[0]))

    def _too_long(self, example: Example, length: int) -> Outcome:
        problem = DataError(f"the row has {length} tokens; `model.max_seq_len` is {self.limit}", place=example.place)
        return Outcome(rows=[], error=problem, overlong=length)


def _failed(error: DataError, example: Example) -> Outcome:
    error.place = error.place or example.place
    return Outcome(rows=[], error=error)


def without_tail(encoded: Encoded) -> Encoded:
    """Leaves out what follows the last trained token: nothing depends on it."""
    if encoded.labels and encoded.labels[-1] != IGNORED:
        return encoded
    end = len(encoded.labels)
    while end and encoded.labels[end - 1] == IGNORED:
        end -= 1
    return replace(encoded, input_ids=encoded.input_ids[:end], labels=encoded.labels[:end])


# From documents and plain text to training rows: every token is learnt, documents end with the end-of-sequence token.
#
# A document longer than a row is cut into chunks that share one token: the last of a chunk is the first of the next, where it is
# only read. So every token but a document's first is a target exactly once, and no chunk boundary costs a target.


TOO_LONG = "longer than model.max_seq_len"
EMPTY = "empty text"
MARGIN = 2
"""The shortest document that trains something: a token and the one after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRows:
    """What became of one text."""

    rows: list[Encoded]
    """In order; several where a long text was cut into chunks."""
    dropped: str | None = None
    """Why there is no row."""
    cut: bool = False
    """Whether tokens were left out (`overlong: truncate`)."""
    overlong: int = 0
    """Tokens of a text that is left out or cut because it is longer than a row; 0 where it fits or is made into chunks."""


def encode_text(text: str, tokenizer: Any, *, limit: int, overlong: str = "split") -> list[Encoded]:
    """Returns the rows of one text, none where it is empty or left out. See `encode_texts`."""
    return encode_texts([text], tokenizer, limit=limit, overlong=overlong)[0].rows


def encode_texts(texts: Sequence[str], tokenizer: Any, *, limit: int, overlong: str = "split") -> list[TextRows]:
    """Tokenises texts together and returns what became of each, in order.

    `limit`: tokens of the longest row, at least 2. `overlong`: what happens to longer texts, a value of `data.overlong`; `error`,
    the default of the key, is for conversations, and cuts a text into chunks as `split` does. BOS comes first where the tokenizer
    adds one, EOS last; neither is added where the text has it already. Special tokens that are written out in a text are taken as
    such, so that texts which some other program has put into a template stay what they are. Raises `DataError` for a tokenizer
    without an end-of-sequence token.
    """
    assert limit >= MARGIN, "a row of one token trains nothing"
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no end-of-sequence token, so documents could not be separated",
            hint="set `eos_token` in its config",
        )
    if not texts:
        return []
    first = beginning(tokenizer)
    # A long text is no mistake here, and the tokenizer would warn about each one.
    found = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return [_rows(ids, first, tokenizer.eos_token_id, limit, overlong) for ids in found]


def beginning(tokenizer: Any) -> list[int]:
    """Returns the beginning-of-sequence token where the tokenizer puts one before a text, else nothing."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []


def _rows(tokens: list[int], first: list[int], eos: int, limit: int, overlong: str) -> TextRows:
    """Returns the rows of one tokenised text."""
    if not tokens:
        return TextRows(rows=[], dropped=EMPTY)
    ids = tokens if tokens[:1] == first else [*first, *tokens]
    if ids[-1] != eos:
        ids = [*ids, eos]
    if len(ids) < MARGIN:
        return TextRows(rows=[], dropped=EMPTY)
    if len(ids) <= limit:
        return TextRows(rows=[_row(ids)])
    if overlong == "drop":
        return TextRows(rows=[], dropped=TOO_LONG, overlong=len(ids))
    if overlong.startswith("truncate"):
        return TextRows(rows=[_row(ids[:limit])], cut=True, overlong=len(ids))
    return TextRows(rows=[_row(ids[start : start + limit]) for start in range(0, len(ids) - 1, limit - 1)])


def _row(ids: list[int]) -> Encoded:
    """Returns a row of which every token is learnt but the first, which follows nothing and is never a target."""
    return Encoded(ids, [IGNORED, *ids[1:]], [], "")
