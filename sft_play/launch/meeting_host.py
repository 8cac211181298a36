"""A meeting as node 0 sees it: it listens, gives every node its seat, compares what they say and tells all of them the same."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from sft_play.errors import HardwareError, RetryableError, UserError
from sft_play.launch.agreement import errors_from_json, errors_to_json
from sft_play.launch.key import MAKE_ONE, VARIABLE, new_word, proof, proves
from sft_play.launch.meeting import LEAVE_SECONDS, SAY_SECONDS, Given, Judge, Meeting, say, wait_for, why
from sft_play.launch.network import holder_of
from sft_play.launch.wire import GoneError, Line, OtherVersionError, StrangerError

STRANGER_SECONDS = 10.0
"""How long a connection may take to say hello."""
MOST_CONNECTIONS = 4096
GRACE_SECONDS = 3.0
"""How long others may still come, to be told too, when it is clear that the run is refused."""
ANSWER_SECONDS = 3.0
"""How long a node has to show that it is still there, when another one comes with its rank."""
BUSY_SECONDS = 60.0
"""How long the port may still be kept by this run's last launch."""


@dataclass(kw_only=True, slots=True)
class Seat:
    """A node that has come."""

    line: Line
    session: str
    host: str
    given: Given | None
    heard: float = 0.0
    """When it last said something in this round (monotonic seconds)."""


@dataclass(kw_only=True, slots=True)
class Rival:
    """A node that has come with the rank of another, which is asked whether it is still there."""

    rank: int
    seat: Seat
    until: float


