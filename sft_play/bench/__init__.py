"""`make bench`: what this machine does, beside what the plan expects, kept as calibration for the forecast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from statistics import median
from typing import TYPE_CHECKING, Any

from sft_play.bench.steps import Steps, settings, tell, train_some
from sft_play.config.sources import preset_path
from sft_play.errors import HardwareError
from sft_play.launch.environment import DROPPED, SCRUBBED, visible_cards, without_peer_to_peer
from sft_play.launch.network import free_port, loopback_interface
from sft_play.plan.calibration import Calibration, Link, StepFit, fit_line, read_calibration, spread
from sft_play.plan.detect import detect
from sft_play.plan.exchange import exchange_seconds, link_bytes_per_second, link_of
from sft_play.plan.hardware import GIB, Device, Hardware
from sft_play.plan.scratch import label
from sft_play.plan.throughput import (
    CPU_BANDWIDTH,
    Data,
    describe_work,
    flops_per_token,
    forecast,
    optimizer_seconds,
)
from sft_play.plan.torch_check import require_usable

if TYPE_CHECKING:
    from sft_play.config.call import Call
    from sft_play.launch.options import CommandStrategy

TIMEOUT_SECONDS = 300
BUSY, NOISY = 0.5, 0.1
"""Share of the machine that others may use, and spread of the steps, before the figures are called doubtful."""
PACKAGES = ("sft-play", "torch", "transformers", "peft")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table."""

    what: str
    unit: str
    measured: float
    expected: float | None = None
    """By the plan before this measurement; `None` where it expects nothing."""

    @property
    def ratio(self) -> float | None:
        """Measured over expected."""
        return self.measured / self.expected if self.expected else None


@dataclass(kw_only=True, slots=True)
class Result:
    """What one `make bench` found."""

    device: str
    rows: list[Row] = field(default_factory=list)
    path: str = ""
    notes: list[str] = field(default_factory=list)
    """What speaks against the figures."""
    fit: StepFit | None = None


def main(call: Call) -> int:
    """Measures, keeps the calibration, prints the table, and returns 0."""
    started = time.perf_counter()
    call = replace(call, options={"CONFIG": str(preset_path("quickstart")), **call.options})
    hardware, processes = detect(), call.integer("NUM_GPUS", minimum=1)
    several = (processes or (len(hardware.devices) if hardware.kind == "cuda" else 1)) > 1
    command: CommandStrategy = "auto" if several else "single"
    overrides = settings(call, command)  # mistakes are told before anything is measured
    result = Result(device=hardware.devices[0].name)
    before = read_calibration(hardware.devices[0].name)
    if hardware.kind == "cuda":
        used = range(processes or len(hardware.devices))
        require_usable(hardware, used, os.environ | gpus_of(hardware, used))
    note_load(hardware, result)
    tell("measuring products of matrices and copies")
    found = {device.name: measure_device(hardware, device, index, result) for index, device in _kinds(hardware)}
    # Two processes on a CPU unless told: so much the all-reduce of the first distributed run is known.
    ranks = processes or (2 if hardware.kind == "cpu" else len(hardware.devices))
    if ranks > 1:
        tell(f"measuring an all-reduce between {ranks} processes")
        links = measure_links(hardware, ranks, result)
        found = {name: replace(one, links=links) for name, one in found.items()}
    tell(f"training some steps of {call.options['CONFIG']}")
    steps = train_some(call, command, overrides)
    for name, one in found.items():
        old = read_calibration(name)
        found[name] = old.joined(one) if old else one
    calibration = found[hardware.devices[0].name]
    result.fit = fit_steps(steps, hardware, calibration)
    if result.fit.spread > NOISY:
        result.notes.append(f"steps of the same work differ by {result.fit.spread:.0%}: measure again on a quiet machine")
    result.rows += training_rows(steps, hardware, before, calibration.with_fit(result.fit))
    for one in found.values():
        path = one.with_fit(result.fit).save()
        result.path = result.path or str(path)
    seconds = time.perf_counter() - started
    print(json.dumps(as_json(result, hardware, seconds), indent=2) if call.json else as_text(result, steps, seconds))
    return 0


