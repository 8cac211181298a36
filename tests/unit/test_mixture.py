"""Mixing: every prefix is near the weights, no row repeats before all were seen, and an epoch ends when a source runs
dry.
"""

from __future__ import annotations

import re
from array import array
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.schema import DataConfig, DataSource
from sft_play.data.store import SourceTally, SplitWriter, split_manifest
from sft_play.data.summary import summary
from sft_play.errors import DataError
from sft_play.plan.epoch import Mixture, mixture_of
from sft_play.runs.prepared import SourceFacts


def mixture(rows: list[int], tokens: list[int], weights: list[float], **data: Any) -> Mixture:
    parts = [
        SourceFacts(name=f"s{i}", rows=rows[i], tokens=tokens[i], label_tokens=tokens[i] // 2, weight=weight)
        for i, weight in enumerate(weights)
    ]
    result = mixture_of(DataConfig(**data), parts)
    assert result is not None
    return result


def test_an_epoch_ends_when_a_source_is_exhausted() -> None:
    # 3:1 in tokens. A has 10,000, B 10,000: until A was seen once, B gives a third of itself; until B was, A comes 3
    # times.
    assert mixture([100, 50], [10_000, 10_000], [3, 1], exhausted="stop").epoch_rows == (100, 17)
    assert mixture([100, 50], [10_000, 10_000], [3, 1]).epoch_rows == (300, 50)
    assert mixture([100, 50], [10_000, 10_000], [3, 1], mix_by="rows").epoch_rows == (150, 50)
    assert mixture([100, 50], [10_000, 10_000], [1, 0]).epoch_rows == (100, 0)
    assert mixture([100, 50], [10_000, 20_000], [0.1, 0.2]).epoch_rows == (100, 50)
    lines = mixture([100, 50], [10_000, 10_000], [3, 1]).describe()
    assert lines[0].startswith("s0: 300 rows an epoch (3 x its 100), about 30,000 tokens, 75.0% of the tokens, ")


def test_a_mixture_says_the_share_of_what_is_trained() -> None:
    chat = SourceFacts(name="chat", rows=100, tokens=8_000, label_tokens=1_000, weight=0.8)
    documents = SourceFacts(name="documents", rows=10, tokens=2_000, label_tokens=2_000, weight=0.2)
    mixed = mixture_of(DataConfig(), [chat, documents])
    assert mixed is not None
    shares = [re.findall(r"[\d.]+%", line) for line in mixed.describe()]
    assert shares == [["80.0%", "33.3%"], ["20.0%", "66.7%"]]


def test_a_source_that_is_repeated_many_times_causes_a_warning() -> None:
    lines = mixture([1, 109], [100, 10_900], [1, 1]).describe()
    assert lines[-1].startswith("warning: every row of ") and "comes 109 times an epoch" in lines[-1]


def test_a_weighted_source_without_rows_is_an_error() -> None:
    with pytest.raises(DataError, match="source `s1` has the weight 2, but gave no rows"):
        mixture([3, 0], [30, 0], [1, 2])


def test_each_source_gives_all_its_rows_before_any_again() -> None:
    owner = [0] * 5 + [1] * 3
    mixed = mixture([5, 3], [50, 30], [3, 1])
    taken = [row for epoch in range(3) for row in mixed.order(owner, [10] * 8, 7, epoch)]
    for source, count in enumerate([5, 3]):
        stream = [row for row in taken if owner[row] == source]
        passes = [stream[start : start + count] for start in range(0, len(stream), count)]
        assert len(passes) > 1 and all(len(set(part)) == len(part) for part in passes)


# What is printed of sources that are not trained.


def test_a_source_of_weight_0_is_reported_as_untrained(tmp_path: Path) -> None:
    sources = [DataSource(path="a", weight=0.0), DataSource(path="b", weight=1.0)]
    tallies = [SourceTally(rows_read=count, kept=count, format="text") for count in (1, 2)]
    with SplitWriter(tmp_path / "train") as writer:
        writer.lengths, writer.sources, writer.trained = (array("i", of) for of in ([10] * 3, [0, 1, 1], [4] * 3))
        manifest = split_manifest(writer, sources, tallies, [None, None])
    first = summary("training", manifest).splitlines()[0]
    assert first.startswith("training data: 3 rows, 30 tokens, 40% of them trained, ")
    assert first.endswith("; of sources with weight 0, never trained: 1 row (10 tokens)")
    assert "weight 0" not in summary("validation", manifest)
