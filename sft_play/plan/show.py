"""The plan as people read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sft_play.plan.batch import count
from sft_play.plan.fit import DoesNotFitError
from sft_play.plan.hardware import GIB
from sft_play.plan.plan import Plan, RankPlan
from sft_play.plan.show_speed import show_speed

ORDER = (
    "frozen", "quant_state", "trained", "adapters", "gradients", "optimizer", "buffers", "activations", "recompute", "logits",
    "casts", "dequantised", "workspace", "context", "fragmentation",
)  # fmt: skip
BAR = 40


def show_plan(plan: Plan, *, details: bool = False) -> str:
    """Returns a summary; with `details` the memory of every kind of rank as bars, and what to change."""
    first = plan.ranks[0]
    names = Counter(rank.device_name for rank in plan.ranks)
    where = " + ".join(f"{number} x {name}" if number > 1 else name for name, number in names.items())
    if plan.device == "cpu" and plan.world_size > 1:
        where = f"{plan.world_size} processes of {first.device_name}"
    lines = [f"plan: {plan.strategy} on {where}, {plan.precision}, by {plan.source}"]
    micros = sorted({rank.micro_batch for rank in plan.ranks})
    batch = str(micros[0]) if len(micros) == 1 else f"{micros[0]} to {micros[-1]}"
    lines.append(f"  batch    {_batch(plan, batch)}")
    lines.append(f"  steps    {_steps(plan)}")
    tightest = max(plan.ranks, key=lambda rank: rank.peak_bytes / max(1, rank.capacity_bytes))
    lines.append(
        f"  memory   {_gib(tightest.peak_bytes)} of {_gib(tightest.capacity_bytes)} at the peak of rank {tightest.rank}: {_parts(tightest)}"
    )
    lines.append(f"  room     {_room(plan)}")
    speed = show_speed(plan)
    lines += ["  speed    " + speed[0], *(f"           {line}" for line in speed[1:])]
    lines += ["  because  " + plan.reasons[0], *(f"           {reason}" for reason in plan.reasons[1:])]
    if details:
        lines += ["", *_bars(plan)]
    if plan.remedies:
        lines += ["", "  to make it fit: " + ", or ".join(plan.remedies)]
    return "\n".join(lines)


def _batch(plan: Plan, micro: str) -> str:
    """Returns how the rows of a step are divided; packs by the most micro-steps there can be."""
    accumulation = plan.ranks[0].accumulation
    if plan.pack_tokens:
        where = f" on each of {plan.world_size} ranks" if plan.world_size > 1 else ""
        packs = f"{micro} {'pack' if micro == '1' else 'packs'} of up to {plan.row_tokens:,} tokens"
        return f"{plan.global_batch_size} rows a step, in at most {count(accumulation, 'micro-step')} of {packs}{where}"
    empty = sum(rank.micro_batch * rank.accumulation for rank in plan.ranks) > plan.global_batch_size
    whole = f"{plan.global_batch_size} rows a step = micro-batch {micro} x accumulation {accumulation} x {plan.world_size}"
    return whole + (" (some slots empty)" if empty else "")


def _steps(plan: Plan) -> str:
    if plan.steps is None:
        return "known when the data are prepared"
    epoch = f", {plan.steps_per_epoch} an epoch" if plan.steps_per_epoch else ""
    return f"{plan.steps}{epoch}, learning rate {plan.learning_rate:g} after {plan.warmup_steps or 0} warm-up steps"


def _room(plan: Plan) -> str:
    """Returns the largest batch and the longest rows that would fit, and where in a step the peak stands."""
    first = plan.ranks[0]
    if plan.pack_tokens:
        return f"for packs of up to {plan.longest_row:,} tokens" + _peak(plan)
    text = f"up to {count(plan.most_rows, 'row')} of {plan.row_tokens:,} tokens, or {first.micro_batch} of {plan.longest_row:,}, would fit"
    return text + _peak(plan)


def _peak(plan: Plan) -> str:
    if not plan.peak_at:
        return ""
    return f"; the peak stands {plan.peak_at}" + (f" ({plan.peak_remedy})" if plan.peak_remedy else "")


def _parts(rank: RankPlan) -> str:
    largest = sorted(((name, rank.memory_bytes.get(name, 0)) for name in ORDER), key=lambda part: -part[1])[:4]
    return ", ".join(f"{name} {_gib(size)}" for name, size in largest if size)


def _bars(plan: Plan) -> list[str]:
    """Returns one block of bars for each kind of rank."""
    lines: list[str] = []
    seen: dict[tuple[str, int, int], list[int]] = {}
    for rank in plan.ranks:
        seen.setdefault((rank.device_name, rank.micro_batch, rank.peak_bytes), []).append(rank.rank)
    for members in seen.values():
        rank = plan.ranks[members[0]]
        who = f"rank {members[0]}" if len(members) == 1 else f"ranks {members[0]} to {members[-1]}"
        lines.append(
            f"  {who}: {rank.device_name}, micro-batch {rank.micro_batch}, {_gib(rank.peak_bytes)} of {_gib(rank.capacity_bytes)}"
        )
        lines += _part_bars(rank.memory_bytes, max(rank.capacity_bytes, rank.peak_bytes, 1))
    return lines


def _part_bars(parts: Mapping[str, int], scale: int) -> list[str]:
    """Returns a bar for each part, `scale` bytes as long as the line allows."""
    return [
        f"    {name:<14}{_gib(parts[name]):>10}  {'#' * max(1, round(BAR * parts[name] / scale))}"
        for name in (*ORDER, "free")
        if parts.get(name)
    ]


def show_misfit(error: DoesNotFitError) -> str:
    """Returns what a rank would need, part by part, and each way to need less, with its saving and its price in speed."""
    need = sum(error.parts.values())
    lines = [f"needs {_gib(need)}, may use {_gib(error.capacity_bytes)}", *_part_bars(error.parts, need), ""]
    lines.append("to make it fit" if any(remedy.fits for remedy in error.remedies) else "nothing by itself makes it fit")
    return "\n".join([*lines, *(f"  {remedy}" for remedy in error.remedies)])


def misfit_json(error: DoesNotFitError) -> dict[str, Any]:
    """Returns the same as plain data."""
    return {
        "fits": False, "error": error.message, "memory_bytes": error.parts, "peak_bytes": sum(error.parts.values()),
        "capacity_bytes": error.capacity_bytes, "micro_batch": error.micro_batch, "remedies": [asdict(r) for r in error.remedies],
    }  # fmt: skip


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size < 100 * GIB else f"{size / GIB:.0f} GiB"
