"""Reads rows from files, folders, hub datasets and the built-in sets, each with the place it came from."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from sft_play.config.schema import DataSource
from sft_play.data.arrow_read import saved_files
from sft_play.data.documents import DOCUMENTS
from sft_play.data.files_read import ENDINGS, TABLES, Placed, read_file
from sft_play.data.left import LeftOut
from sft_play.data.select import select
from sft_play.data.unpack import kind
from sft_play.errors import DataError
from sft_play.runs.folder import require_inside, root_of

__all__ = ["BUILTIN", "LeftOut", "Placed", "files_of", "is_hub", "read_file", "read_source"]

BUILTIN = "builtin:"
PATHS_COUNT = "paths count from the folder in which you typed make; a hub dataset is `OWNER/NAME`"


def files_of(source: DataSource) -> list[Path] | None:
    """Returns the local files of a source in a fixed order; `None` for a hub id or a built-in set. Raises `DataError`."""
    if source.path.startswith(BUILTIN):
        return None
    path = Path(source.path).expanduser()
    if path.is_file():  # first, since a file's name may hold `[`
        return [path]
    if path.is_dir():
        return saved_files(path, source.split) or _folder_files(path, source.path)
    if any(mark in source.path for mark in "*?["):
        found = sorted(p for p in _matches(path) if p.is_file())
        if not found:
            raise DataError(f"no file matches `{source.path}`", hint=PATHS_COUNT)
        require_inside(found, root_of(path))
        return found
    if path.suffix or source.path.count("/") != 1 or source.path.startswith((".", "/", "~")):
        raise DataError("there is no such file", place=source.path, hint=PATHS_COUNT)
    return None


def _folder_files(folder: Path, place: str) -> list[Path]:
    """Returns the tables of a folder at any depth, or its documents where it has no table: a README beside data is no data."""
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    for endings in (TABLES, DOCUMENTS):
        found = [path for path in files if kind(path) in endings]
        if found:
            require_inside(found, folder)
            return found
    hint = f"it holds `{files[0].name}`; plain text is read from files whose names end in `.txt`" if files else None
    raise DataError(f"the folder holds no {ENDINGS} file", place=place, hint=hint)


def is_hub(source: DataSource) -> bool:
    """Whether a source is a dataset of the hub. Raises `DataError` when it is nothing."""
    return not source.path.startswith(BUILTIN) and files_of(source) is None


def _refuse_hub_options(source: DataSource, *allowed: str) -> None:
    """Raises `DataError` for what only a hub dataset understands: nothing that was typed is ignored."""
    for name in ("split", "config", "revision"):
        if name not in allowed and getattr(source, name) is not None:
            raise DataError(f"`{name}: {getattr(source, name)}` is given, but only a hub dataset has one", place=source.path)
    if source.streaming:
        raise DataError(
            "`streaming: true` is given, but only a hub dataset is streamed", place=source.path,
            hint="files are read row by row in any case",
        )  # fmt: skip


def _matches(pattern: Path) -> Iterator[Path]:
    """Yields what a glob pattern matches, `**` included; hidden files and folders only where the pattern writes their dot."""
    root = Path(pattern.anchor) if pattern.is_absolute() else Path()
    named = [part for part in pattern.parts if part.startswith(".")]
    for path in root.glob(str(pattern.relative_to(pattern.anchor) if pattern.is_absolute() else pattern)):
        if all(any(fnmatch(part, name) for name in named) for part in path.parts if part.startswith(".")):
            yield path


def read_source(source: DataSource, *, seed: int = 0, left: LeftOut | None = None) -> Iterator[Placed]:
    """Yields the rows that a source takes: after its `columns`, `filter` and `rows` (chosen by `seed`, which is `train.seed`).

    What is left out is counted in `left`. Raises `DataError` with the place of what cannot be read.
    """
    left = left if left is not None else LeftOut()
    try:
        yield from select(_all_rows(source, left), source, seed=seed, left=left)
    except DataError as error:
        error.place = error.place or source.path
        raise


def _all_rows(source: DataSource, left: LeftOut) -> Iterator[Placed]:
    if source.path.startswith(BUILTIN):
        from sft_play.data.builtin import read_builtin

        _refuse_hub_options(source, "split")
        yield from read_builtin(source.path.removeprefix(BUILTIN), source.split or "train")
        return
    files = files_of(source)
    if files is None:
        from sft_play.data.hub_read import read_hub

        yield from read_hub(source, PATHS_COUNT, left)
        return
    saved = (Path(source.path).expanduser() / "dataset_dict.json").is_file()
    _refuse_hub_options(source, *(["split"] if saved else []))
    for path in files:
        count, before = 0, left.counts.total()
        for placed in read_file(path, left):
            count += 1
            yield placed
        if not count and left.counts.total() == before:
            raise DataError("the file holds no row", place=str(path))
