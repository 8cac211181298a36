"""Facts of complete runs that improve the forecast: the speed of each, and what arithmetic alone had predicted.

Workers write them to `training_metrics.json`; a plan uses the most similar run in `runs/`: the same devices, mode and
precision, and a model with half to twice the work per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from sft_play.config.reader import Positive, Range, record_of
from sft_play.plan.hardware import find_card
from sft_play.runs.folder import RunFolder
from sft_play.runs.gate import all_runs, read_facts

Speed = Annotated[float, Range(above=0, maximum=1e30)]
ALIKE = 2.0
"""Largest ratio of operations per token between models that count as similar."""
LEAST_STEPS = 5
"""Steps that a run must have made."""
NEWEST = 200
"""Largest number of run folders that are read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The facts about model and hardware by which speeds are compared."""

    devices: tuple[str, ...]
    """`same_name` of each kind of device."""
    world_size: Positive
    strategy: str
    mode: str
    precision: str
    offload: bool
    flops_per_token: Speed
    """Operations that a token requires, without recomputation and attention's own products."""
    guess: Speed
    """Tokens per second by arithmetic alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PastRun:
    """A complete run."""

    name: str
    work: Work
    steady_tokens_per_second: Speed
    """Speed at the median of its steps."""


def same_name(device: str) -> str:
    """Return a common name for a device: the driver's `NVIDIA H200` and the catalogue's `H200` are the same."""
    card = find_card(device)
    return card.name if card else " ".join(device.lower().split())


def most_like(runs: Sequence[PastRun], work: Work, *, same_world: bool) -> PastRun | None:
    """Return the run most similar to this work, the newest of equals; `None` without a similar one."""

    def distance(run: PastRun) -> tuple[bool, bool, float]:
        there = run.work
        times = abs(math.log(there.flops_per_token / work.flops_per_token))
        return there.world_size != work.world_size, there.strategy != work.strategy, round(times, 2)

    def is_like(there: Work) -> bool:
        names = ("devices", "mode", "precision", "offload", *(("world_size",) if same_world else ()))
        times = there.flops_per_token / work.flops_per_token
        return all(getattr(there, name) == getattr(work, name) for name in names) and 1 / ALIKE <= times <= ALIKE

    return min((run for run in runs if is_like(run.work)), key=distance, default=None)


def past_runs() -> tuple[PastRun, ...]:
    """Return the complete runs in `runs/`, the newest first; unreadable ones are skipped."""
    return tuple(run for run in map(_past_run, all_runs()[:NEWEST]) if run)


def _past_run(run: RunFolder) -> PastRun | None:
    facts = read_facts(run.training_metrics)
    if (facts.get("steps") or 0) < LEAST_STEPS:
        return None
    try:
        return record_of(
            {"name": run.name, **{key: facts[key] for key in ("work", "steady_tokens_per_second")}}, PastRun
        )
    except (KeyError, ValueError):  # written by another version, or damaged
        return None
