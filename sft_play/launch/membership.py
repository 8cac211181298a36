"""Who takes part in a run on several machines: seats in the launchers' store (`launch/store.py`), beats, and why an
attempt ended.

Keys of the store, `A` being the attempt and `K` a machine's `NODE_RANK`:

    session            what run this is, and a random word that all values are bound to
    seat/K             who has this node rank; beat/SESSION changes while that launcher lives, and says where its ranks stand still
    A/STEP/K           what a machine gives in a step (`facts`, `prepared`); A/STEP lists who has; A/STEP/all is what node 0 made of it
    A/end              why the attempt ended: the first to write it settles it for all (errors, an outcome, or a request to stop)
    A/next             what node 0 makes of that: another attempt, or the end
    left               who has ended in order

What every machine does costs node 0 a few requests a second (docs/adr/0011-torchelastic.md). The workers' own store is
another one, on a port of its own for each attempt: one that is used again holds addresses of dead ranks.
"""

from __future__ import annotations

import contextlib
import functools
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from sft_play.errors import CheckpointError, DataError, HardwareError, Problems, RetryableError, UserError
from sft_play.launch.environment import Node
from sft_play.launch.node import Standings
from sft_play.launch.store import PERIOD_SECONDS, Store, StoreGone, list_words, pause, reach, serve

Given = dict[str, Any]
POLL_SECONDS = 0.2
GRACE_SECONDS = 3.0
"""How long others may still come, and their differences with them, when it is clear that the run is refused."""
LEAVE_SECONDS = 60.0
"""How long node 0 keeps the store for the others once its own part is done."""


