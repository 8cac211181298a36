"""What an evaluation measures of held-out rows, while training and by `make eval`: their loss, per source too, and scored answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.config.schema import Config
from sft_play.runs.prepared import PreparedSplit
from sft_play.training.generation import Budget, score_by_generation
from sft_play.training.results import GenerationResult, write_evaluation
from sft_play.training.scores import perplexity
from sft_play.training.shares import choose_rows


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
