"""The store that the launchers of several machines share, from the first hello to the last exit.

Node 0's launcher serves one torch `TCPStore` on MASTER_ADDR:MASTER_PORT. Each launcher has one connection to it, used by one thread, which also
beats once a second: whatever the main thread does, its machine is seen to live, and a store that hangs keeps nobody waiting. Keys, `A` being
the attempt and `K` a machine's `NODE_RANK`:

    session            what run this is, and a random word that all values are bound to
    seat/K             who has this rank; beat/SESSION counts up while that launcher lives
    A/STEP/K           what a machine gives in a step (`facts`, `prepared`); A/STEP lists who has; A/STEP/all is what node 0 made of it
    A/end              why the attempt ended: the first to write it settles it for all (errors, an outcome, or a request to stop)
    A/next             what node 0 makes of that: another attempt, or the end
    want/K             facts of a machine that came too late for the attempt; no/SESSION why node 0 does not take it
    left               who has ended in order

Values are compressed JSON. With a key (`MASTER_KEY`) each carries an HMAC over run, key and value; what does not verify counts as absent.
The workers' own store is another one, on a port of its own for each attempt: one that is used again holds addresses of dead ranks.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import json
import os
import queue
import resource
import socket
import sys
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sft_play.errors import HardwareError, RetryableError, UserError, printable, raise_all
from sft_play.launch.agreement import errors_from_json, errors_to_json
from sft_play.launch.environment import Node
from sft_play.launch.key import MAKE_ONE, VARIABLE, proof, proves
from sft_play.launch.network import holder_of, port_is_free
from sft_play.launch.run_folder import raise_what_was_heard, stop_code
from sft_play.launch.verdict import LOST, Outcome
from sft_play.launch.watch import Standings

Given = dict[str, Any]
Judge = Callable[[Sequence[Given]], list[UserError]]
"""What a step's objects, in order of machines, are refused for."""

PROTOCOL = 2
PERIOD_SECONDS = 1.0
"""Between two beats of a machine, and two looks at the others' by node 0."""
POLL_SECONDS = 0.2
CONNECT_SECONDS = 3.0
HEARD_SECONDS = 5.0
"""How long what listens at the port may take to answer as our store does."""
REQUEST_SECONDS = 300.0
"""What torch allows a request; how long it really may take is `launch.silent_seconds`."""
PAUSE_SECONDS = 0.5
RESOLVE_SECONDS = 30.0
"""How long a name may be unknown: a cluster's names appear when its machines do."""
GRACE_SECONDS = 3.0
"""How long others may still come, and their differences with them, when it is clear that the run is refused."""
LAST_CALL_SECONDS = 3.0
"""How long an elastic run waits for machines that it has lost before it continues without them."""
SAY_SECONDS, FIRST_SECONDS = 15.0, 2.0
"""Between two lines that say who is waited for, and until the first of them."""
PEER_SECONDS = 10.0
"""How much longer than `launch.silent_seconds` the cause of a connection that was lost may take to be known."""
LEAVE_SECONDS = 60.0
"""How long node 0 keeps the store for the others once its own part is done."""
LARGEST_BYTES = 64 * 2**20
"""Of a value, uncompressed."""
HINTS = {
    "refused": "start node 0 with the same command and `NODE_RANK=0`; where it runs, give the same MASTER_PORT on every node",
    "timeout": "open MASTER_PORT (and the high ports) in the firewall of node 0, and compare MASTER_ADDR with `ip address` there",
    "route": "see with `ping` whether that machine is on, and whether both are on one network",
    "stranger": "choose another MASTER_PORT, the same on every node",
}
"""What to do about a reason why node 0 cannot be reached."""


class StoreGone(Exception):
    """The store does not answer."""


