"""How the launchers of several machines meet, in their store (`launch/store.py`): who takes part, with which facts, and why not.

Keys of their store, `A` being the attempt and `K` a machine's `NODE_RANK`:

    session            what run this is, and a random word that all values are bound to
    seat/K             who has this rank; beat/SESSION counts up while that launcher lives
    A/STEP/K           what a machine gives in a step (`facts`, `prepared`); A/STEP lists who has; A/STEP/all is what node 0 made of it
    A/still/K          where a machine's ranks stand that have made no step for too long
    A/end              why the attempt ended: the first to write it settles it for all (errors, an outcome, or a request to stop)
    A/next             what node 0 makes of that: another attempt, or the end
    want/K             facts of a machine that came too late for the attempt; no/SESSION why node 0 does not take it
    left               who has ended in order

What every machine does costs node 0 a few requests a second (docs/adr/0011-torchelastic.md). The workers' own store is another one, on a port of its
own for each attempt: one that is used again holds addresses of dead ranks.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from sft_play.errors import Problems, RetryableError, UserError, raise_all
from sft_play.launch.agreement import errors_from_json, errors_to_json
from sft_play.launch.environment import Node
from sft_play.launch.node import Standings
from sft_play.launch.store import (
    PERIOD_SECONDS,
    Seat,
    Store,
    StoreGone,
    Waiting,
    listed,
    pause,
    plain,
    reach,
    say,
    serve,
)

Given = dict[str, Any]
Judge = Callable[[Sequence[Given]], list[UserError]]
"""What a step's objects, in order of machines, are refused for."""
Answer = Callable[[Sequence[Given]], Given]
"""What node 0 makes of them for all machines."""

POLL_SECONDS = 0.2
GRACE_SECONDS = 3.0
"""How long others may still come, and their differences with them, when it is clear that the run is refused."""
LAST_CALL_SECONDS = 3.0
"""How long an elastic run waits for machines that it has lost before it continues without them."""


