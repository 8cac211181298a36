"""Scores weights (a run's model, a checkpoint, a base) on prepared rows, in one process."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from sft_play.config.schema import Config
from sft_play.data.batches import Collator
from sft_play.data.store import Rows
from sft_play.model.chunked_head import chunk_head
from sft_play.model.tokenizer import load_tokenizer
from sft_play.model.use import best_device, load_for_use, quantised, read_base, unchanged_base
from sft_play.plan.layouts import VARLEN
from sft_play.plan.plan import Plan
from sft_play.runs.evaluations import PREDICTIONS, SCORES
from sft_play.runs.folder import RunFolder
from sft_play.runs.prepared import Prepared, PreparedSplit
from sft_play.training.generation import decide
from sft_play.training.held_out import HeldOut, answer_rows, sources_of
from sft_play.training.library_metrics import check_library_metrics
from sft_play.training.loss import label_tokens, token_loss_sum
from sft_play.training.shares import answerable, share_batches


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
    rows = Rows(split.path)
    model, tokenizer = load_weights(run, weights, config, device)
    if plan.loss_chunk:
        chunk_head(model, plan.loss_chunk)
    batch_size = int(settings["batch_size"])
    layout = "unmasked" if plan.attn_implementation == VARLEN else plan.layout  # here it is sdpa, whose mask would be quadratic
    held_out = held_out_loss(model, tokenizer, rows, split, layout=layout, batch_size=batch_size, device=device)
    ready = answerable(rows)
    generate, reason = decide(config, purpose="eval", validation_rows=len(rows), answerable_rows=len(ready))
    print(reason, file=sys.stderr, flush=True)
    result = None
    if generate:
        progress = _progress if sys.stderr.isatty() else None
        result = answer_rows(model, tokenizer, rows, ready, config, batch_size=batch_size, device=device, progress=progress)
    for warning in result.warnings if result else ():
        print(f"note: {warning}", file=sys.stderr)
    for name in (SCORES, PREDICTIONS):  # never older scores beside newer answers
        (out / name).unlink(missing_ok=True)
    return held_out.publish(out, step=step, result=result, settings=settings)


def held_out_loss(
    model: Any, tokenizer: Any, rows: Any, split: PreparedSplit, *, layout: str, batch_size: int, device: torch.device | str
) -> HeldOut:
    """Returns the mean loss over all label tokens of `rows`. A batch holds rows of one source, the longest first."""
    started = time.perf_counter()
    collate = Collator(layout, tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0)
    names, groups = sources_of(split, rows)
    batches, _ = share_batches([len(ids) for ids in rows["input_ids"]], batch_size, rank=0, world_size=1, groups=groups)
    sums = [[0.0, 0.0] for _ in names]
    with torch.no_grad():
        for chosen in batches:
            batch = collate([rows[index] for index in chosen])
            batch = {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}
            source = sums[groups[chosen[0]]]
            source[0] += float(token_loss_sum(model, batch))
            source[1] += int(label_tokens(batch))
    return HeldOut.of(names, sums, rows=len(rows), seconds=time.perf_counter() - started)


def load_weights(run: RunFolder, weights: Path | None, config: Config, device: str) -> tuple[Any, Any]:
    """Returns (model, tokenizer) in evaluation mode: of `weights`, or the base as training saw it."""
    if weights is not None:
        return load_for_use(run, weights, device)
    base = unchanged_base(config, Prepared.load(run.prepared))
    model = read_base(config, Plan.load(run.plan), base, device)
    tokenizer = load_tokenizer(base.path, base.chat, trust=config.model.trust_remote_code)
    return (model if quantised(model) else model.to(device)).eval(), tokenizer


def _progress(done: int, rounds: int) -> None:
    end = "\n" if done == rounds else ""
    print(f"\ranswered batch {done} of {rounds}", end=end, file=sys.stderr, flush=True)
