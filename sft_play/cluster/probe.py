"""What a machine says about itself and its network. The text of this file is sent over SSH to a host's own Python and stored nowhere.

Each line of stdin is a request, `{"call": "clock", ...}`; each is answered by a line: what the function of that name returns, or `{"error": "..."}`.
It needs the standard library only, also that of Python 3.8, and uses what the host's environment has: torch, psutil. It writes no file, and ends
with its input, at the latest after `LONGEST_SECONDS`. Its working folder is the project's.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import json
import os
import platform
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

MARK = "sft-play probe"
"""First line of the answers: what a login shell prints comes before it."""
LONGEST_SECONDS = 120
PIECE = 1 << 20
PINGS = 30
PING_SECONDS = 0.3
"""After which fewer round trips do."""
FIRST_BYTES = 1 << 16
"""Sent first to see how fast a line is: half a second at 1 Mbit/s."""
ENOUGH_SECONDS, WAY_SECONDS = 0.25, 1.5
"""A transfer that takes so long says how fast a line is; after that time no longer one is tried."""
GET_ADDRESS, GET_MTU = 0x8915, 0x8921
"""Linux's `ioctl` numbers for an interface, SIOCGIFADDR and SIOCGIFMTU."""
listeners: list[socket.socket] = []


# ---- The machine


def clock() -> dict[str, float]:
    """Returns the seconds since 1970, by this machine's clock."""
    return {"now": time.time()}


def facts(towards: str, ports: list[int], code: list[str], data: list[str], prepared: list[str]) -> dict[str, Any]:
    """Returns what needs no package: system, disks, limits, interfaces and the route to `towards`, versions of packages.

    With the sha256 of the files of `code`, the sizes of those of `data` (bytes), the fingerprints of `prepared` splits; `None` for what is not here.
    Listens at `ports` from then on.
    """
    cache, runs = _folders()

    def fingerprint(name: str) -> str:
        return str(json.loads((Path(cache) / "data" / name / "manifest.json").read_text())["split"]["fingerprint"])

    places = {"folder": str(Path.cwd()), "cache": cache, "runs": runs, "shm": "/dev/shm"}
    links = _interfaces()
    own = sorted(link["address"] for link in links.values() if link["address"] not in (None, "127.0.0.1"))
    return {
        "host_name": socket.gethostname(),
        "machine": f"{_text('/proc/sys/kernel/random/boot_id')} {','.join(own)}",
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "disks": {name: _disk(place) for name, place in places.items()},
        "nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "names_itself": sorted({str(entry[4][0]) for entry in _known(socket.getaddrinfo, socket.gethostname(), None) or ()}),
        "rsync": shutil.which("rsync") is not None,
        "interfaces": links,
        "route": _route(towards, links),
        "packages": _packages(),
        "listens": [_listen(port) for port in ports],
        "code": {path: _known(lambda path: hashlib.sha256(Path(path).read_bytes()).hexdigest(), path) for path in code},
        "data": {path: _known(lambda path: Path(path).expanduser().stat().st_size, path) for path in data},
        "prepared": {name: _known(fingerprint, name) for name in prepared},
    }


def _folders() -> tuple[str, str]:
    """Returns the cache and the folder of runs, by the project's own rules where it is there."""
    try:
        found = importlib.import_module("sft_play.runs.folder")
        return str(Path(found.cache_folder()).absolute()), str(Path(found.runs_folder()).absolute())
    except Exception:  # noqa: BLE001 - another version, or none: the defaults do
        return str(Path.home() / ".cache" / "sft_play"), str(Path.cwd() / "runs")


def _disk(place: str) -> dict[str, Any] | None:
    """Returns the file system of `place`, or of the folder above it that is there."""
    path = Path(place)
    while not path.is_dir() and path != path.parent:
        path = path.parent
    with contextlib.suppress(OSError):
        used = shutil.disk_usage(path)
        writable = os.access(path, os.W_OK) and not os.statvfs(path).f_flag & os.ST_RDONLY
        return {"path": place, "free_bytes": used.free, "total_bytes": used.total, "writable": bool(writable)}
    return None


