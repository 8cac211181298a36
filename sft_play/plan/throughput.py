"""The forecast: seconds of an optimizer step from arithmetic, memory traffic and network. It decides nothing. Pure.

A rank's step = micro-steps x fixed seconds + FLOPs / speed + optimizer traffic / bandwidth; the slowest rank sets the
pace, and communication is added. Speeds are estimates from data sheets; where a complete run on such devices with a
similar model was measured, the total is scaled by that run's ratio of measurement to estimate (docs/forecast.md).

FLOPs per token and linear weight: 2 forward, 2 for the gradient of its input, 2 more when it trains, and 2 again when
the forward pass is recomputed; the head counts only for tokens with a label (`training/loss.py`). Attention with
dimension d costs 4 d per layer and pair of tokens forward, 2.5 times that backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from sft_play.config.optimizers import OPTIMIZERS
from sft_play.config.reader import record_of
from sft_play.config.schema import Config
from sft_play.plan.batch import Division, average_row
from sft_play.plan.epoch import AverageRow
from sft_play.plan.hardware import Device, find_card
from sft_play.plan.memory import NF4_BYTES, layer_input_bytes, quantised_parameters, trainable_parameters
from sft_play.plan.network import (
    PCIE_BYTES_PER_SECOND,
    exchange_seconds,
    exchanges,
    link_bytes_per_second,
    slices_seconds,
    stage_shares,
)
from sft_play.plan.plan import PastRun, Plan, Setup, Work
from sft_play.plan.request import Request
from sft_play.plan.shape import BY_LENGTHS, ModelShape
from sft_play.runs.folder import RunFolder
from sft_play.runs.gate import all_runs, read_facts
from sft_play.text import figure

GPU_EFFICIENCY = 0.35
"""Share of the peak that eager bf16 training reached in published runs of 7B models (0.35 to 0.45)."""
FP32_SHARE = 1 / 8
"""Speed of fp32 matrix products, which use no tensor cores, as a share of bf16's (data sheets: 1/28 on a B200, 1/15 on
an H100, 1/2 on GeForce cards).
"""
GPU_LAYER_SECONDS = 6e-4
"""Time that Python takes to launch a layer's kernels in both passes: a floor for small micro-steps (inferred,
unverified).
"""
CPU_FLOPS_PER_THREAD = 8e10
"""fp32 operations per second and thread of SmolLM2-135M's steps with adapters on two cores of a server (measured on
2026-11-21).
"""
CPU_LAYER_SECONDS = 8e-3
"""Fixed cost of a layer per micro-step on a CPU: reading its weights and starting every operation (the same run)."""
CPU_BANDWIDTH = 2e10
"""Bytes read and written per second by a desktop's memory (a server: 33 to 66 GB/s)."""
OPTIMIZER_TRAFFIC = 40
"""Bytes moved per trained fp32 weight: clipping reads the gradient and scales it (12), AdamW reads four values and
writes three (28).
"""
TYPICAL_FLOPS, TYPICAL_BANDWIDTH, TYPICAL_NETWORK = 1e14, 1e12, 1e9
"""Assumed for cards and networks whose speed is not known, to compare runs on them; no such figure is shown."""

ALIKE = 2.0
"""Largest ratio of operations per token between models that count as similar."""
LEAST_STEPS = 5
"""Steps that a run must have made."""
NEWEST = 200
"""Largest number of run folders that are read."""


def batch_flops(
    config: Config, shape: ModelShape, *, tokens: float, labels: float, pairs: float, recompute: bool
) -> float:
    """Return the operations of a micro-batch with `labels` tokens at the head and `pairs` of tokens in attention."""
    passes = (6 if config.tuning.mode == "full" else 4) + (2 if recompute else 0)
    head = shape.vocab_size * shape.hidden_size
    linear = passes * ((shape.active_parameters - head) * tokens + head * labels)
    attention = (4.5 if recompute else 3.5) * 4 * shape.heads * shape.head_dim * shape.layers * pairs
    adapters = 0 if config.tuning.mode == "full" else 6 * trainable_parameters(config, shape) * tokens
    return linear + attention + adapters


def attended_pairs(setup: Setup, lengths: Sequence[float], *, ragged: bool, inside: float) -> float:
    """Return the pairs of tokens whose scores are computed for a micro-batch of rows of these lengths.

    Without a mask, kernels skip the half above the diagonal: always for attention by lengths, otherwise for a single
    row, for unmasked rows and for padded rows unless they are `ragged`. Flattened rows under a mask are also scored
    against each other, and those scores are discarded.
    """
    if setup.pack_tokens:
        # Even a single pack has a mask, unless the kernel takes the rows' lengths.
        near = inside or max(lengths, default=0.0)
        return sum(lengths) * (near / 2 if setup.attn_implementation in BY_LENGTHS else sum(lengths))
    masked = len(lengths) > 1 and (setup.layout == "flattened" or (setup.layout == "padded" and ragged))
    if setup.attn_implementation in BY_LENGTHS or (setup.attn_implementation == "sdpa" and not masked):
        return sum(length**2 for length in lengths) / 2
    return sum(lengths) ** 2 if setup.layout == "flattened" else len(lengths) * max(lengths, default=0.0) ** 2


