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
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import IO, Any

from sft_play.cluster.probe import START, all_reduce, clock, facts, reach, run_module, runs_folder, starts, status

CHUNK = 65536
SAVING_SECONDS = 5.0
"""A checkpoint's folder in which nothing has changed for so long is not being written."""
SILENT_SECONDS = 15.0
"""How long the machine that started us may be silent; it sends a line every two seconds."""
GONE_SECONDS = 29.0
"""How long a launcher may take to save and leave once it is without its master; a save that takes longer continues while it grows."""
TICK_SECONDS, LOOK_SECONDS = 0.2, 1.0
_answers: IO[str] = sys.stdout
_lock = threading.Lock()


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
        if number.isdigit() and int(number) > step:
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

    It gets SIGTERM (save and leave) when a stop is requested, and when it is without its master: standard input has ended, or nobody was heard for
    `SILENT_SECONDS`, and the run's store at `store` (address and port; `None` on the master itself) does not answer either. What it leaves behind
    is found by a variable that all its descendants inherit, and killed.
    """

    def __init__(self, run: str, node: int, words: list[str], store: Any, silent_seconds: float, stream: bool) -> None:
        """`words` are for Python; `stream`: logs are sent."""
        self.run, self.store, self.silent_seconds, self.stream = runs_folder() / run, store, silent_seconds, stream
        self.start = json.dumps({"run": str(self.run), "node": node, "started": time.time(), "id": uuid.uuid4().hex})
        self.sent = {path: path.stat().st_size for path in (self.run / "logs").glob("rank*.log")}
        self.wish = self.run / f".fetch-node{node}"
        """By this file the launcher asks for the run's newest checkpoint, and waits until it is gone (`launch.preparation`)."""
        self.heard = self.answered = time.monotonic()
        self.over = threading.Event()
        libc, parent = ctypes.CDLL(None), os.getpid()

        def bound() -> None:
            libc.prctl(1, int(signal.SIGTERM), 0, 0, 0)  # PR_SET_PDEATHSIG
            if os.getppid() != parent:
                os._exit(143)

        self.process = subprocess.Popen(
            [sys.executable, *words], env={**os.environ, START: self.start}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=bound,  # noqa: PLW1509 - no thread has been started yet
        )  # fmt: skip

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
