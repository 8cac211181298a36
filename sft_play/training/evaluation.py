"""Scores weights (a run's model, a checkpoint, a base) on prepared rows, in one process."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers.utils import logging as transformers_logging

from sft_play.config.schema import Config
from sft_play.data.collate import Collator
from sft_play.model.chunked_head import chunk_head
from sft_play.model.tokenizer import load_tokenizer
from sft_play.model.use import best_device, current_base, load_for_use, quantised, read_base
from sft_play.plan.plan import Plan
from sft_play.runs.evaluations import PREDICTIONS, SCORES
from sft_play.runs.folder import RunFolder
from sft_play.runs.prepared import Prepared, PreparedSplit
from sft_play.training.generation import Budget, GenerationResult, decide, score_by_generation, write_evaluation
from sft_play.training.library_metrics import check_library_metrics
from sft_play.training.loss import token_loss_sum
from sft_play.training.scores import perplexity
from sft_play.training.shares import answerable, choose_rows


def score_run(
    run: RunFolder, weights: Path | None, split: PreparedSplit, out: Path, *, step: int, config: Config, settings: dict[str, Any]
) -> dict[str, Any]:
    """Loads the model, scores it on the rows of `split`, publishes the folder `out` and returns the content of `scores.json`.

    `weights` is the run's `model/` or a checkpoint; `None` is the base, before any training. `config` is the run's, with what
    the user changed for this evaluation. Raises `CheckpointError` for weights that do not fit their stamp.
    """
    plan = Plan.load(run.plan)
    check_library_metrics(config.eval.metrics)  # before minutes go into answers that nothing could score
    transformers_logging.disable_progress_bar()
    device = best_device()
    rows = datasets.load_from_disk(split.path)
    model, tokenizer = load_weights(run, weights, config, device)
    if plan.loss_chunk:
        chunk_head(model, plan.loss_chunk)
    batch_size = int(settings["batch_size"])
    started = time.perf_counter()
    by_source = source_losses(model, tokenizer, rows, layout=plan.layout, batch_size=batch_size, device=device)
    seconds = time.perf_counter() - started
    loss_sum, label_tokens = (sum(part[i] for part in by_source.values()) for i in (0, 1))
    speed = {"loss_seconds": seconds, "loss_rows_per_second": len(rows) / seconds}
    ready = answerable(rows)
    generate, reason = decide(config, purpose="eval", validation_rows=len(rows), answerable_rows=len(ready))
    print(reason, file=sys.stderr, flush=True)
    chosen = [ready[place] for place in choose_rows(len(ready), config.eval.samples, config.train.seed)]
    result = _answers(model, tokenizer, rows, chosen, config, batch_size=batch_size, device=device) if generate else None
    for warning in result.warnings if result else ():
        print(f"note: {warning}", file=sys.stderr)
    for name in (SCORES, PREDICTIONS):  # never older scores beside newer answers
        (out / name).unlink(missing_ok=True)
    return write_evaluation(
        out,
        step=step,
        loss=loss_sum / max(label_tokens, 1),
        label_tokens=int(label_tokens),
        result=result,
        settings=settings,
        facts={**_sources(by_source, split), "speed": speed | (result.speed() if result else {})},
    )


def source_losses(
    model: Any, tokenizer: Any, rows: Any, *, layout: str, batch_size: int, device: torch.device | str
) -> dict[int, tuple[float, int]]:
    """Returns for each source its index -> the sum of the losses of its label tokens (nats), and how many those are.

    A batch holds rows of one source only, the longest first.
    """
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    collate = Collator(layout, pad)
    lengths = [len(ids) for ids in rows["input_ids"]]
    sources = list(rows["source"]) if "source" in rows.column_names else [0] * len(lengths)
    found: dict[int, tuple[float, int]] = {}
    with torch.no_grad():
        for source in sorted(set(sources)):
            order = sorted((i for i, own in enumerate(sources) if own == source), key=lambda index: -lengths[index])
            total, label_tokens = 0.0, 0
            for start in range(0, len(order), batch_size):
                batch = collate([rows[index] for index in order[start : start + batch_size]])
                batch = {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}
                total += float(token_loss_sum(model, batch))
                label_tokens += int((batch["targets"] != -100).sum())
            found[source] = total, label_tokens
    return found


def load_weights(run: RunFolder, weights: Path | None, config: Config, device: str) -> tuple[Any, Any]:
    """Returns (model, tokenizer) in evaluation mode: of `weights`, or the base as training saw it."""
    if weights is not None:
        return load_for_use(run, weights, device)
    base = current_base(config, Prepared.load(run.prepared))
    model = read_base(config, Plan.load(run.plan), base, device)
    return (model if quantised(model) else model.to(device)).eval(), load_tokenizer(base.path, base.chat)


def _sources(by_source: dict[int, tuple[float, int]], split: PreparedSplit) -> dict[str, Any]:
    """Returns loss and perplexity of each source, where there are several."""
    if len(by_source) < 2:
        return {}
    found: dict[str, Any] = {}
    for index, (total, label_tokens) in by_source.items():
        name = split.sources[index].name if index < len(split.sources) else f"source {index}"
        loss = total / max(label_tokens, 1)
        found[name] = {"loss": loss, "perplexity": perplexity(loss), "label_tokens": label_tokens}
    return {"sources": found}


def _answers(
    model: Any, tokenizer: Any, rows: Any, chosen: Sequence[int], config: Config, *, batch_size: int, device: str
) -> GenerationResult:
    return score_by_generation(
        model,
        tokenizer,
        [rows[index] for index in chosen],
        batch_size=batch_size,
        max_new_tokens=config.train.generation_max_new_tokens,
        num_beams=config.train.generation_num_beams,
        metrics=config.eval.metrics,
        budget=Budget(seconds=config.eval.max_seconds, seed=config.train.seed),
        device=device,
        progress=_progress if sys.stderr.isatty() else None,
    )


def _progress(done: int, rounds: int) -> None:
    end = "\n" if done == rounds else ""
    print(f"\ranswered batch {done} of {rounds}", end=end, file=sys.stderr, flush=True)
