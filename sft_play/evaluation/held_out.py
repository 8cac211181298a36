"""Held-out rows: their loss, in all and per source, and scores of generated answers; while training, and of any weights by `make eval`."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

from sft_play.config.schema import Config
from sft_play.data.batches import Batch, Collator
from sft_play.data.store import Rows
from sft_play.errors import DataError
from sft_play.evaluation.answering import AnswerSettings
from sft_play.evaluation.generate import (
    Budget,
    GenerationResult,
    answerable,
    choose_rows,
    decide,
    score_by_generation,
    share_batches,
)
from sft_play.evaluation.scores import check_library_metrics, how_scored, perplexity
from sft_play.files import remove_half_written, side_file, write_json, write_text
from sft_play.plan.plan import Plan
from sft_play.plan.shape import VARLEN
from sft_play.runs.folder import PREDICTIONS, SCORES, RunFolder
from sft_play.runs.prepared import Prepared, PreparedSplit
from sft_play.text import bar
from sft_play.training.loss import label_tokens, token_loss_sum
from sft_play.training.ranks import Ranks, TrainContext
from sft_play.training.stopping import Holdings, StopOnRequest

SHARDED = ("zero3", "fsdp2")
"""Strategies under which every forward pass is a collective operation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """The loss of all validation rows; the same on every rank."""

    loss: float
    """Nats, mean over all label tokens."""
    label_tokens: int
    sources: Mapping[str, tuple[float, int]]
    """Where the rows are of several sources: name -> mean loss, label tokens."""
    rows: int
    seconds: float

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds

    def metrics(self) -> dict[str, float]:
        """Return loss and perplexity, in all and per source (`eval_loss/NAME`), for `metrics.jsonl`."""
        found: dict[str, float] = {"eval_loss": self.loss, "eval_perplexity": perplexity(self.loss)}
        for name, (loss, _) in self.sources.items():
            found |= {f"eval_loss/{name}": loss, f"eval_perplexity/{name}": perplexity(loss)}
        return found | {"eval_label_tokens": self.label_tokens, "eval_loss_rows_per_second": self.rows_per_second}


def held_out_loss(
    rows: Any,
    split: PreparedSplit | None,
    *,
    batch_size: int,
    collate: Collator,
    measure: Callable[[Batch], Tensor],
    ranks: Ranks,
) -> HeldOut:
    """Return the mean loss over all label tokens of `rows`. A batch holds rows of one source; every rank runs as many batches.

    `measure` returns a batch's summed loss and label tokens (`loss_and_tokens`).
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
    by_source = {name: (loss / tokens, int(tokens)) for name, (loss, tokens) in zip(names, totals, strict=True) if tokens}
    return HeldOut(
        loss=total / max(count, 1),
        label_tokens=int(count),
        sources=by_source if len(names) > 1 else {},
        rows=len(rows),
        seconds=max(time.perf_counter() - started, 1e-9),
    )


def loss_and_tokens(model: Any, batch: Batch) -> Tensor:
    """Return [summed loss, label tokens] of a batch on the model's device, 64-bit floats."""
    return torch.stack([token_loss_sum(model, batch).double(), label_tokens(batch).double()])


def sources_of(split: PreparedSplit | None, rows: Any) -> tuple[list[str], list[int]]:
    """Return the names of the sources of a split's rows, and for each row which one it is of; one for all in older data."""
    names = [source.name for source in split.sources] if split else []
    if len(names) < 2 or "source" not in rows.column_names:
        return ["all"], [0] * len(rows)
    return names, [int(source) for source in rows["source"]]


def answer_rows(
    model: Any, tokenizer: Any, rows: Any, ready: Sequence[int], config: Config, *, batch_size: int, **where: Any
) -> GenerationResult:
    """Answers and scores, as `config` says, those rows that `eval.samples` chooses of the ones that are `ready` for it.

    `where`: ranks and the like, as `score_by_generation` takes them.
    """
    chosen = [ready[place] for place in choose_rows(len(ready), config.eval.samples, config.train.seed)]
    return score_by_generation(
        model,
        tokenizer,
        [rows[index] for index in chosen],
        AnswerSettings(
            max_new_tokens=config.train.generation_max_new_tokens,
            num_beams=config.train.generation_num_beams,
            batch_size=batch_size,
        ),
        metrics=config.eval.metrics,
        budget=Budget(seconds=config.eval.max_seconds, seed=config.train.seed),
        **where,
    )


