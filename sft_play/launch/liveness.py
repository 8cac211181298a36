"""Signs of life of workers: the beats they send, the stacks they write when asked, and what the kernel says of them.

Beats are datagrams to a socket of the launcher. No file, so no full disk can silence them. The name of the socket is
made from the launch's mark, which every worker inherits. When the launcher is gone, sending fails, and that is how a
worker learns it. Linux only (abstract sockets); elsewhere nothing is sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from sft_play.runs.folder import RunFolder

MARK = "SFT_PLAY_LAUNCH"
"""Variable with an id of its own for each launch: every descendant inherits it, whatever session or parent it gets."""
LARGEST_BYTES = 4096
SCALE = "SFT_PLAY_TIME_SCALE"
"""Variable by which tests shorten all `TimeLimits`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeLimits:
    """Seconds."""

    tick: float = 1.0
    """Between two beats of a worker."""
    look: float = 0.5
    """Between two looks of the launcher at its workers."""
    dead: float = 20.0
    """How long a worker may show no sign of life: no beat, no processor time."""
    in_kernel: float = 120.0
    """The same for one that waits in the kernel for a disk or a device, without a byte read or written: a slow disk is
    no loss.
    """
    grace: float = 15.0
    """How long the other ranks may take to leave once one has failed."""
    saving: float = 30.0
    """The same where one of them writes a checkpoint; torchrun gives no more (`PContext.close`)."""
    first_beat: float = 3600.0
    """How long a worker may take to its first beat; it comes before torch is imported."""
    leave: float = 24.0
    """After a request to stop, until workers that have not left are killed; but for those that write a checkpoint."""
    patience: float = 19.0
    """After a request to stop, until a worker in which no step has ended leaves without a new checkpoint: schedulers
    kill after 30 s.
    """
    after_save: float = 4.0
    """How long a worker may take to leave after a save that ended later than that, and after its last word."""
    kill: float = 10.0
    """How long killed processes may take to go, each of three times."""
    free_memory: float = 60.0
    """How long the driver may take to free the memory of processes that have ended."""

    @classmethod
    def scaled(cls, factor: float) -> TimeLimits:
        """Return all limits times a factor."""
        return cls(**{name: seconds * factor for name, seconds in asdict(cls()).items()})


