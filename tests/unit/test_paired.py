"""Paired differences: what both models find easy or hard drops out, and the interval is numpy's own percentile of resamples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sft_play.evaluation.scores import paired_difference

SCORES = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=30)


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


@given(SCORES)
def test_the_other_way_round_it_is_the_opposite(pairs: list[tuple[float, float]]) -> None:
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    there, back = paired_difference(first, second), paired_difference(second, first)
    assert (there.mean, there.low, there.high) == pytest.approx((-back.mean, -back.high, -back.low))
    assert (there.better, there.worse) == (back.worse, back.better)


@pytest.mark.parametrize(("first", "second"), [([], []), ([1.0], [1.0, 2.0])])
def test_what_are_no_pairs_is_refused(first: list[float], second: list[float]) -> None:
    with pytest.raises(ValueError, match="no pairs"):
        paired_difference(first, second)
