"""Prepared rows, read without `datasets`: that package imports pandas, a second of processor time for every rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

PLACES = b"places"
"""In the metadata of the rows: what the places of each source begin with, a list in JSON."""


class Rows:
    """The rows of a folder that `data.store` or `datasets.save_to_disk` wrote, mapped from disk.

    `rows[7]` is a row as a dictionary, `rows["labels"]` yields a column. `columns` limits what a row contains.
    """

    def __init__(self, folder: str | Path, columns: Sequence[str] = ()) -> None:
        """Raise `FileNotFoundError` if there are no rows."""
        files = sorted(Path(folder).glob("*.arrow"))
        if not files:
            raise FileNotFoundError(2, "no rows here", str(folder))
        table = pa.concat_tables(pa.ipc.open_stream(pa.memory_map(str(file))).read_all() for file in files)
        self._table = table.select([name for name in table.column_names if not columns or name in columns])
        self.column_names = self._table.column_names
        self._starts: list[str] = json.loads((table.schema.metadata or {}).get(PLACES, b"[]"))

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str):
            return (value.as_py() for value in self._table.column(key))
        row = {name: column[key].as_py() for name, column in zip(self.column_names, self._table.columns, strict=True)}
        if self._starts and "place" in row:
            row["place"] = self._starts[row["source"]] + row["place"]
        return row

    def references(self, count: int) -> list[str]:
        """Return the first right answers, at most `count`."""
        return list(islice(filter(None, self["reference"] if "reference" in self.column_names else ()), count))

    def first_token_from(self, number: int) -> tuple[int, int] | None:
        """Return the first token of this number or a higher one in what is read or prompted, and the source of its
        row.
        """
        for name in {"input_ids", "prompt_ids"} & set(self.column_names):
            if (pc.max(pc.list_flatten(self._table.column(name))).as_py() or 0) >= number:
                rows = zip(self[name], self["source"], strict=True)
                return next((token, source) for row, source in rows for token in row or () if token >= number)
        return None

    def __getitems__(self, keys: Sequence[int]) -> list[dict[str, Any]]:
        """Return the rows of a micro-batch, none for an empty one; `DataLoader` asks for this."""
        return [self[key] for key in keys]


def write_rows(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write rows where `Rows` finds them."""
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as stream:
        stream.write_table(table)
