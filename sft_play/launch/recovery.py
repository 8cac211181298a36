"""Decisions after an attempt: a restart after a lost rank (`launch.max_restarts`), or less memory after it ran out.

Decisions are pure; `attempt.run_attempts` carries them out. The launcher decides, not torchrun, which knows nothing
about checkpoints. After memory ran out (STATUS B10), the next attempt has half the micro-batch and twice the
accumulation, or otherwise recomputation; if neither helps, the run ends with advice. The rows of each step, and so the
losses, stay the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sft_play.config.schema import Config
from sft_play.launch.run_folder import RESTARTED, read_events
from sft_play.launch.verdict import OUT_OF_MEMORY, Outcome
from sft_play.plan.make import ways_out
from sft_play.plan.plan import LaunchRequest, Plan, RankPlan
from sft_play.plan.request import Request
from sft_play.runs.checkpoints import step_of
from sft_play.runs.folder import RunFolder
from sft_play.text import plural

FIRST_SECONDS, MOST_SECONDS = 2.0, 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Following:
    """What follows an attempt: the end, or another attempt. Node 0 decides, and sends it to all machines as JSON."""

    again: bool = False
    outcome: Outcome | None = None
    """How the run ended, with the reason why it does not continue; `None` if there is nothing to add."""
    message: str = ""
    event: str = ""
    """Event that every machine records before another attempt, with `facts`."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    pause: float = 0.0
    """Seconds before the next attempt."""
    less: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the launch's request that change because memory ran out; the plan then keeps `facts`."""

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Following:
        """Return the decision that node 0 sent; all machines have the same version."""
        return Following(**{**value, "outcome": Outcome(**value["outcome"]) if value.get("outcome") else None})


def remedy(request: Request, plan: Plan, outcome: Outcome, retries: int) -> LaunchRequest | str:
    """Return the launch of the next attempt after `retries`, or why there is none, with remedies.

    `request` is that of the plan whose rank ran out of memory.
    """
    assert outcome.cause == OUT_OF_MEMORY
    config, launch = request.config, request.launch
    most, phase = config.launch.max_oom_retries, outcome.doing.get("phase")
    if retries >= most:
        used_up = f"{retries} of {most} retries are used up (`launch.max_oom_retries`)"
        why = used_up if retries else "`launch.max_oom_retries` is 0"
    elif phase == "loading":
        why = "the model alone does not fit: a smaller batch would not help"
    elif has_grown(plan, outcome):
        return launch  # a plan with a recovery keeps its own shares
    elif rows_of(plan, outcome) > 1:
        return replace(launch, halvings=launch.halvings + 1)
    elif plan.pack_tokens and config.train.packing == "auto" and phase != "evaluating":
        return replace(launch, unpack=True)
    elif config.train.gradient_checkpointing == "auto" and not plan.gradient_checkpointing:
        return replace(launch, force_checkpointing=True)
    else:
        state = "on already" if plan.gradient_checkpointing else "off as configured"
        why = f"the micro-batch is 1 already and gradient checkpointing is {state}"
    ways = ways_out(request, plan, plan.ranks[outcome.rank or 0])
    return f"{why}\n\nhint: " + (
        "choose one: " + "; ".join(map(str, ways)) if ways else "use a smaller model, or more memory"
    )


def rows_of(plan: Plan, outcome: Outcome) -> int:
    """Return the rows (with packing: packs) that the failed rank had at a time, in training or evaluation."""
    if outcome.doing.get("phase") == "evaluating":
        return plan.eval_batch_size
    in_force = outcome.doing.get("micro_batch")
    if isinstance(in_force, int):
        return in_force
    failed = _failed(plan, outcome)
    return failed.micro_batch if failed else max(rank.micro_batch for rank in plan.ranks)


def has_grown(plan: Plan, outcome: Outcome) -> bool:
    """Return whether training (`training.balance`) gave the failed rank more rows at a time than planned."""
    failed = _failed(plan, outcome)
    return (
        outcome.doing.get("phase") != "evaluating"
        and failed is not None
        and rows_of(plan, outcome) > failed.micro_batch
    )


def _failed(plan: Plan, outcome: Outcome) -> RankPlan | None:
    return plan.ranks[outcome.rank] if outcome.rank is not None and outcome.rank < len(plan.ranks) else None


