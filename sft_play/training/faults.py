"""Catch and classify a worker's faults, record them for the launcher, report them to the user, and send heartbeats.

A daemon thread tells this machine's launcher every second where the training thread is. A rank is judged by its own
launcher, which can read `/proc`, and a machine by the other launchers (`launch.machines`). A worker whose launcher is
gone exits with code 75; exiting at once leaves nothing half-done, since checkpoints and models are published by rename.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import errno
import faulthandler
import io
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TextIO

import psutil

from sft_play.config.schema import LaunchConfig
from sft_play.errors import RetryableError, UserError, causes
from sft_play.files import NO_ROOM, errno_of, is_full, open_own, write_text
from sft_play.launch.liveness import LIMITS, MARK, STACKS_SIGNAL, Beat, Sender
from sft_play.launch.process import stop_code
from sft_play.launch.verdict import LOST, PEER
from sft_play.runs.folder import RunFolder
from sft_play.text import numbered, tell
from sft_play.training.loading import SHARED_MEMORY_HINT
from sft_play.training.process import Activity, launched_world, leave_record, log_alone, redirect
from sft_play.training.stop_request import StopRequest

Program = Callable[[StopRequest, "Path | None", "TextIO | None"], int]
"""A worker's program: stop request (with run and activity), checkpoint to resume, rank 0's console -> exit code."""
IN_ORDER = (0, 130, 143)
"""Exit codes of a worker that has finished, or was stopped on request."""
THREAD_SECONDS = 3.0
"""Time for threads at the end of a process; a requested stop ends the process after 4 s in any case."""
PEER_GONE = re.compile(
    r"Connection (closed|reset) by (remote )?peer|Socket closed|Connection refused|remote process exited|Broken pipe"
    r"|NCCL.*(timeout|remote error)|Timed out waiting \d+ms|failed to pass monitoredBarrier"
    r"|NCCL communicator was aborted|ncclRemoteError|Watchdog caught collective operation timeout"
)
"""Messages of gloo and NCCL in a rank whose peer has died."""
WRITE_FAILED = re.compile(
    r"No space left on device|PytorchStreamWriter failed|inline_container|file write failed|unexpected pos \d+"
)
"""torch's messages for a failed write of any cause, to shared memory too."""
MEMORY = re.compile(
    # torch on a CPU
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|not enough memory: you tried to allocate"
    # torch and CUDA
    r"|(CUDA|HIP|XPU|MPS backend)( driver)?( error:)? out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY"
    r"|(CUBLAS|CUDNN|CUSPARSE|CUSOLVER|CUFFT)_STATUS_(INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED|ALLOC_FAILED)"
    r"|NCCL[\s\S]*(Failed to CUDA (host )?(c|m)alloc|Cuda failure[^\n]*out of memory|Cuda failure 2\b)"
    # The second: torch failing while it composes its out-of-memory message.
    r"|Triton Error \[CUDA\]: out of memory|NVML_SUCCESS == r INTERNAL ASSERT FAILED at \S*CUDACachingAllocator"
    r"|std::bad_alloc|could not create a memory|Cannot allocate memory|unable to (m)?map \d+ bytes"
)
"""Messages of torch, CUDA's libraries, NCCL, Triton, C++ and the system for a failed allocation."""
MEMORY_PERHAPS = re.compile(
    r"(CUBLAS|CUDNN)_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR)|unable to find an engine to execute this computation"
    r"|CUDA( driver)? error: (device not ready|unknown error)"  # WSL2
)
"""Their messages for short memory and for other causes alike; they count only on a full GPU."""
LOADER_ENDED = re.compile(
    rf"DataLoader worker \(pid \d+\) (?:is killed by signal: ([\w ]+)|exited .* with exit code {errno.ENOSPC}\b)"
)
"""torch's message (2.13, DataLoader.cpp) for a process that loads data: with the words of `strsignal`, or the exit code
of `loading._end_loading`.
"""
LOADER_SECONDS = 1.0
FULL_SHARE = 0.02
"""A GPU is full if less than this share of its memory is free."""


