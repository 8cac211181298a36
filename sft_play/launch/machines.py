"""The launchers of a run on several machines: membership, shared facts, why an attempt ended, and what follows.

They share a store (`launch/store.py`), which node 0 serves from the first connection to the last exit. `A` is an
attempt, `K` a machine's `NODE_RANK`:

    session         the run, and a random word that all values are bound to
    beat/SESSION    changes while that launcher lives, and says where its ranks stand when all are quiet
    attempt         the attempt that machines meet for
    A/STEP/K        a machine's facts in a step (`facts`, `prepared`); A/STEP/all is node 0's answer
    A/end           why the attempt ended (errors, an outcome, a request to stop); the first to write decides for all
    A/next          node 0's decision about it: another attempt, or the end

The workers have a separate store, on a different port for each attempt: a reused one would hold addresses of dead ranks
(docs/adr/0011-torchelastic.md).
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from sft_play.errors import CheckpointError, DataError, HardwareError, Problems, RetryableError, UserError, raise_all
from sft_play.launch.environment import Node, next_free_port
from sft_play.launch.process import stop_code
from sft_play.launch.store import (
    PERIOD_SECONDS,
    POLL_SECONDS,
    Store,
    StoreGone,
    Waiting,
    pause,
    print_line,
    reach,
    serve,
)
from sft_play.launch.verdict import LOST, Outcome, Standings

Facts = dict[str, Any]
Compare = Callable[[Sequence[Facts]], list[UserError]]
"""Facts of the machines, in order -> errors that refuse them."""
Answer = Callable[[Sequence[Facts]], Facts]
"""Facts of the machines, in order -> node 0's answer for all."""
FETCH = "SFT_PLAY_FETCH"
"""Variable of a launcher that does not share node 0's run folder: the command that started it over SSH brings
checkpoints on request.
"""
LEAVE_SECONDS = 60.0
"""How long node 0 keeps the store for the others after its own part is done."""
PEER_SECONDS = 10.0
"""How much longer than `launch.silent_seconds` to wait for the cause of a lost connection."""


