"""Starts the workers, passes signals on, waits, names the rank that failed first, and leaves no process behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from sft_play.launch.disk import is_full
from sft_play.launch.memory_kills import MemoryKills
from sft_play.launch.run_folder import exit_records
from sft_play.runs.folder import RunFolder

LOST = 75
SUMMARY = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s+exitcode\s*: (-?\d+)")
"""torchrun's summary of its failed workers: rank and exit code, negative for a signal."""
PEER_GONE = re.compile(
    r"Connection (closed|reset) by peer|Socket closed|Connection refused|remote process exited|Broken pipe"
    r"|NCCL.*(timeout|remote error)|Timed out waiting \d+ms|failed to pass monitoredBarrier"
)
"""What gloo and NCCL say in a rank whose peer has died."""
SIMPLE_DEATH = re.compile(r"died with <Signals\.(\w+): \d+>")
"""Python's word on a single process that was killed by a signal."""
OUT_OF_MEMORY = "out_of_memory"
HELPER_KILLED = re.compile(r"DataLoader worker .* killed by signal: Killed")
"""What torch says in a rank of which a loading process was killed."""
POLL_SECONDS = 0.1
LOOK_SECONDS = 0.5
GRACE_SECONDS = 15.0
"""How long the other ranks may take to leave once one has failed."""
WORKER_MODULES = frozenset({"sft_play.train", "sft_play.probe"})
MARK = "SFT_PLAY_LAUNCH"
"""Variable with an id of its own for each launch: every descendant inherits it, whatever session or parent it gets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a launch ended."""

    code: int
    """Exit code of contract section 7."""
    rank: int | None = None
    """The rank that failed first."""
    message: str = ""
    """Its error, for the user; empty when all went well."""
    cause: str | None = None
    """`out_of_memory`, or `None` for everything else."""
    doing: Mapping[str, Any] = field(default_factory=dict)
    """What the rank was at: `phase`, `step`, `micro_step`, `rows`; empty where it could not say."""


@dataclass(kw_only=True, slots=True)
class _Stop:
    """Which signals have arrived."""

    signals: list[int] = field(default_factory=list)

    def note(self, number: int, _: FrameType | None) -> None:
        self.signals.append(number)


