"""The part of `probe.py` that needs the network: listeners, round trips, a sum over all machines. Sent with it."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

PIECE = 1 << 20
PINGS = 30
PING_SECONDS = 0.3
"""After which fewer round trips do."""
FIRST_BYTES = 1 << 16
"""Sent first to see how fast a line is: half a second at 1 Mbit/s."""
ENOUGH_SECONDS, WAY_SECONDS = 0.25, 1.5
"""A transfer that takes so long says how fast a line is; after that time no longer one is tried."""
listeners: list[socket.socket] = []


def read_text(path: str) -> str:
    """Returns a file's text, nothing where it cannot be read."""
    with contextlib.suppress(OSError):
        return Path(path).read_text()
    return ""


def command_of(pid: str) -> str:
    """Returns a process as `python train.py (process 12)`."""
    words = read_text(f"/proc/{pid}/cmdline").replace("\0", " ").strip() or read_text(f"/proc/{pid}/comm").strip() or "a process"
    return f"{words[:80]} (process {pid})"


def ioctl(name: str, number: int) -> bytes:
    """Asks the kernel about an interface (Linux)."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return fcntl.ioctl(probe.fileno(), number, struct.pack("256s", name.encode()[:15]))


def addresses() -> dict[str, str]:
    """Returns interface -> its IPv4 address."""
    found = {}
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):  # it has none
            found[name] = socket.inet_ntoa(ioctl(name, 0x8915)[20:24])
    return found


def own_addresses() -> set[str]:
    """Returns this machine's IPv4 addresses without loopback."""
    return set(addresses().values()) - {"127.0.0.1"}


def route(towards: str) -> dict[str, Any] | None:
    """Returns this machine's own address, interface and its MTU on the way to an address; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))
            own = probe.getsockname()[0]
        name = next((name for name, address in addresses().items() if address == own), None)
        return {"address": own, "interface": name, "mtu": struct.unpack("i", ioctl(name, 0x8921)[16:20])[0] if name else None}
    except OSError:
        return None


def listen(port: int) -> dict[str, Any]:
    """Opens a listener on every interface; port 0 is any free high one. Returns its port, or who holds the one asked for."""
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(("", port))
        server.listen(64)
    except OSError as error:
        server.close()
        return {"port": None, "error": error.strerror, "held_by": _holder(port)}
    listeners.append(server)
    threading.Thread(target=_serve, args=(server,), daemon=True).start()
    return {"port": server.getsockname()[1]}


def _serve(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:  # closed
            return
        threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    """Echoes `p`; of `b` with a length takes so many bytes, then answers."""
    with connection, contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while kind := connection.recv(1):
            if kind == b"b":
                left = struct.unpack("<Q", connection.recv(8, socket.MSG_WAITALL))[0]
                while left:
                    left -= len(connection.recv(min(left, PIECE))) or left
            connection.sendall(kind)


def close() -> None:
    """Closes all listeners."""
    while listeners:
        server = listeners.pop()
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        server.close()


def _holder(port: int) -> str | None:
    """Returns the process that listens on `port`; its user where we may not look, `None` where nobody is found."""
    import pwd

    inodes, user = set(), None
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in read_text(table).splitlines()[1:]:
            words = row.split()
            if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{words[9]}]")
                with contextlib.suppress(KeyError):
                    user = pwd.getpwuid(int(words[7])).pw_name
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if any(os.readlink(descriptor) in inodes for descriptor in (entry / "fd").iterdir()):  # noqa: PTH115 - no path
                    return command_of(entry.name)
    return f"a process of {user}" if user else None


def reach_all(targets: list[tuple[str, int]], timeout: float) -> list[str | None]:
    """Connects to every listener at once; returns for each why it could not be reached, `None` where it answers."""
    found: list[str | None] = [f"no answer within {timeout:g} s"] * len(targets)

    def try_one(k: int) -> None:
        try:
            reach(*targets[k], megabytes=0, timeout=timeout)
            found[k] = None
        except OSError as error:
            found[k] = error.strerror or str(error)

    workers = [threading.Thread(target=try_one, args=(k,), daemon=True) for k in range(len(targets))]
    for worker in workers:
        worker.start()
    until = time.monotonic() + 2 * timeout
    for worker in workers:
        worker.join(max(0.0, until - time.monotonic()))
    return found


def reach(address: str, port: int, megabytes: int, timeout: float) -> dict[str, float]:
    """Returns the median round trip in ms to a listener and, with `megabytes`, the speed towards it in Mbit/s. Raises `OSError`."""
    with socket.create_connection((address, port), timeout=timeout) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(PINGS if megabytes else 1):
            began = time.perf_counter()
            link.sendall(b"p")
            if not link.recv(1):
                raise ConnectionError("the connection was closed by a machine between the two")
            trips.append(time.perf_counter() - began)
            if len(trips) >= 3 and sum(trips) > PING_SECONDS:
                break
        found = {"rtt_ms": sorted(trips)[len(trips) // 2] * 1e3}
        if megabytes:
            link.settimeout(timeout + 5)
            found["mbit"] = _speed(link, megabytes * PIECE, found["rtt_ms"] / 1e3)
        return found


def _speed(link: socket.socket, most: int, trip: float) -> float:
    """Returns Mbit/s of a transfer that is long enough to tell, of at most `most` bytes; `trip` is a round trip's seconds.

    Each is at most four times the one before: what a switch or a shaper takes at once, before its speed is felt, is small beside the last.
    """
    count, began = min(FIRST_BYTES, most), time.perf_counter()
    while True:
        seconds = _sent(link, count)
        enough = seconds >= max(ENOUGH_SECONDS, 5 * trip) or time.perf_counter() - began > WAY_SECONDS
        if enough or count == most:
            return count * 8 / 1e6 / seconds
        count = min(most, int(count * min(4.0, max(1.5, 2 * ENOUGH_SECONDS / seconds))))


def _sent(link: socket.socket, count: int) -> float:
    """Sends `count` bytes and returns the seconds until the other side has them all."""
    piece = os.urandom(min(count, PIECE))  # a tunnel that compresses must not look fast
    left, began = count, time.perf_counter()
    link.sendall(b"b" + struct.pack("<Q", count))
    while left:
        left -= link.send(piece[: min(left, PIECE)])
    if not link.recv(1):
        raise ConnectionError("the connection was closed while it was measured")
    return time.perf_counter() - began


def all_reduce(
    backend: str, address: str, port: int, rank: int, world: int, interface: str, megabytes: float, timeout: float
) -> float:
    """Returns the seconds of one sum over all machines (the best of three), through torch as a training does it."""
    from datetime import timedelta

    os.environ.update({"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {})
    torch = importlib.import_module("torch")
    group = importlib.import_module("torch.distributed")
    group.init_process_group(
        backend, init_method=f"tcp://{address}:{port}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    values = torch.ones(int(megabytes * PIECE) // 4, device="cuda:0" if backend == "nccl" else "cpu")
    times = []
    for _ in range(3):
        given = values.clone()
        group.barrier()
        began = time.perf_counter()
        group.all_reduce(given)
        total = float(given[-1])  # waits for a GPU, too
        times.append(time.perf_counter() - began)
        if total != world:
            raise ValueError(f"the sum over {world} machines is {total:g}")
    group.destroy_process_group()
    return min(times)
