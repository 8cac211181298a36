"""Prepared rows, read without `datasets`: that package imports pandas, a second of processor time for every rank."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa


class Rows:
    """The rows of a folder that `data.store` or `datasets.save_to_disk` wrote, mapped from disk.

    `rows[7]` is a row as a dictionary, `rows["labels"]` yields a column. `columns` limits what a row holds.
    """

    def __init__(self, folder: str | Path, columns: Sequence[str] = ()) -> None:
        """Raises `FileNotFoundError` when there are no rows."""
        files = sorted(Path(folder).glob("*.arrow"))
        if not files:
            raise FileNotFoundError(2, "no rows here", str(folder))
        self._batches = [batch for file in files for batch in pa.ipc.open_stream(pa.memory_map(str(file)))]
        self._starts = [0]
        for batch in self._batches:
            self._starts.append(self._starts[-1] + batch.num_rows)
        schema = pa.ipc.open_stream(pa.memory_map(str(files[0]))).schema
        self.column_names = [name for name in schema.names if not columns or name in columns]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str):
            return self._column(key)
        if not 0 <= key < len(self):
            raise IndexError(key)
        place = bisect_right(self._starts, key) - 1
        batch = self._batches[place]
        return {name: batch.column(name)[key - self._starts[place]].as_py() for name in self.column_names}

    def __getitems__(self, keys: Sequence[int]) -> list[dict[str, Any]]:
        """Returns the rows of a micro-batch, none for an empty one; `DataLoader` asks for this."""
        return [self[key] for key in keys]

    def _column(self, name: str) -> Iterator[Any]:
        for batch in self._batches:
            yield from (value.as_py() for value in batch.column(name))


def write_rows(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Writes rows where `Rows` finds them."""
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as stream:
        stream.write_table(table)
