"""What ranks send each other in a step, over which links and for how long; which ways to share a step a network does not carry. Pure.

An all-reduce around a ring takes 2(N-1)/N x bytes / bandwidth: of 33.6 MB (8.4 million fp32 adapter weights) on 3 ranks at 1 Gbit/s
0.38 s, of 1.6 GB 18 s. Gathering weights takes (N-1)/N x bytes / bandwidth in each pass: of a frozen bf16 7B model 153 s a micro-step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sft_play.config.rules import network_keys
from sft_play.config.schema import Config
from sft_play.errors import UserError
from sft_play.plan.calibration import Calibration, Link
from sft_play.plan.hardware import Device, Hardware, rate_in_words
from sft_play.plan.memory import (
    AVERAGED_AT_A_TIME,
    gathered_share,
    gradient_bytes,
    states_bytes,
    trainable_parameters,
    trained_bytes,
)
from sft_play.plan.plan import Setup
from sft_play.plan.request import Request
from sft_play.plan.shape import ModelShape
from sft_play.text import figure

SLOW_NETWORK = 10e9
"""Bytes per second below which weights are not shared out unasked: PCIe carries more, Ethernet mostly less."""
EXAMPLE_NETWORK = 117.5e6
"""What 1 Gbit/s carries, for the arithmetic where a network's speed is not known."""
EXAMPLE_LOCAL_STEPS = 16
"""What the table shows where `launch.local_steps` is 1."""
MOST_GATHERING = 0.5
"""Share of a step beyond which waiting for weights is refused."""
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
    """Return the time of a ring all-reduce: 2(N-1)/N * bytes / bandwidth."""
    return 2 * gather_seconds(payload_bytes, ranks, bytes_per_second)


def gather_seconds(payload_bytes: float, ranks: int, bytes_per_second: float) -> float:
    """Return the time in which every rank receives the shards of all others: (N-1)/N * bytes / bandwidth."""
    return (ranks - 1) / ranks * payload_bytes / bytes_per_second if ranks > 1 else 0.0


def link_of(hardware: Hardware, devices: tuple[Device, ...], nodes: int, calibration: Calibration | None) -> Link | None:
    """Return the slowest link between ranks, as measured where it was; `None` for a network of unknown speed."""
    speed = link_bytes_per_second(hardware, devices, nodes)
    measured = calibration.links.get("gloo" if hardware.kind == "cpu" else "nccl") if calibration else None
    if speed is None or (measured and nodes == 1 and not hardware.network_bytes_per_second):
        return measured if speed is not None else None
    return Link(ranks=2, latency_seconds=0.0, bytes_per_second=speed)


def link_bytes_per_second(hardware: Hardware, devices: tuple[Device, ...], nodes: int = 1) -> float | None:
    """Return the speed of the slowest link between ranks; `None` where machines meet over a network of unknown speed."""
    if hardware.network_bytes_per_second:
        return hardware.network_bytes_per_second
    if nodes > 1:
        return None
    if hardware.kind == "cpu":
        return LOOPBACK_BYTES_PER_SECOND
    linked = all(device.compute_capability in NVLINK_CHIPS for device in devices)
    return NVLINK_BYTES_PER_SECOND if linked else PCIE_BYTES_PER_SECOND


def sent_bytes(config: Config, shape: ModelShape, setup: Setup) -> float:
    """Return the bytes of gradients that a rank has to share in a step, as `launch.compression` and `launch.local_steps` leave them.

    With local steps the trained weights travel instead, once in so many steps.
    """
    launch, width = config.launch, trained_bytes(config, setup)
    if setup.strategy != "ddp":
        return float(trainable_parameters(config, shape) * gradient_bytes(config, setup))
    if launch.local_steps > 1:
        return local_bytes(config, shape, launch.local_steps)
    return compressed_bytes(config, shape, width, launch.compression)


def local_bytes(config: Config, shape: ModelShape, steps: int) -> float:
    """Return the bytes of an average of the trained weights (fp32, or as `launch.compression` narrows them), once in `steps` steps."""
    width = 2 if config.launch.compression in ("fp16", "bf16") else 4
    return trainable_parameters(config, shape) * width / steps


