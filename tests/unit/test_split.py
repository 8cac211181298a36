"""Sides of a split: the same row on the same side for ever, and groups that never straddle."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sft_play.data.example import Example
from sft_play.data.processes import is_held_out

TEXTS = st.text(max_size=30)
FRACTIONS = st.floats(0.0, 0.99)
GOLDEN_ROWS, GOLDEN_GROUPS = [1, 2, 4, 5, 7, 8, 11], [1, 4, 7]


def example(text: str, **more: str) -> Example:
    return Example(place=more.pop("place", "a:1"), form=more.pop("form", "text"), source=0, text=text)


@given(TEXTS, FRACTIONS)
def test_a_rows_side_depends_on_its_content_alone(text: str, fraction: float) -> None:
    first, moved = example(text), example(text, place="b, row 9", form="tokens")
    assert is_held_out(first.key, None, fraction) == is_held_out(moved.key, None, fraction)


@given(st.lists(TEXTS, min_size=1, max_size=20), TEXTS, FRACTIONS)
def test_a_group_never_straddles(texts: list[str], group: str, fraction: float) -> None:
    assert len({is_held_out(example(text).key, group, fraction) for text in texts}) == 1


def test_sides_that_were_published_never_change() -> None:
    """Golden: another hash would move rows of existing validation data into training."""
    rows = [example(f"row {i}").key for i in range(12)]
    assert [i for i, key in enumerate(rows) if is_held_out(key, None, 0.4)] == GOLDEN_ROWS
    assert [i for i in range(12) if is_held_out(rows[0], f"group {i}", 0.4)] == GOLDEN_GROUPS
