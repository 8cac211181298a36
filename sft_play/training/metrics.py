"""Measure a training and write `metrics.jsonl` and progress lines, each step once, also after a resume.

Measured are the seconds of a step by phase, and what each rank uses of its device, its process and its machine.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import psutil
import torch
from torch import Tensor
from transformers import TrainerCallback

from sft_play.files import append_text, disk_problem, finite, read_json_lines, sync_path, write_text
from sft_play.plan.detect import Shown, all_hidden, gpu_memory, open_nvml, shown_gpus
from sft_play.runs.progress import line_of
from sft_play.text import tell

TRAIN_KEYS = ("loss", "grad_norm", "learning_rate", "tokens_per_second", "step_seconds", "mfu", "rank_", "node_")
"""Beginnings of the logged keys of a training row; those of each rank or machine begin with `rank_` or `node_`."""


def rows_until(path: Path, step: int) -> list[dict[str, Any]]:
    """Return the complete rows of a file up to and including `step`, without a torn last line."""
    return [row for row in read_json_lines(path) if isinstance(row.get("step"), int) and row["step"] <= step]


def drop_later_rows(path: Path, step: int) -> None:
    """Remove the rows after `step` from a file, since a resumed run repeats them; a run that starts over keeps none."""
    rows = rows_until(path, step) if step else []
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


class MetricsFile(TrainerCallback):
    """Append what is logged to `metrics.jsonl`, and drop rows of steps that a resumed run repeats."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._warned = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        drop_later_rows(self.path, state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        kind = "train" if "rank_loss" in logs else "eval" if "eval_loss" in logs else None
        if kind is not None:
            row = {"kind": kind, "step": state.global_step, "epoch": logs.get("epoch")}
            own = TRAIN_KEYS if kind == "train" else ("eval_",)
            self.add(row | {name: finite(value) for name, value in logs.items() if name.startswith(own)})

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row; on a full disk it is lost, with one warning until a row is written again."""
        try:
            append_text(self.path, json.dumps(row, ensure_ascii=False) + "\n", sync=False)
        except OSError as error:
            if not self._warned:
                lost = "rows are lost until there is space; training continues"
                tell(f"warning: {self.path}: {disk_problem(error)}; {lost}")
            self._warned = True
        else:
            self._warned = False

    def sync(self) -> None:
        """Sync the rows to disk, so that a checkpoint that survives a power cut has the rows of its steps."""
        with contextlib.suppress(FileNotFoundError):
            sync_path(self.path)
            sync_path(self.path.parent)


SECONDS_BETWEEN_LINES = 10.0


class Progress(TrainerCallback):
    """Write a progress line now and then to log and console; with the launcher's panel, the latter gets evaluations."""

    def __init__(self, console: TextIO | None, log: TextIO, *, panel: bool = False) -> None:
        self.console, self.log, self.panel = console, log, panel
        """The rank's log without the console."""
        self.last_line = 0.0
        self.rows: deque[dict[str, Any]] = deque(maxlen=51)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.last_line = 0.0
        self.rows.clear()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        row = {**logs, "step": state.global_step}
        if "rank_loss" in row:
            self.rows.append(row | {"kind": "train"})
            if (
                len(self.rows) == 1
                or state.global_step == state.max_steps
                or time.monotonic() - self.last_line >= SECONDS_BETWEEN_LINES
            ):
                self.last_line = time.monotonic()
                self._write(line_of(self.rows, state.max_steps), [self.log] if self.panel else [self.log, self.console])
        elif "eval_loss" in row:
            self._write(line_of([row | {"kind": "eval"}], state.max_steps), [self.log, self.console])

    def _write(self, text: str, streams: Sequence[TextIO | None]) -> None:
        for stream in streams:
            if stream is not None:
                stream.write(text + "\n")
                stream.flush()


PHASES = ("data", "forward", "backward", "communication", "optimizer")
"""Phases of a step: waiting for rows, the rank's own passes, waiting for other ranks, the update. Under ZeRO-3 and
FSDP2, where ranks communicate inside every layer, the passes include that communication.
"""
UNRESOLVED = 1024
"""Most GPU events that wait to be read."""


