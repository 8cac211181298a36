"""What a machine says about itself. This file's text is sent over SSH to a host's own Python, which runs it without storing it.

It reads a request a line from stdin, `{"call": "clock", ...}`, and answers each by a line, `{"ok": ...}` or `{"error": "..."}`. It uses the
standard library, and of the host's packages what is there; it writes no file, and ends when its input does, or after `LONGEST_SECONDS`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

MARK = "sft-play probe"
"""First line of the answers: what a login shell prints comes before it."""
LONGEST_SECONDS = 120
PIECE = 1 << 20
PINGS = 30
listeners: list[socket.socket] = []


# ---- The machine


def clock() -> float:
    """Seconds since 1970, by this machine's clock."""
    return time.time()


def facts(folder: str, towards: str) -> dict[str, Any]:
    """Returns what needs no package: system, disks, limits, names, the interface on the route to `towards`."""
    cache, runs = _folders(folder)
    places = {"folder": folder, "cache": cache, "runs": runs, "shm": "/dev/shm"}
    return {
        "host_name": socket.gethostname(),
        "machine": _boot() + " " + ",".join(sorted(_own_addresses())),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "disks": {name: _disk(place) for name, place in places.items()},
        "nofile": list(resource.getrlimit(resource.RLIMIT_NOFILE)),
        "names_itself": _resolved(socket.gethostname()),
        "ports": _read("/proc/sys/net/ipv4/ip_local_port_range").split(),
        "rsync": shutil.which("rsync") is not None,
        "route": _route(towards),
        "interfaces": [name for _, name in socket.if_nameindex()],
        "packages": _packages(),
    }


def _folders(folder: str) -> tuple[str, str]:
    """Returns the cache and the folder of runs, by the project's own rules where it is there."""
    sys.path.insert(0, folder)
    try:
        found = importlib.import_module("sft_play.runs.folder")
        return str(Path(found.cache_folder()).absolute()), str(Path(found.runs_folder()).absolute())
    except Exception:  # noqa: BLE001 - another version, or none: the defaults do
        return str(Path.home() / ".cache" / "sft_play"), str(Path(folder) / "runs")


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
    """Returns distribution -> version; of one that stands twice on the path, the first, which is the one imported."""
    found: dict[str, str] = {}
    for one in importlib.metadata.distributions():
        with contextlib.suppress(Exception):
            found.setdefault(one.metadata["Name"].lower().replace("_", "-"), one.version)
    return found


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text()
    return ""


def _boot() -> str:
    return _read("/proc/sys/kernel/random/boot_id").strip()


def _resolved(name: str) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    return []


def _ioctl(name: str, number: int) -> bytes:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return fcntl.ioctl(probe.fileno(), number, struct.pack("256s", name.encode()[:15]))


def _addresses() -> dict[str, str]:
    """Returns interface -> its IPv4 address."""
    found = {}
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):  # it has none
            found[name] = socket.inet_ntoa(_ioctl(name, 0x8915)[20:24])
    return found


def _own_addresses() -> set[str]:
    return set(_addresses().values()) - {"127.0.0.1"}


