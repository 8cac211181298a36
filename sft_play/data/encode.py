"""From examples to token rows: conversations by the chat template, texts as documents, tokens as they are; in one process or many."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import connection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sft_play.config.data_rules import refused_format
from sft_play.config.schema import Config
from sft_play.data.chat import IGNORED, Encoded, Renderer, RowText, lost_thoughts
from sft_play.data.example import BAD, Example, Message
from sft_play.data.formats import understand
from sft_play.data.readers import Placed
from sft_play.data.templates import adds_bos
from sft_play.data.tokens import Cut, RowTokens, chunks, cut_tokens, loses_end, split, truncate
from sft_play.errors import DataError, HardwareError
from sft_play.files import text_sha256
from sft_play.model.tokenizer import end_of_turn_ids
from sft_play.plan.hardware import cpu_threads

TOO_LONG = "longer than model.max_seq_len"
ANSWER_TOO_LONG = "whose answer, with what cannot be cut before it, does not fit into model.max_seq_len"
EMPTY = "empty text"
TEXT_END = frozenset({"the end of a text"})
SHORTEST = 2
"""Tokens of the shortest row that trains something: a token and the one after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one example."""

    rows: Sequence[Encoded] = ()
    """None where the example was skipped or is wrong; several where it was split."""
    place: str = ""
    dropped: str | None = None
    """Why it was skipped."""
    error: DataError | None = None
    """What is wrong with it, with its place."""
    lost: frozenset[str] = frozenset()
    """What was cut off a row that is kept, in words: kinds of turns, or parts of one."""
    answers_cut: int = 0
    """Answers that lost their end: no token that ends a turn is learnt from them."""
    thoughts: int = 0
    """Thoughts of learnt turns that the chat template writes nowhere in the example's rows: they are not learnt."""
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
        """Return one outcome per example, in order; the outcome of a bad one has its error."""
        outcomes: dict[int, Outcome] = {}
        chats: dict[int, list[RowText]] = {}
        texts: list[int] = []
        for index, example in enumerate(examples):
            try:
                if refused := refused_format(self.task, example.form):
                    raise DataError(f"the row is `{example.form}`, but {refused[0]}", hint=refused[1])
                if example.text is not None:
                    texts.append(index)
                elif example.messages is None:
                    outcomes[index] = self._tokens(example)
                else:
                    chats[index] = self.renderer.rows(example.messages, example.tools, self.loss_on)
            except DataError as error:
                outcomes[index] = Outcome(error=error)
        for (index, row_texts), found in zip(chats.items(), self.tokens.rows(list(chats.values())), strict=True):
            outcomes[index] = self._chat(examples[index], row_texts, found)
        try:
            words = [examples[index].text or "" for index in texts]
            encoded = encode_texts(words, self.tokenizer, limit=self.limit, overlong=self.policy)
        except DataError as error:
            encoded = [Outcome(error=DataError(error.message, hint=error.hint)) for _ in texts]
        outcomes.update(zip(texts, encoded, strict=True))
        for index, outcome in outcomes.items():
            if outcome.error:
                outcome.error.place = outcome.error.place or examples[index].place
        return [replace(outcomes[index], place=example.place) for index, example in enumerate(examples)]

    def conversation(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[Encoded]:
        """Return the rows of one conversation, however long. Raise `DataError`."""
        found = self.tokens.rows([self.renderer.rows(messages, tools, self.loss_on)])[0]
        if isinstance(found, DataError):
            raise found
        return found

    def _chat(self, example: Example, texts: list[RowText], found: list[Encoded] | DataError) -> Outcome:
        if isinstance(found, DataError):
            return Outcome(error=found)
        messages = example.messages or []
        kept = Outcome(thoughts=lost_thoughts(messages, texts, self.loss_on))
        rows = [without_tail(row) for row in found]
        length = max(len(row.input_ids) for row in rows)
        if length <= self.limit:
            return replace(kept, rows=rows)
        if self.policy in ("error", "drop"):
            return Outcome(dropped=TOO_LONG, overlong=length)

        def encode(messages: Sequence[Message]) -> list[Encoded]:
            return [without_tail(row) for row in self.conversation(messages, example.tools)]

        def count(text: str) -> int:
            return max(1, len(self.tokens.batch([text])[0]))

        cut: Cut | None
        try:
            if self.policy == "split" and self.loss_on != "last":
                cut = split(messages, self.limit, encode, count)
            else:
                cut = truncate(messages, self.limit, encode, count, answers=self.policy == "truncate_answers")
        except DataError as error:
            return Outcome(error=error)
        if cut is None or not cut.rows:
            return Outcome(dropped=ANSWER_TOO_LONG, overlong=length)
        return replace(kept, rows=cut.rows, lost=cut.lost(messages), answers_cut=cut.answers_cut, overlong=length)

    def _tokens(self, example: Example) -> Outcome:
        """Return what became of an example that is tokens already."""
        ids = example.input_ids or []
        largest = max(ids, default=0)
        if largest >= self.vocabulary:
            raise DataError(
                f"`input_ids` holds {largest}, but the tokenizer has {self.vocabulary} tokens",
                hint="were the rows made with another tokenizer?",
            )
        row = without_tail(Encoded(ids, ids if example.labels is None else example.labels, [], ""))
        length = len(row.input_ids)
        if length < SHORTEST:
            raise DataError("the row has fewer than two tokens, so there is nothing to learn")
        if length <= self.limit:
            return Outcome(rows=[row])
        if self.policy in ("error", "drop"):
            return Outcome(dropped=TOO_LONG, overlong=length)
        answer = row.labels[:2] == [IGNORED, IGNORED]  # tokens that are learnt from the beginning are a text
        if self.policy == "split" and not answer:
            return Outcome(rows=chunks(row, self.limit), overlong=length)
        ends = int(answer and loses_end(row, self.limit))
        if ends and self.policy != "truncate_answers":
            return Outcome(dropped=ANSWER_TOO_LONG, overlong=length)
        lost = {"the end of an answer"} if ends else {"the beginning of the tokens"} if answer else TEXT_END
        return Outcome(rows=[cut_tokens(row, self.limit)], lost=frozenset(lost), answers_cut=ends, overlong=length)


def without_tail(encoded: Encoded) -> Encoded:
    """Omit what follows the last trained token: nothing depends on it."""
    end = len(encoded.labels)
    while end and encoded.labels[end - 1] == IGNORED:
        end -= 1
    if end == len(encoded.labels):
        return encoded
    return replace(encoded, input_ids=encoded.input_ids[:end], labels=encoded.labels[:end])


def encode_texts(texts: Sequence[str], tokenizer: Any, *, limit: int, overlong: str = "split") -> list[Outcome]:
    """Tokenise documents together and return what became of each: every token is learnt, and each ends with the end-of-sequence token.

    `limit`: tokens of the longest row, at least 2. `overlong` is `data.overlong`; `error`, the default of the key, is for conversations:
    it cuts a document into chunks as `split` does. Chunks share one token, the last of one and the first of the next, where it is only
    read: every token but a document's first is a target exactly once. BOS comes first where the tokenizer adds one; neither BOS nor EOS
    is added where the text has it. Special tokens that a text spells are read as such, so that documents which another program put into
    a template stay what they are. Raise `DataError` for a tokenizer without an end-of-sequence token.
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
    found = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return [_document(ids, first, tokenizer.eos_token_id, limit, overlong) for ids in found]


def _document(tokens: list[int], first: list[int], eos: int, limit: int, overlong: str) -> Outcome:
    if not tokens:
        return Outcome(dropped=EMPTY)
    ids = tokens if tokens[:1] == first else [*first, *tokens]
    if ids[-1] != eos:
        ids = [*ids, eos]
    if len(ids) < SHORTEST:
        return Outcome(dropped=EMPTY)
    if len(ids) > limit and overlong == "drop":
        return Outcome(dropped=TOO_LONG, overlong=len(ids))
    # The first token of a row follows nothing and is never a target.
    row = Encoded(ids, [IGNORED, *ids[1:]], [], "")
    if len(ids) > limit and overlong.startswith("truncate"):
        return Outcome(rows=[cut_tokens(row, limit)], lost=TEXT_END, overlong=len(ids))
    return Outcome(rows=chunks(row, limit))


# Chunks of rows through one process or many: in order, a bounded number at a time, the same for every number of processes.


CHUNK_ROWS = 256
CHUNK_CHARACTERS = 1_000_000
"""A chunk ends with either, so that neither short rows cost a message each, nor long documents the memory."""
FEW_CHUNKS = 8
"""With `data.num_proc: auto`, as many chunks or fewer are made in this process: starting others would take longer."""
WAITING = 3
"""Chunks on their way for each process: one in work, and enough that it never waits."""
KEY_BYTES = 16
"""Of a row's content hash, what is kept to find copies: a chance meeting among 10 million rows has a probability of 1e-25."""
POSITION_DIGITS = 12
"""Hexadecimal digits of a hash that tell a row's place between 0 and 1."""

Integers = NDArray[np.int32]


class Work(NamedTuple):
    """Rows of one source, as they were read."""

    source: int
    """Index into the split's sources."""
    form: str | None
    """The source's format; `None` where it is not known yet."""
    rows: Sequence[Placed]


class TokenRow(NamedTuple):
    """One prepared row."""

    input_ids: Integers
    labels: Integers
    prompt_ids: Integers
    reference: str
    trained: int
    """Tokens that a loss is computed for: the first one follows nothing, and never is."""


class Made(NamedTuple):
    """What became of one example: no row, one, or several."""

    key: bytes
    """`KEY_BYTES` of a hash of its content."""
    held_out: bool
    rows: list[TokenRow]
    outcome: Outcome | None
    """Of one that was skipped, cut, lost something or is wrong: what there is to say, without rows."""


class Chunk(NamedTuple):
    """What became of the rows of one `Work`, in order."""

    source: int
    form: str | None
    unread: list[DataError]
    """What is wrong with rows themselves, each with its place."""
    examples: list[Made]
    """What was read."""


def encode_all(config: Config, tokenizer: Any, works: Iterator[Work], *, fraction: float) -> Generator[Chunk, None, None]:
    """Yield the chunk of each work, in order. Raise `DataError`, and `HardwareError` when a process was killed.

    `works` is read as chunks are taken: at most `WAITING` for each process are in memory.
    """
    make, processes = _Maker(config, tokenizer, fraction), config.data.num_proc
    if not isinstance(processes, int):
        first = list(itertools.islice(works, FEW_CHUNKS + 1))
        works, processes = itertools.chain(first, works), cpu_threads() if len(first) > FEW_CHUNKS else 1
    if processes == 1:
        yield from map(make, works)
        return
    # On Linux the processes are forked: that takes milliseconds where importing transformers takes seconds. It is safe because the
    # tokenizer's threads do not exist where it has not run yet, and are not used in the processes.
    method = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(processes, method, initializer=_begin, initargs=(make,))
    waiting: deque[Future[Chunk]] = deque()
    try:
        for work in works:
            waiting.append(pool.submit(_encode, work))
            if len(waiting) >= WAITING * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise HardwareError(
            "a process that prepares the data was killed, most likely because the memory ran out",
            hint=f"use fewer processes than {processes}: DATA_NUM_PROC=1",
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _Maker:
    """Makes chunks; the encoder is made with the first one, in the process that needs it."""

    def __init__(self, config: Config, tokenizer: Any, fraction: float) -> None:
        self._config, self._tokenizer, self._fraction = config, tokenizer, fraction
        self._encoder: Encoder | None = None

    def __call__(self, work: Work) -> Chunk:
        self._encoder = self._encoder or Encoder(self._config, self._tokenizer)
        examples: list[Example] = []
        unread: list[DataError] = []
        for placed in work.rows:
            try:
                examples.append(understand(placed, work.source, work.form, group_by=self._config.data.group_by))
            except DataError as error:
                unread.append(error)
        outcomes = self._encoder.encode(examples)
        made = [self._made(example, outcome) for example, outcome in zip(examples, outcomes, strict=True)]
        return Chunk(work.source, examples[0].form if examples else None, unread, made)

    def _made(self, example: Example, outcome: Outcome) -> Made:
        key = example.key
        about = replace(outcome, rows=(), dropped=BAD if outcome.error else outcome.dropped)
        return Made(
            key=bytes.fromhex(key[: 2 * KEY_BYTES]),
            held_out=bool(self._fraction) and is_held_out(key, example.group, self._fraction),
            rows=[_token_row(row) for row in outcome.rows],
            outcome=None if about == Outcome(place=outcome.place) else about,
        )


def _token_row(row: Encoded) -> TokenRow:
    ids, labels, prompt = (np.asarray(part, np.int32) for part in (row.input_ids, row.labels, row.prompt_ids))
    return TokenRow(ids, labels, prompt, row.reference, int((labels[1:] != IGNORED).sum()))


_of_process: list[_Maker] = []
"""Of a process of the pool: its own."""


def _begin(make: _Maker) -> None:
    """Called once in each process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the cores are shared out already
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _of_process[:] = [make]


def _end_with_parent() -> None:
    """A parent that is killed cannot end its processes, so they watch it."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "only processes of the pool watch"
    connection.wait([parent.sentinel])
    os._exit(1)


def _encode(work: Work) -> Chunk:
    return _of_process[0](work)


def is_held_out(key: str, group: str | None, fraction: float) -> bool:
    """Whether a row belongs to validation: decided by its group where it has one, else by its content, and by nothing else.

    So a row keeps its side when rows are added, removed or moved, and a larger `fraction` only adds rows to validation. `key` is
    `Example.key`; `group` is the value of `data.group_by`; `fraction` is in [0, 1).
    """
    digest = text_sha256(f"row {key}" if group is None else f"group {group}")
    return int(digest[:POSITION_DIGITS], 16) / 16**POSITION_DIGITS < fraction