def _packages() -> dict[str, str]:
    """Returns distribution -> version, by the names of the folders that pip leaves; of two on the path, the first is imported."""
    found: dict[str, str] = {}
    for path in (path for entry in sys.path for path in sorted(Path(entry).glob("*.dist-info"))):
        name, _, version = path.stem.rpartition("-")
        found.setdefault(name.lower().replace("_", "-"), version)
    return found


def _known(call: Any, *arguments: Any) -> Any:
    """Returns what `call` returns, `None` where that cannot be found out."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, subprocess.SubprocessError):
        return call(*arguments)
    return None


def _text(path: str) -> str:
    return (_known(Path(path).read_text) or "").replace("\0", " ").strip()


def _process(pid: Any) -> str:
    """Returns a process as `python train.py (process 12)`."""
    words = _text(f"/proc/{pid}/cmdline") or _text(f"/proc/{pid}/comm") or "a process"
    return f"{words[:80]} (process {pid})"


# ---- Packages and GPUs


def software() -> dict[str, Any]:
    """Returns what torch says of itself, and the GPUs; importing torch takes seconds. Listens no longer."""
    while listeners:
        server = listeners.pop()
        _known(server.shutdown, socket.SHUT_RDWR)  # wakes the thread in accept
        server.close()
    found: dict[str, Any] = {"torch": None, "cuda": None, "nccl": None, "usable_gpus": 0, "architectures": [], "error": None}
    try:
        torch = importlib.import_module("torch")
        usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
        found.update(torch=torch.__version__, cuda=torch.version.cuda, usable_gpus=usable)
        if torch.version.cuda:
            flags = getattr(torch._C, "_cuda_getArchFlags", str)  # get_arch_list() says nothing where no GPU can be used
            found.update(architectures=(flags() or "").split(), nccl=".".join(map(str, torch.cuda.nccl.version())))
    except Exception as error:  # noqa: BLE001 - whatever a broken package raises is what we report
        found["error"] = f"{type(error).__name__}: {error}"
    return {**found, "driver": None, "gpus": [], "hidden": os.environ.get("CUDA_VISIBLE_DEVICES"), **_gpus()}


def _gpus() -> dict[str, Any]:
    """Returns the driver and every GPU with its memory in bytes, by the driver's program, which needs no package."""
    fields = "driver_version,memory.total,memory.free,uuid,name"
    rows = _known(_nvidia_smi, "gpu", f"{fields},compute_cap")
    if not rows:  # drivers before 510 do not know the last field
        rows = [[*row, None] for row in _known(_nvidia_smi, "gpu", fields) or []]
    users = _known(_nvidia_smi, "compute-apps", "gpu_uuid,pid") or []
    gpus = [
        {
            "name": name, "total_bytes": int(total) * PIECE, "free_bytes": int(free) * PIECE, "capability": capability,
            "held_by": [_process(row[-1]) for row in users if row[0] == uuid],
        }
        for _, total, free, uuid, name, capability in rows if total.isdigit()
    ]  # fmt: skip
    return {"driver": rows[0][0], "gpus": gpus} if rows else {}


def _nvidia_smi(what: str, fields: str) -> list[list[str]]:
    words = ["nvidia-smi", f"--query-{what}={fields}", "--format=csv,noheader,nounits"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)
    return [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines()]


# ---- Network


