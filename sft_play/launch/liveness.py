"""Signs of life of workers: the beats they send, the stacks they write when asked, and what the kernel says of them.

Beats are datagrams to a socket of the launcher. No file, so no full disk can silence them. The name of the socket is made from the launch's mark,
which every worker inherits. When the launcher is gone, sending fails, and that is how a worker learns it. Linux only (abstract sockets); elsewhere
nothing is sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from sft_play.runs.folder import RunFolder

MARK = "SFT_PLAY_LAUNCH"
"""Variable with an id of its own for each launch: every descendant inherits it, whatever session or parent it gets."""
LARGEST_BYTES = 4096
SCALE = "SFT_PLAY_TIME_SCALE"
"""Variable by which tests shorten all `TimeLimits`."""
CREDENTIALS = struct.Struct("3i")
"""pid, uid, gid of the sender, as the kernel vouches for them."""


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
    """The same for one that waits in the kernel for a disk or a device, without a byte read or written: a slow disk is no loss."""
    grace: float = 15.0
    """How long the other ranks may take to leave once one has failed."""
    saving: float = 30.0
    """The same where one of them writes a checkpoint; torchrun gives no more (`PContext.close`)."""
    first_beat: float = 3600.0
    """How long a worker may take to its first beat; it comes before torch is imported."""
    leave: float = 24.0
    """After a request to stop, until workers that have not left are killed; but for those that write a checkpoint."""
    patience: float = 19.0
    """After a request to stop, until a worker in which no step has ended leaves without a new checkpoint: schedulers kill after 30 s."""
    after_save: float = 4.0
    """How long a worker may take to leave after a save that ended later than that, and after its last word."""
    kill: float = 10.0
    """How long killed processes may take to go, each of three times."""
    free_memory: float = 60.0
    """How long the driver may take to free the memory of processes that have ended."""

    @classmethod
    def scaled(cls, factor: float) -> TimeLimits:
        """Returns all limits times a factor."""
        return cls(**{name: seconds * factor for name, seconds in asdict(cls()).items()})


LIMITS = TimeLimits.scaled(float(os.environ.get(SCALE) or 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """What a worker says of itself every second."""

    rank: int
    number: int
    """Counts up; a value that stays is silence."""
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
        """Raises `ValueError` or `TypeError` for anything else."""
        return cls(**json.loads(content))

    def at(self) -> tuple[int, int, int]:
        """Returns how far the rank is, to compare: step, phase within it, micro-step."""
        order = {"loading": -1, "training": 0, "updating": 1, "saving": 2, "evaluating": 2, "leaving": 3}
        return (self.step or 0, order.get(self.phase, 0), self.micro_step or 0)

    def where(self) -> str:
        """Returns where the rank stands, in words."""
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
    """Returns the name of a launch's socket (a leading zero byte: it stands in no folder)."""
    return f"\0sft-play-{mark}"


def may_beat() -> bool:
    """Whether this system has what is needed."""
    return sys.platform == "linux"


class Listener:
    """The launcher's end. Takes beats only from processes of the same user."""

    def __init__(self, mark: str) -> None:
        self.latest: dict[int, Beat] = {}
        """Rank -> its last beat."""
        self.heard: dict[int, float] = {}
        """Rank -> when that came (monotonic seconds)."""
        self._socket = self._open(mark) if may_beat() else None

    @staticmethod
    def _open(mark: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        listener.setblocking(False)
        listener.bind(address_of(mark))
        return listener

    def receive(self) -> set[int]:
        """Takes up what has come; returns the ranks that sent something themselves."""
        sent: set[int] = set()
        while self._socket is not None:
            try:
                content, extra, _, _ = self._socket.recvmsg(LARGEST_BYTES, socket.CMSG_SPACE(CREDENTIALS.size))
            except BlockingIOError:
                break
            if any(CREDENTIALS.unpack(data)[1] != os.getuid() for _, kind, data in extra if kind == socket.SCM_CREDENTIALS):
                continue
            with contextlib.suppress(ValueError, TypeError):
                beat = Beat.from_bytes(content)
                sent.add(beat.rank)
                before = self.latest.get(beat.rank)
                if before is None or (before.pid, before.number) != (beat.pid, beat.number):
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
        if mark and may_beat():
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)

    @property
    def works(self) -> bool:
        """Whether there is a launcher that listens, on a system that can tell when it is gone."""
        return self._socket is not None

    def send(self, beat: Beat) -> bool:
        """Sends a beat; returns `False` when nobody will ever listen again. A launcher that is only slow is no reason to leave."""
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
    """Asks every worker for the stacks of all its threads; returns rank -> what it wrote to `logs/stack-rank{N}.txt` now."""
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
    """Removes the files of ranks that were never asked."""
    for rank in ranks:
        with contextlib.suppress(OSError):
            if _size(run, rank) == 0:
                run.rank_stack(rank).unlink()


