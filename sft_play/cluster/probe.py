"""What a machine says about itself and its network. Sent as text with that of `remote`, under the same rules; writes no file."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import importlib.util
import json
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
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
GET_ADDRESS, GET_MTU = 0x8915, 0x8921
"""Linux's `ioctl` numbers for an interface, SIOCGIFADDR and SIOCGIFMTU."""
listeners: list[socket.socket] = []


# ---- The machine


def clock() -> dict[str, float]:
    """Return the seconds since 1970, by this machine's clock."""
    return {"now": time.time()}


def this_machine() -> str:
    """Return an id of this machine's start and its network: several may share a disk, and on tests' machines a kernel."""
    return f"{_text('/proc/sys/kernel/random/boot_id')}:{_known(os.readlink, '/proc/self/ns/net')}"


def runs_folder() -> Path:
    """As `runs.folder.runs_folder`, absolute."""
    return Path(os.environ.get("RUNS_DIR") or "runs").absolute()


def cache_folder() -> Path:
    """As `runs.folder.cache_folder`."""
    return Path(os.environ.get("SFT_PLAY_CACHE") or Path.home() / ".cache" / "sft_play").absolute()


def hub_folder() -> Path:
    """Return where huggingface_hub keeps models."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home).expanduser() / "hub")


@dataclass(frozen=True)
class Facts:
    """One machine, as its own Python sees it. Paths are absolute, and that machine's."""

    host_name: str
    machine: str
    """Differs between machines that run now, whatever they are called."""
    linux: bool
    python: str
    packages: Mapping[str, str]
    """Distribution -> version, of all that its Python finds."""
    home: str
    folder: str
    runs: str
    cache: str
    hub: str
    """Where huggingface_hub keeps models."""
    shares_runs: bool | None
    """Its folder of runs is this machine's: a network disk. `None` where it was not asked."""
    shares_cache: bool | None
    disks: Mapping[str, Mapping[str, Any] | None]
    ram_bytes: int
    gpu_count: int
    """As the driver shows them to a process of its environment."""
    rsync: bool
    interfaces: Mapping[str, Mapping[str, Any]]
    route: Mapping[str, Any] | None
    """Its own address, interface and MTU on the way to the master; `None` where there is none, or it was not asked."""
    listens: Sequence[Mapping[str, Any]]
    code: Mapping[str, str | None]
    data: Mapping[str, int | None]
    prepared: Mapping[str, str | None]
    run_there: str | None = None
    """Its folder of a run of the name that was asked for, where one was begun there."""
    trains: bool = False
    """Whether a launcher of that run lives there."""


def machine(
    mark: str | None = None, towards: str | None = None, ports: Sequence[int] = (), code: Sequence[str] = (), data: Sequence[str] = (),
    prepared: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Return `Facts`, which need no package: system, folders, disks, limits, GPUs, interfaces and the route to `towards`, versions of packages.

    With the sha256 of the files of `code`, the sizes of those of `data` (bytes), the fingerprints of `prepared` splits; `None` for what is not
    here. `mark` is a file that another machine has made in its folders. Listens at `ports` from then on.
    """
    cache, runs = cache_folder(), runs_folder()
    for folder in (cache, runs) if mark else ():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
    project = importlib.util.find_spec("sft_play")
    root = Path(project.origin).parent.parent if project and project.origin else Path.cwd()

    def fingerprint(name: str) -> str:
        return str(json.loads((cache / "data" / name / "manifest.json").read_text())["split"]["fingerprint"])

    places = {"runs": runs, "cache": cache, "folder": Path.cwd(), "shm": Path("/dev/shm")}
    links = _interfaces()
    return {
        "host_name": socket.gethostname(), "machine": this_machine(),
        "linux": sys.platform == "linux", "python": platform.python_version(), "packages": _packages(),
        "home": str(Path.home()), "folder": str(Path.cwd()), "runs": str(runs), "cache": str(cache), "hub": str(hub_folder()),
        "shares_runs": (runs / mark).exists() if mark else None, "shares_cache": (cache / mark).exists() if mark else None,
        "disks": {name: _disk(place) for name, place in places.items()},
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu_count": gpu_count(), "rsync": shutil.which("rsync") is not None, "interfaces": links,
        "route": _route(towards, links) if towards else None, "listens": [_listen(port) for port in ports],
        "code": {path: _known(lambda path: hashlib.sha256((root / path).read_bytes()).hexdigest(), path) for path in code},
        "data": {path: _known(lambda path: Path(path).expanduser().stat().st_size, path) for path in data},
        "prepared": {name: _known(fingerprint, name) for name in prepared},
    }  # fmt: skip


def _disk(place: Path) -> dict[str, Any] | None:
    """Return the file system of `place`, or of the folder above it that is there."""
    path = next((path for path in (place, *place.parents) if path.is_dir()), place)
    with contextlib.suppress(OSError):
        used = shutil.disk_usage(path)
        writable = os.access(path, os.W_OK) and not os.statvfs(path).f_flag & os.ST_RDONLY
        return {"path": str(place), "free_bytes": used.free, "total_bytes": used.total, "writable": bool(writable)}
    return None


def _packages() -> dict[str, str]:
    """Return distribution -> version, by the names of the folders that pip leaves; of two on the path, the first is imported."""
    found: dict[str, str] = {}
    for path in (path for entry in sys.path for path in sorted(Path(entry).glob("*.dist-info"))):
        name, _, version = path.stem.rpartition("-")
        found.setdefault(name.lower().replace("_", "-"), version)
    return found


def _known(call: Any, *arguments: Any) -> Any:
    """Return what `call` returns, `None` where that cannot be found out."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, subprocess.SubprocessError):
        return call(*arguments)
    return None


def _text(path: str) -> str:
    return (_known(Path(path).read_text) or "").replace("\0", " ").strip()


def _process(pid: Any) -> str:
    words = _text(f"/proc/{pid}/cmdline") or _text(f"/proc/{pid}/comm") or "a process"
    return f"{words[:80]} (process {pid})"


# ---- Packages and GPUs


def gpu_count() -> int:
    """Return how many NVIDIA GPUs the driver shows to a process of this environment."""
    listed = _known(lambda: subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=15, check=False))
    count = sum(line.startswith(b"GPU ") for line in listed.stdout.splitlines()) if listed else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return count if visible is None else min(count, len([part for part in visible.split(",") if part.strip()]))


