"""What is printed about prepared data that are not trained."""

from __future__ import annotations

from array import array

from sft_play.config.schema import DataSource
from sft_play.data.manifest import SourceTally, split_manifest, summary


def test_a_source_of_weight_0_is_said_not_to_be_trained() -> None:
    sources = [DataSource(path="a", weight=0.0), DataSource(path="b", weight=1.0)]
    tallies = [SourceTally(rows_read=count, kept=count, format="text") for count in (1, 2)]
    lengths, of_source, trained = (array("i", numbers) for numbers in ([10, 10, 10], [0, 1, 1], [4, 4, 4]))
    manifest = split_manifest(
        sources, tallies, lengths=lengths, of_source=of_source, trained=trained, contents=[None, None], fingerprint=""
    )
    first = summary("training", manifest).splitlines()[0]
    assert first.startswith("training data: 3 rows, 30 tokens, 40% of them trained, ")
    assert first.endswith("; of sources with weight 0, never trained: 1 row (10 tokens)")
    assert "weight 0" not in summary("validation", manifest)
