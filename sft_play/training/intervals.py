"""A score over n answers with its percentile bootstrap interval. Only numpy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

RESAMPLES = 1000
CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A score over `n` answers (a mean, or a corpus score) with its percentile bootstrap interval (95 %)."""

    mean: float
    low: float
    high: float
    n: int

    @staticmethod
    def around(score: float, resampled: Sequence[float] | Any, *, n: int) -> Interval:
        """Returns `score` with the percentiles of the scores of resampled answers."""
        tail = 100 * (1 - CONFIDENCE) / 2
        low, high = np.percentile(resampled, [tail, 100 - tail])
        return Interval(mean=score, low=float(low), high=float(high), n=n)

    def to_json(self) -> dict[str, float | int | str]:
        return asdict(self)

    def beyond(self, other: Interval) -> bool:
        """Whether this interval lies wholly above `other`'s."""
        return self.low > other.high

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def resamples(count: int, *, times: int = RESAMPLES, seed: int = 0) -> Iterator[Any]:
    """Yields `times` arrays of `count` indices below `count`, drawn with replacement; the same for the same seed.

    One at a time: a table of 1,000 draws over a hundred thousand answers would take 800 MB.
    """
    draws = np.random.default_rng(seed)
    for _ in range(times):
        yield draws.integers(0, count, size=count)


def mean_interval(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Returns the mean of `values` with the interval of the means of resamples. Raises `ValueError` for no values."""
    if not values:
        raise ValueError("an interval needs at least one value")
    array = np.asarray(values, dtype=np.float64)
    means = [array[picks].mean() for picks in resamples(len(array), seed=seed)]
    return Interval.around(float(array.mean()), means, n=len(array))
