"""The benchmark's table says what was measured, and a missed bound or a different loss is a failure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.training import NAMES, OURS, Measurement, page, table

GIB = 2**30
PLAIN = Measurement(seconds=30.0, peak_bytes=4 * GIB, losses=(3.0, 2.5))


def measured(ours: float, **changed: Measurement) -> dict[str, list[Measurement]]:
    found = {name: [PLAIN, replace(PLAIN, seconds=31.0), replace(PLAIN, seconds=90.0)] for name in NAMES}
    found["trl"] = [replace(PLAIN, seconds=45.0)] * 3
    found[OURS] = [replace(PLAIN, seconds=ours, peak_bytes=3 * GIB)] * 3
    return found | {name: [value] * 3 for name, value in changed.items()}


@pytest.mark.parametrize(
    "found",
    [
        measured(24.0),
        measured(20.0, trainer=replace(PLAIN, peak_bytes=2 * GIB)),
        measured(20.0, trainer=replace(PLAIN, losses=(3.0, 2.6))),
        measured(20.0, trl=replace(PLAIN, seconds=33.0)),
    ],
    ids=["slow", "memory", "losses", "trl"],
)
def test_missed_bounds_and_other_losses_fail(found: dict[str, list[Measurement]]) -> None:
    text, good = table(found, pairs=3, steps=2)
    assert not good
    assert "NOT ALL HOLD" in text


def test_published_page_is_what_the_command_writes() -> None:
    published = Path("docs/benchmarks.md").read_text(encoding="utf-8")
    introduction = page("").rstrip()
    assert published.startswith(introduction + "\n\n")
    assert "All hold." in published or "Not measured yet" in published
    assert "unverified" in published, "no GPU has been measured"
