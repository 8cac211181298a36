"""What a launcher sees of its workers: one that has gone, one that is frozen, all of them making no step, one that the kernel killed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from sft_play.launch.beats import LIMITS, Listener
from sft_play.launch.run_folder import exit_records
from sft_play.launch.verdict import Loss, hang, standing
from sft_play.runs.folder import RunFolder

LONGEST_LOOK = 1.0
"""Seconds that count at most between two looks: a launcher that was itself suspended must not blame its workers."""
WORKER_MODULES = frozenset({"sft_play.train", "sft_play.probe"})
AGENT_MODULE = "accelerate.commands.launch"
BUSY = frozenset({psutil.STATUS_RUNNING, psutil.STATUS_TRACING_STOP})
"""States in which a silent process is not dead: it computes, or a debugger holds it."""
FRESH_SECONDS = 5.0
"""A worker that has said for longer than this that it saves may be frozen."""


SILENT = (LIMITS.dead, "no beat and no processor time", "")
FROZEN = {
    psutil.STATUS_STOPPED: (LIMITS.dead, "stopped by a signal", ""),
    psutil.STATUS_DISK_SLEEP: (
        LIMITS.in_kernel,
        "waiting in the kernel, nothing read or written,",
        "a disk (NFS) or a GPU does not answer; `dmesg` may say which",
    ),
}
"""State -> seconds after which a process in it is frozen, how that is said, and a hint."""


Standings = Mapping[str, Mapping[str, Any]]
"""Rank -> what `standing` returns."""


@dataclass(kw_only=True, slots=True)
class Signs:
    """What a worker showed of life."""

    spent: tuple[float, ...] = ()
    """Processor time, and bytes that it has read and written."""
    silent_seconds: float = 0.0


@dataclass(kw_only=True, slots=True)
class Watch:
    """Sees which worker ends first without having done its work; torchrun tells only when all others have ended too."""

    agent: int
    run: RunFolder
    ranks: range
    kills: MemoryKills
    beats: Listener
    workers: dict[psutil.Process, int] = field(default_factory=dict)
    """Every worker that was ever seen, with its rank."""
    signs: dict[psutil.Process, Signs] = field(default_factory=dict)
    loss: Loss | None = None
    """What was seen first."""
    lost_at: float | None = None
    looked_at: float = field(default_factory=time.monotonic)
    share: Callable[[Standings | None], Standings | None] = lambda mine: mine
    """On several machines: takes where this machine's ranks stand, all quiet for too long (`None`: they are not), and returns where the ranks
    of all machines stand once that is so on each of them."""
    standing: Standings | None = None
    watched_seconds: float = 0.0
    """Since the start of this attempt; time in which the launcher itself was suspended does not count."""

    def look(self) -> None:
        """Takes note of new workers, and of the first that has gone with an error, without a record, or has stopped living."""
        heard, now = self.beats.receive(), time.monotonic()
        passed, self.looked_at = min(now - self.looked_at, LONGEST_LOOK), now
        self.watched_seconds += passed
        self._find_workers()
        for worker in self.workers:
            self.kills.follow(worker.pid)
        frozen = self._frozen(heard, passed)
        if self.loss is None:
            found = self._gone() or frozen or self._hanging()
            if found:
                self.loss, self.lost_at = found, now

    def is_over(self, *, stopping: bool) -> bool:
        """Whether everything is to be ended: at once for what the launcher saw itself, else when the others have had their time.

        `stopping`: the ranks were asked to save and leave. Then one that has left is no loss, and the others have all the time.
        """
        if self.loss is None or self.lost_at is None:
            return False
        saving = any(is_alive(worker) and self.saves(rank) for worker, rank in self.workers.items())
        grace = LIMITS.saving if saving else LIMITS.grace
        return bool(self.loss.text) or (not stopping and time.monotonic() - self.lost_at > grace)

    def saves(self, rank: int) -> bool:
        """Whether a rank said just now that it writes a checkpoint."""
        beat = self.beats.latest.get(rank)
        return beat is not None and beat.phase == "saving" and time.monotonic() - self.beats.heard[rank] < FRESH_SECONDS

    def agent_was_killed(self, number: int) -> None:
        """Takes note that the workers' parent was killed; they leave with it, so no rank is to blame."""
        name = signal.Signals(number).name
        text = f"the process that had started the workers (`accelerate launch`) was killed by {name}; all ranks were stopped"
        self.loss = Loss(cause="agent", rank=None, text=text)

    def _find_workers(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.agent).children():
                with contextlib.suppress(psutil.Error):
                    if child not in self.workers and is_worker(child.cmdline()):
                        rank = child.environ().get("RANK") or (str(self.ranks.start) if len(self.ranks) == 1 else "")
                        if rank.isdigit() and int(rank) in self.ranks:  # else it is looked at again
                            self.workers[child] = int(rank)

    def _gone(self) -> Loss | None:
        gone = [rank for worker, rank in self.workers.items() if not is_alive(worker)]
        records = {rank: exit_records(self.run, range(rank, rank + 1)).get(rank) for rank in gone}
        # Of several that went at once, one without a record went first: the others could still say that their peer had gone.
        for rank, record in sorted(records.items(), key=lambda item: item[1] is not None):
            if record is None or record["code"] != 0:
                return Loss(cause="failed" if record else "killed", rank=rank)
        return None

    def _frozen(self, heard: set[int], passed: float) -> Loss | None:
        """The workers' parent, which keeps their store and would never say that they have ended, or a worker without any sign of life.

        A thread that holds Python's lock in a long call silences the beats, but uses the processor, or reads and writes; a process that was
        stopped does neither, nor one whose disk or device does not answer.
        """
        with contextlib.suppress(psutil.Error):
            if found := self._stuck(psutil.Process(self.agent), passed):
                text = f"the process that had started the workers (`accelerate launch`) is frozen: {found[0]}"
                return Loss(cause="agent", rank=None, text=text, hint=found[1])
        for worker, rank in self.workers.items():
            beating = rank in self.beats.heard or self.watched_seconds > LIMITS.first_beat
            with contextlib.suppress(psutil.Error):
                found = self._stuck(worker, passed, heard=rank in heard, silent=beating)
                if found and not self.run.rank_exit(rank).exists():
                    where = f" {self.beats.latest[rank].where()}" if rank in self.beats.latest else ""
                    text = f"rank {rank} ({socket.gethostname()}) is frozen{where}: {found[0]}"
                    return Loss(cause="frozen", rank=rank, text=text, hint=found[1])
        return None

    def _stuck(
        self, process: psutil.Process, passed: float, *, heard: bool = False, silent: bool = False
    ) -> tuple[str, str] | None:
        """Returns how a process is frozen, and a hint. `silent`: one that sends beats, so that no beat (`heard`) is a sign too."""
        signs, state = self.signs.setdefault(process, Signs()), process.status()
        spent = (*process.cpu_times()[:2], *(process.io_counters() if state == psutil.STATUS_DISK_SLEEP else ()))
        if heard or state in BUSY or spent != signs.spent or (state not in FROZEN and not silent):
            signs.spent, signs.silent_seconds = spent, 0.0
            return None
        signs.silent_seconds += passed
        seconds, how, hint = FROZEN.get(state, SILENT)
        return (f"{how} for {seconds:.0f} s; all ranks were stopped", hint) if signs.silent_seconds > seconds else None

    def _hanging(self) -> Loss | None:
        """All ranks quiet beyond what their phase allows: those that wait for one that saves or evaluates have its patience."""
        beats = self.beats.latest
        if not set(self.ranks) <= beats.keys() or not all(self.beats.quiet(rank) > beat.limit for rank, beat in beats.items()):
            self.standing = None
        elif self.standing is None:
            alive = {rank: worker for worker, rank in self.workers.items() if is_alive(worker)}
            in_kernel = {rank for rank, worker in alive.items() if _in_kernel(worker)}
            stacks = keep_stacks(self.run, alive)
            self.standing = {
                str(rank): standing(beat, self.beats.quiet(rank), stacks.get(rank, ""), in_kernel=rank in in_kernel)
                for rank, beat in beats.items()
            }
        everyone = self.share(self.standing)
        return hang({int(rank): facts for rank, facts in everyone.items()}, self.run) if everyone else None


def _in_kernel(worker: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(worker.status() == psutil.STATUS_DISK_SLEEP)
    return False


def is_worker(arguments: Sequence[str]) -> bool:
    """Whether a command line is a worker's: one that was forked and has not begun its program yet still bears its parent's."""
    modules = {after for before, after in pairwise(arguments) if before == "-m"}
    return AGENT_MODULE not in modules and not WORKER_MODULES.isdisjoint(modules)


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


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
        return f"the GPU's driver said: `{found[0].strip()}`" if found else None

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