class Stopwatch:
    """Measure this rank's seconds by phase, rows, tokens and micro-steps since the process started.

    A backward pass counts as ended when all gradients of this rank are computed: the pass queues our callback before
    DDP queues the one that waits for the all-reduces. On a GPU, events on its stream are compared later, so that
    nothing waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._phase, self._since = "", self._now()
        self._passed: list[tuple[str, Any]] = []

    def enter(self, phase: str) -> None:
        """End the current phase and begin another; time in the unnamed phase belongs to no step."""
        now = self._now()
        if isinstance(now, float):
            self._sums[self._phase] += now - self._since
        else:
            self._passed.append((self._phase, self._since))
            if len(self._passed) > UNRESOLVED:
                self._resolve(now)
        self._phase, self._since = phase, now

    def begin(self, batch: Mapping[str, Any]) -> None:
        """Call before the forward pass of a micro-step; one without rows counts as communication."""
        if batch["rows"]:
            self._sums["rows"] += len(batch["rows"])
            self._sums["tokens"] += batch["input_ids"].numel()
            self._sums["micro_steps"] += 1
        self.enter("forward" if batch["rows"] else "communication")

    def passed(self, loss: Tensor) -> None:
        """Call with the loss when the forward pass has ended and its backward pass comes next."""
        if self._phase == "forward":
            self.enter("backward")
            if loss.requires_grad:
                loss.register_hook(self._queue)

    def computed(self) -> None:
        """Call in the backward pass when this rank has all its gradients and starts to wait for other ranks."""
        if self._phase == "backward":
            self.enter("communication")

    def totals(self) -> dict[str, float]:
        """Return the seconds of all ended phases, and `rows`, `tokens` (padding included) and `micro_steps`."""
        if self._passed:
            self._resolve(self._since)
        return dict(self._sums)

    def _queue(self, _: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self.computed)

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _resolve(self, last: Any) -> None:
        last.synchronize()
        ends = [begun for _, begun in self._passed[1:]] + [last]
        for (phase, begun), ended in zip(self._passed, ends, strict=True):
            self._sums[phase] += begun.elapsed_time(ended) / 1000
        self._passed = []


class Lap:
    """A reader of a stopwatch that returns what was measured since its last call."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch, self._before = watch, watch.totals()

    def take(self) -> defaultdict[str, float]:
        """Return `Stopwatch.totals` less those of the last call."""
        before, self._before = self._before, self._watch.totals()
        return defaultdict(float, {name: value - before.get(name, 0.0) for name, value in self._before.items()})


SECONDS_BETWEEN_SAMPLES = 1.0
SLOWED = 0x8 | 0x20 | 0x40 | 0x80
"""NVML's reasons for a lower clock that are faults: hardware slowdown, heat (software and hardware), power brake. The
power cap is not among them: every busy GPU reaches it.
"""


def used_bytes(nvml: Any, gpu: Shown) -> int:
    """Return the memory of a GPU that is in use, by any program."""
    total, free = gpu_memory(nvml, gpu)
    return total - free


SAMPLES: Mapping[str, Callable[[Any, Shown], float]] = {
    "device_gib": lambda nvml, gpu: used_bytes(nvml, gpu) / 2**30,
    "utilisation": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu.handle).gpu,
    "temperature": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu.card, nvml.NVML_TEMPERATURE_GPU),
    "power_watts": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu.card) / 1000,
    "throttled": lambda nvml, gpu: 100.0 * bool(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu.card) & SLOWED),
}
"""Samples of this rank's GPU: GiB used by all programs, percent, degrees Celsius, watts, percent of samples."""


