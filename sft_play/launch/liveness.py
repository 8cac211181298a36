"""Signs of life of workers: heartbeats, stacks that they write on request, and the kernel's counters of memory kills.

Heartbeats are datagrams to a socket of the launcher, which a full disk cannot suppress as it could a file. The socket's
name is derived from the launch's mark, which every worker inherits. When the launcher is gone, sending fails, which is
how a worker notices it. Linux only (abstract sockets); on other systems nothing is sent.
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

from sft_play.files import tail
from sft_play.runs.folder import RunFolder

MARK = "SFT_PLAY_LAUNCH"
"""Variable with a unique id for each launch: every descendant inherits it, whatever its session or parent."""
LARGEST_BYTES = 4096
SCALE = "SFT_PLAY_TIME_SCALE"
"""Variable by which tests shorten all `TimeLimits`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeLimits:
    """Time limits in seconds."""

    tick: float = 1.0
    """Interval between heartbeats of a worker."""
    look: float = 0.5
    """Interval between looks of the launcher at its workers."""
    dead: float = 20.0
    """How long a worker may show no sign of life: no heartbeat, no processor time."""
    in_kernel: float = 120.0
    """The same for a worker that waits in the kernel for a disk or a device without I/O, since a disk may be slow."""
    grace: float = 15.0
    """How long the other ranks may take to leave after one has failed."""
    saving: float = 30.0
    """The same if one of them writes a checkpoint; torchrun allows no more (`PContext.close`)."""
    first_beat: float = 3600.0
    """How long a worker may take until its first heartbeat, which comes before torch is imported."""
    leave: float = 24.0
    """Time after a request to stop until remaining workers are killed, except those that write a checkpoint."""
    patience: float = 19.0
    """Time after a request to stop until a worker in which no step has ended leaves without a new checkpoint:
    schedulers kill after 30 s.
    """
    after_save: float = 4.0
    """How long a worker may take to leave after a save that ended after `patience`, and after its exit record."""
    kill: float = 10.0
    """How long killed processes may take to end, in each of three attempts."""
    free_memory: float = 60.0
    """How long the driver may take to free the memory of ended processes."""

    @classmethod
    def scaled(cls, factor: float) -> TimeLimits:
        """Return all limits times a factor."""
        return cls(**{name: seconds * factor for name, seconds in asdict(cls()).items()})


LIMITS = TimeLimits.scaled(float(os.environ.get(SCALE) or 1))
SLOW_STEPS = 1.5
"""A request to stop allows a step this many times the longest one so far, where that is more than `patience`."""


def stop_patience(longest_step: float) -> float:
    """Return the seconds after a request to stop in which a step may still end."""
    return max(LIMITS.patience, SLOW_STEPS * longest_step)


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """A worker's heartbeat with its state, sent every second."""

    rank: int
    host: str
    pid: int
    phase: str
    step: int | None
    micro_step: int | None
    quiet: float
    """Seconds since its training thread last made progress."""
    limit: float
    """Seconds that it may be quiet in this phase."""
    longest_step: float = 0.0
    """Seconds of its longest step so far."""
    collectives: int | None = None
    """Collective operations that it has begun; known only for a rank that has been quiet for nearly `limit`."""

    def at(self) -> tuple[int, int, int]:
        """Return the rank's position in comparable form: step, phase within it, micro-step."""
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
    """Return the name of a launch's socket; the leading zero byte makes it abstract, in no folder."""
    return f"\0sft-play-{mark}"


class Listener:
    """The launcher's end of the heartbeats."""

    def __init__(self, mark: str) -> None:
        self.latest: dict[int, Beat] = {}
        """Rank -> its last heartbeat."""
        self.heard: dict[int, float] = {}
        """Rank -> when its last heartbeat arrived (monotonic seconds)."""
        self._socket: socket.socket | None = None
        if sys.platform == "linux":
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
            self._socket.bind(address_of(mark))

    def receive(self) -> set[int]:
        """Read the heartbeats that have arrived; return their ranks."""
        sent: set[int] = set()
        while self._socket is not None:
            try:
                content = self._socket.recv(LARGEST_BYTES)
            except BlockingIOError:
                break
            with contextlib.suppress(ValueError, TypeError):  # from a worker with newer code than this launcher
                beat = Beat(**json.loads(content))
                sent.add(beat.rank)
                self.latest[beat.rank], self.heard[beat.rank] = beat, time.monotonic()
        return sent

    def quiet(self, rank: int) -> float:
        """Return the seconds for which a rank's training thread has made no progress."""
        return self.latest[rank].quiet + time.monotonic() - self.heard[rank]

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


