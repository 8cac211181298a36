"""What one machine does for its ranks: starts them, passes signals on, waits, ends them, and leaves no process behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

import psutil

from sft_play.files import remove_half_written
from sft_play.launch.beats import LIMITS, MARK, Listener
from sft_play.launch.run_folder import STOPS, signals_to_hear
from sft_play.launch.verdict import Outcome, judge, launcher_log, tail
from sft_play.launch.watch import MemoryKills, Standings, Watch, is_alive, remove_empty
from sft_play.plan.detect import detect
from sft_play.plan.hardware import GIB, Hardware
from sft_play.runs.folder import RunFolder

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
    _adopt_orphans()
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
            _kill_descendants(process, others)
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


def remove_abandoned_locks(variables: Mapping[str, str]) -> None:
    """Removes locks of torch's extension builder that a killed process left: whoever loads that extension (DeepSpeed's) would wait forever.

    Who has such a lock keeps its file open (`torch.utils.file_baton`), so one that no process has open is abandoned.
    """
    cache = variables.get("XDG_CACHE_HOME") or Path(variables.get("HOME") or Path.home()) / ".cache"
    folder = Path(variables.get("TORCH_EXTENSIONS_DIR") or Path(cache) / "torch_extensions").resolve()
    locks = {str(path) for depth in ("", "*/", "*/*/") for path in folder.glob(f"{depth}lock")}
    for process in psutil.process_iter() if locks else ():
        with contextlib.suppress(psutil.Error):
            locks -= {file.path for file in process.open_files()}
    for path in locks:
        Path(path).unlink(missing_ok=True)


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
        if not killed and (
            ended or late or stop.at_once or (stop.wanted and stop.is_done(watch)) or watch.is_over(stopping=stop.wanted)
        ):
            killed = True
            _kill_descendants(process, others)
        time.sleep(POLL_SECONDS)
    if process.returncode < 0 and not killed and not stop.wanted:
        watch.agent_was_killed(-process.returncode)
    return ended


def _orphans_may_save(process: subprocess.Popen[bytes], stop: Stop, watch: Watch) -> bool:
    """Whether workers live whose parent has gone because of a request to stop: they get it now, and their time."""
    if process.returncode is not None and -process.returncode in STOPS:
        stop.note(-process.returncode)
    return stop.wanted and any(is_alive(worker) for worker in watch.workers)


def _kill_descendants(process: subprocess.Popen[bytes], others: Set[psutil.Process]) -> None:
    """Kills the agent and everything that it started; each worker has a session of its own, so one group is not enough."""
    for _ in range(3):  # a process may be forking while its parent is killed
        family = _descendants(others)
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=LIMITS.kill)
        left = _descendants(others)
        if not left:
            break
    else:
        names = ", ".join(_described(member) for member in left)
        say(
            f"warning: SIGKILL has not ended {names}\n\nhint: the kernel waits for a device or a disk; their memory may stay taken"
        )
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)


def _described(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"process {process.pid} ({process.name()}, {process.status()})"
    return f"process {process.pid}"


def _descendants(others: Set[psutil.Process]) -> list[psutil.Process]:
    """Everything below this process, orphans that the kernel gave to us too, but what it had started before (`others`: TensorBoard)."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [] if child in others else [child, *child.children(recursive=True)]
    return [p for p in found if is_alive(p)]


def _adopt_orphans() -> None:
    """Makes the kernel hand us the workers when their agent is killed (Linux), so that they can be found and ended."""
    if sys.platform == "linux":
        set_child_subreaper = 36
        ctypes.CDLL(None, use_errno=True).prctl(set_child_subreaper, 1, 0, 0, 0)


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


def say(text: str) -> None:
    """Tells the user, on stderr."""
    print(f"\n{text}", file=sys.stderr, flush=True)


SET_PARENT_DEATH_SIGNAL = 1
"""`PR_SET_PDEATHSIG` of prctl(2)."""
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def bound_to_parent(number: signal.Signals) -> Callable[[], None] | None:
    """Returns a `preexec_fn` for `subprocess.Popen`: the child gets the signal `number` when this process has gone.

    Call it in the main thread: the kernel goes by the thread that made the child. `None` where there is no such thing.
    """
    if _libc is None:
        return None
    libc, parent = _libc, os.getpid()

    def bind() -> None:
        libc.prctl(SET_PARENT_DEATH_SIGNAL, int(number), 0, 0, 0)
        if os.getppid() != parent:  # it was killed in between
            os._exit(128 + int(number))

    return bind


def woken_with_parent() -> None:
    """Makes the kernel continue this process (SIGCONT) when its parent has gone: one that was stopped could not notice it, and would
    stay. Harmless to one that runs, and to one whose parent leaves in order while it still saves."""
    if _libc is not None:
        _libc.prctl(SET_PARENT_DEATH_SIGNAL, int(signal.SIGCONT), 0, 0, 0)


MEMORY_SLACK = 0.02
"""Share of a card's memory that may be missing: other programs (a display) come and go."""


def wait_until_free(before: Hardware, devices: Collection[int]) -> None:
    """Returns when as much is free on these devices as `before` the run, or after `LIMITS.free_memory`, and says what it waits for.

    Raises `HardwareError` where a card does not answer any more.
    """
    deadline, told = time.monotonic() + LIMITS.free_memory, False
    while held := _held(before, detect(), devices):
        words = ", ".join(f"{size / GIB:.1f} GiB on cuda:{index}" for index, size in held.items())
        if time.monotonic() > deadline:
            say(
                f"warning: {words} still held after {LIMITS.free_memory:.0f} s; going on\n\nhint: `nvidia-smi` shows the programs that hold it"
            )
            return
        if not told:
            say(f"waiting until the memory of the processes that have ended is free: {words}")
        told = True
        time.sleep(LIMITS.look)


def _held(before: Hardware, now: Hardware, devices: Collection[int]) -> dict[int, int]:
    """Returns index -> bytes that were free before and are not now; nothing where the driver has gone meanwhile."""
    if now.kind != before.kind:
        return {}
    pairs = enumerate(zip(before.devices, now.devices, strict=False))
    missing = {index: then.free_bytes - card.free_bytes for index, (then, card) in pairs if index in devices}
    return {index: size for index, size in missing.items() if size > MEMORY_SLACK * before.devices[index].memory_bytes}
