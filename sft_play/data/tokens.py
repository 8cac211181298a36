"""Texts of rows to tokens, such that a row is, token by token, what inference sees and writes; and what happens to rows
that are too long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sft_play.config.data_rules import refused_format
from sft_play.config.schema import Config
from sft_play.data import IGNORED, Message
from sft_play.data.chat import Encoded, Renderer, RowText, lost_thoughts
from sft_play.data.formats import Example
from sft_play.data.judged import TURNS_IN_TEXT
from sft_play.data.turns import counted
from sft_play.errors import DataError
from sft_play.model.tokenizer import adds_bos, end_of_turn_ids

TOO_LONG = "longer than model.max_seq_len"
ANSWER_TOO_LONG = "whose answer, with what cannot be cut before it, does not fit into model.max_seq_len"
EMPTY = "empty text"
WEIGHTLESS = "weight 0"
THOUGHTS = "thoughts that the chat template leaves out, so not learnt (docs/data.md, What is learnt)"
DOUBLE = ("<think>\n<think>", "<tool_response>\n<tool_response>")
DOUBLED = "texts with a mark (`<think>`, `<tool_response>`) that the chat template writes too, so it is there twice"
TRIMMED = "answers learnt without the blanks at their ends, which the chat template removes"
INVERTED = "token rows whose beginning is learnt and whose end is not, as if the mask said the opposite"
PADDED = "token rows that begin or end with one token several times, as the padding of another tokenizer"
NO_STOP = "token rows whose learnt part has no end of turn, which teach no stop"
PADS = 4
ANSWER_END = "the end of an answer"
"""Lost with the token that ends a turn."""
TEXT_END = frozenset({"the end of a text"})
SHORTEST = 2
"""Tokens of the shortest row that trains something: a token and the one after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedExample:
    """The result of encoding one example."""

    rows: Sequence[Encoded] = ()
    """None where the example was skipped or is wrong; several where it was split."""
    place: str = ""
    dropped: str | None = None
    """Why it was skipped."""
    error: DataError | None = None
    """What is wrong with it, with its place."""
    lost: frozenset[str] = frozenset()
    """What was cut off a row that is kept, in words: kinds of turns, or parts of one."""
    doubts: tuple[str, ...] = ()
    """Of one that is kept, see `Example.doubts`; and what the chat template leaves out."""
    overlong: int = 0
    """Tokens of an example that is longer than `model.max_seq_len`; 0 if it is not, and for documents made into
    chunks.
    """


