"""Rows to tokens by the chunk, in one process or many: in order, a bounded number at a time, the same for every number of processes."""

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
from dataclasses import replace
from multiprocessing import connection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sft_play.config.schema import Config
from sft_play.data.chat import IGNORED, Encoded
from sft_play.data.encode import Encoder, Outcome
from sft_play.data.example import BAD, Example
from sft_play.data.formats import understand
from sft_play.data.readers import Placed
from sft_play.errors import DataError, HardwareError
from sft_play.files import text_sha256
from sft_play.plan.hardware import cpu_threads

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
