"""Frames between the launchers of several nodes: a head that names us, then strict JSON of bounded size. Sockets only, no decisions.

A frame is the magic, the version of the protocol (2 bytes), the length (4 bytes, big endian), and that many bytes of UTF-8 JSON: one
object. Whatever else arrives comes from a stranger.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAGIC = b"SFTPLAY\n"
VERSION = 1
HEAD = struct.Struct("!8sHI")
LARGEST_BYTES = 8 * 2**20
"""Of a message: the plan of thousands of ranks."""
IDLE = frozenset({"here", "wait"})
"""Kinds of messages that say no more than that the other side lives, and for whom it waits."""
MOST_KEPT = 8
"""Messages that are kept for the next round; a node sends one or two."""
SEND_SECONDS = 10.0
"""How long a peer may take no bytes."""
ALIVE_SECONDS = 10
"""Silence on a connection after which the kernel asks whether the other machine is still there: it has three times 5 s to answer."""


class StrangerError(Exception):
    """What was received is not of this protocol."""


class OtherVersionError(Exception):
    """It is, but of another version, which is the argument."""


class GoneError(Exception):
    """The other side has closed the connection, or its machine is gone."""


def pack(message: Mapping[str, Any]) -> bytes:
    """Returns the frame of a message. Raises `ValueError` for one that is too large, or holds NaN or infinity."""
    body = json.dumps(message, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    if len(body) > LARGEST_BYTES:
        raise ValueError(f"a message of {len(body)} bytes; {LARGEST_BYTES} are the most")
    return HEAD.pack(MAGIC, VERSION, len(body)) + body


def unpack(body: bytes) -> dict[str, Any]:
    """Returns the object that a frame's body holds. Raises `StrangerError`."""
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_refuse, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise StrangerError(f"not JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("kind"), str):
        raise StrangerError("not a message")
    return found


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


@dataclass(kw_only=True, slots=True, eq=False)
class Line:
    """One connection. Reading never waits; writing waits for at most `SEND_SECONDS`."""

    sock: socket.socket
    buffer: bytearray = field(default_factory=bytearray)
    kept: list[dict[str, Any]] = field(default_factory=list)
    """What came between two rounds, and is for the next."""

    @staticmethod
    def over(sock: socket.socket) -> Line:
        """Takes a connected socket over: without delays, and asked by the kernel whether the other machine still lives."""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ALIVE_SECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000)
        return Line(sock=sock)

    def send(self, kind: str, **facts: Any) -> None:
        """Sends a message. Raises `GoneError`."""
        self.sock.settimeout(SEND_SECONDS)
        try:
            self.sock.sendall(pack({"kind": kind, **facts}))
        except OSError as error:
            raise GoneError(str(error)) from error
        finally:
            with contextlib.suppress(OSError):
                self.sock.setblocking(False)

    def beat(self) -> None:
        """Says that this side lives, unless the other has left much unread; never waits, and a connection that is gone is no error here."""
        with contextlib.suppress(OSError, ValueError):
            if select.select([], [self.sock], [], 0)[1]:
                self.sock.send(pack({"kind": "here"}))

    def drain(self) -> None:
        """Takes in what has arrived, so that the other side can go on writing: drops idle messages and keeps others for `receive`.

        Never waits. What is wrong with the connection is left for `receive` to raise.
        """
        if len(self.kept) >= MOST_KEPT:
            return
        self._read()
        with contextlib.suppress(StrangerError, OtherVersionError):
            while (message := self._next()) is not None:
                if message["kind"] not in IDLE:
                    self.kept.append(message)

    def receive(self) -> dict[str, Any] | None:
        """Returns the next whole message that has arrived, `None` when there is none yet.

        Raises `StrangerError` or `OtherVersionError`, and `GoneError` when the other side has closed and nothing is left to read.
        """
        if self.kept:
            return self.kept.pop(0)
        gone = self._read()
        message = self._next()
        if message is None and gone:
            raise GoneError("it has closed the connection")
        return message

    def _read(self) -> bool:
        """Reads what is there; whether the other side has closed."""
        while len(self.buffer) <= LARGEST_BYTES + HEAD.size:
            try:
                piece = self.sock.recv(65536)
            except BlockingIOError:
                return False
            except OSError:
                return True
            if not piece:
                return True
            self.buffer += piece
        return False

    def _next(self) -> dict[str, Any] | None:
        if not MAGIC.startswith(bytes(self.buffer[: len(MAGIC)])):
            raise StrangerError("it does not speak our protocol")
        if len(self.buffer) < HEAD.size:
            return None
        _, version, length = HEAD.unpack_from(self.buffer)
        if version != VERSION:
            raise OtherVersionError(version)
        if length > LARGEST_BYTES:
            raise StrangerError(f"a message of {length} bytes")
        if len(self.buffer) < HEAD.size + length:
            return None
        message = unpack(bytes(self.buffer[HEAD.size : HEAD.size + length]))  # what is no message stays, and is refused again
        del self.buffer[: HEAD.size + length]
        return message

    def own_address(self) -> str:
        """Returns this machine's address on this connection."""
        return str(self.sock.getsockname()[0])

    def their_address(self) -> str:
        """Returns the other machine's address; `?` when it is gone."""
        with contextlib.suppress(OSError):
            return str(self.sock.getpeername()[0])
        return "?"

    def close(self) -> None:
        """Ends the connection."""
        with contextlib.suppress(OSError):
            self.sock.close()
