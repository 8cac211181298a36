"""Held-out rows: their loss, in all and per source, and scores of generated answers, while training and by `make eval`."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sft_play.config.schema import Config
from sft_play.errors import DataError
from sft_play.runs.prepared import Prepared, PreparedSplit
from sft_play.runs.space import side_file
from sft_play.training.generation import Budget, decide, score_by_generation
from sft_play.training.loss import all_sum, label_tokens, token_loss_sum
from sft_play.training.results import GenerationResult, write_evaluation
from sft_play.training.scores import perplexity
from sft_play.training.shares import answerable, choose_rows, share_batches

if TYPE_CHECKING:
    from sft_play.training.trainer import SftTrainer


SHARDED = ("zero3", "fsdp2")
"""Strategies under which every forward pass is a collective operation."""


def evaluate(trainer: SftTrainer, rows: Any, prefix: str) -> dict[str, float]:
    """Returns the metrics of an evaluation at this step, on every rank, and says how it was made and how fast."""
    held_out = held_out_loss(trainer, rows)
    metrics = held_out.metrics(prefix)
    ready = answerable(rows)
    generate, reason = decide(trainer.config, purpose="train", validation_rows=len(rows), answerable_rows=len(ready))
    if trainer.state.global_step:
        _say_once(trainer, f"evaluation: {reason}")
    said = f"evaluation speed: loss {held_out.rows_per_second:,.1f} rows/s"
    if generate:
        result = _answers(trainer, rows, ready, held_out)
        metrics |= result.metrics()
        slower = held_out.rows_per_second / metrics["eval_answers_per_second"]
        said += f", answers {metrics['eval_answers_per_second']:,.2f} rows/s (1 for {slower:,.1f} of loss alone)"
        if trainer.is_world_process_zero():
            for warning in result.warnings:
                print(f"evaluation: {warning}", file=sys.stderr, flush=True)
    if trainer.is_world_process_zero():
        print(said, flush=True)
    return metrics


def _say_once(trainer: SftTrainer, text: str) -> None:
    if not trainer.said_how_evaluated:
        trainer.said_how_evaluated = True
        if trainer.is_world_process_zero():
            print(text, flush=True)


def held_out_loss(trainer: SftTrainer, rows: Any) -> HeldOut:
    """Returns the mean loss over all label tokens of `rows`. A batch holds rows of one source; every rank runs as many batches."""
    started = time.perf_counter()
    rank, world = trainer.args.process_index, trainer.plan.world_size
    names, groups = _sources(trainer, rows)
    lengths = [len(ids) for ids in rows["input_ids"]]
    mine, rounds = share_batches(lengths, trainer.args.per_device_eval_batch_size, rank, world, groups=groups)
    sums = torch.zeros(len(names), 2, dtype=torch.float64, device=trainer.args.device)
    model = trainer.model_wrapped
    model.eval()
    scored: list[int] = []
    trainer.stop.begin_evaluation()
    with torch.no_grad():
        for turn in range(rounds):
            trainer.stop.between_batches()
            chosen = mine[turn] if turn < len(mine) else []
            batch = trainer._prepare_inputs(trainer.collator([rows[index] for index in chosen]))
            scored += batch["rows"]
            trainer.doing.next_batch(batch["rows"])
            with trainer.compute_loss_context_manager():
                total = token_loss_sum(model, batch)
            sums[groups[chosen[0]] if chosen else 0] += torch.stack([total.double(), label_tokens(batch).double()])
    model.train()
    trainer.rows_scored = scored
    return HeldOut.of(names, all_sum(sums).tolist(), rows=len(rows), seconds=time.perf_counter() - started)


def _sources(trainer: SftTrainer, rows: Any) -> tuple[list[str], list[int]]:
    return sources_of(Prepared.load(trainer.run.prepared).validation, rows)


def require_best(trainer: SftTrainer) -> None:
    """Raises `DataError` before the first step where the validation rows cannot give `train.metric_for_best_model`."""
    rows, config = trainer.eval_dataset, trainer.config
    name = config.train.metric_for_best_model.removeprefix("eval_")
    if rows is None:
        return
    kind, slash, source = name.partition("/")
    if slash and kind in ("loss", "perplexity"):
        names, groups = _sources(trainer, rows)
        if source not in names or names.index(source) not in groups:
            raise DataError(
                f"`train.metric_for_best_model` is `{name}`, but no validation row is of the source `{source}`",
                hint="raise `data.validation`, or give it validation rows of its own",
            )
    elif name not in ("loss", "perplexity"):
        generate, reason = decide(config, validation_rows=len(rows), answerable_rows=len(answerable(rows)))
        if not generate:
            raise DataError(f"`train.metric_for_best_model` is `{name}`, which is not measured: {reason}")


def _answers(trainer: SftTrainer, rows: Any, ready: list[int], held_out: HeldOut) -> GenerationResult:
    config, step = trainer.config, trainer.state.global_step
    trainer.doing.enter("evaluating", step=step)  # an error names no rows of the loss any more
    # `generate` of adapters calls the base below the forward pass that accelerate put under autocast.
    narrow = contextlib.nullcontext() if config.tuning.mode == "full" else trainer.accelerator.autocast()
    with narrow:
        result = answer_rows(
            trainer.accelerator.unwrap_model(trainer.model_wrapped),  # hooks of ZeRO-3 and FSDP2 sit in the model itself
            trainer.processing_class,
            rows,
            ready,
            config,
            batch_size=trainer.args.per_device_eval_batch_size,
            rank=trainer.args.process_index,
            world_size=trainer.plan.world_size,
            synced=trainer.plan.strategy in SHARDED,
            device=trainer.args.device,
            stop=trainer.stop,
            alive=trainer.doing.get_on,
        )
    if trainer.is_world_process_zero():
        settings = {
            "max_new_tokens": config.train.generation_max_new_tokens,
            "num_beams": config.train.generation_num_beams,
            "batch_size": trainer.args.per_device_eval_batch_size,
            "max_seconds": config.eval.max_seconds,
            "during": "training",
        }
        folder = trainer.run.evaluation(step)
        with side_file(folder, "the answers of an evaluation"):  # its scores go to `metrics.jsonl`, which waits for room
            held_out.publish(folder, step=step, result=result, settings=settings)
    return result


# What an evaluation measures of held-out rows, while training and by `make eval`: their loss, per source too, and scored answers.


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

    @staticmethod
    def of(names: Sequence[str], sums: Sequence[Sequence[float]], *, rows: int, seconds: float) -> HeldOut:
        """Returns the means; `sums` holds for each source the summed loss of its label tokens (nats), and how many those are."""
        total, count = (sum(part[i] for part in sums) for i in (0, 1))
        by_source = {name: (loss / tokens, int(tokens)) for name, (loss, tokens) in zip(names, sums, strict=True) if tokens}
        return HeldOut(
            loss=total / max(count, 1),
            label_tokens=int(count),
            sources=by_source if len(names) > 1 else {},
            rows=rows,
            seconds=max(seconds, 1e-9),
        )

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds

    def metrics(self, prefix: str) -> dict[str, float]:
        """Returns loss and perplexity, in all and per source (`eval_loss/NAME`), for `metrics.jsonl`."""
        found: dict[str, float] = {f"{prefix}_loss": self.loss, f"{prefix}_perplexity": perplexity(self.loss)}
        for name, (loss, _) in self.sources.items():
            found |= {f"{prefix}_loss/{name}": loss, f"{prefix}_perplexity/{name}": perplexity(loss)}
        return found | {f"{prefix}_label_tokens": self.label_tokens, f"{prefix}_loss_rows_per_second": self.rows_per_second}

    def publish(self, folder: Path, *, step: int, result: GenerationResult | None, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Publishes these losses with the scored answers, as `write_evaluation`; returns the content of `scores.json`."""
        speed = {"loss_seconds": self.seconds, "loss_rows_per_second": self.rows_per_second}
        sources = {
            name: {"loss": loss, "perplexity": perplexity(loss), "label_tokens": count}
            for name, (loss, count) in self.sources.items()
        }
        facts = {**({"sources": sources} if sources else {}), "speed": speed | (result.speed() if result else {})}
        return write_evaluation(
            folder, step=step, loss=self.loss, label_tokens=self.label_tokens, result=result, settings=settings, facts=facts
        )


def sources_of(split: PreparedSplit | None, rows: Any) -> tuple[list[str], list[int]]:
    """Returns the names of the sources of a split's rows, and for each row which one it is of; one for all in older data."""
    names = [source.name for source in split.sources] if split else []
    if len(names) < 2 or "source" not in rows.column_names:
        return ["all"], [0] * len(rows)
    return names, [int(source) for source in rows["source"]]


def answer_rows(
    model: Any, tokenizer: Any, rows: Any, ready: Sequence[int], config: Config, *, batch_size: int, **where: Any
) -> GenerationResult:
    """Answers and scores, as `config` says, those rows that `eval.samples` chooses of the ones that are `ready` for it.

    `where`: rank, device and the like, as `score_by_generation` takes them.
    """
    chosen = [ready[place] for place in choose_rows(len(ready), config.eval.samples, config.train.seed)]
    return score_by_generation(
        model,
        tokenizer,
        [rows[index] for index in chosen],
        batch_size=batch_size,
        max_new_tokens=config.train.generation_max_new_tokens,
        num_beams=config.train.generation_num_beams,
        metrics=config.eval.metrics,
        budget=Budget(seconds=config.eval.max_seconds, seed=config.train.seed),
        **where,
    )
