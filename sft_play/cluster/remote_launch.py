"""The launcher of a run on one machine of a cluster: started, told of, and ended with the connection. See `remote`.

It is a child with a session of its own. It gets SIGTERM (save and leave) when it is told to stop, when standard input ends, when nobody has
been heard for `SILENT_SECONDS`, and by the kernel when this process is killed. Whatever it leaves behind is found by a variable that all its
descendants inherit, and killed.
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
from pathlib import Path
from typing import IO, Any

from sft_play.cluster.remote import facts, one_checkpoint, runs_folder, tell, write
from sft_play.cluster.remote_processes import CHUNK, TOKEN, end, kill_all, machine, pid_file, saves, send, status, tail

SILENT_SECONDS = 15.0
"""How long the machine that started us may be silent; it sends a line every two seconds."""
GONE_SECONDS = 29.0
"""How long a launcher may take to save and leave once nobody listens any more; a save that takes longer goes on while it grows."""
DISK_SECONDS = 60.0
"""How long the last of the logs may take to be read once the launcher has ended."""
TICK_SECONDS, BEAT_SECONDS = 0.2, 1.0


class Launch:
    """One launcher, from its start to the last of its processes."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.run = runs_folder() / request["run"]
        self.node = int(request["node"])
        self.token = str(request["token"])
        self.commands: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.begun = time.time()
        self.sizes = {path: path.stat().st_size for path in (self.run / "logs").glob("rank*.log")}
        """How much of each rank's log has been sent, or was there before."""
        self.decoders: dict[Path, codecs.IncrementalDecoder] = {}
        self.records: set[str] = set()
        self.heard = time.monotonic()
        self.asked_at: float | None = None
        self.has_pid_file = False
        self.shown = "starting"
        """The state as the disk last said."""
        self.told = 0.0
        self.over = threading.Event()
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """Starts the launcher before any thread exists: the kernel binds it to the thread that made it."""
        libc, parent = ctypes.CDLL(None), os.getpid()

        def bound() -> None:
            libc.prctl(1, int(signal.SIGTERM), 0, 0, 0)  # PR_SET_PDEATHSIG
            if os.getppid() != parent:
                os._exit(143)

        variables = {**os.environ, TOKEN: self.token}
        return subprocess.Popen(
            self.request["argv"], env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True, preexec_fn=bound,  # noqa: PLW1509 - no thread has been started yet
        )  # fmt: skip

    def relay(self) -> list[threading.Thread]:
        """Starts the threads that read: commands, and what the launcher prints."""
        assert self.process.stdout is not None and self.process.stderr is not None
        threads = [
            threading.Thread(target=self.read, args=(stream, name), daemon=True)
            for stream, name in ((self.process.stdout, "out"), (self.process.stderr, "err"))
        ]
        for thread in (*threads, threading.Thread(target=self.listen, daemon=True)):
            thread.start()
        return threads

    def listen(self) -> None:
        """Takes commands until the connection ends, which is one too."""
        with contextlib.suppress(OSError, ValueError):
            for line in iter(sys.stdin.buffer.readline, b""):
                self.commands.put(json.loads(line))
        self.commands.put(None)

    def read(self, stream: IO[bytes], name: str) -> None:
        """Passes on what the launcher prints, letters whole."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while content := os.read(stream.fileno(), CHUNK):
            if text := decoder.decode(content):
                tell(**{name: text})

    def obey(self) -> bool:
        """Takes up what was said; returns whether somebody still listens."""
        with contextlib.suppress(queue.Empty):
            while True:
                command = self.commands.get_nowait()
                if command is None:
                    return False
                self.heard = time.monotonic()
                if "signal" in command:
                    self.ask(int(command["signal"]))
                elif command.get("kill"):
                    send([self.process.pid], signal.SIGKILL)
                    kill_all(self.token)
        return time.monotonic() - self.heard < SILENT_SECONDS

    def ask(self, number: int) -> None:
        """Asks the launcher to save and leave."""
        self.asked_at = self.asked_at or time.monotonic()
        send([self.process.pid], number)

    def keep_pid_file(self) -> None:
        """Writes it as soon as the run has a folder here."""
        path = pid_file(self.run, self.node)
        if not self.has_pid_file and self.run.is_dir():
            own = {"token": self.token, "node": self.node, "agent": os.getpid(), "launcher": self.process.pid}
            text = json.dumps(own | {"machine": machine(), "host": socket.gethostname(), "started": self.begun})
            with contextlib.suppress(OSError):
                path.write_text(text, encoding="utf-8")
                self.has_pid_file = True

    def send_logs(self) -> None:
        """Sends what has been added to the logs of the ranks, and the records of those that have ended."""
        for path in sorted((self.run / "logs").glob("rank*.log")) if self.request["stream"] else []:
            with contextlib.suppress(OSError), path.open("rb") as stream:
                sent = self.sizes.get(path, 0)
                size = os.fstat(stream.fileno()).st_size
                if sent > size:
                    self.decoders.pop(path, None)
                decoder = self.decoders.setdefault(path, codecs.getincrementaldecoder("utf-8")("replace"))
                stream.seek(sent if sent <= size else 0)
                while content := stream.read(CHUNK):
                    if text := decoder.decode(content):  # a letter whose bytes are not all there yet comes with the next piece
                        tell(log=path.name, text=text)
                self.sizes[path] = stream.tell()
        for path in sorted((self.run / "logs").glob("exit-rank*.json")):
            with contextlib.suppress(OSError, ValueError):
                if path.name not in self.records and path.stat().st_mtime >= self.begun - 1:
                    text = path.read_text(encoding="utf-8")
                    tell(record=path.name, facts=json.loads(text))
                    self.records.add(path.name)

    def state(self) -> str:
        """`starting` until this machine's workers have been started, then `running`; once it was told to stop, `stopping` or `saving`."""
        if self.asked_at is not None:
            return "saving" if saves(self.run) else "stopping"
        return "running" if self.event("started", "resumed") else "starting"

    def event(self, *names: str) -> dict[str, Any] | None:
        """The last event of these names that this node recorded since it was started."""
        found = None
        with contextlib.suppress(OSError):
            for line in (self.run / "events.jsonl").read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError):
                    one = json.loads(line)
                    mine = isinstance(one, dict) and one.get("node", 0) == self.node and one.get("time", 0) >= self.begun
                    found = one if mine and one.get("event") in names else found
        return found

    def look(self) -> None:
        """Reads what the run writes until it is over: in a thread of its own, since a network disk may stall for longer than we may be silent."""
        while True:
            last = self.over.is_set()
            with contextlib.suppress(OSError):
                if not last:
                    self.keep_pid_file()
                self.send_logs()
                self.shown = self.state()
            if last:
                return
            self.over.wait(TICK_SECONDS)

    def beat(self) -> None:
        """Says every second that this machine lives, and how far it is."""
        if time.monotonic() - self.told > BEAT_SECONDS:
            self.told = time.monotonic()
            tell(beat=self.shown)

    def supervise(self) -> int:
        """Waits for the end of the launcher, and sees to it that it comes when nobody listens."""
        readers, gone_at = self.relay(), None
        disk = threading.Thread(target=self.look, daemon=True)
        disk.start()
        while self.process.poll() is None:
            if not self.obey() and gone_at is None:
                gone_at = time.monotonic()
                self.ask(signal.SIGTERM)
            if gone_at is not None and time.monotonic() - gone_at > GONE_SECONDS and self.shown != "saving":
                send([self.process.pid], signal.SIGKILL)
                kill_all(self.token)
            self.beat()
            time.sleep(TICK_SECONDS)
        left = kill_all(self.token)
        for reader in readers:
            reader.join(timeout=5)
        self.over.set()
        until = time.monotonic() + DISK_SECONDS
        while disk.is_alive() and time.monotonic() < until:
            self.beat()
            disk.join(TICK_SECONDS)
        pid_file(self.run, self.node).unlink(missing_ok=True)
        tell(ended=self.process.returncode, event=self.event("finished", "failed", "stopped"), left=left)
        return 0


def launch(request: dict[str, Any]) -> int:
    """Runs a launcher under this connection."""
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):  # the connection's end is seen on standard input
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the launcher would inherit
    try:
        running = Launch(request)
    except OSError as error:
        tell(problem=f"{request['argv'][0]}: {error.strerror or error}")
        return 1
    os._exit(running.supervise())  # a thread waits inside `sys.stdin`: Python would abort at its own end, and leave a core file


OPERATIONS = {
    "facts": facts, "write": write, "one_checkpoint": one_checkpoint, "tail": tail, "status": status, "end": end,
    "launch": launch,
}  # fmt: skip


def main() -> int:
    """Answers the request on standard input."""
    request = json.loads(sys.stdin.buffer.readline())
    folder = Path(request["folder"]).expanduser()
    os.environ.update(request.get("variables", {}))  # where runs and cache are
    if folder.is_dir():
        os.chdir(folder)
    try:
        return int(OPERATIONS[request["do"]](request))
    except OSError as error:
        tell(problem=f"{error.filename or folder}: {error.strerror or error}")
        return 1
