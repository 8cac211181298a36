"""A machine's connection to the torch `TCPStore` that the launchers of a run share (`launch/machines.py`).

Node 0's launcher serves it on MASTER_ADDR:MASTER_PORT. A separate thread uses the connection and sends a heartbeat
every second: the machine shows signs of life whatever its main thread does, and a store that hangs does not block the
main thread. Values are compressed JSON. With a key (`MASTER_KEY`) each has an HMAC over run, name and value; a value
that does not verify counts as absent.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import queue
import socket
import threading
import time
import uuid
import zlib
from collections.abc import Callable
from typing import Any

from sft_play.errors import HardwareError, RetryableError, UserError, first_line, printable
from sft_play.launch.environment import MAKE_ONE, VARIABLE, Node, holder_of, port_is_free, proof, proves
from sft_play.launch.process import raise_what_was_heard
from sft_play.text import tell

PROTOCOL = 5
PERIOD_SECONDS, POLL_SECONDS = 1.0, 0.2
"""Interval of a machine's heartbeats, and of checks for a value, an answer or a signal that Python dropped."""
CONNECT_SECONDS, HEARD_SECONDS, REQUEST_SECONDS = 3.0, 8.0, 300.0
"""Limits to connect, for the store's first answer (torch looks up each peer's name before), and of torch for a request,
whose actual limit is `launch.silent_seconds`.
"""
RESOLVE_SECONDS = 30.0
"""How long a name may be unknown, since a cluster's names appear when its machines do."""
REPORT_SECONDS, FIRST_SECONDS = 15.0, 2.0
"""Interval between lines about missing machines, and time until the first of them."""


class StoreGone(RetryableError):
    """The store does not answer, so node 0 is gone."""


UNREACHED: tuple[tuple[type[Exception], str, str], ...] = (
    (socket.gaierror, "its name cannot be resolved", "give the IP address of node 0"),
    (
        ConnectionRefusedError,
        "that machine answers, but nothing listens there yet: node 0 is not started, or has another MASTER_PORT",
        "start node 0 with the same command and `NODE_RANK=0`; where it runs, give the same MASTER_PORT on every node",
    ),
    (
        TimeoutError,
        "no answer: a firewall on the way drops what is sent, or no machine has this address",
        "open MASTER_PORT (and the high ports) in the firewall of node 0, and compare MASTER_ADDR with `ip address`"
        " there",
    ),
    (
        OSError,
        "no machine can be reached at this address",
        "see with `ping` whether that machine is on, and whether both are on one network",
    ),
    (
        StoreGone,
        "something listens there that is not a launcher of SFT-Play",
        "choose another MASTER_PORT, the same on every node",
    ),
)
"""Error, reason and hint for failing to reach node 0; the first match counts."""


