"""Chunks of rows through one process or many: in order, a bounded number at a time, the same for every number of processes."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sft_play.config.schema import Config
from sft_play.data.chat import IGNORED
from sft_play.data.encode import Encoder, Outcome
from sft_play.data.example import BAD, Example
from sft_play.data.formats import understand
from sft_play.data.readers import Placed
from sft_play.errors import DataError, HardwareError
from sft_play.files import text_sha256
from sft_play.plan.hardware import cpu_threads

SMALL_ROWS = 2_000
"""With `data.num_proc: auto`, fewer rows than this are prepared in this process: starting others would take longer."""
SMALL_CHUNKS = 4
"""The same for long rows, of which a chunk holds fewer."""
WAITING = 3
"""Chunks on their way for each process: one in work, and enough that it never waits."""


class Engine:
    """Encodes chunks. A context manager: leaving it ends the processes that it started, whatever happened."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self._num_proc, self._make = config.data.num_proc, _Maker(config, tokenizer)
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def run(self, works: Iterable[Work], *, fraction: float) -> Iterator[Chunk]:
        """Yield the chunk of each work, in order. Raises `DataError`, and `HardwareError` when a process was killed.

        `works` is read as chunks are taken: at most `WAITING` for each process are in memory.
        """
        coming = iter(works)
        first, processes = self._first(coming)
        works = itertools.chain(first, coming)
        if processes == 1:
            yield from (self._make(work, fraction) for work in works)
        else:
            yield from self._elsewhere(works, fraction, processes)

    def _first(self, works: Iterator[Work]) -> tuple[list[Work], int]:
        """Return the first works, and how many processes the whole deserves."""
        if isinstance(self._num_proc, int):
            return [], self._num_proc
        cores = cpu_threads()
        first: list[Work] = []
        rows = 0
        while cores > 1 and self._pool is None:
            work = next(works, None)
            if work is None:
                return first, 1
            first.append(work)
            rows += len(work.rows)
            if rows >= SMALL_ROWS or len(first) > max(SMALL_CHUNKS, cores):
                break
        return first, cores

    def _elsewhere(self, works: Iterable[Work], fraction: float, processes: int) -> Iterator[Chunk]:
        if self._pool is None:
            self._pool = _start(processes, self._make)
        waiting: deque[Future[Chunk]] = deque()
        try:
            for work in works:
                waiting.append(self._pool.submit(_encode, work, fraction))
                if len(waiting) >= WAITING * processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise HardwareError(
                "a process that prepares the data was killed, most likely because the memory ran out",
                hint=f"use fewer processes than {processes}: DATA_NUM_PROC=1",
            ) from None


def _start(processes: int, make: _Maker) -> ProcessPoolExecutor:
    """Start the processes.

    On Linux they are forked: that takes milliseconds where importing transformers takes seconds. It is safe because the tokenizer has
    not run here yet, so none of its threads exists, and in the processes it starts none. Elsewhere they are spawned.
    """
    method = "fork" if sys.platform == "linux" else "spawn"
    return ProcessPoolExecutor(processes, multiprocessing.get_context(method), initializer=_begin, initargs=(make,))


class _Maker:
    """Makes chunks. The encoder is made with the first one, where an error of it reaches the caller."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._encoder: Encoder | None = None

    def __call__(self, work: Work, fraction: float) -> Chunk:
        self._encoder = self._encoder or Encoder(self._config, self._tokenizer)
        return make_chunk(work, self._encoder, group_by=self._config.data.group_by, fraction=fraction)


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
    if parent is not None:
        with contextlib.suppress(OSError):
            connection.wait([parent.sentinel])
        os._exit(1)


def _encode(work: Work, fraction: float) -> Chunk:
    return _of_process[0](work, fraction)


# What goes to the processes that prepare the data, and what comes back: rows by the chunk, tokens as arrays of 32-bit integers.


Integers = NDArray[np.int32]
CHUNK_ROWS = 256
CHUNK_CHARACTERS = 1_000_000
"""A chunk ends with either, so that neither short rows cost a message each, nor long documents the memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Rows of one source, as they were read."""

    source: int
    """Index into the split's sources."""
    form: str | None
    """The source's format; `None` where it is not known yet."""
    rows: Sequence[Placed]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """What became of the rows of one `Work`, in order. Examples are what was read; each gives no row, one, or several."""

    source: int
    forms: Mapping[str, int]
    unread: Sequence[DataError]
    """What is wrong with rows themselves, each with its place."""
    unencoded: Sequence[DataError]
    """What is wrong with the tokens of examples."""
    keys: bytes
    """A hash of each example's content, `KEY_BYTES` each."""
    held_out: NDArray[np.bool_]
    """By example."""
    rows_of: Integers
    """Rows that each example gave."""
    told: Mapping[int, Outcome]
    """Of the examples that were skipped, cut or lost something: what there is to say, without rows."""
    lengths: Integers
    """By row."""
    trained: Integers
    """Tokens that a loss is computed for, by row: the first one follows nothing, and never is."""
    prompt_lengths: Integers
    """By row."""
    input_ids: Integers
    """Of all rows, one after another; as are `labels` and `prompt_ids`."""
    labels: Integers
    prompt_ids: Integers
    references: Sequence[str]

    @property
    def examples(self) -> int:
        return len(self.rows_of)

    def key(self, example: int) -> bytes:
        return self.keys[example * KEY_BYTES : (example + 1) * KEY_BYTES]