def compressed_bytes(config: Config, shape: ModelShape, width: int, compression: str) -> float:
    """Return the bytes of all trained weights' gradients, of `width` bytes each, as a DDP hook sends them (factors in fp32)."""
    parameters = trainable_parameters(config, shape)
    if compression in ("fp16", "bf16"):
        return float(parameters * min(2, width))
    if compression != "powersgd":
        return float(parameters * width)
    matrices, rank = trained_matrices(config, shape), config.launch.powersgd_rank
    whole = sum(number * n * m for number, n, m in matrices)
    factors = sum(number * powersgd_elements(n, m, rank) for number, n, m in matrices)
    return 4.0 * (parameters - whole + factors)


def powersgd_elements(n: int, m: int, rank: int) -> int:
    """Return the values that PowerSGD sends of the gradient of an n x m matrix: factors of (n + m) rank, where that is less than half.

    Vogels et al. 2019 (arXiv 1905.13727); torch's `powerSGD_hook` leaves out what it compresses by less than 2 (`min_compression_rate`).
    """
    factors = (n + m) * min(rank, n, m)
    return factors if 2 * factors < n * m else n * m


def trained_matrices(config: Config, shape: ModelShape) -> list[tuple[int, int, int]]:
    """Return (how many, rows, columns) of the trained matrices; with adapters A (r x inputs) and B (outputs x r) of each layer."""
    if config.tuning.mode == "full":
        layers = [(one.count, one.outputs, one.inputs) for one in shape.matrices if one.kind in ("linear", "experts")]
        return [(1, shape.vocab_size, shape.hidden_size), *layers]
    r, adapted = config.tuning.lora.r, shape.adapter_targets(config.tuning.lora.target_modules)
    return [(one.count, *size) for one in adapted for size in ((r, one.inputs), (one.outputs, r))]


def exchange_seconds(config: Config, shape: ModelShape, setup: Setup, ranks: int, accumulation: int, link: float) -> float:
    """Return the time of an optimizer step's communication over links of `link` bytes per second.

    Replicas reduce gradients once per optimizer step (once in `launch.local_steps`). ZeRO-2, ZeRO-3 and FSDP2 reduce and scatter them in
    every micro-step; ZeRO-3 and FSDP2 gather weights at every pass of each, ZeRO-1 and 2 gather what the update made of them.
    """
    ranks //= setup.copies
    gradients = sent_bytes(config, shape.take_slice(setup.tensor_parallel), setup) / max(1, len(setup.stages))
    if setup.strategy not in REDUCING:
        seconds = communication_seconds(gradients, ranks, link)
    else:
        seconds = accumulation * gather_seconds(gradients, ranks, link)
    if setup.strategy in ("zero1", "zero2"):
        seconds += gather_seconds(trainable_parameters(config, shape) * trained_bytes(config, setup), ranks, link)
    return seconds + accumulation * gathering_seconds(config, shape, setup, ranks, link)


def gathering_seconds(config: Config, shape: ModelShape, setup: Setup, ranks: int, link: float) -> float:
    """Return the time in which a micro-step's weights arrive under ZeRO-3 and FSDP2; 0 elsewhere."""
    if setup.strategy not in GATHERING:
        return 0.0
    return gather_seconds(gathering_passes(setup) * sent_weights(config, shape, setup), ranks, link)


def sent_weights(config: Config, shape: ModelShape, setup: Setup) -> float:
    """Return the bytes of all weights as ZeRO-3 and FSDP2 gather them for one pass."""
    alone = replace(setup, world_size=setup.tensor_parallel, offload_optimizer=False, offload_parameters=False)
    whole = states_bytes(config, shape.take_slice(setup.tensor_parallel), alone)
    return sum(whole.get(part, 0) for part in ("frozen", "quant_state", "trained")) * gathered_share(setup)


def gathering_passes(setup: Setup) -> int:
    """Return how often a micro-step needs the shared-out weights: forward, backward, and forward again where that is recomputed."""
    return 3 if setup.gradient_checkpointing else 2