def _route(towards: str) -> dict[str, Any] | None:
    """Returns this machine's own address, interface and its MTU on the way to an address; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))
            own = probe.getsockname()[0]
        name = next((name for name, address in _addresses().items() if address == own), None)
        return {"address": own, "interface": name, "mtu": struct.unpack("i", _ioctl(name, 0x8921)[16:20])[0] if name else None}
    except OSError:
        return None


# ---- Packages and GPUs


def software() -> dict[str, Any]:
    """Returns what torch says of itself, and the GPUs; importing torch takes seconds."""
    found: dict[str, Any] = {"torch": None, "cuda": None, "nccl": None, "usable_gpus": 0, "error": None}
    try:
        torch = importlib.import_module("torch")
        cuda = torch.version.cuda
        found.update(torch=torch.__version__, cuda=cuda, usable_gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0)
        if cuda:
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception as error:  # noqa: BLE001 - whatever a broken package raises is what we report
        found["error"] = f"{type(error).__name__}: {error}"
    return {**found, **_gpus()}


def _gpus() -> dict[str, Any]:
    """Returns the driver and every GPU with its memory in bytes, by the driver's own library."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001 - no package, no driver, or a driver that was replaced under a running kernel
        return {"driver": None, "gpus": [], "hidden": os.environ.get("CUDA_VISIBLE_DEVICES")}
    gpus = []
    for k in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(k)
        memory, users = nvml.nvmlDeviceGetMemoryInfo(handle), []
        with contextlib.suppress(Exception):
            users = [one.pid for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
        gpus.append({
            "name": _text(nvml.nvmlDeviceGetName(handle)), "total_bytes": memory.total, "free_bytes": memory.free,
            "capability": list(nvml.nvmlDeviceGetCudaComputeCapability(handle)), "held_by": [_command(str(pid)) for pid in users],
        })  # fmt: skip
    return {"driver": _text(nvml.nvmlSystemGetDriverVersion()), "gpus": gpus, "hidden": os.environ.get("CUDA_VISIBLE_DEVICES")}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _command(pid: str) -> str:
    """Returns a process as `python train.py (process 12)`."""
    words = _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip() or _read(f"/proc/{pid}/comm").strip() or "a process"
    return f"{words[:80]} (process {pid})"


# ---- Files


def files(folder: str, paths: list[str]) -> dict[str, str | None]:
    """Returns path (counted from `folder`) -> sha256 of its bytes, `None` where there is no such file."""
    return {path: _sha256(Path(folder) / Path(path).expanduser()) for path in paths}


def _sha256(path: Path) -> str | None:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while piece := stream.read(PIECE):
                digest.update(piece)
    except OSError:
        return None
    return digest.hexdigest()


def prepared(folder: str, names: list[str]) -> dict[str, str | None]:
    """Returns prepared split (`train-0123...`) -> the fingerprint of its rows; `None` where this machine has not got it."""
    cache, _ = _folders(folder)
    found: dict[str, str | None] = {}
    for name in names:
        try:
            manifest = json.loads((Path(cache) / "data" / name / "manifest.json").read_text())
            found[name] = str(manifest["split"]["fingerprint"])
        except (OSError, ValueError, LookupError, TypeError):
            found[name] = None
    return found


# ---- Network


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
        for row in _read(table).splitlines()[1:]:
            words = row.split()
            if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{words[9]}]")
                with contextlib.suppress(KeyError):
                    user = pwd.getpwuid(int(words[7])).pw_name
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if any(os.readlink(descriptor) in inodes for descriptor in (entry / "fd").iterdir()):  # noqa: PTH115 - no path
                    return _command(entry.name)
    return f"a process of {user}" if user else None


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
        found = {"rtt_ms": sorted(trips)[len(trips) // 2] * 1e3}
        if megabytes:
            found["mbit"] = _speed(link, 1 << 18, timeout)
            if found["mbit"] > 20:  # more would take seconds on a slow line, and tell no more
                found["mbit"] = _speed(link, megabytes * PIECE, timeout)
        return found


def _speed(link: socket.socket, count: int, timeout: float) -> float:
    """Sends `count` bytes and returns Mbit/s until the other side has them all."""
    link.settimeout(timeout + 5)
    piece, left, began = bytes(min(count, PIECE)), count, time.perf_counter()
    link.sendall(b"b" + struct.pack("<Q", count))
    while left:
        left -= link.send(piece[: min(left, PIECE)])
    if not link.recv(1):
        raise ConnectionError("the connection was closed while it was measured")
    return count * 8 / 1e6 / (time.perf_counter() - began)


def all_reduce(backend: str, address: str, port: int, rank: int, world: int, interface: str, megabytes: int, timeout: float) -> float:
    """Returns the seconds of one sum over all machines (the best of three), through torch as a training does it."""
    from datetime import timedelta

    os.environ.update({"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {})
    torch = importlib.import_module("torch")
    group = importlib.import_module("torch.distributed")
    group.init_process_group(
        backend, init_method=f"tcp://{address}:{port}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    values = torch.ones(megabytes * PIECE // 4, device="cuda:0" if backend == "nccl" else "cpu")
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


# ---- Requests


def in_background(call: Any, arguments: dict[str, Any], timeout: float) -> Any:
    """Returns what `call` returns; leaves it behind after `timeout` seconds: a collective that hangs cannot be called off."""
    found: dict[str, Any] = {}

    def run() -> None:
        try:
            found["ok"] = call(**arguments)
        except Exception as error:  # noqa: BLE001 - it is reported
            found["error"] = error

    worker = threading.Thread(target=run, daemon=True)
    worker.start()
    worker.join(timeout)
    if "error" in found:
        raise found["error"]
    if worker.is_alive():
        raise TimeoutError(f"no end after {timeout:g} s")
    return found["ok"]


CALLS = {one.__name__: one for one in (clock, facts, software, files, prepared, listen, close, reach, all_reduce)}


def serve() -> None:
    """Answers requests until the input ends. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    end = threading.Timer(LONGEST_SECONDS, os._exit, (1,))
    end.daemon = True
    end.start()
    print(MARK, file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        name, limit = request.pop("call"), request.pop("limit", None)
        try:
            value = in_background(CALLS[name], request, limit) if limit else CALLS[name](**request)
            answer = {"ok": value}
        except Exception as error:  # noqa: BLE001 - the other side decides what it means
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)
    os._exit(0)  # a thread that hangs in a collective must not keep this process


if __name__ == "__main__":
    serve()
