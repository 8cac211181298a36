"""`make bench`: what this machine does, compared with the plan, kept as calibration for the forecast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from sft_play.bench.steps import fit_steps, forecast_steps, settings, tell, today, train_some
from sft_play.config.layers import preset_path
from sft_play.errors import HardwareError
from sft_play.launch.environment import DROPPED, SCRUBBED, free_port, loopback_interface, visible_cards, without_peer_to_peer
from sft_play.plan.architecture import label
from sft_play.plan.calibration import Calibration, Link, fit_line, read_calibration
from sft_play.plan.detect import detect
from sft_play.plan.hardware import GIB, Device, Hardware
from sft_play.plan.network import link_bytes_per_second
from sft_play.plan.throughput import CPU_BANDWIDTH
from sft_play.plan.torch_check import require_usable

if TYPE_CHECKING:
    from sft_play.config.call import Call
    from sft_play.launch.job import CommandStrategy

TIMEOUT_SECONDS = 300
BUSY, NOISY = 0.5, 0.1
"""Share of the machine that others may use, and spread of the steps, before the figures are called doubtful."""
PACKAGES = ("sft-play", "torch", "transformers", "peft")


def _row(what: str, unit: str, measured: float, expected: float | None) -> dict[str, Any]:
    """Return one line of the table; `expected` by the plan before this measurement."""
    return {
        "what": what, "unit": unit, "measured": measured, "expected": expected, "ratio": measured / expected if expected else None,
    }  # fmt: skip


def main(call: Call) -> int:
    """Measure, keep the calibration, print the table, and return 0."""
    started = time.perf_counter()
    call = replace(call, options={"CONFIG": str(preset_path("quickstart")), **call.options})
    hardware, processes = detect(), call.integer("NUM_GPUS", minimum=1)
    first = hardware.devices[0].name
    command: CommandStrategy = (
        "auto" if (processes or (len(hardware.devices) if hardware.kind == "cuda" else 1)) > 1 else "single"
    )
    overrides = settings(call, command)  # mistakes are told before anything is measured
    before = read_calibration(first)
    if hardware.kind == "cuda":
        used = range(processes or len(hardware.devices))
        require_usable(hardware, used, os.environ | gpus_of(hardware, used))
    notes, load = list[str](), os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > BUSY * hardware.cpu_threads:  # threads of one product that wait for a shared core make it many times slower
        notes.append(f"other programs keep {load:.1f} of {hardware.cpu_threads} threads busy: the figures are too low")
        tell(notes[-1])
    tell("measuring products of matrices and copies")
    rows, found = list[dict[str, Any]](), dict[str, Calibration]()
    for index, device in enumerate(hardware.devices):
        if device.name not in found:
            found[device.name] = _measure_device(hardware, device, index, rows)
    # Two processes on a CPU unless told: so much the all-reduce of the first distributed run is known.
    ranks = processes or (2 if hardware.kind == "cpu" else len(hardware.devices))
    if ranks > 1:
        tell(f"measuring an all-reduce between {ranks} processes")
        links = _measure_links(hardware, ranks, rows)
        found = {name: replace(one, links=links) for name, one in found.items()}
    tell(f"training some steps of {call.options['CONFIG']}")
    steps = train_some(call, command, overrides)
    for name, one in found.items():
        old = read_calibration(name)
        found[name] = old.joined(one) if old else one
    fit = fit_steps(steps, hardware, found[first])
    if fit.spread > NOISY:
        notes.append(f"steps of the same work differ by {fit.spread:.0%}: measure again on a quiet machine")
    expected = [forecast_steps(steps, hardware, calibration) for calibration in (before, found[first].with_fit(fit))]
    rank = steps.plan.ranks[0]
    name = f"training, {steps.plan.strategy}, micro-batch {rank.micro_batch}"
    rows.append(_row(name, "tokens/s", steps.tokens_per_second, expected[0]))
    rows.append(_row("the same by this calibration", "tokens/s", steps.tokens_per_second, expected[1]))
    rows.append(_row("its memory, rank 0", "GiB", steps.peak_memory_bytes / GIB, rank.peak_bytes / GIB))
    paths = [str(one.with_fit(fit).save()) for one in found.values()]
    seconds = time.perf_counter() - started
    if call.json:
        fitted = {name: getattr(fit, name) for name in ("seconds_per_micro_step", "flops_per_second", "spread", "points")}
        facts = {"device": first, "kind": hardware.kind, "threads": hardware.cpu_threads, "rows": rows, "fit": fitted}
        print(json.dumps(facts | {"calibration": paths[0], "notes": notes, "seconds": round(seconds, 1)}, indent=2))
        return 0
    width = max(len(row["what"]) for row in rows) + 2
    print(f"{first}\n{'':<{width}}{'measured':>12}{'plan':>12}{'ratio':>8}")
    for row in rows:
        figures = f"{row['expected']:>12,.4g}{row['ratio']:>8.2f}" if row["expected"] else f"{'-':>12}{'-':>8}"
        print(f"{row['what']:<{width}}{row['measured']:>12,.4g}{figures}  {row['unit']}")
    print(
        f"a micro-step of {label(steps.config.model)} costs {1e3 * fit.seconds_per_micro_step:.3g} ms + FLOPs / "
        f"{fit.flops_per_second / 1e9:,.4g} GFLOP/s a rank ({fit.points} steps, {fit.spread:.0%} off the line at the median)"
    )
    print(*(f"note: {note}\n" for note in notes), sep="", end="")
    print(f"kept in {paths[0]}; `make plan` and training forecast by it from now on\n{seconds:.0f} s in all")
    return 0


def _measure_device(hardware: Hardware, device: Device, index: int, rows: list[dict[str, Any]]) -> Calibration:
    """Return a device's products and copies, and add their rows."""
    value = _children([[hardware.kind]], hardware.cpu_threads, gpus_of(hardware, [index]))[0]
    name = f" ({device.name})" if len(hardware.devices) > 1 else ""
    largest = list(value["matmul"])[-1]
    for size, flops in value["matmul"].items():
        peak = device.peak_flops / 1e12 if device.peak_flops and size == largest else None
        rows.append(_row(f"matmul {size}, {value['dtype']}{name}", "TFLOP/s", flops / 1e12, peak))
    bandwidth = device.bandwidth or (CPU_BANDWIDTH if hardware.kind == "cpu" else None)
    rows.append(_row(f"memory, copy{name}", "GB/s", value["bandwidth"] / 1e9, bandwidth / 1e9 if bandwidth else None))
    return Calibration(
        device=device.name, kind=hardware.kind, threads=hardware.cpu_threads, measured=today(), bandwidth=value["bandwidth"],
        versions={name: version(name) for name in PACKAGES}, matmul_flops=value["matmul"],
    )  # fmt: skip


