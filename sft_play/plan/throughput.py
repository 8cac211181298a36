"""How fast: tokens per second before anything was measured, and what the network costs. Pure; a prior, not a promise.

FLOPs per token: N linear weights with the head; full tuning 6N, adapters 4N (no gradient of frozen weights), one more forward
pass (2N) with recomputation; attention 2 S h per layer and pass, causal.
"""

from __future__ import annotations

from dataclasses import dataclass

from sft_play.config.schema import Config
from sft_play.plan.hardware import Device, Hardware
from sft_play.plan.memory import Setup, sent_weights, trainable_parameters, trained_bytes
from sft_play.plan.shape import ModelShape

GPU_EFFICIENCY = 0.35
"""Share of the peak that eager bf16 training reached in published runs of 7B models (0.35 to 0.45)."""
CPU_FLOPS_PER_THREAD = 4.5e10
"""fp32 operations per second and thread that SmolLM2-135M with adapters reached on two cores (about 220 tokens/s, 2026-11)."""
NVLINK_CHIPS = frozenset({(8, 0), (9, 0), (10, 0)})
"""Compute capabilities of the chips that are sold with NVLink (A100, H100 and H200, B200)."""
NVLINK_BYTES_PER_SECOND = 150e9
PCIE_BYTES_PER_SECOND = 12e9
LOOPBACK_BYTES_PER_SECOND = 4e9
"""Between processes of one CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """What is expected before anything was measured; `None` where a device's speed is unknown."""

    tokens_per_second: float | None = None
    """Over all ranks."""
    communication_share: float | None = None
    seconds_per_step: float | None = None


def flops_per_token(config: Config, shape: ModelShape, tokens: int, *, recompute: bool) -> float:
    """Returns floating-point operations for one trained token in rows of `tokens`."""
    weights = shape.active_parameters
    attention = 2 * tokens * shape.heads * shape.head_dim * shape.layers
    full = config.tuning.mode == "full"
    passes = (6 if full else 4) + (2 if recompute else 0)
    return passes * weights + (4.5 if recompute else 3.5) * attention + (0 if full else 6 * trainable_parameters(config, shape))


def compute_tokens_per_second(flops: float, device: Device, *, threads: float, cpu: bool) -> float | None:
    """Returns the forecast for one rank, `None` where the device's speed is unknown."""
    if cpu:
        return threads * CPU_FLOPS_PER_THREAD / flops
    return device.peak_flops * GPU_EFFICIENCY / flops if device.peak_flops else None


def communication_seconds(payload_bytes: float, ranks: int, bytes_per_second: float) -> float:
    """Returns the time of a ring all-reduce: 2(N-1)/N * bytes / bandwidth."""
    return 2 * (ranks - 1) / ranks * payload_bytes / bytes_per_second if ranks > 1 else 0.0


def gather_seconds(payload_bytes: float, ranks: int, bytes_per_second: float) -> float:
    """Returns the time in which every rank receives the shards of all others: (N-1)/N * bytes / bandwidth."""
    return (ranks - 1) / ranks * payload_bytes / bytes_per_second if ranks > 1 else 0.0


def forecast(
    config: Config,
    shape: ModelShape,
    setup: Setup,
    hardware: Hardware,
    devices: tuple[Device, ...],
    *,
    rows: int,
    accumulation: int,
    row_tokens: float,
    nodes: int = 1,
) -> Forecast:
    """Returns the expected speed of optimizer steps of `rows` rows of `row_tokens` tokens; the slowest rank sets the pace."""
    ranks = len(devices)
    link = link_bytes_per_second(hardware, devices, nodes)
    flops = flops_per_token(config, shape, int(row_tokens), recompute=setup.gradient_checkpointing)
    cpu = hardware.kind == "cpu"
    threads = hardware.cpu_threads / ranks if cpu else 1
    speeds = [compute_tokens_per_second(flops, device, threads=threads, cpu=cpu) for device in devices]
    known = [speed for speed in speeds if speed is not None]
    if len(known) < ranks or link is None:
        return Forecast()
    tokens = rows * row_tokens
    exchange = exchange_seconds(config, shape, setup, ranks, accumulation, link)
    seconds = tokens / (min(known) * ranks) + exchange
    return Forecast(tokens_per_second=tokens / seconds, communication_share=exchange / seconds, seconds_per_step=seconds)


def link_bytes_per_second(hardware: Hardware, devices: tuple[Device, ...], nodes: int = 1) -> float | None:
    """Returns the speed of the slowest link between ranks; `None` where machines meet over a network of unknown speed."""
    if hardware.network_bytes_per_second:
        return hardware.network_bytes_per_second
    if nodes > 1:
        return None
    if hardware.kind == "cpu":
        return LOOPBACK_BYTES_PER_SECOND
    linked = all(device.compute_capability in NVLINK_CHIPS for device in devices)
    return NVLINK_BYTES_PER_SECOND if linked else PCIE_BYTES_PER_SECOND


def exchange_seconds(config: Config, shape: ModelShape, setup: Setup, ranks: int, accumulation: int, link: float) -> float:
    """Returns the time of an optimizer step's communication over links of `link` bytes per second.

    Gradients once per optimizer step; under ZeRO-3 and FSDP2 the weights too, at every pass of every micro-step.
    """
    seconds = communication_seconds(trainable_parameters(config, shape) * trained_bytes(config, setup), ranks, link)
    if setup.strategy in ("zero3", "fsdp2"):
        passes = 3 if setup.gradient_checkpointing else 2
        seconds += accumulation * gather_seconds(passes * sent_weights(config, shape, setup), ranks, link)
    return seconds
