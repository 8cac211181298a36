"""The other end of `hosts.Session`: what a machine of a cluster says of itself and its network when it is asked, and a
run's launcher there. Linux.

Sent as text to the Python over there: always of the version of the machine that asks, and nothing is left on the disk.
Needs the standard library only, also that of Python 3.8. Requests are lines of JSON on standard input, answers are
lines of JSON on standard output; no value of a request meets a shell.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

START = "SFT_PLAY_CLUSTER"
"""Variable that all processes of a start inherit: JSON of its run's folder, node, time and id."""
PIECE, PINGS = 1 << 20, 9
CHUNK = 1 << 16
"""Bytes that are read at once, and sent first to see how fast a line is: half a second at 1 Mbit/s."""
ENOUGH_SECONDS = 0.25
"""A transfer that takes so long says how fast a line is."""
GET_ADDRESS, GET_MTU = 0x8915, 0x8921
"""Linux's `ioctl` numbers for an interface, SIOCGIFADDR and SIOCGIFMTU."""
SAVING_SECONDS = 5.0
"""A checkpoint's folder in which nothing has changed for so long is not being written."""
SILENT_SECONDS = 15.0
"""How long the machine that started us may be silent; it sends a line every two seconds."""
GONE_SECONDS = 29.0
"""How long a launcher may take to save and leave once it is without its master; a save that takes longer continues
while it grows.
"""
TICK_SECONDS, LOOK_SECONDS = 0.2, 1.0
listeners: list[socket.socket] = []
_answers: IO[str] = sys.stdout
_lock = threading.Lock()


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
    """Differs between machines that run now, whatever they are called; several may share a disk, and on tests' machines
    a kernel.
    """
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
    run: str | None = None,
    mark: str | None = None,
    towards: str | None = None,
    ports: Sequence[int] = (),
    code: Sequence[str] = (),
    data: Sequence[str] = (),
    prepared: Sequence[str] = (),
) -> dict[str, Any]:
    """Return `Facts`, which need no package. `mark` is a file that another machine has made in its folders. Listens at
    `ports` from then on.
    """
    runs, cache = (
        runs_folder(),
        Path(os.environ.get("SFT_PLAY_CACHE") or Path.home() / ".cache" / "sft_play").absolute(),
    )
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
            given = [
                word for word in (entry / "environ").read_bytes().split(b"\0") if word.startswith(f"{START}=".encode())
            ]
            for word in given if _network_namespace(entry.name) == _network_namespace() else ():
                start = os.fsdecode(word.partition(b"=")[2])
                if run is None or json.loads(start)["run"] == run:
                    found.setdefault(start, []).append(int(entry.name))
    return found


def status(run: str | None) -> dict[str, Any]:
    """Return the starts under way here: of the runs of this name, or of all."""
    found, now = [], time.time()  # by this machine's clock, which may not be the other's
    for start, pids in starts().items():
        one = json.loads(start)
        found.append({**one, "run": Path(one["run"]).name, "seconds": now - one["started"], "processes": len(pids)})
    return {"runs": [one for one in found if run in (None, one["run"])]}


def _network_namespace(process: str = "self") -> str:
    return os.readlink(f"/proc/{process}/ns/net")  # noqa: PTH115 - Python 3.8 has no `Path.readlink`


def _fingerprint(split: Path) -> str:
    return str(json.loads((split / "manifest.json").read_text())["split"]["fingerprint"])


def _packages() -> dict[str, str]:
    """Return distribution -> version, by the names of the folders that pip leaves; of two on the path, the first is
    imported.
    """
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
    return [
        {"name": name, "total_bytes": int(total) * PIECE, "free_bytes": int(free) * PIECE} for total, free, name in rows
    ]


