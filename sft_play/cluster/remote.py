"""The other end of `hosts`: what a machine of a cluster is asked over SSH, and a run's launcher there. Sent as text; nothing is left on its disk.

Needs nothing but the standard library of the Python there, and is always of the version of the machine that asks. A request is one line of JSON
on standard input, answers are lines of JSON on standard output; no value of a request meets a shell. Linux.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from importlib import metadata, util
from pathlib import Path
from typing import IO, Any

TOKEN = "SFT_PLAY_CLUSTER"
"""Variable with an id of its own for each start on each machine, which all processes of that start inherit."""
CHUNK = 65536
SAVING_SECONDS = 5.0
"""A checkpoint's folder in which nothing has changed for so long is not being written."""
LONGEST_SAVE_SECONDS = 3600.0
SILENT_SECONDS = 15.0
"""How long the machine that started us may be silent; it sends a line every two seconds."""
GONE_SECONDS = 29.0
"""How long a launcher may take to save and leave once it is without its master; a save that takes longer goes on while it grows."""
TICK_SECONDS, LOOK_SECONDS = 0.2, 1.0
_lock = threading.Lock()


def tell(**facts: Any) -> None:
    """Writes one line of JSON; a reader that has gone is no error, what follows from that is decided elsewhere."""
    with _lock, contextlib.suppress(OSError, ValueError):
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()


def runs_folder() -> Path:
    """As `runs.folder.runs_folder`, absolute."""
    return Path(os.environ.get("RUNS_DIR") or "runs").absolute()


def cache_folder() -> Path:
    """As `runs.folder.cache_folder`."""
    return Path(os.environ.get("SFT_PLAY_CACHE") or Path.home() / ".cache" / "sft_play")


def hub_folder() -> Path:
    """Where huggingface_hub keeps models."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home).expanduser() / "hub")


def facts(request: dict[str, Any]) -> int:
    """Folders, versions of `packages` without importing any, GPUs, and in which folders this machine sees the file `mark`, made elsewhere."""
    mark, folder, versions = request["mark"], Path(request["folder"]).expanduser(), {}
    sys.path.insert(0, str(folder))
    for name in request["packages"]:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    with contextlib.suppress(OSError):
        runs_folder().mkdir(parents=True, exist_ok=True)
        cache_folder().mkdir(parents=True, exist_ok=True)
    tell(
        host=socket.gethostname(), python=".".join(map(str, sys.version_info[:3])), versions=versions,
        code=util.find_spec("sft_play") is not None, folder=str(folder.absolute()) if folder.is_dir() else None,
        runs=str(runs_folder()), cache=str(cache_folder()), hub=str(hub_folder()), gpus=gpus(),
        rsync=shutil.which("rsync") is not None, home=str(Path.home()), shares_runs=(runs_folder() / mark).exists(),
        shares_cache=(cache_folder() / mark).exists(), linux=sys.platform == "linux", run_there=_run_there(request.get("run")),
        interfaces=sorted({name for _, name in socket.if_nameindex()} - {"lo"}),
        trains=bool(request.get("run") and living(runs_folder() / request["run"])),
    )  # fmt: skip
    return 0


def _run_there(name: str | None) -> str | None:
    """The folder of a run of this name that was begun on this machine; `None` where there is none."""
    folder = runs_folder() / str(name)
    with contextlib.suppress(OSError):
        if name and (folder / "events.jsonl").stat().st_size:
            return str(folder)
    return None


def gpus() -> int:
    """How many NVIDIA GPUs the driver shows to a process of this environment."""
    count = 0
    if program := shutil.which("nvidia-smi"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=15, check=False)
            count = sum(line.startswith("GPU ") for line in done.stdout.splitlines())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return count if visible is None else min(count, len([part for part in visible.split(",") if part.strip()]))


# ---- Files


def write(request: dict[str, Any]) -> int:
    """Writes small files aside and renames them; `files` maps paths (relative to the folder) to text."""
    for name, text in request["files"].items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    tell(ok=True)
    return 0


def one_checkpoint(request: dict[str, Any]) -> int:
    """Sets aside checkpoints newer than `step`, which this run is about to make again; nothing is deleted."""
    folder = runs_folder() / request["run"] / "checkpoints"
    for path in sorted(folder.glob("step-*")) if folder.is_dir() else []:
        number = path.name.partition("-")[2]
        if number.isdigit() and (request["step"] is None or int(number) > request["step"]):
            path.rename(path.with_name(f".{path.name}.set-aside-{int(time.time())}"))
    tell(ok=True)
    return 0


# ---- Logs


def places(request: dict[str, Any]) -> list[Path]:
    """The folders of runs to look in: this machine's, and where the one that asks keeps its own, which may be a shared disk."""
    found = {path.resolve(): path for path in (runs_folder(), *map(Path, request.get("also", ()))) if path.is_dir()}
    return list(found.values())


