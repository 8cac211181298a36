"""Starts the workers, passes signals on, waits, names the rank that failed first, and leaves no process behind."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence

import psutil

from sft_play.files import remove_half_written
from sft_play.launch.beats import MARK, Listener
from sft_play.launch.bound import bound_to_parent
from sft_play.launch.memory_kills import MemoryKills
from sft_play.launch.run_folder import STOPS
from sft_play.launch.stacks import remove_empty
from sft_play.launch.stopping import LEAVE_SECONDS, Stop, say, signals_noted
from sft_play.launch.verdict import Outcome, judge, launcher_log, tail
from sft_play.launch.watch import Watch, is_alive
from sft_play.runs.folder import RunFolder

POLL_SECONDS = 0.1
LOOK_SECONDS = 0.5
KILL_SECONDS = 10.0
"""How long killed processes may take to go, each of three times."""


def supervise(
    arguments: Sequence[str], variables: Mapping[str, str], run: RunFolder, ranks: range, *, console: int, shown: str = ""
) -> Outcome:
    """Runs the workers of `ranks` to their end. `console` is the descriptor that rank 0 prints to; the launcher's log begins with `shown`.

    A signal asks the workers to save and leave (`launch.stopping`), a second Ctrl-C kills them. Whatever happens, no descendant is
    alive when this returns; one that the kernel cannot end is named.
    """
    run.logs.mkdir(parents=True, exist_ok=True)
    for rank in ranks:  # a resumed run must not be judged by the records of the last attempt
        run.rank_exit(rank).unlink(missing_ok=True)
    remove_left(run, ranks)
    log_starts = {rank: path.stat().st_size for rank in ranks if (path := run.rank_log(rank)).is_file()}
    _adopt_orphans()
    stop, mark, kills = Stop(), uuid.uuid4().hex, MemoryKills.begin()
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
            preexec_fn=bound_to_parent(signal.SIGKILL),  # noqa: PLW1509 - a launcher has no threads; the workers leave with their agent
        )
        watch = Watch(agent=process.pid, run=run, ranks=ranks, kills=kills, beats=beats)
        try:
            _wait(process, stop, watch, mark)
        finally:
            _kill_descendants(process, mark)
            memory_kill = kills.evidence()
            kills.close()
            beats.close()
            remove_empty(run, ranks)
    return judge(
        run, ranks, agent_code=process.returncode, agent_log=tail(log), signals=tuple(stop.signals), loss=watch.loss,
        memory_kill=memory_kill, log_starts=log_starts,
    )  # fmt: skip


def remove_left(run: RunFolder, ranks: range) -> None:
    """Removes what processes of the last attempt were writing when they were killed. No worker may run."""
    for rank in ranks:
        remove_half_written(run.rank_exit(rank))
    if ranks.start == 0:
        for path in (run.config, run.plan, run.prepared, run.stamp, run.accelerate, run.deepspeed, run.training_metrics):
            remove_half_written(path)


def _wait(process: subprocess.Popen[bytes], stop: Stop, watch: Watch, mark: str) -> None:
    looked, told, killed = 0.0, False, False
    while process.poll() is None or (not killed and _orphans_may_save(process, stop, watch)):
        if time.monotonic() - looked > LOOK_SECONDS or (stop.wanted and not told):
            looked = time.monotonic()
            watch.look()
            if stop.wanted:
                stop.ask(process, watch)
        if stop.wanted and not told:
            told = True
            say("stopping: the workers finish their step, save a checkpoint and leave; Ctrl-C once more kills them")
        late = stop.late(watch) if stop.wanted else []
        if late and not killed:
            say(f"ranks {', '.join(map(str, late))} have not left within {LEAVE_SECONDS:.0f} s; killing all workers")
        if stop.at_once and not killed:
            say("killing the workers")
        if not killed and (late or stop.at_once or (stop.wanted and stop.is_done(watch)) or watch.is_over(stopping=stop.wanted)):
            killed = True
            _kill_descendants(process, mark)
        time.sleep(POLL_SECONDS)
    if process.returncode < 0 and not killed and not stop.wanted:
        watch.agent_was_killed(-process.returncode)


def _orphans_may_save(process: subprocess.Popen[bytes], stop: Stop, watch: Watch) -> bool:
    """Whether workers live whose parent has gone because of a request to stop: they get it now, and their time."""
    if process.returncode is not None and -process.returncode in STOPS:
        stop.note(-process.returncode)
    return stop.wanted and any(is_alive(worker) for worker in watch.workers)


def _kill_descendants(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kills the agent and everything that it started; each worker has a session of its own, so one group is not enough."""
    for _ in range(3):  # a process may be forking while its parent is killed
        family = _descendants(process.pid, mark)
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=KILL_SECONDS)
        left = _descendants(process.pid, mark)
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


def _descendants(agent: int, mark: str) -> list[psutil.Process]:
    """The agent with its children, and orphans that the kernel gave to us; never another child of this process (TensorBoard)."""
    mine = psutil.Process()
    found = []
    for child in mine.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.pid == agent or _has_mark(child, mark):
                found += [child, *child.children(recursive=True)]
    return [p for p in found if is_alive(p)]


def _has_mark(process: psutil.Process, mark: str) -> bool:
    """Whether an adopted orphan came from this launch."""
    try:
        return process.environ().get(MARK) == mark
    except (psutil.Error, OSError):
        return False


def _adopt_orphans() -> None:
    """Makes the kernel hand us the workers when their agent is killed (Linux), so that they can be found and ended."""
    if sys.platform == "linux":
        set_child_subreaper = 36
        ctypes.CDLL(None, use_errno=True).prctl(set_child_subreaper, 1, 0, 0, 0)
