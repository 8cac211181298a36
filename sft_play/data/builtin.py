"""`builtin:docstrings`: functions of Python's standard library and the first sentence of their docstrings.

Nothing is downloaded: the text stands in the interpreter that runs this (PSF licence). Modules, never rows, are split into
training and validation, so that near-copies within a module stay on one side.
"""

from __future__ import annotations

import ast
import functools
import hashlib
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
LEFT_OUT = frozenset({"test", "tests", "site-packages", "idlelib", "lib2to3", "__pycache__", "pydoc_data", "turtledemo"})
SENTENCE_CHARACTERS = (20, 160)
CODE_CHARACTERS = (60, 600)
PER_MODULE = {"train": 60, "validation": 12}
VALIDATION_ROWS = 80
"""Enough for a ROUGE interval of about 0.05, few enough that two cores score them in a minute."""
VALIDATION_SHARE = 10
"""One module in this many is held out."""


def read_builtin(name: str, split: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields rows with `messages`, shuffled by a fixed seed. Raises `DataError` for unknown names and splits."""
    if name != "docstrings":
        raise DataError(f"there is no built-in set `{name}`", hint="`builtin:docstrings` is the only one")
    if split not in PER_MODULE:
        raise DataError(f"`builtin:docstrings` has no split `{split}`", hint="its splits are `train` and `validation`")
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


def _pairs(root: Path) -> Iterator[tuple[str, str, str, str]]:
    """Yields (module file, function, source without its docstring, docstring's first paragraph), each sentence once."""
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if any(part in LEFT_OUT or part.startswith("test_") for part in relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (SyntaxError, UnicodeDecodeError, OSError):  # the library keeps a few broken files for its own tests
            continue
        lines = text.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                pair = _pair(node, lines)
                if pair and pair[1] not in seen:
                    seen.add(pair[1])
                    yield relative.as_posix(), node.name, *pair


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
