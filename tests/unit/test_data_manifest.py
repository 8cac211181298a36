"""What is printed about prepared data: what is not trained, was not there or was left out is said."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from sft_play.config.schema import DataSource
from sft_play.data.manifest import SourceTally, split_manifest, summary


def told(name: str, sources: list[DataSource], tallies: list[SourceTally], of_source: list[int]) -> str:
    rows = len(of_source)
    manifest: dict[str, Any] = split_manifest(
        sources, tallies, lengths=array("i", [10] * rows), of_source=array("i", of_source), trained=array("i", [4] * rows),
        contents=[None] * len(sources), fingerprint="",
    )  # fmt: skip
    return summary(name, manifest)


def read(count: int, form: str = "text") -> SourceTally:
    return SourceTally(rows_read=count, kept=count, format=form)


def test_answers_and_thoughts_that_are_not_learnt_are_told() -> None:
    tally = SourceTally(rows_read=3, kept=3, thoughts=2, answers_cut=1)
    said = told("training", [DataSource(path="a")], [tally], [0, 0, 0])
    assert "leaves out of learnt turns, so not learnt: 2" in said and "which teach no stop: 1" in said


def test_a_source_of_weight_0_is_said_not_to_be_trained() -> None:
    sources = [DataSource(path="a", weight=0.0), DataSource(path="b", weight=1.0)]
    first = told("training", sources, [read(1), read(2)], [0, 1, 1]).splitlines()[0]
    assert first.startswith("training data: 3 rows, 30 tokens, 40% of them trained, ")
    assert first.endswith("; of sources with weight 0, never trained: 1 row (10 tokens)")
    assert "weight 0" not in told("validation", sources, [read(1), read(2)], [0, 1, 1])


@pytest.mark.parametrize(("name", "said"), [("validation", "no row, so it has no validation loss"), ("training", "no row")])
def test_a_source_without_a_row_in_the_split_is_said_so(name: str, said: str) -> None:
    lines = told(name, [DataSource(path="a"), DataSource(path="docs")], [read(2), SourceTally()], [0, 0]).splitlines()
    assert lines[-1] == f"  docs: {said}"
