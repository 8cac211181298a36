"""The benchmark's table says what was measured, and a missed bound is a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.preparation import AGAIN, OURS, PLAIN, Measurement, page, table


def measured(ours: float, again: float = 0.5) -> dict[str, list[Measurement]]:
    found = {OURS: ours, PLAIN: 90.0, AGAIN: again}
    return {
        name: [Measurement(seconds=seconds, processor_seconds=2 * seconds, peak_bytes=2**30, tokens=40_000_000)]
        for name, seconds in found.items()
    }


@pytest.mark.parametrize(("found", "holds"), [(measured(90.0), True), (measured(101.0), False), (measured(90.0, 2.5), False)])
def test_bounds_are_those_of_the_contract(found: dict[str, list[Measurement]], holds: bool) -> None:
    text, good = table(found, rows=200_000, pairs=1)
    assert good == holds
    assert ("Both hold." in text, "NOT BOTH HOLD." in text) == (holds, not holds)
    assert "| `load_dataset` and `map(apply_chat_template)` | 90.0 | 180.0 | 2,222 | 1.00 GiB | 40,000,000 |" in text


def test_published_page_is_what_the_command_writes() -> None:
    published = Path("docs/benchmarks-preparation.md").read_text(encoding="utf-8")
    assert published.startswith(page("").rstrip() + "\n\n")