class Sampler:
    """Ask the driver about one GPU, not torch, which would take some hundred MiB of it (pytorch#86493).

    It runs in a thread, because a driver may be slow.
    """

    def __init__(self, place: int) -> None:
        self.place = place
        self.samples = dict(SAMPLES)
        self._sums: dict[str, list[float]] = {}
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start sampling."""
        threading.Thread(target=self._run, name="readings", daemon=True).start()

    def take(self) -> dict[str, float]:
        """Return the mean of each reading since the last call."""
        with self._lock:
            sums, self._sums = self._sums, {}
        return {name: sum(values) / len(values) for name, values in sums.items()}

    def _run(self) -> None:
        try:
            nvml = None if all_hidden() else open_nvml()
            gpus = shown_gpus(nvml)[0] if nvml else []
        except Exception as error:  # noqa: BLE001 - errors are of many kinds, and a curve is never worth a run
            tell(f"note: the GPU cannot be sampled: {error}")
            return
        while gpus and self.samples:
            self.look(nvml, gpus[self.place % len(gpus)])
            time.sleep(SECONDS_BETWEEN_SAMPLES)

    def look(self, nvml: Any, gpu: Shown) -> None:
        """Take each sample once; a sample that fails is not taken again."""
        for name, read in list(self.samples.items()):
            try:
                value = float(read(nvml, gpu))
            except Exception as error:  # noqa: BLE001 - NVML's errors are of many kinds
                del self.samples[name]
                tell(f"note: `{name}` of GPU {gpu.number} is not sampled any more: {error}")
                continue
            with self._lock:
                self._sums.setdefault(name, []).append(value)


OWN = ("memory_gib", "reserved_gib", "resident_gib", "cpu_percent", *SAMPLES)
"""Readings of a process: its device memory at peak, torch's reserved memory there, its host memory, its CPU use (100 is
one core).
"""
NODE = ("cpu_percent", "memory_gib", "network_mb_s")
"""Readings of a machine: CPU and memory in use, and MB/s sent and received by all interfaces except loopback."""


def peak_memory_bytes() -> int:
    """Return this process's peak memory: allocated on its GPU, or resident without one."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    with contextlib.suppress(OSError):  # proc(5); `ru_maxrss` begins with what the parent held
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        if peak := re.search(r"VmHWM:\s*(\d+) kB", status):
            return int(peak[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_peak() -> None:
    """Measure `peak_memory_bytes` from now on, without what loading took: on a CPU also pages of the weights' files."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError):  # as on macOS, or where /proc may only be read
        Path("/proc/self/clear_refs").write_text("5")  # proc(5)


class Readings:
    """Read this process, and in the first process of a machine also the machine, since the last reading."""

    def __init__(self) -> None:
        place = int(os.environ.get("LOCAL_RANK", "0"))
        self._first, self._process = place == 0, psutil.Process()
        self._then, self._spent = time.perf_counter(), time.process_time()
        self._moved = _network_bytes() if place == 0 else 0
        psutil.cpu_percent()  # starts the measurement
        self._sampler = Sampler(place) if torch.cuda.is_available() else None
        if self._sampler:
            self._sampler.start()

    def read(self) -> list[float]:
        """Return `OWN`, then `NODE`: NaN for unknown readings, and for `NODE` except in a machine's first process."""
        now, spent = time.perf_counter(), time.process_time()
        seconds = max(now - self._then, 1e-9)
        readings = {
            "memory_gib": peak_memory_bytes() / 2**30,
            "resident_gib": self._process.memory_info().rss / 2**30,
            "cpu_percent": 100 * (spent - self._spent) / seconds,
        }
        if self._sampler:
            readings |= {"reserved_gib": torch.cuda.memory_reserved() / 2**30, **self._sampler.take()}
        self._then, self._spent = now, spent
        own = [readings.get(name, math.nan) for name in OWN]
        if not self._first:
            return own + [math.nan] * len(NODE)
        moved = _network_bytes()
        speed, self._moved = (moved - self._moved) / 1e6 / seconds, moved
        return [*own, psutil.cpu_percent(), psutil.virtual_memory().used / 2**30, speed]


def as_logs(ranks: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return the readings of all ranks by name: `rank_...` by rank, `node_...` by machine, in rank order.

    A reading that no rank has is omitted; otherwise it is NaN for the ranks without it.
    """
    own = {f"rank_{name}": column for name, column in zip(OWN, zip(*ranks, strict=True), strict=False)}
    nodes = zip(*(row[len(OWN) :] for row in ranks if not math.isnan(row[len(OWN)])), strict=True)
    columns = own | {f"node_{name}": column for name, column in zip(NODE, nodes, strict=True)}
    return {
        name: [figures(value) for value in column]
        for name, column in columns.items()
        if not all(map(math.isnan, column))
    }


def figures(value: float) -> float:
    """Round a reading to four significant figures."""
    return float(f"{value:.4g}")


def _network_bytes() -> int:
    interfaces = psutil.net_io_counters(pernic=True)
    return sum(
        counters.bytes_sent + counters.bytes_recv for name, counters in interfaces.items() if not name.startswith("lo")
    )
