"""The supervision of a machine's ranks: start them, watch them, forward signals, end them, and leave no process behind.

Launcher: the command of SFT-Play, in which this module runs. Agent: `accelerate launch`, which the launcher starts and
which starts the workers. Worker: the process of a rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise
from types import FrameType

import psutil

from sft_play.files import open_own, remove_half_written, tail
from sft_play.launch.liveness import LIMITS, MARK, Listener, MemoryKills, keep_stacks, remove_empty, stop_patience
from sft_play.launch.machines import Machines
from sft_play.launch.process import STOPS, bind_to_parent, hear_signals
from sft_play.launch.run_folder import exit_records
from sft_play.launch.verdict import Loss, Outcome, Standings, hang, launcher_log, outcome_of, standing
from sft_play.runs.folder import RunFolder
from sft_play.text import tell

LONGEST_LOOK = 1.0
"""Longest time between two looks, in seconds, that counts: a suspended launcher must not blame its workers."""
WORKER_MODULE = "sft_play.train"
AGENT_MODULE = "accelerate.commands.launch"
BUSY = frozenset({psutil.STATUS_RUNNING, psutil.STATUS_TRACING_STOP})
"""States in which a silent process is alive: it computes, or a debugger holds it."""
SAVING_BEAT_SECONDS = 5.0
"""Age of a heartbeat up to which it proves that a worker still saves; later the worker may be frozen."""


SILENT = (LIMITS.dead, "no beat and no processor time", "")
FROZEN = {
    psutil.STATUS_STOPPED: (LIMITS.dead, "stopped by a signal", ""),
    psutil.STATUS_DISK_SLEEP: (
        LIMITS.in_kernel,
        "waiting in the kernel, nothing read or written,",
        "a disk (NFS) or a GPU does not answer; `dmesg` may say which",
    ),
}
"""State -> seconds after which a process in it counts as frozen, a description, and a hint."""


@dataclass(kw_only=True, slots=True)
class Watch:
    """Watches which worker fails first; torchrun reports it only after all others have ended too."""

    agent: int
    run: RunFolder
    ranks: range
    kills: MemoryKills
    beats: Listener
    workers: dict[psutil.Process, int] = field(default_factory=dict)
    """Every worker seen so far, with its rank."""
    silence: dict[psutil.Process, tuple[tuple[float, ...], float]] = field(default_factory=dict)
    """What each process had used (processor time, bytes of I/O) at its last sign of life, and seconds since then."""
    loss: Loss | None = None
    """The first loss observed."""
    lost_at: float | None = None
    looked_at: float = field(default_factory=time.monotonic)
    machines: Machines | None = None
    """Set for a run on several machines, where a hang concerns all."""
    standing: Standings | None = None
    watched_seconds: float = 0.0
    """Seconds since the start of this attempt, without time in which the launcher itself was suspended."""

    def look(self) -> None:
        """Find new workers, and the first worker that left with an error or without a record, froze, or hangs."""
        heard, now = self.beats.receive(), time.monotonic()
        passed, self.looked_at = min(now - self.looked_at, LONGEST_LOOK), now
        self.watched_seconds += passed
        self._find_workers()
        for worker in self.workers:
            self.kills.follow(worker.pid)
        frozen = self._frozen(heard, passed)
        if self.loss is None:
            loss = self._gone() or frozen or self._hanging()
            if loss:
                self.loss, self.lost_at = loss, now

    def is_over(self, *, stopping: bool) -> bool:
        """Return whether to end all ranks: at once for what the launcher observed, otherwise after a grace period.

        `stopping`: the ranks were asked to save and leave, so that a rank that has left is no loss, and the others may
        take their time.
        """
        if self.loss is None or self.lost_at is None:
            return False
        saving = any(is_alive(worker) and self.saves(rank) for worker, rank in self.workers.items())
        grace = LIMITS.saving if saving else LIMITS.grace
        return bool(self.loss.text) or (not stopping and time.monotonic() - self.lost_at > grace)

    def saves(self, rank: int) -> bool:
        """Return whether a rank's latest heartbeat says that it writes a checkpoint."""
        beat = self.beats.latest.get(rank)
        return (
            beat is not None
            and beat.phase == "saving"
            and time.monotonic() - self.beats.heard[rank] < SAVING_BEAT_SECONDS
        )

    def _find_workers(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.agent).children():
                with contextlib.suppress(psutil.Error):
                    if child not in self.workers and is_worker(child.cmdline()):
                        rank = child.environ().get("RANK") or (str(self.ranks.start) if len(self.ranks) == 1 else "")
                        if rank.isdigit() and int(rank) in self.ranks:  # otherwise the next look tries again
                            self.workers[child] = int(rank)

    def _gone(self) -> Loss | None:
        """Return the loss of a worker that left with an error, or without a record."""
        gone = [rank for worker, rank in self.workers.items() if not is_alive(worker)]
        records = exit_records(self.run, gone)
        # Of several that left at once, one without a record left first: the others could still record that their peer
        # was gone.
        for rank in sorted(gone, key=lambda rank: rank in records):
            if rank not in records or records[rank]["code"]:
                return Loss(cause="failed" if rank in records else "killed", rank=rank)
        return None

    def _frozen(self, heard: set[int], passed: float) -> Loss | None:
        """Return the loss of a worker without any sign of life.

        A thread that holds Python's lock in a long call suppresses heartbeats, but uses the processor, or reads and
        writes; a stopped process does neither, nor does one whose disk or device does not answer.
        """
        for worker, rank in self.workers.items():
            beats_expected = rank in self.beats.heard or self.watched_seconds > LIMITS.first_beat
            with contextlib.suppress(psutil.Error):
                state = self._stuck(worker, passed, heard=rank in heard, beats_expected=beats_expected)
                if state and not self.run.rank_exit(rank).exists():
                    last = f" (last heard {self.beats.latest[rank].where()})" if rank in self.beats.latest else ""
                    text = f"rank {rank} ({socket.gethostname()}) is frozen{last}: {state[0]}"
                    return Loss(cause="frozen", rank=rank, text=text, hint=state[1])
        return None

    def _stuck(
        self, process: psutil.Process, passed: float, *, heard: bool, beats_expected: bool
    ) -> tuple[str, str] | None:
        """Return how a process is frozen, and a hint; with `beats_expected`, a missing heartbeat is evidence too."""
        state = process.status()
        spent = (*process.cpu_times()[:2], *(process.io_counters() if state == psutil.STATUS_DISK_SLEEP else ()))
        before, seconds = self.silence.get(process, ((), 0.0))
        if heard or state in BUSY or spent != before or (state not in FROZEN and not beats_expected):
            self.silence[process] = spent, 0.0
            return None
        self.silence[process] = spent, seconds + passed
        limit, how, hint = FROZEN.get(state, SILENT)
        return (f"{how} for {limit:.0f} s", hint) if seconds + passed > limit else None

    def _hanging(self) -> Loss | None:
        """Return the loss when all ranks are quiet for longer than their phase allows.

        Ranks that wait for one that saves or evaluates are allowed as much time as that rank.
        """
        beats = self.beats.latest
        if not set(self.ranks) <= beats.keys() or not all(
            self.beats.quiet(rank) > beat.limit for rank, beat in beats.items()
        ):
            self.standing = None
        elif self.standing is None:
            alive = {rank: worker for worker, rank in self.workers.items() if is_alive(worker)}
            stacks = keep_stacks(self.run, alive)
            self.standing = {
                str(rank): standing(beat, self.beats.quiet(rank), stacks.get(rank, "")) for rank, beat in beats.items()
            }
        everyone = self.machines.share_standings(self.standing) if self.machines else self.standing
        return hang({int(rank): facts for rank, facts in everyone.items()}, self.run) if everyone else None


