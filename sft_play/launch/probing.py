"""A probe (acts): two steps of the plan's worst batch by real workers on these devices, before the plan is believed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sft_play.config.schema import Config
from sft_play.errors import HardwareError
from sft_play.files import read_json
from sft_play.launch.verdict import OUT_OF_MEMORY, Outcome
from sft_play.plan.plan import Plan
from sft_play.plan.probed import Probed, load, save
from sft_play.runs.folder import RunFolder

MOST_PROBES = 4
STEPS = 2


def probe_until_settled(
    plan_now: Callable[[], Plan], measured_at: Callable[[Plan], Path], attempt: Callable[[Plan], Outcome], run: RunFolder
) -> None:
    """Probes what is planned, plans again with what was found, until the plan is one that was probed.

    Raises `HardwareError` for workers that fail for another reason than memory.
    """
    for _ in range(MOST_PROBES):
        plan = plan_now()
        path = measured_at(plan)
        if load(path):
            return
        micro = max(rank.micro_batch for rank in plan.ranks)
        print(f"probe: {STEPS} steps with the longest rows, micro-batch {micro} ...", file=sys.stderr, flush=True)
        save(path, _measure(attempt(_short(plan)), plan, run))


def quiet(config: Config) -> Config:
    """Returns the configuration of a probe: nothing is evaluated, saved or tracked."""
    train = replace(config.train, eval_strategy="no", save_strategy="no", load_best_model_at_end=False)
    return replace(config, train=replace(train, extra={**train.extra, "report_to": "none"}))


def _short(plan: Plan) -> Plan:
    return replace(plan, steps=STEPS, steps_per_epoch=STEPS, warmup_steps=0)


def _measure(outcome: Outcome, plan: Plan, run: RunFolder) -> list[Probed]:
    """Returns what each rank wrote; after a shortage of memory the rank that ran short is marked, and all others with it."""
    if outcome.code == 0:
        return [Probed(**read_json(run.logs / f"probe-rank{rank.rank}.json")) for rank in plan.ranks]
    if outcome.code in (130, 143):
        raise SystemExit(outcome.code)
    if outcome.cause != OUT_OF_MEMORY:
        raise HardwareError(f"the probe failed: {outcome.message}", hint="SOURCE=trace plans without one")
    print("probe: memory ran out; trying less", file=sys.stderr)
    return [
        Probed(
            rank=rank.rank, micro_batch=rank.micro_batch, allocated_bytes=0, reserved_bytes=0, device_bytes=0, seconds_per_step=0.0,
            failed=outcome.rank is None or rank.rank == outcome.rank or rank.micro_batch >= plan.ranks[outcome.rank].micro_batch,
        )
        for rank in plan.ranks
    ]  # fmt: skip
