"""How fast: tokens per second before anything was measured, and what the network costs. Pure; a prior, not a promise.

FLOPs per token: N linear weights with the head; full tuning 6N, adapters 4N (no gradient of frozen weights), one more forward
pass (2N) with recomputation; attention 2 S h per layer and pass, causal.
"""

from __future__ import annotations

from sft_play.config.schema import Config
from sft_play.plan.hardware import Device
from sft_play.plan.memory import trainable_parameters
from sft_play.plan.shape import ModelShape

GPU_EFFICIENCY = 0.35
"""Share of the peak that eager bf16 training reached in published runs of 7B models (0.35 to 0.45)."""
CPU_FLOPS_PER_THREAD = 4.5e10
"""fp32 operations per second and thread that SmolLM2-135M with adapters reached on two cores (about 220 tokens/s, 2026-11)."""
NVLINK_BYTES_PER_SECOND = 150e9
PCIE_BYTES_PER_SECOND = 12e9


def flops_per_token(config: Config, shape: ModelShape, tokens: int, *, recompute: bool) -> float:
    """Returns floating-point operations for one trained token in rows of `tokens`."""
    weights = shape.linear_parameters + shape.vocab_size * shape.hidden_size
    attention = 2 * tokens * shape.heads * shape.head_dim * shape.layers
    full = config.tuning.mode == "full"
    passes = (6 if full else 4) + (2 if recompute else 0)
    return passes * weights + (4.5 if recompute else 3.5) * attention + (0 if full else 6 * trainable_parameters(config, shape))


def compute_tokens_per_second(flops: float, device: Device, *, threads: int, cpu: bool) -> float | None:
    """Returns the forecast for one rank, `None` where the device's speed is unknown."""
    if cpu:
        return threads * CPU_FLOPS_PER_THREAD / flops
    return device.peak_flops * GPU_EFFICIENCY / flops if device.peak_flops else None


def communication_seconds(payload_bytes: float, ranks: int, bytes_per_second: float) -> float:
    """Returns the time of a ring all-reduce: 2(N-1)/N * bytes / bandwidth."""
    return 2 * (ranks - 1) / ranks * payload_bytes / bytes_per_second if ranks > 1 else 0.0
