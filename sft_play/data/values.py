"""Values of a row: text, lists and JSON, as files of every kind hold them."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sft_play.config.data_rules import close_name, inside
from sft_play.config.reader import kind_of, names_of
from sft_play.config.yaml_files import scalar_text
from sft_play.data.readers import LEAVE_OUT, parse_json
from sft_play.errors import DataError, MissingColumn

MOST_DEPTH, SHOWN = 100, 60
"""Levels of arguments and descriptions, which templates write by recursion; letters of a name in a message."""
SPEAKERS = ("role", "from", "speaker", "author", "sender", "who")
"""Keys of a turn that say who speaks."""

ANSWERS = (
    *(
        "response",
        "output",
        "answer",
        "completion",
        "target",
        "targets",
        "targets_pretokenized",
        "reply",
        "summary",
        "highlights",
        "solution",
        "translation",
        "code",
        "canonical_solution",
    ),
    *("label_text", "label_name", "label", "labels", "category", "class"),
    *("sentiment", "intent", "topic", "emotion", "tag"),
)
ASKS = (
    *("prompt", "query", "input", "instruction", "question", "text", "review", "comment", "comment_text", "tweet"),
    *(
        "inputs",
        "inputs_pretokenized",
        "message",
        "sentence",
        "utterance",
        "ticket",
        "email",
        "article",
        "document",
        "dialogue",
        "problem",
        "body",
        "description",
        "source",
    ),
    *("content", "headline", "title"),
)
"""What data sets call an answer, and what is asked."""
STANDS_FOR_NONE = re.compile(
    r"nan|<NA>|NaT|\\N|#(?:N/A|NV|N/D)|#[¡¿]?(?:REF|NAME|VALUE|DIV/0|NULL|NUM|SPILL|CALC|ERROR|BEZUG|WERT|ZAHL|NOM"
    r"|VALEUR|NOMBRE|VALOR|NOME|RIF|VALORE)[!?]|Loading\.\.\.|[\u200b-\u200d\u2060\ufeff]+|\[(?:deleted|removed)\]"
    r"|\[object Object\]|<Media omitted>|This message was deleted\.?"
)
"""What pandas, databases, spreadsheets and chats write where there is no text; a person may write other words."""


def refuse_none(text: str, name: str, words: re.Pattern[str] = STANDS_FOR_NONE, hint: str = LEAVE_OUT) -> None:
    """Raise `DataError` for a text that stands for none."""
    if words.fullmatch(text.strip()):
        raise DataError(f"`{name}` is `{text.strip()}`, which stands for none", hint=hint)


@functools.lru_cache(4096)
def in_snake_case(name: str) -> str:
    """Return a name as Python would write it: `is_correct` for `isCorrect`, `Is Correct?` and `is-correct`."""
    return re.sub(r"\W+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)).strip("_").lower()


def text_of(value: Any, name: str) -> str:
    """Return `value`, which must be text that a tokenizer can read. Raise `DataError`."""
    if not isinstance(value, str):
        column = re.sub(r"\[\d+\]", "", name)
        inner = column.rpartition(".")[2]
        hint = "write it as text, in quotes"
        if is_list(value) or isinstance(value, Mapping):
            parts = {"0": value[0]} if is_list(value) and len(value) else value or {"KEY": ""}
            key = next((key for key, part in parts.items() if isinstance(part, str)), next(iter(parts)))
            ways = [
                f"`columns: {{{column}: {inner}.{key}}}` learns a part of it",
                f"`columns: {{{column}: json({inner})}}` learns all of it as JSON",
            ]
            hint = "; ".join(reversed(ways) if isinstance(value, Mapping) and len(value) > 1 else ways)
        elif value is None:
            hint = LEAVE_OUT
        raise DataError(f"`{name}` is {kind_of(value)}; expected text", hint=hint)
    if "\0" in value:
        raise DataError(f"`{name}` contains a NUL character ({value.index(chr(0)) + 1}), which no text has")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:  # JSON can write an unpaired surrogate; no tokenizer can read it
            raise DataError(
                f"`{name}` contains an unpaired surrogate at character {error.start + 1}, which is not valid text"
            ) from None
    return value


def json_of(value: Any, name: str, depth: int = 0) -> Any:
    """Return `value`, which a template can write as JSON. Raise `DataError` with the place in it of what JSON does not
    have.
    """
    if isinstance(value, str):
        return text_of(value, name)
    if depth > MOST_DEPTH:
        raise DataError(f"`{name[:SHOWN]}...` is nested deeper than {MOST_DEPTH} levels")
    if isinstance(value, Mapping):
        for key in value:
            text_of(key, f"a key of {name}")
        return {key: json_of(part, f"{name}.{key}", depth + 1) for key, part in value.items()}
    if is_list(value):
        return [json_of(part, f"{name}[{index}]", depth + 1) for index, part in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"`{name}` is {value}, which JSON cannot represent", hint="write null, or text")
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise DataError(
        f"`{name}` is {kind_of(value)}, which JSON cannot represent; expected text or a number", hint="write it as text"
    )


def is_blank(value: Any) -> bool:
    """Return whether a value counts as missing: null, an empty list or blank text, but not a number or `false`."""
    return value is None or (isinstance(value, str) and not value.strip()) or (is_list(value) and not len(value))


def lacks(value: Any, texts: Iterable[str]) -> bool:
    """Return whether a text in a value, however deep, is in none of `texts`; white space aside."""
    text = " ".join("\n".join(texts).split())
    return any(" ".join(words.split()) not in text for words in words_in(value))


def words_in(value: Any) -> Iterator[str]:
    """Yield the texts in a value, or in JSON in a text, without the names of types and of speakers."""
    for name, part in leaves(value, ""):
        if isinstance(part, str) and name.rpartition(".")[2] not in (*SPEAKERS, "type"):
            yield part


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield what is within a value, or in JSON in a text, with the keys that lead to it: `name.key`."""
    inner = value
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(DataError):
            inner = parse_json(value) or value
    if isinstance(inner, Mapping):
        for key, part in inner.items():
            yield from leaves(part, f"{name}.{key}")
    elif is_list(inner):
        for part in inner:
            yield from leaves(part, name)
    else:
        yield name, inner


