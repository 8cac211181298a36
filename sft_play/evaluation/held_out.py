"""Score held-out rows by loss, in total and per source, and by generated answers, and save the scores."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sft_play.config.schema import Config
from sft_play.data.batches import Batch, Collator
from sft_play.data.rows import Rows
from sft_play.evaluation.held_out_answers import (
    GenerationResult,
    answer_rows,
    answerable,
    decide,
    share_batches,
)
from sft_play.evaluation.scores import (
    classification,
    how_scored,
    library_metrics,
    perplexity,
)
from sft_play.files import remove_half_written, write_json, write_text
from sft_play.model.rope import switch_length
from sft_play.plan.plan import Plan
from sft_play.plan.shape import VARLEN
from sft_play.runs.folder import PREDICTIONS, SCORES, RunFolder
from sft_play.runs.prepared import Prepared, PreparedSplit
from sft_play.text import bar, tell
from sft_play.training.loss import label_tokens, token_loss_sum
from sft_play.training.ranks import Ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """The loss of all validation rows; the same on every rank."""

    loss: float
    """Nats, mean over all label tokens."""
    label_tokens: int
    sources: Mapping[str, tuple[float, int]]
    """Name -> mean loss, label tokens; empty if the rows come from one source."""
    rows: int
    seconds: float

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds

    def metrics(self) -> dict[str, float]:
        """Return loss and perplexity, total and per source (`eval_loss/NAME`), for `metrics.jsonl`."""
        metrics: dict[str, float] = {"eval_loss": self.loss, "eval_perplexity": perplexity(self.loss)}
        for name, (loss, _) in self.sources.items():
            metrics |= {f"eval_loss/{name}": loss, f"eval_perplexity/{name}": perplexity(loss)}
        return metrics | {"eval_label_tokens": self.label_tokens, "eval_loss_rows_per_second": self.rows_per_second}


def held_out_loss(
    rows: Any,
    split: PreparedSplit | None,
    *,
    batch_size: int,
    collate: Collator,
    measure: Callable[[Batch], Tensor],
    ranks: Ranks,
) -> HeldOut:
    """Return the mean loss over all label tokens of `rows`; all ranks run the same number of batches.

    A batch holds rows of one source. `measure` returns its summed loss and label tokens (`loss_and_tokens`).
    """
    started = time.perf_counter()
    names, groups = sources_of(split, rows)
    mine, rounds = share_batches(
        [len(ids) for ids in rows["input_ids"]], batch_size, ranks.data_rank, ranks.data_world, groups=groups
    )
    sums = torch.zeros(len(names), 2, dtype=torch.float64, device=ranks.device)
    with torch.no_grad():
        for turn in range(rounds):
            chosen = mine[turn] if turn < len(mine) else []
            sums[groups[chosen[0]] if chosen else 0] += measure(collate([rows[index] for index in chosen]))
    totals = (ranks.total(sums) / ranks.copies).tolist()
    total, count = (sum(part[i] for part in totals) for i in (0, 1))
    by_source = {
        name: (loss / tokens, int(tokens)) for name, (loss, tokens) in zip(names, totals, strict=True) if tokens
    }
    return HeldOut(
        loss=total / max(count, 1),
        label_tokens=int(count),
        sources=by_source if len(names) > 1 else {},
        rows=len(rows),
        seconds=max(time.perf_counter() - started, 1e-9),
    )


def loss_and_tokens(model: Any, batch: Batch) -> Tensor:
    """Return [summed loss, label tokens] of a batch as float64 on the model's device."""
    return torch.stack([token_loss_sum(model, batch).double(), label_tokens(batch).double()])


def sources_of(split: PreparedSplit | None, rows: Any) -> tuple[list[str], list[int]]:
    """Return the names of a split's sources and each row's index into them; older data has one source, `all`."""
    names = [source.name for source in split.sources] if split else []
    if len(names) < 2 or "source" not in rows.column_names:
        return ["all"], [0] * len(rows)
    return names, [int(source) for source in rows["source"]]


