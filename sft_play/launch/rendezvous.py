"""What the launchers of several machines do together, from the first hello to the last exit: meet, share, settle, and what follows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from sft_play.errors import RetryableError, UserError
from sft_play.launch.agreement import errors_from_json, errors_to_json
from sft_play.launch.environment import port_is_free
from sft_play.launch.meeting import POLL_SECONDS, Given, Meeting
from sft_play.launch.node import Standings
from sft_play.launch.process import stop_code
from sft_play.launch.store import PERIOD_SECONDS, Seat, StoreGone, listed
from sft_play.launch.verdict import LOST, Outcome

PEER_SECONDS = 10.0
"""How much longer than `launch.silent_seconds` the cause of a connection that was lost may take to be known."""
LEAVE_SECONDS = 60.0
"""How long node 0 keeps the store for the others once its own part is done."""


class Rendezvous(Meeting):
    """This machine's part in a run on several. `open`, then for each attempt `meet`, `share`, `settle` and `follow`; at last `close`."""

    def ended_elsewhere(self, *, stopping: bool = False) -> Outcome | int | None:
        """Returns how the attempt ended on another machine: an outcome, or the signal with which all were asked to stop; `None` while it runs.

        Never waits: the thread has looked. `stopping`: this machine was asked to stop, which the others then learn.
        """
        now = time.monotonic()
        self._unheard, self._looked = self._unheard + min(now - self._looked, 2 * PERIOD_SECONDS), now
        if stopping and not self._told_stop:
            self._told_stop = True
            self._post_end({"stop": 15})
        if (end := self._ended) is not None:
            return int(end["stop"]) if "stop" in end else self._outcome(end)
        if not self._node_0_is_gone():
            return None
        how = "has left" if self._store and self._store.broken else f"has not answered for {self._unheard:.0f} s"
        return self._unreachable(0, how)

    def share_standings(self, mine: Standings | None) -> Standings | None:
        """Takes where this machine's ranks stand, all quiet for too long (`None`: they are not). On node 0, which settles it for all, returns where
        the ranks of all machines stand once that is so on each of them. Never waits."""
        self._standing = mine
        return self._standings if mine else None

    def ask_to_stop(self, why: str) -> None:
        """Node 0: asks all machines to save and leave, for another attempt; `why` is said with it."""
        self._post_end({"stop": 15, "why": why})

    def _outcome(self, end: Given) -> Outcome:
        if "lost" in end:
            return self._unreachable(int(end["lost"]), f"has been silent for {end.get('seconds')} s")
        if "errors" in end:
            error = errors_from_json(end["errors"])[0]
            return Outcome(code=error.exit_code, message=error.render())
        return Outcome(**end["outcome"])

    def _unreachable(self, rank: int, how: str) -> Outcome:
        first = sum(self.ranks_by_node[: self.members.index(rank)]) if rank in self.members else 0
        host = self.seats.get(rank, Seat()).host
        text = f"error: rank {first} ({host}) cannot be reached: {self._name(rank)} {how}; all ranks were stopped"
        hint = "see whether that machine is on and its network is up; what it still wrote is in its own output"
        return Outcome(code=LOST, rank=first, message=f"{text}\n\nhint: {hint}", cause="unreachable")

    def settle(self, outcome: Outcome) -> Outcome:
        """Returns how the attempt ended: the same on every machine, by the one that saw the first cause.

        A machine whose ranks all did their work has nothing to settle; one whose ranks only lost a connection waits for the cause.
        """
        if outcome.code == 0:
            return outcome
        until = time.monotonic() + self.silent_seconds + PEER_SECONDS
        while outcome.cause == "peer" and time.monotonic() < until and self.ended_elsewhere() is None:
            time.sleep(POLL_SECONDS)
        found = self.ended_elsewhere()
        if isinstance(found, Outcome):
            return found
        end = self._post_end({"outcome": asdict(replace(outcome, host=self.host))})
        if "stop" not in end:
            return self._outcome(end)
        if outcome.cause in ("peer", "killed", "agent"):  # the others had left before it
            return Outcome(code=stop_code(int(end["stop"])), stop=outcome.stop)
        return outcome

    @property
    def grown_because(self) -> str:
        """Why node 0 asked all to leave for another attempt; empty where it did not."""
        return str((self._ended or {}).get("why") or "")

    def follow(self, decide: Callable[[], Given]) -> Given | None:
        """Returns what node 0 decides after the end of an attempt; `None` where node 0 does not answer. Ends the attempt."""
        if self._node_0_is_gone():
            return None
        name = f"{self.attempt}/next"
        try:
            if self.node.rank == 0:
                found = decide()
                self._opened.set(name, found)
            while self.node.rank and (found := self._opened.get(name)) is None:
                self._pause_as_one_of_many()
            self._before, self.members = self.members, []
            self.attempt += 1
            self._told_stop, self._standing, self._stood, self._standings = False, None, False, None
            if self.node.rank == 0 and found.get("again"):
                self._opened.set("attempt", self.attempt)
        except StoreGone:
            return None
        return dict(found)

    def workers_port(self) -> int:
        """Node 0: returns a port for the workers' store of this attempt, MASTER_PORT + 1 + attempt or the next that is free."""
        first = self.node.master_port + 1 + self.attempt
        return next((port for port in range(first, min(first + 100, 65536)) if port_is_free(port)), first)

    def own_addresses(self) -> list[str]:
        """Returns this machine's own addresses on the way to others."""
        seats = [seat.master for rank, seat in self.seats.items() if rank and rank in self.members]
        return seats if self.node.rank == 0 else [self._mine.address]

    # ---- The end

    def fail(self, error: BaseException) -> None:
        """Tells all why this machine, where it takes part in the attempt, leaves, unless they know. Raises nothing."""
        if self._store is not None and self._taking_part and not self._node_0_is_gone() and self._ended is None:
            with contextlib.suppress(BaseException):
                self._post_end({"errors": errors_to_json(why(error, self.name))})

    def close(self) -> None:
        """Leaves in order. Node 0 keeps the store until the others have left, or are silent."""
        if (store := self._store) is None:
            return
        with contextlib.suppress(StoreGone, KeyboardInterrupt, SystemExit):
            if self._node_0_is_gone():
                raise StoreGone
            store.ask(lambda raw: raw.append("left", f"{self._mine.session} "))
            until = time.monotonic() + LEAVE_SECONDS
            if self.node.rank == 0:  # machines may still wait for a decision
                store.ask(lambda raw: store.first(raw, f"{self.attempt}/next", {"again": False}))
            while self.node.rank == 0 and time.monotonic() < until and self._stay():
                time.sleep(POLL_SECONDS)
        store.close()
        self._store = None

    def _stay(self) -> bool:
        left = self._opened.ask(lambda raw: raw.get("left") if raw.check(["left"]) else b"").split()
        return any(session.encode() not in left and not self._is_silent(rank) for rank, session in self._watched.items() if rank)

    def look_for_wants(self, judge: Callable[[Given], list[UserError]]) -> list[int]:
        """Node 0: returns the ranks of machines that wait for the next attempt and may be taken; refuses those that may not."""
        store = self._opened

        def do(raw: Any) -> dict[int, Any]:
            return {rank: (store.read(raw, f"seat/{rank}"), store.read(raw, f"want/{rank}")) for rank in listed(raw, "want")}

        for rank, (seat, want) in store.ask(do).items():
            if rank in self.members or rank in self.wants or not isinstance(seat, dict) or not isinstance(want, dict):
                continue
            self.seats[rank] = Seat.of(seat)
            if want.get("session") != self.seats[rank].session:
                continue
            if errors := judge(want.get("facts") or {}):
                self._leave_out(rank, errors)
            else:
                self.wants[rank] = want["facts"]
                self._watched[rank] = self.seats[rank].session
        return [rank for rank in self.wants if not self._is_silent(rank)]


def why(error: BaseException, name: str) -> list[UserError]:
    """Returns what the other machines are told of an error that made this one leave."""
    if isinstance(error, UserError):
        told = []
        for one in errors_from_json(errors_to_json([error])):
            where = f"{one.place}: " if one.place else ""
            told.append(type(one)(f"{name} could not continue: {where}{one.message}", hint=one.hint))
        return told
    if isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code in (130, 143)):
        return [RetryableError(f"{name} was stopped on request before its workers started")]
    if isinstance(error, SystemExit) and type(error.code) is int and 2 <= error.code <= 5:
        said = f"{name} could not prepare the run: its own output says why"
        return errors_from_json([{"code": error.code, "message": said}])
    return [RetryableError(f"{name} left before its workers started; its own output says why")]
