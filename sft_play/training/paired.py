"""Two models' scores of the same rows: the mean difference and its paired bootstrap interval. Only numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from sft_play.runs.evaluations import LEAST_ROWS
from sft_play.training.intervals import Interval, mean_interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference(Interval):
    """The mean of the second's scores minus the first's, over `n` rows that both answered."""

    better: int
    """Rows on which the second scores higher."""
    worse: int
    """Rows on which the first does."""

    @property
    def verdict(self) -> str:
        """`better` or `worse` where the interval leaves 0 out, else `undecided`; `too few to compare` of fewer rows than `LEAST_ROWS`."""
        if self.n < LEAST_ROWS:
            return "too few to compare"
        return "better" if self.low > 0 else "worse" if self.high < 0 else "undecided"

    def to_json(self) -> dict[str, float | int | str]:
        return {**asdict(self), "verdict": self.verdict}


def paired_difference(first: Sequence[float], second: Sequence[float], *, seed: int = 0) -> Difference:
    """Returns the difference of two models' scores of the same rows, in the same order.

    Rows are drawn with replacement, and each draw takes both models' scores of a row: what makes a row easy or hard for both drops
    out, so the interval is narrower than that of two separate means (Koehn 2004, "Statistical Significance Tests for Machine
    Translation Evaluation"). Raises `ValueError` for no rows, or different numbers of them.
    """
    if not first or len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} scores are no pairs")
    gaps = [two - one for one, two in zip(first, second, strict=True)]
    mean = mean_interval(gaps, seed=seed)
    better, worse = sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)
    return Difference(mean=mean.mean, low=mean.low, high=mean.high, n=mean.n, better=better, worse=worse)
