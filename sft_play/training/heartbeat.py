"""A worker's signs of life, and what it does when nobody answers any more. Two daemon threads; the training thread never waits for them.

- `_beat` tells the launcher of this machine every second where the training thread stands, and every two seconds exchanges that with the
  ranks of other machines through the store of torchrun's agent. A launcher or an agent that is gone, or a rank of another machine that has been
  silent for 20 s, is a reason to leave with code 75. Ranks of this machine are judged by the launcher, which can look into `/proc`.
- `_guard` leaves when the store itself has not answered: a call to it may block on a dead link, so it needs a thread of its own.

Nothing is left half-done by leaving at once: checkpoints and models are published by rename.
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
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, TextIO

import psutil

from sft_play.errors import RetryableError, UserError
from sft_play.launch.beats import LIMITS, MARK, Beat, Sender
from sft_play.launch.verdict import LOST
from sft_play.launch.watch import STACKS_SIGNAL
from sft_play.runs.folder import RunFolder
from sft_play.training import collectives
from sft_play.training.exit_record import leave_record, lost_its_peer
from sft_play.training.memory_errors import Activity
from sft_play.training.reach import Door, answers
from sft_play.training.world import launched_world

TICK_SECONDS, PERIOD_SECONDS, DEAD_SECONDS = LIMITS.tick, 2.0, 20.0
PATIENT_SECONDS = 60.0
"""For ranks of other machines that load or save, and whose machine answers: reading and writing gigabytes may hold Python's lock, and with
it the beats. Whether it answers is looked at by rank 0, which all hear."""
FIXED = {"loading": 3600.0, "saving": 1800.0, "evaluating": 1800.0, "leaving": 1800.0}
"""Seconds without progress at least, by phase."""
MULTIPLE = {"loading": 6.0, "saving": 3.0, "evaluating": 3.0, "leaving": 3.0}
"""... or so many times the patience with a step, if that is more."""
LEAST_SECONDS, STEPS = 600.0, 10.0
TRACE_SECONDS, TRACE_SHARE = 5.0, 0.1
"""So long before its patience ends, or such a share of it if that is more (never before its half), a rank tells of its collective
operations: the launcher, and those of other machines, know of them when they judge."""


def patience(phase: str, typed: float | None, longest_step: float) -> float:
    """Returns the seconds that a training thread may stand still. `typed`: `launch.hang_seconds`, `None` for `auto`."""
    step = max(LEAST_SECONDS, STEPS * longest_step) if typed is None else typed
    return max(FIXED[phase], MULTIPLE[phase] * step) if phase in FIXED else step


class NotJoined(RetryableError):
    """Ranks that were started never came, or not in time."""

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.facts = {"cause": "not_joined", "blames": rank}
        """What the exit record holds beside code and error."""


@dataclass(kw_only=True, slots=True)
class Peer:
    """A rank under another launcher."""

    beat: Beat
    silent: float = 0.0
    """Seconds, counted while this thread ran: a process that was itself suspended blames nobody."""
    door: tuple[str, int] | None = None
    """Where its machine has answered this one; `None` where it never did (a firewall)."""


class Heartbeat:
    """The two threads of a worker. `begin`, then `join` once the plan is known; they end with the process."""

    def __init__(self, run: RunFolder, doing: Activity) -> None:
        self.run, self.doing = run, doing
        self.rank, self.world = launched_world()
        self.host = socket.gethostname()
        self.hang_seconds: float | None = None
        self._mark = os.environ.get(MARK, "")
        self._sender = Sender(self._mark or None)
        self._parent = os.getppid()
        self._number = 0
        self._store: Any = None
        self._peers: dict[int, Peer] = {}
        self._unanswered = 0.0
        self._door: Door | None = None
        self._leaving = threading.Lock()
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

    def join(self, *, hang_seconds: float | None, timeout_seconds: float) -> None:
        """Waits until every rank has come, and watches them from then on. Raises `NotJoined` naming those that did not come."""
        self.hang_seconds = hang_seconds
        if self.world > 1 and "MASTER_ADDR" in os.environ:
            store = open_store(DEAD_SECONDS)
            with contextlib.suppress(OSError, UserError):  # without it the others are patient
                self._door = Door(os.environ["MASTER_ADDR"])
                store.set(f"door/{self.rank}", json.dumps(self._door.address))
            self._peers = roll_call(store, self._now(), self.world, timeout_seconds)
            if self.rank == 0:
                find_doors(store, self._peers)
            self._store = store
            threading.Thread(target=self._guard, name="guard", daemon=True).start()

    def failed(self, problem: Exception) -> None:
        """Tells the other ranks that this one leaves with an error, unless it is only that a peer has gone."""
        self.over = True
        if self._store is not None and not lost_its_peer(problem):
            error = str(problem) or type(problem).__name__
            first = error.strip().splitlines()[0].removeprefix("error: ") if error.strip() else "it failed"
            self._abort("failed", self.rank, f"rank {self.rank} ({self.host}) failed: {first}")

    def done(self) -> None:
        """Tells the other ranks that this one has done its part."""
        self.over = True
        self.doing.enter("leaving", step=self.doing.step)

    # ---- The threads

    def _now(self) -> Beat:
        self._number += 1
        doing = self.doing
        quiet, limit = time.monotonic() - doing.since, patience(doing.phase, self.hang_seconds, doing.longest_step)
        stands = quiet > max(limit / 2, limit - max(TRACE_SECONDS, TRACE_SHARE * limit))
        return Beat(
            rank=self.rank, number=self._number, host=self.host, pid=os.getpid(), mark=self._mark, phase=doing.phase, step=doing.step,
            micro_step=doing.micro_step, quiet=quiet, limit=limit, collectives=collectives.begun() if stands else None,
            peers=[asdict(peer.beat) for peer in self._peers.values()],
        )  # fmt: skip

    def _beat(self) -> None:
        passed, traced = 0.0, 0.0
        while True:
            begun = time.monotonic()
            beat = self._now()
            if not self._sender.send(beat):
                self._leave("agent", None, "the launcher is gone")
            since = self.doing.since
            if beat.collectives is not None and traced != since:
                traced = since
                with contextlib.suppress(OSError):  # after the beat: a GPU that has gone may never answer
                    collectives.keep_trace(self.run.rank_collectives(self.rank))
            if not self._sender.works and os.getppid() != self._parent:  # else the launcher sees it, and may wait for a save
                self._leave("agent", None, "the process that had started this rank is gone")
            if self._store is not None and passed >= PERIOD_SECONDS:
                try:
                    self._exchange(passed)
                    self._unanswered, passed = 0.0, 0.0
                except RuntimeError as problem:  # torch's errors of a store: refused, reset, timed out
                    if not self.over:
                        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
                        self._leave("unreachable", None, f"no contact with the store at {where} any more: {str(problem)[:200]}")
                    self._store = None
            time.sleep(TICK_SECONDS)
            passed += min(time.monotonic() - begun, 2 * TICK_SECONDS)

    def _exchange(self, passed: float) -> None:
        """Writes this rank's beat, reads those of ranks under other launchers, and an order to leave."""
        mine = asdict(self._now()) | {"peers": [], "over": self.over}
        self._store.set(f"beat/{self.rank}", json.dumps(mine))
        if self._door:
            self._door.clear()
        if self._store.check(["abort"]) and not self.over:
            order = json.loads(self._store.get("abort"))
            self._leave(order["cause"], order["rank"], order["text"], tell=False)
        for rank, peer in self._peers.items():
            facts = json.loads(self._store.get(f"beat/{rank}"))
            beat = Beat.from_bytes(json.dumps(facts).encode())
            peer.silent = 0.0 if beat.number != peer.beat.number or facts["over"] else peer.silent + passed
            peer.beat = beat
            busy = beat.phase in ("loading", "saving") and not (
                peer.door and peer.silent > DEAD_SECONDS and not answers(peer.door)
            )
            if peer.silent > (PATIENT_SECONDS if busy else DEAD_SECONDS):
                text = f"rank {rank} ({beat.host}) has been silent for {peer.silent:.0f} s, last seen {beat.where()}"
                self._leave("unreachable", rank, text)

    def _guard(self) -> None:
        while not self.over:
            time.sleep(TICK_SECONDS)
            self._unanswered += TICK_SECONDS  # ticks, not the clock: while this process is suspended no time passes for it
            if self._unanswered > DEAD_SECONDS + 2 * PERIOD_SECONDS:
                where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
                self._leave(
                    "unreachable", None, f"the store at {where} has not answered for {self._unanswered:.0f} s", tell=False
                )

    def _abort(self, cause: str, rank: int | None, text: str) -> None:
        with contextlib.suppress(Exception):  # whoever cannot be told will notice the silence
            self._store.set("abort", json.dumps({"cause": cause, "rank": rank, "text": text}))

    def _leave(self, cause: str, rank: int | None, text: str, *, tell: bool = True) -> None:
        """Records why, ends what this process has started, and ends it. Does not return."""
        with self._leaving:
            if tell and self._store is not None and rank is not None:
                self._abort(cause, rank, text)
                if self.rank == 0:  # its agent ends with it, and the store with the agent: the others read the order first
                    time.sleep(PERIOD_SECONDS)
            if not self.over and not self.run.rank_exit(self.rank).exists():
                with contextlib.suppress(OSError):
                    leave_record(self.run, self.rank, {"code": LOST, "error": text, "cause": cause, "blames": rank})
            with contextlib.suppress(OSError, ValueError):
                print(f"error: {text}; rank {self.rank} leaves", file=sys.stderr, flush=True)
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    child.kill()
            os._exit(LOST)


