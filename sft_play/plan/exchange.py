"""What ranks send each other in a step, over which links, and how long that takes. Pure."""

from __future__ import annotations

import math

from sft_play.config.schema import Config
from sft_play.plan.calibration import Calibration, Link
from sft_play.plan.hardware import Device, Hardware
from sft_play.plan.memory import Setup, gradient_bytes, sent_weights, trainable_parameters, trained_bytes
from sft_play.plan.replicas import AVERAGED_AT_A_TIME
from sft_play.plan.shape import ModelShape

NVLINK_CHIPS = frozenset({(8, 0), (9, 0), (10, 0)})
"""Compute capabilities of the chips that are sold with NVLink (A100, H100 and H200, B200)."""
NVLINK_BYTES_PER_SECOND = 150e9
PCIE_BYTES_PER_SECOND = 12e9
LOOPBACK_BYTES_PER_SECOND = 1.5e9
"""Between processes of one CPU over gloo (`make bench`: 1.2 to 1.5 GB/s)."""
GATHERING = ("zero3", "fsdp2")
"""Strategies that send weights in every micro-step."""
REDUCING = ("zero2", *GATHERING)
"""Strategies that reduce gradients in every micro-step, since no rank holds all of them until the next one."""
BUCKET_MIB = 25
"""Of DDP, unless `train.ddp_bucket_cap_mb` says otherwise: each bucket is an all-reduce of its own, with its own latency."""


def communication_seconds(payload_bytes: float, ranks: int, bytes_per_second: float) -> float:
    """Returns the time of a ring all-reduce: 2(N-1)/N * bytes / bandwidth."""
    return 2 * (ranks - 1) / ranks * payload_bytes / bytes_per_second if ranks > 1 else 0.0


def gather_seconds(payload_bytes: float, ranks: int, bytes_per_second: float) -> float:
    """Returns the time in which every rank receives the shards of all others: (N-1)/N * bytes / bandwidth."""
    return (ranks - 1) / ranks * payload_bytes / bytes_per_second if ranks > 1 else 0.0


def link_of(hardware: Hardware, devices: tuple[Device, ...], nodes: int, calibration: Calibration | None) -> Link | None:
    """Returns the slowest link between ranks, as measured where it was; `None` for a network of unknown speed."""
    speed = link_bytes_per_second(hardware, devices, nodes)
    measured = calibration.links.get("gloo" if hardware.kind == "cpu" else "nccl") if calibration else None
    if speed is None or (measured and nodes == 1 and not hardware.network_bytes_per_second):
        return measured if speed is not None else None
    return Link(ranks=2, latency_seconds=0.0, bytes_per_second=speed)


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


def sent_bytes(config: Config, shape: ModelShape, setup: Setup) -> float:
    """Returns the bytes of gradients that a rank has to share in a step, as `launch.compression` and `launch.local_steps` leave them.

    With local steps the trained weights travel instead, once in so many steps.
    """
    launch, width = config.launch, trained_bytes(config, setup)
    if setup.strategy != "ddp":
        return float(trainable_parameters(config, shape) * gradient_bytes(config, setup))
    if launch.local_steps > 1:
        return local_bytes(config, shape, launch.local_steps)
    return compressed_bytes(config, shape, width, launch.compression, launch.powersgd_rank)


def local_bytes(config: Config, shape: ModelShape, steps: int) -> float:
    """Returns the bytes of an average of the trained weights (fp32, or as `launch.compression` narrows them), once in `steps` steps."""
    width = 2 if config.launch.compression in ("fp16", "bf16") else 4
    return trainable_parameters(config, shape) * width / steps


def compressed_bytes(config: Config, shape: ModelShape, width: int, compression: str, rank: int) -> float:
    """Returns the bytes of all trained weights' gradients, of `width` bytes each, as a DDP hook sends them (factors in fp32)."""
    parameters = trainable_parameters(config, shape)
    if compression in ("fp16", "bf16"):
        return float(parameters * min(2, width))
    if compression != "powersgd":
        return float(parameters * width)
    whole = sum(number * n * m for number, n, m in trained_matrices(config, shape))
    factors = sum(number * powersgd_elements(n, m, rank) for number, n, m in trained_matrices(config, shape))
    return 4.0 * (parameters - whole + factors)