def folder_of(request: dict[str, Any]) -> Path:
    """The folder of the run that is asked for."""
    found = [place / str(request["run"]) for place in places(request)]
    return next((run for run in found if run.is_dir()), runs_folder() / str(request["run"]))


def tail(request: dict[str, Any]) -> int:
    """Sends the text of a run's log, and with `follow` what is added while its launcher here lives and somebody reads."""
    run = folder_of(request)
    path = run / "logs" / f"rank{int(request['rank'])}.log"
    if not path.is_file():
        names = (re.fullmatch(r"rank(\d+)\.log", one.name) for one in (run / "logs").glob("rank*.log"))
        tell(missing=True, ranks=sorted(int(name[1]) for name in names if name))
        return 0
    done = threading.Event()
    threading.Thread(target=_until_gone, args=(done,), daemon=True).start()
    log = Log(path)
    while True:
        going = request["follow"] and bool(living(run)) and not done.is_set()
        for text in log.added():
            tell(text=text)
        if not going:
            return 0
        time.sleep(0.5)


def _until_gone(done: threading.Event) -> None:
    while os.read(0, CHUNK):  # a thread inside `sys.stdin` when Python ends makes it abort
        pass
    done.set()


class Log:
    """A growing file; one that became shorter begins anew."""

    def __init__(self, path: Path, seen: int = 0) -> None:
        self.path, self.seen = path, seen
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def added(self) -> list[str]:
        """What was added since the last call; a letter whose bytes are not all there yet comes with the next piece."""
        found = []
        with self.path.open("rb") as stream:
            if self.seen > os.fstat(stream.fileno()).st_size:
                self.seen = 0
                self.decoder.reset()
            stream.seek(self.seen)
            while content := stream.read(CHUNK):
                found.append(self.decoder.decode(content))
            self.seen = stream.tell()
        return [text for text in found if text]


# ---- Processes


def pid_file(run: Path, node: int) -> Path:
    """Says which processes train a run here, for `cluster-status` and `cluster-stop`."""
    return run / f".cluster-node{node}.json"


def with_token(token: str) -> list[int]:
    """The processes that inherited a token, this one excepted."""
    wanted = f"{TOKEN}={token}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                ended = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                if not ended and wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def send(pids: list[int], number: int) -> None:
    """Sends a signal to each process that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_all(token: str) -> int:
    """Kills what has the token, however often it forks; returns how many are left."""
    for _ in range(20):
        if not (pids := with_token(token)):
            return 0
        send(pids, signal.SIGKILL)
        time.sleep(0.1)
    return len(with_token(token))


def started_here(run: Path) -> list[dict[str, Any]]:
    """The pid files of a run that this machine wrote."""
    found = []
    for path in sorted(run.glob(".cluster-node*.json")):
        with contextlib.suppress(OSError, ValueError):
            one = json.loads(path.read_text(encoding="utf-8"))
            found += [one] if one.get("machine") == machine() else []
    return found


def living(run: Path) -> list[dict[str, Any]]:
    """Those whose launcher lives."""
    return [one for one in started_here(run) if one.get("launcher") in with_token(one["token"])]


def machine() -> str:
    """An id of this machine's start and its network: several may share a disk, and on tests' machines a kernel."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    text = boot.read_text().strip() if boot.is_file() else ""
    with contextlib.suppress(OSError):
        text += ":" + str(Path("/proc/self/ns/net").readlink())
    return text