def latency_seconds(config: Config, shape: ModelShape, setup: Setup, link: Link, ranks: int, accumulation: int) -> float:
    """Return what the latencies of a step's messages add up to: one for each bucket of gradients and each gathered layer."""
    if ranks < 2 or not link.latency_seconds:
        return 0.0
    messages = _messages(config, shape, setup) * (accumulation if setup.strategy in REDUCING else 1)
    if setup.strategy in GATHERING:
        messages += 2 * shape.layers * accumulation
    return messages * link.latency_seconds * (ranks - 1) / max(1, link.ranks - 1)


def _messages(config: Config, shape: ModelShape, setup: Setup) -> float:
    """Return how many messages share a step's gradients: one for each bucket; PowerSGD sends two, local steps a few once in so many steps."""
    launch, trained = config.launch, trainable_parameters(config, shape)
    if setup.strategy == "ddp" and launch.local_steps > 1:
        return math.ceil(trained / AVERAGED_AT_A_TIME) / launch.local_steps
    if setup.strategy == "ddp" and launch.compression == "powersgd":
        return 2.0
    bucket = (config.train.ddp_bucket_cap_mb or BUCKET_MIB) * 2**20
    return float(math.ceil(trained * gradient_bytes(config, setup) / bucket))


def exchanges(request: Request, setup: Setup, computing_seconds: float | None) -> tuple[Mapping[str, Any], ...]:
    """Return what each way to share gradients under DDP would cost over a network whose speed was given.

    `choice`: what to type; `bytes` and `seconds` of an optimizer step, on the slowest link; `share` of a step, unless computation
    hides it (`None` where the devices' speed is not known).
    """
    config, shape, ranks, link = request.config, request.shape, setup.world_size, request.hardware.network_bytes_per_second
    if setup.strategy != "ddp" or ranks < 2 or not link or setup.copies > 1:
        return ()
    launch, width = config.launch, trained_bytes(config, setup)
    names = {
        "none": f"none ({'fp32' if width == 4 else '16 bits'})", "fp16": "fp16", "bf16": "bf16", "powersgd": f"powersgd, rank {launch.powersgd_rank}",
    }  # fmt: skip
    steps = launch.local_steps if launch.local_steps > 1 else EXAMPLE_LOCAL_STEPS
    choices = [
        (
            f"compression: {name}",
            launch.local_steps == 1 and launch.compression == kind,
            compressed_bytes(config, shape, width, kind),
        )
        for kind, name in names.items()
    ]
    choices.append((f"local_steps: {steps}", launch.local_steps > 1, local_bytes(config, shape, steps)))
    found = []
    for choice, chosen, sent in choices:
        seconds = communication_seconds(sent, ranks, link)
        share = None if computing_seconds is None else seconds / (seconds + computing_seconds)
        found.append({"choice": choice, "chosen": chosen, "bytes": sent, "seconds": seconds, "share": share})
    return tuple(found)