def make_chunk(work: Work, encoder: Encoder, *, group_by: str | None, fraction: float) -> Chunk:
    """Understand and encode the rows of `work`; what is wrong with a row is in `refused`."""
    examples: list[Example] = []
    unread: list[DataError] = []
    for placed in work.rows:
        try:
            examples.append(understand(placed, work.source, work.form, group_by=group_by))
        except DataError as error:
            unread.append(error)
    outcomes = encoder.encode(examples)
    told: dict[int, Outcome] = {}
    for index, outcome in enumerate(outcomes):
        about = replace(outcome, rows=(), error=None, dropped=BAD if outcome.error else outcome.dropped)
        if about != Outcome(place=outcome.place):
            told[index] = about
    rows = [row for outcome in outcomes for row in outcome.rows]
    lengths = _integers(len(row.input_ids) for row in rows)
    labels = _joined(row.labels for row in rows)
    keys = [example.key for example in examples]
    sides = (bool(fraction) and is_held_out(key, one.group, fraction) for key, one in zip(keys, examples, strict=True))
    return Chunk(
        source=work.source,
        forms=Counter(example.form for example in examples),
        unread=unread,
        unencoded=[outcome.error for outcome in outcomes if outcome.error],
        keys=b"".join(bytes.fromhex(key[: 2 * KEY_BYTES]) for key in keys),
        held_out=np.fromiter(sides, np.bool_, len(keys)),
        rows_of=_integers(len(outcome.rows) for outcome in outcomes),
        told=told,
        lengths=lengths,
        trained=trained_tokens(lengths, labels),
        prompt_lengths=_integers(len(row.prompt_ids) for row in rows),
        input_ids=_joined(row.input_ids for row in rows),
        labels=labels,
        prompt_ids=_joined(row.prompt_ids for row in rows),
        references=[row.reference for row in rows],
    )


def trained_tokens(lengths: Integers, labels: Integers) -> Integers:
    """Return the trained tokens of each row, after the shift by one. `labels` holds the rows one after another; none is empty."""
    if not len(lengths):
        return lengths
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    trained = (labels != IGNORED).astype(np.int32)
    trained[starts] = 0
    return np.add.reduceat(trained, starts, dtype=np.int32)


def _integers(values: Iterable[int]) -> Integers:
    return np.fromiter(values, np.int32)


def _joined(parts: Iterable[Sequence[int]]) -> Integers:
    arrays = [np.asarray(part, np.int32) for part in parts]
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int32)


def size_of(row: Mapping[str, Any] | DataError) -> int:
    """Return about how many characters a row holds: its texts, one level deep."""
    if isinstance(row, DataError):
        return len(row.message)
    size = 0
    for value in row.values():
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, (list, tuple)):
            size += sum(_turn_size(part) if isinstance(part, dict) else 8 for part in value)
    return size


def _turn_size(turn: Mapping[str, Any]) -> int:
    """Return the characters of a turn that nobody has checked yet: its text may be a number, or a list of parts."""
    content = turn.get("content") or turn.get("value")
    if isinstance(content, str):
        return len(content)
    return sum(len(str(part)) for part in content) if isinstance(content, list) else 8


# Which side of a split a row falls on, which rows are copies, and what training and validation share. Standard library only.


KEY_BYTES = 16
"""Of a row's content hash, what is kept to find copies: a chance meeting among 10 million rows has a probability of 1e-25."""
POSITION_DIGITS = 12
"""Hexadecimal digits of a hash that tell a row's place between 0 and 1."""


def is_held_out(key: str, group: str | None, fraction: float) -> bool:
    """Whether a row belongs to validation: decided by its group where it has one, else by its content, and by nothing else.

    So a row keeps its side when rows are added, removed or moved, and a larger `fraction` only adds rows to validation. `key` is
    `Example.key`; `group` is the value of `data.group_by`; `fraction` is in [0, 1).
    """
    digest = text_sha256(f"row {key}" if group is None else f"group {group}")
    return int(digest[:POSITION_DIGITS], 16) / 16**POSITION_DIGITS < fraction
