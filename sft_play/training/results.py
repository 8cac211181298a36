"""What an evaluation found: answers with their scores, and the files that keep them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sft_play.files import remove_half_written, write_json, write_text
from sft_play.training.intervals import Interval
from sft_play.training.scores import how_scored, perplexity


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
    answered_here: int
    """Prompts that this rank answered, dummies left out."""
    seconds: float
    """Of generating alone, until the last rank was ready; scoring takes `scoring_seconds`."""
    scoring_seconds: float
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
    folder: Path,
    *,
    step: int,
    loss: float,
    label_tokens: int,
    result: GenerationResult | None,
    settings: Mapping[str, Any],
    facts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Publishes `predictions.jsonl` and then `scores.json` in `folder`, on one rank only; returns the content of `scores.json`.

    `settings` says how the answers were made (rows, batch, beams, ...) and identifies model and data; `facts` is
    what else is known (loss per source, speed). A folder without `scores.json` is an evaluation that was never finished.
    """
    scores: dict[str, Any] = {
        "step": step,
        "loss": loss,
        "perplexity": perplexity(loss),
        "label_tokens": label_tokens,
        **(facts or {}),
        **({name: interval.to_json() for name, interval in result.scores.items()} if result else {}),
        "answers": len(result.predictions) if result else 0,
        "answers_asked": result.asked if result else 0,
        "complete": result.complete if result else True,
        "settings": {**settings, **(how_scored(list(result.scores)) if result else {})},
    }
    for name in ("predictions.jsonl", "scores.json"):
        remove_half_written(folder / name)
    if result:
        write_predictions(folder / "predictions.jsonl", result.predictions)
    write_json(folder / "scores.json", scores)
    return scores


def write_predictions(path: Path, predictions: Sequence[Prediction]) -> None:
    """Publishes one JSON object a line."""
    write_text(path, "".join(json.dumps(asdict(p), ensure_ascii=False) + "\n" for p in predictions))