def note_load(hardware: Hardware, result: Result) -> None:
    """Notes other programs at work: threads of one product that wait for a shared core make it many times slower."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > BUSY * hardware.cpu_threads:
        result.notes.append(f"other programs keep {load:.1f} of {hardware.cpu_threads} threads busy: the figures are too low")
        tell(result.notes[-1])


def _kinds(hardware: Hardware) -> list[tuple[int, Device]]:
    """Returns the first device of each name with its index."""
    found: dict[str, tuple[int, Device]] = {}
    for index, device in enumerate(hardware.devices):
        found.setdefault(device.name, (index, device))
    return list(found.values())


def measure_device(hardware: Hardware, device: Device, index: int, result: Result) -> Calibration:
    """Returns a device's products and copies, and adds their rows."""
    words = ["-m", "sft_play.bench.device", hardware.kind]
    value = _children([words], hardware.cpu_threads, gpus_of(hardware, [index]))[0]
    label = f" ({device.name})" if len(hardware.devices) > 1 else ""
    for size, flops in value["matmul"].items():
        largest = size == list(value["matmul"])[-1]
        expected = device.peak_flops if largest else None
        result.rows.append(Row(what=f"matmul {size}, {value['dtype']}{label}", unit="TFLOP/s", measured=flops / 1e12,
                               expected=expected / 1e12 if expected else None))  # fmt: skip
    expected = device.bandwidth or (CPU_BANDWIDTH if hardware.kind == "cpu" else None)
    result.rows.append(Row(what=f"memory, copy{label}", unit="GB/s", measured=value["bandwidth"] / 1e9,
                           expected=expected / 1e9 if expected else None))  # fmt: skip
    return Calibration(
        device=device.name, kind=hardware.kind, threads=hardware.cpu_threads, measured=today(), bandwidth=value["bandwidth"],
        versions={name: version(name) for name in PACKAGES}, matmul_flops=value["matmul"],
    )  # fmt: skip


