"""What ranks send each other in a step, over which links and for how long; what a slow network rules out; and how ranks
divide the same rows (slices of sequences or layers, stages of the model). Pure.

A ring all-reduce takes 2(N-1)/N x bytes / bandwidth: on 3 ranks at 1 Gbit/s, 0.38 s for 33.6 MB (8.4 million fp32
adapter weights) and 18 s for 1.6 GB. Gathering weights takes (N-1)/N x bytes / bandwidth each time: 153 s per
micro-step for a frozen bf16 7B model. Around each layer's attention two all-to-alls change slices with all heads into
complete sequences with a share of the heads, and back (Ulysses, arXiv 2309.14509); the backward pass sends as much
again.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sft_play.config.schema import Config, LaunchConfig
from sft_play.errors import HardwareError, UserError
from sft_play.plan.hardware import Device, Hardware, rate_in_words
from sft_play.plan.memory import (
    gathered_share,
    gradient_bytes,
    states_bytes,
    trainable_parameters,
    trained_bytes,
)
from sft_play.plan.plan import Plan, Setup
from sft_play.plan.request import Request
from sft_play.plan.shape import (
    NOT_STAGED_MODEL_TYPES,
    TENSOR_PARALLEL_MODEL_TYPES,
    ModelShape,
)
from sft_play.text import figure, plural

SLOW_NETWORK = 10e9
"""Bytes per second below which `auto` does not shard weights: PCIe carries more, Ethernet usually less."""
EXAMPLE_NETWORK = 117.5e6
"""Payload of 1 Gbit/s in bytes per second, for the arithmetic where a network's speed is not known."""
EXAMPLE_LOCAL_STEPS = 16
"""Local steps that the table shows where `launch.local_steps` is 1."""
MOST_WAITING = 1.0
"""Longest wait for weights per micro-step, in seconds, that is accepted over a slow network."""
NVLINK: Mapping[tuple[int, int] | None, float] = {(8, 0): 300e9, (9, 0): 450e9, (10, 0): 900e9}
"""Compute capability of chips that are sold with NVLink (A100, H100 and H200, B200) -> bytes per second that a card
sends, by NVIDIA's data sheets.
"""
NVLINK_SHARE = 0.5
"""Part of it that collectives are assumed to reach."""
PCIE_BYTES_PER_SECOND = 12e9
LOOPBACK_BYTES_PER_SECOND = 1.5e9
"""Speed between processes of one CPU over gloo (1.2 to 1.5 GB/s on a server)."""
KEY = "launch.sequence_parallel"
TENSOR_KEY = "launch.tensor_parallel"


def communication_seconds(payload_bytes: float, ranks: int, bytes_per_second: float) -> float:
    """Return the time of a ring all-reduce: 2(N-1)/N * bytes / bandwidth."""
    return 2 * gather_seconds(payload_bytes, ranks, bytes_per_second)


def gather_seconds(payload_bytes: float, ranks: int, bytes_per_second: float) -> float:
    """Return the time in which every rank receives the shards of all others: (N-1)/N * bytes / bandwidth."""
    return (ranks - 1) / ranks * payload_bytes / bytes_per_second if ranks > 1 else 0.0


def link_bytes_per_second(hardware: Hardware, devices: tuple[Device, ...], nodes: int = 1) -> float | None:
    """Return the speed of the slowest link between ranks; `None` for machines on a network of unknown speed."""
    if hardware.network_bytes_per_second:
        return hardware.network_bytes_per_second
    if nodes > 1:
        return None
    if hardware.kind == "cpu":
        return LOOPBACK_BYTES_PER_SECOND
    if not have_nvlink(devices):
        return PCIE_BYTES_PER_SECOND
    return NVLINK_SHARE * min(NVLINK[device.compute_capability] for device in devices)


def have_nvlink(devices: tuple[Device, ...]) -> bool:
    """Return whether all of a machine's cards have chips that are sold with NVLink, and are not the PCIe ones, which
    bridges join in pairs at most.
    """
    return all(d.compute_capability in NVLINK and "pcie" not in d.name.lower() for d in devices)