def run_module(words: Sequence[str], variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the JSON that one of our modules prints. Raise with its error."""
    argv = [sys.executable, "-m", *words, "JSON=1"]
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
    """Open a listener on every interface; port 0 is any free high one. Return its port, or who holds the one asked
    for.
    """
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
    """Connect to every listener at once; `ways` has for each what `_way` returns."""
    pool = ThreadPoolExecutor(max(1, len(targets)))
    tried = [pool.submit(_way, *target, megabytes, timeout) for target in targets]
    wait(tried, 2 * timeout + (20 if megabytes else 0))  # a name may take longer to resolve than a connection may take
    return {"ways": [one.result() if one.done() else {"error": f"no answer within {timeout:g} s"} for one in tried]}


def _way(address: str, port: int, megabytes: int, timeout: float) -> dict[str, Any]:
    """Return the median round trip in ms to a listener, the own address that the way begins at and, with `megabytes`,
    the speed in Mbit/s; or `error`.
    """
    try:
        with socket.create_connection((address, port), timeout=timeout) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            trip = sorted(_exchange(link, b"p") for _ in range(PINGS if megabytes else 1))[
                PINGS // 2 if megabytes else 0
            ]
            found = {"rtt_ms": trip * 1e3, "own": link.getsockname()[0]}
            if megabytes:
                link.settimeout(timeout + 5)
                found["mbit"] = _speed(link, megabytes * PIECE, trip)
            return found
    except (OSError, UnicodeError) as error:
        return {"error": getattr(error, "strerror", None) or str(error)}


def _speed(link: socket.socket, most: int, trip: float) -> float:
    """Return Mbit/s of a transfer that is long enough to tell, of at most `most` bytes; `trip` is a round trip's
    seconds.

    Each is four times the one before: what a switch or a shaper takes at once, before its speed is felt, is small next
    to the last.
    """
    count, seconds = CHUNK // 4, 0.0
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
    backend: str,
    address: str,
    port: int,
    rank: int,
    world: int,
    interface: str,
    stated: bool,
    megabytes: float,
    timeout: float,
) -> dict[str, float]:
    """Return the seconds of one sum over all machines (the best of three), through torch as a training does it. Listens
    no longer.

    `stated`: the inventory names the interface, so it is NCCL's too, as where NCCL might take one that leads to no
    other machine.
    """
    while listeners:
        server = listeners.pop()
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        server.close()
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        if stated or (
            backend == "nccl" and importlib.import_module("sft_play.launch.environment").nccl_might_take(interface)
        ):
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


# ---- What is changed here


def tell(**facts: Any) -> None:
    """Write one line of JSON; a reader that has gone is no error."""
    with _lock, contextlib.suppress(OSError, ValueError):
        _answers.write(json.dumps(facts) + "\n")
        _answers.flush()


def write(files: dict[str, str]) -> dict[str, Any]:
    """Write small files under another name and rename them; `files` maps paths to text."""
    for path, text in ((Path(name), text) for name, text in files.items()):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    return {}


def one_checkpoint(run: str, step: int) -> dict[str, Any]:
    """Set aside checkpoints newer than `step`, which this run is about to make again; nothing is deleted."""
    for path in sorted((runs_folder() / run / "checkpoints").glob("step-*")):
        number = path.name.partition("-")[2]
        if number.isdecimal() and int(number) > step:
            path.rename(path.with_name(f".{path.name}.set-aside-{int(time.time())}"))
    return {}


def end(run: str) -> dict[str, Any]:
    """Kill what an earlier start has left of a run here."""
    folder = str(runs_folder() / run)
    for start in starts(folder):
        kill_all(folder, start)
    return {}


def kill_all(folder: str, start: str) -> int:
    """Kill the processes of a start, however often they fork; return how many are left."""
    for _ in range(20):
        pids = starts(folder).get(start, [])
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            return 0
        time.sleep(0.1)
    return len(pids)


# ---- The launcher of a run


class Launch:
    """One launcher, from its start to the last of its processes.

    It gets SIGTERM (save and leave) when a stop is requested, and when it is without its master: standard input has
    ended, or nobody was heard for `SILENT_SECONDS`, and the run's store at `store` (address and port; `None` on the
    master itself) does not answer either. What it leaves behind is found by a variable that all its descendants
    inherit, and killed.
    """

    def __init__(self, run: str, node: int, words: list[str], store: Any, silent_seconds: float, stream: bool) -> None:
        """`words` are for Python; `stream`: logs are sent."""
        self.run, self.store, self.silent_seconds, self.stream = runs_folder() / run, store, silent_seconds, stream
        self.start = json.dumps({"run": str(self.run), "node": node, "started": time.time(), "id": uuid.uuid4().hex})
        self.sent = {path: path.stat().st_size for path in (self.run / "logs").glob("rank*.log")}
        self.wish = self.run / f".fetch-node{node}"
        """By this file the launcher asks for the run's newest checkpoint, and waits until it is gone
        (`launch.attempt`).
        """
        self.heard = self.answered = time.monotonic()
        self.over = threading.Event()
        libc, parent = ctypes.CDLL(None), os.getpid()

        def bound() -> None:
            libc.prctl(1, int(signal.SIGTERM), 0, 0, 0)  # PR_SET_PDEATHSIG
            if os.getppid() != parent:
                os._exit(143)

        self.process = subprocess.Popen(
            [sys.executable, *words],
            env={**os.environ, START: self.start},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=bound,  # noqa: PLW1509 - no thread has been started yet
        )

    def kill(self) -> int:
        self.process.kill()
        return kill_all(str(self.run), self.start)

    def listen(self) -> None:
        """Carry out commands until the connection ends."""
        with contextlib.suppress(OSError, ValueError):
            for line in iter(sys.stdin.buffer.readline, b""):
                self.heard, command = time.monotonic(), json.loads(line)
                if "signal" in command:
                    self.process.send_signal(command["signal"])
                elif "kill" in command:
                    self.kill()
                elif "fetched" in command:
                    self.wish.unlink()
        self.answered, self.heard = time.monotonic(), -SILENT_SECONDS

    def relay(self, stream: IO[bytes], name: str) -> None:
        """Pass on what the launcher prints, letters complete."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while content := os.read(stream.fileno(), CHUNK):
            tell(**{name: decoder.decode(content)})

    def look(self) -> None:
        """Read what the run writes until it is over: in a separate thread, since a network disk may stall."""
        wished = last = False
        while not last:
            last = self.over.is_set()
            with contextlib.suppress(OSError):
                if wished != (wished := self.wish.exists()) and wished:
                    tell(fetch=True)
                for path in sorted((self.run / "logs").glob("rank*.log")) if self.stream else []:
                    self.send_log(path, last=last)
            self.over.wait(LOOK_SECONDS)

    def send_log(self, path: Path, *, last: bool) -> None:
        """Send the lines that were added to a log since the last time."""
        with path.open("rb") as stream:
            stream.seek(self.sent.get(path, 0))
            while lines := stream.readlines(CHUNK):
                if not last and not lines[-1].endswith(b"\n"):
                    lines.pop()
                if text := b"".join(lines):
                    self.sent[path] = self.sent.get(path, 0) + len(text)
                    tell(log=path.name, text=text.decode("utf-8", "replace"))

    def is_alone(self) -> bool:
        """Whether this machine is without its master."""
        now = time.monotonic()
        if now - self.heard < SILENT_SECONDS:
            return False
        self.wish.unlink(missing_ok=True)  # nobody brings anything
        if self.store is None:
            return True
        with contextlib.suppress(OSError), socket.create_connection(tuple(self.store), timeout=2):
            self.answered = time.monotonic()
        return bool(time.monotonic() - max(self.answered, self.heard) > self.silent_seconds)

    def saves(self) -> bool:
        """Whether a checkpoint is being written: its folder has been touched within some seconds."""
        newest = 0.0
        for folder in (self.run / "checkpoints").glob(".step-*.partial"):
            with contextlib.suppress(OSError):
                newest = max([newest, folder.stat().st_mtime, *(path.stat().st_mtime for path in folder.iterdir())])
        return time.time() - newest < SAVING_SECONDS

    def supervise(self) -> None:
        """Wait for the end of the launcher, and make sure that it comes when it is without its master."""
        out, err = self.process.stdout, self.process.stderr
        calls = ((self.relay, (out, "out")), (self.relay, (err, "err")), (self.look, ()), (self.listen, ()))
        threads = [threading.Thread(target=call, args=words, daemon=True) for call, words in calls]
        for thread in threads:
            thread.start()
        leave_by = None
        while self.process.poll() is None:
            if leave_by is None and self.is_alone():
                leave_by = time.monotonic() + GONE_SECONDS
                self.process.terminate()
            if leave_by is not None and time.monotonic() > leave_by and not self.saves():
                self.kill()
            time.sleep(TICK_SECONDS)
        left = self.kill()
        self.over.set()
        for thread, seconds in zip(threads, (5.0, 5.0, LOOK_SECONDS + 60), strict=False):
            thread.join(timeout=seconds)
        tell(ended=self.process.returncode, left=left)