def contain(program: Program, run: RunFolder, checkpoint: Path | None) -> int:
    """Run a worker's program and return its exit code, recorded with the error for the launcher."""
    rank, _ = launched_world()
    console = redirect(run.rank_log(rank), rank)
    request = StopRequest(run=run, rank=rank, activity=Activity())
    request.listen()
    record: dict[str, Any] = {"code": 1, "error": ""}
    try:
        record["code"] = program(request, checkpoint, console)
    except Exception as problem:  # noqa: BLE001 - the outermost handler of a worker
        record = verdict(_end_of_loader(problem), run, request.activity)
        # On a stop request another rank may leave before this one.
        if request.heard is not None and record.get("cause") == PEER:
            record = {"code": stop_code(request.heard), "error": ""}
        print_fault(problem, record)
    finally:
        request.finish(record)
    code: int = record["code"]
    if code in IN_ORDER and "torch" in sys.modules:
        from sft_play.training.ranks import leave

        leave()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _end_of_loader(problem: Exception) -> Exception:
    """Return torch's error for a process that loads data if it is dying, else `problem`, which may be a connection to
    it: torch raises its error by SIGCHLD, at once or while this waits.
    """
    if isinstance(problem, OSError | EOFError) and not getattr(problem, "filename", None):
        try:
            time.sleep(LOADER_SECONDS)
        except RuntimeError as ended:
            return ended
    return problem


def verdict(problem: Exception, run: RunFolder, activity: Activity) -> dict[str, Any]:
    """Return an error's record for the launcher: exit code, message, and for some errors the cause."""
    if isinstance(problem, UserError):
        return {"code": problem.exit_code, "error": problem.render(), **getattr(problem, "facts", {})}
    if ran_out_of_disk(problem, run):
        return {"code": 3, "error": describe_full_disk(problem, run), "cause": "disk_full"}
    if ran_out_of_memory(problem):
        lines = str(problem).strip().splitlines()
        what = f"memory ran out {activity}"  # the log has the allocator's own message
        error = f"error: {what} ({type(problem).__name__}{f': {lines[0][:400]}' if lines else ''})"
        return {"code": LOST, "error": error, "what": what, "cause": "out_of_memory", "doing": activity.facts()}
    if isinstance(problem, OSError):
        return {"code": 3, "error": f"error: {problem.filename or run.path}: {problem.strerror or problem}"}
    if ended := next(filter(None, (LOADER_ENDED.search(str(link)) for link in causes(problem))), None):
        return _loader_ended(ended[1], activity)
    error = f"{type(problem).__name__}: {problem}"
    return {"code": LOST, "error": error, "cause": PEER} if lost_its_peer(problem) else {"code": 1, "error": error}


def _loader_ended(words: str | None, activity: Activity) -> dict[str, Any]:
    """Return the record for a process that loads data and was killed by a signal (`words`), or had no shared memory."""
    if words is None:
        error = "error: /dev/shm: no space is left for batches of the processes that load data"
        return {"code": 3, "error": f"{error}\n\nhint: {SHARED_MEMORY_HINT}"}
    name = next((number.name for number in signal.Signals if signal.strsignal(number) == words), words)
    rank = f"rank {launched_world()[0]} ({socket.gethostname()})"
    what = f"a process that loads data for {rank} was killed by {name} {activity}"
    full = "/dev/shm was full, or " if name == "SIGBUS" else ""
    hint = f"{full}memory ran out (`dmesg`); `train.dataloader_num_workers: 0` starts no such process"
    error = f"error: {what}\n\nhint: {hint}"
    return {"code": LOST, "error": error, "what": what, "cause": "killed", "doing": activity.facts()}


def print_fault(problem: Exception, record: dict[str, Any]) -> None:
    """Print an error: a user's mistake in one line, everything else with its traceback.

    Errors that the launcher reports itself go only to the rank's log.
    """
    # Printing may fail: the record is what counts, and it is written in any case.
    with contextlib.suppress(MemoryError, OSError):
        stream: Any = sys.stderr
        if (MARK in os.environ and record["code"] != 1) or record.get("cause", PEER) != PEER:
            stream = log_alone()
        if not isinstance(problem, UserError):
            traceback.print_exception(problem, file=stream)
        if record["error"].startswith("error: "):
            print(record["error"], file=stream)


def ran_out_of_disk(error: BaseException, run: RunFolder) -> bool:
    """Return whether an error, or one of its causes, is a write for which the disk had no space."""
    links = list(causes(error))
    if any(errno_of(link) in NO_ROOM for link in links):
        return True
    return any(WRITE_FAILED.search(str(link)) for link in links) and is_full(run.path)


