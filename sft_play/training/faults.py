"""The faults of a worker: caught around its program, told apart, recorded for the launcher and said to the user."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TextIO

from sft_play.errors import UserError, causes
from sft_play.files import NO_ROOM, is_full
from sft_play.launch.liveness import MARK
from sft_play.launch.verdict import LOST, PEER
from sft_play.runs.folder import RunFolder
from sft_play.training.process import Activity, launched_world, redirect, reserve
from sft_play.training.requests import StopRequest, code_of

Program = Callable[[StopRequest, "Path | None", "TextIO | None"], int]
"""What a worker does: run and activity (of its request), checkpoint to continue from, console of rank 0 -> exit code."""
IN_ORDER = (0, 130, 143)
"""Codes of a worker that has done its work, or was stopped on request."""
THREAD_SECONDS = 3.0
"""What threads get at the end of a process; a stop that was asked for ends it after 4 s anyhow."""
PEER_GONE = re.compile(
    r"Connection (closed|reset) by (remote )?peer|Socket closed|Connection refused|remote process exited|Broken pipe"
    r"|NCCL.*(timeout|remote error)|Timed out waiting \d+ms|failed to pass monitoredBarrier"
    r"|NCCL communicator was aborted|ncclRemoteError|Watchdog caught collective operation timeout"
)
"""What gloo and NCCL say in a rank whose peer has died."""
FULL = re.compile(r"os error (28|122)\b")
"""What safetensors says: ENOSPC, EDQUOT."""
WRITE_FAILED = re.compile(
    r"No space left on device|PytorchStreamWriter failed|inline_container|file write failed|unexpected pos \d+"
)
"""What torch says, of whatever kept it from writing, shared memory included."""
MEMORY = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|not enough memory: you tried to allocate"  # torch on a CPU
    r"|(CUDA|HIP|XPU|MPS backend)( driver)?( error:)? out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY"  # torch, CUDA
    r"|(CUBLAS|CUDNN|CUSPARSE|CUSOLVER|CUFFT)_STATUS_(INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED|ALLOC_FAILED)"
    r"|NCCL[\s\S]*(Failed to CUDA (host )?(c|m)alloc|Cuda failure[^\n]*out of memory|Cuda failure 2\b)"
    r"|Triton Error \[CUDA\]: out of memory|NVML_SUCCESS == r INTERNAL ASSERT FAILED at \S*CUDACachingAllocator"  # asked for its own message
    r"|std::bad_alloc|could not create a memory|Cannot allocate memory|unable to (m)?map \d+ bytes"
)
"""What torch, CUDA's libraries, NCCL, Triton, C++ and the system say when an allocation fails."""
MEMORY_PERHAPS = re.compile(
    r"(CUBLAS|CUDNN)_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR)|unable to find an engine to execute this computation"
    r"|CUDA( driver)? error: (device not ready|unknown error)"  # WSL2
)
"""What they say when memory is short, and for other reasons too: it counts on a GPU that is full."""
FULL_SHARE = 0.02
"""Share of a GPU's memory; with less free, it is full."""


def contain(program: Program, run: RunFolder, checkpoint: Path | None) -> int:
    """Runs a worker's program and returns its exit code, which the launcher finds recorded with the error."""
    rank, _ = launched_world()
    console = redirect(run.rank_log(rank), rank)
    request = StopRequest(run=run, rank=rank, activity=Activity())
    request.listen()
    record: dict[str, Any] = {"code": 1, "error": ""}
    try:
        reserve(run, rank)
        record["code"] = program(request, checkpoint, console)
    except Exception as problem:  # noqa: BLE001 - the last stop of a worker
        record = verdict(problem, run, request.activity)
        if request.heard is not None and record.get("cause") == PEER:  # a rank that was asked to stop may leave before this one
            record = {"code": code_of(request.heard), "error": ""}
        say(problem, record)
    finally:
        request.finish(record)
    code: int = record["code"]
    if code in IN_ORDER and "torch" in sys.modules:
        from sft_play.training.ranks import leave

        leave()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def verdict(problem: Exception, run: RunFolder, activity: Activity) -> dict[str, Any]:
    """Returns what the launcher learns of an error: exit code, message, and for some the cause."""
    if isinstance(problem, UserError):
        return {"code": problem.exit_code, "error": problem.render(), **getattr(problem, "facts", {})}
    if ran_out_of_disk(problem, run):
        return {"code": 3, "error": describe_full_disk(problem, run), "cause": "disk_full"}
    if ran_out_of_memory(problem):
        said = str(problem).strip().splitlines()
        error = f"error: memory ran out {activity} ({type(problem).__name__}{f': {said[0][:400]}' if said else ''})"
        return {"code": LOST, "error": error, "cause": "out_of_memory", "doing": activity.facts()}
    if isinstance(problem, OSError):
        return {"code": 3, "error": f"error: {problem.filename or run.path}: {problem.strerror or problem}"}
    error = f"{type(problem).__name__}: {problem}"
    return {"code": LOST, "error": error, "cause": PEER} if lost_its_peer(problem) else {"code": 1, "error": error}


