"""Pipelines (`launch.strategy: pipeline`): which layers are on which rank, and how many micro-batches keep the stages busy. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from sft_play.errors import HardwareError, UserError
from sft_play.plan.plan import Setup
from sft_play.plan.request import Request, global_rows
from sft_play.plan.shape import NOT_STAGED_MODEL_TYPES, ModelShape
from sft_play.text import plural

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


def filling(request: Request, setup: Setup, fitting: tuple[int, ...]) -> tuple[int, ...]:
    """Return the rows of a micro-batch at most, one at least: of a pipeline so few that a step has micro-batches to keep all stages busy."""
    fitting = tuple(max(1, rows) for rows in fitting)
    if not setup.stages or not request.divides:
        return fitting
    rows = global_rows(request.config.train, setup.data_world) / setup.data_world
    wanted = max(1, math.floor(rows / (FILLS * len(setup.stages))))
    return tuple(min(most, wanted) for most in fitting)
