"""`make bench`: what this machine does, compared with the plan, kept as calibration for the forecast.

Real optimizer steps go the road of `make train`, into a folder that is thrown away. Their rows are one global batch and
a quarter, so every second step of the run is a short one: steps of two sizes tell the fixed cost of a micro-step from
the cost of its tokens. Devices and links are measured by processes that print JSON: `python -m sft_play.bench KIND`, or
`... RANK WORLD PORT BACKEND`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from sft_play.config.call import Call
from sft_play.config.layers import Override, preset_path
from sft_play.config.load import read_config
from sft_play.config.schema import Config
from sft_play.data.batches import GlobalBatchSampler
from sft_play.errors import HardwareError, UserError
from sft_play.files import read_json
from sft_play.launch.commands import start_run
from sft_play.launch.environment import (
    DROPPED,
    SCRUBBED,
    free_port,
    loopback_interface,
    visible_cards,
    without_peer_to_peer,
)
from sft_play.launch.job import CommandStrategy, Job
from sft_play.plan.architecture import label, shape_of
from sft_play.plan.batch import Batch
from sft_play.plan.calibration import Calibration, Link, StepFit, fit_line, read_calibration, spread
from sft_play.plan.detect import detect, require_usable
from sft_play.plan.epoch import Data, Division
from sft_play.plan.hardware import GIB, Device, Hardware
from sft_play.plan.network import exchange_seconds, link_bytes_per_second, link_of
from sft_play.plan.plan import LaunchRequest, Plan, Setup
from sft_play.plan.request import Request
from sft_play.plan.shape import ModelShape
from sft_play.plan.sources import plan_for
from sft_play.plan.throughput import (
    CPU_BANDWIDTH,
    attended_pairs,
    batch_flops,
    describe_work,
    flops_per_token,
    forecast,
    optimizer_seconds,
)
from sft_play.runs.folder import RunFolder
from sft_play.runs.prepared import Prepared

TIMEOUT_SECONDS = 300
BUSY, NOISY = 0.5, 0.1
"""Share of the machine that others may use, and spread of the steps, before the figures are called doubtful."""
PACKAGES = ("sft-play", "torch", "transformers", "peft")


def _row(what: str, unit: str, measured: float, expected: float | None) -> dict[str, Any]:
    """Return one line of the table; `expected` by the plan before this measurement."""
    return {
        "what": what,
        "unit": unit,
        "measured": measured,
        "expected": expected,
        "ratio": measured / expected if expected else None,
    }


def main(call: Call) -> int:
    """Measure, keep the calibration, print the table, and return 0."""
    started = time.perf_counter()
    call = replace(call, options={"CONFIG": str(preset_path("quickstart")), **call.options})
    hardware, processes = detect(), call.integer("NUM_GPUS", minimum=1)
    first = hardware.devices[0].name
    cards = len(hardware.devices) if hardware.kind == "cuda" else 0
    command: CommandStrategy = "auto" if (processes or cards) > 1 else "single"
    overrides = settings(call, command)  # mistakes are told before anything is measured
    before = read_calibration(first)
    if cards:
        used = range(processes or cards)
        require_usable(hardware, used, os.environ | gpus_of(hardware, used))
    notes, load = list[str](), os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if (
        load > BUSY * hardware.cpu_threads
    ):  # threads of one product that wait for a shared core make it many times slower
        notes.append(f"other programs keep {load:.1f} of {hardware.cpu_threads} threads busy: the figures are too low")
        print(notes[-1], file=sys.stderr, flush=True)
    print("measuring products of matrices and copies", file=sys.stderr, flush=True)
    rows, found = list[dict[str, Any]](), dict[str, Calibration]()
    for index, device in enumerate(hardware.devices):
        if device.name not in found:
            found[device.name] = _measure_device(hardware, device, index, rows)
    # Two processes on a CPU unless told: so much the all-reduce of the first distributed run is known.
    ranks = processes or cards or 2
    if ranks > 1:
        print(f"measuring an all-reduce between {ranks} processes", file=sys.stderr, flush=True)
        links = _measure_links(hardware, ranks, rows)
        found = {name: replace(one, links=links) for name, one in found.items()}
    print(f"training some steps of {call.options['CONFIG']}", file=sys.stderr, flush=True)
    steps = train_some(call, command, overrides)
    fit = fit_steps(steps, hardware, found[first])
    if fit.spread > NOISY:
        notes.append(f"steps of the same work differ by {fit.spread:.0%}: measure again on a quiet machine")
    for name, one in found.items():
        old, new = read_calibration(name), replace(one, steps=(fit,))
        found[name] = old.merge(new) if old else new
    expected = [forecast_steps(steps, hardware, calibration) for calibration in (before, found[first])]
    rank = steps.plan.ranks[0]
    name = f"training, {steps.plan.strategy}, micro-batch {rank.micro_batch}"
    rows.append(_row(name, "tokens/s", steps.tokens_per_second, expected[0]))
    rows.append(_row("the same by this calibration", "tokens/s", steps.tokens_per_second, expected[1]))
    rows.append(_row("its memory, rank 0", "GiB", steps.peak_memory_bytes / GIB, rank.peak_bytes / GIB))
    paths = [str(one.save()) for one in found.values()]
    seconds = time.perf_counter() - started
    if call.json:
        fitted = {
            name: getattr(fit, name) for name in ("seconds_per_micro_step", "flops_per_second", "spread", "points")
        }
        facts = {"device": first, "kind": hardware.kind, "threads": hardware.cpu_threads, "rows": rows, "fit": fitted}
        print(json.dumps(facts | {"calibration": paths[0], "notes": notes, "seconds": round(seconds, 1)}, indent=2))
        return 0
    print(f"{first}\n{_table(rows)}")
    print(
        f"a micro-step of {label(steps.config.model)} costs {1e3 * fit.seconds_per_micro_step:.3g} ms + FLOPs /"
        f" {fit.flops_per_second / 1e9:,.4g} GFLOP/s a rank ({fit.points} steps, {fit.spread:.0%} off the line at the"
        " median)"
    )
    print(*(f"note: {note}\n" for note in notes), sep="", end="")
    print(f"kept in {paths[0]}; `make plan` and training forecast by it from now on\n{seconds:.0f} s in all")
    return 0


def _table(rows: list[dict[str, Any]]) -> str:
    width = max(len(row["what"]) for row in rows) + 2
    lines = [f"{'':<{width}}{'measured':>12}{'plan':>12}{'ratio':>8}"]
    for row in rows:
        figures = f"{row['expected']:>12,.4g}{row['ratio']:>8.2f}" if row["expected"] else f"{'-':>12}{'-':>8}"
        lines.append(f"{row['what']:<{width}}{row['measured']:>12,.4g}{figures}  {row['unit']}")
    return "\n".join(lines)


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
        device=device.name,
        kind=hardware.kind,
        threads=hardware.cpu_threads,
        measured=time.strftime("%Y-%m-%d"),
        bandwidth=value["bandwidth"],
        versions={name: version(name) for name in PACKAGES},
        matmul_flops=value["matmul"],
    )


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
    """Run measurements side by side, in processes that see `gpus`; return what they print. Raise `HardwareError` when
    one fails.
    """
    kept = {k: v for k, v in os.environ.items() if k not in DROPPED and not SCRUBBED.fullmatch(k)}
    environment = {"OMP_NUM_THREADS": str(threads), **kept, **gpus, "GLOO_SOCKET_IFNAME": loopback_interface() or "lo"}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "sft_play.bench", *words],
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
        raise HardwareError(
            f"a measurement took longer than {TIMEOUT_SECONDS} s: `{' '.join(error.cmd[1:])}`"
        ) from error
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
    for process, (_, problem) in zip(running, outputs, strict=True):
        if process.returncode:
            raise HardwareError(f"a measurement failed with code {process.returncode}: {problem.strip()[-1500:]}")
    return [json.loads(out) for out, _ in outputs if out.strip()]


PAIRS = range(3, 7)
"""Pairs of a full and a short step, the first pair not counted in."""
SECONDS = 35.0
"""What the counted steps should take by the plan."""
FIXED = {
    "train.grad_accum": "auto",
    "train.save_strategy": "no",
    "train.eval_strategy": "no",
    "train.logging_steps": "1",
    "train.load_best_model_at_end": "false",
    "train.report_to": "none",
    "train.packing": "off",
    "launch.balance": "off",
    "launch.sequence_parallel": "1",
    "launch.tensor_parallel": "1",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One optimizer step."""

    seconds: float
    tokens: int
    """Of all ranks."""
    flops: float
    """Of the rank that has most to do."""
    rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """What was trained, by which plan, and how long each step took."""

    config: Config
    plan: Plan
    shape: ModelShape
    setup: Setup
    steps: tuple[Step, ...]
    """Without the first pair, which warms up."""
    data: Data
    peak_memory_bytes: int
    """Of rank 0."""

    @property
    def tokens_per_second(self) -> float:
        """The speed of the full steps."""
        full = [step for step in self.steps if step.rows == self.plan.global_batch_size]
        return median(step.tokens / step.seconds for step in full)


