"""How fast: seconds of an optimizer step from arithmetic, memory traffic and network. Pure.

A rank's step = micro-steps x (fixed seconds + FLOPs / speed) + what the optimizer reads and writes / bandwidth; the
slowest rank sets the pace, and the exchange comes on top. Speeds are priors, or what `make bench` measured on the very
device (docs/forecast.md).

FLOPs: every linear weight costs a token 2 forward, 2 for the gradient of its input, 2 more when it trains, and 2 again
when the forward pass is recomputed; the head only at tokens with a label (`training/loss.py`). Attention costs 4 d a
layer for each pair of tokens forward, 2.5 times that backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sft_play.config.schema import Config
from sft_play.plan.batch import rank_rows, spans
from sft_play.plan.epoch import Data, Division, rows_data
from sft_play.plan.hardware import Device, fp32_share
from sft_play.plan.memory import NF4_BYTES, quantised_parameters, trainable_parameters
from sft_play.plan.network import exchange_seconds, link_of, slices_seconds, stage_shares
from sft_play.plan.plan import Setup
from sft_play.plan.request import Request
from sft_play.plan.shape import BY_LENGTHS, ModelShape

GPU_EFFICIENCY = 0.35
"""Share of the peak that eager bf16 training reached in published runs of 7B models (0.35 to 0.45)."""
GPU_LAYER_SECONDS = 6e-4
"""Time in which Python launches one layer's kernels, both passes: a floor for small micro-steps (inferred, unverified).
"""
CPU_FLOPS_PER_THREAD = 8e10
"""fp32 operations per second and thread of SmolLM2-135M's steps with adapters on two cores of a server (`make bench`,
2026-11-21).
"""
CPU_LAYER_SECONDS = 8e-3
"""What a layer of a micro-step costs on a CPU however few its tokens: reading its weights, every operation's start (the
same run).
"""
CPU_BANDWIDTH = 2e10
"""Bytes per second, read and written, that a desktop's memory copies (a server: 33 to 66 GB/s, `make bench`)."""
OPTIMIZER_TRAFFIC = 40
"""Bytes moved per trained fp32 weight: clipping reads the gradient and scales it (12), AdamW reads four values and
writes three (28).
"""
TYPICAL_BALANCE = 60.0
"""Operations that training does in the time in which memory moves a byte, on cards whose figures are not known (an A100
54, an RTX 4090 57, an H200 72: 0.35 of the peak over the bandwidth).
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """What is expected; `None` where a device's speed is unknown."""

    tokens_per_second: float | None = None
    """Over all ranks."""
    communication_share: float | None = None
    communication_seconds: float | None = None
    """Of a step."""
    seconds_per_step: float | None = None
    rank_seconds: tuple[float, ...] = ()
    """Of computing, by rank."""
    mfu: float | None = None
    """Model FLOPs utilisation: what every token must cost, recomputation left out, as a share of all devices' peak."""
    basis: str | None = None
    """What the figure rests on, in words."""

    @property
    def computing_seconds(self) -> float | None:
        """Of a step, without its exchange."""
        if self.seconds_per_step is None or self.communication_seconds is None:
            return None
        return self.seconds_per_step - self.communication_seconds


def batch_flops(
    config: Config, shape: ModelShape, *, tokens: float, labels: float, pairs: float, recompute: bool
) -> float:
    """Return floating-point operations of a micro-batch: `labels` of its tokens pass the head; `pairs` of tokens
    attend.
    """
    passes = (6 if config.tuning.mode == "full" else 4) + (2 if recompute else 0)
    head = shape.vocab_size * shape.hidden_size
    linear = passes * ((shape.active_parameters - head) * tokens + head * labels)
    attention = (4.5 if recompute else 3.5) * 4 * shape.heads * shape.head_dim * shape.layers * pairs
    adapters = 0 if config.tuning.mode == "full" else 6 * trainable_parameters(config, shape) * tokens
    return linear + attention + adapters


