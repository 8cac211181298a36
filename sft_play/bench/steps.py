"""Real optimizer steps for `make bench`: the road of `make train` into a folder that is thrown away, on some rows of the data.

The rows are one global batch and a quarter, so every second step of the run is a short one: steps of two sizes tell the fixed
cost of a micro-step from the cost of its tokens.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from sft_play.config.call import Call
from sft_play.config.layers import Override
from sft_play.config.load import read_config
from sft_play.config.schema import Config
from sft_play.data.batches import GlobalBatchSampler
from sft_play.errors import HardwareError, UserError
from sft_play.files import read_json
from sft_play.launch.commands import start_run
from sft_play.launch.job import Job
from sft_play.plan.architecture import label, shape_of
from sft_play.plan.batch import Batch
from sft_play.plan.calibration import Calibration, StepFit, fit_line, spread
from sft_play.plan.detect import detect
from sft_play.plan.hardware import Hardware
from sft_play.plan.mixture import Data
from sft_play.plan.network import exchange_seconds, link_of
from sft_play.plan.packing import Division
from sft_play.plan.plan import LaunchRequest, Plan, Setup
from sft_play.plan.request import Request
from sft_play.plan.shape import ModelShape
from sft_play.plan.sources import plan_for
from sft_play.plan.throughput import attended_pairs, batch_flops, describe_work, flops_per_token, forecast, optimizer_seconds
from sft_play.runs.folder import RunFolder
from sft_play.runs.prepared import Prepared

if TYPE_CHECKING:
    from sft_play.launch.job import CommandStrategy

PAIRS = range(3, 7)
"""Pairs of a full and a short step, the first pair not counted in."""
SECONDS = 35.0
"""What the counted steps should take by the plan."""
SET_HERE = {
    "train.max_steps", "train.global_batch_size", "train.grad_accum", "train.save_strategy", "train.eval_strategy", "train.logging_steps",
    "train.load_best_model_at_end", "train.report_to",
}  # fmt: skip


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
    label_share: float
    row_tokens: float
    peak_memory_bytes: int
    """Of rank 0."""

    @property
    def tokens_per_second(self) -> float:
        """The speed of the full steps."""
        full = [step for step in self.steps if step.rows == self.plan.global_batch_size]
        return median(step.tokens / step.seconds for step in full)


def settings(call: Call, command: CommandStrategy) -> tuple[Override, ...]:
    """Return what a short run needs in addition to the configuration. Raise `UserError` for what `make train` would refuse early."""
    typed = [override.origin for override in call.overrides if override.key in SET_HERE]
    if typed:
        raise UserError(f"`{typed[0]}`: `make bench` sets this itself", hint="omit it; batch_size and everything else count")
    loaded, hardware = call.load_config(), detect()
    request = LaunchRequest(command_strategy=command, num_gpus=call.integer("NUM_GPUS", minimum=1), early=True)
    plan = plan_for(loaded, hardware, request)
    rows = sum(rank.micro_batch for rank in plan.ranks)
    # A full step of these rows and a short one of a quarter of them.
    seconds = 1.25 * (plan.seconds_per_step or 1.0) * rows / plan.global_batch_size
    pairs = min(max(int(SECONDS / seconds), PAIRS.start), PAIRS.stop - 1)
    values = {
        "train.max_steps": str(2 + 2 * pairs), "train.global_batch_size": str(rows), "train.grad_accum": "auto",
        "train.save_strategy": "no", "train.eval_strategy": "no", "train.logging_steps": "1", "train.load_best_model_at_end": "false",
        "train.report_to": "none", "train.packing": "off", "launch.balance": "off",
        "launch.sequence_parallel": "1",
        "launch.tensor_parallel": "1",
    }  # fmt: skip
    return tuple(Override(key=key, text=text, origin="make bench") for key, text in values.items())


def train_some(call: Call, command: CommandStrategy, overrides: tuple[Override, ...]) -> Steps:
    """Train a handful of steps with `overrides` by `settings`. Raise `UserError` as training does, `HardwareError` if it fails."""
    bench = replace(call, overrides=call.overrides + overrides, options={**call.options, "RUN_NAME": "bench"}, json=True)
    with tempfile.TemporaryDirectory(prefix="sft-play-bench-") as folder, _runs_in(Path(folder)), _quiet(Path(folder)) as log:
        run, outcome = start_run(bench, command, before_launch=_few_rows)
        if outcome.code:
            raise HardwareError(
                f"training ended with code {outcome.code}: {outcome.message or log.read_text(errors='replace')[-2000:]}",
                hint="`make train` with the same CONFIG shows more",
            )
        return read_steps(run)


@contextlib.contextmanager
def _runs_in(folder: Path) -> Iterator[None]:
    before = os.environ.get("RUNS_DIR")
    os.environ["RUNS_DIR"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["RUNS_DIR"]
        else:
            os.environ["RUNS_DIR"] = before


@contextlib.contextmanager
def _quiet(folder: Path) -> Iterator[Path]:
    """Send what the launch says to a file; errors are raised all the same."""
    path = folder / "bench.log"
    with path.open("w", encoding="utf-8") as stream, contextlib.redirect_stderr(stream):
        yield path


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
        prepared.train, path=str(run.path / "rows"), rows=wanted, tokens=sum(lengths), label_tokens=labels, longest=lengths[-1],
        median=lengths[wanted // 2], sources=(),  # each row once, whatever their weights
    )  # fmt: skip
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
    for row, batches in zip([m for m in metrics if m["kind"] == "train"], _batches(config, plan, len(sizes)), strict=True):
        tokens = sum(sizes[index][0] for rank in batches for micro in rank for index in micro)
        work = [sum(_flops(config, shape, setup, [sizes[i] for i in micro]) for micro in rank) for rank in batches]
        count = sum(len(micro) for rank in batches for micro in rank)
        found.append(Step(seconds=tokens / row["tokens_per_second"], tokens=tokens, flops=max(work), rows=count))
    tokens = sum(size for size, _ in sizes)
    return Steps(
        config=config, plan=plan, shape=shape, setup=setup, steps=tuple(found[2:]), row_tokens=tokens / len(sizes),
        label_share=sum(labels for _, labels in sizes) / tokens,
        peak_memory_bytes=read_json(run.training_metrics)["peak_memory_bytes"],
    )  # fmt: skip


def _batches(config: Config, plan: Plan, rows: int) -> Iterator[list[list[list[int]]]]:
    """Yield the micro-batches of each rank, step by step, as training cut them."""
    seed = config.train.extra.get("data_seed")
    slots = [(rank.micro_batch, rank.accumulation) for rank in plan.ranks]
    samplers = [
        GlobalBatchSampler(rows, plan.global_batch_size, slots, rank=rank, seed=config.train.seed if seed is None else seed)
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
        config, shape, tokens=computed, labels=sum(labels for _, labels in rows), pairs=attended_pairs(setup, lengths),
        recompute=setup.gradient_checkpointing,
    )  # fmt: skip


def tell(text: str) -> None:
    """Say on stderr what is going on."""
    print(text, file=sys.stderr, flush=True)


def fit_steps(steps: Steps, hardware: Hardware, calibration: Calibration) -> StepFit:
    """Return the line of the measured steps, without what the update and the exchange cost by their own measurements."""
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


def forecast_steps(steps: Steps, hardware: Hardware, calibration: Calibration | None) -> float | None:
    """Return the tokens per second that the plan expects of these steps."""
    plan, rows = steps.plan, steps.plan.global_batch_size
    micro_batches = tuple(rank.micro_batch for rank in plan.ranks)
    batch = Batch(micro_batches=micro_batches, accumulation=plan.ranks[0].accumulation, global_batch=rows, reasons=())
    data = Data(row_tokens=steps.row_tokens, longest=steps.setup.row_tokens, label_share=steps.label_share)
    launch = LaunchRequest(command_strategy="single" if plan.world_size == 1 else "auto", num_gpus=plan.world_size)
    request = Request(config=steps.config, hardware=hardware, shape=steps.shape, launch=launch, calibration=calibration)
    return forecast(request, Division(setup=steps.setup, batch=batch), data).tokens_per_second


def today() -> str:
    """Return the day as 2026-11-21."""
    return time.strftime("%Y-%m-%d")