def supervise(arguments: Sequence[str], variables: Mapping[str, str], run: RunFolder, ranks: range, *, console: int) -> Outcome:
    """Runs the workers of `ranks` to their end. `console` is the descriptor that rank 0 prints to.

    The first Ctrl-C or SIGTERM asks the workers to save and leave, the second kills them. Whatever happens, no descendant is
    alive when this returns.
    """
    run.logs.mkdir(parents=True, exist_ok=True)
    for rank in ranks:  # a resumed run must not be judged by the records of the last attempt
        run.rank_exit(rank).unlink(missing_ok=True)
    _adopt_orphans()
    stop, mark, kills = _Stop(), uuid.uuid4().hex, MemoryKills.begin()
    log = launcher_log(run, ranks.start)
    with log.open("wb") as agent_log, _signals_noted(stop):
        process = subprocess.Popen(
            list(arguments),
            env={**variables, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=agent_log,
            start_new_session=True,
        )
        watch = Watch(agent=process.pid, run=run, first_rank=ranks.start, kills=kills)
        try:
            _wait(process, stop, watch, mark)
        finally:
            _kill_descendants(process, mark)
            memory_kill = kills.evidence()
            kills.close()
    return judge(
        run, ranks, agent_code=process.returncode, agent_log=_tail(log), signals=tuple(stop.signals), lost_rank=watch.lost_rank,
        memory_kill=memory_kill,
    )  # fmt: skip


def launcher_log(run: RunFolder, first_rank: int) -> Path:
    """Where `accelerate launch` and torchrun themselves write; one file a node, since nodes may share a disk."""
    return run.logs / ("launcher.log" if first_rank == 0 else f"launcher-from-rank{first_rank}.log")


@dataclass(kw_only=True, slots=True)
class Watch:
    """Sees which worker ends first without having done its work; torchrun tells only when all others have ended too."""

    agent: int
    run: RunFolder
    first_rank: int
    kills: MemoryKills
    workers: dict[psutil.Process, int] = field(default_factory=dict)
    """Every worker that was ever seen, with its rank."""
    lost_rank: int | None = None
    lost_at: float | None = None

    def look(self) -> None:
        """Takes note of new workers, and of the first that has gone with an error or without a record."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.agent).children():
                with contextlib.suppress(psutil.Error):
                    if child not in self.workers and not WORKER_MODULES.isdisjoint(child.cmdline()):
                        self.workers[child] = int(child.environ().get("RANK", self.first_rank))
        for worker in self.workers:
            self.kills.follow(worker.pid)
        if self.lost_rank is None:
            # Of several that went at once, one without a record went first: the others could still say that their peer had gone.
            silent_first = sorted(self.workers.items(), key=lambda item: self.run.rank_exit(item[1]).exists())
            for worker, rank in silent_first:
                if not is_alive(worker) and exit_records(self.run, range(rank, rank + 1)).get(rank, {"code": 1})["code"] != 0:
                    self.lost_rank, self.lost_at = rank, time.monotonic()
                    return

    def is_over(self) -> bool:
        """Whether the others have had their time to notice and leave."""
        return self.lost_at is not None and time.monotonic() - self.lost_at > GRACE_SECONDS


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait(process: subprocess.Popen[bytes], stop: _Stop, watch: Watch, mark: str) -> None:
    answered, looked = 0, 0.0
    while process.poll() is None:
        if time.monotonic() - looked > LOOK_SECONDS:
            looked = time.monotonic()
            watch.look()
        if watch.is_over() and not stop.signals:
            _kill_descendants(process, mark)
        if len(stop.signals) > answered:
            answered = len(stop.signals)
            if answered == 1:
                print("\nstopping: the workers save a checkpoint; once more to kill them", file=sys.stderr, flush=True)
                _ask_workers_to_stop(process)
            else:
                print("\nkilling the workers", file=sys.stderr, flush=True)
                _kill_descendants(process, mark)
        time.sleep(POLL_SECONDS)


def _ask_workers_to_stop(process: subprocess.Popen[bytes]) -> None:
    """Sends SIGTERM to the workers themselves.

    Not to the agent: torchrun would kill workers that take longer than its grace period to save, and the launcher of a single
    process would die and leave its worker behind.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        workers = psutil.Process(process.pid).children()
        if not workers:  # still starting up: there is nothing to save
            process.terminate()
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.terminate()


def _kill_descendants(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kills the agent and everything that it started; each worker has a session of its own, so one group is not enough."""
    for _ in range(3):  # a process may be forking while its parent is killed
        family = _descendants(process.pid, mark)
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=10)
        if not _descendants(process.pid, mark):
            break
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)


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


@contextlib.contextmanager
def _signals_noted(stop: _Stop) -> Iterator[None]:
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    previous = {number: signal.signal(number, stop.note) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def judge(
    run: RunFolder,
    ranks: range,
    *,
    agent_code: int,
    agent_log: str,
    signals: tuple[int, ...] = (),
    lost_rank: int | None = None,
    memory_kill: str | None = None,
) -> Outcome:
    """Says how the workers ended, from their records, the agent's own words and the rank that was seen to go first.

    The order of causes: a worker that said that memory ran out, unless another had failed for good before it; a worker that a signal
    killed (others then only saw their peer go), for memory where `memory_kill` is the evidence; the earliest permanent error (codes
    1 to 5), a worker without a record, the earliest lost peer, a stop on request.
    """
    records = exit_records(run, ranks)
    failed = sorted((r for r in records.items() if int(r[1]["code"]) != 0), key=lambda r: float(r[1]["time"]))
    silent = [rank for rank in ranks if rank not in records]
    if not failed and not silent:
        return Outcome(code=0)
    if signals:
        code = 130 if signals[0] == signal.SIGINT else 143
        permanent = [r for r in failed if 1 <= _code(r[1]) <= 5]
        return _recorded(run, permanent[0]) if permanent and len(signals) == 1 else Outcome(code=code)
    permanent = [r for r in failed if 1 <= _code(r[1]) <= 5]
    short = [r for r in failed if r[1].get("cause") == OUT_OF_MEMORY or (memory_kill and HELPER_KILLED.search(_error(r[1])))]
    if short and (not permanent or float(short[0][1]["time"]) <= float(permanent[0][1]["time"])):
        return _out_of_memory(run, short[0])
    killed = _killed(ranks, silent, agent_log)
    if killed is None and lost_rank in silent and not SUMMARY.search(agent_log):
        killed = lost_rank, "a signal"  # the others did not leave in time, so torchrun never said which
    if killed:
        rank, name = killed
        aborted = name == "SIGABRT" and "std::bad_alloc" in _tail(run.rank_log(rank), 4000)
        return _vanished(run, rank, f"was killed by {name}", "its log ends with std::bad_alloc" if aborted else memory_kill)
    if permanent:
        return _recorded(run, permanent[0])
    if silent and (failed or agent_code < 0):
        return _vanished(run, silent[0], "vanished without a word", memory_kill)
    if failed:
        return _recorded(run, failed[0])
    return _never_began(run, ranks, agent_code, agent_log)


def _killed(ranks: range, silent: Sequence[int], agent_log: str) -> tuple[int, str] | None:
    """Returns a rank that a signal killed before it could record anything, and the signal's name, from the agent's log."""
    for rank, code in SUMMARY.findall(agent_log):
        if int(rank) in silent and int(code) < 0 and -int(code) != signal.SIGTERM:  # SIGTERM is how torchrun ends the others
            return int(rank), signal.Signals(-int(code)).name
    death = SIMPLE_DEATH.search(agent_log)
    return (ranks.start, death[1]) if death and ranks.start in silent else None


def _code(record: Mapping[str, Any]) -> int:
    """The recorded code; an error that only says that a peer has gone is 75, whatever exception carried it."""
    code = int(record["code"])
    return LOST if code == 1 and PEER_GONE.search(_error(record)) else code


def _error(record: Mapping[str, Any]) -> str:
    return str(record.get("error") or "").rstrip()


def _recorded(run: RunFolder, record: tuple[int, dict[str, Any]]) -> Outcome:
    rank, facts = record
    text = f"{_error(facts)}\n\nrank {rank} failed first; its log: {run.rank_log(rank)}"
    return Outcome(code=_code(facts), rank=rank, message=text)


def _out_of_memory(run: RunFolder, record: tuple[int, dict[str, Any]]) -> Outcome:
    rank, facts = record
    text = f"{_error(facts)}\n\nrank {rank} ran out of memory; its log: {run.rank_log(rank)}"
    return Outcome(code=LOST, rank=rank, message=text, cause=OUT_OF_MEMORY, doing=facts.get("doing") or {})


def _vanished(run: RunFolder, rank: int, how: str, memory_kill: str | None) -> Outcome:
    """A rank that left no record. Without evidence it counts as lost, whatever the signal; a full disk is evidence."""
    if memory_kill is None and is_full(run.path):
        text = f"error: {run.path}: no space is left on the disk; rank {rank} {how}\n\nhint: free some space, then: make resume RUN={run.name}"
        return Outcome(code=3, rank=rank, message=text)
    why = " (nothing shows that memory was short; see `dmesg`)" if "SIGKILL" in how else ""
    why = f" for want of memory ({memory_kill})" if memory_kill else why
    text = f"error: rank {rank} {how}{why}; all other ranks were stopped\n\nhint: its log: {run.rank_log(rank)}"
    return Outcome(code=LOST, rank=rank, message=text, cause=OUT_OF_MEMORY if memory_kill else None)


def _never_began(run: RunFolder, ranks: range, agent_code: int, agent_log: str) -> Outcome:
    tail = "\n".join(deque(agent_log.splitlines(), maxlen=15))
    log = launcher_log(run, ranks.start)
    text = f"error: the workers did not start (accelerate launch returned {agent_code}); {log} ends with\n{tail}"
    return Outcome(code=1, message=text)


def _tail(path: Path, limit: int = 200_000) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as stream:
        stream.seek(0, os.SEEK_END)
        stream.seek(max(0, stream.tell() - limit))
        return stream.read().decode("utf-8", errors="replace")