def sent_bytes(config: Config, shape: ModelShape, setup: Setup, launch: LaunchConfig | None = None) -> float:
    """Return the bytes of gradients that a rank shares per step, after compression and local steps (of `launch`, if
    set).

    With local steps the trained weights travel instead, in fp32 unless compressed, once per `launch.local_steps` steps.
    """
    trained, launch = trainable_parameters(config, shape), launch or config.launch
    if setup.strategy != "ddp":
        return float(trained * gradient_bytes(config, setup))
    width = 4 if launch.local_steps > 1 else trained_bytes(config, setup)
    return trained * (width if launch.compression == "none" else min(2, width)) / launch.local_steps


def exchange_seconds(request: Request, setup: Setup, accumulation: int, link: float) -> float:
    """Return the time of an optimizer step's communication over a link of `link` bytes per second.

    Replicas reduce gradients once per optimizer step (or per `launch.local_steps`). ZeRO-2, ZeRO-3 and FSDP2
    reduce-scatter them in every micro-step; ZeRO-3 and FSDP2 also gather weights, ZeRO-1 and ZeRO-2 after
    the update.
    """
    config, shape, ranks = request.config, request.shape, setup.world_size // setup.copies
    if request.launch.num_nodes > 1:  # each slice has its own ring, and those of a machine share its link
        link /= min(setup.copies, max(1, setup.world_size // request.launch.num_nodes))
    gradients = sent_bytes(config, shape.take_slice(setup.tensor_parallel), setup) / setup.stage_count
    if setup.strategy != "zero2" and not setup.gathers:
        seconds = communication_seconds(gradients, ranks, link)
    else:
        seconds = accumulation * gather_seconds(gradients, ranks, link)
    if setup.strategy in ("zero1", "zero2"):
        seconds += gather_seconds(trainable_parameters(config, shape) * trained_bytes(config, setup), ranks, link)
    return seconds + accumulation * gathering_seconds(config, shape, setup, ranks, link)


def gathering_seconds(config: Config, shape: ModelShape, setup: Setup, ranks: int, link: float) -> float:
    """Return the time to gather a micro-step's weights under ZeRO-3 and FSDP2; 0 for other strategies."""
    if not setup.gathers:
        return 0.0
    return gather_seconds(setup.gatherings * sent_weights(config, shape, setup), ranks, link)


def sent_weights(config: Config, shape: ModelShape, setup: Setup) -> float:
    """Return the bytes of all weights as ZeRO-3 and FSDP2 gather them for one pass."""
    alone = replace(setup, world_size=setup.tensor_parallel, offload_optimizer=False, offload_parameters=False)
    whole = states_bytes(config, shape.take_slice(setup.tensor_parallel), alone)
    frozen = (whole["frozen"] + whole["quant_state"]) * gathered_share(setup, setup.weight_bytes)
    return frozen + whole.get("trained", 0.0) * gathered_share(setup, trained_bytes(config, setup))


def exchanges(request: Request, setup: Setup, computing_seconds: float | None) -> tuple[Mapping[str, Any], ...]:
    """Return the cost of each way to share gradients under DDP over a network of known speed; empty otherwise.

    Fields are `choice` (what to type), `chosen`, `bytes` and `seconds` per optimizer step on the slowest link, and
    `share` of a step unless computation hides it (`None` where the devices' speed is not known).
    """
    config, shape, ranks = request.config, request.shape, setup.world_size
    link = request.hardware.network_bytes_per_second
    if setup.strategy != "ddp" or ranks < 2 or not link or setup.copies > 1:
        return ()
    own, width = config.launch, trained_bytes(config, setup)
    plain = "fp32" if width == 4 else "16 bits"
    names: dict[Any, str] = {"none": f"none ({plain})", "fp16": "fp16", "bf16": "bf16"}
    steps = own.local_steps if own.local_steps > 1 else EXAMPLE_LOCAL_STEPS
    ways = {f"compression: {name}": replace(own, compression=kind, local_steps=1) for kind, name in names.items()}
    rows = []
    for choice, launch in (ways | {f"local_steps: {steps}": replace(own, local_steps=steps)}).items():
        sent = sent_bytes(config, shape, setup, launch)
        seconds = communication_seconds(sent, ranks, link)
        share = None if computing_seconds is None else seconds / (seconds + computing_seconds)
        rows.append({"choice": choice, "chosen": launch == own, "bytes": sent, "seconds": seconds, "share": share})
    return tuple(rows)


def show_exchanges(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of the table of `exchanges`."""
    timed = any(row["share"] is not None for row in rows)
    lines = [
        f"  {'to share a step, without latency':<34}{'MB':>10}{'s a step':>10}" + (f"{'of it':>8}" if timed else "")
    ]
    for row in rows:
        share = f"{row['share']:>8.1%}" if row["share"] is not None else ""
        mark = "  <- this run" if row["chosen"] else ""
        lines.append(
            f"  {row['choice']:<34}{figure(row['bytes'] / 1e6):>10}{figure(row['seconds'], 2):>10}{share}{mark}"
        )
    return lines


def check_local_steps(config: Config, setup: Setup) -> None:
    """Raise `UserError` for local steps in fp16, where each rank would scale its loss separately; `config.rules`
    refuses them for a typed `train.fp16` before any hardware is detected.
    """
    launch = config.launch
    exact = "cards with bf16, or TRAIN_BF16=false to compute in fp32 (slower, more memory)"
    if setup.world_size > 1 and setup.precision == "fp16" and launch.local_steps > 1:
        raise UserError(
            f"`launch.local_steps` is {launch.local_steps}, but these cards compute in fp16, where each rank would skip"
            " other steps",
            hint=f"LAUNCH_LOCAL_STEPS=1 LAUNCH_COMPRESSION=fp16 halves what travels; or {exact}",
        )


def may_quantise(config: Config) -> bool:
    """Return whether `TUNING_MODE=qlora` has an effect and is accepted: all weights of a random model are trained."""
    return config.tuning.mode != "qlora" and config.model.init != "random"


def slow_network(request: Request) -> str | None:
    """Return the network between ranks in words if weights should not travel over it, otherwise `None`."""
    speed = request.hardware.network_bytes_per_second
    if len(request.ranks.devices) == 1 or (speed is None and request.launch.num_nodes == 1):
        return None
    if speed is None:
        return "a network of unknown speed"
    return f"a network of {rate_in_words(speed)}" if speed < SLOW_NETWORK else None


def gathering_arithmetic(request: Request, setup: Setup) -> str:
    """Return in words how long every micro-step waits for sharded weights, with the arithmetic."""
    stated, world = request.hardware.network_bytes_per_second, setup.world_size
    speed = stated or EXAMPLE_NETWORK
    weights = sent_weights(request.config, request.shape, setup)
    seconds = gathering_seconds(request.config, request.shape, setup, world, speed)
    return (
        f"every micro-step waits {figure(seconds)} s for weights = {setup.gatherings} x {figure(weights / 1e9)}"
        f" GB x {world - 1}/{world} / {rate_in_words(speed)}"
        + ("" if stated else ", if it is 1 Gbit/s (LAUNCH_NETWORK= states it)")
    )


def check_gathering(request: Request, plan: Plan, instead: str) -> Plan:
    """Return the plan with a note that its weights travel over a slow network, and what sends less `instead`, if any.

    Raise `UserError` if each micro-step waits for them longer than `MOST_WAITING` over one of stated speed, unless
    `launch.slow_network: allow` permits it.
    """
    config, speed, slow = request.config, request.hardware.network_bytes_per_second, slow_network(request)
    arithmetic = gathering_arithmetic(request, plan)
    smaller = "TUNING_MODE=qlora, " if may_quantise(config) else ""
    instead = instead or (
        f"neither replicas nor a pipeline would fit and be faster; {smaller}shorter rows or a smaller model help"
    )
    waits = speed is not None and gathering_seconds(config, request.shape, plan, plan.world_size, speed)
    if waits > MOST_WAITING and config.launch.slow_network != "allow":
        raise UserError(
            f"{plan.strategy} over {slow} would mostly wait for weights: {arithmetic}",
            hint=f"{instead}; LAUNCH_SLOW_NETWORK=allow runs it anyway",
        )
    who = "`launch.strategy`" if config.launch.strategy != "auto" else "the command"
    return plan.with_reason("slow", f"SLOW: {who} forces {plan.strategy} over {slow}: {arithmetic}. {instead}")


# Ranks that train the same rows together, each with a slice of the sequences or layers, or a stage of the model.


def check_slices(request: Request) -> dict[str, str]:
    """Return notes on how ranks divide the work of a group.

    Raise `UserError` for a model or a number of ranks that does not allow it, `HardwareError` for unlike devices.
    """
    shape, size, world, launch = request.shape, request.group_size, len(request.ranks.devices), request.config.launch
    if size == 1 or request.stages > 1:
        return {}
    key = KEY if launch.sequence_parallel > 1 else TENSOR_KEY
    variable = key.upper().replace(".", "_")
    setting = f"`{key}` is {size}"
    # Several queries share keys and values; a slice of the layers needs separate ones, a slice of a sequence sends
    # copies.
    heads = shape.heads if key == KEY else math.gcd(shape.heads, shape.kv_heads)
    what = "attention heads" if key == KEY else f"attention heads with {shape.kv_heads} of keys and values"
    refusals = (
        (
            world % size > 0,
            f", which does not divide {plural(world, 'process')}",
            f"make train-distributed with a multiple of {size} processes; {variable}=1 cuts nothing",
        ),
        (
            heads % size > 0,
            f", but {shape.heads} {what} cannot be divided evenly among {size} ranks",
            f"{variable}=1, or a number that divides {math.gcd(heads, world)}",
        ),
        (
            key == KEY and shape.moving_rope,
            ", but this model's rotary angles depend on the longest position of a line, and each rank sees only its"
            " slice's",
            f"{variable}=1, or another model",
        ),
        (
            key == TENSOR_KEY and shape.model_type not in TENSOR_PARALLEL_MODEL_TYPES,
            f", but the layers of `{shape.model_type}` are not among those that can be sliced; see docs/parallelism.md",
            f"{variable}=1; `make train-fsdp` shards the weights of any model",
        ),
        (
            key == TENSOR_KEY and shape.ffn_size % size > 0,
            f", which does not divide the feed-forward size, {shape.ffn_size}",
            f"{variable}=1",
        ),
    )
    for refused, why, hint in refusals:
        if refused:
            raise UserError(setting + why, hint=hint)
    if len(names := dict.fromkeys(device.name for device in request.ranks.devices)) > 1:
        raise HardwareError(
            f"{setting}, but equal slices would wait for the slowest of {', '.join(names)}",
            hint="use cards of one kind",
        )
    network = slow_network(request)
    if _apart(request) and network and launch.slow_network != "allow":
        raise UserError(
            f"{setting}, but that joins ranks of several machines over {network}, which send each other every layer's"
            " states",
            hint=f"a number that divides the ranks of each machine ({', '.join(map(str, request.ranks.nodes))})",
        )
    share = f"{shape.heads // size} of {shape.heads} heads"
    if key == TENSOR_KEY:
        return {"slices": f"each layer in {size} slices: a rank computes {share}, for all tokens"}
    return {"slices": f"each line in {size} slices: a rank has 1/{size} of its activations, and attends with {share}"}


def slices_bytes(request: Request, setup: Setup, tokens: float) -> float:
    """Return the bytes that a rank sends in a step in which its group trains `tokens` tokens.

    Slices of sequences send queries, keys, values and attention's output, with keys and values repeated for each rank.
    Slices of layers take two all-reduces of the hidden states in each pass, which send 2 (N - 1) / N times their size.
    """
    shape, size = request.shape, request.group_size
    if setup.stages:
        # First and last stage hold the same matrix and sum its gradient.
        both = shape.tied and request.config.tuning.mode == "full"
        table = shape.vocab_size * shape.hidden_size * trained_bytes(request.config, setup) if both else 0
        return 2 * tokens * shape.hidden_size * setup.width + table
    if setup.tensor_parallel > 1:
        return setup.passes * shape.layers * 2 * tokens * shape.hidden_size * setup.width * 2 * (size - 1) / size
    token = 2 * (shape.heads + math.lcm(shape.kv_heads, size)) * shape.head_dim * setup.width
    return setup.passes * shape.layers * token * tokens / size * (size - 1) / size


def slices_seconds(request: Request, setup: Setup, tokens: float) -> float:
    """Return the time of the traffic of slices in a step; 0 without slices, or over a network of unknown speed."""
    hardware, apart = request.hardware, _apart(request)
    near = hardware if apart else replace(hardware, network=None)
    link = link_bytes_per_second(near, request.ranks.devices, len(request.ranks.nodes) if apart else 1)
    return 0.0 if request.group_size == 1 or link is None else slices_bytes(request, setup, tokens) / link


def _apart(request: Request) -> bool:
    """Return whether a network connects the ranks of a group: between machines, or as described by `8GB+8GB@1Gbit`."""
    nodes = request.ranks.nodes
    joined = len(nodes) == 1 and request.hardware.network_bytes_per_second is not None
    return joined or any(ranks % request.group_size for ranks in nodes)


def stages_of(request: Request, setup: Setup, reasons: dict[str, str]) -> tuple[int, ...]:
    """Return the layers of each stage; empty without a pipeline. Raise `UserError` for what cannot be staged.

    A stage gets layers in proportion to its device's speed, as far as its memory holds them with one row; the head
    counts as layers with as many weights.
    """
    if request.config.launch.strategy != "pipeline":
        return ()
    stages, shape, world = request.stages, request.shape, len(request.ranks.devices)
    if stages < 2 or world % stages:
        hint = (
            "make train-distributed with NUM_GPUS=2 or more"
            if world < 2
            else "LAUNCH_STAGES=auto puts all of them into one pipeline"
        )
        raise UserError(
            f"`launch.strategy: pipeline` with {plural(stages, 'stage')} on {plural(world, 'process')}", hint=hint
        )
    if stages > shape.layers:
        raise UserError(
            f"{stages} stages, but the model has {shape.layers} layers", hint=f"LAUNCH_STAGES={shape.layers}"
        )
    if shape.model_type in NOT_STAGED_MODEL_TYPES:
        raise UserError(
            f"`launch.strategy: pipeline`: the layers of `{shape.model_type}` cannot be split into stages: they read"
            " more than the output of the previous layer",
            hint="`make train-fsdp` shards the weights of any model",
        )
    devices = request.ranks.devices[:stages]
    if any(request.ranks.devices[first : first + stages] != devices for first in range(0, world, stages)):
        raise HardwareError(
            "pipelines whose machines differ cannot be trained side by side", hint="LAUNCH_STAGES=auto makes one of all"
        )
    most = [_most_layers(request, setup, stage, stages) for stage in range(stages)]
    head = _head(shape)
    speeds = (
        [device.peak_flops or 1.0 for device in devices]
        if all(device.peak_flops for device in devices)
        else [1.0] * stages
    )
    layers = [1] * stages
    while sum(layers) < shape.layers:
        # Where memory holds no more, the remaining layers are assigned anyway, and the plan reports what is lacking.
        open_to = [stage for stage in range(stages) if layers[stage] < most[stage]] or list(range(stages))
        loads = {stage: (layers[stage] + 1 + (head if stage == stages - 1 else 0)) / speeds[stage] for stage in open_to}
        layers[min(loads, key=lambda stage: loads[stage])] += 1
    reasons["stages"] = f"stages: {', '.join(map(str, layers))} layers on ranks 0 to {stages - 1}, by speed and memory"
    return tuple(layers)


def _head(shape: ModelShape) -> float:
    """Return the number of layers that compute as much as the head."""
    return shape.vocab_size * shape.hidden_size / max(1, shape.layer_linear_parameters)


def stage_shares(shape: ModelShape, stages: Sequence[int]) -> list[float]:
    """Return each stage's share of the computation of a pass."""
    whole = shape.layers + _head(shape)
    return [(layers + (_head(shape) if stage == len(stages) - 1 else 0)) / whole for stage, layers in enumerate(stages)]


def _most_layers(request: Request, setup: Setup, stage: int, stages: int) -> int:
    """Return how many layers a stage holds with one row, with recomputation where it is not switched off."""
    config, room = request.config, request.rank_room[stage]
    least = replace(setup, gradient_checkpointing=config.train.gradient_checkpointing is not False, stage=stage)

    def need(layers: int) -> int:
        return request.need(replace(least, stages=tuple(layers if other == stage else 1 for other in range(stages))), 1)

    return max(1, bisect_right(range(1, request.shape.layers + 1), room, key=need))
