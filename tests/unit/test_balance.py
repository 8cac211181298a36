"""Shares of unequal ranks: every row is given out, within memory, never slower than equal shares, and optimal where that can be seen."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sft_play.plan.batch import NOTHING, Cost, Slots, equal_shares, rank_seconds, share_out, spans, step_seconds

LAN = (
    Cost(fixed_seconds=0.10, row_seconds=0.42, most_rows=4),
    Cost(fixed_seconds=0.16, row_seconds=0.62, most_rows=2),
    Cost(fixed_seconds=0.20, row_seconds=0.70, most_rows=2),
)
"""A 12 GB card and two of 8 GB, as measured elsewhere."""
costs = st.builds(
    Cost, fixed_seconds=st.sampled_from([0.0, 0.01, 0.1, 0.3, 2.0]), row_seconds=st.floats(0.01, 2.0), most_rows=st.integers(1, 9)
)


def test_the_three_machines_at_home() -> None:
    equal, shares = equal_shares(32, LAN, same_steps=False), share_out(32, LAN, same_steps=False)
    assert spans(32, equal) == (11, 11, 10) and step_seconds(equal, LAN, rows=32) == pytest.approx(8.0)
    assert spans(32, shares) == (15, 9, 8) and shares == ((4, 4), (2, 5), (2, 4))
    assert step_seconds(shares, LAN, rows=32) == pytest.approx(6.7)
    same = share_out(32, LAN, same_steps=True)
    assert same == ((4, 4), (2, 4), (2, 4)) and step_seconds(same, LAN, rows=32) == pytest.approx(7.12)


def within(shares: tuple[Slots, ...], ranks: list[Cost], rows: int) -> None:
    assert sum(micro * steps for micro, steps in shares) >= rows == sum(spans(rows, shares))
    for (micro, steps), cost, mine in zip(shares, ranks, spans(rows, shares), strict=True):
        assert 0 <= micro <= cost.most_rows and steps >= 1 and mine <= micro * steps


@settings(max_examples=150, deadline=None)
@given(rows=st.integers(1, 200), ranks=st.lists(costs, min_size=1, max_size=6), same=st.booleans())
def test_all_rows_within_memory_and_never_slower_than_equal(rows: int, ranks: list[Cost], same: bool) -> None:
    shares = share_out(rows, ranks, same_steps=same)
    within(shares, ranks, rows)
    assert shares == share_out(rows, ranks, same_steps=same)  # whoever asks
    equal = equal_shares(rows, ranks, same_steps=same)
    within(equal, ranks, rows)
    assert step_seconds(shares, ranks, rows=rows) <= step_seconds(equal, ranks, rows=rows)
    if same:
        assert len({steps for (micro, steps) in shares}) == 1


def least(rows: int, ranks: list[Cost]) -> float:
    """Returns the least time that any way to give out rows has, each rank in its fewest micro-steps."""
    found = []
    for first in product(range(rows + 1), repeat=len(ranks) - 1):
        counts = (*first, rows - sum(first))
        if counts[-1] >= 0:
            found.append(max(cost.step(count) for cost, count in zip(ranks, counts, strict=True)))
    return min(found)


@settings(max_examples=150, deadline=None)
@given(rows=st.integers(1, 14), ranks=st.lists(costs, min_size=2, max_size=3))
def test_small_cases_are_optimal_but_for_a_row(rows: int, ranks: list[Cost]) -> None:
    shares, best = share_out(rows, ranks, same_steps=False), least(rows, ranks)
    worst_row = max(cost.micro_step(1) for cost, (micro, _) in zip(ranks, shares, strict=True) if micro)
    # Spans are cut in proportion to slots, which may move one row; no way to give out rows is faster than `best`.
    assert best * (1 - 1e-9) <= step_seconds(shares, ranks, rows=rows) <= best + worst_row + 1e-9


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(1, 12), ranks=st.lists(costs, min_size=2, max_size=3))
def test_with_equal_micro_steps_small_cases_are_optimal(rows: int, ranks: list[Cost]) -> None:
    best = min(
        steps * max(cost.micro_step(micro) for cost, micro in zip(ranks, micros, strict=True))
        for steps in range(1, rows + 1)
        for micros in product(*(range(cost.most_rows + 1) for cost in ranks))
        if sum(micros) * steps >= rows
    )
    assert step_seconds(share_out(rows, ranks, same_steps=True), ranks, rows=rows) <= best + 1e-9


def test_a_rank_gets_nothing_only_when_the_others_are_faster_without_it() -> None:
    hopeless = Cost(fixed_seconds=50.0, row_seconds=1.0, most_rows=8)
    shares = share_out(16, (LAN[0], hopeless), same_steps=False)
    assert shares[1] == NOTHING and spans(16, shares) == (16, 0) and rank_seconds(shares, (LAN[0], hopeless), rows=16)[1] == 0
    assert NOTHING not in share_out(16, LAN, same_steps=False)
    full = Cost(fixed_seconds=0.1, row_seconds=0.1, most_rows=0)
    assert (
        share_out(6, (full, LAN[0]), same_steps=False)[0] == NOTHING == (*share_out(6, (full, LAN[0]), same_steps=True)[0][:1], 1)
    )


@pytest.mark.parametrize(
    ("rows", "ranks"),
    [
        (0, LAN),
        (4, ()),
        (4, (Cost(fixed_seconds=1, row_seconds=1, most_rows=0),)),
        (4, (Cost(fixed_seconds=1, row_seconds=0, most_rows=1),)),
    ],
)
def test_nonsense_is_refused(rows: int, ranks: Any) -> None:
    for same in (False, True):
        with pytest.raises(ValueError, match="rank"):
            share_out(rows, ranks, same_steps=same)
        with pytest.raises(ValueError, match="rank"):
            equal_shares(rows, ranks, same_steps=same)


def test_many_ranks_take_no_time() -> None:
    ranks = [Cost(fixed_seconds=0.1, row_seconds=0.1 + rank / 500, most_rows=4 + rank % 3) for rank in range(100)]
    shares = share_out(4096, ranks, same_steps=False)
    assert step_seconds(shares, ranks, rows=4096) < 0.85 * step_seconds(
        equal_shares(4096, ranks, same_steps=False), ranks, rows=4096
    )