class Meeting:
    """This machine's part in a run on several. `open`, then for each attempt `meet`, `share`, `settle` and `follow`; at last `close`."""

    def __init__(
        self, node: Node, *, host: str, run: str, patience: float, silent_seconds: float, least: int | None = None,
        absent: Collection[int] = (),
    ) -> None:  # fmt: skip
        """`patience`: seconds that machines which have not come are waited for; `least`: with how few an elastic run continues; `absent`: ranks
        of machines that are known not to come at the start."""
        self.node, self.host, self.run = node, host, run
        self.patience, self.silent_seconds, self.least = patience, silent_seconds, least
        self.absent = set(absent)
        self.attempt = 0
        self.members: list[int] = []
        """Ranks of the machines of this attempt, in order."""
        self.ranks_by_node: tuple[int, ...] = ()
        """How many ranks each member starts, in order; known once the plan is."""
        self.seats: dict[int, Seat] = {}
        self.wants: dict[int, Given] = {}
        """On node 0 of an elastic run: facts of machines that wait for the next attempt."""
        self._before: list[int] = []
        """Members of the last attempt."""
        self._mine = Seat(session=uuid.uuid4().hex, host=host)
        self._store: Store | None = None
        self._end: tuple[int, Given] | None = None
        """The last attempt that has ended, and why."""
        self._beats, self._told_stop, self._taking_part = 0, False, node.rank == 0
        self._unheard, self._looked = 0.0, 0.0
        """For how long node 0 has not answered, and when that was last counted."""
        self._standing: Standings | None = None
        self._standings: Standings | None = None
        self._stood = False
        """Whether what this machine wrote of its ranks is in the store."""
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

    def names(self, ranks: Iterable[int]) -> str:
        """Returns how messages call machines."""
        return ", ".join(map(self._name, ranks))

    def _name(self, rank: int) -> str:
        return self.name if rank == self.node.rank else f"node {rank} ({self.seats.get(rank, Seat()).host})"

    @property
    def _opened(self) -> Store:
        assert self._store is not None, "open() comes first"
        return self._store

    def open(self) -> None:
        """Serves the store (node 0) or finds it. Raises `HardwareError` for a port that is taken, `RetryableError` without node 0, `UserError`."""
        self.attempt, self.members, self._end, self._told_stop, self._unheard = 0, [], None, False, 0.0
        if self.node.rank == 0:
            self._store = serve(self.node, self.host, self.run, self.silent_seconds, self._beat)
            self._store.set("attempt", 0)
        else:
            self._store, own, master, said = reach(self.node, self.name, self.run, self.patience, self.silent_seconds, self._beat)
            self.seats[0], self._mine = Seat(host=said["host"]), replace(self._mine, address=own, master=master)
            self._sit(said["nodes"])
        self._looked = time.monotonic()
        self._store.beating = True

    def _sit(self, nodes: int) -> None:
        """Takes this machine's seat, from a launcher that does not live any more too. Raises `UserError` where another has the rank."""
        store, rank, mine = self._opened, self.node.rank, asdict(self._mine)
        name = f"seat/{rank}"
        if rank >= nodes:
            raise self._refuse_before_start(UserError(
                f"`NODE_RANK` is {rank} on {self.host} with `NUM_NODES={self.node.count}`, but {self._name(0)} has `NUM_NODES={nodes}`",
                hint="give every node the same NUM_NODES, and ranks from 0 on",
            ))  # fmt: skip
        store.ask(lambda raw: raw.set(f"beat/{self._mine.session}", "0"))
        while (held := store.ask(lambda raw: store.first(raw, name, mine))) != mine:
            other = Seat.of(held)

            def beat(raw: Any, beat: str = f"beat/{other.session}") -> bytes:
                return bytes(raw.get(beat) if raw.check([beat]) else b"")

            before = store.ask(beat)
            pause(GRACE_SECONDS)
            if before != store.ask(beat):
                text = f"two nodes have `NODE_RANK={rank}`: {other.host} and {self.host} ({self._mine.address})"
                raise self._refuse_before_start(UserError(text, hint="give each node its own rank"))
            if store.get(name) == held:
                store.delete(name)

    def _refuse_before_start(self, error: UserError) -> UserError:
        """Ends the run for all where its workers have not been started; an error of a machine too many does not end a training."""
        self.attempt = self._opened.get("attempt") or 0
        if not self._opened.ask(lambda raw: raw.check([f"{self.attempt}/facts/all"])):
            self._post_end({"errors": errors_to_json([error])})
        return error

    def _beat(self, raw: Any) -> None:
        store, attempt = self._opened, self.attempt
        self._beats += 1
        raw.set(f"beat/{self._mine.session}", str(self._beats))
        if (self._end is None or self._end[0] != attempt) and (found := store.read(raw, f"{attempt}/end")):
            self._end = attempt, found
        mine, own = self._standing, f"{attempt}/still/{self.node.rank}"
        if mine:
            raw.set(own, store.pack(own, mine))
        elif self._stood:
            raw.delete_key(own)
        self._stood = bool(mine)
        if self.node.rank == 0:
            self._judge_beats(raw)
            names = [f"{attempt}/still/{rank}" for rank in self.members]
            stood = [store.read(raw, name) for name in names] if mine and raw.check(names) else []
            self._standings = (
                {rank: facts for one in stood for rank, facts in (one or {}).items()} if stood and all(stood) else None
            )
        self._unheard = 0.0

    def _judge_beats(self, raw: Any) -> None:
        """Node 0: counts how long each machine has been silent; one that was silent for too long ends the attempt."""
        now = time.monotonic()
        passed, self._judged = min(now - self._judged, 2 * PERIOD_SECONDS), now  # while this process is suspended no time passes
        self._left = {word.decode(errors="replace") for word in raw.get("left").split()} if raw.check(["left"]) else set()
        watched = {rank: session for rank, session in self._watched.items() if session not in self._left}
        names = [f"beat/{session}" for session in watched.values()]
        found = raw.multi_get(names) if names and raw.check(names) else []
        for (rank, session), beat in zip(watched.items(), found, strict=False):
            heard = self._seen.get(session) != beat
            self._seen[session], self._silent[session] = beat, 0.0 if heard else self._silent.get(session, 0.0) + passed
            if self._silent[session] > self.silent_seconds and rank in self.members:
                self._opened.first(raw, f"{self.attempt}/end", {"lost": rank, "seconds": round(self._silent[session])})

    def _is_silent(self, rank: int) -> bool:
        session = self._watched.get(rank, "")
        return session in self._left or self._silent.get(session, 0.0) > self.silent_seconds

    def meet(self, facts: Callable[[], Given], judge: Judge, answer: Answer) -> Given:
        """Gives this machine's facts and returns node 0's answer to those of all members of the attempt; `members` says who they are.

        Raises what node 0 refuses them for, the same on each, and `RetryableError` for machines that do not come, or leave.
        """
        with self._gone_told():
            found = self._attend(facts) if self.node.rank else self._host(plain(facts()), judge, answer)
        self.members = [int(rank) for rank in found["members"]]
        self.seats |= {int(rank): Seat.of(seat) for rank, seat in found["seats"].items()}
        return dict(found["answer"])

    def share(self, step: str, given: Given, judge: Judge, answer: Answer) -> Given:
        """Gives an object and returns node 0's answer when all members have given theirs. Raises what they are refused for."""
        given, waiting = plain(given), Waiting()
        with self._gone_told():
            if self.node.rank:
                self._give(step, given)
                return self._wait(step)
            objects: dict[int, Given] = {0: given}
            while missing := [rank for rank in self.members if rank not in objects]:
                self._raise_end()
                objects |= self._come(step, missing)
                waiting.say(f"waiting for {self.names(missing)} to be ready")
                pause(POLL_SECONDS)
            found = [objects[rank] for rank in self.members]
            if errors := judge(found):
                raise self._refuse(errors)
            made = plain(answer(found))
            self._opened.set(f"{self.attempt}/{step}/all", made)
            return made

    def _give(self, step: str, given: Given) -> None:
        name = f"{self.attempt}/{step}"
        self._opened.set(f"{name}/{self.node.rank}", given, listed=(name, self.node.rank))

    def _host(self, facts: Given, judge: Judge, answer: Answer) -> Given:
        """Node 0's part of a meeting: each machine is compared with this one when it comes, and all of them once something is wrong."""
        here: dict[int, Given] = {0: facts}
        wrong: dict[int, str] = {}
        """Rank -> session of machines that differ."""
        self.wants, waiting, wrong_since = {}, Waiting(), 0.0
        while True:
            self._raise_end()
            for rank, given in self._come("facts", [rank for rank in range(1, self.node.count) if rank not in here]).items():
                say(f"{self._name(rank)} has come")
                if (errors := judge([facts, given])) and self._before and rank not in self._before:
                    self._leave_out(rank, errors)  # it came to a run that trains without it
                    continue
                here[rank] = given
                if errors:
                    wrong[rank] = self.seats[rank].session
            for rank in [rank for rank in here if rank and self._is_silent(rank)]:
                del here[rank]
                wrong.pop(rank, None)
                self._opened.delete(f"{self.attempt}/facts/{rank}")
                say(f"{self._name(rank)} has gone; waiting for it to come again")
            missing = [rank for rank in range(self.node.count) if rank not in here]
            wrong_since = (wrong_since or time.monotonic()) if wrong else 0.0
            if wrong and (not missing or time.monotonic() - wrong_since > GRACE_SECONDS):
                raise self._refuse(judge([here[rank] for rank in sorted(here)]))
            enough = self.least is not None and len(here) >= self.least
            lost = {rank for rank in self._watched if self._is_silent(rank)} | (self.absent if self.attempt == 0 else set())
            last_call = bool(lost) and set(missing) <= lost and waiting.seconds > LAST_CALL_SECONDS
            if not wrong and (not missing or (enough and (last_call or waiting.seconds > self.patience))):
                break
            if waiting.seconds > self.patience:
                raise self._refuse([self._absent(missing, sorted(here))])
            who = f"node{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            waiting.say(f"waiting for {who}, up to {self.patience:g} s; here: {self.names(sorted(here))}")
            pause(POLL_SECONDS)
        self.members = sorted(here)
        seats = {str(rank): asdict(self._mine if rank == 0 else self.seats[rank]) for rank in self.members}
        found = {"members": self.members, "seats": seats, "answer": plain(answer([here[rank] for rank in self.members]))}
        self._opened.set(f"{self.attempt}/facts/all", found)
        return found

    def _come(self, step: str, ranks: Iterable[int]) -> dict[int, Given]:
        """Node 0: returns what machines of these ranks have given in a step, whoever of them has."""
        wanted, store = set(ranks), self._opened

        def do(raw: Any) -> dict[int, Given]:
            found = {}
            for rank in sorted(wanted & listed(raw, f"{self.attempt}/{step}")):
                seat, given = store.read(raw, f"seat/{rank}"), store.read(raw, f"{self.attempt}/{step}/{rank}")
                if isinstance(seat, dict) and isinstance(given, dict):
                    self.seats[rank] = Seat.of(seat)
                    self._watched[rank] = self.seats[rank].session
                    found[rank] = given
            return found

        return dict(store.ask(do)) if wanted else {}

    def _attend(self, give: Callable[[], Given]) -> Given:
        """Another machine's part of a meeting; one that comes too late waits for the next, with what its facts are then."""
        while True:
            facts = give()
            self.attempt = self._opened.get("attempt") or 0
            found = self._opened.get(f"{self.attempt}/facts/all")
            if found is None:
                self._taking_part = True
                self._give("facts", facts)
                found = self._wait("facts")
            if found["seats"].get(str(self.node.rank), {}).get("session") == self._mine.session:
                return dict(found)
            self._wait_for_next(facts)

    def _wait_for_next(self, facts: Given) -> None:
        """Waits until the run, which trains without this machine, starts again. Raises why it will not take it, or that it did not."""
        self._taking_part = False
        self._opened.set(
            f"want/{self.node.rank}", {"facts": facts, "session": self._mine.session}, listed=("want", self.node.rank)
        )
        attempt, waiting = self.attempt, Waiting()
        while (self._opened.get("attempt") or 0) == attempt:
            self._raise_refusal()
            if self.least is None and waiting.seconds > self.patience:
                raise RetryableError(
                    f"the run has begun without {self.name}, and did not start again within {self.patience:g} s", place=self.node.master,
                    hint="where it should be one of the run's machines, compare NUM_NODES and NODE_RANK with node 0's",
                )  # fmt: skip
            waiting.say("the run trains without this machine, and takes it in when it starts again")
            pause(POLL_SECONDS)

    def _wait(self, step: str) -> Given:
        """Returns what node 0 made of a step."""
        name, waiting = f"{self.attempt}/{step}/all", Waiting()
        while True:
            if (found := self._opened.get(name)) is not None:  # before the end: that may have followed
                return dict(found)
            self._raise_end()
            if self.attempt:
                self._raise_refusal()
            waiting.say("waiting for the other nodes")
            self._pause_as_one_of_many()

    def _pause_as_one_of_many(self) -> None:
        pause(max(POLL_SECONDS, self.node.count / 1000))  # a thousand machines ask a thousand times a second

    def _raise_refusal(self) -> None:
        """Raises why node 0 does not take this machine into a run that trains without it."""
        if refusal := self._opened.get(f"no/{self._mine.session}"):
            self._taking_part = False
            raise_all(errors_from_json(refusal))

    def _raise_end(self) -> None:
        """Raises how the attempt ended, before its workers were started."""
        if (end := self._ended) is None:
            return
        if "errors" in end:
            raise_all(errors_from_json(end["errors"]))
        who = self._name(int(end["lost"])) if "lost" in end else f"node {end.get('node')} ({end.get('host')})"
        hint = "its own output says why, if it could still say anything; the same command on every node starts again"
        raise RetryableError(f"{who} has left, or cannot be reached any more, before the workers started", hint=hint)

    def _refuse(self, errors: Sequence[UserError]) -> UserError:
        """Tells all machines the errors; returns them to be raised here."""
        self._post_end({"errors": errors_to_json(errors)})
        return errors[0] if len(errors) == 1 else Problems(errors)

    def _leave_out(self, rank: int, errors: Sequence[UserError]) -> None:
        """Tells one machine that came to a run which trains without it why it is not taken; the run continues."""
        say(f"left out: {self._name(rank)}: {errors[0].message}")
        self._opened.set(f"no/{self.seats[rank].session}", errors_to_json(errors))
        self._opened.delete(f"seat/{rank}")
        self._watched.pop(rank, None)

    def _absent(self, missing: Sequence[int], here: Sequence[int]) -> UserError:
        """The error for machines that did not come in time."""
        node, plural = self.node, "s" if len(missing) > 1 else ""
        return RetryableError(
            f"node{plural} {', '.join(map(str, missing))} of {node.count} did not come to port {node.master_port} within"
            f" {self.patience:g} s (`launch.join_seconds`); there are: {self.names(here)}",
            hint=f"start the same command there with MASTER_ADDR={node.master_address} and its own NODE_RANK; each of them says why it waits",
        )

    @contextlib.contextmanager
    def _gone_told(self) -> Any:
        try:
            yield
        except StoreGone as error:
            raise RetryableError(
                "node 0 has left, or cannot be reached any more, before the workers started", place=self.node.master,
                hint="its own output says why; the same command on every node starts again",
            ) from error  # fmt: skip

    @property
    def _ended(self) -> Given | None:
        """Why this attempt ended; `None` where that is not known."""
        return self._end[1] if self._end is not None and self._end[0] == self.attempt else None

    def _post_end(self, end: Given) -> Given:
        """Writes why the attempt ended, unless somebody else has, and returns what stands there."""
        end = {"node": self.node.rank, "host": self.host, **end}
        try:
            found = self._opened.ask(lambda raw: self._opened.first(raw, f"{self.attempt}/end", end))
        except StoreGone:
            return end
        self._end = self.attempt, found
        return dict(found)

    def _node_0_is_gone(self) -> bool:
        return self.node.rank > 0 and (self._store is None or bool(self._store.broken) or self._unheard > self.silent_seconds)
