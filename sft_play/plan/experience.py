"""What complete runs teach the forecast: the speed that each made, beside what arithmetic alone had expected of it.

Workers write it into `training_metrics.json`; a plan takes it from the run in `runs/` that is most like it: same
devices, mode and precision, and a model of half to twice the work for each token.
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
"""Models of which one takes so many times the operations of the other for each token are still alike."""
LEAST_STEPS = 5
"""What a run must have made."""
NEWEST = 200
"""Run folders that are looked at, at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What is trained on what, as far as speeds compare by it."""

    devices: tuple[str, ...]
    """`same_name` of each kind."""
    world_size: Positive
    strategy: str
    mode: str
    precision: str
    offload: bool
    flops_per_token: Speed
    """What each token must cost, recomputation and attention's own products left out."""
    guess: Speed
    """Tokens per second by arithmetic alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PastRun:
    """A complete run."""

    name: str
    work: Work
    steady_tokens_per_second: Speed
    """At the median of its steps."""


def same_name(device: str) -> str:
    """Return what is alike in the names of one device: `NVIDIA H200` by its driver, `H200` in the catalogue."""
    card = find_card(device)
    return card[0] if card else " ".join(device.lower().split())


def most_like(runs: Sequence[PastRun], work: Work, *, same_world: bool) -> PastRun | None:
    """Return the run that is most like this work, the newest of equals; `None` where none is like it."""

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
    """Return what the complete runs in `runs/` tell, the newest first; what cannot be read is left out."""
    return tuple(run for run in map(_past_run, all_runs()[:NEWEST]) if run)


def _past_run(run: RunFolder) -> PastRun | None:
    facts = read_facts(run.training_metrics)
    if (facts.get("steps") or 0) < LEAST_STEPS:
        return None
    try:
        return record_of(
            {"name": run.name, **{key: facts[key] for key in ("work", "steady_tokens_per_second")}}, PastRun
        )
    except (KeyError, ValueError):  # another version's, or damaged
        return None
