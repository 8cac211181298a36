#!/usr/bin/env python3
"""`make check`: print size and problems of words of each room; fail for an import circle, a module of over 450 lines of
code, or a problem of words.

Lazy and typing-only imports count. Tokens are Python's own and code lines those with one, without comments and
docstrings.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MOST_LINES = 450
NO_TOKENS = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)
KINDS = ("fillers", "phrases", "columns", "skips", "classes")
FOLDERS = ("sft_play", "tests", "scripts", "benchmarks", "examples")
MOST_COLUMNS = 120
FILLERS = frozenset(
    {"one", "ones", "found", "wanted", "given", "said", "more", "left", "told", "known", "held", "made", "kept"}
)
"""Names of variables and parameters that hide their subject; a field's name may be part of a file's format."""
PHRASES: Mapping[str, str] = {
    r"as good as (none|never|no)\b": "not valid",
    r"where there (is|are) (such|none)\b": "if there are any",
    r"(?<!/)\bbeside\b": "next to, in addition to",
    r"\bfor want of\b": "without, out of",
    r"\b(go|goes|went) on with\b": "continue",
    r"\b(begins?|start(s|ed)?|made) anew\b": "restart",
    r"\b(leave|leaves|left) away\b": "omit",
    r"(?<!there )\b(is|are) none( where|[.;,:)]|$)": "is not valid",
    r"\bof (its|their|our|your) own\b": "separate",
    r"\bletter (for|by) letter\b": "verbatim",
    r"\bmend(s|ed)?\b": "fix",
    r"\b(is|are) told (of|that|by)\b": "is reported",
}
"""Pattern in docstrings and other strings -> what to write instead (docs/development.md#words)."""
ANY_PHRASE = re.compile("|".join(PHRASES))


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


class Problem(NamedTuple):
    """A place whose words or layout must be changed."""

    path: Path
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT).as_posix()}:{self.line}: {self.text}"


def room_of(path: Path) -> str:
    """Return the room of a file: `sft_play/config`, `sft_play` for the files in it, or `tests`."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[:2]) if parts[0] == "sft_play" and len(parts) > 2 else parts[0]


def word_problems() -> Iterator[Problem]:
    """Yield what a machine can see of the rules for words (CONTRIBUTING.md)."""
    classes: dict[str, list[tuple[Path, int]]] = defaultdict(list)
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        text = path.read_text(encoding="utf-8")
        lines, tree = text.splitlines(), ast.parse(text)
        for number, line in enumerate(lines, 1):
            if len(line) > MOST_COLUMNS:
                yield Problem(path, number, "columns", f"{len(line)} columns; the most is {MOST_COLUMNS}")
        if "# fmt:" in text:
            yield from _skips(path, text, tree)
        folder = path.relative_to(ROOT).parts[0]
        if folder in ("sft_play", "tests"):
            yield from _fillers(path, tree)
            yield from _phrases(path, tree)
        if folder == "sft_play":
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    classes[node.name].append((path, node.lineno))
    for name, places in classes.items():
        for path, line in places if len(places) > 1 else ():
            others = ", ".join(other.relative_to(ROOT).as_posix() for other, _ in places if other != path)
            yield Problem(path, line, "classes", f"class `{name}` is also in {others or 'this file'}")


def _fillers(path: Path, tree: ast.Module) -> Iterator[Problem]:
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    fields = {id(part.target) for body in bodies for part in body if isinstance(part, ast.AnnAssign)}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in fields:
            name = node.id
        else:
            continue
        if name in FILLERS:
            yield Problem(path, node.lineno, "fillers", f"`{name}` is not a noun of its subject")


def _phrases(path: Path, tree: ast.Module) -> Iterator[Problem]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            flat = re.sub(r"\s", " ", node.value)
            for pattern, better in PHRASES.items() if ANY_PHRASE.search(flat) else ():
                for match in re.finditer(pattern, flat):
                    line = node.lineno + node.value[: match.start()].count("\n")
                    yield Problem(path, line, "phrases", f"`{match[0]}`: {better}")


def _skips(path: Path, text: str, tree: ast.Module) -> Iterator[Problem]:
    """Yield each `# fmt: skip` that is not of a table: a literal collection, or a call with one."""
    tables = {node.end_lineno for node in ast.walk(tree) if isinstance(node, ast.stmt) and _is_table(node)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.string.startswith("# fmt:") and token.start[0] not in tables:
            yield Problem(path, token.start[0], "skips", f"`{token.string}` is for literal tables only")


def _is_table(statement: ast.stmt) -> bool:
    value = getattr(statement, "value", None)
    if isinstance(value, ast.BinOp):  # a set without another
        value = value.right
    parts = value.args if isinstance(value, ast.Call) else [value]
    return len(parts) == 1 and isinstance(parts[0], ast.Dict | ast.List | ast.Set | ast.Tuple)


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
    rooms: dict[str, list[Path]] = defaultdict(list)
    for path in modules().values():
        rooms[room_of(path)].append(path)
    rooms["tests"] = sorted((ROOT / "tests").rglob("*.py"))
    words = list(word_problems())
    counts = Counter((room_of(problem.path), problem.kind) for problem in words)
    print(f"{'room':26}{'modules':>8}{'tokens':>9}", *(f"{kind:>8}" for kind in KINDS))
    for room, files in sorted(rooms.items()):
        size = f"{room:26}{len(files):8}{sum(len(tokens(path)) for path in files):9,}"
        print(size, *(f"{counts[room, kind] or '-':>8}" for kind in KINDS))
    errors = [*problems(), *map(str, words)]
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