def launch(request: dict[str, Any]) -> None:
    """Run a launcher under this connection."""
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):  # the connection's end is seen on standard input
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the launcher would inherit
    running = Launch(**request)
    tell(started=running.process.pid)
    running.supervise()


# ---- Requests

OPERATIONS: dict[str, Any] = {
    one.__name__: one for one in (clock, facts, run_module, reach, all_reduce, write, one_checkpoint, status, end)
}


def answer(do: str, request: dict[str, Any]) -> None:
    """Answer one request; the other side decides what a problem means."""
    try:
        tell(**OPERATIONS[do](**request))
    except OSError as error:
        tell(problem=f"{error.filename or Path.cwd()}: {error.strerror or error}")
    except Exception as error:  # noqa: BLE001
        tell(problem=f"{type(error).__name__}: {error}")


def main() -> None:
    """Answer requests until the input ends. What libraries print goes to stderr."""
    global _answers  # noqa: PLW0603
    _answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    setup = json.loads(sys.stdin.buffer.readline())
    os.environ.update(setup["variables"])  # where runs and cache are
    with contextlib.suppress(OSError):
        os.chdir(Path(setup["folder"]).expanduser())
    for line in iter(sys.stdin.buffer.readline, b""):
        request = json.loads(line)
        if not (do := request.pop("do", None)):
            continue  # it says only that somebody is there
        seconds = request.pop("seconds")
        if do == "launch":  # in the main thread, with which its child ends
            launch(request)
            break
        signal.alarm(int(seconds) + 60)  # nobody may end the input of a machine whose cable was pulled
        threading.Thread(target=answer, args=(do, request), daemon=True).start()
    os._exit(0)  # a thread may hang in a collective, or wait inside `sys.stdin`: Python would abort at its own end