class Encoder:
    """Encodes examples as a configuration asks: what is learnt, and what happens to rows that are too long.

    `data.system` and `data.style` are part of the tokenizer's template already (`model.tokenizer.load_tokenizer`).
    """

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.limit, self.policy, self.loss_on = config.model.max_seq_len, config.data.overlong, config.train.loss_on
        self.task, self.tokenizer = config.tuning.task, tokenizer
        self.vocabulary = len(tokenizer)
        self.stops = end_of_turn_ids(tokenizer)
        self.renderer = Renderer(tokenizer, self.stops)
        self.tokens = RowTokens(tokenizer, self.stops)

    def encode(self, examples: Sequence[Example]) -> list[EncodedExample]:
        """Return one outcome per example, in order; the outcome of a bad one has its error."""
        outcomes: dict[int, EncodedExample] = {}
        chats: dict[int, list[RowText]] = {}
        texts: list[int] = []
        for index, example in enumerate(examples):
            try:
                self._refuse_form(example)
                if example.text is not None:
                    texts.append(index)
                elif example.messages is None:
                    outcomes[index] = self._tokens(example)
                else:
                    chats[index] = self.renderer.rows(example.messages, example.tools, self.loss_on)
            except DataError as error:
                outcomes[index] = EncodedExample(error=error)
        for (index, row_texts), row_tokens in zip(chats.items(), self.tokens.rows(list(chats.values())), strict=True):
            outcomes[index] = self._chat(examples[index], row_texts, row_tokens)
        try:
            words = [examples[index].text or "" for index in texts]
            encoded = encode_texts(words, self.tokenizer, limit=self.limit, overlong=self.policy)
        except DataError as error:
            encoded = [EncodedExample(error=DataError(error.message, hint=error.hint)) for _ in texts]
        for index, outcome in zip(texts, encoded, strict=True):
            outcomes[index] = replace(outcome, doubts=examples[index].doubts if outcome.rows else ())
        for index, outcome in outcomes.items():
            if outcome.error:
                outcome.error.place = outcome.error.place or examples[index].place
        return [
            replace(_weighted(outcomes[index], example.weight), place=example.place)
            for index, example in enumerate(examples)
        ]

    def _refuse_form(self, example: Example) -> None:
        """Raise `DataError` for a format that the task does not take."""
        if (refused := refused_format(self.task, example.form)) is None:
            return
        hint = refused[1]
        if (column := example.answer_column) is not None:
            columns = f"{{prompt: text, completion: {column}}}"
            hint = f"`data.sources: [{{path: FILE, columns: {columns}}}]` learns `{column}`; else {hint}"
        elif TURNS_IN_TEXT in example.doubts:
            hint = f"write its turns as `messages`, so that only answers are learnt; else {hint}"
        raise DataError(f"the row is `{example.form}`, but {refused[0]}", hint=hint)

    def _chat(self, example: Example, texts: list[RowText], encoded: list[Encoded] | DataError) -> EncodedExample:
        if isinstance(encoded, DataError):
            return EncodedExample(error=encoded)
        messages = example.messages or []
        thoughts = (THOUGHTS,) if lost_thoughts(messages, texts, self.loss_on) else ()
        trimmed = (TRIMMED,) if any(map(_is_trimmed, texts)) else ()
        doubled = (DOUBLED,) if any(mark in text.prompt + text.answer for text in texts for mark in DOUBLE) else ()
        outcome = EncodedExample(doubts=(*example.doubts, *thoughts, *trimmed, *doubled))
        rows = [without_tail(row) for row in encoded]
        length = max(len(row.input_ids) for row in rows)
        if length <= self.limit:
            return replace(outcome, rows=rows)
        if self.policy in ("error", "drop"):
            return EncodedExample(dropped=TOO_LONG, overlong=length)

        def encode(messages: Sequence[Message]) -> list[Encoded]:
            again = self.tokens.rows([self.renderer.rows(messages, example.tools, self.loss_on)])[0]
            if isinstance(again, DataError):
                raise again
            return [without_tail(row) for row in again]

        def count(text: str) -> int:
            return max(1, len(self.tokens.batch([text])[0]))

        cut: Cut | None
        try:
            if self.policy == "split" and self.loss_on != "last":
                cut = split(messages, self.limit, encode, count)
            else:
                cut = truncate(messages, self.limit, encode, count, answers=self.policy == "truncate_answers")
        except DataError as error:
            return EncodedExample(error=error)
        if cut is None or not cut.rows:
            return EncodedExample(dropped=ANSWER_TOO_LONG, overlong=length)
        return replace(outcome, rows=cut.rows, lost=cut.lost(messages), overlong=length)

    def _tokens(self, example: Example) -> EncodedExample:
        """Return what became of an example that is tokens already."""
        ids = example.input_ids or []
        largest = max(ids, default=0)
        if largest >= self.vocabulary:
            raise DataError(
                f"`input_ids` contains {largest}, but the tokenizer has {self.vocabulary} tokens",
                hint="were the rows made with another tokenizer?",
            )
        row = without_tail(Encoded(ids, ids if example.labels is None else example.labels, [], "", example.weights))
        length = len(row.input_ids)
        if row.input_ids[-2:] in ([token] * 2 for token in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)):
            raise DataError("the row ends with padding that is learnt", hint="write -100 there into `labels`")
        if length < SHORTEST:
            raise DataError("the row has fewer than two tokens, so there is nothing to learn")
        labels = example.labels or ids
        signs = {
            INVERTED: labels[0] != IGNORED and labels[-1] == IGNORED,
            PADDED: length > PADS and 1 in (len({*ids[:PADS]}), len({*row.labels[-PADS:]})),
            NO_STOP: labels[0] == IGNORED and {*row.labels[-2:]}.isdisjoint(self.stops),
        }
        if length <= self.limit:
            return EncodedExample(rows=[row], doubts=tuple(doubt for doubt, holds in signs.items() if holds))
        if self.policy in ("error", "drop"):
            return EncodedExample(dropped=TOO_LONG, overlong=length)
        answer = row.labels[:2] == [IGNORED, IGNORED]  # tokens that are learnt from the beginning are a text
        if self.policy == "split" and not answer:
            return EncodedExample(rows=chunks(row, self.limit), overlong=length)
        cut, loses_end = cut_tokens(
            _from_answer(row, self.limit), self.limit, answers=self.policy == "truncate_answers"
        )
        if answer and loses_end and self.policy != "truncate_answers":
            return EncodedExample(dropped=ANSWER_TOO_LONG, overlong=length)
        lost = {ANSWER_END} if answer and loses_end else {"the beginning of the tokens"} if answer else TEXT_END
        return EncodedExample(rows=[cut], lost=frozenset(lost), overlong=length)