def powersgd_elements(n: int, m: int, rank: int) -> int:
    """Returns the values that PowerSGD sends of the gradient of an n x m matrix: factors of (n + m) rank, where that is less than half.

    Vogels et al. 2019 (arXiv 1905.13727); torch's `powerSGD_hook` leaves out what it compresses by less than 2 (`min_compression_rate`).
    """
    factors = (n + m) * min(rank, n, m)
    return factors if 2 * factors < n * m else n * m


def trained_matrices(config: Config, shape: ModelShape) -> list[tuple[int, int, int]]:
    """Returns (how many, rows, columns) of the trained matrices; with adapters A (r x inputs) and B (outputs x r) of each layer."""
    if config.tuning.mode == "full":
        layers = [(one.count, one.outputs, one.inputs) for one in shape.matrices if one.kind in ("linear", "experts")]
        return [(1, shape.vocab_size, shape.hidden_size), *layers]
    r, adapted = config.tuning.lora.r, shape.adapted(config.tuning.lora.target_modules)
    return [(one.count, *size) for one in adapted for size in ((r, one.inputs), (one.outputs, r))]


def exchange_seconds(config: Config, shape: ModelShape, setup: Setup, ranks: int, accumulation: int, link: float) -> float:
    """Returns the time of an optimizer step's communication over links of `link` bytes per second.

    Replicas reduce gradients once per optimizer step (once in `launch.local_steps`). ZeRO-2, ZeRO-3 and FSDP2 reduce and scatter them in
    every micro-step; ZeRO-3 and FSDP2 gather weights at every pass of each, ZeRO-1 and 2 gather what the update made of them.
    """
    gradients = sent_bytes(config, shape, setup)
    if setup.strategy not in REDUCING:
        seconds = communication_seconds(gradients, ranks, link)
    else:
        seconds = accumulation * gather_seconds(gradients, ranks, link)
    if setup.strategy in ("zero1", "zero2"):
        seconds += gather_seconds(trainable_parameters(config, shape) * trained_bytes(config, setup), ranks, link)
    return seconds + accumulation * gathering_seconds(config, shape, setup, ranks, link)


def gathering_seconds(config: Config, shape: ModelShape, setup: Setup, ranks: int, link: float) -> float:
    """Returns the time in which a micro-step's weights arrive under ZeRO-3 and FSDP2; 0 elsewhere."""
    if setup.strategy not in GATHERING:
        return 0.0
    return gather_seconds(gathering_passes(setup) * sent_weights(config, shape, setup), ranks, link)


def gathering_passes(setup: Setup) -> int:
    """Returns how often a micro-step needs the shared-out weights: forward, backward, and forward again where that is recomputed."""
    return 3 if setup.gradient_checkpointing else 2


def latency_seconds(config: Config, shape: ModelShape, setup: Setup, link: Link, ranks: int, accumulation: int) -> float:
    """Returns what the latencies of a step's messages add up to: one for each bucket of gradients and each gathered layer."""
    if ranks < 2 or not link.latency_seconds:
        return 0.0
    messages = _messages(config, shape, setup) * (accumulation if setup.strategy in REDUCING else 1)
    if setup.strategy in GATHERING:
        messages += 2 * shape.layers * accumulation
    return messages * link.latency_seconds * (ranks - 1) / max(1, link.ranks - 1)


def _messages(config: Config, shape: ModelShape, setup: Setup) -> float:
    """Returns how many messages share a step's gradients: one for each bucket; PowerSGD sends two, local steps a few once in so many steps."""
    launch, trained = config.launch, trainable_parameters(config, shape)
    if setup.strategy == "ddp" and launch.local_steps > 1:
        return math.ceil(trained / AVERAGED_AT_A_TIME) / launch.local_steps
    if setup.strategy == "ddp" and launch.compression == "powersgd":
        return 2.0
    bucket = (config.train.ddp_bucket_cap_mb or BUCKET_MIB) * 2**20
    return float(math.ceil(trained * gradient_bytes(config, setup) / bucket))