def settings(call: Call, command: CommandStrategy) -> tuple[Override, ...]:
    """Return what a short run needs in addition to the configuration. Raise `UserError` for what `make train` would
    refuse early.
    """
    typed = [one.origin for one in call.overrides if one.key in {"train.max_steps", "train.global_batch_size", *FIXED}]
    if typed:
        raise UserError(
            f"`{typed[0]}`: `make bench` sets this itself", hint="omit it; batch_size and everything else count"
        )
    loaded, hardware = call.load_config(), detect()
    request = LaunchRequest(command_strategy=command, num_gpus=call.integer("NUM_GPUS", minimum=1), early=True)
    plan = plan_for(loaded, hardware, request)
    rows = sum(rank.micro_batch for rank in plan.ranks)
    # A full step of these rows and a short one of a quarter of them.
    seconds = 1.25 * (plan.seconds_per_step or 1.0) * rows / plan.global_batch_size
    pairs = min(max(int(SECONDS / seconds), PAIRS.start), PAIRS.stop - 1)
    values = {"train.max_steps": str(2 + 2 * pairs), "train.global_batch_size": str(rows), **FIXED}
    return tuple(Override(key=key, text=text, origin="make bench") for key, text in values.items())


def train_some(call: Call, command: CommandStrategy, overrides: tuple[Override, ...]) -> Steps:
    """Train a handful of steps with `overrides` by `settings`. Raise `UserError` as training does, `HardwareError` if
    it fails.
    """
    bench = replace(
        call, overrides=call.overrides + overrides, options={**call.options, "RUN_NAME": "bench"}, json=True
    )
    with tempfile.TemporaryDirectory(prefix="sft-play-bench-") as folder, _aside(folder) as log:
        run, outcome = start_run(bench, command, before_launch=_few_rows)
        if outcome.code:
            raise HardwareError(
                f"training ended with code {outcome.code}:"
                f" {outcome.message or log.read_text(errors='replace')[-2000:]}",
                hint="`make train` with the same CONFIG shows more",
            )
        return read_steps(run)


