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
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

START = "SFT_PLAY_CLUSTER"
"""Variable that all processes of a start inherit: JSON of its run's folder, node, time and id."""
PIECE = 1 << 20
PINGS = 9
FIRST_BYTES = 1 << 16
"""Sent first to see how fast a line is: half a second at 1 Mbit/s."""
ENOUGH_SECONDS = 0.25
"""A transfer that takes so long says how fast a line is."""
GET_ADDRESS, GET_MTU = 0x8915, 0x8921
"""Linux's `ioctl` numbers for an interface, SIOCGIFADDR and SIOCGIFMTU."""
listeners: list[socket.socket] = []


# ---- The machine


def clock() -> dict[str, float]:
    """Return the seconds since 1970, by this machine's clock."""
    return {"now": time.time()}


def runs_folder() -> Path:
    """As `runs.folder.runs_folder`, absolute."""
    return Path(os.environ.get("RUNS_DIR") or "runs").absolute()


def hub_folder() -> Path:
    """Return where huggingface_hub keeps models."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home).expanduser() / "hub")


@dataclass(frozen=True)
class Facts:
    """One machine, as its own Python sees it. Paths are absolute, and that machine's."""

    host_name: str
    machine: str
    """Differs between machines that run now, whatever they are called; several may share a disk, and on tests' machines a kernel."""
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
    gpus: Sequence[Mapping[str, Any]]
    """As the driver shows them, with memory in bytes."""
    gpu_count: int
    """Of these, how many a process of its environment sees."""
    rsync: bool
    interfaces: Mapping[str, Mapping[str, Any]]
    route: Mapping[str, Any] | None
    """Its own address, interface and MTU on the way to the master; `None` where there is none, or it was not asked."""
    listens: Sequence[Mapping[str, Any]]
    code: Mapping[str, str | None]
    """sha256 of files of the project; `None` for what is not there, also below."""
    data: Mapping[str, int | None]
    """Sizes in bytes."""
    prepared: Mapping[str, str | None]
    """Fingerprints of prepared splits."""
    run_there: str | None
    """Its folder of a run of the name that was asked for, where one was begun there."""
    trains: bool
    """Whether a launcher of that run lives there."""


