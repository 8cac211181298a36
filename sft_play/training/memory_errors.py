"""Out of memory in a worker: telling it from other errors, and what the worker was doing. Standard library only."""

from __future__ import annotations

import errno
import re
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Literal

TEXTS = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|not enough memory: you tried to allocate"  # torch on a CPU
    r"|(CUDA|HIP|XPU|MPS backend)( driver)?( error:)? out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY"  # torch, CUDA
    r"|(CUBLAS|CUDNN|CUSPARSE|CUSOLVER|CUFFT)_STATUS_(INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED|ALLOC_FAILED)"
    r"|NCCL[\s\S]*(Failed to CUDA (host )?(c|m)alloc|Cuda failure[^\n]*out of memory|Cuda failure 2\b)"
    r"|Triton Error \[CUDA\]: out of memory|NVML_SUCCESS == r INTERNAL ASSERT FAILED at \S*CUDACachingAllocator"  # asked for its own message
    r"|std::bad_alloc|could not create a memory|Cannot allocate memory|unable to (m)?map \d+ bytes"
)
"""What torch, CUDA's libraries, NCCL, Triton, C++ and the system say when an allocation fails."""
AMBIGUOUS = re.compile(
    r"(CUBLAS|CUDNN)_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR)|unable to find an engine to execute this computation"
    r"|CUDA( driver)? error: (device not ready|unknown error)"  # WSL2
)
"""What they say for want of memory, and for other reasons too: it counts on a GPU that is full."""
FULL = 0.02
"""Share of a GPU's memory; with less free, it is full."""

Phase = Literal["loading", "training", "updating", "evaluating", "saving", "leaving"]


@dataclass(kw_only=True, slots=True)
class Activity:
    """What a worker is doing; kept up to date by the trainer, so that an error can say it."""

    phase: Phase = "loading"
    step: int | None = None
    """Optimizer step, counted from 1."""
    micro_step: int | None = None
    """Micro-step within it, counted from 1."""
    rows: list[int] = field(default_factory=list)
    """Row ids of the micro-batch."""
    micro_batch: int | None = None
    """Rows (with packing: packs) that this rank has at a time by shares that were found while training; `None` with the plan's."""
    since: float = field(default_factory=time.monotonic)
    """When the training thread was last seen to get on (monotonic seconds)."""
    longest_step: float = 0.0
    """Seconds of the longest optimizer step so far."""
    _begun: float | None = None
    """When this step began; `None` outside one."""

    def enter(self, phase: Phase, *, step: int | None = None) -> None:
        """Begins another phase."""
        now = time.monotonic()
        if phase == "training":
            self._begun = now
        elif self._begun is not None:
            self.longest_step = max(self.longest_step, now - self._begun)
            if phase != "updating":
                self._begun = None
        self.phase, self.step, self.micro_step, self.rows, self.since = phase, step, None, [], now

    def next_batch(self, rows: list[int]) -> None:
        """Takes up the next micro-batch."""
        self.micro_step, self.rows, self.since = (self.micro_step or 0) + 1, list(rows), time.monotonic()

    def get_on(self) -> None:
        """Says that the training thread makes progress within what it does."""
        self.since = time.monotonic()

    def __str__(self) -> str:
        words = {
            "loading": "while the model was loaded",
            "training": f"in step {self.step}",
            "updating": f"in the update of step {self.step}",
            "evaluating": f"in the evaluation after step {self.step}",
            "saving": f"while the checkpoint of step {self.step} was written",
            "leaving": "while the rank was leaving",
        }[self.phase]
        if self.micro_step is not None:
            rows = ", ".join(map(str, self.rows[:16])) + (", ..." if len(self.rows) > 16 else "")
            words += f", micro-batch {self.micro_step}" + (f" (row{'s' if len(self.rows) > 1 else ''} {rows})" if rows else "")
        return words

    def facts(self) -> dict[str, Any]:
        """Returns what the rank is at, as plain data."""
        found = {"phase": self.phase, "step": self.step, "micro_step": self.micro_step, "rows": self.rows}
        return found if self.micro_batch is None else found | {"micro_batch": self.micro_batch}


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that it was raised from, says that an allocation failed on a device or in the machine's memory."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, MemoryError) or (isinstance(link, OSError) and link.errno == errno.ENOMEM):
            return True
        if isinstance(link, RuntimeError) and (type(link).__name__ == "OutOfMemoryError" or TEXTS.search(str(link))):
            return True
        if isinstance(link, RuntimeError) and AMBIGUOUS.search(str(link)) and _gpu_is_full():
            return True
        link = link.__cause__
    return False


def _gpu_is_full() -> bool:
    """Whether this process computes on a GPU of which next to nothing is free."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:  # the error has ended the context
        return False
    return bool(free < FULL * total)


def describe(error: BaseException, doing: Activity) -> str:
    """Returns the message of a worker that ran out of memory: where, and the allocator's own first words."""
    words = str(error).strip().splitlines()
    said = f": {words[0][:400]}" if words else ""
    return f"error: memory ran out {doing} ({type(error).__name__}{said})"
