"""Checks a value against a field's type and range, and says in words what is expected and what was found."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from sft_play.config.yaml_files import FLOAT, Node, scalar_text

LARGEST_INTEGER = 2**31 - 1
LARGEST_FREE = 2**63 - 1
MOST_WORDS = 15
"""Longer choices are not written out in a message; `docs/configuration.md` lists them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Numbers that a key takes."""

    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    also: int | None = None
    """One value outside that has a meaning of its own, such as -1."""

    def holds(self, value: float) -> bool:
        """Whether `value` may be used."""
        if self.also is not None and value == self.also:
            return True
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
            and (self.below is None or value < self.below)
        )

    def words(self) -> str:
        """Returns ` >= 1`, ` > 0 and < 1`, or nothing."""
        limits = ((">=", self.minimum), (">", self.above), ("<=", self.maximum), ("<", self.below))
        return " and ".join(
            f" {sign} {limit}" if i == 0 else f"{sign} {limit}"
            for i, (sign, limit) in enumerate((sign, limit) for sign, limit in limits if limit is not None)
        )


ANY_NUMBER = Range()


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """One value that does not fit."""

    key: str
    """Dotted key, with `[i]` for list entries."""
    node: Node
    problem: str
    """What is wrong, without the key: `` is `two`; expected ... ``."""
    hint: str | None = None


INVALID = object()
"""Returned for a value that does not fit; the mismatch is in the list."""


@cache
def options(annotation: Any) -> tuple[Any, ...]:
    """Returns the members of a union, or the annotation alone."""
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(part for member in get_args(annotation) for part in options(member))
    return (annotation,)


def literals(annotation: Any) -> tuple[Any, ...]:
    """Returns the words that an annotation takes."""
    return tuple(word for part in options(annotation) if get_origin(part) is Literal for word in get_args(part))


def allows_null(annotation: Any) -> bool:
    """Whether null is a value of the annotation."""
    return type(None) in options(annotation)


def takes_text(annotation: Any) -> bool:
    """Whether any text is a value of the annotation."""
    return str in options(annotation)


def describe(annotation: Any, limits: Range = ANY_NUMBER) -> str:
    """Returns what is expected, in words: ``an integer >= 1 or `auto` ``."""
    also = [f"{limits.also}"] if limits.also is not None else []
    names = {
        bool: "`true`, `false`", int: f"an integer{limits.words()}", float: f"a number{limits.words()}", str: "text", type(None): "null",
        dict: "a mapping", Mapping: "a mapping such as `{name: text}`",
    }  # fmt: skip
    words: list[str] = []
    numbers = set()
    for part in options(annotation):
        if get_origin(part) is Literal:
            choices = get_args(part)
            words += [f"`{word}`" for word in choices] if len(choices) <= MOST_WORDS else [_some(choices)]
        elif get_origin(part) is list:
            (entry,) = get_args(part)
            words.append(_of_entries(entry))
        elif dataclasses.is_dataclass(part):
            words.append("an entry with `path`")
        elif part is not type(None):
            words.append(names.get(get_origin(part) or part, "a value"))
            numbers.add(part)
    words = also + words + (["null"] if allows_null(annotation) else [])
    words = [single for word in words for single in word.split(", ")] if bool in numbers else words
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _of_entries(entry: Any) -> str:
    if dataclasses.is_dataclass(entry):
        return "a list of entries with `path`"
    return "a list of mappings such as `[{name: text}]`" if get_origin(entry) is Mapping else "a list such as `[a, b]`"


def _some(choices: tuple[Any, ...]) -> str:
    return f"one of {len(choices)} words such as `{choices[0]}`"


def shown(node: Node) -> str:
    """Returns a value as it is quoted in messages, cut after 80 characters."""
    text = node.text if node.text is not None else node.plain()
    text = text if isinstance(text, str) else scalar_text(text)
    text = text.encode("unicode_escape").decode("ascii") if not text.isprintable() else text
    return text if len(text) <= 80 else text[:77] + "..."


def convert(node: Node, annotation: Any, limits: Range, key: str, problems: list[Mismatch]) -> Any:
    """Returns the value of `node` as `annotation` has it, or `INVALID` with its mismatches added to `problems`."""
    value = node.value
    parts = options(annotation)
    if value is None and (type(None) in parts):
        return None
    if isinstance(value, str) and value in literals(annotation):
        return value
    if isinstance(value, bool):
        if bool in parts:
            return value
    elif isinstance(value, (int, float)):
        number = _number(value, parts, limits)
        if number is not INVALID:
            return number
    for part in parts:
        if isinstance(value, list) and get_origin(part) is list:
            return _list(value, get_args(part)[0], key, problems)
        if isinstance(value, dict) and dataclasses.is_dataclass(part):
            return _record(node, part, key, problems)
        if isinstance(value, dict) and (get_origin(part) or part) in (dict, Mapping):
            return _texts(node, key, problems) if get_origin(part) is Mapping else _mapping(node, key, problems)
    text = value if isinstance(value, str) else node.text
    if str in parts and value is not None and text is not None:
        if _is_writable(text):
            return text
        problems.append(Mismatch(key=key, node=node, problem=f"is `{shown(node)}`; expected text without null characters"))
        return INVALID
    problems.append(
        Mismatch(
            key=key,
            node=node,
            problem=f"is `{shown(node)}`; expected {describe(annotation, limits)}",
            hint=_value_hint(node, annotation),
        )
    )
    return INVALID


def _is_writable(text: str) -> bool:
    """Whether files and paths can hold the text: no null character, no half of a surrogate pair."""
    return not any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in text)


def _number(value: float, parts: tuple[Any, ...], limits: Range) -> Any:
    if isinstance(value, int) and abs(value) > max(LARGEST_INTEGER, limits.maximum or 0):
        return INVALID  # before anything makes a float of it, which 309 digits are too long for
    if not math.isfinite(value) or not limits.holds(value):
        return INVALID
    if isinstance(value, int) and int in parts:
        return value
    return float(value) if float in parts else INVALID


def _list(nodes: list[Node], entry: Any, key: str, problems: list[Mismatch]) -> Any:
    values = [convert(node, entry, ANY_NUMBER, f"{key}[{i}]", problems) for i, node in enumerate(nodes)]
    return INVALID if any(value is INVALID for value in values) else values


def _record(node: Node, record: Any, key: str, problems: list[Mismatch]) -> Any:
    """Returns a dataclass of a list entry, such as `DataSource`."""
    hints = get_type_hints(record)
    given: dict[str, Any] = {}
    before = len(problems)
    for name, part in node.value.items():
        if name not in hints:
            close = get_close_matches(name, hints, n=1, cutoff=0.5)
            hint = f"did you mean `{close[0]}`?" if close else f"it takes {', '.join(f'`{known}`' for known in hints)}"
            problems.append(Mismatch(key=f"{key}.{name}", node=part, problem="is not a known key", hint=hint))
        else:
            given[name] = convert(part, hints[name], ANY_NUMBER, f"{key}.{name}", problems)
    for required in dataclasses.fields(record):
        if (
            required.default is dataclasses.MISSING
            and required.default_factory is dataclasses.MISSING
            and required.name not in given
        ):
            problems.append(Mismatch(key=f"{key}.{required.name}", node=node, problem="is missing"))
    return INVALID if len(problems) > before else record(**given)


def _texts(node: Node, key: str, problems: list[Mismatch]) -> Any:
    """Returns a mapping of text to text (`Mapping[str, str]`), each value letter for letter: `LEVEL: 1` is `"1"`."""
    values = {name: convert(part, str, ANY_NUMBER, f"{key}.{name}", problems) for name, part in node.value.items()}
    problems += [
        Mismatch(key=key, node=node, problem="has a name that no file can hold") for name in values if not _is_writable(name)
    ]
    return INVALID if any(value is INVALID for value in values.values()) or not all(map(_is_writable, values)) else values


def _mapping(node: Node, key: str, problems: list[Mismatch]) -> Any:
    """Returns free keys and values as ordinary Python; each must be what JSON and files can hold."""
    before = len(problems)

    def check(part: Node, name: str) -> None:
        if isinstance(part.value, dict):
            for inner, child in part.value.items():
                check(Node(inner, line=child.line), name)
                check(child, f"{name}.{inner}")
        elif isinstance(part.value, list):
            for index, child in enumerate(part.value):
                check(child, f"{name}[{index}]")
        elif isinstance(part.value, float) and not math.isfinite(part.value):
            problems.append(Mismatch(key=name, node=part, problem=f"is `{shown(part)}`; expected a finite number"))
        elif isinstance(part.value, int) and abs(part.value) > LARGEST_FREE:
            problems.append(Mismatch(key=name, node=part, problem=f"is `{shown(part)}`; expected an integer of at most 64 bits"))
        elif isinstance(part.value, str) and not _is_writable(part.value):
            problems.append(Mismatch(key=name, node=part, problem=f"has `{shown(part)}`; expected text without null characters"))

    check(node, key)
    return node.plain() if len(problems) == before else INVALID


def _value_hint(node: Node, annotation: Any) -> str | None:
    parts, value = options(annotation), node.value
    entries = [entry for part in parts if get_origin(part) is list for entry in get_args(part)]
    if bool in parts and isinstance(value, (str, int)) and str(value).lower() in ("yes", "no", "on", "off", "y", "n", "1", "0"):
        return f"write `{'true' if str(value).lower() in ('yes', 'on', 'y', '1') else 'false'}`"
    if value is False and "no" in literals(annotation):
        return "write `no`"
    if isinstance(value, str) and node.text is None and (int in parts or float in parts) and FLOAT.fullmatch(value.strip()):
        return "write the number without quotes"
    if isinstance(value, str) and float in parts and FLOAT.fullmatch(value.strip().removesuffix("%")):
        return f"a share is written `{float(value.strip().removesuffix('%')) / 100:g}`"
    if isinstance(value, str) and (word := closest_word(value, [str(word) for word in literals(annotation)])):
        return f"did you mean `{word}`?"
    if any(dataclasses.is_dataclass(entry) for entry in entries):
        return "a list of entries is written `[{path: train.jsonl}]`" if isinstance(value, (str, list, dict)) else None
    if any(dataclasses.is_dataclass(part) for part in parts):
        return f"an entry is written `{{path: {shown(node)}}}`" if isinstance(value, str) else None
    return f"a list is written `[{shown(node)}]`" if isinstance(value, str) and entries else None


def closest_word(value: str, words: Sequence[str]) -> str | None:
    """Returns the word that was probably meant: one that begins with `value`, else one that looks like it."""
    lower = value.lower()
    longer = [word for word in words if len(lower) > 2 and word.startswith(lower)]
    close = longer or get_close_matches(lower, words, n=1, cutoff=0.6)
    return close[0] if close else None


# A value of a row in words, for messages.


KINDS = {
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping",
    "int": "a number",
    "float": "a number",
    "NoneType": "empty",
    "bool": "true or false",
    "str": "text",
}


def kind_of(value: object) -> str:
    """Returns what a value is, in words."""
    name = type(value).__name__
    return KINDS.get(name, name)


def names_of(row: Iterable[str]) -> str:
    """Returns the names of a row's columns, in backticks."""
    return ", ".join(f"`{name}`" for name in row) or "none"
