"""Scores a run's model, a checkpoint or the untuned base on the run's held-out rows, in one process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers.utils import logging as transformers_logging

from sft_play.config.schema import Config
from sft_play.data.collate import Collator
from sft_play.errors import DataError
from sft_play.model.chunked_head import chunk_head
from sft_play.model.tokenizer import load_tokenizer
from sft_play.model.use import best_device, current_base, load_for_use, quantised, read_base
from sft_play.plan.plan import Plan
from sft_play.runs.folder import RunFolder
from sft_play.runs.prepared import Prepared
from sft_play.training.generation import GenerationResult, decide, score_by_generation, write_evaluation
from sft_play.training.loss import token_loss_sum
from sft_play.training.shares import choose_rows


def score_run(run: RunFolder, weights: Path | None, *, step: int, config: Config, settings: dict[str, Any]) -> dict[str, Any]:
    """Loads the model, scores it, publishes `eval/step-NNNNNN/` and returns the content of `scores.json`.

    `weights` is the run's `model/` or a checkpoint; `None` is the base, before any training. `config` is the run's, with what
    the user changed for this evaluation. Raises `DataError` without validation rows, `CheckpointError` for weights
    that do not fit their stamp.
    """
    plan, prepared = Plan.load(run.plan), Prepared.load(run.prepared)
    if prepared.validation is None or not prepared.validation.rows:
        raise DataError(
            f"the run `{run.name}` has no validation rows to score",
            hint="give `data.validation` (a fraction or sources) when training",
        )
    transformers_logging.disable_progress_bar()
    device = best_device()
    rows = datasets.load_from_disk(prepared.validation.path)
    model, tokenizer = _load(run, weights, config, device)
    model.eval()
    if plan.loss_chunk:
        chunk_head(model, plan.loss_chunk)
    batch_size = int(settings["batch_size"])
    loss, label_tokens = held_out_loss(model, tokenizer, rows, layout=plan.layout, batch_size=batch_size, device=device)
    generate, reason = decide(config, purpose="eval", validation_rows=len(rows))
    print(reason, file=sys.stderr, flush=True)
    result = _answers(model, tokenizer, rows, config, batch_size=batch_size, device=device) if generate else None
    for warning in result.warnings if result else ():
        print(f"note: {warning}", file=sys.stderr)
    return write_evaluation(
        run.evaluation(step), step=step, loss=loss, label_tokens=label_tokens, result=result, settings=settings
    )


def held_out_loss(
    model: Any, tokenizer: Any, rows: Any, *, layout: str, batch_size: int, device: torch.device | str
) -> tuple[float, int]:
    """Returns the mean loss over all label tokens of `rows` (nats) and how many those are."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    collate = Collator(layout, pad)
    lengths = [len(ids) for ids in rows["input_ids"]]
    order = sorted(range(len(rows)), key=lambda index: -lengths[index])
    total, label_tokens = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(order), batch_size):
            batch = collate([rows[index] for index in order[start : start + batch_size]])
            batch = {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}
            total += float(token_loss_sum(model, batch))
            label_tokens += int((batch["targets"] != -100).sum())
    return total / max(label_tokens, 1), label_tokens


def _answers(model: Any, tokenizer: Any, rows: Any, config: Config, *, batch_size: int, device: str) -> GenerationResult:
    chosen: Sequence[int] = choose_rows(len(rows), config.eval.samples, config.train.seed)
    return score_by_generation(
        model,
        tokenizer,
        [rows[index] for index in chosen],
        batch_size=batch_size,
        max_new_tokens=config.train.generation_max_new_tokens,
        num_beams=config.train.generation_num_beams,
        device=device,
        progress=_progress if sys.stderr.isatty() else None,
    )


def _load(run: RunFolder, weights: Path | None, config: Config, device: str) -> tuple[Any, Any]:
    if weights is not None:
        return load_for_use(run, weights, device)
    base = current_base(config, Prepared.load(run.prepared))
    model = read_base(config, Plan.load(run.plan), base, device)
    return model if quantised(model) else model.to(device), load_tokenizer(Path(base.path))


def _progress(done: int, rounds: int) -> None:
    end = "\n" if done == rounds else ""
    print(f"\ranswered batch {done} of {rounds}", end=end, file=sys.stderr, flush=True)