def score_run(
    run: RunFolder,
    weights: Path | None,
    split: PreparedSplit,
    out: Path,
    *,
    step: int,
    config: Config,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Load the model, score it on the rows of `split`, publish the folder `out` and return its `scores.json`.

    `weights` is the run's `model/` or a checkpoint; `None` is the base, before any training. `config` is the run's,
    with the user's changes for this evaluation. Raise `CheckpointError` for weights that do not match their stamp.
    """
    from sft_play.model.kernels import chunk_head
    from sft_play.model.use import best_device

    plan = Plan.load(run.plan)
    # Checked first, so that no minutes are spent on answers that cannot be scored.
    rows = Rows(split.path)
    for metric in library_metrics(config.eval.metrics):
        metric.check(rows.references(2))
    device = best_device()
    model, tokenizer = load_weights(run, weights, config, device)
    if plan.loss_chunk:
        chunk_head(model, plan.loss_chunk)
    batch_size = int(settings["batch_size"])
    # Varlen attention is replaced by sdpa here, whose mask would take quadratic memory.
    layout = "unmasked" if plan.attn_implementation == VARLEN else plan.layout
    # Rotary factors that depend on a row's length need a layout that shows it.
    layout = "padded" if switch_length(model) else layout

    scored = 0

    def measure(batch: Batch) -> Tensor:
        nonlocal scored
        scored += len(batch["rows"])
        show(scored, len(rows))
        return loss_and_tokens(
            model, {name: entry.to(device) if torch.is_tensor(entry) else entry for name, entry in batch.items()}
        )

    collate = Collator(layout, tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0)
    alone = Ranks(device=torch.device(device))
    with bar("held-out loss", "rows") as show:
        held_out = held_out_loss(rows, split, batch_size=batch_size, collate=collate, measure=measure, ranks=alone)
    ready = answerable(rows)
    generate, reason = decide(config, rows=len(rows), ready=len(ready), purpose="eval")
    tell(reason)
    result = None
    if generate:
        with bar("answering", "answers") as show:
            result = answer_rows(
                model, tokenizer, rows, ready, config, batch_size=batch_size, ranks=alone, progress=show
            )
        for warning in result.warnings:
            tell(f"note: {warning}")
    for name in (SCORES, PREDICTIONS):  # old scores must never be next to new answers
        (out / name).unlink(missing_ok=True)
    return write_evaluation(out, held_out, result, step=step, settings=settings)


def load_weights(run: RunFolder, weights: Path | None, config: Config, device: str) -> tuple[Any, Any]:
    """Return (model, tokenizer) of `weights`, or of the base as training saw it, in evaluation mode."""
    from sft_play.model.tokenizer import load_tokenizer
    from sft_play.model.use import load_for_use, read_base, require_same_base, to_answer

    if weights is not None:
        return load_for_use(run, weights, device)
    base = require_same_base(config, Prepared.load(run.prepared))
    model = read_base(config, Plan.load(run.plan), base, device)
    tokenizer = load_tokenizer(base.path, base.chat, trust=config.model.trust_remote_code)
    return to_answer(model, device), tokenizer


def write_evaluation(
    folder: Path, held_out: HeldOut, result: GenerationResult | None, *, step: int, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Publish `predictions.jsonl`, then `scores.json`, in `folder`; return the scores. Call it on one rank only.

    `settings` says how the answers were generated (rows, batch, beams, ...) and identifies model and data. A folder
    without `scores.json` is an unfinished evaluation.
    """
    sources = {
        name: {"loss": loss, "perplexity": perplexity(loss), "label_tokens": count}
        for name, (loss, count) in held_out.sources.items()
    }
    speed = {"loss_seconds": held_out.seconds, "loss_rows_per_second": held_out.rows_per_second}
    scores: dict[str, Any] = {
        "step": step,
        "loss": held_out.loss,
        "perplexity": perplexity(held_out.loss),
        "label_tokens": held_out.label_tokens,
        **({"sources": sources} if sources else {}),
        "speed": speed | (result.speed() if result else {}),
        **({name: asdict(interval) for name, interval in result.scores.items()} if result else {}),
        **(classification(result.scores, [(p.reference, p.answer) for p in result.predictions]) if result else {}),
        "answers": len(result.predictions) if result else 0,
        "answers_asked": result.asked if result else 0,
        "complete": result.complete if result else True,
        "settings": {**settings, **(how_scored(list(result.scores)) if result else {})},
    }
    for name in (PREDICTIONS, SCORES):
        remove_half_written(folder / name)
    if result:
        lines = [json.dumps(asdict(prediction), ensure_ascii=False) + "\n" for prediction in result.predictions]
        write_text(folder / PREDICTIONS, "".join(lines))
    write_json(folder / SCORES, scores)
    return scores
