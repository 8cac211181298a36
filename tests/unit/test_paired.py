"""Paired differences: what both models find easy or hard drops out, and the interval is numpy's own percentile of resamples."""

from __future__ import annotations

import numpy as np
import pytest

from sft_play.evaluation.scores import paired_difference


def test_a_steady_gain_is_certain_though_rows_differ_widely() -> None:
    first = [0.0, 0.9, 0.1, 0.7, 0.3] * 4
    found = paired_difference(first, [score + 0.05 for score in first])
    assert (found.mean, found.low, found.high) == pytest.approx((0.05, 0.05, 0.05))
    assert (found.n, found.better, found.worse, found.verdict) == (20, 20, 0, "better")


def test_the_interval_is_of_resampled_means() -> None:
    first, second = [0.1, 0.5, 0.2, 0.8], [0.4, 0.3, 0.2, 0.9]
    gaps = np.array(second) - np.array(first)
    draws = np.random.default_rng(0)
    means = [gaps[draws.integers(0, 4, size=4)].mean() for _ in range(1000)]
    found = paired_difference(first, second)
    assert (found.low, found.high) == pytest.approx(tuple(np.percentile(means, [2.5, 97.5])))
    assert found.verdict == "too few to compare", "n = 4"
    assert paired_difference(first * 5, second * 5).verdict == "undecided"