def facts(
    run: str | None = None, mark: str | None = None, towards: str | None = None, ports: Sequence[int] = (), code: Sequence[str] = (),
    data: Sequence[str] = (), prepared: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Return `Facts`, which need no package. `mark` is a file that another machine has made in its folders. Listens at `ports` from then on."""
    runs, cache = runs_folder(), Path(os.environ.get("SFT_PLAY_CACHE") or Path.home() / ".cache" / "sft_play").absolute()
    project = importlib.util.find_spec("sft_play")
    root = Path(project.origin).parent.parent if project and project.origin else Path.cwd()
    begun = runs / (run or "none") / "events.jsonl"
    links, gpus, visible = _interfaces(), _known(_gpus) or [], os.environ.get("CUDA_VISIBLE_DEVICES")
    return asdict(Facts(
        host_name=socket.gethostname(), machine=f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}:{_network_namespace()}",
        linux=sys.platform == "linux", python=platform.python_version(), packages=_packages(), home=str(Path.home()), folder=str(Path.cwd()),
        runs=str(runs), cache=str(cache), hub=str(hub_folder()),
        shares_runs=(runs / mark).exists() if mark else None, shares_cache=(cache / mark).exists() if mark else None,
        gpus=gpus, gpu_count=len(gpus) if visible is None else min(len(gpus), len([part for part in visible.split(",") if part.strip()])),
        rsync=shutil.which("rsync") is not None,
        interfaces=links, route=_route(towards, links) if towards else None, listens=[_listen(port) for port in ports],
        code={path: _known(lambda path=path: hashlib.sha256((root / path).read_bytes()).hexdigest()) for path in code},
        data={path: _known(lambda path=path: Path(path).expanduser().stat().st_size) for path in data},
        prepared={name: _known(lambda name=name: _fingerprint(cache / "data" / name)) for name in prepared},
        run_there=str(begun.parent) if _known(lambda: begun.stat().st_size) else None,
        trains=bool(run and starts(str(runs / run))),
    ))  # fmt: skip


def starts(run: str | None = None) -> dict[str, list[int]]:
    """Return the starts under way on this machine, of a run's folder or all -> their processes, this one excepted."""
    found: dict[str, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            given = [word for word in (entry / "environ").read_bytes().split(b"\0") if word.startswith(f"{START}=".encode())]
            for word in given if _network_namespace(entry.name) == _network_namespace() else ():
                start = os.fsdecode(word.partition(b"=")[2])
                if run is None or json.loads(start)["run"] == run:
                    found.setdefault(start, []).append(int(entry.name))
    return found


def status(run: str | None) -> dict[str, Any]:
    """Return the starts under way here: of the runs of this name, or of all."""
    found = [{**json.loads(start), "processes": len(pids)} for start, pids in starts().items()]
    now = time.time()  # by this machine's clock, which may not be the other's
    return {
        "runs": [
            {**one, "run": name, "seconds": now - one["started"]}
            for one in found if run in (None, name := Path(one["run"]).name)
        ]
    }  # fmt: skip


def _network_namespace(process: str = "self") -> str:
    return os.readlink(f"/proc/{process}/ns/net")  # noqa: PTH115 - Python 3.8 has no `Path.readlink`


def _fingerprint(split: Path) -> str:
    return str(json.loads((split / "manifest.json").read_text())["split"]["fingerprint"])


def _packages() -> dict[str, str]:
    """Return distribution -> version, by the names of the folders that pip leaves; of two on the path, the first is imported."""
    found: dict[str, str] = {}
    for path in (path for entry in sys.path for path in sorted(Path(entry).glob("*.dist-info"))):
        name, _, version = path.stem.rpartition("-")
        found.setdefault(name.lower().replace("_", "-"), version)
    return found


def _known(call: Any) -> Any:
    """Return what `call` returns, `None` where that cannot be found out."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, subprocess.SubprocessError):
        return call()
    return None


def _gpus() -> list[dict[str, Any]]:
    """Return every GPU, by the driver's program, which needs no package."""
    words = ["nvidia-smi", "--query-gpu=memory.total,memory.free,name", "--format=csv,noheader,nounits"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=15, check=True)
    rows = [[word.strip() for word in line.split(",", 2)] for line in done.stdout.splitlines()]
    return [{"name": name, "total_bytes": int(total) * PIECE, "free_bytes": int(free) * PIECE} for total, free, name in rows]


def run_module(words: Sequence[str], config: str = "", variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the JSON that one of our modules prints; with `config`, the text of its configuration. Raise with its error."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(config)
        argv = [sys.executable, "-m", *words, "JSON=1", *([f"CONFIG={file}"] if config else [])]
        done = subprocess.run(argv, env={**os.environ, **(variables or {})}, capture_output=True, text=True, check=False)
    if not done.stdout:
        lines = done.stderr.strip().splitlines() or ["no word"]
        raise RuntimeError(next((line.partition(" ")[2] for line in lines if line.startswith("error: ")), lines[-1]))
    return dict(json.loads(done.stdout))


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
    try:
        server = socket.create_server(("", port), backlog=64)
    except OSError as error:
        return {"port": None, "error": error.strerror, "held_by": _holder(port)}
    listeners.append(server)
    threading.Thread(target=_serve, args=(server,), daemon=True).start()
    return {"port": server.getsockname()[1]}


def _holder(port: int) -> str | None:
    """Return the process that listens on `port`; `None` where nobody can tell."""
    with contextlib.suppress(Exception):  # no psutil, or a system that does not let us look
        psutil = importlib.import_module("psutil")
        for one in psutil.net_connections("tcp"):
            if one.status == "LISTEN" and one.laddr.port == port:
                return f"{' '.join(psutil.Process(one.pid).cmdline())[:80]} (process {one.pid})"
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
        trip = sorted(_exchange(link, b"p") for _ in range(PINGS if megabytes else 1))[PINGS // 2 if megabytes else 0]
        found = {"rtt_ms": trip * 1e3, "own": link.getsockname()[0]}
        if megabytes:
            link.settimeout(timeout + 5)
            found["mbit"] = _speed(link, megabytes * PIECE, trip)
        return found


def _speed(link: socket.socket, most: int, trip: float) -> float:
    """Return Mbit/s of a transfer that is long enough to tell, of at most `most` bytes; `trip` is a round trip's seconds.

    Each is four times the one before: what a switch or a shaper takes at once, before its speed is felt, is small next to the last.
    """
    count, seconds = FIRST_BYTES // 4, 0.0
    while count < most and seconds < max(ENOUGH_SECONDS, 5 * trip):
        count = min(most, 4 * count)
        content = os.urandom(min(count, PIECE)) * (count // PIECE or 1)  # a tunnel that compresses must not look fast
        seconds = _exchange(link, b"b" + struct.pack("<Q", len(content)) + content)
    return count * 8 / 1e6 / seconds


def _exchange(link: socket.socket, content: bytes) -> float:
    """Send bytes and return the seconds until the other side has them all."""
    began = time.perf_counter()
    link.sendall(content)
    if not link.recv(1):
        raise ConnectionError("the connection was closed by a machine between the two")
    return time.perf_counter() - began


def all_reduce(
    backend: str, address: str, port: int, rank: int, world: int, interface: str, stated: bool, megabytes: float, timeout: float
) -> dict[str, float]:
    """Return the seconds of one sum over all machines (the best of three), through torch as a training does it. Listens no longer.

    `stated`: the inventory names the interface, so it is NCCL's too, as where NCCL might take one that leads to no other machine.
    """
    from datetime import timedelta

    while listeners:
        server = listeners.pop()
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        server.close()
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