def attended_pairs(setup: Setup, lengths: Sequence[float], *, ragged: bool | None = None, inside: float = 0.0) -> float:
    """Return the pairs of tokens whose scores are computed for a micro-batch of rows of these lengths.

    Kernels skip the half above the diagonal when no mask is given: always where attention goes by lengths, else for a
    single row, for unmasked ones and for padded ones of one length (unless `ragged` says that real ones differ). Rows
    in one line under a mask are scored against each other too, and the result thrown away.
    """
    if setup.pack_tokens:  # a mask even for one, unless the kernel takes the rows' own lengths
        near = inside or max(lengths, default=0.0)
        return sum(lengths) * (near / 2 if setup.attn_implementation in BY_LENGTHS else sum(lengths))
    uneven = len(set(lengths)) > 1 if ragged is None else ragged and len(lengths) > 1
    masked = len(lengths) > 1 and (setup.layout == "flattened" or (setup.layout == "padded" and uneven))
    if setup.attn_implementation in BY_LENGTHS or (setup.attn_implementation == "sdpa" and not masked):
        return sum(length**2 for length in lengths) / 2
    return sum(lengths) ** 2 if setup.layout == "flattened" else len(lengths) * max(lengths, default=0.0) ** 2


def flops_per_token(
    config: Config, shape: ModelShape, tokens: int, *, recompute: bool, label_share: float = 1.0
) -> float:
    """Return floating-point operations for one trained token in rows of `tokens`, each attending to those before it."""
    return batch_flops(config, shape, tokens=1, labels=label_share, pairs=tokens / 2, recompute=recompute)


WORK_OF_SHAPE = "model_type", "hidden_size", "layers", "heads", "kv_heads", "ffn_size", "vocab_size", "experts"
WORK_OF_SETUP = "precision", "weights_dtype", "gradient_checkpointing", "layout", "optim"


