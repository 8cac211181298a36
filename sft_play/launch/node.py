"""What one machine does for its ranks: starts them, watches them, passes signals on, ends them, and leaves no process behind."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import FrameType
from typing import Any

import psutil

from sft_play.files import remove_half_written
from sft_play.launch.liveness import LIMITS, MARK, Listener, MemoryKills, keep_stacks, remove_empty
from sft_play.launch.process import STOPS, adopt_orphans, bound_to_parent, is_alive, kill_descendants, say, signals_to_hear
from sft_play.launch.run_folder import exit_records
from sft_play.launch.verdict import Loss, Outcome, hang, judge, launcher_log, standing, tail
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


POLL_SECONDS = 0.1
Elsewhere = Callable[[bool], Outcome | int | None]
"""Asked about ten times a second how the attempt ended on another machine: an outcome, or a signal to pass on to the workers; told whether this
machine was asked to stop."""
Share = Callable[[Standings | None], Standings | None]
"""What `Watch.share` is on several machines."""


def supervise(
    arguments: Sequence[str], variables: Mapping[str, str], run: RunFolder, ranks: range, *, console: int, shown: str = "",
    elsewhere: Elsewhere | None = None, share: Share = lambda mine: mine,
) -> Outcome:  # fmt: skip
    """Runs the workers of `ranks` to their end. `console` is the descriptor that rank 0 prints to; the launcher's log begins with `shown`.

    A signal asks the workers to save and leave (`Stop`), a second Ctrl-C kills them. Whatever happens, no descendant is
    alive when this returns; one that the kernel cannot end is named.
    """
    run.logs.mkdir(parents=True, exist_ok=True)
    for rank in ranks:  # a resumed run must not be judged by the records of the last attempt
        run.rank_exit(rank).unlink(missing_ok=True)
        remove_half_written(run.rank_exit(rank))
    log_starts = {rank: path.stat().st_size for rank in ranks if (path := run.rank_log(rank)).is_file()}
    adopt_orphans()
    stop, mark, kills, others = Stop(), uuid.uuid4().hex, MemoryKills.begin(), set(psutil.Process().children())
    beats, log = Listener(mark), launcher_log(run, ranks.start)
    with log.open("wb") as agent_log, signals_noted(stop):
        agent_log.write(shown.encode())
        agent_log.flush()
        process = subprocess.Popen(
            list(arguments),
            env={**variables, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=agent_log,
            start_new_session=True,
            preexec_fn=bound_to_parent(signal.SIGKILL),  # noqa: PLW1509 - runs before exec; the workers leave with their agent
        )
        watch = Watch(agent=process.pid, run=run, ranks=ranks, kills=kills, beats=beats, share=share)
        ended = None
        try:
            ended = _wait(process, stop, watch, others, elsewhere)
        finally:
            kill_descendants(process, others, LIMITS.kill)
            memory_kill, driver = kills.evidence(), kills.driver_errors()
            kills.close()
            beats.close()
            remove_empty(run, ranks)
    outcome = judge(
        run, ranks, agent_code=process.returncode, agent_log=tail(log), signals=tuple(stop.signals), loss=watch.loss,
        memory_kill=memory_kill, log_starts=log_starts,
    )  # fmt: skip
    outcome = ended if ended and outcome.code else outcome
    return replace(outcome, message=f"{outcome.message}\n\n{driver}") if outcome.message and driver else outcome


def remove_left(run: RunFolder, ranks: range) -> None:
    """Removes what workers of the last attempt were writing when they were killed. No worker may run."""
    first = (run.stamp, run.training_metrics) if ranks.start == 0 else ()
    for path in (*map(run.rank_exit, ranks), *first):
        remove_half_written(path)


def _wait(
    process: subprocess.Popen[bytes], stop: Stop, watch: Watch, others: Set[psutil.Process], elsewhere: Elsewhere | None
) -> Outcome | None:
    """Waits for the agent; returns how the attempt ended on another machine, where this one was ended for that."""
    looked, told, killed = 0.0, False, False
    ended: Outcome | None = None
    while process.poll() is None or (not killed and _orphans_may_save(process, stop, watch)):
        if time.monotonic() - looked > LIMITS.look or (stop.wanted and not told):
            looked = time.monotonic()
            watch.look()
            if stop.wanted:
                stop.ask(process, watch)
        if stop.wanted and not told:
            told = True
            say("stopping: the workers finish their step, save a checkpoint and leave; Ctrl-C once more kills them")
        late = stop.late(watch) if stop.wanted else []
        if late and not killed:
            say(f"ranks {', '.join(map(str, late))} have not left within {LIMITS.leave:.0f} s; killing all workers")
        if stop.at_once and not killed:
            say("killing the workers")
        found = None if killed or elsewhere is None else elsewhere(stop.wanted)
        if isinstance(found, int):
            stop.note(found)
        elif found and not stop.wanted and not watch.loss:
            ended = found
        over = watch.is_over(stopping=stop.wanted)
        if not killed and (ended or late or stop.at_once or (stop.wanted and stop.is_done(watch)) or over):
            killed = True
            if why := ended.first_line if ended else watch.loss.text.partition("\n")[0] if over and watch.loss else "":
                say(f"stopping all ranks: {why.removesuffix('; all ranks were stopped')}")
            kill_descendants(process, others, LIMITS.kill)
        time.sleep(POLL_SECONDS)
    if process.returncode < 0 and not killed and not stop.wanted:
        watch.agent_was_killed(-process.returncode)
    return ended


def _orphans_may_save(process: subprocess.Popen[bytes], stop: Stop, watch: Watch) -> bool:
    """Whether workers live whose parent has gone because of a request to stop: they get it now, and their time."""
    if process.returncode is not None and -process.returncode in STOPS:
        stop.note(-process.returncode)
    return stop.wanted and any(is_alive(worker) for worker in watch.workers)


SAME_SECONDS = 0.5
"""A Ctrl-C that comes again within this time is the same one, heard twice (by make, by a wrapper)."""


@dataclass(kw_only=True, slots=True)
class Stop:
    """The requests that have arrived, and which workers know of them."""

    signals: list[int] = field(default_factory=list)
    """The first, and a Ctrl-C after it, which kills. Schedulers repeat their signals: those say nothing new."""
    since: float = 0.0
    asked: set[psutil.Process] = field(default_factory=set)

    def note(self, number: int, _: FrameType | None = None) -> None:
        """Takes up a signal (as a handler, too)."""
        now = time.monotonic()
        if not self.signals:
            self.signals.append(number)
            self.since = now
        elif number == signal.SIGINT and now - self.since > SAME_SECONDS:
            self.signals.append(number)

    @property
    def wanted(self) -> bool:
        """Whether a stop was asked for."""
        return bool(self.signals)

    @property
    def at_once(self) -> bool:
        """Whether a second Ctrl-C came."""
        return len(self.signals) > 1

    def ask(self, process: subprocess.Popen[bytes], watch: Watch) -> None:
        """Sends SIGTERM to the workers themselves, each once, those that start only now included.

        Not to the agent: the launcher of a single process would die and leave its worker behind. Only where there is no worker yet
        it is ended, since there is nothing to save.
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
        """Whether all workers have left and said why: then nobody needs to wait for their parent's clearing up."""
        left = bool(watch.workers) and not any(is_alive(worker) for worker in watch.workers)
        return left and all(watch.run.rank_exit(rank).is_file() for rank in watch.ranks)

    def late(self, watch: Watch) -> list[int]:
        """Returns the ranks that should have left by now, and do not write a checkpoint."""
        if time.monotonic() - self.since < LIMITS.leave:
            return []
        return [rank for worker, rank in watch.workers.items() if is_alive(worker) and not watch.saves(rank)]


@contextlib.contextmanager
def signals_noted(stop: Stop) -> Iterator[None]:
    """Lets `stop` hear the signals meanwhile."""
    previous = {number: signal.signal(number, stop.note) for number in signals_to_hear()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