@dataclass(slots=True)
class WhileTraining:
    """Evaluates the model of a trainer between its steps."""

    context: TrainContext
    stop: StopOnRequest
    holdings: Holdings
    split: PreparedSplit | None
    said: bool = False

    def require_best(self, rows: Any) -> None:
        """Raise `DataError` where the validation rows cannot give `train.metric_for_best_model`."""
        name = self.context.config.train.metric_for_best_model.removeprefix("eval_")
        kind, slash, source = name.partition("/")
        if slash and kind in ("loss", "perplexity"):
            names, groups = sources_of(self.split, rows)
            if source not in names or names.index(source) not in groups:
                raise DataError(
                    f"`train.metric_for_best_model` is `{name}`, but no validation row is of the source `{source}`",
                    hint="raise `data.validation`, or give it its own validation rows",
                )
        elif name not in ("loss", "perplexity"):
            generate, reason = decide(self.context.config, validation_rows=len(rows), answerable_rows=len(answerable(rows)))
            if not generate:
                raise DataError(f"`train.metric_for_best_model` is `{name}`, which is not measured: {reason}")

    def evaluate(self, trainer: Trainer, rows: Any) -> dict[str, float]:
        """Return the metrics of an evaluation at this step, on every rank, and say of the first how it was made and how fast."""
        config, first, step = self.context.config, self.context.ranks.first, trainer.state.global_step
        held_out = self._loss(trainer, rows)
        metrics = held_out.metrics()
        ready = answerable(rows)
        generate, reason = decide(config, validation_rows=len(rows), answerable_rows=len(ready))
        how_fast, self.said = first and not self.said, self.said or bool(step)
        if how_fast and step:
            print(f"evaluation: {reason}", flush=True)
        said = f"evaluation speed: loss {held_out.rows_per_second:,.1f} rows/s"
        if generate:
            result = self._answers(trainer, rows, ready, held_out)
            metrics |= result.metrics()
            slower = held_out.rows_per_second / metrics["eval_answers_per_second"]
            said += f", answers {metrics['eval_answers_per_second']:,.2f} rows/s (1 for {slower:,.1f} of loss alone)"
            for warning in result.warnings if first else ():
                print(f"evaluation: {warning}", file=sys.stderr, flush=True)
        if how_fast:
            print(said, flush=True)
        return metrics

    def _loss(self, trainer: Trainer, rows: Any) -> HeldOut:
        model, scored = trainer.model_wrapped, []

        def measure(batch: Batch) -> Tensor:
            self.stop.between_batches()
            scored.extend(batch["rows"])
            self.context.activity.next_batch(batch["rows"])
            batch = trainer._prepare_inputs(batch)
            if trainer.pipeline is not None:
                found: Tensor = trainer.pipeline.measure(batch)
                return found
            return loss_and_tokens(model, batch)

        model.eval()
        self.stop.begin_evaluation()
        size = trainer.args.per_device_eval_batch_size
        found = held_out_loss(
            rows, self.split, batch_size=size, collate=trainer.data_collator, measure=measure, ranks=self.context.ranks
        )
        model.train()
        self.holdings.rows_scored = scored
        return found

    def _answers(self, trainer: Trainer, rows: Any, ready: list[int], held_out: HeldOut) -> GenerationResult:
        context, config, step = self.context, self.context.config, trainer.state.global_step
        context.activity.enter("evaluating", step=step)  # an error names no rows of the loss any more
        size = trainer.args.per_device_eval_batch_size
        # `generate` of adapters calls the base below the forward pass that accelerate put under autocast.
        narrow = contextlib.nullcontext() if config.tuning.mode == "full" else trainer.accelerator.autocast()
        with narrow, trainer.pipeline.answering() if trainer.pipeline else contextlib.nullcontext():
            result = answer_rows(
                trainer.accelerator.unwrap_model(trainer.model_wrapped),  # hooks of ZeRO-3 and FSDP2 sit in the model itself
                trainer.processing_class,
                rows,
                ready,
                config,
                batch_size=size,
                ranks=context.ranks,
                synced=context.plan.strategy in SHARDED or context.ranks.copies > 1,
                stop=self.stop,
                alive=context.activity.get_on,
            )
        if context.ranks.first:
            settings = {
                "max_new_tokens": config.train.generation_max_new_tokens,
                "num_beams": config.train.generation_num_beams,
                "batch_size": size,
                "max_seconds": config.eval.max_seconds,
                "during": "training",
            }
            folder = context.run.evaluation(step)
            with side_file(folder, "the answers of an evaluation"):  # its scores go to `metrics.jsonl`, which waits for room
                write_evaluation(folder, held_out, result, step=step, settings=settings)
        return result


