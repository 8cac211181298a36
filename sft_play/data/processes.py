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
from dataclasses import dataclass, field
from multiprocessing import connection
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sft_play.config.schema import Config
from sft_play.data.chat import IGNORED
from sft_play.data.encode import Encoder, Outcome
from sft_play.data.example import BAD, Example
from sft_play.data.formats import understand
from sft_play.data.select import KEY_BYTES, is_held_out
from sft_play.data.sources import Placed
from sft_play.errors import DataError, HardwareError
from sft_play.plan.detect import cpu_threads

SMALL_ROWS = 2_000
"""With `data.num_proc: auto`, fewer rows than this are prepared in this process: starting others would take longer."""
SMALL_CHUNKS = 4
"""The same for long rows, of which a chunk holds fewer."""
WAITING = 3
"""Chunks on their way for each process: one in work, and enough that it never waits."""


class Engine:
    """Encodes chunks. A context manager: leaving it ends the processes that it started, whatever happened."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self._setup = (config, tokenizer)
        self._encoder: Encoder | None = None
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def run(self, works: Iterable[Work], *, fraction: float) -> Iterator[Chunk]:
        """Yields the chunk of each work, in order. Raises `DataError`, and `HardwareError` when a process was killed.

        `works` is read as chunks are taken: at most `WAITING` for each process are in memory.
        """
        coming = iter(works)
        first, processes = self._first(coming)
        works = itertools.chain(first, coming)
        if processes == 1:
            yield from self._here(works, fraction)
        else:
            yield from self._elsewhere(works, fraction, processes)

    def _first(self, works: Iterator[Work]) -> tuple[list[Work], int]:
        """Returns the first works, and how many processes the whole deserves."""
        typed = self._setup[0].data.num_proc
        if isinstance(typed, int):
            return [], typed
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

    def _here(self, works: Iterable[Work], fraction: float) -> Iterator[Chunk]:
        if self._encoder is None:
            self._encoder = Encoder(*self._setup)
        for work in works:
            yield make_chunk(work, self._encoder, group_by=self._setup[0].data.group_by, fraction=fraction)

    def _elsewhere(self, works: Iterable[Work], fraction: float, processes: int) -> Iterator[Chunk]:
        if self._pool is None:
            self._pool = _start(processes, self._setup)
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


def _start(processes: int, setup: tuple[Config, Any]) -> ProcessPoolExecutor:
    """Starts the processes.

    On Linux they are forked: that takes milliseconds where importing transformers takes seconds. It is safe because the tokenizer has
    not run here yet, so none of its threads exists, and in the processes it starts none. Elsewhere they are spawned.
    """
    method = "fork" if sys.platform == "linux" else "spawn"
    return ProcessPoolExecutor(processes, multiprocessing.get_context(method), initializer=_begin, initargs=setup)


class _Worker:
    """What a process keeps from chunk to chunk."""

    setup: tuple[Config, Any]
    encoder: Encoder | None = None


def _begin(config: Config, tokenizer: Any) -> None:
    """Called once in each process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the cores are shared out already
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _Worker.setup, _Worker.encoder = (config, tokenizer), None


def _end_with_parent() -> None:
    """A parent that is killed cannot end its processes, so they watch it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        with contextlib.suppress(OSError):
            connection.wait([parent.sentinel])
        os._exit(1)


def _encode(work: Work, fraction: float) -> Chunk:
    if _Worker.encoder is None:  # here and not in `_begin`, since an error must reach the parent
        _Worker.encoder = Encoder(*_Worker.setup)
    return make_chunk(work, _Worker.encoder, group_by=_Worker.setup[0].data.group_by, fraction=fraction)


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
    encode: bool = True
    """False once a row was found that cannot be read: the rest is only checked, so that all problems are told at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A row that cannot be prepared."""

    place: str
    message: str
    hint: str | None
    reading: bool
    """Whether the row itself is wrong; else its tokens are."""

    @property
    def error(self) -> DataError:
        return DataError(self.message, place=self.place, hint=self.hint)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """What became of the rows of one `Work`, in order. Examples are what was read; each gives no row, one, or several."""

    source: int
    forms: Mapping[str, int]
    refused: Sequence[Refusal]
    keys: bytes
    """A hash of each example's content, `KEY_BYTES` each."""
    held_out: NDArray[np.bool_]
    """By example."""
    rows_of: Integers
    """Rows that each example gave."""
    dropped: Mapping[int, str]
    """Why an example gave none."""
    overlong: Mapping[int, tuple[str, int]]
    """Place and tokens of the examples that are longer than `model.max_seq_len`, whatever became of them."""
    lost: Mapping[int, frozenset[str]]
    """What the examples that were cut have lost, in words."""
    answers_cut: Mapping[int, int]
    """Answers that lost their end, by the examples that have any."""
    thoughts: Mapping[int, int]
    """Thoughts that the chat template left out, by the examples that have any."""
    empty_thoughts: Mapping[int, int]
    """Learnt answers that the chat template begins with an empty thought, by the examples that have any."""
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


