"""Evaluate the model of a trainer between its steps."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import Trainer

from sft_play.data.batches import Batch
from sft_play.errors import DataError, typed_here
from sft_play.evaluation.held_out import HeldOut, held_out_loss, loss_and_tokens, sources_of, write_evaluation
from sft_play.evaluation.held_out_answers import GenerationResult, answer_rows, answerable, decide
from sft_play.files import side_file
from sft_play.runs.prepared import PreparedSplit
from sft_play.text import tell
from sft_play.training.faults import ran_out_of_memory
from sft_play.training.ranks import PeerError, TrainContext, named
from sft_play.training.stopping import EvaluationStopped, StopOnRequest


@dataclass(slots=True)
class WhileTraining:
    """Evaluate the model of a trainer between its steps."""

    context: TrainContext
    stop: StopOnRequest
    split: PreparedSplit | None
    decision_shown: bool = False

    def require_best(self, rows: Any) -> None:
        """Raise `DataError` if `train.metric_for_best_model` cannot be measured on the validation rows."""
        name = self.context.config.train.metric_for_best_model.removeprefix("eval_")
        kind, slash, source = name.partition("/")
        if slash and kind in ("loss", "perplexity"):
            names, groups = sources_of(self.split, rows)
            if source not in names or names.index(source) not in groups:
                raise DataError(
                    f"`train.metric_for_best_model` is `{name}`, but no validation row is from the source `{source}`",
                    hint="raise `data.validation`, or give it its own validation rows",
                )
        elif name not in ("loss", "perplexity"):
            generate, reason = decide(self.context.config, rows=len(rows), ready=len(answerable(rows)))
            if not generate:
                raise DataError(f"`train.metric_for_best_model` is `{name}`, which is not measured: {reason}")

    def evaluate(self, trainer: Trainer, rows: Any) -> dict[str, float]:
        """Return the metrics of an evaluation at this step, on every rank; print once how it is done."""
        config, first, step = self.context.config, self.context.ranks.first, trainer.state.global_step
        held_out = self._loss(trainer, rows)
        metrics = held_out.metrics()
        ready = answerable(rows)
        generate, reason = decide(config, rows=len(rows), ready=len(ready))
        if first and step and not self.decision_shown:
            print(typed_here(f"evaluation: {reason}"), flush=True)
            self.decision_shown = True
        if generate and (result := self._try_answers(trainer, rows, ready, held_out)):
            metrics |= result.metrics()
            for warning in result.warnings if first else ():
                tell(f"evaluation: {warning}")
        return metrics

    def _loss(self, trainer: Trainer, rows: Any) -> HeldOut:
        model, scored = trainer.model_wrapped, []

        def measure(batch: Batch) -> Tensor:
            self.stop.between_batches()
            scored.extend(batch["rows"])
            self.context.activity.next_batch(batch["rows"])
            batch = trainer._prepare_inputs(batch)
            if trainer.pipeline is not None:
                sums: Tensor = trainer.pipeline.measure(batch)
                return sums
            return loss_and_tokens(model, batch)

        model.eval()
        self.stop.begin_evaluation()
        size = trainer.args.per_device_eval_batch_size
        held_out = held_out_loss(
            rows, self.split, batch_size=size, collate=trainer.data_collator, measure=measure, ranks=self.context.ranks
        )
        model.train()
        trainer.shard_proof.rows_scored = scored
        return held_out

    def _try_answers(self, trainer: Trainer, rows: Any, ready: list[int], held_out: HeldOut) -> GenerationResult | None:
        """Return the answers and their scores, or `None` with a warning if they failed on any rank.

        A failure to score does not end a training. Two failures do: a shortage of memory, which has its own remedy, and
        an error of one rank inside a collective pass, which leaves the others waiting.
        """
        ranks, step = self.context.ranks, trainer.state.global_step
        try:
            result = self._answers(trainer, rows, ready)
            ranks.attempt(lambda: self._write(trainer, held_out, result) if ranks.first else None)
        except EvaluationStopped:
            raise
        except Exception as error:
            if ran_out_of_memory(error) or (ranks.world > 1 and not isinstance(error, PeerError)):
                raise
            count = min(self.context.config.eval.samples, len(ready))
            reason = str(error) if isinstance(error, PeerError) else named(error)
            tell(f"evaluation: none of {count} answers after step {step} is scored: {reason}; training continues")
            return None
        return result

    def _answers(self, trainer: Trainer, rows: Any, ready: list[int]) -> GenerationResult:
        context, config = self.context, self.context.config
        # From here on an error must not name the rows of the loss.
        context.activity.enter("evaluating", step=trainer.state.global_step)
        size = trainer.args.per_device_eval_batch_size
        # `generate` of adapters calls the base below the forward pass that accelerate put under autocast.
        narrow = contextlib.nullcontext() if config.tuning.mode == "full" else trainer.accelerator.autocast()
        with narrow, trainer.pipeline.answering() if trainer.pipeline else contextlib.nullcontext():
            return answer_rows(
                # Hooks of ZeRO-3 and FSDP2 sit in the model itself.
                trainer.accelerator.unwrap_model(trainer.model_wrapped),
                trainer.processing_class,
                rows,
                ready,
                config,
                batch_size=size,
                ranks=context.ranks,
                synced=context.plan.gathers or context.ranks.copies > 1,
                stop=self.stop,
                alive=context.activity.get_on,
            )

    def _write(self, trainer: Trainer, held_out: HeldOut, result: GenerationResult) -> None:
        config, step = self.context.config, trainer.state.global_step
        settings = {
            "max_new_tokens": config.train.generation_max_new_tokens,
            "num_beams": config.train.generation_num_beams,
            "batch_size": trainer.args.per_device_eval_batch_size,
            "max_seconds": config.eval.max_seconds,
            "during": "training",
        }
        folder = self.context.run.evaluation(step)
        # The scores go to `metrics.jsonl`, which waits for disk space.
        with side_file(folder, "the answers of an evaluation"):
            write_evaluation(folder, held_out, result, step=step, settings=settings)