class Link:
    """One connection to the store and the thread that uses it. The thread also runs `each` every `PERIOD_SECONDS`, and ends with the process."""

    def __init__(self, connect: Callable[[], Any], each: Callable[[Any], None]) -> None:
        self._connect, self._each = connect, each
        self._asked: queue.SimpleQueue[tuple[Callable[[Any], Any], queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        self.broken: Exception | None = None
        self.beating = False
        self._thread = threading.Thread(target=self._work, name="rendezvous", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            store = self._connect()
            due = 0.0
            while True:
                wait = max(0.0, due - time.monotonic()) if self.beating else PERIOD_SECONDS
                with contextlib.suppress(queue.Empty):
                    asked = self._asked.get(timeout=wait)
                    if asked is None:
                        return
                    asked[1].put(asked[0](store))
                if self.beating and time.monotonic() >= due:
                    due = time.monotonic() + PERIOD_SECONDS
                    self._each(store)
        except Exception as error:  # noqa: BLE001 - torch's errors of a store are RuntimeErrors of many kinds; each is the end of it
            self.broken = error

    def ask(self, do: Callable[[Any], Any], seconds: float) -> Any:
        """Returns what `do` makes of the store. Raises `StoreGone` after `seconds`, and what a signal asks for."""
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._asked.put((do, answer))
        until = time.monotonic() + seconds
        while True:
            with contextlib.suppress(queue.Empty):
                return answer.get(timeout=0.05)
            raise_what_was_heard()
            if self.broken or time.monotonic() > until:
                raise StoreGone(str(self.broken or f"no answer in {seconds:g} s"))

    def close(self) -> None:
        self._asked.put(None)
        self._thread.join(PERIOD_SECONDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """Who has a rank."""

    session: str
    """A launcher that was started again has another."""
    host: str
    address: str
    """Its own address on the way to node 0."""
    master: str
    """The address at which it found node 0."""


class Rendezvous:
    """This machine's end of the store. `open`, then for each attempt `meet`, `share`, `settle` and `follow`; at last `close`."""

    def __init__(
        self,
        node: Node,
        *,
        host: str,
        run: str,
        patience: float,
        silent_seconds: float,
        least: int | None = None,
        absent: Collection[int] = (),
    ) -> None:
        """`patience`: seconds that machines which have not come are waited for; `least`: with how few an elastic run continues; `absent`: ranks
        of machines that are known not to come at the start."""
        self.node, self.host, self.run = node, host, run
        self.patience, self.silent_seconds, self.least = patience, silent_seconds, least
        self.where = f"{node.master_address}:{node.master_port}"
        self.session = uuid.uuid4().hex
        self.attempt = 0
        self.members: list[int] = []
        """Ranks of the machines of this attempt, in order."""
        self._before: list[int] = []
        """Those of the last attempt."""
        self.seats: dict[int, Seat] = {}
        self.absent = set(absent)
        self.wants: dict[int, Given] = {}
        """On node 0 of an elastic run: facts of machines that wait for the next attempt."""
        self._link: Link | None = None
        self._store: Any = None
        self._nonce, self._nodes = "", node.count
        self._mine = Seat(session=self.session, host=host, address="", master="")
        self._end: tuple[int, Given] | None = None
        self._beats, self._told_stop = 0, False
        self._taking_part = node.rank == 0
        self._standing: Standings | None = None
        self._standing_written: Standings | None = None
        self._standings: Standings = {}
        self._unheard, self._looked = 0.0, 0.0
        self._watched: dict[int, str] = {}
        """On node 0: the sessions whose beats are judged."""
        self._seen: dict[str, bytes] = {}
        self._silent: dict[str, float] = {}
        self._left: set[str] = set()
        self._judged = 0.0
        self._began = self._said = 0.0

    @property
    def name(self) -> str:
        """How messages call this machine."""
        return self._name(self.node.rank)

    def names(self, ranks: Iterable[int]) -> list[str]:
        """Returns how messages call machines."""
        return [self._name(rank) for rank in ranks]

    def _name(self, rank: int) -> str:
        host = self.host if rank == self.node.rank else self.seats[rank].host if rank in self.seats else "?"
        return f"node {rank} ({host})"

    # ---- Values

    def _pack(self, name: str, value: Any) -> bytes:
        body = zlib.compress(json.dumps(value, allow_nan=False).encode())
        return self._proof(name, body).encode() + body

    def _unpack(self, name: str, raw: bytes) -> Any:
        """Returns a value; `None` for what is none of this run's."""
        given, body = raw[:64].decode(errors="replace"), raw[64:]
        if self.node.key and not proves(self.node.key, given, *self._said_by(name, body)):
            return None
        try:
            return json.loads(zlib.decompressobj().decompress(body, LARGEST_BYTES))
        except (zlib.error, ValueError, RecursionError):
            return None

    def _proof(self, name: str, body: bytes) -> str:
        return proof(self.node.key, *self._said_by(name, body)) if self.node.key else "-" * 64

    def _said_by(self, name: str, body: bytes) -> tuple[str, ...]:
        return (self._nonce, name, hashlib.sha256(body).hexdigest())

    def _read(self, store: Any, name: str) -> Any:
        return self._unpack(name, store.get(name)) if store.check([name]) else None

    def _first(self, store: Any, name: str, value: Any) -> Any:
        """Writes a value where there is none, and returns the one that is there then."""
        mine = self._pack(name, value)
        found = self._unpack(name, store.compare_set(name, "", mine))
        if found is None:  # a stranger's
            store.set(name, mine)
        return value if found is None else found

    def _ask(self, do: Callable[[Any], Any]) -> Any:
        assert self._link is not None, "open() comes first"
        return self._link.ask(do, self.silent_seconds)

    def _get(self, name: str) -> Any:
        """Returns a value; `None` where there is none of this run."""
        return self._ask(lambda store: self._read(store, name))

    def _beat_of(self, session: str) -> bytes:
        name = f"beat/{session}"
        return bytes(self._ask(lambda store: store.get(name) if store.check([name]) else b""))

    def _delete(self, name: str) -> None:
        self._ask(lambda store: store.delete_key(name))

    def _set(self, name: str, value: Any, *, listed_in: str = "") -> None:
        """Writes a value, and with `listed_in` this machine's rank to a list after that."""
        raw = self._pack(name, value)

        def do(store: Any) -> None:
            store.set(name, raw)
            if listed_in:
                store.append(listed_in, f"{self.node.rank} ")

        self._ask(do)

    def _listed(self, store: Any, name: str) -> set[int]:
        words = store.get(name).split() if store.check([name]) else []
        return {int(word) for word in words if word.isdigit() and len(word) < 6}

    # ---- Opening

    def open(self) -> None:
        """Serves the store (node 0) or finds it. Raises `HardwareError` for a port that is taken, `RetryableError` without node 0, `UserError`."""
        self._wait_begins()
        self.attempt, self.members, self._nonce, self._end, self._told_stop, self._unheard = 0, [], "", None, False, 0.0
        if self.node.rank == 0:
            self._serve()
        else:
            self._reach()
            self._sit()
        assert self._link is not None
        self._looked = time.monotonic()
        self._link.beating = True

    def _serve(self) -> None:
        port = self.node.master_port
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard > 0 else soft, hard))  # one descriptor a machine
        try:
            self._store = _tcp_store()("127.0.0.1", port, is_master=True, wait_for_workers=False)
        except RuntimeError as error:
            raise HardwareError(
                f"node 0 cannot listen on port {port}: {'' if port_is_free(port) else 'Address already in use'}{holder_of(port)}",
                hint="choose another MASTER_PORT, the same on every node",
            ) from error
        self._link = Link(lambda: self._store, self._beat)
        word = uuid.uuid4().hex
        self._set("session", {
            "protocol": PROTOCOL, "run": self.run, "word": word, "host": self.host, "key": bool(self.node.key), "nodes": self.node.count,
        })  # fmt: skip
        self._nonce = word
        self._set("attempt", 0)
        self.seats[0] = self._mine

    def _reach(self) -> None:
        """Connects to node 0, which may start later."""
        until = self._began + self.patience
        while True:
            reason, hint = self._connect()
            now = time.monotonic()
            if not reason:
                say(f"{self.name} has reached node 0 at {self.where}")
                return
            if hint == "name" and now - self._began > min(RESOLVE_SECONDS, self.patience):
                raise UserError(
                    f"`MASTER_ADDR` is `{self.node.master_address}`, which {reason}", hint="give the IP address of node 0"
                )
            if now > until:
                raise RetryableError(
                    f"{self.name} did not reach node 0 within {self.patience:g} s: {reason}",
                    place=self.where,
                    hint=HINTS.get(hint),
                )
            self._say(f"waiting for node 0 at {self.where}, up to {self.patience:g} s: {reason}")
            pause(PAUSE_SECONDS)

    def _connect(self) -> tuple[str, str]:
        """Returns why there is no connection, and the key of the hint; nothing where there is one."""
        try:
            found = socket.getaddrinfo(self.node.master_address, self.node.master_port, type=socket.SOCK_STREAM)[0]
        except socket.gaierror as error:
            return f"cannot be resolved: {error.strerror}", "name"
        with socket.socket(found[0], socket.SOCK_STREAM) as sock:
            sock.settimeout(CONNECT_SECONDS)
            try:
                sock.connect(found[4])
            except OSError as error:
                return _reason(error)
            own, master = str(sock.getsockname()[0]), str(sock.getpeername()[0])
        port, kind, limit = self.node.master_port, _tcp_store(), _seconds(HEARD_SECONDS)
        link = Link(lambda: kind(master, port, is_master=False, wait_for_workers=False, timeout=limit), self._beat)
        self._nonce = ""
        stranger = "something listens there that is no launcher of SFT-Play", "stranger"
        try:
            raw = link.ask(lambda store: store.get("session"), HEARD_SECONDS + CONNECT_SECONDS)
            link.ask(lambda store: store.set_timeout(_seconds(REQUEST_SECONDS)), HEARD_SECONDS)
        except StoreGone:
            link.close()
            return stranger
        try:
            self._check(raw)
        except BaseException:
            link.close()
            raise
        self._link, self._mine = link, Seat(session=self.session, host=self.host, address=own, master=master)
        return "", ""

    def _check(self, raw: bytes) -> None:
        """Raises `UserError` where what was found is another run's store: this machine ends, and the run does not notice."""
        found = self._unpack("session", raw)
        if found is None:
            raise UserError(f"node 0 has another `{VARIABLE}` than {self.name}, or none", hint=MAKE_ONE)
        if not isinstance(found, dict) or found.get("protocol") != PROTOCOL:
            raise HardwareError(
                f"node 0 speaks another version of the launchers' protocol than {self.name}",
                hint="install the same SFT-Play on every node",
            )
        host = str(found.get("host"))[:255]
        if found.get("key") and not self.node.key:
            raise UserError(f"node 0 ({host}) takes only nodes that know its `{VARIABLE}`", hint=MAKE_ONE)
        if found.get("run") != self.run:
            raise UserError(
                f"the nodes have different runs: node 0 ({host}): `{found.get('run')}`, {self.name}: `{self.run}`",
                hint="give every node the same RUN_NAME (or RUN); where that one is another run, choose another MASTER_PORT",
            )
        self._nonce, self._nodes = str(found.get("word")), int(found.get("nodes") or 0)
        self.seats[0] = Seat(session="", host=host, address="", master="")

    def _sit(self) -> None:
        """Takes this machine's seat, from a launcher that does not live any more too. Raises `UserError` where another has the rank."""
        rank, name = self.node.rank, f"seat/{self.node.rank}"
        if rank >= self._nodes:
            raise self._refuse_before_start(UserError(
                f"`NODE_RANK` is {rank} on {self.host} with `NUM_NODES={self.node.count}`, but {self._name(0)} has `NUM_NODES={self._nodes}`",
                hint="give every node the same NUM_NODES, and ranks from 0 on",
            ))  # fmt: skip
        self._ask(lambda store: store.set(f"beat/{self.session}", "0"))
        while (held := self._ask(lambda store: self._first(store, name, asdict(self._mine)))) != asdict(self._mine):
            other = _seat(held)
            before = self._beat_of(other.session)
            pause(GRACE_SECONDS)
            if before != self._beat_of(other.session):
                text = f"two nodes have `NODE_RANK={rank}`: {other.host} and {self.host} ({self._mine.address})"
                raise self._refuse_before_start(UserError(text, hint="give each node a rank of its own"))
            if self._get(name) == held:
                self._delete(name)

    def _refuse_before_start(self, error: UserError) -> UserError:
        """Ends the run for all where its workers have not been started; an error of a machine too many does not end a training."""
        self.attempt = self._get("attempt") or 0
        if not self._ask(lambda store: store.check([f"{self.attempt}/facts/all"])):
            self._post_end({"errors": errors_to_json([error])})
        return error

    # ---- The thread

    def _beat(self, store: Any) -> None:
        self._beats += 1
        store.set(f"beat/{self.session}", str(self._beats))
        attempt = self.attempt
        if (self._end is None or self._end[0] != attempt) and (found := self._read(store, f"{attempt}/end")):
            self._end = attempt, found
        if self.node.rank == 0:
            self._judge_beats(store)
        self._compare_standings(store)
        self._unheard = 0.0

    def _judge_beats(self, store: Any) -> None:
        """Node 0: counts how long each machine has been silent; one that was silent for too long ends the attempt."""
        now = time.monotonic()
        passed, self._judged = min(now - self._judged, 2 * PERIOD_SECONDS), now  # while this process is suspended no time passes
        left = {word.decode(errors="replace") for word in store.get("left").split()} if store.check(["left"]) else set()
        self._left = left
        watched = {rank: session for rank, session in self._watched.items() if session not in left}
        names = [f"beat/{session}" for session in watched.values()]
        found = store.multi_get(names) if names and store.check(names) else []
        for (rank, session), beat in zip(watched.items(), found, strict=False):
            heard = self._seen.get(session) != beat
            self._seen[session], self._silent[session] = beat, 0.0 if heard else self._silent.get(session, 0.0) + passed
            if self._silent[session] > self.silent_seconds and rank in self.members:
                self._first(store, f"{self.attempt}/end", {"lost": rank, "seconds": round(self._silent[session])})

    def _compare_standings(self, store: Any) -> None:
        """Writes where this machine's ranks stand, and reads all once every machine has written so."""
        mine, own = self._standing, f"{self.attempt}/still/{self.node.rank}"
        if mine != self._standing_written:
            self._standing_written = mine
            store.set(own, self._pack(own, mine)) if mine else store.delete_key(own)
        names = [f"{self.attempt}/still/{rank}" for rank in self.members]
        found = [self._read(store, name) for name in names] if mine and store.check(names) else []
        self._standings = {rank: facts for one in found for rank, facts in (one or {}).items()} if all(found) else {}

    def _is_silent(self, rank: int) -> bool:
        session = self._watched.get(rank, "")
        return session in self._left or self._silent.get(session, 0.0) > self.silent_seconds

    # ---- An attempt: meeting

    def meet(self, facts: Callable[[], Given], judge: Judge) -> list[Given]:
        """Gives this machine's facts and returns those of all members of the attempt, in order; `members` says who they are.

        Raises what node 0 refuses them for, the same on each, and `RetryableError` for machines that do not come, or leave.
        """
        self._wait_begins()
        with self._gone_told():
            found = self._attend(facts) if self.node.rank else self._host(json.loads(json.dumps(facts())), judge)
        self.members = [int(rank) for rank in found["members"]]
        self.seats |= {int(rank): _seat(seat) for rank, seat in found["seats"].items()}
        return list(found["all"])

    def share(self, step: str, given: Given, judge: Judge) -> list[Given]:
        """Gives an object and returns those of all members, in order, when all are there. Raises what they are refused for."""
        given = json.loads(json.dumps(given, allow_nan=False))
        self._wait_begins()
        with self._gone_told():
            if self.node.rank:
                self._set(f"{self.attempt}/{step}/{self.node.rank}", given, listed_in=f"{self.attempt}/{step}")
                return list(self._wait(step)["all"])
            objects: dict[int, Given] = {0: given}
            while missing := [rank for rank in self.members if rank not in objects]:
                self._raise_end()
                objects |= self._come(step, missing)
                self._say(f"waiting for {', '.join(self.names(missing))} to be ready")
                pause(POLL_SECONDS)
            found = [objects[rank] for rank in self.members]
            if errors := judge(found):
                raise self._refuse(errors)
            self._set(f"{self.attempt}/{step}/all", {"all": found})
            return found

    def _host(self, facts: Given, judge: Judge) -> Given:
        """Node 0's part of a meeting."""
        here: dict[int, Given] = {0: facts}
        members, self.wants = set(self._before), {}
        wrong_since, judged, errors = 0.0, "", list[UserError]()
        while True:
            self._raise_end()
            ranks = [rank for rank in range(1, self.node.count) if rank not in here]
            for rank, given in self._come("facts", ranks).items():
                here[rank] = given
                say(f"{self._name(rank)} has come")
            for rank in [rank for rank in here if rank and self._is_silent(rank)]:
                del here[rank]
                self._delete(f"{self.attempt}/facts/{rank}")
                say(f"{self._name(rank)} has gone; waiting for it to come again")
            if judged != (now_here := str([self.seats[rank].session for rank in sorted(here)])):
                judged, errors = now_here, judge([here[rank] for rank in sorted(here)])
            for rank in sorted(here, reverse=True) if errors and members else []:
                if rank not in members and judge([here[0], here[rank]]):  # it came to a run that trains without it
                    self._leave_out(rank, judge([here[0], here.pop(rank)]))
            waited, missing = time.monotonic() - self._began, [rank for rank in range(self.node.count) if rank not in here]
            wrong_since = (wrong_since or time.monotonic()) if errors else 0.0
            if errors and (not missing or time.monotonic() - wrong_since > GRACE_SECONDS):
                raise self._refuse(errors)
            enough = self.least is not None and len(here) >= self.least
            lost = {rank for rank in self._watched if self._is_silent(rank)} | (self.absent if self.attempt == 0 else set())
            last_call = bool(lost) and set(missing) <= lost and waited > LAST_CALL_SECONDS
            if not errors and (not missing or (enough and (last_call or waited > self.patience))):
                break
            if waited > self.patience:
                raise self._refuse([self._absent(missing, sorted(here))])
            who = f"node{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            self._say(f"waiting for {who}, up to {self.patience:g} s; here: {', '.join(self.names(sorted(here)))}")
            pause(POLL_SECONDS)
        self.members = sorted(here)
        seats = {str(rank): asdict(self.seats[rank]) for rank in self.members}
        found = {"members": self.members, "seats": seats, "all": [here[rank] for rank in self.members]}
        self._set(f"{self.attempt}/facts/all", found)
        return found

    def _come(self, step: str, ranks: Iterable[int]) -> dict[int, Given]:
        """Node 0: returns what machines of these ranks have given in a step, whoever of them has."""
        wanted = set(ranks)

        def do(store: Any) -> dict[int, Given]:
            found = {}
            for rank in sorted(wanted & self._listed(store, f"{self.attempt}/{step}")):
                seat, given = self._read(store, f"seat/{rank}"), self._read(store, f"{self.attempt}/{step}/{rank}")
                if isinstance(seat, dict) and isinstance(given, dict):
                    self.seats[rank] = _seat(seat)
                    self._watched[rank] = self.seats[rank].session
                    found[rank] = given
            return found

        return dict(self._ask(do)) if wanted else {}

    def _attend(self, give: Callable[[], Given]) -> Given:
        """Another machine's part of a meeting; one that comes too late waits for the next, with what its facts are then."""
        while True:
            facts = give()
            self.attempt = self._get("attempt") or 0
            found = self._get(f"{self.attempt}/facts/all")
            if found is None:
                self._taking_part = True
                self._set(f"{self.attempt}/facts/{self.node.rank}", facts, listed_in=f"{self.attempt}/facts")
                found = self._wait("facts")
            if found["seats"].get(str(self.node.rank), {}).get("session") == self.session:
                return dict(found)
            self._wait_for_next(facts)

    def _wait_for_next(self, facts: Given) -> None:
        """Waits until the run, which trains without this machine, starts again. Raises why it will not take it, or that it did not."""
        self._taking_part = False
        self._set(f"want/{self.node.rank}", {"facts": facts, "session": self.session}, listed_in="want")
        attempt, until = self.attempt, time.monotonic() + self.patience
        while (self._get("attempt") or 0) == attempt:
            self._raise_refusal()
            if self.least is None and time.monotonic() > until:
                raise RetryableError(
                    f"the run has begun without {self.name}, and did not start again within {self.patience:g} s",
                    place=self.where, hint="where it should be one of the run's machines, compare NUM_NODES and NODE_RANK with node 0's",
                )  # fmt: skip
            self._say("the run trains without this machine, and takes it in when it starts again")
            pause(POLL_SECONDS)

    def _wait(self, step: str) -> Given:
        """Returns what node 0 made of a step."""
        name = f"{self.attempt}/{step}/all"
        while True:
            self._raise_end()
            if self.attempt:
                self._raise_refusal()
            if (found := self._get(name)) is not None:
                return dict(found)
            self._say("waiting for the other nodes")
            pause(max(POLL_SECONDS, self.node.count / 1000))  # a thousand machines ask a thousand times a second

    def _raise_refusal(self) -> None:
        """Raises why node 0 does not take this machine into a run that trains without it."""
        if refusal := self._get(f"no/{self.session}"):
            self._taking_part = False
            raise_all(errors_from_json(refusal))

    def _raise_end(self) -> None:
        """Raises how the attempt ended, before its workers were started."""
        if self._end is None or self._end[0] != self.attempt:
            return
        end = self._end[1]
        if "errors" in end:
            raise_all(errors_from_json(end["errors"]))
        who = self._name(int(end["lost"])) if "lost" in end else f"node {end.get('node')} ({end.get('host')})"
        hint = "its own output says why, if it could still say anything; the same command on every node starts again"
        raise RetryableError(f"{who} has left, or cannot be reached any more, before the workers started", hint=hint)

    def _refuse(self, errors: Sequence[UserError]) -> UserError:
        """Tells all machines the errors; returns them to be raised here."""
        self._post_end({"errors": errors_to_json(errors)})
        try:
            raise_all(errors)
        except UserError as error:
            return error
        raise AssertionError("a refusal without an error")

    def _leave_out(self, rank: int, errors: Sequence[UserError]) -> None:
        """Tells one machine that came to a run which trains without it why it is not taken; the run continues."""
        say(f"left out: {self._name(rank)}: {errors[0].message}")
        self._set(f"no/{self.seats[rank].session}", errors_to_json(errors))
        self._delete(f"seat/{rank}")
        self._watched.pop(rank, None)

    def _absent(self, missing: Sequence[int], here: Sequence[int]) -> UserError:
        """The error for machines that did not come in time."""
        node, plural = self.node, "s" if len(missing) > 1 else ""
        return RetryableError(
            f"node{plural} {', '.join(map(str, missing))} of {node.count} did not come to port {node.master_port} within"
            f" {self.patience:g} s (`launch.join_seconds`); there are: {', '.join(self.names(here))}",
            hint=f"start the same command there with MASTER_ADDR={node.master_address} and its own NODE_RANK; each of them says why it waits",
        )

    @contextlib.contextmanager
    def _gone_told(self) -> Any:
        try:
            yield
        except StoreGone as error:
            raise RetryableError(
                "node 0 has left, or cannot be reached any more, before the workers started", place=self.where,
                hint="its own output says why; the same command on every node starts again",
            ) from error  # fmt: skip

    def _wait_begins(self) -> None:
        self._began = time.monotonic()
        self._said = self._began - SAY_SECONDS + FIRST_SECONDS

    def _say(self, text: str) -> None:
        """Prints a line about what is waited for; every `SAY_SECONDS`."""
        if time.monotonic() - self._said >= SAY_SECONDS:
            self._said = time.monotonic()
            say(f"{text} ({self._said - self._began:.0f} s so far)")

    # ---- An attempt: its end

    def _post_end(self, end: Given) -> Given:
        """Writes why the attempt ended, unless somebody else has, and returns what stands there."""
        end = {"node": self.node.rank, "host": self.host, **end}
        try:
            found = self._ask(lambda store: self._first(store, f"{self.attempt}/end", end))
        except StoreGone:
            return end
        self._end = self.attempt, found
        return dict(found)

    def ended_elsewhere(self, *, stopping: bool = False) -> Outcome | int | None:
        """Returns how the attempt ended on another machine: an outcome, or the signal with which all were asked to stop; `None` while it runs.

        Never waits: the thread has looked. `stopping`: this machine was asked to stop, which the others then learn.
        """
        now = time.monotonic()
        self._unheard, self._looked = self._unheard + min(now - self._looked, 2 * PERIOD_SECONDS), now
        if stopping and not self._told_stop:
            self._told_stop = True
            self._post_end({"stop": 15})
        if self._end is not None and self._end[0] == self.attempt:
            return int(self._end[1]["stop"]) if "stop" in self._end[1] else self._outcome(self._end[1])
        return self._without_node_0() if self._node_0_is_gone() else None

    def _node_0_is_gone(self) -> bool:
        return self.node.rank > 0 and (self._link is None or bool(self._link.broken) or self._unheard > self.silent_seconds)

    def share_standings(self, mine: Standings | None) -> Standings | None:
        """Takes where this machine's ranks stand, all quiet for too long (`None`: they are not), and returns where the ranks of all machines stand
        once that is so on each of them. Never waits."""
        self._standing = mine
        return self._standings if mine and self._standings else None

    def ask_to_stop(self, why: str) -> None:
        """Node 0: asks all machines to save and leave, for another attempt; `why` is said with it."""
        self._post_end({"stop": 15, "why": why})

    def _outcome(self, end: Given) -> Outcome:
        if "lost" in end:
            rank = int(end["lost"])
            return self._unreachable(rank, f"has been silent for {end.get('seconds')} s")
        if "errors" in end:
            error = errors_from_json(end["errors"])[0]
            return Outcome(code=error.exit_code, message=error.render())
        return Outcome(**end["outcome"])

    def _without_node_0(self) -> Outcome:
        how = "has left" if self._link and self._link.broken else f"has not answered for {self._unheard:.0f} s"
        return self._unreachable(0, how)

    def _unreachable(self, rank: int, how: str) -> Outcome:
        first = sum(self.ranks_by_node[: self.members.index(rank)]) if rank in self.members else 0
        text = f"error: rank {first} ({self._host_of(rank)}) cannot be reached: {self._name(rank)} {how}; all ranks were stopped"
        hint = "see whether that machine is on and its network is up; what it still wrote stands in its own output"
        return Outcome(code=LOST, rank=first, message=f"{text}\n\nhint: {hint}", cause="unreachable")

    ranks_by_node: tuple[int, ...] = ()
    """How many ranks each member starts, in order; known once the plan is."""

    def _host_of(self, rank: int) -> str:
        return self.seats[rank].host if rank in self.seats else "?"

    def settle(self, outcome: Outcome) -> Outcome:
        """Returns how the attempt ended: the same on every machine, by the one that saw the first cause.

        A machine whose ranks all did their work has nothing to settle; one whose ranks only lost a connection waits for the cause.
        """
        if outcome.code == 0:
            return outcome
        until = time.monotonic() + self.silent_seconds + PEER_SECONDS
        while outcome.cause == "peer" and time.monotonic() < until and (found := self.ended_elsewhere()) is None:
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
        return str(self._end[1].get("why") or "") if self._end is not None and self._end[0] == self.attempt else ""

    def follow(self, decide: Callable[[], Given]) -> Given | None:
        """Returns what node 0 decides after the end of an attempt; `None` where node 0 does not answer. Ends the attempt."""
        if self._node_0_is_gone():
            return None
        try:
            if self.node.rank == 0:
                found = decide()
                self._set(f"{self.attempt}/next", found)
            else:
                found = self._decided()
            self._before, self.members = self.members, []
            self.attempt += 1
            self._told_stop, self._standing, self._standing_written, self._standings = False, None, None, {}
            if self.node.rank == 0 and found.get("again"):
                self._set("attempt", self.attempt)
        except StoreGone:
            return None
        return dict(found)

    def _decided(self) -> Given:
        while (found := self._get(f"{self.attempt}/next")) is None:
            pause(POLL_SECONDS)
        return dict(found)

    def workers_port(self) -> int:
        """Node 0: returns a port for the workers' store of this attempt, MASTER_PORT + 1 + attempt or the next that is free."""
        first = self.node.master_port + 1 + self.attempt
        return next((port for port in range(first, min(first + 100, 65536)) if port_is_free(port)), first)

    def own_addresses(self) -> list[str]:
        """Returns this machine's own addresses on the way to others."""
        seats = [seat.master for rank, seat in self.seats.items() if rank and rank in self.members]
        return seats if self.node.rank == 0 else [self._mine.address]

    def look_for_wants(self, judge: Callable[[Given], list[UserError]]) -> list[int]:
        """Node 0: returns the ranks of machines that wait for the next attempt and may be taken; refuses those that may not."""

        def do(store: Any) -> dict[int, Any]:
            return {
                rank: (self._read(store, f"seat/{rank}"), self._read(store, f"want/{rank}"))
                for rank in self._listed(store, "want")
            }

        for rank, (seat, want) in self._ask(do).items():
            if rank in self.members or rank in self.wants or not isinstance(seat, dict) or not isinstance(want, dict):
                continue
            self.seats[rank] = _seat(seat)
            if want.get("session") != self.seats[rank].session:
                continue
            if errors := judge(want.get("facts") or {}):
                self._leave_out(rank, errors)
            else:
                self.wants[rank] = want["facts"]
                self._watched[rank] = self.seats[rank].session
        return [rank for rank in self.wants if not self._is_silent(rank)]

    # ---- The end

    def fail(self, error: BaseException) -> None:
        """Tells all why this machine, where it takes part in the attempt, leaves, unless they know. Raises nothing."""
        if (
            self._link is not None
            and self._taking_part
            and not self._node_0_is_gone()
            and not (self._end is not None and self._end[0] == self.attempt)
        ):
            with contextlib.suppress(BaseException):
                self._post_end({"errors": errors_to_json(why(error, self.name))})

    def close(self) -> None:
        """Leaves in order. Node 0 keeps the store until the others have left, or are silent."""
        if self._link is None:
            return
        with contextlib.suppress(StoreGone, KeyboardInterrupt, SystemExit):
            if self._node_0_is_gone():
                raise StoreGone
            self._ask(lambda store: store.append("left", f"{self.session} "))
            until = time.monotonic() + LEAVE_SECONDS
            if self.node.rank == 0:
                self._first_ask_next()
            while self.node.rank == 0 and time.monotonic() < until and self._stay():
                time.sleep(POLL_SECONDS)
        self._link.close()
        self._link = self._store = None

    def _first_ask_next(self) -> None:
        """Tells machines that still wait for a decision that there will be no other attempt."""
        self._ask(lambda store: self._first(store, f"{self.attempt}/next", {"again": False}))

    def _stay(self) -> bool:
        left = self._ask(lambda store: store.get("left") if store.check(["left"]) else b"").split()
        return any(session.encode() not in left and not self._is_silent(rank) for rank, session in self._watched.items() if rank)


def why(error: BaseException, name: str) -> list[UserError]:
    """Returns what the other machines are told of an error that made this one leave."""
    if isinstance(error, UserError):
        told = []
        for one in errors_from_json(errors_to_json([error])):
            where = f"{one.place}: " if one.place else ""
            told.append(type(one)(f"{name} could not go on: {where}{one.message}", hint=one.hint))
        return told
    if isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code in (130, 143)):
        return [RetryableError(f"{name} was stopped on request before its workers started")]
    if isinstance(error, SystemExit) and type(error.code) is int and 2 <= error.code <= 5:
        said = f"{name} could not prepare the run: its own output says why"
        return errors_from_json([{"code": error.code, "message": said}])
    return [RetryableError(f"{name} left before its workers started; its own output says why")]


def say(text: str) -> None:
    """Prints a line; what others sent may be in it."""
    print(printable(text[:500]), file=sys.stderr, flush=True)


def pause(seconds: float) -> None:
    """Waits; a signal that came is raised."""
    time.sleep(seconds)
    raise_what_was_heard()


def _seat(value: Mapping[str, Any]) -> Seat:
    """Returns a seat that another machine wrote."""
    return Seat(**{name: str(value.get(name, ""))[:255] for name in ("session", "host", "address", "master")})


def _reason(error: OSError) -> tuple[str, str]:
    """Returns in words which side is closed, and the key of the hint."""
    if isinstance(error, ConnectionRefusedError):
        return "that machine answers, but nothing listens there yet: node 0 is not started, or has another MASTER_PORT", "refused"
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return "no answer: a firewall on the way drops what is sent, or no machine has this address", "timeout"
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN):
        return f"no machine answers at this address ({error.strerror})", "route"
    return f"the connection failed ({error.strerror or error})", "route"


def _seconds(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)


def _tcp_store() -> Any:
    """Returns torch's class. Its C++ writes stack traces for every connection that fails, which we report ourselves."""
    name = "TORCH_CPP_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "FATAL")
    try:
        from torch.distributed import TCPStore
    finally:
        if before is None:
            os.environ.pop(name, None)
    return TCPStore