def score_run(
    run: RunFolder, weights: Path | None, split: PreparedSplit, out: Path, *, step: int, config: Config, settings: dict[str, Any]
) -> dict[str, Any]:
    """Load the model, score it on the rows of `split`, publishes the folder `out` and return the content of `scores.json`.

    `weights` is the run's `model/` or a checkpoint; `None` is the base, before any training. `config` is the run's, with what
    the user changed for this evaluation. Raise `CheckpointError` for weights that do not fit their stamp.
    """
    from sft_play.model.kernels import chunk_head
    from sft_play.model.use import best_device

    plan = Plan.load(run.plan)
    check_library_metrics(config.eval.metrics)  # before minutes go into answers that nothing could score
    device = best_device()
    rows = Rows(split.path)
    model, tokenizer = load_weights(run, weights, config, device)
    if plan.loss_chunk:
        chunk_head(model, plan.loss_chunk)
    batch_size = int(settings["batch_size"])
    layout = "unmasked" if plan.attn_implementation == VARLEN else plan.layout  # here it is sdpa, whose mask would be quadratic

    scored = 0

    def measure(batch: Batch) -> Tensor:
        nonlocal scored
        scored += len(batch["rows"])
        show(scored, len(rows))
        return loss_and_tokens(model, {name: one.to(device) if torch.is_tensor(one) else one for name, one in batch.items()})

    collate = Collator(layout, tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0)
    alone = Ranks(device=torch.device(device))
    with bar("held-out loss", "rows") as show:
        held_out = held_out_loss(rows, split, batch_size=batch_size, collate=collate, measure=measure, ranks=alone)
    ready = answerable(rows)
    generate, reason = decide(config, purpose="eval", validation_rows=len(rows), answerable_rows=len(ready))
    print(reason, file=sys.stderr, flush=True)
    result = None
    if generate:
        with bar("answers", "batches") as show:
            result = answer_rows(model, tokenizer, rows, ready, config, batch_size=batch_size, ranks=alone, progress=show)
        for warning in result.warnings:
            print(f"note: {warning}", file=sys.stderr)
    for name in (SCORES, PREDICTIONS):  # never older scores with newer answers
        (out / name).unlink(missing_ok=True)
    return write_evaluation(out, held_out, result, step=step, settings=settings)


def load_weights(run: RunFolder, weights: Path | None, config: Config, device: str) -> tuple[Any, Any]:
    """Return (model, tokenizer) in evaluation mode: of `weights`, or the base as training saw it."""
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
    """Publish `predictions.jsonl` and then `scores.json` in `folder`, on one rank only; return the content of `scores.json`.

    `settings` says how the answers were made (rows, batch, beams, ...) and identifies model and data. A folder without `scores.json` is an
    evaluation that was never finished.
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
        **({name: interval.to_json() for name, interval in result.scores.items()} if result else {}),
        "answers": len(result.predictions) if result else 0,
        "answers_asked": result.asked if result else 0,
        "complete": result.complete if result else True,
        "settings": {**settings, **(how_scored(list(result.scores)) if result else {})},
    }
    for name in ("predictions.jsonl", "scores.json"):
        remove_half_written(folder / name)
    if result:
        lines = [json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in result.predictions]
        write_text(folder / "predictions.jsonl", "".join(lines))
    write_json(folder / "scores.json", scores)
    return scores