def say(problem: Exception, record: dict[str, Any]) -> None:
    """Prints an error: a user's mistake in one line, everything else with its traceback.

    What the launcher says itself, with a worker's words or as the end of the rank that was the cause, goes to the rank's log alone.
    """
    with contextlib.suppress(MemoryError, OSError), contextlib.ExitStack() as stack:  # the record counts, and is written anyhow
        stream: Any = sys.stderr
        if (MARK in os.environ and record["code"] != 1) or record.get("cause", PEER) != PEER:
            log = os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8", errors="replace")
            stream = stack.enter_context(log)
        if not isinstance(problem, UserError):
            traceback.print_exception(problem, file=stream)
        if record["error"].startswith("error: "):
            print(record["error"], file=stream)


def ran_out_of_disk(error: BaseException, run: RunFolder) -> bool:
    """Whether an error, or what it came from, is a write for which the disk had no space."""
    for link in causes(error):
        if isinstance(link, OSError) and link.errno in NO_ROOM:
            return True
        if FULL.search(str(link)) or (WRITE_FAILED.search(str(link)) and is_full(run.path)):
            return True
    return False


def describe_full_disk(error: BaseException, run: RunFolder) -> str:
    """Returns what the user reads."""
    place = (error.filename if isinstance(error, OSError) else None) or run.path
    hint = f"the last checkpoint is as it was; free some space, then: make resume RUN={run.name}"
    return f"error: {place}: no space is left on the disk\n\nhint: {hint}"


def lost_its_peer(error: BaseException) -> bool:
    """Whether an error, or what it came from, only says that another rank has gone.

    torch raises such errors of gloo and NCCL as plain RuntimeErrors or of its own types; a tracker's server that refuses is another's.
    """
    torchs = (link for link in causes(error) if type(link) is RuntimeError or type(link).__module__.startswith("torch"))
    return any(PEER_GONE.search(str(link)) for link in torchs)


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that it was raised from, says that an allocation failed on a device or in the machine's memory."""
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
    except RuntimeError:  # the error has ended the context
        return False
    return bool(free < FULL_SHARE * total)


def end(code: int) -> NoReturn:
    """Ends this process without taking the interpreter down: a thread that then comes back from torch's C++ would abort it.

    Where all went in order, threads that are no daemons get `THREAD_SECONDS`, and exit functions their turn: trackers may have something
    to send. Else peers may hang in a collective operation that this rank has left; the launcher ends them.
    """
    if code in IN_ORDER:
        let_threads_end(THREAD_SECONDS)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def let_threads_end(seconds: float) -> None:
    """Waits for threads that are no daemons; those of executors, which wait for work, are told first that none will come."""
    deadline = time.monotonic() + seconds
    executors = sys.modules.get("concurrent.futures.thread")
    tells = [threading.Thread(target=executors._python_exit, daemon=True)] if executors is not None else []
    for thread in tells:
        thread.start()  # it waits for them without a limit
    alive = [one for one in threading.enumerate() if not one.daemon and one is not threading.current_thread()]
    for thread in [*tells, *alive]:
        thread.join(max(0.0, deadline - time.monotonic()))
