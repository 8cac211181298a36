"""Pipelines (`launch.strategy: pipeline`): which layers are on which rank. Pure."""

from __future__ import annotations

from sft_play.errors import UserError
from sft_play.plan.request import Request


def stages_of(request: Request) -> tuple[int, ...]:
    """Return the layers of each stage; empty without a pipeline. Raise `UserError` for what cannot be staged."""
    stages, layers = request.stages, request.shape.layers
    if request.config.launch.strategy != "pipeline":
        return ()
    if stages > layers:
        raise UserError(f"{stages} stages, but the model has {layers} layers", hint=f"LAUNCH_STAGES={layers}")
    return tuple(layers * (stage + 1) // stages - layers * stage // stages for stage in range(stages))
