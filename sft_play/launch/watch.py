"""What a launcher sees of its workers: one that has gone, one that is frozen, all of them making no step, and the stacks of those."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import psutil

from sft_play.launch.beats import LIMITS, Beat, Listener
from sft_play.launch.run_folder import exit_records
from sft_play.launch.verdict import Loss, MemoryKills
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
FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line \d+ in (?P<function>\S+)', re.MULTILINE)
MAIN = re.compile(r"sft_play/(train|probe)\.py$")
COLLECTIVE = re.compile(r"/torch/distributed/|/accelerate/utils/operations\.py$|/deepspeed/comm/")


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


def main_frames(stacks: str) -> list[tuple[str, str]]:
    """Returns (file, function) of the training thread, innermost first; empty where it is not found."""
    for thread in re.split(r"\n(?=Thread |Current thread )", stacks):
        frames = [(found["file"], found["function"]) for found in FRAME.finditer(thread)]
        if any(MAIN.search(file) for file, _ in frames):
            return frames
    return []


def standing(beat: Beat, quiet: float, stacks: str, *, in_kernel: bool = False) -> dict[str, Any]:
    """Returns where a rank stands that makes no progress: how far it is (`at`), whether it `waits` for other ranks (`None` if unknown), and words.

    `quiet` is seconds, `stacks` what it wrote of its threads.
    """
    frames = main_frames(stacks)
    inner = f", at {frames[0][1]} ({'/'.join(frames[0][0].split('/')[-2:])})" if frames else ""
    begun = f", {beat.collectives} collective operations begun" if beat.collectives is not None else ""
    stuck = " in the kernel (a disk or a GPU that does not answer)" if in_kernel else ""
    return {
        "host": beat.host,
        "quiet": quiet,
        "at": list(beat.at()),
        "collectives": beat.collectives,
        "waits": any(COLLECTIVE.search(file) for file, _ in frames) if frames else None,
        "where": beat.where(),
        "stuck": f"{stuck}{begun}{inner}",
    }


def culprits(found: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Returns the ranks that keep the others waiting: those that are behind, else those that have begun fewer collective operations (under
    NCCL ranks wait for the GPU, in no frame of torch.distributed), else those that wait for nobody; empty if unknown."""
    if len(found) < 2:
        return list(found)
    for key in ("at", "collectives"):
        places = {rank: facts[key] for rank, facts in found.items() if facts[key] is not None}
        if len(places) == len(found) and min(places.values()) != max(places.values()):
            return [rank for rank, place in places.items() if place == min(places.values())]
    working = [rank for rank, facts in found.items() if facts["waits"] is False]
    return working if len(working) < len(found) else []


def hang(found: Mapping[int, Mapping[str, Any]], run: RunFolder) -> Loss:
    """Returns the loss of ranks of which none makes progress: who keeps the others waiting, and a line for each."""
    blamed, quiet = culprits(found), min(facts["quiet"] for facts in found.values())
    lines = []
    for rank, facts in sorted(found.items()):
        waits = " waiting for other ranks" if facts["waits"] and rank not in blamed else ""
        lines.append(f"  rank {rank} ({facts['host']}): {facts['where']}{waits}{facts['stuck']}")
    who = "rank" if len(blamed) == 1 else "ranks"
    names = ", ".join(f"{rank} ({found[rank]['host']})" for rank in blamed)
    said = f"{who} {names} made no step for {quiet:.0f} s" if blamed else f"no rank made a step for {quiet:.0f} s"
    hint = f"`launch.hang_seconds` is the patience; stacks of all threads: {run.logs}/stack-rank*.txt; "
    hint += "docs/troubleshooting.md#hangs-after-initialized"
    if any(facts["collectives"] is not None for facts in found.values()):
        hint += f"; collective operations: {run.logs}/collectives-rank*.json"
    text = "\n".join([f"{said}; all ranks were stopped", *lines])
    return Loss(cause="hang", rank=blamed[0] if len(blamed) == 1 else None, text=text, hint=hint)
