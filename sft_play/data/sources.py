"""Reads rows from files, folders, hub datasets and the built-in sets, each with the place it came from."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import random
import sys
import sysconfig
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from sft_play.config.schema import DataSource
from sft_play.data.datasets import saved_files
from sft_play.data.documents import DOCUMENTS
from sft_play.data.example import LeftOut
from sft_play.data.files_read import ENDINGS, TABLES, Placed, read_file
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
        _refuse_hub_options(source, "split")
        yield from read_builtin(source.path.removeprefix(BUILTIN), source.split or "train")
        return
    files = files_of(source)
    if files is None:
        from sft_play.data.datasets import read_hub

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


# Data that Python itself brings: `builtin:docstrings`, functions and the first sentence of their docstrings, as conversations, and
# `builtin:code`, the modules of the standard library and of transformers, as documents.
#
# Nothing is downloaded: the text stands in the interpreter that runs this (PSF licence), and in a package that this project needs
# (Apache-2.0). Modules, never rows, are split into training and validation, so that near-copies within a module stay on one side.


PROMPT = "Say in one sentence what this Python function does.\n\n{code}"
TESTS = frozenset({"test", "tests", "site-packages", "__pycache__"})
"""Not every Python has its own tests."""
LEFT_OUT = TESTS | {"idlelib", "lib2to3", "pydoc_data", "turtledemo"}
SENTENCE_CHARACTERS = (20, 160)
CODE_CHARACTERS = (60, 600)
PER_MODULE = {"train": 60, "validation": 12}
VALIDATION_ROWS = 80
"""Enough for a ROUGE interval of about 0.05, few enough that two cores score them in a minute."""
VALIDATION_SHARE = 10
"""One module in this many is held out."""


def read_builtin(name: str, split: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the rows of a built-in set, each with its place. Raises `DataError` for unknown names and splits."""
    readers = {"docstrings": _docstrings, "code": _code}
    if name not in readers:
        raise DataError(
            f"there is no built-in set `{name}`", hint=f"there are {', '.join(f'`builtin:{known}`' for known in readers)}"
        )
    if split not in PER_MODULE:
        raise DataError(f"`builtin:{name}` has no split `{split}`", hint="its splits are `train` and `validation`")
    yield from readers[name](split)


def _code(split: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields modules as documents with `text` and `path`, those of the library first, each in the order of their names."""
    found = list(_modules(Path(sysconfig.get_paths()["stdlib"]), TESTS))
    package = importlib.util.find_spec("transformers")
    for root in (package.submodule_search_locations or [])[:1] if package else []:
        found += [(f"transformers/{name}", text) for name, text in _modules(Path(root), TESTS) if not _repeats(name)]
    for module, text in found:
        if text.strip() and _held_out(module) == (split == "validation"):
            yield module, {"text": text, "path": module}


def _repeats(module: str) -> bool:
    """Whether a module of transformers is mostly what stands in others too: the code of its several hundred models."""
    kept = ("configuration_", "tokenization_")
    return module.startswith("models/") and not module.rpartition("/")[2].startswith(kept)


def _docstrings(split: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields rows with `messages`, shuffled by a fixed seed."""
    counts: Counter[str] = Counter()
    limit = VALIDATION_ROWS if split == "validation" else sys.maxsize
    pairs = list(_pairs_of(Path(sysconfig.get_paths()["stdlib"])))
    random.Random(0).shuffle(pairs)
    for module, function, code, sentence in pairs:
        if _held_out(module) != (split == "validation") or counts[module] == PER_MODULE[split]:
            continue
        if counts.total() == limit:
            return
        counts[module] += 1
        yield (
            f"{module} {function}",
            {
                "messages": [
                    {"role": "user", "content": PROMPT.format(code=code)},
                    {"role": "assistant", "content": sentence},
                ]
            },
        )


def _held_out(module: str) -> bool:
    return int(hashlib.sha256(module.encode()).hexdigest(), 16) % VALIDATION_SHARE == 0


@functools.cache
def _pairs_of(root: Path) -> tuple[tuple[str, str, str, str], ...]:
    """Returns `_pairs`, read once for both splits: parsing the library takes seconds."""
    return tuple(_pairs(root))


def _modules(root: Path, left_out: frozenset[str] = LEFT_OUT) -> Iterator[tuple[str, str]]:
    """Yields (module file, its text), without the folders `left_out`."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if any(part in left_out or part.startswith("test_") for part in relative.parts):
            continue
        try:
            yield relative.as_posix(), path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):  # the library keeps a few broken files for its own tests
            continue


def _pairs(root: Path) -> Iterator[tuple[str, str, str, str]]:
    """Yields (module file, function, source without its docstring, docstring's first paragraph), each sentence once."""
    seen: set[str] = set()
    for module, text in _modules(root):
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        lines = text.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                pair = _pair(node, lines)
                if pair and pair[1] not in seen:
                    seen.add(pair[1])
                    yield module, node.name, *pair


def _pair(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> tuple[str, str] | None:
    documentation = ast.get_docstring(node)
    if not documentation or len(node.body) < 2:
        return None
    sentence = " ".join(documentation.split("\n\n")[0].split())
    low, high = SENTENCE_CHARACTERS
    if not (low <= len(sentence) <= high and sentence.endswith(".")):
        return None
    docstring = node.body[0]
    kept = lines[node.lineno - 1 : docstring.lineno - 1] + lines[docstring.end_lineno or docstring.lineno : node.end_lineno]
    code = textwrap.dedent("\n".join(kept))
    low, high = CODE_CHARACTERS
    return (code, sentence) if low <= len(code) <= high else None