def _measure_links(hardware: Hardware, ranks: int, rows: list[dict[str, Any]]) -> dict[str, Link]:
    """Return the all-reduce between `ranks` processes as a line, and add its rows."""
    backend, port = "nccl" if hardware.kind == "cuda" else "gloo", str(free_port())
    words = [[str(rank), str(ranks), port, backend] for rank in range(ranks)]
    times = _children(words, max(1, hardware.cpu_threads // ranks), gpus_of(hardware, range(ranks)))[0]
    prior = link_bytes_per_second(replace(hardware, network_bytes_per_second=None), hardware.devices)
    points = []
    for size, seconds in times.items():
        moved = 2 * (ranks - 1) / ranks * int(size)
        points.append((moved, seconds))
        name = f"all-reduce {int(size) >> 20} MB, {backend}, {ranks} ranks"
        rows.append(_row(name, "ms", 1e3 * seconds, 1e3 * moved / prior if prior else None))
    latency, speed = fit_line(points)
    return {backend: Link(ranks=ranks, latency_seconds=latency, bytes_per_second=speed)}


def gpus_of(hardware: Hardware, indices: Sequence[int]) -> dict[str, str]:
    """Return the variables of a measurement on these devices, as a launch on them has."""
    if hardware.kind == "cpu":
        return {}
    peers = without_peer_to_peer([hardware.devices[index].name for index in indices])
    ours = {name: value for name, value in peers.items() if name not in os.environ}
    return ours | visible_cards(indices, hardware.devices)


def _children(calls: list[list[str]], threads: int, gpus: Mapping[str, str]) -> list[Any]:
    """Run measurements side by side, in processes that see `gpus`; return what they print. Raise `HardwareError` when one fails."""
    kept = {k: v for k, v in os.environ.items() if k not in DROPPED and not SCRUBBED.fullmatch(k)}
    environment = {"OMP_NUM_THREADS": str(threads), **kept, **gpus, "GLOO_SOCKET_IFNAME": loopback_interface() or "lo"}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "sft_play.bench.measure", *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
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