def status(request: dict[str, Any]) -> int:
    """Runs under way here: of `run`, or of all."""
    runs = [folder_of(request)] if request.get("run") else [path for place in places(request) for path in place.glob("*")]
    found = []
    for run in runs:
        for one in living(run):
            logs = sorted((run / "logs").glob("rank*.log"), key=lambda path: path.stat().st_mtime)
            last = last_line(logs[-1]) if logs else None
            seconds = time.time() - float(one["started"])  # by this machine's clock, which may not be the other's
            found.append(one | {"run": run.name, "processes": len(with_token(one["token"])), "last": last, "seconds": seconds})
    tell(runs=found, gpus=gpus(), host=socket.gethostname())
    return 0


def last_line(path: Path) -> str:
    """The last line of a log, cut to 200 letters."""
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - 4000))
        lines = stream.read().decode("utf-8", "replace").replace("\r", "\n").strip().splitlines()
    return lines[-1][:200] if lines else ""


def saves(run: Path) -> bool:
    """Whether a checkpoint is being written: its folder has been touched within some seconds."""
    newest = 0.0
    for folder in (run / "checkpoints").glob(".step-*.partial"):
        with contextlib.suppress(OSError):
            newest = max([newest, folder.stat().st_mtime, *(path.stat().st_mtime for path in folder.iterdir())])
    return time.time() - newest < SAVING_SECONDS


def end(request: dict[str, Any]) -> int:
    """Ends what trains a run here: SIGTERM to its launcher (save and leave), SIGKILL to what is left after `grace` seconds.

    A save that takes longer goes on while it grows, an hour at most. Without `grace` nothing is waited for.
    """
    run, begun, grace = folder_of(request), time.monotonic(), float(request["grace"])
    known, lived = started_here(run), living(run)
    send([one["launcher"] for one in lived], signal.SIGTERM if grace else signal.SIGKILL)
    while (waited := time.monotonic() - begun) < grace or (grace and waited < LONGEST_SAVE_SECONDS and saves(run)):
        if not any(with_token(one["token"]) for one in known):
            break
        time.sleep(TICK_SECONDS)
    left = 0
    for one in known:
        left += kill_all(one["token"])
        pid_file(run, one["node"]).unlink(missing_ok=True)
    tell(ended=[one["node"] for one in lived], left=left)
    return 0


# ---- The launcher of a run


