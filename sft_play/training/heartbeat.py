"""A worker's signs of life: a daemon thread tells the launcher of this machine every second where the training thread stands.

Ranks are judged by their own launcher, which can look into `/proc`, and machines by each other's (`launch.rendezvous`). A launcher that is gone is a
reason to leave with code 75; nothing is left half-done by leaving at once, since checkpoints and models are published by rename.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import psutil

from sft_play.config.schema import LaunchConfig
from sft_play.errors import RetryableError
from sft_play.files import write_text
from sft_play.launch.liveness import LIMITS, MARK, STACKS_SIGNAL, Beat, Sender
from sft_play.launch.verdict import LOST
from sft_play.runs.folder import RunFolder
from sft_play.training.process import Activity, launched_world, leave_record

FIXED = {"loading": 3600.0, "saving": 1800.0, "evaluating": 1800.0, "leaving": 1800.0}
"""Seconds without progress at least, by phase."""
MULTIPLE = {"loading": 6.0, "saving": 3.0, "evaluating": 3.0, "leaving": 3.0}
"""... or so many times the patience with a step, if that is more."""
LEAST_SECONDS, STEPS = 600.0, 10.0
TRACE_SECONDS, TRACE_SHARE = 5.0, 0.1
"""So long before its patience ends, or such a share of it if that is more (never before its half), a rank tells of its collective
operations: the launchers know of them when they judge."""


def patience(phase: str, typed: float | None, longest_step: float) -> float:
    """Returns the seconds that a training thread may stand still. `typed`: `launch.hang_seconds`, `None` for `auto`."""
    step = max(LEAST_SECONDS, STEPS * longest_step) if typed is None else typed
    return max(FIXED[phase], MULTIPLE[phase] * step) if phase in FIXED else step


class NotJoined(RetryableError):
    """Ranks that were started never came, or not in time."""

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.facts = {"cause": "not_joined", "blames": rank}
        """What the exit record holds in addition to code and error."""


class Heartbeat:
    """The thread of a worker. `begin`, then `join` once the plan is known; it ends with the process."""

    def __init__(self, run: RunFolder, activity: Activity) -> None:
        self.run, self.activity = run, activity
        self.rank, self.world = launched_world()
        self.host = socket.gethostname()
        self.hang_seconds: float | None = None
        self._sender = Sender(os.environ.get(MARK))
        self._parent = os.getppid()
        self._stacks: TextIO | None = None
        self.over = False
        """The training thread has done its work, or failed and says so itself."""

    def begin(self) -> None:
        """Starts telling the launcher, and makes this process answer when it is asked for its stacks."""
        path = self.run.rank_stack(self.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stacks = path.open("a", encoding="utf-8")
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True)
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def join(self, launch: LaunchConfig) -> None:
        """Waits until every rank has come. Raises `NotJoined` naming those that did not."""
        self.hang_seconds = None if isinstance(launch.hang_seconds, str) else float(launch.hang_seconds)
        if self.world > 1 and "MASTER_ADDR" in os.environ:
            roll_call(open_store(launch.timeout_seconds), self.rank, self.host, self.world, launch.timeout_seconds)

    def _now(self) -> Beat:
        doing = self.activity
        quiet, limit = time.monotonic() - doing.since, patience(doing.phase, self.hang_seconds, doing.longest_step)
        stands = quiet > max(limit / 2, limit - max(TRACE_SECONDS, TRACE_SHARE * limit))
        return Beat(
            rank=self.rank, host=self.host, pid=os.getpid(), phase=doing.phase, step=doing.step,
            micro_step=doing.micro_step, quiet=quiet, limit=limit, collectives=collectives_begun() if stands else None,
        )  # fmt: skip

    def _beat(self) -> None:
        traced = 0.0
        while True:
            beat = self._now()
            if not self._sender.send(beat):
                self._leave("the launcher is gone")
            since = self.activity.since
            if beat.collectives is not None and traced != since:
                traced = since
                with contextlib.suppress(OSError):  # after the beat: a GPU that has gone may never answer
                    keep_trace(self.run.rank_collectives(self.rank))
            if not self._sender.works and os.getppid() != self._parent:  # else the launcher sees it, and may wait for a save
                self._leave("the process that had started this rank is gone")
            time.sleep(LIMITS.tick)

    def _leave(self, text: str) -> None:
        """Records why, ends what this process has started, and ends it. Does not return."""
        if not self.over and not self.run.rank_exit(self.rank).exists():
            with contextlib.suppress(OSError):
                leave_record(self.run, self.rank, {"code": LOST, "error": text, "cause": "agent", "blames": None})
        with contextlib.suppress(OSError, ValueError):
            print(f"error: {text}; rank {self.rank} leaves", file=sys.stderr, flush=True)
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        os._exit(LOST)


def open_store(timeout_seconds: float) -> Any:
    """Returns a connection of our own to the workers' store, which node 0's agent serves."""
    from torch import distributed

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = datetime.timedelta(seconds=timeout_seconds)
    store = distributed.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return distributed.PrefixStore("sft_play", store)


def roll_call(store: Any, rank: int, host: str, world: int, timeout_seconds: float) -> None:
    """Waits until all ranks have come. Raises `NotJoined`, which names who has not."""
    store.set(f"here/{rank}", host)
    try:
        store.wait([f"here/{one}" for one in range(world)], datetime.timedelta(seconds=timeout_seconds))
    except RuntimeError as error:  # it timed out, or is gone
        here = {one: store.get(f"here/{one}").decode() for one in range(world) if store.check([f"here/{one}"])}
        missing = [one for one in range(world) if one not in here]
        if not missing:
            raise
        who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
        there = ", ".join(f"{one} ({name})" for one, name in here.items())
        text = f"{who} of {world} did not join within {timeout_seconds:g} s (`launch.timeout_seconds`); there are: {there}"
        raise NotJoined(text, rank=missing[0]) from error


@contextlib.contextmanager
def beating(run: RunFolder, activity: Activity) -> Iterator[Heartbeat]:
    """Shows signs of life while the body works."""
    heart = Heartbeat(run, activity)
    heart.begin()
    try:
        yield heart
    finally:
        heart.over = True
    activity.enter("leaving", step=activity.step)


DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Functions of `torch._C._distributed_c10d` that tell what its flight recorder knows, as JSON: of builds with NCCL, and of all."""


def collectives_begun() -> int | None:
    """Returns how many collective operations this rank has enqueued, in all process groups; `None` where torch does not tell."""
    each = [dump["pg_status"].values() for dump in _dumps(entries=False)]
    return max((sum(int(group["last_enqueued_collective"]) for group in groups) for groups in each), default=None)


def keep_trace(path: Path) -> None:
    """Writes the last collective operations of this rank, with their sizes and states, as JSON; nothing where there were none."""
    if found := next(iter(_dumps(entries=True)), None):
        write_text(path, json.dumps(found) + "\n")


def _dumps(*, entries: bool) -> list[dict[str, Any]]:
    """Returns those dumps that know of process groups. torch's own files are pickles; this reads its memory."""
    module = sys.modules.get("torch._C._distributed_c10d")
    functions = [getattr(module, name) for name in DUMPS if hasattr(module, name)]
    found = [json.loads(function(includeCollectives=entries, onlyActive=False)) for function in functions]
    return [dump for dump in found if dump.get("pg_status")]
