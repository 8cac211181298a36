"""YAML documents for other programs (Kubernetes, SkyPilot): blocks throughout, texts of several lines as they are, always the same."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sft_play.config.yaml_source import scalar_text
from sft_play.errors import printable

LITERAL = re.compile(r"[\x21-\x7e\xa1-\u2027\u2030-\ud7ff][\t\n\x20-\x7e\xa0-\u2027\u202a-\ud7ff]*")
"""Texts that may stand as they are: printable, and the first letter is no blank, from which the indentation is taken."""


def dump_documents(documents: Sequence[Mapping[str, Any]], comment: str = "") -> str:
    """Returns one file of YAML documents, each after its `---`, the order of keys kept; `comment` stands at its beginning."""
    head = "".join(f"# {line}\n" for line in printable(comment).splitlines())
    return head + "".join("---\n" + "\n".join(_mapping(document, "")) + "\n" for document in documents)


def _mapping(value: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, part in value.items():
        yield from _entry(f"{indent}{scalar_text(str(key))}:", part, indent)


def _entry(head: str, value: Any, indent: str) -> Iterator[str]:
    """`head` is what stands before the value: `key:` at `indent`."""
    if isinstance(value, Mapping) and value:
        yield head
        yield from _mapping(value, indent + "  ")
    elif isinstance(value, (list, tuple)) and value:
        yield head
        yield from _sequence(value, indent)
    elif isinstance(value, str) and "\n" in value and LITERAL.fullmatch(value):
        yield f"{head} {_chomping(value)}"
        yield from (f"{indent}  {line}" if line else "" for line in value.removesuffix("\n").split("\n"))
    else:
        yield f"{head} {scalar_text(value)}"


def _sequence(values: Sequence[Any], indent: str) -> Iterator[str]:
    """A list's dashes stand below the first letter of its key, as kubectl writes them."""
    for value in values:
        if isinstance(value, Mapping) and value:
            lines = list(_mapping(value, indent + "  "))
            yield f"{indent}- {lines[0].removeprefix(indent + '  ')}"
            yield from lines[1:]
        elif isinstance(value, (list, tuple)) and value:
            yield f"{indent}-"
            yield from _sequence(value, indent + "  ")
        else:
            yield from _entry(f"{indent}-", value, indent)


def _chomping(text: str) -> str:
    """Returns the sign that keeps a text's line ends: none but the last, none at all, or all."""
    if not text.endswith("\n"):
        return "|-"
    return "|+" if text.endswith("\n\n") else "|"
