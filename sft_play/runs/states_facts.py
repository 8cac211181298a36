"""`states.json` of a checkpoint: what a launcher must know of its states before it starts anything. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.errors import CheckpointError
from sft_play.files import read_json

NAME = "states.json"
FORMAT = 1
"""Raised when files written before can no longer be read."""


def optimizer_file(rank: int) -> str:
    """Returns the name of the file with a rank's pieces of optimizer states."""
    return f"optimizer-rank{rank}.safetensors"


def random_file(rank: int) -> str:
    """Returns the name of the file with a rank's random states."""
    return f"rng-rank{rank}.safetensors"


def is_state_file(name: str) -> bool:
    """Whether a file of a checkpoint holds states, which nothing but `make resume` reads."""
    return name == NAME or name.startswith(("optimizer-rank", "rng-rank"))


@dataclass(frozen=True, kw_only=True, slots=True)
class StatesFacts:
    """The content of `states.json`."""

    format: int
    strategy: str
    world_size: int
    optimizer: str
    """Name of its class."""
    reshardable: bool
    """Whether its states can be cut anew: one number for each element of a parameter, updated without a look at the others."""
    files: int
    """Ranks that wrote pieces: all where states are sharded, else one."""
    groups: list[dict[str, Any]]
    scheduler: dict[str, Any] | None
    scaler: dict[str, Any] | None
    engine: dict[str, Any] | None
    """DeepSpeed's counters."""
    counters: dict[str, Any]
    """What `training_metrics.json` counts from the run's start."""
    own: dict[str, Any] | None = None
    """Of ranks that have states of their own under DDP (`training.states.own`): their number, and what each has trained since the last
    average; `None` elsewhere."""


def read_facts(checkpoint: Path) -> StatesFacts:
    """Reads `states.json`. Raises `CheckpointError` when it is missing (an older version's pickles) or not one of ours."""
    path = checkpoint / NAME
    try:
        facts: dict[str, Any] = read_json(path)
        if facts["format"] != FORMAT:
            raise CheckpointError(
                f"its states have the format {facts['format']}; this version reads {FORMAT}",
                place=str(path),
                hint="resume it with the version that wrote it, which its stamp.json names (`make stamp`)",
            )
        return StatesFacts(**facts)
    except FileNotFoundError:
        raise CheckpointError(
            f"`{checkpoint.name}` has no `{NAME}`: an older version wrote it, with states in pickles, which are not read any more"
            " since loading one can run any program",
            place=str(checkpoint),
            hint="resume it with the version that wrote it (see stamp.json), or start a new run from its weights: set `model.name` to"
            " a full model's checkpoint, or to what `make merge` makes of an adapter",
        ) from None
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"it cannot be read: {error}", place=str(path), hint="take an earlier checkpoint") from error


SHARDED = frozenset({"zero1", "zero2", "zero3", "fsdp2"})


def check_states(checkpoint: Path, *, strategy: str, world_size: int) -> None:
    """Raises `CheckpointError` when a checkpoint's states do not fit another strategy or number of processes.

    Only an optimizer whose states cannot be cut anew is refused: one that looks at a parameter as a whole, where parameters are sharded.
    """
    facts = read_facts(checkpoint)
    same = facts.strategy == strategy and (facts.world_size == world_size or strategy not in SHARDED)
    if facts.reshardable or same or not {facts.strategy, strategy} & SHARDED:
        return
    raise CheckpointError(
        f"the states of the optimizer `{facts.optimizer}` cannot be cut anew: they were written by {facts.world_size} processes under"
        f" {facts.strategy}, and {world_size} under {strategy} would go on",
        place=str(checkpoint),
        hint=f"resume with NUM_GPUS={facts.world_size} and the command that started the run, or start a new run with `train.optim:"
        " adamw_torch`, whose states fit any number of processes",
    )