def _interfaces() -> dict[str, dict[str, Any]]:
    """Returns interface -> its IPv4 address (`None` without one) and MTU."""
    found: dict[str, dict[str, Any]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            found[name] = {"address": None, "mtu": None}
            asked = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # without an address the first raises
                found[name]["mtu"] = struct.unpack("i", fcntl.ioctl(probe.fileno(), GET_MTU, asked)[16:20])[0]
                found[name]["address"] = socket.inet_ntoa(fcntl.ioctl(probe.fileno(), GET_ADDRESS, asked)[20:24])
    return found


def _route(towards: str, links: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Returns this machine's own address, interface and its MTU on the way to an address; nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))
        own = probe.getsockname()[0]
        name = next((name for name, link in links.items() if link["address"] == own), None)
        return {"address": own, "interface": name, "mtu": links[name]["mtu"] if name else None}
    return None


def _listen(port: int) -> dict[str, Any]:
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


def _holder(port: int) -> str | None:
    """Returns the process that listens on `port`; `None` where nobody can tell."""
    with contextlib.suppress(Exception):  # no psutil, or a system that does not let us look
        for one in importlib.import_module("psutil").net_connections("tcp"):
            if one.status == "LISTEN" and one.laddr.port == port:
                return _process(one.pid) if one.pid else "a process of another user"
    return None


def _serve(server: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed
        while True:
            connection, _ = server.accept()
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


def reach(targets: list[tuple[str, int]], megabytes: int, timeout: float) -> dict[str, Any]:
    """Connects to every listener at once; `ways` has for each what `_way` returns, or `error`."""

    def way(address: str, port: int) -> dict[str, Any]:
        try:
            return _way(address, port, megabytes, timeout)
        except (OSError, UnicodeError) as error:
            return {"error": getattr(error, "strerror", None) or str(error)}

    pool = ThreadPoolExecutor(max(1, len(targets)))
    tried = [pool.submit(way, *target) for target in targets]
    wait(tried, 2 * timeout + (20 if megabytes else 0))  # a name may take longer to resolve than a connection may take
    return {"ways": [one.result() if one.done() else {"error": f"no answer within {timeout:g} s"} for one in tried]}


def _way(address: str, port: int, megabytes: int, timeout: float) -> dict[str, Any]:
    """Returns the median round trip in ms to a listener, the own address that the way begins at and, with `megabytes`, the speed in Mbit/s."""
    with socket.create_connection((address, port), timeout=timeout) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips: list[float] = []
        while len(trips) < (PINGS if megabytes else 1) and (len(trips) < 3 or sum(trips) <= PING_SECONDS):
            began = time.perf_counter()
            link.sendall(b"p")
            if not link.recv(1):
                raise ConnectionError("the connection was closed by a machine between the two")
            trips.append(time.perf_counter() - began)
        found = {"rtt_ms": sorted(trips)[len(trips) // 2] * 1e3, "own": link.getsockname()[0]}
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
    backend: str, address: str, port: int, rank: int, world: int, interface: str, stated: bool, megabytes: float, timeout: float
) -> dict[str, float]:
    """Returns the seconds of one sum over all machines (the best of three), through torch as a training does it.

    `stated`: the inventory names the interface, so it is NCCL's too, as where NCCL might take one that leads to no other machine.
    """
    from datetime import timedelta

    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        if stated or (backend == "nccl" and importlib.import_module("sft_play.launch.environment").nccl_might_take(interface)):
            os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"
    torch, group = importlib.import_module("torch"), importlib.import_module("torch.distributed")
    limit = timedelta(seconds=timeout)
    group.init_process_group(backend, init_method=f"tcp://{address}:{port}", rank=rank, world_size=world, timeout=limit)
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
    return {"seconds": min(times)}


# ---- Requests

CALLS: dict[str, Any] = {one.__name__: one for one in (clock, facts, software, reach, all_reduce)}


def main() -> None:
    """Answers requests until the input ends. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    signal.alarm(LONGEST_SECONDS)  # nobody may end the input of a machine whose cable was pulled

    def answer(name: str, request: dict[str, Any]) -> None:
        try:
            found = CALLS[name](**request)
        except Exception as error:  # noqa: BLE001 - the other side decides what it means
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), file=answers)

    print(MARK, file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        threading.Thread(target=answer, args=(request.pop("call"), request), daemon=True).start()
    os._exit(0)  # a thread that hangs in a collective must not keep this process


if __name__ == "__main__":
    main()