def describe_full_disk(error: BaseException, run: RunFolder) -> str:
    """Return the message about a full disk, with its hint."""
    place = (error.filename if isinstance(error, OSError) else None) or run.path
    hint = f"the last checkpoint is intact; free some space, then: make resume RUN={run.typed}"
    return f"error: {place}: no space is left on the disk\n\nhint: {hint}"


def lost_its_peer(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, only means that another rank is gone.

    torch raises such errors of gloo and NCCL as plain RuntimeErrors or as its own types. A connection that a tracker's
    server refuses raises neither, so it does not count.
    """
    torchs = (link for link in causes(error) if type(link) is RuntimeError or type(link).__module__.startswith("torch"))
    return any(PEER_GONE.search(str(link)) for link in torchs)


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one that it was raised from, is a failed allocation on a device or the host."""
    for link in causes(error, handled=False):
        if isinstance(link, MemoryError) or (isinstance(link, OSError) and link.errno == errno.ENOMEM):
            return True
        if not isinstance(link, RuntimeError):
            continue
        if type(link).__name__ == "OutOfMemoryError" or MEMORY.search(str(link)):
            return True
        if MEMORY_PERHAPS.search(str(link)) and _gpu_is_full():
            return True
    return False


def _gpu_is_full() -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:  # the error has destroyed the CUDA context
        return False
    return bool(free < FULL_SHARE * total)


def end(code: int) -> NoReturn:
    """End this process without finalising the interpreter, which a thread that returns from torch's C++ would abort.

    After an orderly end, non-daemon threads get `THREAD_SECONDS` and exit functions run, since trackers may still have
    something to send. Otherwise peers may hang in a collective that this rank has left; the launcher ends them.
    """
    if code in IN_ORDER:
        let_threads_end(THREAD_SECONDS)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def let_threads_end(seconds: float) -> None:
    """Wait for non-daemon threads, after shutting down the executors whose threads wait for work."""
    deadline = time.monotonic() + seconds
    executors = sys.modules.get("concurrent.futures.thread")
    shutdowns = [threading.Thread(target=executors._python_exit, daemon=True)] if executors is not None else []
    for shutdown in shutdowns:
        shutdown.start()  # in a thread, since it waits for the executors without a limit
    me = threading.current_thread()
    alive = [thread for thread in threading.enumerate() if not thread.daemon and thread is not me]
    for thread in [*shutdowns, *alive]:
        thread.join(max(0.0, deadline - time.monotonic()))


# ---- Heartbeats

PATIENCE = {"loading": (3600.0, 6.0), "saving": (1800.0, 3.0), "evaluating": (1800.0, 3.0), "leaving": (1800.0, 3.0)}
"""Phase other than a step -> least seconds without progress, multiple of a step's patience; the larger counts."""
LEAST_SECONDS, STEPS = 600.0, 10.0
TRACE_SECONDS, TRACE_SHARE = 5.0, 0.1
"""How long before its patience ends a rank reports its collectives, so that the launchers know them when they judge:
seconds, or a share of the patience if that is longer, but never before half of it.
"""


def patience(phase: str, typed: float | None, longest_step: float) -> float:
    """Return the seconds that a training thread may make no progress; `typed` is `launch.hang_seconds`, if a number."""
    step = max(LEAST_SECONDS, STEPS * longest_step) if typed is None else typed
    fixed, times = PATIENCE.get(phase, (0.0, 1.0))
    return max(fixed, times * step)


class NotJoined(RetryableError):
    """Some ranks did not join, or not in time."""

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.facts = {"cause": "not_joined", "blames": rank}
        """Entries of the exit record in addition to code and error."""


class Heartbeat:
    """A worker's heartbeat thread, which ends with the process: `begin`, then `join` once the plan is known."""

    def __init__(self, run: RunFolder, activity: Activity) -> None:
        self.run, self.activity = run, activity
        self.rank, self.world = launched_world()
        self.host = socket.gethostname()
        self.hang_seconds: float | None = None
        self._sender = Sender(os.environ.get(MARK))
        self._parent = os.getppid()
        self._stacks: TextIO | None = None
        self.over = False
        """Whether the training thread has finished, or has failed and reports that itself."""

    def begin(self) -> None:
        """Start sending heartbeats, and dump this process's stacks on request."""
        path = self.run.rank_stack(self.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stacks = io.TextIOWrapper(open_own(path), encoding="utf-8", line_buffering=True)
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True)
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def join(self, launch: LaunchConfig) -> None:
        """Wait until every rank has joined. Raise `NotJoined`, naming those that did not."""
        self.hang_seconds = None if isinstance(launch.hang_seconds, str) else float(launch.hang_seconds)
        if self.world > 1 and "MASTER_ADDR" in os.environ:
            roll_call(self.rank, self.host, self.world, launch.timeout_seconds)

    def _now(self) -> Beat:
        doing = self.activity
        quiet, limit = time.monotonic() - doing.since, patience(doing.phase, self.hang_seconds, doing.longest_step)
        stands = quiet > max(limit / 2, limit - max(TRACE_SECONDS, TRACE_SHARE * limit))
        return Beat(
            rank=self.rank,
            host=self.host,
            pid=os.getpid(),
            phase=doing.phase,
            step=doing.step,
            micro_step=doing.micro_step,
            quiet=quiet,
            limit=limit,
            longest_step=doing.longest_step,
            collectives=collectives_begun() if stands else None,
        )

    def _beat(self) -> None:
        traced = 0.0
        while True:
            beat = self._now()
            if not self._sender.send(beat):
                self._leave("the launcher is gone")
            since = self.activity.since
            if beat.collectives is not None and traced != since:
                traced = since
                with contextlib.suppress(OSError):  # after the heartbeat, since a lost GPU may never answer
                    keep_trace(self.run.rank_collectives(self.rank))
            # With a working sender the launcher notices that itself, and may wait for a save.
            if not self._sender.works and os.getppid() != self._parent:
                self._leave("the process that started this rank is gone")
            time.sleep(LIMITS.tick)

    def _leave(self, text: str) -> None:
        """Record the reason, end this process's children, then this process. Does not return."""
        if not self.over and not self.run.rank_exit(self.rank).exists():
            with contextlib.suppress(OSError):
                leave_record(self.run, self.rank, {"code": LOST, "error": text, "cause": "agent", "blames": None})
        with contextlib.suppress(OSError, ValueError):
            tell(f"error: {text}; rank {self.rank} exits")
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        os._exit(LOST)


def roll_call(rank: int, host: str, world: int, timeout_seconds: float) -> None:
    """Wait until all ranks have joined. Raise `NotJoined`, naming those that have not."""
    from torch import distributed

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = datetime.timedelta(seconds=timeout_seconds)
    served = distributed.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
    store = distributed.PrefixStore("sft_play", served)
    store.set(f"here/{rank}", host)
    try:
        store.wait([f"here/{peer}" for peer in range(world)], timeout)
    except RuntimeError as error:  # the wait timed out, or the store is gone
        here = {peer: store.get(f"here/{peer}").decode() for peer in range(world) if store.check([f"here/{peer}"])}
        missing = [peer for peer in range(world) if peer not in here]
        if not missing:
            raise
        there = ", ".join(f"{peer} ({name})" for peer, name in here.items())
        limit = f"{timeout_seconds:g} s (`launch.timeout_seconds`)"
        text = f"{numbered('rank', missing)} of {world} did not join within {limit}; joined: {there}"
        raise NotJoined(text, rank=missing[0]) from error


@contextlib.contextmanager
def show_life(run: RunFolder, activity: Activity) -> Iterator[Heartbeat]:
    """Send heartbeats while the body runs."""
    heart = Heartbeat(run, activity)
    heart.begin()
    try:
        yield heart
    finally:
        heart.over = True
    activity.enter("leaving", step=activity.step)


DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Functions of `torch._C._distributed_c10d` that return its flight recorder as JSON: in NCCL builds, and in all."""


def collectives_begun() -> int | None:
    """Return how many collectives this rank has enqueued in all process groups, or `None` if torch does not report."""
    each = [dump["pg_status"].values() for dump in _dumps(entries=False)]
    return max((sum(int(group["last_enqueued_collective"]) for group in groups) for groups in each), default=None)


def keep_trace(path: Path) -> None:
    """Write the last collectives of this rank, with their sizes and states, as JSON, if there are any."""
    if trace := next(iter(_dumps(entries=True)), None):
        write_text(path, json.dumps(trace) + "\n")


def _dumps(*, entries: bool) -> list[dict[str, Any]]:
    """Return the dumps that contain process groups, from memory, since torch's own files are pickles."""
    module = sys.modules.get("torch._C._distributed_c10d")
    functions = [getattr(module, name) for name in DUMPS if hasattr(module, name)]
    dumps = [json.loads(function(includeCollectives=entries, onlyActive=False)) for function in functions]
    return [dump for dump in dumps if dump.get("pg_status")]