@dataclass(kw_only=True)
class Host(Meeting):
    """The side of node 0."""

    again: bool = False
    """Whether this run was launched before, so that the port may still be on its way to be free."""
    listener: socket.socket | None = None
    unknown: dict[Line, float] = field(default_factory=dict)
    """Connections that have not said hello -> when they came."""
    words: dict[Line, tuple[str, str]] = field(default_factory=dict)
    """Connections that want to prove the key -> the random words of both sides."""
    seats: dict[int, Seat] = field(default_factory=dict)
    rivals: list[Rival] = field(default_factory=list)
    strangers: set[str] = field(default_factory=set)
    """Addresses of connections that were dropped."""
    wrong: list[UserError] = field(default_factory=list)
    """What can be no run, found while nodes came."""
    told: float = 0.0
    """When the others were last told who is waited for."""

    def _first(self, given: Given, judge: Judge) -> list[Given]:
        self.listener = self._listen()
        until, wrong_since, judged, errors = self.began + self.patience, 0.0, "", list[UserError]()
        while True:
            self._accept()
            self._hear()
            self._settle_rivals()
            if judged != (now_here := self._sessions()):
                judged, errors = now_here, self.wrong or judge(self._all(given))
            now = time.monotonic()
            wrong_since = (wrong_since or now) if errors else 0.0
            complete = sum(rank > 0 for rank in self.seats) == self.node.count - 1 and not self.rivals
            if errors and (complete or now - wrong_since > GRACE_SECONDS):
                raise self._refuse(errors)
            if complete:
                break
            if now > until:
                raise self._refuse([self._absent()])
            self._tell_and_say(f"waiting for {self._missing()}, up to {self.patience:g} s; here: {self._present()}")
            wait_for([self.listener, *self.unknown, *self._lines()])
        self._close_listener()
        return self._share(given)

    def _further(self, given: Given, judge: Judge) -> list[Given]:
        for seat in self.seats.values():
            seat.heard = time.monotonic()
        while True:
            errors: list[UserError] = []
            for rank, seat in sorted(self.seats.items()):
                errors += self._next_of(rank, seat)
            waiting = [rank for rank, seat in sorted(self.seats.items()) if seat.given is None]
            if not waiting:
                errors += judge(self._all(given))
            if errors:
                raise self._refuse(errors)
            if not waiting:
                return self._share(given)
            self._tell_and_say(f"waiting for {self._names(waiting)} to be ready")
            wait_for(self.seats[rank].line for rank in waiting)

    def _next_of(self, rank: int, seat: Seat) -> list[UserError]:
        """Reads what a node gives in this round; returns what is wrong."""
        name = f"node {rank} ({seat.host})"
        try:
            while seat.given is None and (message := seat.line.receive()) is not None:
                seat.heard = time.monotonic()
                if message["kind"] == "given" and message.get("round") == self.round and isinstance(message.get("given"), dict):
                    seat.given = message["given"]
                elif message["kind"] == "failed":
                    return errors_from_json(message.get("errors"))
        except (GoneError, StrangerError, OtherVersionError, ValueError):
            hint = "its own output says why, if it could still say anything; the same command on every node starts again"
            return [RetryableError(f"{name} has left, or cannot be reached any more, before the workers started", hint=hint)]
        if seat.given is None and time.monotonic() - seat.heard > self.silence:
            hint = "its launcher is stopped or hangs: see what it does there, and end it; the same command on every node starts again"
            return [RetryableError(f"{name} has said nothing for {self.silence:g} s, before the workers started", hint=hint)]
        return []

    def _listen(self) -> socket.socket:
        """Returns the listening socket. Raises `HardwareError` where another process has the port."""
        until = time.monotonic() + (min(BUSY_SECONDS, self.patience) if self.again else 0.0)
        while True:
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("", self.node.master_port))
                sock.listen(128)
            except OSError as error:
                sock.close()
                if time.monotonic() < until:
                    wait_for([], 0.5)
                    continue
                raise HardwareError(
                    f"node 0 cannot listen on port {self.node.master_port}: {error.strerror}{holder_of(self.node.master_port)}",
                    hint="choose another MASTER_PORT, the same on every node",
                ) from error
            sock.setblocking(False)
            return sock

    def _accept(self) -> None:
        """Takes new connections in, and drops those that say nothing."""
        assert self.listener is not None
        now = time.monotonic()
        with contextlib.suppress(OSError):  # nothing more is there, or it has gone already
            while len(self.unknown) + len(self.seats) < MOST_CONNECTIONS:
                self.unknown[Line.over(self.listener.accept()[0])] = now
        for line, since in list(self.unknown.items()):
            if now - since > STRANGER_SECONDS:
                self._drop(line)

    def _hear(self) -> None:
        """Reads what has arrived: hellos of those who came, answers of those who have a seat."""
        for line in list(self.unknown):
            try:
                if (message := line.receive()) and self._may_sit(line, message):
                    self._seat(line, message)
                    del self.unknown[line]
                    self.words.pop(line, None)
            except OtherVersionError as error:
                with contextlib.suppress(GoneError):
                    line.send("heard")  # in our version, so that it can say so itself
                self.wrong.append(HardwareError(
                    f"a node at {line.their_address()} speaks version {error} of the launchers' protocol, and node 0 another",
                    hint="install the same SFT-Play on every node",
                ))  # fmt: skip
                self._drop(line)
            except (StrangerError, GoneError):
                self._drop(line)
        for rank, seat in list(self.seats.items()):
            try:
                while message := seat.line.receive():
                    if message["kind"] == "pong":
                        self._alive(rank)
            except (StrangerError, OtherVersionError, GoneError):
                seat.line.close()
                del self.seats[rank]
                if not any(rival.rank == rank for rival in self.rivals):
                    say(f"node {rank} ({seat.host}) has gone; waiting for it to come again")

    def _may_sit(self, line: Line, message: Given) -> bool:
        """Whether a message is to be taken for a hello; answers a node that wants to prove its key. Raises `StrangerError`."""
        key, word = self.node.key, message.get("word")
        if message["kind"] == "knock" and isinstance(word, str) and line not in self.words:
            self.words[line] = word, new_word()
            with contextlib.suppress(GoneError):
                line.send("word", word=self.words[line][1], proof=proof(key, "node 0", *self.words[line]) if key else None)
            return False
        said = (*self.words.get(line, ()), message.get("rank"), message.get("session"))
        if key and not (line in self.words and proves(key, message.get("proof"), "node", *said)):
            error = UserError(f"node 0 ({self.host}) takes only nodes that know its `{VARIABLE}`", hint=MAKE_ONE)
            with contextlib.suppress(GoneError):
                line.send("refused", errors=errors_to_json([error]))
            raise StrangerError("it does not know the key")
        return True

    def _drop(self, line: Line) -> None:
        if (address := line.their_address()) not in self.strangers:
            self.strangers.add(address)
            say(
                f"dropped a connection from {address}: it is no launcher of this run{f', or has another `{VARIABLE}`' if self.node.key else ''}"
            )
        self.unknown.pop(line, None)
        self.words.pop(line, None)
        line.close()

    def _seat(self, line: Line, message: Given) -> None:
        """Gives a node its seat, or notes why it has none. Raises `StrangerError` for what is no hello."""
        rank, count, host, session = (message.get(name) for name in ("rank", "num_nodes", "host", "session"))
        given = message.get("given")
        words = isinstance(host, str) and isinstance(session, str) and isinstance(given, dict)
        if message["kind"] != "hello" or type(rank) is not int or type(count) is not int or not words or rank < 0:
            raise StrangerError("no hello")
        with contextlib.suppress(GoneError):
            line.send("heard")
        seat = Seat(line=line, session=str(session), host=str(host)[:255], given=given)
        if rank >= self.node.count:
            self.wrong.append(UserError(
                f"`NODE_RANK` is {rank} on {seat.host} with `NUM_NODES={count}`, but node 0 ({self.host}) has `NUM_NODES={self.node.count}`",
                hint="give every node the same NUM_NODES, and ranks from 0 on",
            ))  # fmt: skip
            self.seats[-len(self.seats) - 1] = seat  # it is told too
        elif rank == 0:
            self._twice(0, self.host, seat)
        elif (old := self.seats.get(rank)) and old.session != seat.session:
            with contextlib.suppress(GoneError):
                old.line.send("ping")
            self.rivals.append(Rival(rank=rank, seat=seat, until=time.monotonic() + ANSWER_SECONDS))
        else:
            if old := self.seats.get(rank):  # the same process, on a new connection
                old.line.close()
            self.seats[rank] = seat
            say(f"node {rank} ({seat.host}) has come")

    def _twice(self, rank: int, host: str, seat: Seat) -> None:
        self.wrong.append(UserError(
            f"two nodes have `NODE_RANK={rank}`: {host} and {seat.host} ({seat.line.their_address()})", hint="give each node a rank of its own"
        ))  # fmt: skip
        self.seats[-len(self.seats) - 1] = seat

    def _alive(self, rank: int) -> None:
        """A node that was asked is there: whoever came with its rank is wrong."""
        for rival in [one for one in self.rivals if one.rank == rank]:
            self.rivals.remove(rival)
            self._twice(rank, self.seats[rank].host, rival.seat)

    def _settle_rivals(self) -> None:
        """Gives seats of nodes that are gone to those who came instead: the same node, started again."""
        for rival in list(self.rivals):
            old = self.seats.get(rival.rank)
            if old is None or time.monotonic() > rival.until:
                if old:
                    old.line.close()
                self.rivals.remove(rival)
                self.seats[rival.rank] = rival.seat
                say(f"node {rival.rank} ({rival.seat.host}) has come again")

    def _sessions(self) -> str:
        """Returns who is here, in a form that changes when anybody comes or goes."""
        return " ".join(f"{rank}:{seat.session}" for rank, seat in sorted(self.seats.items())) + f" {len(self.wrong)}"

    def _all(self, given: Given) -> list[Given]:
        """Returns what has been given so far, node 0's first."""
        return [given, *(seat.given for rank, seat in sorted(self.seats.items()) if rank > 0 and seat.given is not None)]

    def _share(self, given: Given) -> list[Given]:
        """Sends everybody what all have given, and returns it."""
        found = self._all(given)
        for rank, seat in sorted(self.seats.items()):
            try:
                seat.line.send("all", round=self.round, all=found)
            except GoneError as error:
                text = f"node {rank} ({seat.host}) has left, or cannot be reached any more, before the workers started"
                raise self._refuse([RetryableError(text, hint="its own output says why")]) from error
            seat.given = None
        return found

    def _refuse(self, errors: Sequence[UserError]) -> UserError:
        """Tells everybody the errors; returns them to be raised here."""
        for line in self._lines():
            with contextlib.suppress(GoneError):
                line.send("refused", errors=errors_to_json(errors))
        return self._refused(errors)

    def _tell_and_say(self, text: str) -> None:
        self._say(text)
        if time.monotonic() - self.told > SAY_SECONDS / 3:
            self.told = time.monotonic()
            for line in self._lines():
                with contextlib.suppress(GoneError):
                    line.send("wait", text=text)

    def _open(self) -> list[Line]:
        return self._lines()

    def _lines(self) -> list[Line]:
        return [seat.line for seat in self.seats.values()] + [rival.seat.line for rival in self.rivals]

    def _names(self, ranks: Sequence[int]) -> str:
        names = [f"node {rank} ({self.seats[rank].host})" for rank in ranks]
        return ", ".join(names)

    def _missing(self) -> str:
        ranks = [str(rank) for rank in range(1, self.node.count) if rank not in self.seats]
        return f"node{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"

    def _present(self) -> str:
        return ", ".join([self.name, *(f"node {rank} ({seat.host})" for rank, seat in sorted(self.seats.items()) if rank > 0)])

    def _absent(self) -> UserError:
        """The error for nodes that did not come in time."""
        node = self.node
        hint = f"start the same command there with MASTER_ADDR={node.master_address} and its own NODE_RANK; each of them says why it waits"
        if self.strangers:
            hint += f"; connections that spoke another language came from {', '.join(sorted(self.strangers)[:5])}"
        return RetryableError(
            f"{self._missing()} of {node.count} did not come to port {node.master_port} within {self.patience:g} s"
            f" (`launch.join_seconds`); there are: {self._present()}",
            hint=hint,
        )  # fmt: skip

    def addresses(self) -> list[str]:
        """Returns this machine's address on the connection to each node."""
        return [seat.line.own_address() for _, seat in sorted(self.seats.items())]

    def fail(self, error: BaseException) -> None:
        """Tells all nodes."""
        self._rest()
        if not self.over:
            self._refuse(why(error, self.name))

    def close(self) -> None:
        """Waits until the others have closed, for a moment, and gives the port back."""
        self._rest()
        self._close_listener()
        until = time.monotonic() + LEAVE_SECONDS
        for line in [*self._lines(), *self.unknown]:
            with contextlib.suppress(OSError):
                line.sock.shutdown(socket.SHUT_WR)
            while time.monotonic() < until and not _has_closed(line):
                time.sleep(0.02)
            line.close()
        self.seats.clear()

    def _close_listener(self) -> None:
        if self.listener:
            self.listener.close()
            self.listener = None
        for line in list(self.unknown):
            line.close()
        self.unknown.clear()


def _has_closed(line: Line) -> bool:
    try:
        line.receive()
    except (GoneError, StrangerError, OtherVersionError):
        return True
    return False
