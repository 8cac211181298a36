#!/usr/bin/env python3
"""`make check`: print the size of each room; fail at an import circle or at a module of over 450 lines of code.

Lazy and typing-only imports count. Tokens are Python's own and code lines those with one, without comments and
docstrings.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_LINES = 450
NO_TOKENS = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)


def modules() -> dict[str, Path]:
    """Return dotted name -> file of every module of the package."""
    files = sorted((ROOT / "sft_play").rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def imports(name: str, known: Mapping[str, Path]) -> set[str]:
    """Return the modules of the package that a module imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(known[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {module for module in inner if module in known} or {node.module}
    return (found & known.keys()) - {name}


def circles() -> list[list[str]]:
    """Return the groups of modules that import each other (Tarjan's strongly connected components)."""
    known = modules()
    graph = {name: imports(name, known) for name in known}
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        stack.append(name)
        for other in graph[name]:
            if other not in number:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], number[other])
        if low[name] == number[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            found.extend([sorted(group)] if len(group) > 1 else [])

    for name in graph:
        if name not in number:
            visit(name)
    return found


def problems() -> Iterator[str]:
    """Yield what has to be changed before this tree is committed."""
    for group in circles():
        yield f"these modules import each other: {', '.join(group)}"
    for path in modules().values():
        lines = {line for token in tokens(path) for line in range(token.start[0], token.end[0] + 1)}
        if len(lines) > MOST_LINES:
            yield f"{path.relative_to(ROOT).as_posix()} has {len(lines)} lines of code; the most is {MOST_LINES}"


def tokens(path: Path) -> list[tokenize.TokenInfo]:
    """Return the tokens of a file without comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    docs = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    read = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token for token in read if token.type not in NO_TOKENS and token.start[0] not in docs]


def main() -> int:
    rooms: dict[str, list[Path]] = {}
    for path in modules().values():
        parts = path.relative_to(ROOT).parts
        rooms.setdefault("/".join(parts[:2]) if len(parts) > 2 else "sft_play", []).append(path)
    rooms["tests"] = sorted((ROOT / "tests").rglob("*.py"))
    print(f"{'room':26}{'modules':>8}{'tokens':>9}")
    for room, files in sorted(rooms.items()):
        print(f"{room:26}{len(files):8}{sum(len(tokens(path)) for path in files):9,}")
    found = list(problems())
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
