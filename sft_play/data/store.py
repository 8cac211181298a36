"""Prepared rows on the disk: written to a folder of their own as Arrow, published by rename, read without `datasets`."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sft_play.data.encode import Made
from sft_play.data.manifest import MANIFEST
from sft_play.files import new_folder, sync_folder, write_bytes, write_json
from sft_play.runs.manifest import checksum

ARROW = "data-00000-of-00001.arrow"
LENGTHS, SOURCES, LABELS, KEYS = "lengths.i32", "sources.i32", "labels.i32", "keys.bin"
BATCH_ROWS, BATCH_TOKENS = 8192, 2**22
"""An Arrow record batch ends with either; it is what is held in memory."""
TOKENS = pa.list_(pa.int32())
SCHEMA = pa.schema(
    [
        ("input_ids", TOKENS), ("labels", TOKENS), ("row", pa.int64()), ("source", pa.int32()),
        ("prompt_ids", TOKENS), ("reference", pa.string()),
    ]
)  # fmt: skip


class SplitWriter:
    """Write one split into a folder aside. A context manager: what was not published is gone when it is left."""

    def __init__(self, folder: Path) -> None:
        """`folder` is where the split is published; its neighbours that a killed process left half-written are removed."""
        self.folder = folder
        self._scratch = new_folder(folder.parent, folder.name)
        self._stream = pa.OSFile(str(self._scratch / ARROW), "wb")
        self._writer = pa.ipc.new_stream(self._stream, SCHEMA)
        self._waiting: list[tuple[Any, ...]] = []
        self._tokens_waiting = 0
        self._digests = tuple(hashlib.sha256() for _ in range(3))
        self.lengths, self.sources, self.trained = array("i"), array("i"), array("i")
        """By row: tokens, index of the source, tokens that a loss is computed for."""
        self.keys = bytearray()
        """`encode.KEY_BYTES` for each example that gave a row."""

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # a full disk was told already
            self._stream.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def append(self, made: Made, *, source: int, number: int) -> None:
        """Add the rows of an example; `number` is its place among those of the split."""
        for row in made.rows:
            length = np.int32(len(row.input_ids))
            for digest, part in zip(self._digests, (length, row.input_ids, row.labels), strict=True):
                digest.update(part.tobytes())
            self.lengths.append(int(length))
            self.sources.append(source)
            self.trained.append(row.trained)
            self._waiting.append((row.input_ids, row.labels, number, source, row.prompt_ids, row.reference))
            self._tokens_waiting += int(length)
            if len(self._waiting) >= BATCH_ROWS or self._tokens_waiting >= BATCH_TOKENS:
                self._flush()
        if made.rows:
            self.keys += made.key

    def _flush(self) -> None:
        if self._waiting:
            columns = zip(SCHEMA, zip(*self._waiting, strict=True), strict=True)
            arrays = [pa.array(values, field.type) for field, values in columns]
            self._writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA))
        self._waiting, self._tokens_waiting = [], 0

    def fingerprint(self) -> str:
        """Return a sha256 over lengths, tokens and labels of all rows, in order."""
        return hashlib.sha256("".join(digest.hexdigest() for digest in self._digests).encode()).hexdigest()

    def publish(self, manifest: Mapping[str, Any]) -> None:
        """Write what is left and makes the folder visible; of two processes that race, one publishes."""
        self._flush()
        self._writer.close()
        self._stream.close()
        with (self._scratch / ARROW).open("rb") as stream:
            os.fsync(stream.fileno())
        for name, content in ((LENGTHS, self.lengths), (SOURCES, self.sources), (LABELS, self.trained)):
            write_bytes(self._scratch / name, np.asarray(content, "<i4").tobytes())
        write_bytes(self._scratch / KEYS, bytes(self.keys))
        state: dict[str, Any] = {
            "_data_files": [{"filename": ARROW}],
            "_fingerprint": self.fingerprint()[:16],
            "_format_columns": None,
        }
        state |= {"_format_kwargs": {}, "_format_type": None, "_output_all_columns": False, "_split": None}
        write_json(self._scratch / "state.json", state)  # what `datasets.load_from_disk` looks for
        write_json(self._scratch / "dataset_info.json", {"citation": "", "description": "", "homepage": "", "license": ""})
        sizes = {path.name: path.stat().st_size for path in self._scratch.iterdir()}
        checksums = {name: checksum(self._scratch / name) for name in sizes}
        write_json(self._scratch / MANIFEST, {**manifest, "files": sizes, "checksums": checksums})
        self._scratch.chmod(0o755)
        try:
            self._scratch.rename(self.folder)
        except OSError:  # another process was first; its rows are the same
            if not (self.folder / MANIFEST).is_file():
                raise
        sync_folder(self.folder.parent)


# Prepared rows, read without `datasets`: that package imports pandas, a second of processor time for every rank.


class Rows:
    """The rows of a folder that `data.store` or `datasets.save_to_disk` wrote, mapped from disk.

    `rows[7]` is a row as a dictionary, `rows["labels"]` yields a column. `columns` limits what a row holds.
    """

    def __init__(self, folder: str | Path, columns: Sequence[str] = ()) -> None:
        """Raise `FileNotFoundError` when there are no rows."""
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
        """Return the rows of a micro-batch, none for an empty one; `DataLoader` asks for this."""
        return [self[key] for key in keys]

    def _column(self, name: str) -> Iterator[Any]:
        for batch in self._batches:
            yield from (value.as_py() for value in batch.column(name))


def write_rows(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write rows where `Rows` finds them."""
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as stream:
        stream.write_table(table)