def software() -> dict[str, Any]:
    """Return what torch says of itself, and the GPUs; importing torch takes seconds. Listens no longer."""
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
    except Exception as error:  # noqa: BLE001 - whatever a broken package raises is reported
        found["error"] = f"{type(error).__name__}: {error}"
    return {**found, "driver": None, "gpus": [], "hidden": os.environ.get("CUDA_VISIBLE_DEVICES"), **_cards()}


def _cards() -> dict[str, Any]:
    """Return the driver and every GPU with its memory in bytes, by the driver's program, which needs no package."""
    fields = "driver_version,memory.total,memory.free,uuid,name"
    rows = _known(_nvidia_smi, "gpu", f"{fields},compute_cap")
    if not rows:  # drivers before 510 do not know the last field
        rows = [[*row, None] for row in _known(_nvidia_smi, "gpu", fields) or []]
    users = _known(_nvidia_smi, "compute-apps", "gpu_uuid,pid") or []
    cards = [
        {
            "name": name, "total_bytes": int(total) * PIECE, "free_bytes": int(free) * PIECE, "capability": capability,
            "held_by": [_process(row[-1]) for row in users if row[0] == uuid],
        }
        for _, total, free, uuid, name, capability in rows if total.isdigit()
    ]  # fmt: skip
    return {"driver": rows[0][0], "gpus": cards} if rows else {}


def _nvidia_smi(what: str, fields: str) -> list[list[str]]:
    words = ["nvidia-smi", f"--query-{what}={fields}", "--format=csv,noheader,nounits"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)
    return [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines()]


# ---- Network


def _interfaces() -> dict[str, dict[str, Any]]:
    """Return interface -> its IPv4 address (`None` without one) and MTU."""
    found: dict[str, dict[str, Any]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            found[name] = {"address": None, "mtu": None}
            asked = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # without an address the second raises
                found[name]["mtu"] = struct.unpack("i", fcntl.ioctl(probe.fileno(), GET_MTU, asked)[16:20])[0]
                found[name]["address"] = socket.inet_ntoa(fcntl.ioctl(probe.fileno(), GET_ADDRESS, asked)[20:24])
    return found


def _route(towards: str, links: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Return this machine's own address, interface and its MTU on the way to an address; nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))
        own = probe.getsockname()[0]
        name = next((name for name, link in links.items() if link["address"] == own), None)
        return {"address": own, "interface": name, "mtu": links[name]["mtu"] if name else None}
    return None


def _listen(port: int) -> dict[str, Any]:
    """Open a listener on every interface; port 0 is any free high one. Return its port, or who holds the one asked for."""
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
    """Return the process that listens on `port`; `None` where nobody can tell."""
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
    """Echo `p`; of `b` with a length take so many bytes, then answer."""
    with connection, contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while kind := connection.recv(1):
            if kind == b"b":
                left = struct.unpack("<Q", connection.recv(8, socket.MSG_WAITALL))[0]
                while left:
                    left -= len(connection.recv(min(left, PIECE))) or left
            connection.sendall(kind)


def reach(targets: Sequence[tuple[str, int]], megabytes: int, timeout: float) -> dict[str, Any]:
    """Connect to every listener at once; `ways` has for each what `_way` returns, or `error`."""

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
    """Return the median round trip in ms to a listener, the own address that the way begins at and, with `megabytes`, the speed in Mbit/s."""
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
    """Return Mbit/s of a transfer that is long enough to tell, of at most `most` bytes; `trip` is a round trip's seconds.

    Each is at most four times the one before: what a switch or a shaper takes at once, before its speed is felt, is small next to the last.
    """
    count, began = min(FIRST_BYTES, most), time.perf_counter()
    while True:
        seconds = _sent(link, count)
        enough = seconds >= max(ENOUGH_SECONDS, 5 * trip) or time.perf_counter() - began > WAY_SECONDS
        if enough or count == most:
            return count * 8 / 1e6 / seconds
        count = min(most, int(count * min(4.0, max(1.5, 2 * ENOUGH_SECONDS / seconds))))


def _sent(link: socket.socket, count: int) -> float:
    """Send `count` bytes and return the seconds until the other side has them all."""
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
    """Return the seconds of one sum over all machines (the best of three), through torch as a training does it.

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