class Membership:
    """This machine's place among those of a run: it takes a seat, beats, learns which others live and why the attempt
    ended, and leaves.

    A node rank is a machine's `NODE_RANK`.
    """

    def __init__(self, node: Node, *, host: str, run: str, patience: float, silent_seconds: float) -> None:
        """`patience`: seconds that machines which have not come are waited for."""
        self.node, self.host, self.run = node, host, run
        self.patience, self.silent_seconds = patience, silent_seconds
        self.attempt = 0
        self.members: list[int] = []
        """The machines of this attempt, in order."""
        self.ranks_by_node: tuple[int, ...] = ()
        """How many workers each member starts, in order; known once the plan is."""
        self._mine = {"session": uuid.uuid4().hex, "host": host}
        self._seats: dict[int, dict[str, str]] = {}
        self._store: Store | None = None
        self._end: tuple[int, Given] | None = None
        """The last attempt that has ended, and why."""
        self._taking_part = node.rank == 0
        self._beats = 0
        self._standing: Standings | None = None
        self._standings: Standings | None = None
        self._watched: dict[int, str] = {}
        """On node 0: the sessions whose beats are judged; `_silent`: for how many seconds each has not beaten."""
        self._seen: dict[str, bytes] = {}
        self._silent: dict[str, float] = {}
        self._left: set[str] = set()
        self._judged = 0.0

    @property
    def name(self) -> str:
        """How messages call this machine."""
        return f"node {self.node.rank} ({self.host})"

    def names(self, node_ranks: Iterable[int]) -> str:
        """Return how messages call machines."""
        seats = self._seats | {self.node.rank: self._mine}
        return ", ".join(
            f"node {node_rank} ({seats[node_rank]['host'] if node_rank in seats else '?'})" for node_rank in node_ranks
        )

    @property
    def _connection(self) -> Store:
        assert self._store is not None, "open() comes first"
        return self._store

    # ---- The beginning, and signs of life

    def open(self) -> None:
        """Serve the store (node 0) or find it. Raise `HardwareError` for a port that is taken, `RetryableError` without
        node 0, `UserError`.
        """
        self.attempt, self.members, self._end = 0, [], None
        if self.node.rank == 0:
            self._store = serve(self.node, self.host, self.run, self.silent_seconds)
            self._store.set("attempt", 0)
        else:
            self._store, said = reach(self.node, self.name, self.run, self.patience, self.silent_seconds)
            self._seats[0] = {"host": said["host"]}
            self._mine |= {"address": said["address"], "master": said["master"]}
            self._sit(said["nodes"])
        self._store.beat(self._beat)

    def _sit(self, nodes: int) -> None:
        """Take this machine's seat, from a launcher that does not live any more too. Raise `UserError` where another
        has the node rank.
        """
        store, node_rank, name = self._connection, self.node.rank, f"seat/{self.node.rank}"
        if node_rank >= nodes:
            here = f"`NODE_RANK` is {node_rank} on {self.host} with `NUM_NODES={self.node.count}`"
            text = f"{here}, but {self.names([0])} has `NUM_NODES={nodes}`"
            raise self._refuse_before_start(
                UserError(text, hint="give every node the same NUM_NODES, and ranks from 0 on")
            )
        store.ask(lambda raw: raw.set(f"beat/{self._mine['session']}", "0"))
        while (held := store.ask(lambda raw: store.first(raw, name, self._mine))) != self._mine:
            look = functools.partial(_last_beat, session=held["session"])
            before = store.ask(look)
            pause(GRACE_SECONDS)
            if before != store.ask(look):
                text = (
                    f"two nodes have `NODE_RANK={node_rank}`: {held['host']} and {self.host} ({self._mine['address']})"
                )
                raise self._refuse_before_start(UserError(text, hint="give each node its own rank"))
            if store.get(name) == held:
                store.delete(name)

    def _refuse_before_start(self, error: UserError) -> UserError:
        """End the run for all where its workers have not been started; an error of a machine too many does not end a
        training.
        """
        self.attempt = self._connection.get("attempt") or 0
        if not self._connection.ask(lambda raw: raw.check([f"{self.attempt}/facts/all"])):
            self._refuse([error])
        return error

    def _beat(self, raw: Any) -> None:
        store, attempt, still = self._connection, self.attempt, self._standing
        self._beats += 1
        name = f"beat/{self._mine['session']}"
        raw.set(name, store.pack(name, {"count": self._beats, "attempt": attempt, "still": still}))
        if self._reason_of_end is None and (found := store.read(raw, f"{attempt}/end")):
            self._end = attempt, found
        if self.node.rank == 0:
            self._judge_beats(raw)
            self._standings = self._gather_standings(attempt, still) if still else None

    def _judge_beats(self, raw: Any) -> None:
        """Node 0: count how long each machine has been silent; one that was silent for too long ends the attempt."""
        now = time.monotonic()
        passed, self._judged = (
            min(now - self._judged, 2 * PERIOD_SECONDS),
            now,
        )  # while this process is suspended no time passes
        self._left = list_words(raw, "left")
        watched = {node_rank: session for node_rank, session in self._watched.items() if session not in self._left}
        names = [f"beat/{session}" for session in watched.values()]
        found = raw.multi_get(names) if names and raw.check(names) else []
        for (node_rank, session), beat in zip(watched.items(), found, strict=False):
            heard = self._seen.get(session) != beat
            self._seen[session], self._silent[session] = beat, 0.0 if heard else self._silent.get(session, 0.0) + passed
            if self._silent[session] > self.silent_seconds and node_rank in self.members:
                self._connection.first(
                    raw, f"{self.attempt}/end", {"lost": node_rank, "seconds": round(self._silent[session])}
                )

    def _gather_standings(self, attempt: int, mine: Standings) -> Standings | None:
        """Node 0: return where the ranks of all machines stand, by their last beats; `None` unless they stand still on
        each.
        """
        found = dict(mine)
        for session in [self._watched[node_rank] for node_rank in self.members if node_rank]:
            beat = self._connection.unpack(f"beat/{session}", self._seen.get(session, b"")) or {}
            if not beat.get("still") or beat["attempt"] != attempt:
                return None
            found |= beat["still"]
        return found

    def _is_silent(self, node_rank: int) -> bool:
        session = self._watched.get(node_rank, "")
        return session in self._left or self._silent.get(session, 0.0) > self.silent_seconds

    def _node_0_is_gone(self) -> bool:
        store = self._store
        late = store is None or store.broken is not None or time.monotonic() - store.heard > self.silent_seconds
        return self.node.rank > 0 and late

    def _watch(self, raw: Any, node_rank: int) -> bool:
        """Node 0: note who has a node rank, whose beats are judged from now on; return whether anybody has."""
        if seat := self._connection.read(raw, f"seat/{node_rank}"):
            self._seats[node_rank], self._watched[node_rank] = seat, seat["session"]
        return bool(seat)

    # ---- The end

    @property
    def _reason_of_end(self) -> Given | None:
        """Why this attempt ended; `None` where that is not known."""
        return self._end[1] if self._end is not None and self._end[0] == self.attempt else None

    def _post_end(self, end: Given) -> Given:
        """Write why the attempt ended, unless somebody else has, and return what stands there."""
        end = {"node": self.node.rank, **end}
        with contextlib.suppress(StoreGone):
            end = self._connection.ask(lambda raw: self._connection.first(raw, f"{self.attempt}/end", end))
            self._end = self.attempt, end
        return end

    def _refuse(self, errors: Sequence[UserError]) -> UserError:
        """Tell all machines the errors; return them to be raised here."""
        self._post_end({"errors": errors_to_json(errors)})
        return errors[0] if len(errors) == 1 else Problems(errors)

    def fail(self, error: BaseException) -> None:
        """Tell all why this machine, where it takes part in the attempt, leaves, unless they know. Raise nothing."""
        if self._store is not None and self._taking_part and not self._node_0_is_gone() and self._reason_of_end is None:
            with contextlib.suppress(BaseException):
                self._refuse(_errors_for_others(error, self.name))

    def close(self) -> None:
        """Leave in order. Node 0 keeps the store until the others have left, or are silent."""
        if (store := self._store) is None:
            return
        with contextlib.suppress(StoreGone, KeyboardInterrupt, SystemExit):
            if not self._node_0_is_gone():
                store.ask(lambda raw: raw.append("left", f"{self._mine['session']} "))
            if self.node.rank == 0:  # machines may still wait for a decision
                store.ask(lambda raw: store.first(raw, f"{self.attempt}/next", {"again": False}))
            until = time.monotonic() + LEAVE_SECONDS
            while self.node.rank == 0 and time.monotonic() < until and not self._are_alone():
                time.sleep(POLL_SECONDS)
        store.close()
        self._store = None

    def _are_alone(self) -> bool:
        left = self._connection.ask(lambda raw: list_words(raw, "left"))
        return all(session in left or self._is_silent(node_rank) for node_rank, session in self._watched.items())


