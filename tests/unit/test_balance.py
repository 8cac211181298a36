"""Shares of unequal ranks: every row is given out, within memory, never slower than equal shares, and optimal where that can be seen."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sft_play.plan.batch import Cost, Slots, equal_shares, share_out, spans, step_seconds

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