def _expansion_bytes(config: Config, shape: ModelShape, setup: Setup) -> float:
    """Return the memory traffic per micro-step of dequantising weights, which each pass does before it uses them."""
    if config.tuning.mode != "qlora":
        return 0.0
    weights = quantised_parameters(config, shape, setup.strategy)
    return setup.passes * weights * (NF4_BYTES + setup.width)


def with_forecast(plan: Plan, request: Request, division: Division) -> Plan:
    """Return the plan with its expected speed: by arithmetic, scaled to the most similar run."""
    config, shape, setup, hardware = request.config, request.shape, division.setup, request.hardware
    devices, row, step_rows = request.ranks.devices, average_row(request, division), max(division.shares)
    link = link_bytes_per_second(hardware, devices, request.launch.num_nodes)
    exchange = exchange_seconds(request, setup, max(division.expected_steps), link or TYPICAL_NETWORK)
    exchange += slices_seconds(request, setup, step_rows * row.tokens)
    stages = list(zip(devices, stage_shares(shape, setup.stages), strict=False))

    def computing(device: Device, rows: int, steps: int) -> float:
        if not rows:
            return 0.0
        flops, parts = step_flops(config, shape, setup, rows, steps, row), stages or [(device, 1.0)]
        return max(_seconds(request, setup, owner, share * len(parts) * flops, share * steps) for owner, share in parts)

    guess = max(map(computing, request.data_devices, division.shares, division.expected_steps))
    guess += optimizer_seconds(request, setup, devices) + exchange
    if setup.activation_offload and setup.device == "cuda":
        moved = 2 * shape.layers * layer_input_bytes(config, shape, setup, int(step_rows * row.tokens))
        guess += moved / setup.sequence_parallel / setup.stage_count / PCIE_BYTES_PER_SECOND
    tokens = division.rows * row.tokens
    work = Work(
        devices=tuple(sorted({same_name(device.name) for device in devices})),
        world_size=len(devices),
        strategy="pipeline" if setup.stages else setup.strategy,
        mode=config.tuning.mode,
        precision=setup.precision,
        offload=setup.offload_optimizer or setup.offload_parameters,
        flops_per_token=_useful_flops(request),
        guess=tokens / guess,
    )
    seconds, basis, communication = None, None, None
    if run := most_like(request.runs, work, same_world=link is None):
        seconds = guess * run.work.guess / run.steady_tokens_per_second
        basis = f"by run `{run.name}`: {run.steady_tokens_per_second:,.0f} tokens/s in its median step"
    elif (setup.device == "cpu" or all(device.peak_flops for device in devices)) and link and not work.offload:
        seconds, basis = guess, _arithmetic(request, setup, row)
    if len(devices) == 1:
        communication = 0.0 if seconds else None
    elif link and not work.offload and (seconds or hardware.network_bytes_per_second):
        communication = exchange
    computing_alone = None if seconds is None or communication is None else max(0.0, seconds - communication)
    total = seconds * plan.steps if seconds and plan.steps else None
    return replace(
        plan,
        tokens_per_second=tokens / seconds if seconds else None,
        seconds_per_step=seconds,
        total_seconds=total,
        communication_seconds=communication,
        communication_share=min(1.0, communication / seconds) if seconds and communication is not None else None,
        mfu=_utilisation(request, tokens / seconds) if seconds else None,
        speed_basis=basis,
        work=work,
        exchanges=exchanges(request, setup, computing_alone),
    )


def _seconds(request: Request, setup: Setup, device: Device, flops: float, micro_steps: float) -> float:
    """Return the computing time of a rank for `micro_steps` with `flops` in total."""
    layers = request.shape.layers
    if setup.device == "cpu":
        return CPU_LAYER_SECONDS * layers * micro_steps + flops / (_threads(request) * CPU_FLOPS_PER_THREAD)
    writing = _expansion_bytes(request.config, request.shape, setup) / (device.bandwidth or TYPICAL_BANDWIDTH)
    speed = (device.peak_flops or TYPICAL_FLOPS) * GPU_EFFICIENCY * (FP32_SHARE if setup.precision == "fp32" else 1.0)
    return max(writing * micro_steps + flops / speed, GPU_LAYER_SECONDS * layers * micro_steps)


def _threads(request: Request) -> float:
    """Return the processor threads per rank."""
    return request.hardware.cpu_threads * request.launch.num_nodes / len(request.ranks.devices)


def _arithmetic(request: Request, setup: Setup, row: AverageRow) -> str:
    """Return the arithmetic of the estimate in words, with the operations of all cards that share a token."""
    flops = step_flops(request.config, request.shape, setup, 1, 1, row) / row.tokens
    flops *= setup.tensor_parallel * setup.sequence_parallel
    cost, device = f"{figure(flops / 1e9)} GFLOP a token", request.ranks.devices[0]
    if setup.device == "cpu":
        threads = figure(_threads(request))
        return f"a guess: {cost} at {threads} threads x {CPU_FLOPS_PER_THREAD / 1e9:.0f} GFLOP/s a rank"
    peak = figure((device.peak_flops or 0.0) / 1e12)
    moved = f", activations over PCIe at {PCIE_BYTES_PER_SECOND / 1e9:.0f} GB/s" if setup.activation_offload else ""
    return f"a guess: {cost} at {GPU_EFFICIENCY:.2f} x {peak} TFLOP/s ({device.name}){moved}"