class Waiting:
    """Reports from time to time what a loop waits for."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._reported_at = self._began - REPORT_SECONDS + FIRST_SECONDS

    @property
    def seconds(self) -> float:
        """Duration of the wait so far."""
        return time.monotonic() - self._began

    def report(self, text: str) -> None:
        """Print a line, at most once in `REPORT_SECONDS`."""
        if time.monotonic() - self._reported_at >= REPORT_SECONDS:
            self._reported_at = time.monotonic()
            print_line(f"{text} ({self.seconds:.0f} s so far)")


class Store:
    """The connection, and its daemon thread, which alone uses torch's own store (`raw`) and sends heartbeats."""

    def __init__(self, connect: Callable[[], Any], *, key: str | None, seconds: float) -> None:
        """Start the thread; `seconds` is how long an answer may take."""
        self.key, self.seconds, self.nonce = key, seconds, ""
        self.heard = time.monotonic()
        """When the last heartbeat was answered."""
        self.broken: Exception | None = None
        self._connect = connect
        self._raw: Any = None
        self._each: Callable[[], None] | None = None
        self._asked: queue.SimpleQueue[tuple[Callable[[Any], Any], queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="store", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        due = 0.0
        try:
            self._raw = self._connect()
            while True:
                with contextlib.suppress(queue.Empty):
                    asked = self._asked.get(timeout=max(0.0, due - time.monotonic()) if self._each else PERIOD_SECONDS)
                    if asked is None:
                        return
                    asked[1].put(asked[0](self._raw))
                if self._each and time.monotonic() >= due:
                    due = time.monotonic() + PERIOD_SECONDS
                    self._each()
                    self.heard = time.monotonic()
        except Exception as error:  # noqa: BLE001 - torch's store raises many kinds of errors, each of which ends it
            self.broken = error

    def beat(self, each: Callable[[], None]) -> None:
        """Start calling `each` every `PERIOD_SECONDS` in the connection's thread."""
        self.heard, self._each = time.monotonic(), each

    def ask(self, do: Callable[[Any], Any]) -> Any:
        """Return the result of `do` on torch's store.

        Raise `StoreGone` if it does not answer in time, and the exception of a received signal.
        """
        if threading.current_thread() is self._thread:
            return do(self._raw)
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._asked.put((do, answer))
        until = time.monotonic() + self.seconds
        while True:
            with contextlib.suppress(queue.Empty):
                return answer.get(timeout=POLL_SECONDS)
            raise_what_was_heard()
            if self.broken or time.monotonic() > until:
                raise StoreGone(
                    "node 0 has left, or cannot be reached any more, before the workers started",
                    hint="its own output says why; the same command on every node starts again",
                )

    def close(self) -> None:
        """End the thread."""
        self._asked.put(None)
        self._thread.join(PERIOD_SECONDS)

    def pack(self, name: str, value: Any) -> bytes:
        """Return a value in the form that the store holds."""
        body = zlib.compress(json.dumps(value, allow_nan=False).encode())
        return (proof(self.key, *self._signed(name, body)) if self.key else "-" * 64).encode() + body

    def unpack(self, name: str, packed: bytes) -> Any:
        """Return the value in a store's bytes; `None` if it does not belong to this run."""
        signature, body = packed[:64].decode(errors="replace"), packed[64:]
        if self.key and not proves(self.key, signature, *self._signed(name, body)):
            return None
        try:
            return json.loads(zlib.decompress(body))
        except (zlib.error, ValueError):
            return None

    def _signed(self, name: str, body: bytes) -> tuple[str, ...]:
        return (self.nonce, name, hashlib.sha256(body).hexdigest())

    def get(self, name: str) -> Any:
        """Return a value; `None` if this run has none by that name."""
        return self.ask(lambda raw: self.unpack(name, raw.get(name)) if raw.check([name]) else None)

    def first(self, name: str, value: Any) -> Any:
        """Write a value if there is none, and return the value that is then in the store."""
        mine = self.pack(name, value)
        present = self.unpack(name, self.ask(lambda raw: raw.compare_set(name, "", mine)))
        if present is None:  # what is there is not of this run
            self.ask(lambda raw: raw.set(name, mine))
        return value if present is None else present

    def set(self, name: str, value: Any) -> None:
        """Write a value."""
        packed = self.pack(name, value)
        self.ask(lambda raw: raw.set(name, packed))


def serve(node: Node, host: str, run: str, seconds: float) -> Store:
    """Serve and return node 0's store. Raise `HardwareError` for a port that is taken."""
    port = node.master_port
    try:
        raw = tcp_store()("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=_delta(HEARD_SECONDS))
    except RuntimeError as error:
        why = first_line(error) if port_is_free(port) else f"Address already in use{holder_of(port)}"
        text, hint = f"node 0 cannot listen on port {port}: {why}", "choose another MASTER_PORT, the same on every node"
        raise HardwareError(text, hint=hint) from error
    raw.set_timeout(_delta(REQUEST_SECONDS))
    store, nonce = Store(lambda: raw, key=node.key, seconds=seconds), uuid.uuid4().hex
    facts = {"protocol": PROTOCOL, "run": run, "host": host, "key": bool(node.key), "nodes": node.count}
    store.set("session", facts | {"word": nonce})
    store.nonce = nonce
    return store


def reach(node: Node, name: str, run: str, patience: float, seconds: float) -> tuple[Store, dict[str, Any]]:
    """Return the store of node 0, which may start later, and node 0's facts with both addresses of the connection.

    `name` is this machine's name in messages. Raise `RetryableError` if node 0 cannot be reached, `UserError` if it
    belongs to another run, which is not disturbed.
    """
    waiting = Waiting()
    while True:
        try:
            store, facts = _connect(node, name, run, min(HEARD_SECONDS, max(patience - waiting.seconds, 1.0)))
        except (OSError, StoreGone) as error:
            reason, hint = next((reason, hint) for kind, reason, hint in UNREACHED if isinstance(error, kind))
            if isinstance(error, socket.gaierror) and waiting.seconds > min(RESOLVE_SECONDS, patience):
                text = f"`MASTER_ADDR` is `{node.master_address}`, which cannot be resolved"
                raise UserError(text, hint=hint) from error
            if waiting.seconds > patience:
                text = f"{name} did not reach node 0 within {patience:g} s: {reason}"
                raise RetryableError(text, place=node.master, hint=hint) from None
        else:
            store.seconds = seconds
            print_line(f"{name} has reached node 0 at {node.master}")
            return store, facts
        waiting.report(f"waiting for node 0 at {node.master}, up to {patience:g} s: {reason}")
        pause(POLL_SECONDS)


def _connect(node: Node, name: str, run: str, limit: float) -> tuple[Store, dict[str, Any]]:
    """Try `reach` once, within about `limit` seconds. Raise `OSError`, or `StoreGone` if the peer is not a store."""
    place = socket.getaddrinfo(node.master_address, node.master_port, type=socket.SOCK_STREAM)[0]
    with socket.socket(place[0], socket.SOCK_STREAM) as sock:
        sock.settimeout(min(CONNECT_SECONDS, limit))
        sock.connect(place[4])
        own, master = str(sock.getsockname()[0]), str(sock.getpeername()[0])
    kind = tcp_store()

    def connect() -> Any:
        return kind(master, node.master_port, is_master=False, wait_for_workers=False, timeout=_delta(limit))

    store = Store(connect, key=node.key, seconds=limit)
    try:
        store.ask(lambda raw: raw.get("session"))
        store.ask(lambda raw: raw.set_timeout(_delta(REQUEST_SECONDS)))
        facts = _check(store, node, name, run)
    except BaseException:
        store.close()
        raise
    return store, facts | {"address": own, "master": master}


def _check(store: Store, node: Node, name: str, run: str) -> dict[str, Any]:
    """Return node 0's facts about the run. Raise `UserError` if it is another run."""
    facts = store.get("session")
    if not facts or (facts.get("key") and not node.key):
        raise UserError(f"node 0 has another `{VARIABLE}` than {name}, or one of them has none", hint=MAKE_ONE)
    if facts.get("protocol") != PROTOCOL:
        text = f"node 0 speaks another version of the launchers' protocol than {name}"
        raise HardwareError(text, hint="install the same SFT-Play on every node")
    if facts["run"] != run:
        raise UserError(
            f"the nodes have different runs: node 0 ({facts['host']}): `{facts['run']}`, {name}: `{run}`",
            hint="give every node the same RUN_NAME (or RUN); if that is another run, choose another MASTER_PORT",
        )
    store.nonce = facts["word"]
    return dict(facts)


def print_line(text: str) -> None:
    """Print a line that may contain text from other machines."""
    tell(printable(text[:500]))


def pause(seconds: float) -> None:
    """Sleep, then raise the exception of a received signal."""
    time.sleep(seconds)
    raise_what_was_heard()


def tcp_store() -> Any:
    """Return torch's class, without its C++ stack traces for failed connections, which we report ourselves."""
    level = "TORCH_CPP_LOG_LEVEL"
    if level not in os.environ:
        os.putenv(level, "FATAL")
    try:
        from torch.distributed import TCPStore
    finally:
        if level not in os.environ:
            os.unsetenv(level)
    return TCPStore


def _delta(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)