LIMITS = TimeLimits.scaled(float(os.environ.get(SCALE) or 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """What a worker says of itself every second."""

    rank: int
    host: str
    pid: int
    phase: str
    step: int | None
    micro_step: int | None
    quiet: float
    """Seconds since its training thread was last seen to get on."""
    limit: float
    """Seconds that it may be quiet in this phase."""
    collectives: int | None = None
    """Collective operations that it has begun; known of a rank that has been quiet for nearly as long as it may be."""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Beat:
        return cls(**json.loads(content))

    def at(self) -> tuple[int, int, int]:
        """Return how far the rank is, to compare: step, phase within it, micro-step."""
        order = {"loading": -1, "training": 0, "updating": 1, "saving": 2, "evaluating": 2, "leaving": 3}
        return (self.step or 0, order.get(self.phase, 0), self.micro_step or 0)

    def where(self) -> str:
        """Return where the rank stands, in words."""
        words = {
            "loading": "loading",
            "training": f"in step {self.step}",
            "updating": f"in the update of step {self.step} or waiting for the rows of the next",
            "saving": f"saving after step {self.step}",
            "evaluating": f"evaluating after step {self.step}",
            "leaving": "leaving",
        }.get(self.phase, self.phase)
        return words + (f", micro-batch {self.micro_step}" if self.micro_step is not None else "")


def address_of(mark: str) -> str:
    """Return the name of a launch's socket (a leading zero byte: it stands in no folder)."""
    return f"\0sft-play-{mark}"


class Listener:
    """The launcher's end."""

    def __init__(self, mark: str) -> None:
        self.latest: dict[int, Beat] = {}
        """Rank -> its last beat."""
        self.heard: dict[int, float] = {}
        """Rank -> when that came (monotonic seconds)."""
        self._socket: socket.socket | None = None
        if sys.platform == "linux":
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
            self._socket.bind(address_of(mark))

    def receive(self) -> set[int]:
        """Take up what has come; return the ranks that sent something."""
        sent: set[int] = set()
        while self._socket is not None:
            try:
                content = self._socket.recv(LARGEST_BYTES)
            except BlockingIOError:
                break
            with contextlib.suppress(ValueError, TypeError):  # of a worker whose code is newer than this launcher's
                beat = Beat.from_bytes(content)
                sent.add(beat.rank)
                self.latest[beat.rank], self.heard[beat.rank] = beat, time.monotonic()
        return sent

    def quiet(self, rank: int) -> float:
        """Seconds for which the training thread of a rank is known to have made no progress."""
        return self.latest[rank].quiet + time.monotonic() - self.heard[rank]

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


class Sender:
    """A worker's end."""

    def __init__(self, mark: str | None) -> None:
        self._socket: socket.socket | None = None
        self._address = address_of(mark) if mark else ""
        if mark and sys.platform == "linux":
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)

    @property
    def works(self) -> bool:
        """Whether there is a launcher that listens, on a system that can tell when it is gone."""
        return self._socket is not None

    def send(self, beat: Beat) -> bool:
        """Send a beat; return `False` when nobody will ever listen again. A launcher that is only slow is no reason to
        leave.
        """
        if self._socket is None:
            return True
        try:
            self._socket.sendto(beat.to_bytes(), self._address)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # a full buffer: the launcher may be suspended
            return True
        return True


STACKS_SIGNAL = signal.SIGUSR2
"""Answered by faulthandler in C, so that a rank whose Python stands still answers too."""
STACKS_SECONDS = 3.0


def keep_stacks(run: RunFolder, workers: Mapping[int, psutil.Process]) -> dict[int, str]:
    """Ask every worker for the stacks of all its threads; return rank -> what it wrote to `logs/stack-rank{N}.txt`
    now.
    """
    before = {rank: _size(run, rank) for rank in workers}
    for worker in workers.values():
        with contextlib.suppress(psutil.Error):
            worker.send_signal(STACKS_SIGNAL)
    until = time.monotonic() + STACKS_SECONDS
    while time.monotonic() < until and any(_size(run, rank) == size for rank, size in before.items()):
        time.sleep(0.1)
    time.sleep(0.2)  # the last one may still be writing
    return {rank: _from(run, rank, size) for rank, size in before.items()}


def remove_empty(run: RunFolder, ranks: range) -> None:
    """Remove the files of ranks that were never asked."""
    for path in map(run.rank_stack, ranks):
        if path.is_file() and not path.stat().st_size:
            path.unlink(missing_ok=True)


def _size(run: RunFolder, rank: int) -> int:
    path = run.rank_stack(rank)
    return path.stat().st_size if path.is_file() else 0


def _from(run: RunFolder, rank: int, start: int) -> str:
    path = run.rank_stack(rank)
    return path.read_bytes()[start:].decode(errors="replace") if path.is_file() else ""


# ---- What the kernel says
#
# A process that the kernel kills can say nothing. SIGKILL alone proves nothing either: a person may have sent it.
# cgroup v2 counts such kills in `memory.events`, as `oom_kill N` (Linux, Documentation/admin-guide/cgroup-v2.rst).

COUNTED = re.compile(r"^oom_kill (\d+)$", re.M)


class MemoryKills:
    """Counters of the cgroups of this process and of every process that is followed, and of their parents, from now
    on.
    """

    def __init__(self) -> None:
        self.before: dict[Path, int] = {}
        """Counter file -> kills when it was first looked at."""
        self.follow(os.getpid())

    def follow(self, pid: int) -> None:
        """Take note of the cgroups of a process, which may have been moved."""
        for file in counters_of(pid):
            if file not in self.before and (count := read_counter(file)) is not None:
                self.before[file] = count

    def evidence(self) -> str | None:
        """Return in words what shows that a process was killed for memory since, `None` when nothing does."""
        for file, count in self.before.items():
            now = read_counter(file)
            if now is not None and now > count:
                return f"`{file}` counts {now - count} kill{'s' if now - count > 1 else ''} for memory"
        return None


def read_counter(file: Path) -> int | None:
    """Return the kills that a cgroup's file counts; `None` where there is no such file or line."""
    try:
        match = COUNTED.search(file.read_text(encoding="ascii"))
    except OSError:
        return None
    return int(match[1]) if match else None


def counters_of(pid: int, proc: Path = Path("/proc"), top: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """Return the counter files of a process's cgroup and of all its parents, those that exist."""
    try:
        groups = (proc / str(pid) / "cgroup").read_text(encoding="utf-8")
    except OSError:  # it has gone, or this is no Linux
        return []
    parts = Path(groups.rpartition("0::")[2].strip()).parts[1:] if "0::" in groups else ()
    seen = (top.joinpath(*parts[skipped:]) for skipped in range(len(parts)))  # a container sees the tree below its own
    inner = next((folder for folder in seen if folder.is_dir()), top)
    folders = [folder for folder in (inner, *inner.parents) if folder.is_relative_to(top)]
    return [path for folder in folders if (path := folder / "memory.events").is_file()]
