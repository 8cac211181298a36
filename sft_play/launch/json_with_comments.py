"""JSON as people write it: `//` and `/* */` comments and trailing commas, with the line of every key. Standard library only."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.errors import UserError

TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/|[{}\[\]:,]', re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonDocument:
    """A parsed object and where its keys stand."""

    path: Path
    value: Mapping[str, Any]
    lines: Mapping[str, int]
    """Dotted key -> line, counted from 1; keys inside lists are left out."""

    def place(self, key: str) -> str:
        """Returns `file:line` of a dotted key, or of its nearest parent."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return f"{self.path}:{self.lines[key]}" if key else str(self.path)


def read_document(path: Path) -> JsonDocument:
    """Reads an object from `path`. Raises `UserError` for no file, bad JSON (line and column), or a key given twice."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"`{path}` cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"`{path}` is not UTF-8 text (byte {error.start})") from error
    plain = _without_comments(text)
    try:
        value = json.loads(plain)
    except json.JSONDecodeError as error:
        place = f"{path}:{error.lineno}:{error.colno}"
        raise UserError(
            f"not JSON: {error.msg}", place=place, hint="`//` and `/* */` comments and trailing commas are fine"
        ) from error
    if not isinstance(value, dict):
        raise UserError(f"holds a {type(value).__name__}; expected an object `{{...}}`", place=f"{path}:1")
    return JsonDocument(path=path, value=value, lines=_key_lines(plain, path))


def _without_comments(text: str) -> str:
    """Replaces comments and trailing commas by spaces, so that every line and column stays."""

    def blank(found: re.Match[str]) -> str:
        token = found[0]
        return re.sub(r"[^\n]", " ", token) if token.startswith("/") else token

    text = TOKEN.sub(blank, text)
    characters = list(text)
    comma: int | None = None
    for found in TOKEN.finditer(text):
        if found[0] in "}]" and comma is not None and not text[comma + 1 : found.start()].strip():
            characters[comma] = " "
        comma = found.start() if found[0] == "," else None
    return "".join(characters)


def _key_lines(text: str, path: Path) -> dict[str, int]:
    """Returns dotted key -> line. Raises `UserError` for a key that stands twice in one object, of which JSON keeps the last."""
    lines: dict[str, int] = {}
    stack: list[str | None] = []
    """One entry per open bracket: the key that is being read, or `None` in a list."""
    key, expects_key = "", False
    for found in TOKEN.finditer(text):
        token = found[0]
        if token in "{[":
            stack.append(None if token == "[" else "")
            expects_key = token == "{"
        elif token in "}]":
            stack.pop()
            expects_key = False
        elif token == ",":
            expects_key = bool(stack) and stack[-1] is not None
        elif token.startswith('"') and expects_key:
            stack[-1] = json.loads(token)
            expects_key = False
            if None not in stack:
                key = ".".join(str(part) for part in stack)
                line = text.count("\n", 0, found.start()) + 1
                if key in lines:
                    raise UserError(f"`{key}` is given twice, on lines {lines[key]} and {line}", place=f"{path}:{line}")
                lines[key] = line
    return lines
