"""Convert YAML values with their lines to a dataclass by its annotations, and collect all mismatches.

A field's annotation contains its range: `Annotated[int, Range(minimum=1)]`. A mismatch says in words what the value is
and what was expected.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from functools import cache
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from sft_play.config.yaml_files import FLOAT, YamlNode, scalar_text, wrap
from sft_play.text import list_some

LARGEST_INTEGER = 2**31 - 1
"""Maximum of a key without a `Range.maximum`, so that it fits into 32 bits."""
LARGEST_FREE = 2**63 - 1
MOST_WORDS = 15
"""Longer lists of choices are not written out in a message; `docs/configuration.md` has them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """The numbers that a field takes."""

    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    also: int | None = None
    """A value outside the range with a special meaning, such as -1."""

    def holds(self, value: float) -> bool:
        """Return whether `value` is in the range."""
        return (self.also is not None and value == self.also) or (
            (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
            and (self.below is None or value < self.below)
        )

    def words(self) -> str:
        """Return ` >= 1`, ` > 0 and < 1`, or nothing."""
        limits = ((">=", self.minimum), (">", self.above), ("<=", self.maximum), ("<", self.below))
        return "".join(f" {sign} {limit} and" for sign, limit in limits if limit is not None).removesuffix(" and")


@dataclass(frozen=True, slots=True)
class Pattern:
    """The pattern that a complete text must match; a rule checks it (`config.schedulers`)."""

    regex: re.Pattern[str]
    words: str
    """The pattern in words, for messages."""


Positive = Annotated[int, Range(minimum=1)]
FromZero = Annotated[int, Range(minimum=0)]
Count = Annotated[int, Range(minimum=0, maximum=LARGEST_FREE)]
"""A number of tokens or rows, which may exceed 32 bits."""


class Mismatch(NamedTuple):
    """A value that does not fit its annotation."""

    key: str
    """Dotted key, with `[i]` for list entries."""
    node: YamlNode
    problem: str
    """What is wrong, without the key: `` is `two`; expected ... ``."""
    hint: str | None = None


class Conflict(NamedTuple):
    """A violated rule between keys; the caller adds the value and the place."""

    key: str
    """Dotted key, or an entry or field of its value: `data.sources[1].weight`."""
    text: str
    """A clause after "`key` is `value`" if it begins with a comma or a semicolon; else the complete sentence."""
    hint: str | None = None
    or_key: str = ""
    """Key whose place is shown if nobody typed `key`."""


T = TypeVar("T")
INVALID = object()
"""Returned instead of a value that does not fit; its mismatch is in the list."""


@cache
def _parts(annotation: Any) -> tuple[tuple[Any, Range | Pattern | None], ...]:
    """Return the members of a union, each with its range or pattern."""
    origin = get_origin(annotation)
    if origin is Annotated:
        member, mark = get_args(annotation)
        return tuple((part, mark) for part in options(member))
    if origin in (Union, types.UnionType):
        return tuple(part for member in get_args(annotation) for part in _parts(member))
    return ((annotation, None),)


def options(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation alone; without ranges and patterns."""
    return tuple(part for part, _ in _parts(annotation))


def limits_of(annotation: Any) -> Range:
    """Return the range of the numbers that an annotation takes."""
    return next((mark for _, mark in _parts(annotation) if isinstance(mark, Range)), Range())


def pattern_of(annotation: Any) -> Pattern | None:
    """Return the pattern of an annotation, if it has one."""
    return next((mark for _, mark in _parts(annotation) if isinstance(mark, Pattern)), None)


def literals(annotation: Any) -> tuple[Any, ...]:
    """Return the words of an annotation's literals."""
    return tuple(word for part in options(annotation) if get_origin(part) is Literal for word in get_args(part))


@cache
def fields_of(record: Any) -> Mapping[str, Any]:
    """Return field -> annotation of a dataclass."""
    return get_type_hints(record, include_extras=True)


def required_fields(record: Any) -> list[str]:
    """Return the fields of a dataclass that have no default."""
    missing = dataclasses.MISSING
    return [
        entry.name
        for entry in dataclasses.fields(record)
        if entry.default is missing and entry.default_factory is missing
    ]


def describe(annotation: Any) -> str:
    """Describe an annotation in words: ``an integer >= 1 or `auto` ``."""
    limits = limits_of(annotation)
    names = {
        bool: ["`true`", "`false`"],
        int: [f"an integer{limits.words()}"],
        float: [f"a number{limits.words()}"],
        str: ["text"],
        dict: ["a mapping"],
        Mapping: ["a mapping such as `{name: text}`"],
    }
    words = [f"{limits.also}"] if limits.also is not None else []
    for part in options(annotation):
        if get_origin(part) is Literal:
            choices = get_args(part)
            some = [f"one of {len(choices)} words such as `{choices[0]}`"]
            words += [f"`{word}`" for word in choices] if len(choices) <= MOST_WORDS else some
        elif get_origin(part) is list:
            (entry,) = get_args(part)
            of_records = dataclasses.is_dataclass(entry)
            example = "of mappings such as `[{name: text}]`" if get_origin(entry) is Mapping else "such as `[a, b]`"
            words.append(f"a list {f'of entries with {_keys_of(entry)}' if of_records else example}")
        elif dataclasses.is_dataclass(part):
            words.append(f"an entry with {_keys_of(part)}")
        elif part is not type(None):
            words += names.get(get_origin(part) or part, ["a value"])
    words += ["null"] if type(None) in options(annotation) else []
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _keys_of(record: Any) -> str:
    return " and ".join(f"`{name}`" for name in required_fields(record))


def shown(node: YamlNode) -> str:
    """Return a value as it is quoted in messages, cut after 80 characters."""
    text = node.text if node.text is not None else node.plain()
    text = text if isinstance(text, str) else scalar_text(text)
    text = text.encode("unicode_escape").decode("ascii") if not text.isprintable() else text
    return text if len(text) <= 80 else text[:77] + "..."


def quoted(text: str) -> str:
    """Return text as it is quoted in messages."""
    return shown(YamlNode(text))


def convert(node: YamlNode, annotation: Any, key: str, problems: list[Mismatch]) -> Any:
    """Return the value of `node` converted to `annotation`, or `INVALID` with its mismatches added to `problems`."""
    value, parts = node.value, options(annotation)
    if value is None and type(None) in parts:
        return None
    if isinstance(value, str) and value in literals(annotation):
        return value
    if isinstance(value, bool):
        if bool in parts:
            return value
    elif isinstance(value, (int, float)):
        number = _number(value, annotation)
        if number is not INVALID:
            return number
    for part in parts:
        if isinstance(value, list) and get_origin(part) in (list, tuple):
            values = [convert(inner, get_args(part)[0], f"{key}[{i}]", problems) for i, inner in enumerate(value)]
            return INVALID if any(entry is INVALID for entry in values) else get_origin(part)(values)
        if isinstance(value, dict) and dataclasses.is_dataclass(part):
            return read_record(node, part, key, problems)
        if isinstance(value, dict) and get_origin(part) is Mapping:  # of texts, verbatim: `LEVEL: 1` is `"1"`
            parts_of = {
                name: convert(inner, get_args(part)[1], f"{key}.{name}", problems) for name, inner in value.items()
            }
            return INVALID if any(entry is INVALID for entry in parts_of.values()) else parts_of
        if isinstance(value, dict) and (get_origin(part) or part) is dict:
            return _finite(node, key, problems)
    text = value if isinstance(value, str) else node.text
    if str in parts and value is not None and text is not None:
        return text
    quote = f"`{shown(node)}`" if shown(node) else "empty"
    problems.append(
        Mismatch(key, node, f"is {quote}; expected {describe(annotation)}", _value_hint(node, annotation, key))
    )
    return INVALID


def _number(value: float, annotation: Any) -> Any:
    parts, limits = options(annotation), limits_of(annotation)
    if isinstance(value, int) and abs(value) > max(LARGEST_INTEGER, limits.maximum or 0):
        return INVALID  # before anything makes a float of it, which 309 digits are too long for
    if not math.isfinite(value) or not limits.holds(value):
        return INVALID
    if isinstance(value, int) and int in parts:
        return value
    return float(value) if float in parts else INVALID


def read_record(node: YamlNode, record: Any, key: str, problems: list[Mismatch]) -> Any:
    """Return a mapping as the dataclass `record`, or `INVALID`; `key` prefixes the names of its fields in messages."""
    fields, before, prefix = fields_of(record), len(problems), f"{key}." if key else ""
    values: dict[str, Any] = {}
    for name, part in node.value.items():
        if name in fields:
            values[name] = convert(part, fields[name], f"{prefix}{name}", problems)
            continue
        elsewhere = getattr(record, "ELSEWHERE", {}).get(name)
        close = (
            [elsewhere.replace("VALUE", shown(part))] if elsewhere else get_close_matches(name, fields, n=1, cutoff=0.6)
        )
        hint = f"did you mean `{close[0]}`?" if close else f"it takes {', '.join(f'`{field}`' for field in fields)}"
        problems.append(Mismatch(f"{prefix}{name}", part, "is not a known key", hint))
    problems += [
        Mismatch(f"{prefix}{name}", node, "is missing") for name in required_fields(record) if name not in values
    ]
    return INVALID if len(problems) > before else record(**values)


def record_of(value: Any, record: type[T]) -> T:
    """Return parsed JSON as the dataclass `record`. Raise `ValueError` with the first mismatch."""
    problems: list[Mismatch] = []
    converted = convert(wrap(value), record, "", problems)
    if problems:
        raise ValueError(f"`{problems[0].key}` {problems[0].problem}")
    assert isinstance(converted, record)
    return converted


def misfit(value: Any, annotation: Any, key: str = "") -> str | None:
    """Return the dotted key of the first part of parsed JSON that does not match its annotation, or `None`.

    In a record (a dataclass, or field -> annotation) missing fields are ignored.
    """
    mismatches: list[str] = []
    for part in options(annotation) if not isinstance(annotation, Mapping) else (annotation,):
        members = _members(value, part)
        if members is None:
            continue
        inner = (misfit(member, of, f"{key}.{name}" if key else name) for name, member, of in members)
        mismatch = next((dotted for dotted in inner if dotted is not None), None)
        if mismatch is None:
            return None
        mismatches.append(mismatch)
    return next(iter(mismatches), key)


def _members(value: Any, part: Any) -> Iterable[tuple[str, Any, Any]] | None:
    """Return (name, value, annotation) of each member of `value`, or `None` if `value` is not a `part`."""
    kind, arguments = get_origin(part) or part, get_args(part)
    if isinstance(part, Mapping) or dataclasses.is_dataclass(part):
        fields: Mapping[str, Any] = part if isinstance(part, Mapping) else fields_of(kind)
        if not isinstance(value, dict):
            return None
        return [(name, value[name], of) for name, of in fields.items() if name in value]
    if kind in (list, tuple, Sequence):
        return (
            [(str(i), entry, arguments[0]) for i, entry in enumerate(value)]
            if isinstance(value, (list, tuple))
            else None
        )
    if kind in (dict, Mapping):
        of = arguments[1] if arguments else Any
        return [(name, entry, of) for name, entry in value.items()] if isinstance(value, dict) else None
    return () if _is_scalar(value, kind, arguments) else None


def _is_scalar(value: Any, kind: Any, arguments: tuple[Any, ...]) -> bool:
    if kind is Literal:
        return isinstance(value, str | int) and value in arguments
    if kind in (int, float):
        return type(value) is float is kind or (type(value) is int and abs(value) <= LARGEST_FREE)
    return kind is Any or type(value) is kind


def _finite(node: YamlNode, key: str, problems: list[Mismatch]) -> Any:
    plain = node.plain()
    try:
        json.dumps(plain, allow_nan=False)
        return plain
    except ValueError:
        problems.append(Mismatch(key, node, f"is `{shown(node)}`; expected finite numbers"))
        return INVALID


NUMBER = re.compile(
    r"([-+]?(?:\d{1,3}(?:[,_]\d{3})+|\d{1,15})(?:\.\d{1,15})?(?:e\d{1,2})?)\s*([a-z]*|%)", re.IGNORECASE
)
UNITS = {"": Decimal(1), "%": Decimal("0.01"), "k": Decimal(1000), "m": Decimal(10**6)}
SECONDS = {"s": Decimal(1), "min": Decimal(60), "m": Decimal(60), "h": Decimal(3600), "d": Decimal(86400)}
"""Units of keys that end in `_seconds`."""


def meant_number(text: str, annotation: Any, key: str = "") -> str | None:
    """Return the hint with the number that `10%`, `2k`, `1,000`, `2e3` or `30min` means, if `annotation` takes it."""
    match, parts = NUMBER.fullmatch(text.strip()), options(annotation)
    unit = match[2].lower() if match else None
    factor = (UNITS | SECONDS if key.endswith("_seconds") else UNITS).get(unit or "")
    if not match or factor is None or (unit == "%" and float not in parts):
        return None
    number = Decimal(re.sub("[,_]", "", match[1])) * factor
    value = _number(int(number) if number == int(number) else float(number), annotation)
    return f"write {scalar_text(int(value) if value == int(value) else value)}" if value is not INVALID else None


def _value_hint(node: YamlNode, annotation: Any, key: str) -> str | None:
    value, parts = node.value, options(annotation)
    if isinstance(value, float):
        return meant_number(node.text or "", annotation)
    if not isinstance(value, str):
        return None
    if node.text is None and (int in parts or float in parts) and FLOAT.fullmatch(value.strip()):
        return "write the number without quotes"
    word = closest_word(value, [str(word) for word in literals(annotation)])
    return f"did you mean `{word}`?" if word else meant_number(value, annotation, key)


def closest_word(value: str, words: Sequence[str]) -> str | None:
    """Return the word that was probably meant: one that begins with `value`, else a similar one."""
    lower = value.lower()
    longer = [word for word in words if len(lower) > 2 and word.startswith(lower)]
    close = longer or get_close_matches(lower, words, n=1, cutoff=0.6)
    return close[0] if close else None


# Values of a row in words, for messages.


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
    """Describe the type of a value in words."""
    name = type(value).__name__
    return KINDS.get(name, name)


MOST_NAMES = 100


def names_of(row: Iterable[str]) -> str:
    """Return the names of a row's columns in backticks, at most the first `MOST_NAMES`."""
    return list_some([f"`{name}`" for name in row], MOST_NAMES) or "none"
