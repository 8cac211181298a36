"""The other end of `hosts.Session`: what a machine of a cluster does when it is asked, and a run's launcher there. Linux.

Sent as text, together with that of `probe`, to the Python over there: always of the version of the machine that asks, and nothing is left on
the disk. Needs the standard library only, also that of Python 3.8. Requests are lines of JSON on standard input, answers are lines of JSON on
standard output; no value of a request meets a shell.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from sft_play.cluster.probe import all_reduce, clock, machine, reach, runs_folder, software, this_machine

TOKEN = "SFT_PLAY_CLUSTER"
"""Variable with an id of each start on each machine, which all processes of that start inherit."""
CHUNK = 65536
SAVING_SECONDS = 5.0
"""A checkpoint's folder in which nothing has changed for so long is not being written."""
SILENT_SECONDS = 15.0
"""How long the machine that started us may be silent; it sends a line every two seconds."""
GONE_SECONDS = 29.0
"""How long a launcher may take to save and leave once it is without its master; a save that takes longer goes on while it grows."""
TICK_SECONDS, LOOK_SECONDS = 0.2, 1.0
_answers: IO[str] = sys.stdout
_lock = threading.Lock()


def tell(**facts: Any) -> None:
    """Write one line of JSON; a reader that has gone is no error."""
    with _lock, contextlib.suppress(OSError, ValueError):
        _answers.write(json.dumps(facts) + "\n")
        _answers.flush()


# ---- Asked before a run


def facts(run: str | None = None, **wanted: Any) -> dict[str, Any]:
    """Return what `probe.machine` says, and what this machine has of a run of that name."""
    place = runs_folder() / (run or "none")
    begun = run and (events := place / "events.jsonl").is_file() and events.stat().st_size
    return {**machine(**wanted), "run_there": str(place) if begun else None, "trains": bool(run and living(place))}


def write(files: dict[str, str]) -> dict[str, Any]:
    """Write small files under another name and rename them; `files` maps paths to text."""
    for path, text in ((Path(name), text) for name, text in files.items()):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    return {}


def one_checkpoint(run: str, step: int | None) -> dict[str, Any]:
    """Set aside checkpoints newer than `step`, which this run is about to make again; nothing is deleted."""
    for path in sorted((runs_folder() / run / "checkpoints").glob("step-*")):
        number = path.name.partition("-")[2]
        if number.isdigit() and (step is None or int(number) > step):
            path.rename(path.with_name(f".{path.name}.set-aside-{int(time.time())}"))
    return {}


# ---- Runs and their logs


class Log:
    """A growing file."""

    def __init__(self, path: Path, seen: int = 0) -> None:
        self.path, self.seen = path, seen
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def added(self) -> Iterator[str]:
        """Yield what was added since the last call; a letter whose bytes are not all there yet comes with the next piece."""
        with self.path.open("rb") as stream:
            stream.seek(self.seen)
            while content := stream.read(CHUNK):
                self.seen += len(content)
                if text := self.decoder.decode(content):
                    yield text


def status(run: str | None, own: str) -> dict[str, Any]:
    """Return the runs under way here: `run`, or all. `own`: the folder of runs of the machine that asks, which may be a shared disk."""
    found = []
    for folder in [path for place in {runs_folder().resolve(), Path(own).resolve()} for path in place.glob(run or "*")]:
        for one in living(folder):
            seconds = time.time() - float(one["started"])  # by this machine's clock, which may not be the other's
            found.append({**one, "run": folder.name, "processes": len(with_token(one["token"])), "seconds": seconds})
    return {"runs": found}


# ---- Processes


def pid_file(run: Path, node: int) -> Path:
    """Return the file that says which processes train a run here, for `cluster-status` and `cluster-stop`."""
    return run / f".cluster-node{node}.json"


def started_here(run: Path) -> list[dict[str, Any]]:
    """Return what this machine has noted of a run's launchers."""
    found = []
    for path in sorted(run.glob(".cluster-node*.json")):
        with contextlib.suppress(OSError, ValueError):
            one = json.loads(path.read_text(encoding="utf-8"))
            found += [one] if one.get("machine") == this_machine() else []
    return found


def living(run: Path) -> list[dict[str, Any]]:
    """Return those whose launcher lives."""
    return [one for one in started_here(run) if one.get("launcher") in with_token(one["token"])]


