"""The evaluation benchmark's table says what was measured, and a missed goal is a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.evaluation import BATCHED, OURS, SINGLE, Measurement, page, table


def measured(**seconds: float) -> dict[str, list[Measurement]]:
    """One prompt at a time answers only every fourth: the first of two, in half the time."""
    found = {OURS: 10.0, SINGLE: 16.0, BATCHED: 16.0} | {{"single": SINGLE, "batched": BATCHED}[k]: v for k, v in seconds.items()}
    return {
        name: [Measurement(seconds=s, cpu_seconds=s, answers=("a", "b")[: 1 + (name != SINGLE)]) for s in (value, value, 99.0)]
        for name, value in found.items()
    }


@pytest.mark.parametrize("found", [measured(single=14.5), measured(batched=14.0)], ids=["single", "batched"])
def test_missed_goals_fail(found: dict[str, list[Measurement]]) -> None:
    text, good = table(found, 8, 64)
    assert not good
    assert "NOT ALL GOALS" in text


def test_published_page_is_what_the_command_writes() -> None:
    published = Path("docs/benchmarks-evaluation.md").read_text(encoding="utf-8")
    assert published.startswith(page("").rstrip() + "\n\n")
    assert "interleaved measurements" in published or "Not measured yet" in published
    assert "unverified" in published, "no GPU has been measured"