def measure_links(hardware: Hardware, ranks: int, result: Result) -> dict[str, Link]:
    """Returns the all-reduce between `ranks` processes as a line, and adds its rows."""
    backend = "nccl" if hardware.kind == "cuda" else "gloo"
    port = str(free_port())
    words = [["-m", "sft_play.bench.reduce", str(rank), str(ranks), port, backend] for rank in range(ranks)]
    times = _children(words, max(1, hardware.cpu_threads // ranks), gpus_of(hardware, range(ranks)))[0]
    prior = link_bytes_per_second(replace(hardware, network_bytes_per_second=None), hardware.devices)
    factor = 2 * (ranks - 1) / ranks
    points = [(factor * int(size), seconds) for size, seconds in times.items()]
    for (moved, seconds), size in zip(points, times, strict=True):
        result.rows.append(Row(what=f"all-reduce {int(size) >> 20} MB, {backend}, {ranks} ranks", unit="ms", measured=1e3 * seconds,
                               expected=1e3 * moved / prior if prior else None))  # fmt: skip
    latency, speed = fit_line(points)
    return {backend: Link(ranks=ranks, latency_seconds=latency, bytes_per_second=speed)}


def gpus_of(hardware: Hardware, indices: Sequence[int]) -> dict[str, str]:
    """Returns the variables of a measurement on these devices, as a launch on them has."""
    if hardware.kind == "cpu":
        return {}
    peers = without_peer_to_peer([hardware.devices[index].name for index in indices])
    ours = {name: value for name, value in peers.items() if name not in os.environ}
    return ours | visible_cards(indices, hardware.devices)


def _children(calls: list[list[str]], threads: int, gpus: Mapping[str, str]) -> list[Any]:
    """Runs Python processes side by side, which see `gpus`; returns the JSON of each that printed some. Raises `HardwareError` when one fails."""
    kept = {k: v for k, v in os.environ.items() if k not in DROPPED and not SCRUBBED.fullmatch(k)}
    environment = {"OMP_NUM_THREADS": str(threads), **kept, **gpus, "GLOO_SOCKET_IFNAME": loopback_interface() or "lo"}
    running = [
        subprocess.Popen([sys.executable, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for words in calls
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_SECONDS) for process in running]
    except subprocess.TimeoutExpired as error:
        raise HardwareError(f"a measurement took longer than {TIMEOUT_SECONDS} s: `{' '.join(error.cmd[1:])}`") from error
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
    for process, (_, problem) in zip(running, outputs, strict=True):
        if process.returncode:
            raise HardwareError(f"a measurement failed with code {process.returncode}: {problem.strip()[-1500:]}")
    return [json.loads(out) for out, _ in outputs if out.strip()]


def fit_steps(steps: Steps, hardware: Hardware, calibration: Calibration) -> StepFit:
    """Returns the line of the measured steps, without what the update and the exchange cost by their own measurements."""
    config, shape, setup, plan = steps.config, steps.shape, steps.setup, steps.plan
    devices = tuple(hardware.devices[index % len(hardware.devices)] for index in range(plan.world_size))
    link = link_of(hardware, devices, 1, calibration)
    accumulation = plan.ranks[0].accumulation
    beside = optimizer_seconds(config, shape, setup, hardware, devices, calibration)
    beside += exchange_seconds(config, shape, setup, plan.world_size, accumulation, link.bytes_per_second) if link else 0.0
    points = [(step.flops / accumulation, max(step.seconds - beside, 0.1 * step.seconds) / accumulation) for step in steps.steps]
    line = fit_line(points)
    per_token = flops_per_token(
        config, shape, int(steps.row_tokens), recompute=setup.gradient_checkpointing, label_share=steps.label_share
    )  # fmt: skip
    return StepFit(
        work=describe_work(config, shape, setup), model=label(config.model), seconds_per_micro_step=line[0], flops_per_second=line[1],
        threads=hardware.cpu_threads / plan.world_size if hardware.kind == "cpu" else 1.0, layers=shape.layers,
        flops_per_token=per_token, points=len(points), spread=spread(points, line), measured=today(),
    )  # fmt: skip


def training_rows(steps: Steps, hardware: Hardware, before: Calibration | None, after: Calibration) -> list[Row]:
    """Returns the measured speed beside what the plan said before, and beside what it says with the new calibration."""
    devices = tuple(hardware.devices[index % len(hardware.devices)] for index in range(steps.plan.world_size))
    data = Data(row_tokens=steps.row_tokens, longest=steps.setup.row_tokens, label_share=steps.label_share)
    full = [step for step in steps.steps if step.rows == steps.plan.global_batch_size]
    rows = steps.plan.global_batch_size

    def expected(calibration: Calibration | None) -> float | None:
        return forecast(
            steps.config, steps.shape, steps.setup, hardware, devices, rows=rows, accumulation=steps.plan.ranks[0].accumulation,
            micro_batches=tuple(rank.micro_batch for rank in steps.plan.ranks), data=data, calibration=calibration,
        ).tokens_per_second  # fmt: skip

    measured = median(step.tokens / step.seconds for step in full)
    first = steps.plan.ranks[0]
    name = f"training, {steps.plan.strategy}, micro-batch {first.micro_batch}"
    return [
        Row(what=name, unit="tokens/s", measured=measured, expected=expected(before)),
        Row(what="the same by this calibration", unit="tokens/s", measured=measured, expected=expected(after)),
        Row(what="its memory, rank 0", unit="GiB", measured=steps.peak_memory_bytes / GIB, expected=first.peak_bytes / GIB),
    ]


def today() -> str:
    """Returns the day as 2026-11-21."""
    return time.strftime("%Y-%m-%d")


def as_json(result: Result, hardware: Hardware, seconds: float) -> dict[str, Any]:
    """Returns what `JSON=1` prints."""
    rows = [
        {"what": row.what, "unit": row.unit, "measured": row.measured, "expected": row.expected, "ratio": row.ratio}
        for row in result.rows
    ]
    fit = result.fit
    assert fit is not None
    return {
        "device": result.device,
        "kind": hardware.kind,
        "threads": hardware.cpu_threads,
        "rows": rows,
        "fit": {
            "seconds_per_micro_step": fit.seconds_per_micro_step,
            "flops_per_second": fit.flops_per_second,
            "spread": fit.spread,
            "points": fit.points,
        },
        "calibration": result.path,
        "notes": result.notes,
        "seconds": round(seconds, 1),
    }


def as_text(result: Result, steps: Steps, seconds: float) -> str:
    """Returns the table."""
    width = max(len(row.what) for row in result.rows) + 2
    lines = [result.device, f"{'':<{width}}{'measured':>12}{'plan':>12}{'ratio':>8}"]
    for row in result.rows:
        expected = f"{row.expected:>12,.4g}" if row.expected else f"{'-':>12}"
        ratio = f"{row.ratio:>8.2f}" if row.ratio else f"{'-':>8}"
        lines.append(f"{row.what:<{width}}{row.measured:>12,.4g}{expected}{ratio}  {row.unit}")
    fit = result.fit
    assert fit is not None
    lines.append(
        f"a micro-step of {label(steps.config.model)} costs {1e3 * fit.seconds_per_micro_step:.3g} ms + FLOPs / "
        f"{fit.flops_per_second / 1e9:,.4g} GFLOP/s a rank ({fit.points} steps, {fit.spread:.0%} off the line at the median)"
    )
    lines += [f"note: {note}" for note in result.notes]
    lines += [f"kept in {result.path}; `make plan` and training forecast by it from now on", f"{seconds:.0f} s in all"]
    return "\n".join(lines)