def _last_beat(raw: Any, session: str) -> bytes:
    return bytes(raw.get(f"beat/{session}"))


def _errors_for_others(error: BaseException, name: str) -> list[UserError]:
    """Return what the other machines are told of an error that made this one leave."""
    problems = error.problems if isinstance(error, Problems) else [error] if isinstance(error, UserError) else []
    if problems:
        text = "{name} could not continue: {place}{one.message}"
        return [
            type(one)(text.format(name=name, place=f"{one.place}: " if one.place else "", one=one), hint=one.hint)
            for one in problems
        ]
    code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else None
    stopped = isinstance(error, KeyboardInterrupt) or code in (130, 143)
    what = (
        "was stopped on request before its workers started"
        if stopped
        else "could not start its workers; its own output says why"
    )
    return errors_from_json([{"code": code, "message": f"{name} {what}"}])


KINDS = {kind.exit_code: kind for kind in (UserError, HardwareError, DataError, CheckpointError, RetryableError)}


def errors_to_json(errors: Sequence[UserError]) -> list[Given]:
    """Return errors as they go over the network, several problems one by one."""
    flat = [one for error in errors for one in (error.problems if isinstance(error, Problems) else (error,))]
    return [{"code": e.exit_code, "message": e.message, "place": e.place, "hint": e.hint} for e in flat]


def errors_from_json(given: Sequence[Given]) -> list[UserError]:
    """Return the errors that another node sent."""
    return [
        KINDS.get(one["code"], RetryableError)(one["message"], place=one.get("place"), hint=one.get("hint"))
        for one in given
    ]