class Launch:
    """One launcher, from its start to the last of its processes.

    It is a child with a session of its own. It gets SIGTERM (save and leave) when it is told to stop, and when it is without its master: standard
    input has ended, or nobody was heard for `SILENT_SECONDS`, and the run's store at `store` (address and port; `None` on the master itself) does
    not answer either. Whatever it leaves behind is found by a variable that all its descendants inherit, and killed.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.run = runs_folder() / request["run"]
        self.node, self.token = int(request["node"]), str(request["token"])
        self.commands: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.begun = time.time()
        self.logs = {path: Log(path, path.stat().st_size) for path in (self.run / "logs").glob("rank*.log")}
        self.heard = self.answered = time.monotonic()
        self.left_at: float | None = None
        self.over = threading.Event()
        libc, parent = ctypes.CDLL(None), os.getpid()

        def bound() -> None:
            libc.prctl(1, int(signal.SIGTERM), 0, 0, 0)  # PR_SET_PDEATHSIG
            if os.getppid() != parent:
                os._exit(143)

        self.process = subprocess.Popen(
            request["argv"], env={**os.environ, TOKEN: self.token}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True, preexec_fn=bound,  # noqa: PLW1509 - no thread has been started yet
        )  # fmt: skip

    def listen(self) -> None:
        """Takes commands until the connection ends, which is one too."""
        with contextlib.suppress(OSError, ValueError):
            for line in iter(sys.stdin.buffer.readline, b""):
                self.commands.put(json.loads(line))
        self.commands.put(None)

    def read(self, stream: IO[bytes] | None, name: str) -> None:
        """Passes on what the launcher prints, letters whole."""
        assert stream is not None
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while content := os.read(stream.fileno(), CHUNK):
            if text := decoder.decode(content):
                tell(**{name: text})

    def obey(self) -> None:
        """Takes up what was said."""
        with contextlib.suppress(queue.Empty):
            while True:
                command = self.commands.get_nowait()
                if command is None:
                    self.answered, self.heard = time.monotonic(), -SILENT_SECONDS
                    return
                self.heard = time.monotonic()
                if "signal" in command:
                    send([self.process.pid], int(command["signal"]))
                elif command.get("kill"):
                    send([self.process.pid], signal.SIGKILL)
                    kill_all(self.token)
                elif "fetched" in command:
                    self.wish().unlink(missing_ok=True)

    def wish(self) -> Path:
        """The file by which the launcher asks for the run's newest checkpoint, and waits until it is gone (`launch.preparation.fetch_checkpoint`)."""
        return Path(self.run, f".fetch-node{self.node}")

    def is_alone(self) -> bool:
        """Whether this machine is without its master."""
        now = time.monotonic()
        if now - self.heard < SILENT_SECONDS:
            return False
        self.wish().unlink(missing_ok=True)  # nobody brings anything
        if (store := self.request["store"]) is None:
            return True
        with contextlib.suppress(OSError), socket.create_connection(tuple(store), timeout=2):
            self.answered = time.monotonic()
        return time.monotonic() - max(self.answered, self.heard) > float(self.request["silent_seconds"])

    def look(self) -> None:
        """Reads what the run writes until it is over: in a thread of its own, since a network disk may stall."""
        own = {"token": self.token, "node": self.node, "launcher": self.process.pid, "machine": machine()}
        noted = wished = False
        while True:
            last = self.over.is_set()
            with contextlib.suppress(OSError):
                if not last and not noted and self.run.is_dir():
                    text = json.dumps(own | {"host": socket.gethostname(), "started": self.begun})
                    pid_file(self.run, self.node).write_text(text, encoding="utf-8")
                    noted = True
                if wished != (wished := self.wish().exists()) and wished:
                    tell(fetch=True)
                for path in sorted((self.run / "logs").glob("rank*.log")) if self.request["stream"] else []:
                    for text in self.logs.setdefault(path, Log(path)).added():
                        tell(log=path.name, text=text)
            if last:
                return
            self.over.wait(LOOK_SECONDS)

    def supervise(self) -> None:
        """Waits for the end of the launcher, and sees to it that it comes when it is without its master."""
        relays = [
            threading.Thread(target=self.read, args=(self.process.stdout, "out"), daemon=True),
            threading.Thread(target=self.read, args=(self.process.stderr, "err"), daemon=True),
        ]
        looker = threading.Thread(target=self.look, daemon=True)
        for thread in (*relays, looker, threading.Thread(target=self.listen, daemon=True)):
            thread.start()
        while self.process.poll() is None:
            self.obey()
            if self.left_at is None and self.is_alone():
                self.left_at = time.monotonic()
                send([self.process.pid], signal.SIGTERM)
            if self.left_at is not None and time.monotonic() - self.left_at > GONE_SECONDS and not saves(self.run):
                send([self.process.pid], signal.SIGKILL)
                kill_all(self.token)
            time.sleep(TICK_SECONDS)
        left = kill_all(self.token)
        for relay in relays:
            relay.join(timeout=5)
        self.over.set()
        looker.join(timeout=LOOK_SECONDS + 60)
        with contextlib.suppress(OSError):
            pid_file(self.run, self.node).unlink(missing_ok=True)
        tell(ended=self.process.returncode, left=left)


def launch(request: dict[str, Any]) -> int:
    """Runs a launcher under this connection."""
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):  # the connection's end is seen on standard input
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the launcher would inherit
    try:
        running = Launch(request)
    except OSError as error:
        tell(problem=f"{request['argv'][0]}: {error.strerror or error}")
        return 1
    running.supervise()
    os._exit(0)  # a thread waits inside `sys.stdin`: Python would abort at its own end, and leave a core file


OPERATIONS = {
    "facts": facts, "write": write, "one_checkpoint": one_checkpoint, "tail": tail, "status": status, "end": end, "launch": launch,
}  # fmt: skip


def main() -> int:
    """Answers the request on standard input."""
    request = json.loads(sys.stdin.buffer.readline())
    folder = Path(request["folder"]).expanduser()
    os.environ.update(request.get("variables", {}))  # where runs and cache are
    if folder.is_dir():
        os.chdir(folder)
    try:
        return OPERATIONS[request["do"]](request)
    except OSError as error:
        tell(problem=f"{error.filename or folder}: {error.strerror or error}")
        return 1
