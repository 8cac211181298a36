"""ROUGE of single answers, the bootstrap interval of their mean, and perplexity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
from rouge_score.rouge_scorer import RougeScorer

METRICS = ("rouge1", "rouge2", "rougeL")
USE_STEMMER = True
"""Words longer than three letters are compared by their Porter stem, as in transformers' own summarisation examples."""
RESAMPLES = 1000
CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean over `n` answers with its percentile bootstrap interval (95 %)."""

    mean: float
    low: float
    high: float
    n: int

    def to_json(self) -> dict[str, float | int]:
        return asdict(self)

    def beyond(self, other: Interval) -> bool:
        """Whether this interval lies wholly above `other`'s."""
        return self.low > other.high

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def rouge(reference: str, answer: str) -> dict[str, float]:
    """Returns the F-measures (0 to 1) of one answer, exactly as `rouge_score` computes them.

    Its words are runs of a-z and 0-9, so a text in another script scores 0, and the numbers cannot be compared with ROUGE
    over other tokenizers (jieba, for one).
    """
    scores = _scorer().score(reference, answer)
    return {name: float(scores[name].fmeasure) for name in METRICS}


def without_words(references: Sequence[str]) -> int:
    """Returns how many references have no word that `rouge_score` knows; their score is 0 whatever the answer."""
    tokenize = _scorer()._tokenizer.tokenize
    return sum(not tokenize(reference) for reference in references)


def mean_scores(scores: Sequence[Mapping[str, float]], *, seed: int = 0) -> dict[str, Interval]:
    """Returns for each metric the mean over answers with its bootstrap interval. Raises `ValueError` for no answers."""
    return {name: bootstrap([row[name] for row in scores], seed=seed) for name in METRICS}


def bootstrap(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Returns the mean of `values` and the percentile interval of the means of 1,000 resamples with replacement."""
    if not values:
        raise ValueError("an interval needs at least one value")
    array = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(array), size=(RESAMPLES, len(array)))
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(array[picks].mean(axis=1), [tail, 100 - tail])
    return Interval(mean=float(array.mean()), low=float(low), high=float(high), n=len(array))


def perplexity(loss: float) -> float:
    """Returns exp of a token-weighted loss in nats; the largest float where that overflows."""
    return math.exp(min(loss, 709.0))


@cache
def _scorer() -> Any:
    return RougeScorer(list(METRICS), use_stemmer=USE_STEMMER)
