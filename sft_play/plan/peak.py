"""A plan's peak in words: where in a step it is, its largest part, and what would lower it. Pure."""

from __future__ import annotations

from dataclasses import replace

from sft_play.config.schema import Config
from sft_play.plan.choices import with_chunks
from sft_play.plan.hardware import GIB
from sft_play.plan.memory import OPTIMIZER_BYTES, rank_memory, rank_moments
from sft_play.plan.plan import Plan, Setup, tightest
from sft_play.plan.request import SHORTEST_ROW
from sft_play.plan.shape import ModelShape

WORTH_SAYING = GIB // 50
CHANGEABLE = {"update": ("optimizer", "gradients", "workspace"), "": ("activations", "recompute", "logits", "casts")}
"""Parts that can be named as the largest of a peak: at the update, and at any other moment."""
NAMES = {
    "recompute": "the layer that is computed again",
    "casts": "the cast weights",
    "optimizer": "the optimizer's states",
}


def with_peak(plan: Plan, config: Config, shape: ModelShape, moment: str = "", operation: str = "") -> Plan:
    """Return the plan with its peak in words, its largest part, and what would lower it, with the saving by formula.

    `moment` and `operation` come from a trace; without them the peak of the formula counts.
    """
    rank = tightest(plan.ranks)
    setup = replace(plan, stage=rank.rank % len(plan.stages) if plan.stages else None)
    if not moment:
        moments = rank_moments(config, shape, setup, rank.worst_rows)
        moment = max(moments, key=lambda name: sum(moments[name].values()))
    at, name = MOMENTS.get(moment, moment), operation.removeprefix("aten.").removesuffix(".default")
    plan = replace(plan, peak_at=at + (f" (`{name}`)" if name else ""), peak_remedy=None)
    part = max(CHANGEABLE.get(moment, CHANGEABLE[""]), key=lambda name: rank.memory_bytes.get(name, 0))
    if rank.memory_bytes.get(part, 0) < WORTH_SAYING:
        return plan
    before = sum(rank_memory(config, shape, setup, rank.worst_rows).values())
    for words, other, rows in _changes(config, shape, setup, rank.worst_rows, part):
        saving = before - sum(rank_memory(config, shape, other, rows).values())
        if saving >= WORTH_SAYING:
            shrinks = f"largest part that can shrink: {NAMES.get(part, f'the {part}')}"
            return replace(
                plan, peak_remedy=f"{shrinks}; with {words} the whole peak is {saving / GIB:.1f} GiB lower, by formula"
            )
    return plan


def _changes(config: Config, shape: ModelShape, setup: Setup, rows: int, part: str) -> list[tuple[str, Setup, int]]:
    """Return (words, setup, rows) of each change that makes a part smaller, the cheapest first."""
    changes: list[tuple[str, Setup, int]] = []
    bf16_on_gpu = (
        setup.device == "cuda" and setup.precision == "bf16" and config.tuning.mode == "full" and not setup.zero
    )
    if part in ("optimizer", "gradients", "workspace"):
        if bf16_on_gpu and setup.optim not in OPTIMIZER_BYTES:
            changes.append(("TRAIN_OPTIM=adamw_bnb_8bit", replace(setup, optim="adamw_bnb_8bit"), rows))
        return changes
    if part == "logits" and not setup.loss_chunk:
        changes.append(("chunks of the loss", with_chunks(config, shape, setup), rows))
    if part == "casts" and bf16_on_gpu:
        changes.append(("MODEL_DTYPE=bfloat16", replace(setup, weights_dtype="bfloat16"), rows))
    if part in ("activations", "casts") and not setup.gradient_checkpointing:
        changes.append(("TRAIN_GRADIENT_CHECKPOINTING=true", replace(setup, gradient_checkpointing=True), rows))
    if rows > 1:
        changes.append((f"TRAIN_BATCH_SIZE={rows // 2}", setup, rows // 2))
    shorter = max(SHORTEST_ROW, setup.row_tokens // 2)
    return [*changes, (f"rows of at most {shorter} tokens", replace(setup, row_tokens=shorter), rows)]


MOMENTS = {
    "forward first": "in the first layer's forward pass",
    "forward middle": "in the forward pass",
    "forward last": "in the last layer's forward pass",
    "forward head": "where the logits and the loss are computed",
    "backward head": "where the gradient of the logits is computed",
    "backward last": "in the last layer's backward pass, all activations held",
    "backward middle": "in the backward pass",
    "backward first": "at the end of the backward pass, all gradients held",
    "update": "in the optimizer's update",
}