def is_worker(arguments: Sequence[str]) -> bool:
    """Return whether a command line is a worker's; a forked process has its parent's until it executes its program."""
    modules = {after for before, after in pairwise(arguments) if before == "-m"}
    return AGENT_MODULE not in modules and WORKER_MODULE in modules


AGENT_POLL_SECONDS = 0.1


def supervise(
    arguments: Sequence[str],
    variables: Mapping[str, str],
    run: RunFolder,
    ranks: range,
    *,
    console: int,
    shown: str = "",
    machines: Machines | None = None,
) -> Outcome:
    """Run the workers of `ranks` to their end.

    `console` is the descriptor that rank 0 prints to; the launcher's log begins with `shown`. Among several `machines`,
    the end of another ends this one too. A signal asks the workers to save and leave (`Stop`), a second Ctrl-C kills
    them. No descendant is alive when this returns; one that the kernel cannot end is reported.
    """
    run.logs.mkdir(parents=True, exist_ok=True)
    for rank in ranks:  # records of the last attempt must not count for this one
        run.rank_exit(rank).unlink(missing_ok=True)
        remove_half_written(run.rank_exit(rank))
    log_starts = {rank: path.stat().st_size for rank in ranks if (path := run.rank_log(rank)).is_file()}
    adopt_orphans()
    stop, mark, kills, others = Stop(), uuid.uuid4().hex, MemoryKills(), set(psutil.Process().children())
    beats, log = Listener(mark), launcher_log(run, ranks.start)
    with open_own(log, empty=True) as agent_log, hear_signals(stop.note):
        agent_log.write(shown.encode())
        agent_log.flush()
        process = subprocess.Popen(
            list(arguments),
            env={**variables, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=agent_log,
            start_new_session=True,
            preexec_fn=bind_to_parent(signal.SIGKILL),  # noqa: PLW1509 - the workers leave with their agent
        )
        watch = Watch(
            agent=process.pid,
            run=run,
            ranks=ranks,
            kills=kills,
            beats=beats,
            machines=machines,
        )
        ended = None
        try:
            ended = _wait(process, stop, watch, others)
        finally:
            kill_descendants(process, others)
            beats.close()
            remove_empty(run, ranks)
    outcome = outcome_of(
        run,
        ranks,
        agent_code=process.returncode,
        agent_log=tail(log),
        signals=tuple(stop.signals),
        loss=watch.loss,
        memory_kill=kills.evidence(),
        log_starts=log_starts,
    )
    # Where another machine ended the attempt, this one's workers were killed as a consequence, and `outcome_of` only
    # describes the effect.
    return ended if ended and outcome.code else outcome


def _wait(
    process: subprocess.Popen[bytes],
    stop: Stop,
    watch: Watch,
    others: Set[psutil.Process],
) -> Outcome | None:
    """Wait for the agent; return how the attempt ended on another machine, if that ended this one."""
    looked, announced, killed = 0.0, False, False
    ended: Outcome | None = None
    while process.poll() is None or (not killed and _orphans_may_save(process, stop, watch)):
        if time.monotonic() - looked > LIMITS.look or (stop.requested and not announced):
            looked = time.monotonic()
            watch.look()
            if stop.requested:
                stop.ask(process, watch)
        if stop.requested and not announced:
            announced = True
            tell("\nstopping: the workers finish their step, save a checkpoint and leave; Ctrl-C once more kills them")
        elsewhere = watch.machines.ended_elsewhere(stopping=stop.requested) if watch.machines and not killed else None
        if isinstance(elsewhere, int):
            stop.note(elsewhere)
        elif elsewhere and not stop.requested and not watch.loss:
            ended = elsewhere
        if not killed and (why := _reason_to_kill(stop, watch, ended)) is not None:
            killed = True
            if why:
                tell(f"\n{why}")
            kill_descendants(process, others)
        time.sleep(AGENT_POLL_SECONDS)
    if process.returncode < 0 and not killed and not stop.requested:
        # The workers leave with the agent, so no rank is to blame.
        name = signal.Signals(-process.returncode).name
        text = f"the process that had started the workers (`accelerate launch`) was killed by {name}"
        watch.loss = Loss(cause="agent", rank=None, text=text)
    return ended


def _reason_to_kill(stop: Stop, watch: Watch, ended: Outcome | None) -> str | None:
    """Return why to kill the workers now, empty if there is nothing to report; `None` if they may continue."""
    if ended:
        return f"stopping all ranks: {ended.first_line}"
    if stop.at_once:
        return "killing the workers"
    if late := stop.late(watch):
        return f"ranks {', '.join(map(str, late))} have not left in time; killing all workers"
    if watch.loss and watch.is_over(stopping=stop.requested):
        return watch.loss.text and f"stopping all ranks: {watch.loss.text}"
    return "" if stop.is_done(watch) else None


def _orphans_may_save(process: subprocess.Popen[bytes], stop: Stop, watch: Watch) -> bool:
    """Return whether workers outlive a parent that a request to stop has ended; pass the request on to them."""
    if process.returncode is not None and -process.returncode in STOPS:
        stop.note(-process.returncode)
    return stop.requested and any(is_alive(worker) for worker in watch.workers)


SAME_SIGNAL_SECONDS = 0.5
"""A second Ctrl-C within this time is the same one, delivered twice (by make or a wrapper)."""


@dataclass(kw_only=True, slots=True)
class Stop:
    """The requests to stop, and the workers that received them."""

    signals: list[int] = field(default_factory=list)
    """The first signal, and a later Ctrl-C or Ctrl-\\, which kills; schedulers repeat their signals in vain."""
    since: float = 0.0
    asked: set[psutil.Process] = field(default_factory=set)

    def note(self, number: int, _: FrameType | None = None) -> None:
        """Record a signal; usable as a signal handler."""
        now = time.monotonic()
        if not self.signals:
            self.signals.append(number)
            self.since = now
        elif number in (signal.SIGINT, signal.SIGQUIT) and now - self.since > SAME_SIGNAL_SECONDS:
            self.signals.append(number)

    @property
    def requested(self) -> bool:
        """Whether a stop was requested."""
        return bool(self.signals)

    @property
    def at_once(self) -> bool:
        """Whether a second Ctrl-C asked to kill the workers."""
        return len(self.signals) > 1

    def ask(self, process: subprocess.Popen[bytes], watch: Watch) -> None:
        """Send SIGTERM once to each worker, including those that start later.

        The agent gets none, since that of a single process would die and leave its worker behind; it is ended only if
        there is no worker yet, and so nothing to save.
        """
        workers = [worker for worker in watch.workers if is_alive(worker)]
        for worker in workers:
            if worker not in self.asked:
                self.asked.add(worker)
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.terminate()
        if not workers and process.poll() is None and not self.asked:
            process.terminate()

    def is_done(self, watch: Watch) -> bool:
        """Return whether all workers have left with a record, so that their parent's clean-up need not be awaited."""
        gone = bool(watch.workers) and not any(is_alive(worker) for worker in watch.workers)
        return self.requested and gone and all(watch.run.rank_exit(rank).is_file() for rank in watch.ranks)

    def late(self, watch: Watch) -> list[int]:
        """Return the ranks that should have left by now and are not writing a checkpoint."""
        slowest = max((beat.longest_step for beat in watch.beats.latest.values()), default=0.0)
        if (
            not self.requested
            or time.monotonic() - self.since < stop_patience(slowest) + LIMITS.leave - LIMITS.patience
        ):
            return []
        return [rank for worker, rank in watch.workers.items() if is_alive(worker) and not watch.saves(rank)]


def adopt_orphans() -> None:
    """Make this process the parent of workers whose agent is killed (Linux), so that they can be found and ended."""
    if sys.platform == "linux":
        set_child_subreaper = 36
        ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process is running; a zombie is not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_descendants(process: subprocess.Popen[bytes], others: Set[psutil.Process]) -> None:
    """Kill the agent and its descendants; each worker has a separate session, so killing a group is not enough."""
    for _ in range(3):  # a process may be forking while its parent is killed
        family = _descendants(others)
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=LIMITS.kill)
        survivors = _descendants(others)
        if not survivors:
            break
    else:
        names = ", ".join(f"process {member.pid}" for member in survivors)
        tell(
            f"\nwarning: SIGKILL has not ended {names}"
            "\n\nhint: the kernel waits for a device or a disk; their memory may stay taken"
        )
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)


def _descendants(others: Set[psutil.Process]) -> list[psutil.Process]:
    """Return the living descendants of this process, including adopted orphans, without `others` (TensorBoard)."""
    family = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            family += [] if child in others else [child, *child.children(recursive=True)]
    return [member for member in family if is_alive(member)]
