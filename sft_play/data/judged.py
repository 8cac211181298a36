"""Columns of a row, and keys of a turn, that say by their names and values that it is not to be learnt.

A rule gives the `filter` that keeps what is good, or nothing where the value says nothing against learning.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Sequence
from keyword import iskeyword
from typing import Any

from sft_play.config.data_rules import TRUTHS
from sft_play.data.layout import WORDS

Keep = Callable[[str, Any], str]


def _in_words(value: Any, *, true: bool) -> str:
    """Return what a table that writes `value`, true or false, would write for `true`; nothing for other values."""
    if value in ("x", "X"):  # a cross, and nothing elsewhere
        return str(value) if true else ""
    pair = next((pair for pair in TRUTHS if isinstance(value, str) and value.lower() in pair), None)
    if pair is None:
        return ""
    word = pair[0 if true else 1]
    return word if value == value.lower() else word.upper() if value == value.upper() else word.capitalize()


def _yes_or_no(column: str, value: Any) -> str:
    if isinstance(value, str):
        return f'{column} == "{word}"' if (word := _in_words(value, true=True)) else ""
    return column if isinstance(value, bool) else f"{column} == 1" if value in (0, 1) else ""


def _opposite(column: str, value: Any) -> str:
    if value in ("x", "X"):
        return f"blank({column})"
    if isinstance(value, str):
        return f'{column} == "{word}"' if (word := _in_words(value, true=False)) else ""
    return f"not {column}" if isinstance(value, bool) else f"{column} == 0" if value in (0, 1) else ""


def _if_false(column: str, value: Any) -> str:
    return "" if _is(value, true=True) else _yes_or_no(column, value)


def _if_true(column: str, value: Any) -> str:
    return "" if _is(value, true=False) else _opposite(column, value)


def _is(value: Any, *, true: bool) -> bool:
    return value.lower() == _in_words(value, true=true).lower() if isinstance(value, str) else value == true


def keep_number(column: str, value: Any) -> str:
    """Return the filter that keeps rows rated as high; where the number is what is to be learnt, all are kept."""
    try:
        finite = value is not None and math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):
        finite = False
    if isinstance(value, str):
        return (
            f"number({column}) >= {value}" if finite else f'{column} in ["{value}"]' if RATED.fullmatch(value) else ""
        )
    return f"{column} >= {value}" if finite else ""


def _held_out(column: str, value: Any) -> str:
    text = value if isinstance(value, str) else ""
    held_out = HOLDOUT.search(text) or any(WORDS[split].search(text) for split in ("validation", "test"))
    return f'{column} == "train"' if held_out and not WORDS["train"].search(text) else ""


def _label(column: str, value: Any) -> str:
    return f'{column} != "{value}"' if isinstance(value, str) and BAD.fullmatch(value.strip().lower()) else ""


def _verdict(column: str, value: Any) -> str:
    ended = isinstance(value, str) and ENDED.fullmatch(value.strip().lower())
    return f'{column} != "{value}"' if ended else _label(column, value)


def _if_filled(column: str, value: Any) -> str:
    if isinstance(value, str):
        nothing = _in_words(value, true=True) or value.strip().lower() in ("", "none", "null", "nan", "ok")
        return "" if nothing else f"blank({column})"
    return "" if not value or isinstance(value, (bool, int, float)) else f"not has({column})"


RATED = re.compile(r"\s*-?\d+(?:[.,]\d+)?\s*(?:%|/\s*\d+)?\s*|[★☆⭐\ufe0f]+")
"""Ratings that are no number for Python: `4,5`, `95 %`, `4/5`, `★★★`."""
HOLDOUT = re.compile(r"\bhold-?out\b|\bheld[-_ ]?out\b|\bunseen\b", re.IGNORECASE)
BAD = re.compile(
    r"incorrect|unacceptable|unsafe|invalid|reject\w*|negative|wrong|bad|fail\w*|dislike\w*|false|discard\w*|deleted"
)
ENDED = re.compile(
    r"deleted?|removed?|spam|low|poor|error|length|max_?(?:output_)?tokens|(?:model_)?context_window_exceeded"
    r"|content_filter|safety|recitation|cancell?ed|incomplete|interrupted|draft|obsolete|outdated|deprecated"
    r"|withdrawn|retracted|superseded|duplicate"
)
"""Words that a status has, or the reason why an answer ended, but classes have too."""
JUDGED: Sequence[tuple[re.Pattern[str], Keep]] = (
    (
        re.compile(
            r"label|kto_tag|train|(?:is_)?(?:desirable|correct|accepted|approved|good|safe|valid|chosen)|passed"
            r"|thumbs_up|win"
        ),
        _yes_or_no,
    ),
    (
        re.compile(
            r"(?:is_)?(?:rejected|bad|wrong|incorrect|disliked?|deleted|discarded|excluded|ignored|flagged)|thumbs_down"
        ),
        _opposite,
    ),
    (
        re.compile(
            r"(?:(?:is|was|has_been)_)?(?:published|active|enabled|visible|public|verified|reviewed|validated"
            r"|usable|helpful|resolved|success(?:ful)?|complete|included?|keep|use|used)|(?:use|include)_(?:for|in)_"
            r"train(?:ing)?"
        ),
        _if_false,
    ),
    (
        re.compile(
            r"(?:(?:is|was|has_been|has)_)?(?:archived|draft|hidden|private|spam|duplicate|toxic|cancell?ed|exclude"
            r"|skip(?:ped)?|ignore|hallucinat(?:ed|ions?)|refused|truncated|interrupted|incomplete|failed|error|removed"
            r"|retracted|outdated|deprecated|obsolete)"
        ),
        _if_true,
    ),
    (
        re.compile(r"(?:deleted|archived|discarded|rejected|retracted|removed)_(?:at|on|by)|error(?:_message)?"),
        _if_filled,
    ),
    (re.compile("answer"), lambda column, value: f'{column} == "accept"' if value in ("reject", "ignore") else ""),
    (re.compile(r"(?:\w+_)?(?:score|rating|reward|advantage)|weights|\w+_weights?"), keep_number),
    (re.compile("label"), _label),
    (
        re.compile(
            r"(?:\w+_)?(?:status|state|verdict|decision|preference|feedback|quality)|action"
            r"|(?:finish|stop)_?reason"
        ),
        _verdict,
    ),
)
"""Columns that say of a conversation whether it is to be learnt -> the `filter` that keeps the good ones."""
HELD_OUT: Sequence[tuple[re.Pattern[str], Keep]] = (
    (re.compile(r"_?(?:data_?(?:set)?_?)?(?:split|subset|set|partition|fold|phase)"), _held_out),
    (re.compile(r"is_(?:test|validation|val|eval)"), _opposite),
    (re.compile(r"(?:is_)?(?:hold_?out|held_?out)|is_dev"), _if_true),
    (re.compile(r"(?:is|in)_train(?:ing)?"), _if_false),
)
"""Columns that say of any row which split it belongs to -> the filter that keeps those of training."""


@functools.lru_cache(4096)
def keepers(column: str, chat: bool) -> tuple[Keep, ...]:
    """Return the rules for a column; `chat`: of a conversation, which may be judged."""
    rules = (*HELD_OUT, *(JUDGED if chat else ()))
    return tuple(keep for pattern, keep in rules if pattern.fullmatch(in_snake_case(column)))


@functools.lru_cache(4096)
def in_snake_case(name: str) -> str:
    """Return a column's name as Python would write it: `is_correct` for `isCorrect`, `Is Correct` and `is-correct`."""
    return re.sub(r"[^\w*]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).strip()).lower()


def in_filter(column: str) -> str:
    """Return how a `filter` names a column."""
    return column if column.isidentifier() and not iskeyword(column) else f"column({json.dumps(column)})"


def speaks_against(key: str, value: Any) -> bool:
    """Return whether a turn's own key says that its text was withdrawn, or ends too early."""
    rules = (_if_true if keep is _opposite else keep for keep in keepers(key, True))
    return any(keep(key, value) for keep in rules if keep in (_if_true, _if_filled, _verdict))
