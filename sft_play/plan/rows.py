"""What a plan takes from the prepared data: the worst row for memory, the average one for speed, and how many steps. Pure."""

from __future__ import annotations

import math

from sft_play.config.schema import Config
from sft_play.plan.memory import Setup
from sft_play.plan.mixture import mixture_of
from sft_play.plan.throughput import Data
from sft_play.runs.prepared import Prepared


def label_share(prepared: Prepared | None) -> float:
    """Returns labels beside tokens of a micro-batch that is worse than any: its rows are the longest, and have most labels."""
    split = prepared.train if prepared else None
    if split is None or not split.longest:
        return 1.0
    return min(1.0, (split.most_labels or split.longest) / split.longest)


def rows_data(config: Config, prepared: Prepared | None, setup: Setup) -> Data:
    """Returns what the average row is like; memory is planned for the worst instead."""
    split = prepared.train if prepared else None
    if not split or not split.rows or not split.tokens:
        return Data(row_tokens=setup.row_tokens, longest=setup.row_tokens, label_share=1.0)
    rows, tokens, labels = float(split.rows), float(split.tokens), float(split.label_tokens)
    if mixture := mixture_of(config.data, split.sources):
        taken = [(count / source.rows, source) for count, source in zip(mixture.epoch_rows, split.sources, strict=True) if count]
        rows = float(sum(mixture.epoch_rows))
        tokens = sum(times * source.tokens for times, source in taken)
        labels = sum(times * source.label_tokens for times, source in taken)
    return Data(row_tokens=tokens / rows, longest=split.longest, label_share=labels / tokens)


def row_tokens(config: Config, prepared: Prepared | None) -> int:
    """Returns the tokens of the longest row."""
    split = prepared.train if prepared else None
    return min(config.model.max_seq_len, split.longest) if split else config.model.max_seq_len


def step_count(config: Config, prepared: Prepared | None, global_batch: int, reasons: list[str]) -> tuple[int | None, int | None]:
    """Returns optimizer steps in all and of an epoch, `None` where they are not known yet."""
    split = prepared.train if prepared else None
    mixture = mixture_of(config.data, split.sources) if split else None
    rows = (sum(mixture.epoch_rows) if mixture else split.rows) if split else None
    reasons += [f"mixture: {line}" for line in (mixture.describe() if mixture else [])]
    per_epoch = math.ceil(rows / global_batch) if rows else None
    if config.train.max_steps > 0:
        reasons.append(
            f"steps {config.train.max_steps}: as configured"
            + (f", {config.train.max_steps / per_epoch:.2f} epochs" if per_epoch else "")
        )
        return config.train.max_steps, per_epoch
    if per_epoch is None:
        reasons.append("steps: known when the data are prepared")
        return None, None
    steps = max(1, math.ceil(config.train.epochs * per_epoch))
    reasons.append(
        f"steps {steps} = {config.train.epochs:g} epochs x {per_epoch} ({rows} rows / {global_batch} global, rounded up)"
    )
    return steps, per_epoch
