"""Where in a step a plan's peak stands, what it is mostly made of, and what would lower it, in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sft_play.config.schema import Config
from sft_play.plan.fit import SHORTEST_ROW
from sft_play.plan.hardware import GIB
from sft_play.plan.losses import with_chunks
from sft_play.plan.memory import OPTIMIZER_BYTES, Setup, rank_memory, rank_moments
from sft_play.plan.plan import Plan, RankPlan
from sft_play.plan.shape import ModelShape
from sft_play.plan.trace_case import setup_of
from sft_play.plan.words import peak_in_words

WORTH_SAYING = GIB // 50
CHANGEABLE = {"update": ("optimizer", "gradients", "workspace"), "": ("activations", "recompute", "logits", "casts")}
"""Parts of which one is named as what the peak is made of: at the update, and at any other moment."""
NAMES = {"recompute": "the layer that is computed again", "casts": "the cast weights", "optimizer": "the optimizer's states"}


def with_peak(plan: Plan, config: Config, shape: ModelShape, moment: str = "", operation: str = "") -> Plan:
    """Returns the plan with its peak in words; `moment` and `operation` as a trace found them, else the formula's worst moment."""
    setup = setup_of(plan)
    rank = tightest(plan)
    if not moment:
        moments = rank_moments(config, shape, setup, rank.worst_rows)
        moment = max(moments, key=lambda name: sum(moments[name].values()))
    remedy = _remedy(config, shape, setup, rank, moment)
    return replace(plan, peak_at=peak_in_words(moment, operation), peak_remedy=remedy)


def tightest(plan: Plan) -> RankPlan:
    """Returns the rank whose peak comes nearest to what it may use."""
    return max(plan.ranks, key=lambda rank: rank.peak_bytes / max(1, rank.capacity_bytes))


def _remedy(config: Config, shape: ModelShape, setup: Setup, rank: RankPlan, moment: str) -> str | None:
    """Returns what the peak is mostly made of and what would make that smaller, with the saving by formula."""
    part = _largest(rank.memory_bytes, CHANGEABLE.get(moment, CHANGEABLE[""]))
    if part is None:
        return None
    before = sum(rank_memory(config, shape, setup, rank.worst_rows).values())
    for words, other, rows in _changes(config, shape, setup, rank.worst_rows, part):
        saving = before - sum(rank_memory(config, shape, other, rows).values())
        if saving >= WORTH_SAYING:
            return f"{NAMES.get(part, f'the {part}')}: {words}, minus {saving / GIB:.1f} GiB"
    return None


def _largest(parts: Mapping[str, int], names: tuple[str, ...]) -> str | None:
    found = max(names, key=lambda name: parts.get(name, 0))
    return found if parts.get(found, 0) >= WORTH_SAYING else None


def _changes(config: Config, shape: ModelShape, setup: Setup, rows: int, part: str) -> list[tuple[str, Setup, int]]:
    """Returns (words, setup, rows) of what makes a part smaller, what costs least first."""
    found: list[tuple[str, Setup, int]] = []
    bf16_on_gpu = setup.device == "cuda" and setup.precision == "bf16" and config.tuning.mode == "full" and not setup.zero
    if part in ("optimizer", "gradients", "workspace"):
        if bf16_on_gpu and setup.optim not in OPTIMIZER_BYTES:
            found.append(("TRAIN_OPTIM=adamw_bnb_8bit", replace(setup, optim="adamw_bnb_8bit"), rows))
        return found
    if part == "logits" and not setup.loss_chunk:
        found.append(("chunk the loss", with_chunks(config, shape, setup), rows))
    if part == "casts" and bf16_on_gpu:
        found.append(("MODEL_DTYPE=bfloat16", replace(setup, weights_dtype="bfloat16"), rows))
    if part in ("activations", "casts") and not setup.gradient_checkpointing:
        found.append(("TRAIN_GRADIENT_CHECKPOINTING=true", replace(setup, gradient_checkpointing=True), rows))
    if rows > 1:
        found.append((f"TRAIN_BATCH_SIZE={rows // 2}", setup, rows // 2))
    shorter = max(SHORTEST_ROW, setup.row_tokens // 2)
    return [*found, (f"rows of at most {shorter} tokens", replace(setup, row_tokens=shorter), rows)]
