"""How the launchers of several nodes meet on MASTER_ADDR:MASTER_PORT before anything is planned: node 0 listens, the others come.

A meeting has rounds. In each every node gives an object; node 0 compares them all and either refuses, by the same errors on every node,
or sends the list of all to everybody. The connections stay open between the rounds, so a node that leaves meanwhile is noticed, and
what made it leave is told; each node says all the while that it lives, so one that hangs is noticed too. After `close` the port is
free for torch's store. Where the run has a key, both sides prove that they know it before any fact is sent: a stranger, and whoever
does not speak the protocol, is dropped.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sft_play.errors import RetryableError, UserError, printable, raise_all
from sft_play.launch.agreement import errors_from_json, errors_to_json
from sft_play.launch.environment import Node
from sft_play.launch.run_folder import raise_what_was_heard
from sft_play.launch.wire import Line

Given = dict[str, Any]
Judge = Callable[[Sequence[Given]], list[UserError]]
"""What a round's objects, in order of nodes, are refused for; those of node 0 first."""

SAY_SECONDS = 15.0
"""Between two lines that say who is waited for."""
FIRST_SECONDS = 2.0
"""Until the first of them."""
TICK_SECONDS = 0.2
BEAT_SECONDS = 5.0
"""How often a node that prepares something between two rounds says that it lives."""
LEAST_SILENCE = 30.0
"""A node that is waited for may say nothing for so long, or for `launch.join_seconds` where that is more."""
LEAVE_SECONDS = 2.0
"""How long node 0 waits at the end for the others to close, so that what it sent last arrives and the port is free."""


@dataclass(kw_only=True)
class Meeting(ABC):
    """One node's side of a meeting."""

    node: Node
    host: str
    """This machine's name."""
    patience: float
    """Seconds that the first round waits for nodes that have not come (`launch.join_seconds`)."""
    session: str = field(default_factory=lambda: uuid.uuid4().hex)
    """A node that was started again has another."""
    round: int = 0
    over: bool = False
    """Whether everybody knows how it ended."""
    began: float = 0.0
    said: float = 0.0
    resting: threading.Event | None = None
    """Ends the thread that between the rounds says that this node lives, and reads."""
    beats: threading.Thread | None = None

    @property
    def name(self) -> str:
        """How messages call this node."""
        return f"node {self.node.rank} ({self.host})"

    def exchange(self, given: Given, judge: Judge) -> list[Given]:
        """Gives an object and returns those of all nodes. Raises what node 0 refused them for, or `RetryableError`."""
        self._rest()
        self.began = time.monotonic()
        self.said = self.began - SAY_SECONDS + FIRST_SECONDS
        given = json.loads(json.dumps(given, allow_nan=False))  # as the others get it
        found = self._first(given, judge) if self.round == 0 else self._further(given, judge)
        self.round += 1
        self._beat()
        return found

    @property
    def silence(self) -> float:
        """The longest time in seconds that a node which is waited for may say nothing."""
        return max(self.patience, LEAST_SILENCE)

    def _beat(self) -> None:
        """Says from now on that this node lives, in a thread: what is prepared between the rounds may take hours.

        It reads too: where both sides only write, windows fill up after hours, and the kernel ends the connection.
        """
        self.resting = resting = threading.Event()

        def beat() -> None:
            while not resting.wait(min(BEAT_SECONDS, self.silence / 4)):
                for line in self._open():
                    line.drain()
                    line.beat()

        self.beats = threading.Thread(target=beat, name="meeting", daemon=True)
        self.beats.start()

    def _rest(self) -> None:
        """Ends the thread, before this one uses the connections."""
        if self.resting and self.beats:
            self.resting.set()
            self.beats.join()

    @abstractmethod
    def _open(self) -> list[Line]: ...

    @abstractmethod
    def _first(self, given: Given, judge: Judge) -> list[Given]: ...

    @abstractmethod
    def _further(self, given: Given, judge: Judge) -> list[Given]: ...

    @abstractmethod
    def addresses(self) -> list[str]:
        """Returns this machine's own addresses on the connections to other nodes."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Tells the others why this node leaves, unless they know. Raises nothing."""

    @abstractmethod
    def close(self) -> None:
        """Ends the meeting; the port is free afterwards."""

    def _refused(self, errors: Sequence[UserError]) -> UserError:
        self.over = True
        try:
            raise_all(errors)
        except UserError as error:
            return error
        raise AssertionError("a refusal without an error")

    def _say(self, text: str) -> None:
        """Prints a line about what is waited for; every `SAY_SECONDS`."""
        if time.monotonic() - self.said >= SAY_SECONDS:
            self.said = time.monotonic()
            say(f"{text} ({self.said - self.began:.0f} s so far)")


def say(text: str) -> None:
    """Prints a line; what others sent may be in it."""
    print(printable(text[:500]), file=sys.stderr, flush=True)


def wait_for(lines: Iterable[Line | socket.socket], seconds: float = TICK_SECONDS) -> None:
    """Returns when one of them has something to read, or after a while. A signal that came is raised."""
    with selectors.DefaultSelector() as selector:
        for line in lines:
            selector.register(line.sock if isinstance(line, Line) else line, selectors.EVENT_READ)
        selector.select(seconds)
    raise_what_was_heard()


def why(error: BaseException, name: str) -> list[UserError]:
    """Returns what the other nodes are told of an error that made this one leave."""
    if isinstance(error, UserError):
        told = []
        for one in errors_from_json(errors_to_json([error])):
            where = f"{one.place}: " if one.place else ""
            told.append(type(one)(f"{name} could not go on: {where}{one.message}", hint=one.hint))
        return told
    if isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code in (130, 143)):
        return [RetryableError(f"{name} was stopped on request before its workers started")]
    if isinstance(error, SystemExit) and type(error.code) is int and 2 <= error.code <= 5:
        (told_as,) = errors_from_json(
            [{"code": error.code, "message": f"{name} could not prepare the run: its own output says why"}]
        )
        return [told_as]
    return [RetryableError(f"{name} left before its workers started; its own output says why")]