@contextlib.contextmanager
def _aside(folder: str) -> Iterator[Path]:
    """Put runs and what the launch says into `folder`, and yield the file of the latter; errors are raised all the
    same.
    """
    before, log = os.environ.get("RUNS_DIR"), Path(folder) / "bench.log"
    os.environ["RUNS_DIR"] = folder
    try:
        with log.open("w", encoding="utf-8") as stream, contextlib.redirect_stderr(stream):
            yield log
    finally:
        del os.environ["RUNS_DIR"]
        os.environ |= {} if before is None else {"RUNS_DIR": before}


def _few_rows(job: Job, run: RunFolder) -> None:
    """Replace the prepared rows by a global batch and a quarter of them, spread over all lengths."""
    import datasets

    prepared = Prepared.load(run.prepared)
    assert prepared.train is not None
    wanted = job.plan(prepared).global_batch_size
    wanted += max(1, wanted // 4)
    datasets.disable_progress_bars()
    rows = datasets.load_from_disk(prepared.train.path)
    by_length = [row for _, row in sorted((len(ids), row) for row, ids in enumerate(rows["input_ids"]))]
    chosen = [by_length[(2 * index + 1) * len(by_length) // (2 * wanted) % len(by_length)] for index in range(wanted)]
    few = rows.select(chosen)
    few.save_to_disk(str(run.path / "rows"))
    lengths = sorted(len(row["input_ids"]) for row in few)
    labels = sum(label != -100 for row in few for label in row["labels"][1:])
    split = replace(
        prepared.train,
        path=str(run.path / "rows"),
        rows=wanted,
        tokens=sum(lengths),
        label_tokens=labels,
        longest=lengths[-1],
        median=lengths[wanted // 2],
        sources=(),  # each row once, whatever their weights
    )
    replace(prepared, train=split, validation=None).save(run.prepared)


def read_steps(run: RunFolder) -> Steps:
    """Return the steps of a finished run, each with the work that its rows were."""
    import datasets

    config, plan, prepared = read_config(run.config).config, Plan.load(run.plan), Prepared.load(run.prepared)
    assert prepared.train is not None
    split = prepared.train
    share = split.label_tokens / split.tokens  # the plan's own is that of the worst micro-batch
    shape, setup = shape_of(config.model), replace(plan, label_share=share, row_tokens=split.longest)
    rows = datasets.load_from_disk(prepared.train.path)
    sizes = [(len(row["input_ids"]), sum(label != -100 for label in row["labels"][1:])) for row in rows]
    metrics = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    found = []
    for row, batches in zip(
        [m for m in metrics if m["kind"] == "train"], _batches(config, plan, len(sizes)), strict=True
    ):
        tokens = sum(sizes[index][0] for rank in batches for micro in rank for index in micro)
        work = [sum(_flops(config, shape, setup, [sizes[i] for i in micro]) for micro in rank) for rank in batches]
        count = sum(len(micro) for rank in batches for micro in rank)
        found.append(Step(seconds=tokens / row["tokens_per_second"], tokens=tokens, flops=max(work), rows=count))
    return Steps(
        config=config,
        plan=plan,
        shape=shape,
        setup=setup,
        steps=tuple(found[2:]),
        data=Data(row_tokens=split.tokens / split.rows, longest=split.longest, label_share=share),
        peak_memory_bytes=read_json(run.training_metrics)["peak_memory_bytes"],
    )


def _batches(config: Config, plan: Plan, rows: int) -> Iterator[list[list[list[int]]]]:
    """Yield the micro-batches of each rank, step by step, as training cut them."""
    seed = config.train.extra.get("data_seed")
    slots = [(rank.micro_batch, rank.accumulation) for rank in plan.ranks]
    samplers = [
        GlobalBatchSampler(
            rows, plan.global_batch_size, slots, rank=rank, seed=config.train.seed if seed is None else seed
        )
        for rank in range(plan.world_size)
    ]
    assert plan.steps is not None
    step = 0
    while step < plan.steps:
        for sampler in samplers:
            sampler.set_epoch(step // samplers[0].steps)
        cut = [list(sampler) for sampler in samplers]
        for start in range(0, len(cut[0]), samplers[0].turns):
            if step < plan.steps:
                yield [micro[start : start + samplers[0].turns] for micro in cut]
            step += 1


def _flops(config: Config, shape: ModelShape, setup: Setup, rows: list[tuple[int, int]]) -> float:
    lengths = [float(length) for length, _ in rows]
    computed = len(lengths) * max(lengths, default=0.0) if setup.layout != "flattened" else sum(lengths)
    return batch_flops(
        config,
        shape,
        tokens=computed,
        labels=sum(labels for _, labels in rows),
        pairs=attended_pairs(setup, lengths),
        recompute=setup.gradient_checkpointing,
    )


def fit_steps(steps: Steps, hardware: Hardware, calibration: Calibration) -> StepFit:
    """Return the line of the measured steps, without what the update and the exchange cost by their own
    measurements.
    """
    config, shape, setup, plan = steps.config, steps.shape, steps.setup, steps.plan
    devices = tuple(hardware.devices[index % len(hardware.devices)] for index in range(plan.world_size))
    link = link_of(hardware, devices, 1, calibration)
    accumulation = plan.ranks[0].accumulation
    request = Request(config=config, hardware=hardware, shape=shape, calibration=calibration)
    beside = optimizer_seconds(request, setup, devices) + (
        exchange_seconds(request, setup, accumulation, link) if link else 0.0
    )
    points = [
        (step.flops / accumulation, max(step.seconds - beside, 0.1 * step.seconds) / accumulation)
        for step in steps.steps
    ]
    line = fit_line(points)
    per_token = flops_per_token(
        config,
        shape,
        int(steps.data.row_tokens),
        recompute=setup.gradient_checkpointing,
        label_share=steps.data.label_share,
    )
    return StepFit(
        work=describe_work(config, shape, setup),
        model=label(config.model),
        seconds_per_micro_step=line[0],
        flops_per_second=line[1],
        threads=hardware.cpu_threads / plan.world_size if hardware.kind == "cpu" else 1.0,
        layers=shape.layers,
        flops_per_token=per_token,
        points=len(points),
        spread=spread(points, line),
        measured=time.strftime("%Y-%m-%d"),
    )


def forecast_steps(steps: Steps, hardware: Hardware, calibration: Calibration | None) -> float | None:
    """Return the tokens per second that the plan expects of these steps."""
    plan, rows = steps.plan, steps.plan.global_batch_size
    slots = tuple((rank.micro_batch, plan.ranks[0].accumulation) for rank in plan.ranks)
    batch = Batch(slots=slots, global_batch=rows, reasons=())
    launch = LaunchRequest(command_strategy="single" if plan.world_size == 1 else "auto", num_gpus=plan.world_size)
    request = Request(config=steps.config, hardware=hardware, shape=steps.shape, launch=launch, calibration=calibration)
    return forecast(request, Division(setup=steps.setup, batch=batch), steps.data).tokens_per_second


WIDTHS = {"cpu": (256, 512, 1024, 2048), "cuda": (1024, 2048, 4096, 8192)}
COPIED_BYTES = {"cpu": 2**28, "cuda": 2**30}
"""Far more than any cache holds."""
LEAST_SECONDS, LEAST_TRIES, MOST_TRIES = 0.5, 5, 50
REDUCED_BYTES, REDUCE_TRIES = (2**20, 16 * 2**20, 64 * 2**20), 7


def time_device(kind: str) -> dict[str, Any]:
    """Return `{"dtype", "matmul": {width: FLOP/s}, "bandwidth": bytes/s read and written}`, each a median."""
    import torch

    here = torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")
    dtype = torch.float32
    if kind == "cuda":
        dtype = torch.bfloat16 if torch.cuda.get_device_capability(here) >= (8, 0) else torch.float16
    matmul = {}
    for width in WIDTHS[kind]:
        left, right = (torch.randn(width, width, device=here).to(dtype) for _ in range(2))
        matmul[str(width)] = 2 * width**3 / _typical_seconds(partial(torch.mm, left, right), here)
    source = torch.ones(COPIED_BYTES[kind], dtype=torch.uint8, device=here)
    target = torch.empty_like(source)
    bandwidth = 2 * COPIED_BYTES[kind] / _typical_seconds(lambda: target.copy_(source), here)
    return {"dtype": str(dtype).removeprefix("torch."), "matmul": matmul, "bandwidth": bandwidth}


def _typical_seconds(work: Callable[[], object], here: Any) -> float:
    """Return the median time of `work` after two runs for nothing."""
    import torch

    times: list[float] = []
    for attempt in range(MOST_TRIES + 2):
        started = time.perf_counter()
        work()
        if here.type == "cuda":
            torch.cuda.synchronize(here)
        times += [time.perf_counter() - started] if attempt > 1 else []
        if len(times) >= LEAST_TRIES and sum(times) > LEAST_SECONDS:
            break
    return median(times)


def time_all_reduce(rank: int, world: int, port: int, backend: str) -> dict[str, float]:
    """Return bytes (as text) -> median seconds in which all ranks have the sum, the slowest rank's, after two for
    nothing.
    """
    import torch
    from torch import distributed

    here = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(here)
    distributed.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    found = {}
    for size in REDUCED_BYTES:
        times, values = [], torch.ones(size // 4, device=here)
        for _ in range(REDUCE_TRIES + 2):
            distributed.barrier()
            started = time.perf_counter()
            distributed.all_reduce(values)
            if values.is_cuda:
                torch.cuda.synchronize()
            slowest = torch.tensor([time.perf_counter() - started], device=here)
            distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
            values.fill_(1.0)
            times.append(float(slowest))
        found[str(size)] = median(times[2:])
    distributed.destroy_process_group()
    return found


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print(json.dumps(time_device(sys.argv[1])))
    else:
        result = time_all_reduce(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
        if sys.argv[1] == "0":
            print(json.dumps(result))
