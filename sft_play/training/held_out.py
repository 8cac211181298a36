"""Evaluation while training: loss of every validation row, in all and per source, and scores of generated answers.

Functions over the trainer. Batches are formed before they are shared out, so all figures are the same on any number of ranks.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from sft_play.errors import DataError
from sft_play.runs.prepared import Prepared
from sft_play.runs.space import side_file
from sft_play.training.generation import decide
from sft_play.training.loss import all_sum, label_tokens, token_loss_sum
from sft_play.training.measures import HeldOut, answer_rows, sources_of
from sft_play.training.results import GenerationResult
from sft_play.training.shares import answerable, share_batches

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