def show_exchanges(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of `exchanges`."""
    timed = any(row["share"] is not None for row in rows)
    lines = [f"  {'to share a step, without latency':<34}{'MB':>10}{'s a step':>10}" + (f"{'of it':>8}" if timed else "")]
    for row in rows:
        share = f"{row['share']:>8.1%}" if row["share"] is not None else ""
        mark = "  <- this run" if row["chosen"] else ""
        lines.append(f"  {row['choice']:<34}{figure(row['bytes'] / 1e6):>10}{figure(row['seconds'], 2):>10}{share}{mark}")
    return lines


def describe_waiting(request: Request, setup: Setup, micro_steps: int) -> list[str]:
    """Return what a step sends where the speed of the network was given."""
    config, speed = request.config, request.hardware.network_bytes_per_second
    if speed is None or setup.world_size == 1:
        return []
    seconds = exchange_seconds(config, request.shape, setup, setup.world_size, micro_steps, speed)
    what = "weights and gradients" if setup.strategy in GATHERING else "gradients"
    if config.launch.local_steps > 1:
        what = f"trained weights, once in {config.launch.local_steps} steps,"
    return [
        f"a step waits {figure(seconds, 2)} s for {what} over the network of {rate_in_words(speed)}, unless computation hides it"
    ]


def check_slow_network_keys(config: Config, setup: Setup) -> list[str]:
    """Return which keys of slow networks have no effect with one process. Raise `UserError` for those that fp16 rules out.

    Gradients that overflow would stay in PowerSGD's error feedback for good; with local steps each rank would scale its loss by itself.
    `config.rules` says the same of a typed `train.fp16` before any hardware is looked at.
    """
    launch = config.launch
    if setup.world_size == 1:
        return [f"`{key}` {value} has no effect: one process shares nothing" for key, value in network_keys(config)]
    exact = "cards with bf16, or TRAIN_BF16=false to compute in fp32 (slower, more memory)"
    if setup.precision == "fp16" and launch.local_steps > 1:
        raise UserError(
            f"`launch.local_steps` is {launch.local_steps}, but these cards compute in fp16, where each rank would skip other steps",
            hint=f"LAUNCH_LOCAL_STEPS=1 LAUNCH_COMPRESSION=fp16 halves what travels; or {exact}",
        )
    if setup.precision == "fp16" and launch.compression == "powersgd":
        raise UserError(
            "`launch.compression` is `powersgd`, but these cards compute in fp16, where a gradient that overflows would stay in every later step",
            hint=f"LAUNCH_COMPRESSION=fp16 halves what travels; or {exact}",
        )
    return []


def may_quantise(config: Config) -> bool:
    """Whether `TUNING_MODE=qlora` would change something, and be taken: random weights are trained whole."""
    return config.tuning.mode != "qlora" and config.model.init != "random"


def slow_network(request: Request) -> str | None:
    """Return the network between ranks in words when weights should not travel over it, else `None`."""
    speed = request.hardware.network_bytes_per_second
    if len(request.ranks.devices) == 1 or (speed is None and request.launch.num_nodes == 1):
        return None
    if speed is None:
        return "a network of unknown speed"
    return f"a network of {rate_in_words(speed)}" if speed < SLOW_NETWORK else None


def gathering_arithmetic(request: Request, setup: Setup) -> str:
    """Return what sharded weights cost in every micro-step."""
    stated, world = request.hardware.network_bytes_per_second, setup.world_size
    speed = stated or EXAMPLE_NETWORK
    weights = sent_weights(request.config, request.shape, setup)
    seconds = gathering_seconds(request.config, request.shape, setup, world, speed)
    return (
        f"every micro-step waits {figure(seconds)} s for weights = {gathering_passes(setup)} x {figure(weights / 1e9)} GB x {world - 1}/{world} / "
        f"{rate_in_words(speed)}" + ("" if stated else ", if it is 1 Gbit/s")
    )


def check_gathering(request: Request, setup: Setup, micro_steps: int, computing_seconds: float | None) -> None:
    """Raise `UserError` for shared-out weights over a stated network on which waiting for them takes most of a step.

    `computing_seconds` is the forecast of a step's computing, with the speed of typical cards where theirs is not known.
    `launch.slow_network: allow` lets it pass.
    """
    config, speed = request.config, request.hardware.network_bytes_per_second
    slow = speed is not None and slow_network(request)  # a fast one hides behind computing what it takes
    if setup.strategy not in GATHERING or not speed or not slow or config.launch.slow_network == "allow":
        return
    waits = micro_steps * gathering_seconds(config, request.shape, setup, setup.world_size, speed)
    if computing_seconds is None or waits <= MOST_GATHERING * (waits + computing_seconds):
        return
    smaller = "TUNING_MODE=qlora, " if may_quantise(config) else ""
    raise UserError(
        f"{setup.strategy} over {slow} would wait for weights {waits / (waits + computing_seconds):.0%} of each step: "
        f"{gathering_arithmetic(request, setup)}, {figure(waits)} s in the {micro_steps} of a step",
        hint=f"replicas send gradients alone: LAUNCH_STRATEGY=ddp (make train-distributed); {smaller}shorter rows or a smaller model make "
        "them fit; LAUNCH_SLOW_NETWORK=allow runs it all the same",
    )
