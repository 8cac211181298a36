"""The torch `TCPStore` that the launchers of several machines share: how it is served and found, and how values are
written in it.

Node 0's launcher serves it on MASTER_ADDR:MASTER_PORT. Each launcher has one connection, used by one thread, which also
beats once a second: whatever the main thread does, its machine is seen to live, and a store that hangs keeps nobody
waiting. Values are compressed JSON. With a key (`MASTER_KEY`) each carries an HMAC over run, key and value; what does
not verify counts as absent.
"""

from __future__ import annotations

import contextlib
import datetime
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
from collections.abc import Callable
from typing import Any

from sft_play.errors import HardwareError, RetryableError, UserError, first_line, printable
from sft_play.launch.environment import MAKE_ONE, VARIABLE, Node, holder_of, port_is_free, proof, proves
from sft_play.launch.process import raise_what_was_heard

PROTOCOL = 4
REFUSED = "refused"
"""Name of a list: machines that have found another run here than theirs."""
PERIOD_SECONDS = 1.0
"""Between two beats of a machine, and two looks at the others' by node 0."""
POLL_SECONDS = 0.25
"""How soon a store that has gone, or a signal that Python dropped, is noticed."""
CONNECT_SECONDS = 3.0
HEARD_SECONDS = 8.0
"""How long what listens at the port may take to answer as our store does: torch looks up the name of each peer first.
"""
REQUEST_SECONDS = 300.0
"""What torch allows a request; how long it really may take is `launch.silent_seconds`."""
PAUSE_SECONDS, LEAST_SECONDS = 0.5, 1.0
"""Between two tries to reach node 0, and what the last of them gets however little of `launch.join_seconds` is left."""
RESOLVE_SECONDS = 30.0
"""How long a name may be unknown: a cluster's names appear when its machines do."""
SAY_SECONDS, FIRST_SECONDS = 15.0, 2.0
"""Between two lines that say who is waited for, and until the first of them."""


class StoreGone(RetryableError):
    """The store does not answer, so node 0 is gone."""


class Waiting:
    """Says from time to time what is waited for."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._said = self._began - SAY_SECONDS + FIRST_SECONDS

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return time.monotonic() - self._began

    def report(self, text: str) -> None:
        """Print a line, every `SAY_SECONDS`."""
        if time.monotonic() - self._said >= SAY_SECONDS:
            self._said = time.monotonic()
            print_line(f"{text} ({self.seconds:.0f} s so far)")


class Store:
    """One machine's connection and the thread that uses it, which ends with the process. Functions that take `raw`,
    torch's own store, run in that thread; so does what `beat` was given, every `PERIOD_SECONDS`.
    """

    def __init__(self, connect: Callable[[], Any], *, key: str | None, seconds: float) -> None:
        """`seconds`: how long an answer may take."""
        self.key, self.seconds, self.nonce = key, seconds, ""
        self.heard = time.monotonic()
        """When the last beat was answered."""
        self.broken: Exception | None = None
        self._connect = connect
        self._each: Callable[[Any], None] | None = None
        self._asked: queue.SimpleQueue[tuple[Callable[[Any], Any], queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="rendezvous", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        due = 0.0
        try:
            raw = self._connect()
            while True:
                with contextlib.suppress(queue.Empty):
                    asked = self._asked.get(timeout=max(0.0, due - time.monotonic()) if self._each else PERIOD_SECONDS)
                    if asked is None:
                        return
                    asked[1].put(asked[0](raw))
                if self._each and time.monotonic() >= due:
                    due = time.monotonic() + PERIOD_SECONDS
                    self._each(raw)
                    self.heard = time.monotonic()
        except Exception as error:  # noqa: BLE001 - torch's errors of a store are RuntimeErrors of many kinds; each is the end of it
            self.broken = error

    def beat(self, each: Callable[[Any], None]) -> None:
        """Begin to call `each` every `PERIOD_SECONDS`."""
        self.heard, self._each = time.monotonic(), each

    def ask(self, do: Callable[[Any], Any]) -> Any:
        """Return what `do` makes of torch's store. Raise `StoreGone` when it does not answer in time, and what a signal
        asks for.
        """
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
        """Return a value as it is in the store."""
        body = zlib.compress(json.dumps(value, allow_nan=False).encode())
        return (proof(self.key, *self._signed(name, body)) if self.key else "-" * 64).encode() + body

    def unpack(self, name: str, packed: bytes) -> Any:
        """Return a value; `None` for what is none of this run's."""
        given, body = packed[:64].decode(errors="replace"), packed[64:]
        if self.key and not proves(self.key, given, *self._signed(name, body)):
            return None
        try:
            return json.loads(zlib.decompress(body))
        except (zlib.error, ValueError):
            return None

    def _signed(self, name: str, body: bytes) -> tuple[str, ...]:
        return (self.nonce, name, hashlib.sha256(body).hexdigest())

    def read(self, raw: Any, name: str) -> Any:
        """Return a value; `None` where there is none of this run."""
        return self.unpack(name, raw.get(name)) if raw.check([name]) else None

    def first(self, raw: Any, name: str, value: Any) -> Any:
        """Write a value where there is none, and return the one that is there then."""
        mine = self.pack(name, value)
        found = self.unpack(name, raw.compare_set(name, "", mine))
        if found is None:  # a stranger's
            raw.set(name, mine)
        return value if found is None else found

    def get(self, name: str) -> Any:
        """`read`, for any thread."""
        return self.ask(lambda raw: self.read(raw, name))

    def set(self, name: str, value: Any, *, listed: tuple[str, int] | None = None) -> None:
        """Write a value; `listed`: then add a rank to a list of that name."""
        packed = self.pack(name, value)

        def do(raw: Any) -> None:
            raw.set(name, packed)
            if listed:
                raw.append(listed[0], f"{listed[1]} ")

        self.ask(do)

    def delete(self, name: str) -> None:
        """Remove a value."""
        self.ask(lambda raw: raw.delete_key(name))


