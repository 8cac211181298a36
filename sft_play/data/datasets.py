"""Rows of what `datasets` knows: parquet and Arrow files, folders of `save_to_disk`, datasets of the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from sft_play.config.schema import DataSource
from sft_play.data.example import LeftOut
from sft_play.data.unpack import open_bytes, seekable
from sft_play.errors import DataError, first_line
from sft_play.plan.hub import hub_reachable
from sft_play.runs.folder import require_inside

BATCH_ROWS = 1024
"""Rows that are in memory at once."""
FILE_MARK = b"ARROW1"
"""How an Arrow file begins; a stream has no mark."""

Placed = tuple[str, Mapping[str, Any] | DataError]


def read_parquet(path: Path) -> Iterator[Placed]:
    """Yields the rows of a parquet file. Raises `DataError`."""
    import pyarrow
    from pyarrow import parquet

    with seekable(path) as stream:
        try:
            yield from _rows(parquet.ParquetFile(stream).iter_batches(batch_size=BATCH_ROWS), path)
        except (pyarrow.ArrowException, OSError) as error:
            raise _broken("a parquet file", path, error) from None


def read_arrow(path: Path) -> Iterator[Placed]:
    """Yields the rows of an Arrow file, or of an Arrow stream, as `datasets` keeps them. Raises `DataError`."""
    import pyarrow

    with open_bytes(path) as stream:
        mark = stream.read(len(FILE_MARK))
    if not mark:
        return
    with seekable(path) as stream:
        try:
            yield from _rows(_arrow_batches(stream, mark == FILE_MARK), path)
        except (pyarrow.ArrowException, OSError) as error:
            raise _broken("an Arrow file", path, error) from None


def _broken(what: str, path: Path, error: Exception) -> DataError:
    said = first_line(error)
    return DataError(f"is not {what}, or is damaged: {said}", place=str(path))


def _arrow_batches(stream: IO[bytes], is_file: bool) -> Iterator[Any]:
    from pyarrow import ipc

    if is_file:
        file = ipc.open_file(stream)
        for index in range(file.num_record_batches):
            yield from _pieces(file.get_batch(index))
    else:
        for batch in ipc.open_stream(stream):
            yield from _pieces(batch)


def _pieces(batch: Any) -> Iterator[Any]:
    """Yields a batch in parts: writers may put a whole table into one."""
    for start in range(0, batch.num_rows, BATCH_ROWS):
        yield batch.slice(start, BATCH_ROWS)


def _rows(batches: Iterator[Any], path: Path) -> Iterator[Placed]:
    number = 0
    for batch in batches:
        nested = [field.name for field in batch.schema if has_struct(field.type)]
        try:
            rows: list[Mapping[str, Any] | DataError] = batch.to_pylist()
        except UnicodeDecodeError:
            rows = [_row(batch.slice(index, 1)) for index in range(batch.num_rows)]
        for row in rows:
            number += 1
            place = f"{path}, row {number}"
            if isinstance(row, DataError):
                row.place = place
                yield place, row
            else:
                yield place, {**row, **{name: without_nulls(row[name]) for name in nested}} if nested else row


def _row(batch: Any) -> Mapping[str, Any] | DataError:
    try:
        row: Mapping[str, Any] = batch.to_pylist()[0]
        return row
    except UnicodeDecodeError as error:
        return DataError(f"the row holds text that is not UTF-8: byte {error.start + 1} of the text")


def has_struct(kind: Any) -> bool:
    """Whether values of an Arrow type are, or hold, mappings."""
    from pyarrow import types

    if types.is_struct(kind):
        return True
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)) and has_struct(
        kind.value_type
    )


def without_nulls(value: Any) -> Any:
    """Returns nested mappings without their null entries: Arrow gives every mapping of a column the keys of all others."""
    if isinstance(value, dict):
        return {name: without_nulls(entry) for name, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


def saved_files(folder: Path, split: str | None) -> list[Path] | None:
    """Returns the Arrow files of a folder that `save_to_disk` wrote, in order; `None` for another folder. Raises `DataError`."""
    root, splits = folder, folder / "dataset_dict.json"
    if splits.is_file():
        names = _strings(splits, "splits")
        if split not in names:
            said = f"there is no split `{split}`" if split else "the data set has splits"
            raise DataError(
                f"{said}: {', '.join(f'`{name}`' for name in names)}", place=str(folder), hint=f"set `split: {names[0]}`"
            )
        folder = folder / _inside(str(split), splits)
    elif not (folder / "state.json").is_file() or not (folder / "dataset_info.json").is_file():
        return None
    elif split is not None:
        raise DataError(f"`split: {split}` is given, but the data set in the folder has no splits", place=str(folder))
    state = folder / "state.json"
    files = [folder / _inside(name, state) for name in _strings(state, "_data_files")]
    for file in files:
        if not file.is_file():
            raise DataError("the file is missing, though `state.json` names it", place=str(file))
    require_inside(files, root)
    return files


def _inside(name: str, where: Path) -> str:
    """Returns the name of a file in the folder itself; a path could lead out of it. Raises `DataError`."""
    if Path(name).name != name or name in ("", ".", ".."):
        raise DataError(f"names `{name}`, which is not in the folder", place=str(where))
    return name


def _strings(path: Path, key: str) -> list[str]:
    """Returns the texts that a file of `save_to_disk` lists under `key`. Raises `DataError`."""
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))[key]
        names = [entry["filename"] if isinstance(entry, dict) else entry for entry in listed]
    except (ValueError, KeyError, TypeError, RecursionError, OSError):
        names = []
    if not names or not all(isinstance(name, str) for name in names):
        raise DataError(f"lists no `{key}`, as `datasets.save_to_disk` would", place=str(path))
    return names


# Rows of a dataset of the hub: downloaded, or streamed row by row.


DEFAULT_SPLIT = "train"
COMMIT = re.compile("[0-9a-f]{40}")
SECONDS = 30
"""How long the hub may take to say which commit a revision is."""


def read_hub(source: DataSource, hint: str, left: LeftOut) -> Iterator[Placed]:
    """Yields the rows of a hub dataset, whose commit `left` keeps. Raises `DataError`; `hint` says how paths of files are meant."""
    import datasets
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

    split = source.split or DEFAULT_SPLIT
    number = 0
    try:
        revision = _commit(source)
        left.commit = revision if revision and COMMIT.fullmatch(revision) else None
        loaded: Any = datasets.load_dataset(
            source.path, source.config, split=split, revision=revision, streaming=source.streaming
        )
        for number, row in enumerate(loaded, 1):
            yield f"{source.path} ({split}), row {number}", {name: without_nulls(value) for name, value in row.items()}
    except (OSError, ValueError, RuntimeError, HfHubHTTPError, httpx2.HTTPError, datasets.exceptions.DatasetsError) as error:
        raise _problem(source, error, number, hint) from error


def _commit(source: DataSource) -> str | None:
    """Returns the commit that the revision stands for. Raises what `huggingface_hub` raises where there is none.

    The library itself takes whatever it has cached of the dataset when a revision is not found, and only logs that.
    """
    from huggingface_hub import HfApi

    if not hub_reachable():
        return source.revision
    return str(HfApi().dataset_info(source.path, revision=source.revision, timeout=SECONDS).sha)


def _problem(source: DataSource, error: Exception, rows: int, hint: str) -> DataError:
    first = first_line(error)
    if rows:
        return DataError(f"reading broke off after row {rows:,}: {first}", place=source.path, hint="try again")
    if not hub_reachable():
        return DataError(
            "there is no such file, and the hub cannot be reached", place=source.path,
            hint=f"check the network, or HF_HOME with a cached copy; {hint}",
        )  # fmt: skip
    return DataError(
        f"neither a file nor a hub dataset that can be loaded: {first}", place=source.path,
        hint="streaming takes whole splits: `rows` limits them" if source.streaming and "[" in (source.split or "")
        else "check the name, `config`, `split`, `revision` and the network; a private dataset needs HF_TOKEN",
    )  # fmt: skip