def open_store(timeout_seconds: float) -> Any:
    """Returns a connection of our own to the store of node 0's agent, which outlives its workers."""
    from torch import distributed

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = datetime.timedelta(seconds=timeout_seconds)
    store = distributed.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return distributed.PrefixStore("sft_play", store)


def roll_call(store: Any, mine: Beat, world: int, timeout_seconds: float) -> dict[int, Peer]:
    """Waits for all ranks; returns those under other launchers. Raises `NotJoined`, which names who did not come."""
    store.set(f"beat/{mine.rank}", json.dumps(asdict(mine) | {"over": False}))
    until = time.monotonic() + timeout_seconds
    missing = list(range(world))
    while missing := [rank for rank in missing if not store.check([f"beat/{rank}"])]:
        if time.monotonic() > until:
            raise _not_joined(store, missing, world, timeout_seconds)
        time.sleep(0.2)
    beats = {rank: Beat.from_bytes(store.get(f"beat/{rank}")) for rank in range(world)}
    return {rank: Peer(beat=beat) for rank, beat in beats.items() if not mine.mark or beat.mark != mine.mark}


def find_doors(store: Any, peers: Mapping[int, Peer]) -> None:
    """Knocks once at every peer's door, all at once, and keeps those that answer."""
    places = {rank: json.loads(store.get(f"door/{rank}")) for rank in peers if store.check([f"door/{rank}"])}
    doors = {rank: (str(host), int(port)) for rank, (host, port) in places.items()}
    with ThreadPoolExecutor(max_workers=32) as pool:
        for (rank, door), open_ in zip(doors.items(), pool.map(answers, doors.values()), strict=True):
            peers[rank].door = door if open_ else None


def _not_joined(store: Any, missing: list[int], world: int, timeout_seconds: float) -> NotJoined:
    came = [Beat.from_bytes(store.get(f"beat/{rank}")) for rank in range(world) if rank not in missing]
    there = ", ".join(f"{beat.rank} ({beat.host})" for beat in came)
    who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
    return NotJoined(
        f"{who} of {world} did not join within {timeout_seconds:g} s (`launch.timeout_seconds`); there are: {there}",
        rank=missing[0],
    )


@contextlib.contextmanager
def beating(run: RunFolder, doing: Activity) -> Iterator[Heartbeat]:
    """Shows signs of life while the body works, and tells the others how it ended."""
    heart = Heartbeat(run, doing)
    heart.begin()
    try:
        yield heart
    except Exception as problem:
        heart.failed(problem)
        raise
    heart.done()


def hang_limit(setting: float | str) -> float | None:
    """Returns `launch.hang_seconds` as a number; `None` for `auto`."""
    return None if isinstance(setting, str) else float(setting)