def list_words(raw: Any, name: str) -> set[str]:
    """Return what was appended to a list, rank by rank or session by session."""
    return set(raw.get(name).decode(errors="replace").split()) if raw.check([name]) else set()


def serve(node: Node, host: str, run: str, seconds: float) -> Store:
    """Return node 0's store. Raise `HardwareError` for a port that is taken."""
    port = node.master_port
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard > 0 else soft, hard))  # one descriptor a machine
    try:
        raw = tcp_store()("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=_delta(HEARD_SECONDS))
    except RuntimeError as error:
        why = first_line(error) if port_is_free(port) else f"Address already in use{holder_of(port)}"
        text, hint = f"node 0 cannot listen on port {port}: {why}", "choose another MASTER_PORT, the same on every node"
        raise HardwareError(text, hint=hint) from error
    raw.set_timeout(_delta(REQUEST_SECONDS))
    store, nonce = Store(lambda: raw, key=node.key, seconds=seconds), uuid.uuid4().hex
    store.set(
        "session",
        {
            "protocol": PROTOCOL,
            "run": run,
            "word": nonce,
            "host": host,
            "key": bool(node.key),
            "nodes": node.count,
        },
    )
    store.nonce = nonce
    return store


def reach(node: Node, name: str, run: str, patience: float, seconds: float) -> tuple[Store, dict[str, Any]]:
    """Return the store of node 0, which may start later, and what node 0 says of the run with both addresses of the
    connection.

    `name` is how messages call this machine. Raise `RetryableError` without node 0, `UserError` where it is another
    run's: this machine ends, and that run does not notice.
    """
    waiting = Waiting()
    while True:
        store, limit = None, min(HEARD_SECONDS, max(patience - waiting.seconds, LEAST_SECONDS))
        try:
            store, addresses = _connect(node, limit)
            said = _check(store, node, name, run)
        except socket.gaierror as error:
            reason, hint = (
                f"`{node.master_address}` cannot be resolved: {error.strerror}",
                "give the IP address of node 0",
            )
            if waiting.seconds > min(RESOLVE_SECONDS, patience):
                raise UserError(
                    f"`MASTER_ADDR` is `{node.master_address}`, which cannot be resolved", hint=hint
                ) from error
        except ConnectionRefusedError:
            reason = (
                "that machine answers, but nothing listens there yet: node 0 is not started, or has another MASTER_PORT"
            )
            hint = (
                "start node 0 with the same command and `NODE_RANK=0`; where it runs, give the same MASTER_PORT on"
                " every node"
            )
        except TimeoutError:
            reason = "no answer: a firewall on the way drops what is sent, or no machine has this address"
            hint = (
                "open MASTER_PORT (and the high ports) in the firewall of node 0, and compare MASTER_ADDR with `ip"
                " address` there"
            )
        except OSError as error:
            reason = f"no machine can be reached at this address ({error.strerror or error})"
            hint = "see with `ping` whether that machine is on, and whether both are on one network"
        except StoreGone:
            reason = "something listens there that is no launcher of SFT-Play"
            hint = "choose another MASTER_PORT, the same on every node"
        except BaseException as error:
            if store:
                if isinstance(error, UserError):
                    store.ask(lambda raw: raw.append(REFUSED, f"{node.rank} "))
                store.close()
            raise
        else:
            store.seconds = seconds
            print_line(f"{name} has reached node 0 at {node.master}")
            return store, said | addresses
        if waiting.seconds > patience:
            raise RetryableError(
                f"{name} did not reach node 0 within {patience:g} s: {reason}", place=node.master, hint=hint
            )
        waiting.report(f"waiting for node 0 at {node.master}, up to {patience:g} s: {reason}")
        pause(PAUSE_SECONDS)


def _connect(node: Node, limit: float) -> tuple[Store, dict[str, str]]:
    """Return the store, this machine's own address and node 0's on the way there, within `limit` seconds or a little
    more.

    Raise `OSError`, and `StoreGone` for what is no store.
    """
    found = socket.getaddrinfo(node.master_address, node.master_port, type=socket.SOCK_STREAM)[0]
    with socket.socket(found[0], socket.SOCK_STREAM) as sock:
        sock.settimeout(min(CONNECT_SECONDS, limit))
        sock.connect(found[4])
        own, master = str(sock.getsockname()[0]), str(sock.getpeername()[0])
    kind = tcp_store()

    def connect() -> Any:
        return kind(master, node.master_port, is_master=False, wait_for_workers=False, timeout=_delta(limit))

    store = Store(connect, key=node.key, seconds=limit)
    try:
        store.ask(lambda raw: raw.get("session"))
        store.ask(lambda raw: raw.set_timeout(_delta(REQUEST_SECONDS)))
    except BaseException:
        store.close()
        raise
    return store, {"address": own, "master": master}


def _check(store: Store, node: Node, name: str, run: str) -> dict[str, Any]:
    """Return what node 0 says of the run. Raise `UserError` where that is another one."""
    found = store.get("session")
    if not found or (found.get("key") and not node.key):
        raise UserError(f"node 0 has another `{VARIABLE}` than {name}, or one of them has none", hint=MAKE_ONE)
    if found.get("protocol") != PROTOCOL:
        text = f"node 0 speaks another version of the launchers' protocol than {name}"
        raise HardwareError(text, hint="install the same SFT-Play on every node")
    if found["run"] != run:
        raise UserError(
            f"the nodes have different runs: node 0 ({found['host']}): `{found['run']}`, {name}: `{run}`",
            hint=(
                "give every node the same RUN_NAME (or RUN); where that one is another run, choose another MASTER_PORT"
            ),
        )
    store.nonce = found["word"]
    return dict(found)


def print_line(text: str) -> None:
    """Print a line; what others sent may be in it."""
    print(printable(text[:500]), file=sys.stderr, flush=True)


def pause(seconds: float) -> None:
    """Wait; a signal that came is raised."""
    time.sleep(seconds)
    raise_what_was_heard()


def tcp_store() -> Any:
    """Return torch's class. Its C++ writes stack traces for every connection that fails, which we report ourselves."""
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