@dataclass(kw_only=True, slots=True)
class _Read:
    examples: list[Example] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)


def make_chunk(work: Work, encoder: Any, *, group_by: str | None, fraction: float) -> Chunk:
    """Understands and encodes the rows of `work`. `encoder` is an `encode.Encoder`; what is wrong with a row is in `refused`."""
    read = _read(work, group_by)
    examples = read.examples
    outcomes: Sequence[Outcome] = encoder.encode(examples) if work.encode and examples else ()
    refused = [*read.refused]
    for example, outcome in zip(examples, outcomes, strict=False):
        if _is_bad(outcome):
            assert outcome.error is not None
            refused.append(_refusal(outcome.error, example.place, reading=False))
    return _chunk(work.source, examples, outcomes, refused, fraction)


def _read(work: Work, group_by: str | None) -> _Read:
    read = _Read()
    for placed in work.rows:
        try:
            read.examples.append(understand(placed, work.source, work.form, group_by=group_by))
        except DataError as error:
            read.refused.append(_refusal(error, placed[0], reading=True))
    return read


def _is_bad(outcome: Outcome) -> bool:
    """Whether a row is wrong; what is too long is counted and told once."""
    return outcome.error is not None and not outcome.overlong


def _refusal(error: DataError, place: str, *, reading: bool) -> Refusal:
    return Refusal(place=error.place or place, message=error.message, hint=error.hint, reading=reading)


def _chunk(
    source: int, examples: Sequence[Example], outcomes: Sequence[Outcome], refused: Sequence[Refusal], fraction: float
) -> Chunk:
    rows = [row for outcome in outcomes for row in outcome.rows]
    lengths = _integers(len(row.input_ids) for row in rows)
    labels = _joined(row.labels for row in rows)
    keys = [example.key for example in examples]
    return Chunk(
        source=source,
        forms=Counter(example.form for example in examples),
        refused=refused,
        keys=b"".join(bytes.fromhex(key[: 2 * KEY_BYTES]) for key in keys),
        held_out=np.fromiter(
            (bool(fraction) and is_held_out(key, example.group, fraction) for key, example in zip(keys, examples, strict=True)),
            np.bool_, len(keys),
        ),
        rows_of=_integers(len(outcome.rows) for outcome in outcomes) if outcomes else np.zeros(len(examples), np.int32),
        dropped={i: why for i, o in enumerate(outcomes) if (why := BAD if _is_bad(o) else o.dropped) is not None},
        overlong={i: (examples[i].place, outcome.overlong) for i, outcome in enumerate(outcomes) if outcome.overlong},
        lost={index: outcome.lost for index, outcome in enumerate(outcomes) if outcome.lost},
        answers_cut={index: outcome.answers_cut for index, outcome in enumerate(outcomes) if outcome.answers_cut},
        thoughts={index: outcome.thoughts for index, outcome in enumerate(outcomes) if outcome.thoughts},
        empty_thoughts={index: outcome.empty_thoughts for index, outcome in enumerate(outcomes) if outcome.empty_thoughts},
        lengths=lengths,
        trained=trained_tokens(lengths, labels),
        prompt_lengths=_integers(len(row.prompt_ids) for row in rows),
        input_ids=_joined(row.input_ids for row in rows),
        labels=labels,
        prompt_ids=_joined(row.prompt_ids for row in rows),
        references=[row.reference for row in rows],
    )  # fmt: skip


def trained_tokens(lengths: Integers, labels: Integers) -> Integers:
    """Returns the trained tokens of each row, after the shift by one. `labels` holds the rows one after another; none is empty."""
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
    """Returns about how many characters a row holds: its texts, one level deep."""
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
    """Returns the characters of a turn that nobody has checked yet: its text may be a number, or a list of parts."""
    content = turn.get("content") or turn.get("value")
    if isinstance(content, str):
        return len(content)
    return sum(len(str(part)) for part in content) if isinstance(content, list) else 8