def not_read(place: str, problem: str, way: str = "") -> DataError:
    """Return the error for a column, or a turn's key (`messages[1].id`), that must not be dropped silently. `way`: how
    it is read; else `columns` says that it is not.
    """
    turn = re.fullmatch(r"(.+?)\[\d+\]\.(.+)", place)
    new, old = (f"{turn[1]}.note", turn[2]) if turn else ("note", re.sub(r"\[\d+\]\Z", "", place))
    away = f"`columns: {scalar_text({new: old})}` gives it a name that is not read"
    return DataError(f"`{place}` {problem}", hint=f"{way}; {away}" if way else away)


def is_list(value: Any) -> bool:
    """Return whether a value is a list, of whatever type a reader makes them."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def text_key(value: Any) -> str:
    """Return the key, after a dot, under which a mapping such as `{"parts": [...]}` has its text, or nothing."""
    keys = ("parts", "content", "text") if isinstance(value, Mapping) else ()
    return next((f".{key}" for key in keys if value.get(key)), "")


def list_of(value: Any, name: str, of: str = "messages") -> Sequence[Any]:
    """Return a list, or the list that a JSON string contains. Raise `DataError`."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_json(value, name)
    if not is_list(value):
        raise DataError(f"`{name}` is {kind_of(value)}; expected a list of {of}")
    return list(value)


MEDIA = re.compile(
    r"(?:image|img|picture|photo|video|audio|attachment|pixel_value|file_name)s?"
    r"(?:_?(?:url|path|file|bytes|base64)s?)?",
    re.IGNORECASE,
)
MEDIA_FILE = re.compile(r"\.(?:png|jpe?g|gif|webp|bmp|tiff?|mp[34]|wav|flac|ogg|webm|mov|avi)$", re.IGNORECASE)


@functools.lru_cache(4096)
def looks_like_media(key: str) -> bool:
    """Return whether a key or column is named as if it contained pictures, sounds or files."""
    return MEDIA.fullmatch(in_snake_case(key)) is not None


def refuse_media(row: Mapping[str, Any], name: str = "") -> None:
    """Raise `DataError` for a column, or a key of a turn, that contains pictures or sounds: its text would be learnt
    without them.
    """
    for key, value in row.items():
        some = next(iter(value), None) if is_list(value) else value
        named = (
            (looks_like_media(key) or (name and key == "files"))
            and not is_blank(value)
            and not isinstance(some, (bool, int, float))
        )
        if key.lower() == "file_name":
            named = isinstance(value, str) and bool(MEDIA_FILE.search(value))
        if named or (isinstance(some, Mapping) and "bytes" in some and {*some} <= {"bytes", "path"}):
            place = f"{name}.{key}" if name else key
            raise not_read(place, "contains pictures, sounds or files; only text is trained")


def group_of(row: Mapping[str, Any], column: str) -> str:
    """Return the value of `data.group_by`. Raise `DataError` if a row has none."""
    value = row.get(column)
    named = f"`data.group_by` names the column `{column}`, which"
    if column not in row:
        own = scalar_text({column: "path" if "path" in row else "NAME"})  # of documents each has its path
        gives = "gives each file its group" if "path" in row else "says which of its columns is the group"
        raise MissingColumn(
            f"{named} is missing; the columns are {names_of(row)}",
            hint=(f"did you mean `{close}`? " if (close := close_name(row, column)) else "")
            + f"every row needs a group: `columns: {own}` of that source {gives}",
        )
    if is_blank(value):
        raise DataError(
            f"{named} is empty", hint="every row needs a group, so that a group is wholly training or wholly validation"
        )
    if isinstance(value, (str, int, float)):
        return text_of(str(value), column)
    raise DataError(f"`{column}`, which `data.group_by` names, is {kind_of(value)}; expected text or a number")


def with_inner_texts(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row with the texts of each mapping, or object as JSON, as columns (`translation.en`) instead of it."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        inner = {} if is_list(value) else inside(value)
        flat |= {f"{name}.{key}": text for key, text in inner.items() if isinstance(text, str)} or {name: value}
    return flat
