"""What an evaluation found, and the files that keep it: losses of held-out rows, answers with their scores."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sft_play.evaluation.scores import Interval, how_scored, perplexity
from sft_play.files import remove_half_written, write_json, write_text


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
        """Returns loss and perplexity, in all and per source (`eval_loss/NAME`), for `metrics.jsonl`."""
        found: dict[str, float] = {"eval_loss": self.loss, "eval_perplexity": perplexity(self.loss)}
        for name, (loss, _) in self.sources.items():
            found |= {f"eval_loss/{name}": loss, f"eval_perplexity/{name}": perplexity(loss)}
        return found | {"eval_label_tokens": self.label_tokens, "eval_loss_rows_per_second": self.rows_per_second}


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """One line of `predictions.jsonl`."""

    row: int
    prompt: str
    """The prompt as the model saw it, template and special tokens included."""
    reference: str
    answer: str
    """The completion only, cut at the end of the turn."""
    tokens: int
    """Tokens of the answer, without the one that ends the turn."""
    stopped: bool
    """Whether the model ended its turn itself, before `generation_max_new_tokens`."""
    scores: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationResult:
    """The answers of all ranks, in the order of the rows that were asked; the same on every rank."""

    predictions: tuple[Prediction, ...]
    scores: Mapping[str, Interval]
    """Metric -> score of all answers with its bootstrap interval."""
    asked: int
    """Rows that were to be answered; more than there are `predictions` where the time was over first."""
    seconds: float
    """Of generating alone, until the last rank was ready."""
    warnings: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether every row was answered."""
        return len(self.predictions) == self.asked

    def metrics(self) -> dict[str, float]:
        """Returns `eval_NAME` of every metric and what describes the answers, for `metrics.jsonl`."""
        count = len(self.predictions)
        return {
            **{f"eval_{name}": interval.mean for name, interval in self.scores.items()},
            "eval_answers": count,
            "eval_answers_asked": self.asked,
            "eval_answer_tokens": sum(p.tokens for p in self.predictions) / count,
            "eval_stopped": sum(p.stopped for p in self.predictions) / count,
            **{f"eval_{name}": value for name, value in self.speed().items()},
        }

    def speed(self) -> dict[str, float]:
        """Returns how long generating took, over all ranks, and how much came of it."""
        return {
            "generation_seconds": self.seconds,
            "answers_per_second": len(self.predictions) / self.seconds,
            "answer_tokens_per_second": sum(p.tokens for p in self.predictions) / self.seconds,
        }


def write_evaluation(
    folder: Path, held_out: HeldOut, result: GenerationResult | None, *, step: int, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Publishes `predictions.jsonl` and then `scores.json` in `folder`, on one rank only; returns the content of `scores.json`.

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