def _is_trimmed(text: RowText) -> bool:
    """Return whether a learnt answer of a row has blanks at its ends that the row's text lacks."""
    return any(
        words != words.strip() and words not in written
        for words, written in (
            (text.reference, text.answer),
            *((span.reference, text.prompt[span.start : span.end]) for span in text.earlier),
        )
    )


def _weighted(outcome: EncodedExample, weight: float) -> EncodedExample:
    """Return what became of an example whose row has a weight; with 0 it is left out."""
    if weight == 1 or not outcome.rows:
        return outcome
    each = [[counted(weight * part) for part in row.weights or [1.0] * len(row.labels)] for row in outcome.rows]
    rows = [replace(row, weights=weights) for row, weights in zip(outcome.rows, each, strict=True)]
    learnt = (part for row in rows for part, label in zip(row.weights or (), row.labels, strict=True) if label >= 0)
    return replace(outcome, rows=rows) if any(learnt) else EncodedExample(dropped=WEIGHTLESS)


def without_tail(encoded: Encoded) -> Encoded:
    """Omit what follows the last trained token: nothing depends on it."""
    end = len(encoded.labels)
    while end and encoded.labels[end - 1] == IGNORED:
        end -= 1
    return encoded if end == len(encoded.labels) else encoded.part(0, end)


def encode_texts(texts: Sequence[str], tokenizer: Any, *, limit: int, overlong: str = "split") -> list[EncodedExample]:
    """Tokenise documents together and return what became of each: every token is learnt, and each ends with the
    end-of-sequence token.

    `limit`: tokens of the longest row, at least 2. `overlong` is `data.overlong`; `error`, the default of the key, is
    for conversations: it cuts a document into chunks as `split` does. Chunks share one token, the last of one and the
    first of the next, where it is only read: every token but a document's first is a target exactly once. BOS comes
    first where the tokenizer adds one; neither BOS nor EOS is added where the text has it. Special tokens that a text
    spells are read as such, so that documents which another program put into a template stay what they are. Raise
    `DataError` for a tokenizer without an end-of-sequence token.
    """
    assert limit >= SHORTEST, "a row of one token trains nothing"
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no end-of-sequence token, so documents could not be separated",
            hint="set `eos_token` in its config",
        )
    if not texts:
        return []
    first = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
    # A long text is no mistake here, and the tokenizer would warn about each one.
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return [_document(ids, first, tokenizer.eos_token_id, limit, overlong) for ids in encoded]