def step_flops(
    config: Config, shape: ModelShape, setup: Setup, rows: int, accumulation: int, data: AverageRow
) -> float:
    """Return a rank's operations in an optimizer step in which its group trains `rows` average rows."""
    micro = rows / accumulation
    length = data.tokens if setup.layout == "flattened" else data.padded_tokens(micro)
    whole = int(micro)
    lengths = [length] * whole + ([length * (micro - whole)] if micro > whole else [])
    flops = batch_flops(
        config,
        shape.take_slice(setup.tensor_parallel),
        tokens=micro * length,
        labels=micro * data.tokens * data.label_share,
        pairs=attended_pairs(setup, lengths, ragged=data.longest > data.tokens, inside=data.inside),
        recompute=setup.gradient_checkpointing,
    )
    # Each of S stages computes its part; the first micro-step reaches the last stage after the time of S - 1 others.
    stages = setup.stage_count
    return flops * (accumulation + stages - 1) / stages / setup.sequence_parallel


def optimizer_seconds(request: Request, setup: Setup, devices: tuple[Device, ...]) -> float:
    """Return the time of clipping and the update: memory traffic of every trained weight, and Muon's products."""
    shards = len(devices) if setup.sharded else 1
    if setup.device == "cpu":
        bandwidth = CPU_BANDWIDTH / len(devices)  # processes of one CPU share its memory
    else:
        bandwidth = min((device.bandwidth for device in devices if device.bandwidth), default=TYPICAL_BANDWIDTH)
    trained = trainable_parameters(request.config, request.shape.take_slice(setup.tensor_parallel))
    seconds = OPTIMIZER_TRAFFIC * trained / shards / setup.stage_count / bandwidth
    if OPTIMIZERS[setup.optim].matrices:
        seconds += max(_seconds(request, setup, device, muon_flops(request.shape), 0) for device in devices)
    return seconds


def muon_flops(shape: ModelShape) -> float:
    """Return the operations of Muon's five iterations on each matrix of m x n, m <= n: X X^T, its square, their product
    with X.
    """
    sizes = [(sorted((matrix.inputs, matrix.outputs)), matrix) for matrix in shape.matrices if matrix.kind == "linear"]
    return sum(5.0 * matrix.count * (4 * m * m * n + 2 * m**3) for (m, n), matrix in sizes)


def _useful_flops(request: Request) -> float:
    """Return the operations that a token requires: 4 or 6 per weight, without attention's own products."""
    config, shape = request.config, request.shape
    adapters = 0 if config.tuning.mode == "full" else 6 * trainable_parameters(config, shape)
    return (6 if config.tuning.mode == "full" else 4) * shape.active_parameters + adapters


def _utilisation(request: Request, tokens_per_second: float) -> float | None:
    """Return the MFU at a speed, or `None` if a device's peak is not known."""
    peaks = [device.peak_flops for device in request.ranks.devices if device.peak_flops]
    return _useful_flops(request) * tokens_per_second / sum(peaks) if len(peaks) == len(request.ranks.devices) else None


# Complete runs: a plan uses the most similar one in `runs/`, as workers wrote it to `training_metrics.json`.


def same_name(device: str) -> str:
    """Return a common name for a device: the driver's `NVIDIA H200` and the catalogue's `H200` are the same."""
    card = find_card(device)
    return card.name if card else " ".join(device.lower().split())


def most_like(runs: Sequence[PastRun], work: Work, *, same_world: bool) -> PastRun | None:
    """Return the run most similar to this work, the newest of equals; `None` without a similar one."""

    names = ("devices", "mode", "precision", "offload", *(("world_size",) if same_world else ()))

    def distance(there: Work) -> tuple[bool, bool, float]:
        times = abs(math.log(there.flops_per_token / work.flops_per_token))
        return there.world_size != work.world_size, there.strategy != work.strategy, round(times, 2)

    like = [run for run in runs if all(getattr(run.work, name) == getattr(work, name) for name in names)]
    near = [run for run in like if distance(run.work)[2] <= round(math.log(ALIKE), 2)]
    return min(near, key=lambda run: distance(run.work), default=None)


def past_runs() -> tuple[PastRun, ...]:
    """Return the complete runs in `runs/`, the newest first; unreadable ones are skipped."""
    return tuple(run for run in map(_past_run, all_runs()[:NEWEST]) if run)


def _past_run(run: RunFolder) -> PastRun | None:
    facts = read_facts(run.training_metrics)
    if (facts.get("steps") or 0) < LEAST_STEPS:
        return None
    try:
        return record_of(
            {"name": run.name, **{key: facts[key] for key in ("work", "steady_tokens_per_second")}}, PastRun
        )
    except (KeyError, ValueError):  # written by another version, or damaged
        return None