def with_token(token: str) -> list[int]:
    """Return the processes that inherited a token, this one excepted."""
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
    """Send a signal to each process that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_all(token: str) -> int:
    """Kill what has the token, however often it forks; return how many are left."""
    for _ in range(20):
        if not (pids := with_token(token)):
            return 0
        send(pids, signal.SIGKILL)
        time.sleep(0.1)
    return len(with_token(token))


def saves(run: Path) -> bool:
    """Whether a checkpoint is being written: its folder has been touched within some seconds."""
    newest = 0.0
    for folder in (run / "checkpoints").glob(".step-*.partial"):
        with contextlib.suppress(OSError):
            newest = max([newest, folder.stat().st_mtime, *(path.stat().st_mtime for path in folder.iterdir())])
    return time.time() - newest < SAVING_SECONDS


def end(run: str) -> dict[str, Any]:
    """Kill what an earlier start has left of a run here."""
    folder = runs_folder() / run
    for one in started_here(folder):
        kill_all(one["token"])
        pid_file(folder, one["node"]).unlink(missing_ok=True)
    return {}


# ---- The launcher of a run


class Launch:
    """One launcher, from its start to the last of its processes.

    It gets SIGTERM (save and leave) when it is told to stop, and when it is without its master: standard input has ended, or nobody was heard for
    `SILENT_SECONDS`, and the run's store at `store` (address and port; `None` on the master itself) does not answer either. What it leaves behind
    is found by a variable that all its descendants inherit, and killed.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        """`request`: `run`, `node`, `token`, `words` for Python, `store`, `silent_seconds`, and `stream`, whether logs are sent."""
        self.request, self.run, self.token = request, runs_folder() / request["run"], request["token"]
        self.commands: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.logs = {path: Log(path, path.stat().st_size) for path in (self.run / "logs").glob("rank*.log")}
        self.wish = self.run / f".fetch-node{request['node']}"
        """By this file the launcher asks for the run's newest checkpoint, and waits until it is gone (`launch.preparation`)."""
        self.heard = self.answered = time.monotonic()
        self.left_at: float | None = None
        self.over = threading.Event()
        libc, parent = ctypes.CDLL(None), os.getpid()

        def bound() -> None:
            libc.prctl(1, int(signal.SIGTERM), 0, 0, 0)  # PR_SET_PDEATHSIG
            if os.getppid() != parent:
                os._exit(143)

        self.process = subprocess.Popen(
            [sys.executable, *request["words"]], env={**os.environ, TOKEN: self.token}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=bound,  # noqa: PLW1509 - no thread has been started yet
        )  # fmt: skip
        own = {"token": self.token, "node": request["node"], "launcher": self.process.pid, "machine": this_machine()}
        self.note = json.dumps({**own, "host": socket.gethostname(), "started": time.time()})

    def listen(self) -> None:
        """Take commands until the connection ends, which is one too."""
        with contextlib.suppress(OSError, ValueError):
            for line in iter(sys.stdin.buffer.readline, b""):
                self.commands.put(json.loads(line))
        self.commands.put(None)

    def read(self, stream: IO[bytes] | None, name: str) -> None:
        """Pass on what the launcher prints, letters complete."""
        assert stream is not None
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while content := os.read(stream.fileno(), CHUNK):
            if text := decoder.decode(content):
                tell(**{name: text})

    def obey(self) -> None:
        """Carry out what was said."""
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
                    self.wish.unlink(missing_ok=True)

    def is_alone(self) -> bool:
        """Whether this machine is without its master."""
        now = time.monotonic()
        if now - self.heard < SILENT_SECONDS:
            return False
        self.wish.unlink(missing_ok=True)  # nobody brings anything
        if (store := self.request["store"]) is None:
            return True
        with contextlib.suppress(OSError), socket.create_connection(tuple(store), timeout=2):
            self.answered = time.monotonic()
        return bool(time.monotonic() - max(self.answered, self.heard) > self.request["silent_seconds"])

    def look(self) -> None:
        """Read what the run writes until it is over: in a separate thread, since a network disk may stall."""
        noted = wished = last = False
        while not last:
            last = self.over.is_set()
            with contextlib.suppress(OSError):
                if not last and not noted and self.run.is_dir():
                    pid_file(self.run, self.request["node"]).write_text(self.note, encoding="utf-8")
                    noted = True
                if wished != (wished := self.wish.exists()) and wished:
                    tell(fetch=True)
                for path in sorted((self.run / "logs").glob("rank*.log")) if self.request["stream"] else []:
                    for text in self.logs.setdefault(path, Log(path)).added():
                        tell(log=path.name, text=text)
            self.over.wait(LOOK_SECONDS)

    def supervise(self) -> None:
        """Wait for the end of the launcher, and make sure that it comes when it is without its master."""
        streams = (("out", self.process.stdout), ("err", self.process.stderr))
        threads = [threading.Thread(target=self.read, args=(stream, name), daemon=True) for name, stream in streams]
        threads += [threading.Thread(target=target, daemon=True) for target in (self.look, self.listen)]
        for thread in threads:
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
        for relay in threads[:2]:
            relay.join(timeout=5)
        self.over.set()
        threads[2].join(timeout=LOOK_SECONDS + 60)
        with contextlib.suppress(OSError):
            pid_file(self.run, self.request["node"]).unlink(missing_ok=True)
        tell(ended=self.process.returncode, left=left)


def launch(request: dict[str, Any]) -> None:
    """Run a launcher under this connection."""
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):  # the connection's end is seen on standard input
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the launcher would inherit
    running = Launch(request)
    tell(started=running.process.pid)
    running.supervise()


# ---- Requests

OPERATIONS: dict[str, Any] = {
    one.__name__: one for one in (clock, facts, software, reach, all_reduce, write, one_checkpoint, status, end)
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
        signal.alarm(int(seconds) + 60 if seconds else 0)  # nobody may end the input of a machine whose cable was pulled
        threading.Thread(target=answer, args=(do, request), daemon=True).start()
    os._exit(0)  # a thread may hang in a collective, or wait inside `sys.stdin`: Python would abort at its own end
