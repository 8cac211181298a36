"""A meeting as every node but node 0 sees it: finding node 0, which may start later, and saying why it is not found (yet)."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from dataclasses import dataclass

from sft_play.errors import HardwareError, RetryableError, UserError
from sft_play.launch.agreement import errors_from_json, errors_to_json
from sft_play.launch.key import MAKE_ONE, VARIABLE, new_word, proof, proves
from sft_play.launch.meeting import Given, Judge, Meeting, say, wait_for, why
from sft_play.launch.wire import GoneError, Line, OtherVersionError, StrangerError

CONNECT_SECONDS = 3.0
"""How long one attempt waits for an answer."""
PAUSE_SECONDS = 0.5
HEARD_SECONDS = 5.0
"""How long what listens there may take to answer in our protocol."""
RESOLVE_SECONDS = 30.0
"""How long a name may be unknown: a cluster's names appear when its machines do."""
HINTS = {
    "refused": "start node 0 with the same command and `NODE_RANK=0`; where it runs, give the same MASTER_PORT on every node",
    "timeout": "open MASTER_PORT (and the high ports) in the firewall of node 0, and compare MASTER_ADDR with `ip address` there",
    "route": "see with `ping` whether that machine is on, and whether both are on one network",
    "stranger": "choose another MASTER_PORT, the same on every node; if the run has begun without this node, compare NUM_NODES",
}
"""What to do about a reason why node 0 cannot be reached."""