class Sender:
    """A worker's end of the heartbeats."""

    def __init__(self, mark: str | None) -> None:
        self._socket: socket.socket | None = None
        self._address = address_of(mark) if mark else ""
        if mark and sys.platform == "linux":
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)

    @property
    def works(self) -> bool:
        """Whether a launcher listens, on a system that can detect when it is gone."""
        return self._socket is not None

    def send(self, beat: Beat) -> bool:
        """Send a heartbeat; return `False` if the launcher is gone, but not if it is only slow."""
        if self._socket is None:
            return True
        try:
            self._socket.sendto(json.dumps(asdict(beat)).encode(), self._address)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # a full buffer: the launcher may be suspended
            return True
        return True


STACKS_SIGNAL = signal.SIGURG
"""Handled by faulthandler in C, so that a rank whose Python code is blocked answers too. No scheduler sends it, and a
process that does not handle it ignores it.
"""
STACKS_SECONDS = 3.0


def keep_stacks(run: RunFolder, workers: Mapping[int, psutil.Process]) -> dict[int, str]:
    """Ask every worker for the stacks of its threads; return rank -> what it appends to `logs/stack-rank{N}.txt`."""
    before = {rank: _size(run, rank) for rank in workers}
    for worker in workers.values():
        with contextlib.suppress(psutil.Error):
            worker.send_signal(STACKS_SIGNAL)
    until = time.monotonic() + STACKS_SECONDS
    while time.monotonic() < until and any(_size(run, rank) == size for rank, size in before.items()):
        time.sleep(0.1)
    time.sleep(0.2)  # the last one may still be writing
    return {rank: tail(run.rank_stack(rank), since=size) for rank, size in before.items()}


def remove_empty(run: RunFolder, ranks: range) -> None:
    """Remove the stack files of ranks that were never asked."""
    for path in map(run.rank_stack, ranks):
        if path.is_file() and not path.stat().st_size:
            path.unlink(missing_ok=True)


def _size(run: RunFolder, rank: int) -> int:
    path = run.rank_stack(rank)
    return path.stat().st_size if path.is_file() else 0


# ---- Memory kills
#
# A process that the kernel kills cannot report it, and SIGKILL alone proves nothing: a person may have sent it.
# cgroup v2 counts such kills in `memory.events`, as `oom_kill N` (Linux, Documentation/admin-guide/cgroup-v2.rst).

COUNTED = re.compile(r"^oom_kill (\d+)$", re.M)


class MemoryKills:
    """Watches kill counters of the cgroups of this process, of followed processes, and of their parents."""

    def __init__(self) -> None:
        self.before: dict[Path, int] = {}
        """Counter file -> its count when it was first read."""
        self.follow(os.getpid())

    def follow(self, pid: int) -> None:
        """Add the cgroups of a process, which may have been moved since the last call."""
        for file in counters_of(pid):
            if file not in self.before and (count := read_counter(file)) is not None:
                self.before[file] = count

    def evidence(self) -> str | None:
        """Return the evidence that a process was killed for memory since then, in words, or `None`."""
        for file, count in self.before.items():
            now = read_counter(file)
            if now is not None and now > count:
                return f"`{file}` counts {now - count} kill{'s' if now - count > 1 else ''} for memory"
        return None


def read_counter(file: Path) -> int | None:
    """Return the number of kills in a cgroup's file; `None` without such a file or line."""
    try:
        match = COUNTED.search(file.read_text(encoding="ascii"))
    except OSError:
        return None
    return int(match[1]) if match else None


def counters_of(pid: int, proc: Path = Path("/proc"), top: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """Return the existing counter files of a process's cgroup and of its parents."""
    try:
        groups = (proc / str(pid) / "cgroup").read_text(encoding="utf-8")
    except OSError:  # the process has ended, or this is not Linux
        return []
    parts = Path(groups.rpartition("0::")[2].strip()).parts[1:] if "0::" in groups else ()
    # A container sees only the tree below its own cgroup.
    candidates = (top.joinpath(*parts[skipped:]) for skipped in range(len(parts)))
    inner = next((folder for folder in candidates if folder.is_dir()), top)
    folders = [folder for folder in (inner, *inner.parents) if folder.is_relative_to(top)]
    return [path for folder in folders if (path := folder / "memory.events").is_file()]