def describe_work(config: Config, shape: ModelShape, setup: Setup) -> dict[str, Any]:
    """Return what the speed of a step depends on beside the device and the rows, as plain data that JSON keeps."""
    lora = config.tuning.lora
    targets = sorted({one.typed for one in shape.adapter_targets(lora.target_modules)})
    adapters = {} if config.tuning.mode == "full" else {"r": lora.r, "targets": targets, "dropout": lora.dropout}
    return {
        **{name: getattr(shape, name) for name in WORK_OF_SHAPE},
        **{name: getattr(setup, name) for name in WORK_OF_SETUP},
        "mode": config.tuning.mode,
        "backend": config.tuning.backend,
        "quantization": config.tuning.quantization,
        "adapters": adapters,
        "attention": setup.attn_implementation,
        "sharded": setup.strategy in ("zero3", "fsdp2"),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How one rank gets on."""

    seconds_per_micro_step: float
    flops_per_second: float
    least_seconds: float = 0.0
    """No micro-step is faster: the time in which Python launches its kernels, while a GPU computes."""
    basis: str = "a prior, not measured here"
    """What it rests on, in words."""

    def seconds(self, flops: float, micro_steps: float) -> float:
        """Return the time of `micro_steps` with `flops` in all."""
        return max(
            self.seconds_per_micro_step * micro_steps + flops / self.flops_per_second, self.least_seconds * micro_steps
        )


def _reached(peak_flops: float, device: Device, setup: Setup) -> float:
    """Return the operations per second that training reaches on a GPU of this peak; in fp32 tensor cores do nothing."""
    slower = fp32_share(device.name, device.compute_capability) if setup.precision == "fp32" else 1.0
    return peak_flops * slower * GPU_EFFICIENCY


def _expansion_bytes(config: Config, shape: ModelShape, setup: Setup) -> float:
    """Each pass over a quantised weight first writes it out in the computation's type: memory traffic once a
    micro-step.
    """
    if config.tuning.mode != "qlora":
        return 0.0
    weights = quantised_parameters(config, shape, setup.strategy)
    return (3 if setup.gradient_checkpointing else 2) * weights * (NF4_BYTES + setup.width)


def token_cost(config: Config, shape: ModelShape, setup: Setup, rows: int, device: Device) -> float:
    """Return what a token of a micro-batch of `rows` costs, in floating-point operations: its own, and writing out
    quantised weights.

    Speeds of one device compare by it even where they are not known.
    """
    flops = flops_per_token(config, shape, setup.row_tokens, recompute=setup.gradient_checkpointing)
    if setup.device != "cuda":
        return flops
    balance = TYPICAL_BALANCE
    if device.peak_flops and device.bandwidth:
        balance = _reached(device.peak_flops, device, setup) / device.bandwidth
    return flops + _expansion_bytes(config, shape, setup) * balance / (rows * setup.row_tokens)


def forecast(request: Request, division: Division, data: Data | None = None) -> Forecast:
    """Return the expected speed of optimizer steps that are divided so; `data`: what the average row is like, if not as
    prepared.
    """
    config, shape, setup, hardware = request.config, request.shape, division.setup, request.hardware
    devices, micro_steps = request.ranks.devices, division.micro_steps
    data = data or rows_data(request, division)
    if setup.offload_optimizer or setup.offload_parameters:
        return Forecast()  # what crosses PCIe in every micro-step, and the CPU's update, were never measured
    link = link_of(hardware, devices, request.launch.num_nodes, request.calibration)
    if link is None:
        return Forecast()
    micros, own_steps = division.batch.micro_batches, division.own_steps
    counts = (
        spans(division.rows, tuple(zip(micros, own_steps, strict=True)))
        if own_steps
        else rank_rows(division.rows, micros)
    )
    exchange = exchange_seconds(request, setup, micro_steps, link)
    exchange += slices_seconds(request, setup, max(counts) * data.row_tokens, micro_steps)
    paces = paces_of(request, setup, data)
    if paces is None:
        return Forecast(
            communication_seconds=exchange if hardware.network_bytes_per_second and len(devices) > 1 else None
        )
    stages = list(zip(devices, stage_shares(shape, setup.stages), strict=False))

    def computing(device: Device, rows: int, steps: int) -> float:
        if not rows:
            return 0.0
        flops, parts = step_flops(config, shape, setup, rows, steps, data), stages or [(device, 1.0)]
        return max(paces[one].seconds(share * len(parts) * flops, share * steps) for one, share in parts)

    spent = tuple(map(computing, request.data_devices, counts, own_steps or (micro_steps,) * len(counts)))
    seconds = max(spent) + optimizer_seconds(request, setup, devices) + exchange
    speed = division.rows * data.row_tokens / seconds
    return Forecast(
        tokens_per_second=speed,
        communication_share=exchange / seconds,
        communication_seconds=exchange,
        seconds_per_step=seconds,
        rank_seconds=spent,
        mfu=_utilisation(request, speed),
        basis=paces[devices[0]].basis,
    )


def paces_of(request: Request, setup: Setup, data: Data) -> dict[Device, Pace] | None:
    """Return the pace of a rank on each device, `None` where the speed of one is unknown. A fit of other work is scaled
    by layers.
    """
    config, shape, calibration, devices = request.config, request.shape, request.calibration, request.ranks.devices
    share = request.launch.num_nodes / len(devices)
    per_token = flops_per_token(
        config, shape, int(data.row_tokens), recompute=setup.gradient_checkpointing, label_share=data.label_share
    )
    found: dict[Device, Pace] = {}
    for device in dict.fromkeys(devices):
        known = calibration.of(device.name) if calibration else None
        elsewhere = known.threads if calibration and known and calibration.others else request.hardware.cpu_threads
        threads = elsewhere * share if setup.device == "cpu" else 1.0
        fit, exact = known.fit_for(describe_work(config, shape, setup), per_token, threads) if known else (None, False)
        if fit:
            other = f"by `make bench` with {fit.model} on {fit.measured}, other work than this"
            found[device] = Pace(
                seconds_per_micro_step=fit.seconds_per_micro_step * shape.layers / fit.layers,
                flops_per_second=fit.flops_per_second * threads / fit.threads,
                basis=f"calibrated by `make bench` on {fit.measured}" if exact else other,
            )
        elif setup.device == "cpu":
            found[device] = Pace(
                seconds_per_micro_step=CPU_LAYER_SECONDS * shape.layers, flops_per_second=threads * CPU_FLOPS_PER_THREAD
            )
        elif device.peak_flops:
            found[device] = Pace(
                seconds_per_micro_step=_expansion_bytes(config, shape, setup) / (device.bandwidth or math.inf),
                flops_per_second=_reached(device.peak_flops, device, setup),
                least_seconds=GPU_LAYER_SECONDS * shape.layers,
            )
        else:
            return None
    return found


def padded_tokens(data: Data, micro: float) -> float:
    """Return the tokens of each of `micro` rows, padded to the longest of them.

    The longest of m rows that are spread evenly around the mean is (m - 1) / (m + 1) of the way to the longest of all.
    """
    return data.row_tokens + max(0.0, data.longest - data.row_tokens) * max(0.0, micro - 1) / (micro + 1)


def step_flops(config: Config, shape: ModelShape, setup: Setup, rows: int, accumulation: int, data: Data) -> float:
    """Return the operations of one rank in an optimizer step of its group's `rows` average rows in `accumulation`
    micro-steps.
    """
    micro = rows / accumulation
    length = data.row_tokens if setup.layout == "flattened" else padded_tokens(data, micro)
    whole = int(micro)
    lengths = [length] * whole + ([length * (micro - whole)] if micro > whole else [])
    flops = batch_flops(
        config,
        shape.take_slice(setup.tensor_parallel),
        tokens=micro * length,
        labels=micro * data.row_tokens * data.label_share,
        pairs=attended_pairs(setup, lengths, ragged=data.longest > data.row_tokens, inside=data.inside),
        recompute=setup.gradient_checkpointing,
    )
    # Of S stages each computes its part; the first micro-step reaches the last stage when S - 1 of that length have
    # passed.
    stages = max(1, len(setup.stages))
    return flops * (accumulation + stages - 1) / stages / setup.sequence_parallel


def optimizer_seconds(request: Request, setup: Setup, devices: tuple[Device, ...]) -> float:
    """Return the time of clipping and the update: they do almost no arithmetic and read and write every trained
    weight.
    """
    shards = len(devices) if setup.strategy not in ("single", "ddp") else 1
    measured = request.calibration.bandwidth if request.calibration else None
    if setup.device == "cpu":
        bandwidth = (measured or CPU_BANDWIDTH) / len(devices)  # processes of one CPU share its memory
    else:
        bandwidth = measured or min((device.bandwidth for device in devices if device.bandwidth), default=None) or 3e11
    trained = trainable_parameters(request.config, request.shape.take_slice(setup.tensor_parallel))
    return OPTIMIZER_TRAFFIC * trained / shards / max(1, len(setup.stages)) / bandwidth


def _utilisation(request: Request, tokens_per_second: float) -> float | None:
    """Return MFU, which training scales by its own speed: 4 or 6 operations a weight, attention's own products left
    out.
    """
    config, shape, devices, calibration = request.config, request.shape, request.ranks.devices, request.calibration
    adapters = 0 if config.tuning.mode == "full" else 6 * trainable_parameters(config, shape)
    per_token = (6 if config.tuning.mode == "full" else 4) * shape.active_parameters + adapters
    measured = calibration.peak_flops if calibration else None
    peaks = [device.peak_flops or measured for device in devices]
    total = sum(peak for peak in peaks if peak)
    if not all(peaks) or not total:
        return None
    # Processes of one CPU share its peak.
    shared = request.launch.num_nodes / len(devices) if calibration and calibration.kind == "cpu" else 1
    return per_token * tokens_per_second / (total * shared)
