"""Ranks that train the same rows together, each with slices of their lines or layers, or a stage of the model: what can be cut, where,
and what it sends. Pure.

Around each layer's attention two all-to-alls change slices with all heads into whole lines with a share of the heads, and back
(Ulysses, arXiv 2309.14509); the backward pass sends as much again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from sft_play.errors import HardwareError, UserError
from sft_play.plan.memory import trained_bytes
from sft_play.plan.network import link_of, slow_network
from sft_play.plan.plan import Setup
from sft_play.plan.request import Request, global_rows
from sft_play.plan.shape import NOT_STAGED_MODEL_TYPES, SLICED_MODEL_TYPES, TENSOR_PARALLEL_MODEL_TYPES, VARLEN, ModelShape
from sft_play.text import figure, plural

KEY = "launch.sequence_parallel"
TENSOR_KEY = "launch.tensor_parallel"


def check_slices(request: Request) -> list[str]:
    """Return what groups of ranks do. Raise `UserError` for a model or ranks that cannot be grouped so, `HardwareError` for unlike devices."""
    shape, size, world, launch = request.shape, request.group_size, len(request.ranks.devices), request.config.launch
    if size == 1 or request.stages > 1:
        return []
    key = KEY if launch.sequence_parallel > 1 else TENSOR_KEY
    variable = key.upper().replace(".", "_")
    given = f"`{key}` is {size}"
    # Queries are repeated over keys and values, of which a slice of the layers needs its own; a slice of a line sends copies.
    heads = shape.heads if key == KEY else math.gcd(shape.heads, shape.kv_heads)
    what = "attention heads" if key == KEY else f"attention heads with {shape.kv_heads} of keys and values"
    fitting = max(number for number in range(1, world + 1) if world % number == 0 and heads % number == 0)
    other = f" NUM_GPUS={size}, or a number that divides {world}" if world > 1 else ""
    refusals = (
        (world % size > 0, f", which does not divide {plural(world, 'process')}", f"make train-distributed{other}; {variable}=1 cuts nothing"),
        (
            heads % size > 0, f", but {shape.heads} {what} cannot be shared out evenly among so many ranks", f"{variable}={fitting}",
        ),
        (
            key == KEY and shape.moving_rope,
            ", but this model's rotary angles depend on the longest position of a line, and each rank sees only its slice's",
            f"{variable}=1, or another model",
        ),
        (
            key == TENSOR_KEY and shape.model_type not in TENSOR_PARALLEL_MODEL_TYPES,
            f", but the layers of `{shape.model_type}` are not among those that can be shared out; see docs/parallelism.md",
            f"{variable}=1; `make train-fsdp` shares out the weights of any model",
        ),
        (
            key == TENSOR_KEY and shape.ffn_size % size > 0,
            f", which does not divide the feed-forward size, {shape.ffn_size}", f"{variable}=1",
        ),
    )  # fmt: skip
    for refused, why, hint in refusals:
        if refused:
            raise UserError(given + why, hint=hint)
    if len(names := dict.fromkeys(device.name for device in request.ranks.devices)) > 1:
        raise HardwareError(
            f"{given}, but equal slices would wait for the slowest of {', '.join(names)}", hint="use cards of one kind"
        )
    network = slow_network(request)
    if _apart(request) and network and launch.slow_network != "allow":
        raise UserError(
            f"{given}, but that joins ranks of several machines over {network}, which send each other every layer's states",
            hint=f"a number that divides the ranks of each machine ({', '.join(map(str, request.ranks.nodes))})",
        )
    if key == TENSOR_KEY:
        return [f"each layer in {size} slices: a rank computes {shape.heads // size} of {shape.heads} heads, for all tokens"]
    return [
        f"each line in {size} slices: a rank has 1/{size} of its activations, and attends with {shape.heads // size} of {shape.heads} heads"
    ]


def attention_for_slices(request: Request, why: str | None) -> str:
    """Return the attention that computes slices. Raise `UserError` where the family has others, or `why` says that it cannot run."""
    family = request.shape.model_type
    if family not in SLICED_MODEL_TYPES:
        why = f"`{family}` is not among the families whose tokens meet in attention alone, computed by lengths"
    if why:
        raise UserError(f"`{KEY}` is {request.group_size}, but {why}", hint="LAUNCH_SEQUENCE_PARALLEL=1")
    return VARLEN


def sent_bytes(request: Request, setup: Setup, tokens: float) -> float:
    """Return what a rank sends in a step of `tokens` of its group.

    Of lines: queries, keys, values and attention's output, keys repeated for each. Of layers: two all-reduces of the hidden states in each
    pass, which send 2 (N - 1) / N times their size.
    """
    shape, size = request.shape, request.group_size
    if setup.stages:
        both = shape.tied and request.config.tuning.mode == "full"  # of what first and last stage hold, the gradient is summed
        table = shape.vocab_size * shape.hidden_size * trained_bytes(request.config, setup) if both else 0
        return 2 * tokens * shape.hidden_size * setup.width + table
    if setup.tensor_parallel > 1:
        return _passes(request, setup) * 2 * tokens * shape.hidden_size * setup.width * 2 * (size - 1) / size
    token = 2 * (shape.heads + math.lcm(shape.kv_heads, size)) * shape.head_dim * setup.width
    return _passes(request, setup) * token * tokens / size * (size - 1) / size


def slices_seconds(request: Request, setup: Setup, tokens: float, micro_steps: int) -> float:
    """Return the seconds of what slices send in a step of so many micro-steps; 0 without them, or over a network of unknown speed."""
    hardware, apart = request.hardware, _apart(request)
    near = hardware if apart else replace(hardware, network_bytes_per_second=None)
    link = link_of(near, request.ranks.devices, len(request.ranks.nodes) if apart else 1, request.calibration)
    if request.group_size == 1 or link is None:
        return 0.0
    messages = 2 * micro_steps * (1 if setup.stages else _passes(request, setup))
    return sent_bytes(request, setup, tokens) / link.bytes_per_second + messages * link.latency_seconds


def describe_traffic(request: Request, setup: Setup, tokens: float, micro_steps: int) -> list[str]:
    """Return in words what slices send in a step."""
    if request.group_size == 1:
        return []
    sent, seconds = sent_bytes(request, setup, tokens) / 1e9, slices_seconds(request, setup, tokens, micro_steps)
    what = "hidden states" if setup.copies > 1 else "queries, keys, values and outputs"
    return [
        f"{'stages' if setup.stages else 'slices'}: a rank sends {figure(sent, 2)} GB of {what} a step, {figure(seconds, 2)} s by forecast"
    ]


def _passes(request: Request, setup: Setup) -> int:
    return (3 if setup.gradient_checkpointing else 2) * request.shape.layers


def _apart(request: Request) -> bool:
    """Whether a network lies between the ranks of a group: of several machines, or of one that is described so (`8GB+8GB@1Gbit`)."""
    nodes = request.ranks.nodes
    joined = len(nodes) == 1 and request.hardware.network_bytes_per_second is not None
    return joined or any(ranks % request.group_size for ranks in nodes)


FILLS = 4
"""Micro-batches for each stage where the data allow it: then at most a fifth of a step is spent on filling and emptying the pipeline."""


def stages_of(request: Request, setup: Setup, reasons: list[str]) -> tuple[int, ...]:
    """Return the layers of each stage; empty without a pipeline. Raise `UserError` for what cannot be staged.

    A stage takes layers by its device's speed, as far as its memory holds them with one row; the head counts as layers of as many weights.
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
        raise UserError(f"`launch.strategy: pipeline` with {plural(stages, 'stage')} on {plural(world, 'process')}", hint=hint)
    if stages > shape.layers:
        raise UserError(f"{stages} stages, but the model has {shape.layers} layers", hint=f"LAUNCH_STAGES={shape.layers}")
    if shape.model_type in NOT_STAGED_MODEL_TYPES:
        raise UserError(
            f"`launch.strategy: pipeline`: the layers of `{shape.model_type}` cannot be stages, since they read more than the layer before",
            hint="`make train-fsdp` shares out the weights of any model",
        )
    devices = request.ranks.devices[:stages]
    if any(request.ranks.devices[first : first + stages] != devices for first in range(0, world, stages)):
        raise HardwareError(
            "pipelines whose machines differ cannot be trained side by side", hint="LAUNCH_STAGES=auto makes one of all"
        )
    most = [_most_layers(request, setup, stage, stages) for stage in range(stages)]
    head = _head(shape)
    speeds = [device.peak_flops or 1.0 for device in devices] if all(device.peak_flops for device in devices) else [1.0] * stages
    layers = [1] * stages
    while sum(layers) < shape.layers:
        # Where memory holds no more they are dealt out all the same: the plan then says what is lacking.
        open_to = [stage for stage in range(stages) if layers[stage] < most[stage]] or list(range(stages))
        loads = {stage: (layers[stage] + 1 + (head if stage == stages - 1 else 0)) / speeds[stage] for stage in open_to}
        layers[min(loads, key=lambda stage: loads[stage])] += 1
    reasons.append(f"stages: {', '.join(map(str, layers))} layers on ranks 0 to {stages - 1}, by speed and memory")
    return tuple(layers)