def division(plan: Plan) -> dict[str, Any]:
    """Return how a plan divides the work, for events and stamps."""
    steps = [rank.accumulation for rank in plan.ranks]
    return {
        "micro_batches": [rank.micro_batch for rank in plan.ranks],
        "accumulation": max(steps),
        **({"accumulations": steps} if len(set(steps)) > 1 else {}),
        "packing": plan.pack_tokens > 0,
        "gradient_checkpointing": plan.gradient_checkpointing,
        "eval_batch_size": plan.eval_batch_size,
    }


def facts(before: Plan, after: Plan, outcome: Outcome, checkpoint: Path | None) -> dict[str, Any]:
    """Return the fields of the event `recovered`."""
    return {
        "rank": outcome.rank,
        "cause": outcome.cause,
        "doing": dict(outcome.doing),
        "before": division(before),
        "after": division(after),
        "checkpoint": checkpoint.name if checkpoint else None,
    }


def announcement(
    config: Config, before: Plan, after: Plan, outcome: Outcome, checkpoint: Path | None, retry: int
) -> str:
    """Return a line that says what happened, what changes and where the run continues."""
    what = outcome.first_line
    host = f" ({outcome.host})" if outcome.host else ""
    where = f"rank {outcome.rank}{host}: " if outcome.rank is not None and f"rank {outcome.rank} " not in what else ""
    changes = []
    if before.slots != after.slots:
        changes.append(f"micro-batch x accumulation {_divided(before)} -> {_divided(after)} on every rank")
    elif has_grown(before, outcome):
        failed = _failed(before, outcome)
        planned = failed.micro_batch if failed else 0
        changes.append(f"micro-batch {rows_of(before, outcome)} -> {planned}, and shares stay the plan's from here on")
    elif after.eval_batch_size != before.eval_batch_size:
        changes.append(f"rows evaluated together {before.eval_batch_size} -> {after.eval_batch_size}")
    if before.pack_tokens and not after.pack_tokens:
        changes.append("packing on -> off")
    if after.gradient_checkpointing and not before.gradient_checkpointing:
        changes.append("gradient checkpointing off -> on")
    return (
        f"recovering: {where}{what}: {', '.join(changes)}, global batch {after.global_batch_size} as before; "
        f"continuing from {_start(checkpoint)} (retry {retry} of {config.launch.max_oom_retries})"
    )


def _start(checkpoint: Path | None) -> str:
    return checkpoint.name if checkpoint else "step 0: there is no checkpoint yet"


def _divided(plan: Plan) -> str:
    """Return how a plan divides the work: `4 x 2`, or `8 x 2, 4 x 3` on unlike ranks."""
    return ", ".join(f"{micro} x {steps}" for micro, steps in dict.fromkeys(plan.slots))


LESS: Mapping[str, Any] = {"halvings": 0, "force_checkpointing": False, "unpack": False}
"""Field of a launch's request that reduces memory -> its value before memory ran out."""


def remedies_so_far(run: RunFolder) -> dict[str, Any]:
    """Return the values of `LESS` in the run's last launch."""
    last = next((event["launch"] for event in reversed(read_events(run)) if event.get("launch")), LESS)
    return {name: last.get(name, value) for name, value in LESS.items()}


# ---- Restarts


@dataclass(kw_only=True, slots=True)
class Restarts:
    """Counts the restarts of a launch, of which `limit` in a row are allowed without a newer checkpoint."""

    limit: int
    step: int
    """Step of the newest checkpoint at the last start."""
    used: int = 0
    """Restarts since a newer checkpoint appeared."""
    retries: int = 0
    """Attempts after memory ran out."""

    def following(self, outcome: Outcome, checkpoint: Path | None) -> Following:
        """Return and count a restart from `checkpoint` after a lost rank, in 2, 4, 8, ... up to 60 s, or the end."""
        step = step_of(checkpoint) if checkpoint else 0
        if step > self.step:
            self.used, self.step = 0, step
        if self.used >= self.limit:
            why = (
                f"{self.used} of {plural(self.limit, 'restart')} without a newer checkpoint are used up"
                " (`launch.max_restarts`)"
            )
            return Following(outcome=replace(outcome, message=f"{outcome.message}\n\n{why}"))
        self.used += 1
        pause, what = min(MOST_SECONDS, FIRST_SECONDS * 2.0 ** (self.used - 1)), outcome.first_line
        facts = {
            "rank": outcome.rank,
            "cause": outcome.cause,
            "error": what,
            "checkpoint": checkpoint.name if checkpoint else None,
        }
        message = (
            f"restarting: {what}; continuing from {_start(checkpoint)} in {pause:g} s (restart {self.used} of"
            f" {self.limit})"
        )
        return Following(again=True, message=message, event=RESTARTED, facts=facts, pause=pause)
