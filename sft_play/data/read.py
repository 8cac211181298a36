"""Reads rows from files, folders, hub datasets and the built-in set, each with the place it came from."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sft_play.config.schema import DataSource
from sft_play.errors import DataError
from sft_play.plan.hub import hub_reachable

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
BUILTIN = "builtin:"
PATHS_COUNT = "paths count from the folder in which you typed make; a hub dataset is `OWNER/NAME`"

Placed = tuple[str, Mapping[str, Any] | DataError]
"""A row and where it stands: `file:line`, or `file, row n`. A line that is no row is its error, so that later ones are read too."""


def files_of(source: DataSource) -> list[Path] | None:
    """Returns the local files of a source in a fixed order; `None` for a hub id or the built-in set. Raises `DataError`."""
    if source.path.startswith(BUILTIN):
        return None
    path = Path(source.path).expanduser()
    if path.is_file():  # first, since a file's name may hold `[`
        return [path]
    if any(mark in source.path for mark in "*?["):
        found = sorted(p for p in _matches(path) if p.is_file())
        if not found:
            raise DataError(f"no file matches `{source.path}`", hint=PATHS_COUNT)
        return found
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
        if not found:
            raise DataError("the folder holds no json, jsonl, csv or parquet file", place=source.path)
        return found
    if path.suffix or source.path.count("/") != 1 or source.path.startswith((".", "/", "~")):
        raise DataError("there is no such file", place=source.path, hint=PATHS_COUNT)
    return None


def is_hub(source: DataSource) -> bool:
    """Whether a source is a dataset of the hub. Raises `DataError` when it is nothing."""
    return not source.path.startswith(BUILTIN) and files_of(source) is None


def _refuse_hub_options(source: DataSource, *allowed: str) -> None:
    """Raises `DataError` for what only a hub dataset understands: nothing that was typed is ignored."""
    for name in ("split", "config", "revision"):
        if name not in allowed and getattr(source, name) is not None:
            raise DataError(f"`{name}: {getattr(source, name)}` is given, but only a hub dataset has one", place=source.path)


def _matches(pattern: Path) -> Iterator[Path]:
    """Yields what a glob pattern matches, `**` included."""
    root = Path(pattern.anchor) if pattern.is_absolute() else Path()
    return root.glob(str(pattern.relative_to(pattern.anchor) if pattern.is_absolute() else pattern))


def read_source(source: DataSource) -> Iterator[Placed]:
    """Yields the rows of a source. Raises `DataError` with the place of what cannot be read."""
    if source.path.startswith(BUILTIN):
        from sft_play.data.builtin import read_builtin

        _refuse_hub_options(source, "split")
        yield from read_builtin(source.path.removeprefix(BUILTIN), source.split or "train")
        return
    files = files_of(source)
    if files is None:
        yield from _read_hub(source)
        return
    _refuse_hub_options(source)
    for path in files:
        count = 0
        for placed in read_file(path):
            count += 1
            yield placed
        if not count:
            raise DataError("the file holds no row", place=str(path))


def read_file(path: Path) -> Iterator[Placed]:
    """Yields the rows of one file by its ending. Raises `DataError`."""
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"files ending in `{path.suffix}` are not read", place=str(path), hint=f"one of {', '.join(SUFFIXES)}")
    try:
        yield from reader(path)
    except UnicodeDecodeError as error:
        line, byte = _undecodable(path)
        raise DataError(f"is not UTF-8 text: byte {byte} of the line", place=f"{path}:{line}" if line else str(path)) from error
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", place=str(path)) from None


def _undecodable(path: Path) -> tuple[int, int]:
    """Returns the line and byte, from 1, of the first byte that is not UTF-8; a decoder that reads in pieces tells neither."""
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return number, error.start + 1
    return 0, 0


def _read_jsonl(path: Path) -> Iterator[Placed]:
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                text = line.rstrip(b"\r\n").decode("utf-8-sig" if number == 1 else "utf-8")
                yield _object(_parse(text, path, number), place)
            except UnicodeDecodeError as error:
                yield place, DataError(f"is not UTF-8 text: byte {error.start + 1} of the line", place=place)
            except DataError as error:
                yield place, error


def _read_json(path: Path) -> Iterator[Placed]:
    text = path.read_text(encoding="utf-8-sig")
    if not text.strip():
        return
    if text.lstrip().startswith("{"):  # JSON lines under the name .json
        yield from _read_jsonl(path)
        return
    rows = _parse(text, path, 1)
    if not isinstance(rows, list):
        raise DataError("is neither a list of rows nor one JSON object a line", place=str(path))
    for index, row in enumerate(rows):
        yield _object(row, f"{path}, row {index + 1}")


def _parse(text: str, path: Path, line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"is not JSON: {error.msg}",
            place=f"{path}:{line + error.lineno - 1}:{error.colno}",
            hint=f"the line reads: {text.strip()[:100]}",
        ) from None
    except RecursionError:
        raise DataError("is not JSON that can be read: nested too deep", place=f"{path}:{line}") from None


def _object(row: Any, place: str) -> Placed:
    if not isinstance(row, dict):
        raise DataError(f"the row is {type(row).__name__}; expected an object with named columns", place=place)
    return place, row


def _read_csv(path: Path) -> Iterator[Placed]:
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream)
        try:
            for row in reader:
                last = reader.line_num
                if None in row or None in row.values():
                    raise DataError("the row has another number of columns than the header", place=f"{path}:{last}")
                # A quoted value may span lines; the row is looked for where it begins.
                yield f"{path}:{last - sum(_line_ends(value) for value in row.values())}", row
        except csv.Error as error:
            raise DataError(f"is not CSV: {error}", place=f"{path}:{reader.line_num}") from None


def _line_ends(value: str) -> int:
    return value.count("\r") + value.count("\n") - value.count("\r\n")


def _read_parquet(path: Path) -> Iterator[Placed]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        number = 0
        for batch in file.iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row
    except pyarrow.ArrowException as error:
        raise DataError(f"is not a parquet file: {str(error).splitlines()[0]}", place=str(path)) from None


def _read_hub(source: DataSource) -> Iterator[Placed]:
    import datasets
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    try:
        loaded = datasets.load_dataset(source.path, source.config, split=source.split or "train", revision=source.revision)
    except (
        OSError, ValueError, RuntimeError, HfHubHTTPError, RepositoryNotFoundError, datasets.exceptions.DatasetsError
    ) as error:  # fmt: skip
        if not hub_reachable():
            raise DataError(
                "there is no such file, and the hub cannot be reached",
                place=source.path,
                hint=f"check the network, or HF_HOME with a cached copy; {PATHS_COUNT}",
            ) from error
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"neither a file nor a hub dataset that can be loaded: {first}",
            place=source.path,
            hint="check the name and the network; a private dataset needs HF_TOKEN",
        ) from error
    for index, row in enumerate(loaded):
        yield f"{source.path} ({source.split or 'train'}), row {index + 1}", row
