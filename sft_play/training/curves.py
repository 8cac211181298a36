"""TensorBoard: loss and memory per rank, speed, MFU, GPU use, CPU and network of each machine, beside the learning curves."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import TrainerCallback

from sft_play.plan.detect import Shown, all_hidden, gpu_memory, open_nvml, shown_gpus
from sft_play.runs.space import free_bytes

ROOM_BYTES = 2**20
"""With less a new file is not begun."""
NAMES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "tokens_per_second": "speed/tokens_per_second",
    "mfu": "speed/mfu",
}
LISTS = {
    "rank_loss": "rank_loss/{}",
    "rank_tokens": "rank_tokens/{}",
    "rank_memory_gib": "memory/rank{}_gib",
    "node_cpu_percent": "node/{}/cpu_percent",
    "node_memory_gib": "node/{}/memory_gib",
    "node_network_mb_s": "node/{}/network_mb_s",
}
"""What is logged for each rank or machine -> the curve of each."""
READINGS: Mapping[str, Callable[[Any, Shown], float]] = {
    "memory_gib": lambda nvml, gpu: used_bytes(nvml, gpu) / 2**30,
    "utilisation": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu.handle).gpu,
}
"""What is read of each visible GPU: name of the curve -> by `pynvml` and the GPU."""


def used_bytes(nvml: Any, gpu: Shown) -> int:
    """Returns the memory of a GPU that is not free."""
    total, free = gpu_memory(nvml, gpu)
    return total - free


class Curves(TrainerCallback):
    """Writes what is logged as scalars into `tb/`; a resumed run goes on where its checkpoint was.

    What the disk has no room for is left out (`metrics.jsonl` has it later), and a new file is begun when there is some again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writer: Any = None
        self.nvml: Any = None
        self.gpus: list[Shown] = []
        self.readings = dict(READINGS)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter

        with contextlib.suppress(Exception):  # of many kinds, and a curve is never worth a run
            self.nvml = None if all_hidden() else open_nvml()
            self.gpus = shown_gpus(self.nvml)[0] if self.nvml else []
        _keep_quiet()
        put_in_order(self.folder)
        self.writer = SummaryWriter(str(self.folder), purge_step=state.global_step + 1 if state.global_step else 0)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if not logs:
            return
        try:
            self._write(logs, state.global_step)
        except OSError:  # the library's own thread has ended with it: this writer is of no use any more
            self._lose_writer()

    def _write(self, logs: dict[str, Any], step: int) -> None:
        if self.writer is None:
            if free_bytes(self.folder.parent) < ROOM_BYTES:
                return
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(self.folder))
        for name, value in logs.items():
            if name in NAMES and value is not None:
                self.writer.add_scalar(NAMES[name], value, step)
            elif name.startswith("eval_") and isinstance(value, (int, float)):
                self.writer.add_scalar(f"eval/{name.removeprefix('eval_')}", value, step)
        for name, curve in LISTS.items():
            for index, value in enumerate(logs.get(name, [])):
                self.writer.add_scalar(curve.format(index), value, step)
        if "loss" in logs:
            self._devices(step)
        # A process that is killed takes along what it has not written, and a checkpoint may follow: its steps are never made again.
        self.writer.flush()

    def _devices(self, step: int) -> None:
        """Asks the driver, not torch, which would take some hundred MiB of every card that it is asked about (pytorch#86493)."""
        for name, read in list(self.readings.items()):
            try:
                for place, gpu in enumerate(self.gpus):
                    self.writer.add_scalar(f"gpu/{place}/{name}", read(self.nvml, gpu), step)
            except OSError:
                raise
            except Exception as error:  # noqa: BLE001 - NVML's errors are of many kinds, and a curve is never worth a run
                del self.readings[name]
                print(f"note: no curve `gpu/.../{name}` from step {step} on: {error}", file=sys.stderr)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.writer is not None:
            with contextlib.suppress(OSError):
                self.writer.close()

    def _lose_writer(self) -> None:
        writer, self.writer = self.writer, None
        if writer is not None:  # it may be that none could be begun
            with contextlib.suppress(OSError):
                writer.close()


def _keep_quiet() -> None:
    """Keeps the trace of the library's own thread off the console when a disk is full: its error comes again at the next value."""
    before = threading.excepthook

    def said(problem: threading.ExceptHookArgs) -> None:
        if type(problem.thread).__name__ != "_AsyncWriterThread" or not issubclass(problem.exc_type, OSError):
            before(problem)

    threading.excepthook = said


# The order of TensorBoard's event files, which goes by the times in their names.


NAME = re.compile(r"events\.out\.tfevents\.(\d+)\.(.*)")


def put_in_order(folder: Path) -> None:
    """Gives event files an older time in their names where the clock has been set back since they were written.

    A resumed run's file says which steps of the files before it are void: read before them, it would be void itself.
    """
    found = [(path, match) for path in sorted(folder.glob("events.out.tfevents.*")) if (match := NAME.fullmatch(path.name))]
    if not any(int(match[1]) >= int(time.time()) for _, match in found):
        return
    for number, (path, match) in enumerate(found):
        path.rename(path.with_name(f"events.out.tfevents.{number:010d}.{match[2]}"))


# What each process and each machine of a run uses: sent along with the losses of a logging step, for the curves.


NODE = ("cpu_percent", "memory_gib", "network_mb_s")
"""Of a machine: CPU and memory in use, and what all interfaces but loopback sent and received, in MB/s."""


def peak_memory_bytes() -> int:
    """Returns this process's highest memory so far: allocated on its GPU, else resident."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Readings:
    """Reads this process, and in the first process of a machine also the machine, since the last reading."""

    def __init__(self) -> None:
        self._first = os.environ.get("LOCAL_RANK", "0") == "0"
        self._then, self._moved = time.perf_counter(), _network_bytes()
        psutil.cpu_percent()  # counts from now on

    def read(self) -> list[float]:
        """Returns the process's peak in GiB, then `NODE`; NaN for each of these in all but a machine's first process."""
        own = [peak_memory_bytes() / 2**30]
        if not self._first:
            return own + [math.nan] * len(NODE)
        now, moved = time.perf_counter(), _network_bytes()
        speed = (moved - self._moved) / 1e6 / max(now - self._then, 1e-9)
        self._then, self._moved = now, moved
        return [*own, psutil.cpu_percent(), psutil.virtual_memory().used / 2**30, speed]


def as_logs(ranks: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Returns the readings of all ranks by name: `rank_...` by rank, `node_...` by machine, in the order of their ranks."""
    nodes = [row[1:] for row in ranks if not math.isnan(row[1])]
    columns = zip(*nodes, strict=True)
    return {"rank_memory_gib": [row[0] for row in ranks]} | {
        f"node_{name}": list(c) for name, c in zip(NODE, columns, strict=True)
    }


def _network_bytes() -> int:
    found = psutil.net_io_counters(pernic=True)
    return sum(one.bytes_sent + one.bytes_recv for name, one in found.items() if not name.startswith("lo"))
