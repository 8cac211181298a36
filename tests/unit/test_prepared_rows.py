"""`data.store` gives what `datasets` gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest

from sft_play.data.store import Rows, write_rows

ROWS: list[dict[str, Any]] = [
    {"input_ids": list(range(n)), "labels": [-100] * n, "row": n, "prompt_ids": [1] * (n % 2), "reference": "é" * n}
    for n in range(7)
]


@pytest.mark.parametrize("shards", [1, 3])
def test_rows_of_a_folder_that_datasets_wrote(shards: int, tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "rows"), num_shards=shards)
    rows = Rows(tmp_path / "rows")
    assert [rows[index] for index in range(len(rows))] == ROWS
    assert list(rows["reference"]) == [row["reference"] for row in ROWS]
    assert rows.column_names == list(ROWS[0])
    assert Rows(tmp_path / "rows", ("row", "labels")).__getitems__([6, 0]) == [
        {"labels": [-100] * 6, "row": 6},
        {"labels": [], "row": 0},
    ]
    with pytest.raises(IndexError):
        rows[7]


def test_written_rows_are_read_and_an_empty_folder_is_not(tmp_path: Path) -> None:
    write_rows(ROWS, tmp_path / "rows")
    assert list(Rows(tmp_path / "rows")["input_ids"]) == [row["input_ids"] for row in ROWS]
    with pytest.raises(FileNotFoundError):
        Rows(tmp_path)