def _size(run: RunFolder, rank: int) -> int:
    try:
        return run.rank_stack(rank).stat().st_size
    except OSError:
        return 0


def _from(run: RunFolder, rank: int, start: int) -> str:
    try:
        return run.rank_stack(rank).read_bytes()[start:].decode(errors="replace")
    except OSError:
        return ""


# ---- What the kernel says
#
# A process that the kernel kills can say nothing. SIGKILL alone proves nothing either: a person may have sent it. cgroup v2 counts such kills in
# `memory.events`, v1 in `memory.oom_control`, both as `oom_kill N` (Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst).
# The kernel log names the process, and holds what NVIDIA's driver says.

COUNTED = re.compile(r"^oom_kill (\d+)$", re.M)
KERNEL_LOG = Path("/dev/kmsg")
XID = re.compile(r"NVRM: Xid .*")


@dataclass(kw_only=True, slots=True)
class MemoryKills:
    """Counters of this process's cgroups and their parents, and of those of every process that is followed, from now on."""

    before: dict[Path, int] = field(default_factory=dict)
    """Counter file -> kills when it was first looked at."""
    pids: set[int] = field(default_factory=set)
    log: int | None = None
    """Descriptor of the kernel log, at its end when this began; `None` where it may not be read."""
    said: str = ""
    """What the kernel log has said since."""

    @staticmethod
    def begin() -> MemoryKills:
        """Takes note of the counters as they are now."""
        kills = MemoryKills()
        with contextlib.suppress(OSError):
            kills.log = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(kills.log, 0, os.SEEK_END)
        kills.follow(os.getpid(), ours=False)
        return kills

    def follow(self, pid: int, *, ours: bool = True) -> None:
        """Takes note of the cgroups of a process, which may have been moved; its own name in the kernel log counts from now on."""
        if ours:
            self.pids.add(pid)
        for file in counters_of(pid):
            if file not in self.before and (count := read_counter(file)) is not None:
                self.before[file] = count

    def evidence(self) -> str | None:
        """Returns in words what shows that a process was killed for memory since, `None` when nothing does."""
        for file, count in self.before.items():
            now = read_counter(file)
            if now is not None and now > count:
                return f"`{file}` counts {now - count} kill{'s' if now - count > 1 else ''} for memory"
        self._read_kernel_log()
        for pid in map(int, re.findall(r"[Oo]ut of memory: Killed process (\d+)", self.said)):  # ids of the first pid namespace
            if pid in self.pids:
                return f"the kernel log says that process {pid} was killed for memory"
        return None

    def driver_errors(self) -> str | None:
        """Returns what NVIDIA's driver said of a GPU since (its Xid errors: one off the bus, one whose kernel never ends)."""
        self._read_kernel_log()
        found = XID.findall(self.said)
        return f"the GPU driver reported: `{found[0].strip()}`" if found else None

    def close(self) -> None:
        """Closes the kernel log."""
        if self.log is not None:
            os.close(self.log)
            self.log = None

    def _read_kernel_log(self) -> None:
        while self.log is not None:
            try:
                record = os.read(self.log, 8192).decode("utf-8", errors="replace")
            except BrokenPipeError:  # records were overwritten before they were read; the next read goes on with the oldest
                continue
            except OSError:  # no more records
                break
            if not record:
                break
            self.said += record


def read_counter(file: Path) -> int | None:
    """Returns the kills that a cgroup's file counts; `None` where there is no such file or line."""
    try:
        match = COUNTED.search(file.read_text(encoding="ascii"))
    except OSError:
        return None
    return int(match[1]) if match else None


def counters_of(pid: int, proc: Path = Path("/proc"), mounted: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """Returns the counter files of a process's memory cgroup and of all its parents, v2 and v1, those that exist."""
    try:
        groups = (proc / str(pid) / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # it has gone, or this is no Linux
        return []
    found: list[Path] = []
    for controllers, path in (line.split(":", 2)[1:] for line in groups):
        if controllers and "memory" not in controllers.split(","):
            continue
        top, name = (mounted / "memory", "memory.oom_control") if controllers else (mounted, "memory.events")
        parts = Path(path).parts[1:]
        seen = (top.joinpath(*parts[skipped:]) for skipped in range(len(parts)))  # a container sees the tree below its own cgroup
        inner = next((folder for folder in seen if folder.is_dir()), top)
        found += [folder / name for folder in (inner, *inner.parents) if folder.is_relative_to(top) and (folder / name).is_file()]
    return found
