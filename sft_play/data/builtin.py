"""Data that Python itself brings: `builtin:docstrings`, functions and the first sentence of their docstrings, as
conversations, and `builtin:code`, the modules of the standard library and of transformers, as documents.

Nothing is downloaded: the text is in the interpreter that runs this (PSF licence), and in a package that this project
needs (Apache-2.0). Modules, never rows, are split into training and validation, so that near-copies within a module
stay on one side.
"""

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
from pathlib import Path
from typing import Any

from sft_play.errors import DataError

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
    """Yield the rows of a built-in set, each with its place. Raise `DataError` for unknown names and splits."""
    readers = {"docstrings": _docstrings, "code": _code}
    if name not in readers:
        raise DataError(
            f"there is no built-in set `{name}`",
            hint=f"there are {', '.join(f'`builtin:{reader}`' for reader in readers)}",
        )
    if split not in PER_MODULE:
        raise DataError(f"`builtin:{name}` has no split `{split}`", hint="its splits are `train` and `validation`")
    yield from readers[name](split)


def _code(split: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield modules as documents with `text` and `path`, those of the library first, each in the order of their
    names.
    """
    modules = list(_modules(Path(sysconfig.get_paths()["stdlib"]), TESTS))
    package = importlib.util.find_spec("transformers")
    for root in (package.submodule_search_locations or [])[:1] if package else []:
        modules += [(f"transformers/{name}", text) for name, text in _modules(Path(root), TESTS) if not _repeats(name)]
    for module, text in modules:
        if text.strip() and _held_out(module) == (split == "validation"):
            yield module, {"text": text, "path": module}


def _repeats(module: str) -> bool:
    """Return whether a module of transformers mostly repeats others, as the code of its several hundred models does."""
    prefixes = ("configuration_", "tokenization_")
    return module.startswith("models/") and not module.rpartition("/")[2].startswith(prefixes)


def _docstrings(split: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield rows with `messages`, shuffled by a fixed seed."""
    counts: Counter[str] = Counter()
    limit = VALIDATION_ROWS if split == "validation" else sys.maxsize
    pairs = list(_pairs(Path(sysconfig.get_paths()["stdlib"])))
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


def _modules(root: Path, left_out: frozenset[str] = LEFT_OUT) -> Iterator[tuple[str, str]]:
    """Yield (module file, its text), without the folders `left_out`."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if any(part in left_out or part.startswith("test_") for part in relative.parts):
            continue
        try:
            yield relative.as_posix(), path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):  # the library keeps a few broken files for its own tests
            continue


@functools.cache
def _pairs(root: Path) -> tuple[tuple[str, str, str, str], ...]:
    """Return (module file, function, source without its docstring, docstring's first paragraph), each sentence once."""
    pairs: dict[str, tuple[str, str, str, str]] = {}
    for module, text in _modules(root):
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        lines = text.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                pair = _pair(node, lines)
                if pair:
                    pairs.setdefault(pair[1], (module, node.name, *pair))
    return tuple(pairs.values())


def _pair(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> tuple[str, str] | None:
    documentation = ast.get_docstring(node)
    if not documentation or len(node.body) < 2:
        return None
    sentence = " ".join(documentation.split("\n\n")[0].split())
    low, high = SENTENCE_CHARACTERS
    if not (low <= len(sentence) <= high and sentence.endswith(".")):
        return None
    docstring = node.body[0]
    body = (
        lines[node.lineno - 1 : docstring.lineno - 1]
        + lines[docstring.end_lineno or docstring.lineno : node.end_lineno]
    )
    code = textwrap.dedent("\n".join(body))
    low, high = CODE_CHARACTERS
    return (code, sentence) if low <= len(code) <= high else None