class Machines:
    """A machine's part in a run on several: `open`; per attempt `meet`, `share`, `settle`, `follow`; then `close`."""

    def __init__(self, node: Node, *, host: str, run: str, patience: float, silent_seconds: float) -> None:
        """Prepare without connecting; `patience` is how many seconds to wait for machines that have not joined."""
        self.node, self.run = node, run
        self.patience, self.silent_seconds = patience, silent_seconds
        self.attempt = 0
        self.ranks_by_node: tuple[int, ...] = ()
        """Number of workers of each machine; known when the plan is."""
        self._mine: Facts = {"session": uuid.uuid4().hex, "host": host}
        self._here: dict[int, Facts] = {node.rank: self._mine}
        """Machines that have joined this attempt -> session, host and addresses of their launchers."""
        self._store: Store | None = None
        self._ends: dict[int, Facts] = {}
        """Attempt that ended -> why."""
        self._takes_part = node.rank == 0
        self._beats = 0
        self._standing: Standings | None = None
        self._standings: Standings | None = None
        self._heard: dict[int, Facts] = {}
        """On node 0: the last heartbeat of each machine."""
        self._silent: dict[int, float] = {}
        """On node 0: seconds since the last new heartbeat of each machine."""
        self._left: set[int] = set()
        self._checked_at = 0.0

    def names(self, node_ranks: Iterable[int]) -> str:
        """Return the names of machines in messages."""
        return ", ".join(f"node {k} ({self._here.get(k, {}).get('host', '?')})" for k in node_ranks)

    @property
    def name(self) -> str:
        """This machine's name in messages."""
        return self.names([self.node.rank])

    @property
    def _connection(self) -> Store:
        assert self._store is not None, "open() comes first"
        return self._store

    # ---- Connection and heartbeats

    def open(self) -> None:
        """Serve the store on node 0, or connect to it.

        Raise `HardwareError` for a port that is taken, `RetryableError` if node 0 cannot be reached, `UserError` for a
        node rank that node 0 does not expect.
        """
        self.attempt, self._ends, node = 0, {}, self.node
        if node.rank == 0:
            self._store = serve(node, self._mine["host"], self.run, self.silent_seconds)
            self._store.set("attempt", 0)
        else:
            self._store, facts = reach(node, self.name, self.run, self.patience, self.silent_seconds)
            self._here[0] = {"host": facts["host"]}
            self._mine |= {"address": facts["address"], "master": facts["master"]}
            if node.rank >= facts["nodes"]:
                here = f"`NODE_RANK` is {node.rank} on {self._mine['host']} with `NUM_NODES={node.count}`"
                text = f"{here}, but {self.names([0])} has `NUM_NODES={facts['nodes']}`"
                raise UserError(text, hint="give every node the same NUM_NODES, and ranks from 0 on")
        self._store.beat(self._beat)

    def _write_beat(self, *, leaving: bool = False) -> None:
        self._beats += 1
        beat = {"count": self._beats, "attempt": self.attempt, "still": self._standing, "left": leaving}
        self._connection.set(f"beat/{self._mine['session']}", beat)

    def _beat(self) -> None:
        self._write_beat()
        attempt = self.attempt
        if attempt not in self._ends and (end := self._connection.get(f"{attempt}/end")):
            self._ends[attempt] = end
        if self.node.rank == 0:
            self._check_beats(attempt)

    def _check_beats(self, attempt: int) -> None:
        """On node 0, end the attempt for a machine that was silent too long; collect standings when all are quiet."""
        now = time.monotonic()
        # Time in which this process is suspended does not count.
        passed, self._checked_at = min(now - self._checked_at, 2 * PERIOD_SECONDS), now
        standings = dict(self._standing) if self._standing else None
        others = {k: facts["session"] for k, facts in list(self._here.items()) if k}  # another thread adds to it
        for k, session in others.items():
            beat = self._connection.get(f"beat/{session}") or {}
            self._silent[k] = 0.0 if self._heard.get(k) != beat else self._silent.get(k, 0.0) + passed
            self._heard[k] = beat
            self._left = self._left | {k} if beat.get("left") else self._left - {k}
            still = beat.get("still") if beat.get("attempt") == attempt else None
            standings = standings | still if standings and still else None
            if self._silent[k] > self.silent_seconds and k not in self._left:
                self._connection.first(f"{attempt}/end", {"lost": k, "seconds": round(self._silent[k])})
        self._standings = standings

    def _node_0_is_gone(self) -> bool:
        store = self._store
        late = store is None or store.broken is not None or time.monotonic() - store.heard > self.silent_seconds
        return self.node.rank > 0 and late

    # ---- Before the workers start

    def meet(self, facts: Callable[[bool], Facts], compare: Compare, answer: Answer) -> Facts:
        """Share this machine's facts and return node 0's answer to those of all.

        A launcher that was restarted while the others train waits until they meet again; the argument of `facts` is
        whether it had to wait. Raise node 0's errors, the same on each machine, and `RetryableError` for machines that
        do not join, or leave.
        """
        late = self.node.rank > 0 and self._wait_for_a_meeting()
        self._takes_part = True
        return self.share("facts", facts(late), compare, answer)

    def share(self, step: str, mine: Facts, compare: Compare, answer: Answer) -> Facts:
        """Share facts and return node 0's answer after all machines shared theirs. Raise what `compare` refuses."""
        name, store, ours = f"{self.attempt}/{step}", self._connection, {"from": self._mine, "facts": _plain(mine)}
        if self.node.rank:
            other = store.first(f"{name}/{self.node.rank}", ours)["from"]
            if other["session"] != self._mine["session"]:
                self._takes_part = False
                text = f"two nodes have `NODE_RANK={self.node.rank}`: {other['host']} and {self._mine['host']}"
                raise RetryableError(text, hint="give each node its own rank, and start no second launcher there")
            result = self._wait(f"{name}/all")
            self._here = {int(k): facts for k, facts in result["here"].items()}
        else:
            of_all = self._gather(name, ours, compare)
            result = {"here": self._here, "answer": _plain(answer([of_all[k] for k in sorted(of_all)]))}
            store.set(f"{name}/all", result)
        return dict(result["answer"])

    def addresses(self) -> list[str]:
        """Return this machine's addresses as seen in connections to others."""
        ways = [facts["master"] for k, facts in sorted(self._here.items()) if k]
        return [self._mine["address"]] if self.node.rank else ways

    def workers_port(self) -> int:
        """Return node 0's port for the workers' store of this attempt: MASTER_PORT + 1 + attempt, or the next free."""
        return next_free_port(self.node.master_port + 1 + self.attempt, "0.0.0.0", "MASTER_PORT")

    def _gather(self, name: str, mine: Facts, compare: Compare) -> dict[int, Facts]:
        """Return, on node 0, the facts of all machines in a step, comparing each with node 0's when it arrives."""
        of_all, waiting, meets = {0: mine["facts"]}, Waiting(), name.endswith("/facts")
        while True:
            self._raise_end()
            missing = [k for k in range(self.node.count) if k not in of_all]
            if not missing:
                return of_all
            came = {k: facts for k in missing if (facts := self._connection.get(f"{name}/{k}"))}
            for k, facts in came.items():
                self._here[k], of_all[k], self._silent[k] = facts["from"], facts["facts"], 0.0  # a sign of life
                if meets:
                    print_line(f"{self.names([k])} has come")
            if came and (errors := compare([mine["facts"], *(of_all[k] for k in came)])):
                raise self._refuse(errors)
            if not came:
                self._report(waiting, missing, meets=meets)
                pause(POLL_SECONDS)

    def _report(self, waiting: Waiting, missing: list[int], *, meets: bool) -> None:
        """Report which machines are missing. Raise `RetryableError` for machines that have not joined in time."""
        if not meets:
            waiting.report(f"waiting for {self.names(missing)} to be ready")
            return
        here = self.names(k for k in range(self.node.count) if k not in missing)
        who = f"node{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        waiting.report(f"waiting for {who}, up to {self.patience:g} s; here: {here}")
        if waiting.seconds > self.patience:
            text = (
                f"{who} of {self.node.count} did not come to port {self.node.master_port} within {self.patience:g} s"
                f" (`launch.join_seconds`); there are: {here}"
            )
            hint = (
                f"start the same command there with MASTER_ADDR={self.node.master_address} and its own NODE_RANK; each"
                " of them says why it waits"
            )
            raise self._refuse([RetryableError(text, hint=hint)])

    def _wait_for_a_meeting(self) -> bool:
        """Wait until the others meet, which may be training without this machine; return whether they were.

        Raise `RetryableError` if they do not meet in time.
        """
        waiting, store, late = Waiting(), self._connection, False
        while True:
            self.attempt = store.get("attempt") or 0
            if store.get(f"{self.attempt}/facts/all") is None:
                return late
            self._takes_part, late = False, True
            if waiting.seconds > self.patience:
                raise RetryableError(
                    f"the run has begun without {self.name}, and did not start again within {self.patience:g} s",
                    place=self.node.master,
                    hint="where it should be one of the run's machines, compare NUM_NODES and NODE_RANK with node 0's",
                )
            waiting.report("the run trains without this machine, and takes it in when it starts again")
            pause(POLL_SECONDS)

    def _wait(self, name: str) -> Facts:
        """Return node 0's answer in a step."""
        waiting = Waiting()
        # Look for the answer first, since the end may already have followed it.
        while (result := self._connection.get(name)) is None:
            self._raise_end()
            waiting.report("waiting for the other nodes")
            pause(POLL_SECONDS)
        return dict(result)

    def _raise_end(self) -> None:
        """Raise why the attempt ended, if it did, before its workers started."""
        if (end := self._why) is None:
            return
        if "errors" in end:
            raise_all(_errors_from(end["errors"]))
        hint = (
            "its own output says why, if it could still print anything; the same command on every node restarts the run"
        )
        who = self.names([end["lost"] if "lost" in end else end["node"]])
        raise RetryableError(f"{who} has left, or cannot be reached any more, before the workers started", hint=hint)

    # ---- During training, and after

    @property
    def _why(self) -> Facts | None:
        """Why this attempt ended; `None` if it has not."""
        return self._ends.get(self.attempt)

    def share_standings(self, mine: Standings | None) -> Standings | None:
        """Set the standings of this machine's ranks, which are all quiet for too long, or `None` if they are not.

        On node 0, which decides for all, return the standings of all ranks once all machines have such. Never waits.
        """
        self._standing = mine
        return self._standings if mine else None

    def ended_elsewhere(self, *, stopping: bool = False) -> Outcome | int | None:
        """Return how the attempt ended on another machine (an outcome, or the signal of a stop); `None` while it runs.

        `stopping`: this machine was asked to stop, which is passed on to the others.
        """
        if stopping and self._why is None and not self._node_0_is_gone():
            self._post_end({"stop": 15})
        if (end := self._why) is not None:
            return int(end["stop"]) if "stop" in end else self._outcome(end)
        if not self._node_0_is_gone():
            return None
        store = self._connection
        how = "has left" if store.broken else f"has not answered for {time.monotonic() - store.heard:.0f} s"
        return self._unreachable(0, how)

    def settle(self, outcome: Outcome) -> Outcome:
        """Return how the attempt ended, the same on every machine: the outcome of the one that saw the first cause.

        A machine whose ranks all finished returns its own outcome; one whose ranks only lost a connection waits for the
        cause.
        """
        if outcome.code == 0:
            return outcome
        until = time.monotonic() + self.silent_seconds + PEER_SECONDS
        while outcome.cause == "peer" and time.monotonic() < until and self.ended_elsewhere() is None:
            time.sleep(POLL_SECONDS)
        ended = self.ended_elsewhere()
        if isinstance(ended, Outcome):
            return ended
        end = self._post_end({"outcome": asdict(replace(outcome, host=self._mine["host"]))})
        if "stop" not in end:
            return self._outcome(end)
        if outcome.cause in ("peer", "killed", "agent"):  # the consequence of others that left first
            return Outcome(code=stop_code(int(end["stop"])), stop=outcome.stop)
        return outcome

    def follow(self, decide: Callable[[], Facts]) -> Facts | None:
        """End the attempt and return node 0's decision about what follows; `None` if node 0 does not answer."""
        if self._node_0_is_gone():
            return None
        try:
            if self.node.rank == 0:
                self._connection.set(f"{self.attempt}/next", decide())
            while (following := self._connection.get(f"{self.attempt}/next")) is None:
                pause(POLL_SECONDS)
            self._here = {k: facts for k, facts in self._here.items() if k in (0, self.node.rank)}
            self._standing = self._standings = None  # before the beat belongs to the next attempt
            self.attempt += 1
            if self.node.rank == 0 and following.get("again"):
                self._connection.set("attempt", self.attempt)
        except StoreGone:
            return None
        return dict(following)

    def fail(self, error: BaseException) -> None:
        """Report to all why this machine leaves an attempt in which it takes part, unless they know. Never raises."""
        if self._store is not None and self._takes_part and not self._node_0_is_gone() and self._why is None:
            with contextlib.suppress(BaseException):
                self._refuse(_for_others(error, self.name))

    def close(self) -> None:
        """Leave the run; node 0 first waits until the others have left or are silent, since it serves the store."""
        if (store := self._store) is None:
            return
        with contextlib.suppress(StoreGone, KeyboardInterrupt, SystemExit):
            if self.node.rank == 0:  # machines may still be waiting for a decision
                store.first(f"{self.attempt}/next", {"again": False})
            elif not self._node_0_is_gone():
                store.beat(lambda: None)
                self._write_beat(leaving=True)
            until = time.monotonic() + LEAVE_SECONDS
            while self.node.rank == 0 and time.monotonic() < until and not self._are_alone():
                time.sleep(POLL_SECONDS)
        store.close()
        self._store = None

    def _are_alone(self) -> bool:
        return all(k in self._left or self._silent.get(k, 0.0) > self.silent_seconds for k in self._here if k)

    def _post_end(self, end: Facts) -> Facts:
        """Write why the attempt ended, unless another machine has, and return what is in the store."""
        end = {"node": self.node.rank, **end}
        with contextlib.suppress(StoreGone):
            end = self._connection.first(f"{self.attempt}/end", end)
            self._ends[self.attempt] = end
        return end

    def _refuse(self, errors: Sequence[UserError]) -> UserError:
        """Report the errors to all machines; return them to be raised on this one."""
        self._post_end({"errors": _errors_to(errors)})
        return errors[0] if len(errors) == 1 else Problems(errors)

    def _outcome(self, end: Facts) -> Outcome:
        if "lost" in end:
            return self._unreachable(end["lost"], f"has been silent for {end['seconds']} s")
        if "errors" in end:
            error = _errors_from(end["errors"])[0]
            return Outcome(code=error.exit_code, message=error.render())
        return Outcome(**end["outcome"])

    def _unreachable(self, node_rank: int, how: str) -> Outcome:
        first, name = sum(self.ranks_by_node[:node_rank]), self.names([node_rank])
        host = name.partition(" (")[2].removesuffix(")")
        what = f"rank {first} ({host}) cannot be reached: {name} {how}"
        hint = "see whether that machine is on and its network is up; what it still wrote is in its own output"
        text = f"error: {what}; all ranks were stopped\n\nhint: {hint}"
        return Outcome(code=LOST, rank=first, message=text, what=what, cause="unreachable")