def _head(shape: ModelShape) -> float:
    """Return the layers that compute as much as the head."""
    return shape.vocab_size * shape.hidden_size / max(1, shape.layer_linear_parameters)


def shares(shape: ModelShape, stages: Sequence[int]) -> list[float]:
    """Return each stage's share of a pass."""
    whole = shape.layers + _head(shape)
    return [(layers + (_head(shape) if stage == len(stages) - 1 else 0)) / whole for stage, layers in enumerate(stages)]


def _most_layers(request: Request, setup: Setup, stage: int, stages: int) -> int:
    """Return how many layers a stage holds with one row, recomputed if need be."""
    config, room = request.config, request.rank_room[stage]
    least = replace(setup, gradient_checkpointing=config.train.gradient_checkpointing is not False, stage=stage)
    low, high = 1, request.shape.layers
    while low < high:
        middle = (low + high + 1) // 2
        tried = replace(least, stages=tuple(middle if one == stage else 1 for one in range(stages)))
        low, high = (middle, high) if request.need(tried, 1) <= room else (low, middle - 1)
    return low


def fill_stages(request: Request, setup: Setup, fitting: tuple[int, ...]) -> tuple[int, ...]:
    """Return the rows of a micro-batch at most, one at least: of a pipeline so few that a step has micro-batches to keep all stages busy."""
    fitting = tuple(max(1, rows) for rows in fitting)
    if not setup.stages or not request.divides:
        return fitting
    rows = global_rows(request.config.train, setup.data_world) / setup.data_world
    wanted = max(1, math.floor(rows / (FILLS * len(setup.stages))))
    return tuple(min(most, wanted) for most in fitting)
