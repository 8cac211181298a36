"""Scores of answers by the metrics of `eval.metrics`, each with its bootstrap interval, and perplexity. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sft_play.config.metrics import LIBRARY, OF_ANSWERS, short_name
from sft_play.training.intervals import CONFIDENCE, RESAMPLES, Interval
from sft_play.training.text_metrics import USE_STEMMER, CorpusMetric, MeanMetric, signature

DEFAULT_METRICS = ("rouge1", "rouge2", "rougeL")
CORPUS = ("bleu", "chrf")


class Metric(Protocol):
    """One entry of `eval.metrics`. Its numbers depend on references and answers alone, in the order of the rows."""

    name: str
    """What files call it."""

    def each(self, references: Sequence[str], answers: Sequence[str]) -> Sequence[float] | None:
        """Returns a score for each answer alone; `None` where a single answer has none."""
        ...

    def whole(self, references: Sequence[str], answers: Sequence[str], each: Sequence[float] | None) -> Interval:
        """Returns the score of all answers with its interval; `each` is what `each` returned."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """What all metrics say of all answers."""

    each: tuple[Mapping[str, float], ...]
    """For each answer: metric -> its score; a metric that has none for a single answer is left out."""
    intervals: Mapping[str, Interval]
    """Metric -> score of all answers."""


def metrics_for(names: Sequence[str]) -> list[Metric]:
    """Returns the metrics that `eval.metrics` names. Raises `DataError` for one that the `evaluate` library cannot load."""
    found: list[Metric] = []
    for name in names:
        if name.startswith(LIBRARY):
            from sft_play.training.library_metrics import LibraryMetric

            found.append(LibraryMetric(name))
        else:
            assert name in OF_ANSWERS, "the rules of the configuration know every metric"
            found.append(CorpusMetric(name) if name in CORPUS else MeanMetric(name))
    return found


def score_answers(metrics: Sequence[Metric], references: Sequence[str], answers: Sequence[str]) -> Scored:
    """Returns what `metrics` say of `answers`. Raises `ValueError` for no answers."""
    if not answers:
        raise ValueError("no answers to score")
    each: list[dict[str, float]] = [{} for _ in answers]
    intervals: dict[str, Interval] = {}
    for metric in metrics:
        single = metric.each(references, answers)
        for row, score in zip(each, single or (), strict=single is not None):
            row[metric.name] = score
        intervals[metric.name] = metric.whole(references, answers, single)
    return Scored(each=tuple(each), intervals=intervals)


def how_scored(names: Sequence[str]) -> dict[str, object]:
    """Returns what must be known to compute the scores again, for `scores.json`."""
    known: dict[str, object] = {"bootstrap": {"resamples": RESAMPLES, "confidence": CONFIDENCE}}
    if any(name.startswith("rouge") for name in names):
        known["use_stemmer"] = USE_STEMMER
    signatures = {name: signature(name) for name in map(short_name, names) if name in CORPUS}
    return known | ({"sacrebleu": signatures} if signatures else {})


def perplexity(loss: float) -> float:
    """Returns exp of a token-weighted loss in nats; the largest float where that overflows."""
    return math.exp(min(loss, 709.0))