def _plain(value: Facts) -> Facts:
    """Return a value as it is after transfer as JSON."""
    return dict(json.loads(json.dumps(value, allow_nan=False)))


KINDS = {kind.exit_code: kind for kind in (UserError, HardwareError, DataError, CheckpointError, RetryableError)}


def _errors_to(errors: Iterable[UserError]) -> list[Facts]:
    """Return errors as plain data."""
    return [
        {"code": error.exit_code, "message": error.message, "place": error.place, "hint": error.hint}
        for error in errors
    ]


def _errors_from(errors: Sequence[Facts]) -> list[UserError]:
    """Return the errors that another node sent."""
    return [KINDS.get(e["code"], RetryableError)(e["message"], place=e["place"], hint=e["hint"]) for e in errors]


def _for_others(error: BaseException, name: str) -> list[UserError]:
    """Return the errors to report to other machines for an error that made this one leave."""
    if isinstance(error, UserError):
        text = "{name} could not continue: {place}{message}"
        return [
            type(e)(text.format(name=name, place=f"{e.place}: " if e.place else "", message=e.message), hint=e.hint)
            for e in (error.problems if isinstance(error, Problems) else (error,))
        ]
    code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else None
    return [KINDS.get(code or LOST, RetryableError)(f"{name} left before its workers started; its own output says why")]
