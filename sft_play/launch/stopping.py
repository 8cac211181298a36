"""The launcher's part in a stop on request: it hears the signal, asks the workers, and sees to it that they have left in time."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType

import psutil

from sft_play.launch.run_folder import signals_to_hear
from sft_play.launch.watch import Watch, is_alive

LEAVE_SECONDS = 24.0
"""After a request, until workers that have not left are killed; but for those that write a checkpoint."""
SAME_SECONDS = 0.5
"""A Ctrl-C that comes again within this time is the same one, heard twice (by make, by a wrapper)."""
FRESH_SECONDS = 5.0
"""A worker that has said for longer than this that it saves may be frozen."""


@dataclass(kw_only=True, slots=True)
class Stop:
    """The requests that have arrived, and which workers know of them."""

    signals: list[int] = field(default_factory=list)
    """The first, and a Ctrl-C after it, which kills. Schedulers repeat their signals: those say nothing new."""
    since: float = 0.0
    asked: set[psutil.Process] = field(default_factory=set)

    def note(self, number: int, _: FrameType | None = None) -> None:
        """Takes up a signal (as a handler, too)."""
        now = time.monotonic()
        if not self.signals:
            self.signals.append(number)
            self.since = now
        elif number == signal.SIGINT and now - self.since > SAME_SECONDS:
            self.signals.append(number)

    @property
    def wanted(self) -> bool:
        """Whether a stop was asked for."""
        return bool(self.signals)

    @property
    def at_once(self) -> bool:
        """Whether a second Ctrl-C came."""
        return len(self.signals) > 1

    def ask(self, process: subprocess.Popen[bytes], watch: Watch) -> None:
        """Sends SIGTERM to the workers themselves, each once, those that start only now included.

        Not to the agent: the launcher of a single process would die and leave its worker behind. Only where there is no worker yet
        it is ended, since there is nothing to save.
        """
        workers = [worker for worker in watch.workers if is_alive(worker)]
        for worker in workers:
            if worker not in self.asked:
                self.asked.add(worker)
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.terminate()
        if not workers and process.poll() is None and not self.asked:
            process.terminate()

    def is_done(self, watch: Watch) -> bool:
        """Whether all workers have left and said why: then nobody needs to wait for their parent's clearing up."""
        left = bool(watch.workers) and not any(is_alive(worker) for worker in watch.workers)
        return left and all(watch.run.rank_exit(rank).is_file() for rank in watch.ranks)

    def late(self, watch: Watch) -> list[int]:
        """Returns the ranks that should have left by now, and do not write a checkpoint."""
        if time.monotonic() - self.since < LEAVE_SECONDS:
            return []
        return [rank for worker, rank in watch.workers.items() if is_alive(worker) and not _saves(watch, rank)]


def _saves(watch: Watch, rank: int) -> bool:
    beat = watch.beats.latest.get(rank)
    return beat is not None and beat.phase == "saving" and time.monotonic() - watch.beats.heard[rank] < FRESH_SECONDS


@contextlib.contextmanager
def signals_noted(stop: Stop) -> Iterator[None]:
    """Lets `stop` hear the signals meanwhile."""
    previous = {number: signal.signal(number, stop.note) for number in signals_to_hear()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def say(text: str) -> None:
    """Tells the user, on stderr."""
    print(f"\n{text}", file=sys.stderr, flush=True)