@dataclass(kw_only=True)
class Guest(Meeting):
    """The side of every node but node 0."""

    line: Line | None = None

    def _first(self, given: Given, judge: Judge) -> list[Given]:  # noqa: ARG002 - node 0 judges
        while True:
            self.line = self._reach(given)
            with contextlib.suppress(GoneError):  # node 0 was started again: it may come back
                return self._listen()
            self.line.close()

    def _further(self, given: Given, judge: Judge) -> list[Given]:  # noqa: ARG002
        assert self.line is not None, "the first round makes the connection"
        with contextlib.suppress(GoneError):  # node 0 may have said why before it left
            self.line.send("given", round=self.round, given=given)
        try:
            return self._listen()
        except GoneError as error:
            self.over = True
            raise RetryableError(
                "node 0 has left, or cannot be reached any more, before the workers started", hint="its own output says why"
            ) from error

    def _listen(self) -> list[Given]:
        """Returns what node 0 sends of all nodes. Raises what it refuses them for, `RetryableError` when it is silent, and `GoneError`."""
        assert self.line is not None
        waiting, heard = "waiting for the other nodes", time.monotonic()
        while True:
            try:
                message = self.line.receive()
                refusal = errors_from_json(message.get("errors")) if message and message["kind"] == "refused" else []
            except (StrangerError, OtherVersionError, ValueError) as error:
                raise GoneError(str(error)) from error
            if refusal:
                raise self._refused(refusal)
            heard = time.monotonic() if message else heard
            if message is None and time.monotonic() - heard > self.silence:
                self.over = True
                raise RetryableError(
                    f"node 0 has said nothing for {self.silence:g} s, before the workers started",
                    place=f"{self.node.master_address}:{self.node.master_port}",
                    hint="its launcher is stopped or hangs: see what it does there, and end it; the same command on every node starts again",
                )
            if message is None:
                self._say(waiting)
                wait_for([self.line])
            elif message["kind"] == "ping":
                self.line.send("pong")
            elif message["kind"] == "wait":
                waiting = str(message.get("text"))
            elif message["kind"] == "all" and message.get("round") == self.round and isinstance(message.get("all"), list):
                return list(message["all"])

    def _reach(self, given: Given) -> Line:
        """Returns a connection on which node 0 has heard this node. Raises `RetryableError` when the patience is over."""
        node, until = self.node, self.began + self.patience
        where = f"{node.master_address}:{node.master_port}"
        while True:
            line, reason, hint = self._attempt(given)
            now = time.monotonic()
            if line:
                say(f"{self.name} has reached node 0 at {where}")
                return line
            if hint == "name" and now - self.began > min(RESOLVE_SECONDS, self.patience):
                raise UserError(
                    f"`MASTER_ADDR` is `{node.master_address}`, which {reason}", hint="give the IPv4 address of node 0"
                )
            if now > until:
                raise RetryableError(
                    f"{self.name} did not reach node 0 within {self.patience:g} s: {reason}", place=where, hint=HINTS.get(hint)
                )
            self._say(f"waiting for node 0 at {where}, up to {self.patience:g} s: {reason}")
            wait_for([], PAUSE_SECONDS)

    def _attempt(self, given: Given) -> tuple[Line | None, str, str]:
        """Returns a connection, or why there is none and the key of the hint."""
        node = self.node
        try:
            address = socket.getaddrinfo(node.master_address, node.master_port, socket.AF_INET, socket.SOCK_STREAM)[0][4]
        except socket.gaierror as error:
            return None, f"cannot be resolved: {error.strerror}", "name"
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.settimeout(CONNECT_SECONDS)
        try:
            sock.connect(address)
        except OSError as error:
            sock.close()
            return None, *_reason(error)
        if (line := Line.over(sock)) and self._heard(line, given):
            return line, "", ""
        line.close()
        return None, "something listens there that is no launcher of SFT-Play waiting for this run", "stranger"

    def _heard(self, line: Line, given: Given) -> bool:
        """Says hello; whether what listens there answers as node 0 does."""
        until = time.monotonic() + HEARD_SECONDS
        node = self.node
        hello = {"rank": node.rank, "num_nodes": node.count, "host": self.host, "session": self.session, "given": given}
        word, known = new_word(), node.key is None
        try:
            line.send("knock", word=word) if node.key else line.send("hello", **hello)
            while time.monotonic() < until:
                if message := line.receive():
                    if node.key is None or known or message["kind"] != "word":
                        return known and self._welcome(message)
                    if not (known := proves(node.key, message.get("proof"), "node 0", word, message.get("word"))):
                        raise UserError(f"node 0 has another `{VARIABLE}` than {self.name}, or none", hint=MAKE_ONE)
                    line.send("hello", **hello, proof=proof(node.key, "node", word, message["word"], node.rank, self.session))
                wait_for([line])
        except OtherVersionError as error:
            line.close()
            raise HardwareError(
                f"node 0 speaks version {error} of the launchers' protocol, and {self.name} another",
                hint="install the same SFT-Play on every node",
            ) from None
        except (StrangerError, GoneError):
            pass
        return False

    def _welcome(self, message: Given) -> bool:
        """Whether an answer is node 0's. Raises what it refuses this node for."""
        with contextlib.suppress(ValueError):
            if message["kind"] == "refused" and (errors := errors_from_json(message.get("errors"))):
                raise self._refused(errors)
        return bool(message["kind"] == "heard")

    def _open(self) -> list[Line]:
        return [self.line] if self.line else []

    def addresses(self) -> list[str]:
        """Returns this machine's address on the connection to node 0."""
        return [self.line.own_address()] if self.line else []

    def fail(self, error: BaseException) -> None:
        """Tells node 0, which tells the others."""
        self._rest()
        if self.line and not self.over:
            with contextlib.suppress(GoneError):
                self.line.send("failed", errors=errors_to_json(why(error, self.name)))
        self.over = True

    def close(self) -> None:
        """Ends the connection."""
        self._rest()
        if self.line:
            self.line.close()


def _reason(error: OSError) -> tuple[str, str]:
    """Returns in words which side is closed, and the key of the hint."""
    if isinstance(error, ConnectionRefusedError):
        return "that machine answers, but nothing listens there yet: node 0 is not started, or has another MASTER_PORT", "refused"
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return "no answer: a firewall on the way drops what is sent, or no machine has this address", "timeout"
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN):
        return f"no machine answers at this address ({error.strerror})", "route"
    return f"the connection failed ({error.strerror or error})", "route"