def _document(tokens: list[int], first: list[int], eos: int, limit: int, overlong: str) -> EncodedExample:
    if not tokens:
        return EncodedExample(dropped=EMPTY)
    ids = tokens if tokens[:1] == first else [*first, *tokens]
    if ids[-1] != eos:
        ids = [*ids, eos]
    if len(ids) < SHORTEST:
        return EncodedExample(dropped=EMPTY)
    if len(ids) > limit and overlong == "drop":
        return EncodedExample(dropped=TOO_LONG, overlong=len(ids))
    # The first token of a row follows nothing and is never a target.
    row = Encoded(ids, [IGNORED, *ids[1:]], [], "")
    if len(ids) > limit and overlong.startswith("truncate"):
        return EncodedExample(rows=[cut_tokens(row, limit)[0]], lost=TEXT_END, overlong=len(ids))
    return EncodedExample(rows=chunks(row, limit))


# Texts of rows to tokens.


PROBES = ("a", " a", "a b", "\n\na", "  a\n", "1. \u00e9")
ANCHOR = "\n"


class RowTokens:
    """Tokenises rows with one tokenizer; labels are -100 where nothing is learnt."""

    def __init__(self, tokenizer: Any, stops: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.stops = frozenset(stops)
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()  # a folder may say otherwise; a row is never cut or padded here
        self._backend.no_padding()
        self._direct = all(self._fast([text])[0] == self._slow([text])[0] for text in PROBES)
        self._plain = self._continues_plainly()

    def batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, without any that the tokenizer would add: the template writes its own."""
        return self._fast(texts) if self._direct else self._slow(texts)

    def rows(self, groups: Sequence[Sequence[RowText]]) -> list[list[Encoded] | DataError]:
        """Return the rows of each group in tokens, tokenised together; an error for a group that cannot be exact."""
        texts = [text for group in groups for row in group if self._is_quick(row) for text in _pieces(row)]
        tokens = iter(self.batch(texts))
        return [self._group(group, tokens) for group in groups]

    def _is_quick(self, row: RowText) -> bool:
        return self._plain and not row.weighted

    def _group(self, group: Sequence[RowText], tokens: Iterator[list[int]]) -> list[Encoded] | DataError:
        encoded: list[Encoded] = []
        problem: DataError | None = None
        for row in group:
            try:
                encoded += self._quick(row, tokens) if self._is_quick(row) else self._slow_row(row)
            except DataError as error:
                problem = problem or error
        return problem or encoded

    def _quick(self, row: RowText, tokens: Iterator[list[int]]) -> list[Encoded]:
        """Return a row of pieces that were tokenised alone, where those of earlier answers are the tokens of the
        complete prompt.
        """
        prompt, answer = next(tokens), next(tokens)
        earlier = [(next(tokens), next(tokens)) for _ in row.earlier]
        parts: list[Part] = []
        reached = 0
        for span, (between, answer_ids) in zip(row.earlier, earlier, strict=True):
            start, end = reached + len(between), reached + len(between) + len(answer_ids)
            if prompt[reached:end] != between + answer_ids:
                return self._slow_row(row)
            parts.append((start, end, span.weight))
            reached = end
        ids = prompt + answer
        self._check_bos(ids)
        parts.append((0, len(ids), 1.0) if row.everything else (len(prompt), len(ids), row.weight))
        return [_of_parts(ids, parts, prompt, row.reference)]

    def _slow_row(self, row: RowText) -> list[Encoded]:
        """Return a row, after separate rows for earlier answers whose tokens the complete row would change."""
        prompt = self.batch([row.prompt])[0]
        answer = self._continued(row.prompt, prompt, row.answer)
        ids = prompt + answer
        self._check_bos(ids)
        if row.everything:
            return [_of_parts(ids, self._by_weights(row, len(ids), len(prompt)), prompt, row.reference)]
        parts: list[Part] = [(len(prompt), len(ids), row.weight)]
        alone: list[Encoded] = []
        for span in row.earlier:
            before = self.batch([row.prompt[: span.start]])[0]
            answer_ids = self._continued(row.prompt[: span.start], before, row.prompt[span.start : span.end])
            start, end = len(before), len(before) + len(answer_ids)
            if prompt[:end] == before + answer_ids:
                parts.append((start, end, span.weight))
            else:
                alone.append(_of_parts(before + answer_ids, [(start, end, span.weight)], before, span.reference))
        return [*alone, _of_parts(ids, parts, prompt, row.reference)]

    def _continued(self, prompt: str, prompt_ids: list[int], answer: str) -> list[int]:
        """Return the tokens that a model writes after `prompt_ids` to have written `answer`.

        Tokenizers that mark the beginning of a text (`\u2581`) would also mark the answer, which does not begin a text.
        """
        if self._plain:
            return self.batch([answer])[0]
        whole, anchored, anchor = self.batch([prompt + answer, ANCHOR + answer, ANCHOR])
        if whole[: len(prompt_ids)] == prompt_ids:
            return whole[len(prompt_ids) :]
        if anchored[: len(anchor)] == anchor:
            return anchored[len(anchor) :]
        raise DataError(
            "the tokenizer joins the start of an answer to the prompt before it, so training would see other tokens"
            " than inference",
            hint=(
                "use a template that ends the generation prompt with a special token or a line end:"
                " `data.chat_template`"
            ),
        )

    def _by_weights(self, row: RowText, tokens: int, prompt: int) -> list[Part]:
        """Return the parts of a row of which everything is learnt, some of it by weights; `prompt` is its number of
        prompt tokens.
        """
        parts: list[Part] = [(0, tokens, 1.0)]
        offsets = self.tokenizer(row.prompt, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        for span in row.weighted:
            within = [at for at, (low, high) in enumerate(offsets) if low < span.end and high > span.start]
            parts += [(at, at + 1, span.weight) for at in within]
            if span.end > len(row.prompt):
                parts.append((prompt, tokens, span.weight))
        return parts

    def _check_bos(self, ids: Sequence[int]) -> None:
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[0] == bos and bos not in self.stops and ids[1:2] == [bos]:
            raise DataError(
                "the chat template writes the beginning-of-sequence token twice",
                hint="remove one `bos_token` from the template",
            )

    def _fast(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def _slow(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        encoded = self.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)[
            "input_ids"
        ]
        return [list(ids) for ids in encoded]

    def _continues_plainly(self) -> bool:
        """Return whether the end of a turn is split off before anything else, and a text has the same tokens after it
        as alone.
        """
        added = self.tokenizer.added_tokens_decoder
        if not all(
            index in added and not (added[index].lstrip or added[index].rstrip or added[index].normalized)
            for index in self.stops
        ):
            return False
        stop = next(iter(self.stops))
        mark = str(self.tokenizer.convert_ids_to_tokens(stop))
        if str(self.tokenizer.convert_ids_to_tokens(self.batch(["a"])[0][0])) != "a":
            return False
        return all(self.batch([mark + text])[0] == [stop, *self.batch([text])[0]] for text in PROBES)


Part = tuple[int, int, float]
"""Tokens that are learnt: the first, the one after the last, and their weight; 0 takes out what was learnt."""


def _of_parts(ids: list[int], parts: Sequence[Part], prompt: list[int], reference: str) -> Encoded:
    """Return a row of which `parts` are learnt; of those that overlap the last counts. Raise `DataError` for none."""
    labels = [IGNORED] * len(ids)
    weights = None if all(weight in (0, 1) for *_, weight in parts) else [1.0] * len(ids)
    for start, end, weight in parts:
        labels[start:end] = ids[start:end] if weight else [IGNORED] * (end - start)
        if weights is not None:
            weights[start:end] = [weight] * (end - start)
    if all(label == IGNORED for label in labels[1:]):
        raise DataError("no token of the row is learnt: every turn has `train: false` or weight 0")
    return Encoded(ids, labels, prompt, reference, weights)


def _pieces(row: RowText) -> Iterator[str]:
    """Yield the texts that are tokenised for a row: prompt, answer, then what stands before each earlier answer, and
    that answer.
    """
    yield row.prompt
    yield row.answer
    reached = 0
    for span in row.earlier:
        yield row.prompt[reached : span.start]
        yield row.prompt[span.start : span.end]
        reached = span.end


# What happens to conversations and token rows that are longer than `model.max_seq_len` (`data.overlong`).
#
# `truncate` keeps the last answer: the oldest exchanges go first, then the beginning of the longest turn that is read
# and not learnt, then the system turn. `split` puts the exchanges of a conversation into as few rows as hold them, in
# order, each with the system turn; an exchange that alone is too long is cut as by `truncate`. So each answer is learnt
# at most once, and always to its end: an exchange stays together (a call, its result, the answer), and one whose
# answers do not fit is left out. Only `truncate_answers` cuts answers.


Encode = Callable[[Sequence[Message]], list[Encoded]]
"""Gives the rows of a conversation."""
Count = Callable[[str], int]
"""Gives the tokens of a text."""
SHORTEN_TRIES = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """What is left of a conversation."""

    rows: list[Encoded]
    turns: list[Message]
    """The turns that stand in the rows; one that was shortened is another object than it was."""
    answer_cut: bool = False
    """Whether an answer lost its end."""

    def lost(self, messages: Sequence[Message]) -> frozenset[str]:
        """Return what the conversation lost, in words: kinds of turns, and the beginning or end of one."""
        before, after = {id(turn) for turn in messages}, {id(turn) for turn in self.turns}
        shortened = Counter(str(turn["role"]) for turn in self.turns if id(turn) not in before)
        gone = Counter(str(turn["role"]) for turn in messages if id(turn) not in after) - shortened
        ends = [ANSWER_END] if self.answer_cut else []
        return frozenset(
            [*(f"{role} turns" for role in gone), *(f"the beginning of a {role} turn" for role in shortened), *ends]
        )


def truncate(
    messages: Sequence[Message], limit: int, encode: Encode, count: Count, *, answers: bool = False
) -> Cut | None:
    """Return the longest end of a conversation that fits; `None` if its last answer does not, unless `answers` may
    be cut.

    Raise `DataError` as `encode` does.
    """
    system, exchanges = exchanges_of(messages)
    for first in range(len(exchanges)):
        turns_left = [*system, *(turn for exchange in exchanges[first:] for turn in exchange)]
        if not _learns(turns_left):
            break
        rows = encode(turns_left)
        if _fits(rows, limit):
            return Cut(rows=rows, turns=turns_left)
    last = next((exchange for exchange in reversed(exchanges) if _learns(exchange)), exchanges[-1])
    return _shorten([*system, *last], limit, encode, count, answers=answers)


def split(messages: Sequence[Message], limit: int, encode: Encode, count: Count) -> Cut:
    """Return rows that hold all exchanges but those whose answers do not fit."""

    def rows_of(turns: Sequence[Message]) -> list[Encoded]:
        return encode(turns) if _learns(turns) else []

    system, exchanges = exchanges_of(messages)
    rows: list[Encoded] = []
    turns: list[Message] = []
    pending: list[Message] = []
    fitting: list[Encoded] = []
    for exchange in exchanges:
        extended = rows_of([*system, *pending, *exchange])
        if not _fits(extended, limit):
            rows, turns = rows + fitting, turns + pending
            pending, extended = [], rows_of([*system, *exchange])
        if _fits(extended, limit):
            pending, fitting = [*pending, *exchange], extended
            continue
        fitting = []
        if shortened := _shorten([*system, *exchange], limit, encode, count):
            rows, turns = rows + shortened.rows, turns + shortened.turns
    rows, turns = rows + fitting, turns + pending
    return Cut(rows=rows, turns=[*system, *(turn for turn in turns if turn["role"] != "system")])


def exchanges_of(messages: Sequence[Message]) -> tuple[list[Message], list[list[Message]]]:
    """Return the system turns at the beginning, and the exchanges: each a question with all that follows until the next
    one.
    """
    start = next((index for index, turn in enumerate(messages) if turn["role"] != "system"), len(messages))
    exchanges: list[list[Message]] = []
    for turn in messages[start:]:
        if turn["role"] == "user" or not exchanges:
            exchanges.append([])
        exchanges[-1].append(turn)
    return list(messages[:start]), exchanges


def cut_tokens(row: Encoded, limit: int, *, answers: bool = True) -> tuple[Encoded, bool]:
    """Return at most `limit` tokens of a row, all of one that fits, and whether learnt ones at its end are left out.

    Its last answer is kept, or what is learnt of tokens that have none: the beginning goes first; the end, with the
    token that ends the turn, only where less than half a row of what is read before it would be left, or with `answers:
    False` nothing of it.
    """
    first = len(row.prompt_ids) or next((index for index, label in enumerate(row.labels) if label != IGNORED), 0)
    least = limit // 2 if answers else 1
    start = first - max(min(first, least), min(first, limit - (len(row.labels) - first)))
    end = start + limit
    shortened = replace(row.part(start, end), prompt_ids=row.prompt_ids[start:])
    return shortened, any(label != IGNORED for label in row.labels[end:])


def _from_answer(row: Encoded, limit: int) -> Encoded:
    """Return a row of tokens whose earlier answers are only read, as many of them as keep the others from fitting in
    `limit`.
    """
    starts = [
        at for at, label in enumerate(row.labels) if label != IGNORED and (at == 0 or row.labels[at - 1] == IGNORED)
    ]
    first = next((start for start in starts if len(row.labels) - start < limit), starts[-1])
    return replace(row, labels=[IGNORED] * first + row.labels[first:])


def chunks(row: Encoded, limit: int) -> list[Encoded]:
    """Return a long row in pieces that share one token, so that each label is learnt once; pieces without any are left
    out.
    """
    pieces = []
    for start in range(0, len(row.input_ids) - 1, limit - 1):
        piece = row.part(start, start + limit)
        if any(label != IGNORED for label in piece.labels[1:]):
            pieces.append(replace(piece, labels=[IGNORED, *piece.labels[1:]], prompt_ids=[], reference=""))
    return pieces


def _shorten(
    messages: Sequence[Message], limit: int, encode: Encode, count: Count, *, answers: bool = False
) -> Cut | None:
    """Return one exchange whose longest read turns lost their beginning, but never all of it; `None` if it does not
    fit even so.

    `messages` end with an answer. `answers` lets an answer that is longer than half a row lose its end: half a row of
    prompt stays.
    """
    turns = list(messages)
    rows = encode(turns)
    for _ in range(SHORTEN_TRIES):
        longest = max(rows, key=lambda row: len(row.input_ids))
        excess = len(longest.input_ids) - limit
        if answers:
            excess = min(excess, len(longest.prompt_ids) - limit // 2)
        elif len(longest.input_ids) - len(longest.prompt_ids) >= limit:
            return None
        if excess <= 0:
            break
        read = [
            index for index, turn in enumerate(turns) if turn["role"] not in ("assistant", "system") and turn["content"]
        ]
        index = max(read, key=lambda at: len(turns[at]["content"]), default=0)
        tokens = count(turns[index]["content"]) if read else 0
        if tokens < 2:
            if messages[0]["role"] != "system":
                break
            return _shorten(messages[1:], limit, encode, count, answers=answers)
        text = turns[index]["content"]
        characters = max(
            1, len(text) - 1 - -(-len(text) * min(excess, tokens // 2) // tokens)
        )  # characters for about that many tokens
        try:
            fewer = [*turns[:index], {**turns[index], "content": text[-characters:]}, *turns[index + 1 :]]
            rows, turns = encode(fewer), fewer
        except DataError:  # a template may refuse what is left, or a conversation without its system turn
            break
    if not answers and not _fits(rows, limit):
        return None
    cut = [cut_tokens(row, limit) for row in rows]
    return Cut(rows=[row for row, _ in cut], turns=turns, answer_cut=any(loses_end for _, loses_end in cut))


def _learns(messages: Sequence[Message]) -> bool:
    return any(turn["role"] == "assistant" and turn.get("train") is not False for turn in messages)


def _fits(rows: Sequence[Encoded], limit: int) -> bool:
    return all(len(row.input_ids) <= limit for row in rows)
