"""Chunks of rows through one process or many: in order, with a bounded number on the way, the same for every number of processes."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from types import TracebackType
from typing import Any

from sft_play.config.schema import Config
from sft_play.data.chunks import Chunk, Work, make_chunk
from sft_play.data.encode import Encoder
from sft_play.errors import HardwareError
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
