"""Columns of a row, and keys of a turn, that say by their names and values that it is not to be learnt; and marks in
texts by which something happened to them that their author does not know of.

A rule gives the `filter` that keeps what is good, or nothing where the value says nothing against learning.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sft_play.config.data_rules import TRUTHS
from sft_play.data.layout import WORDS
from sft_play.data.values import in_snake_case

Keep = Callable[[str, Any], str]
CROSSES = ("x", "X")
"""What tables write for true, and nothing for false."""
PAIRS = (*TRUTHS, ("1", "-1"))


def _truth(value: Any) -> bool | None:
    """Return whether a table's `value` means true or false; `None` if it means neither."""
    if isinstance(value, str):
        word = value.strip().lower()
        return True if word == "x" else next((word == pair[0] for pair in PAIRS if word in pair), None)
    return value == 1 if isinstance(value, (bool, int, float)) and value in (1, 0, -1) else None


def _condition(column: str, value: Any, *, true: bool) -> str:
    """Return the `filter` for rows where a column is true, or false, as a table with this value writes it; nothing for
    a value that is neither.
    """
    if _truth(value) is None:
        return ""
    if str(value).strip() in CROSSES:
        return f'{column} == "{value}"' if true else f"blank({column})"
    if isinstance(value, str):
        pair = next(pair for pair in PAIRS if value.strip().lower() in pair)
        word = pair[0 if true else 1]
        cased = word if value == value.lower() else word.upper() if value == value.upper() else word.capitalize()
        return f'{column} == "{cased}"'
    if isinstance(value, bool):
        return column if true else f"not {column}"
    return f"{column} == {int(true)}"


def _yes_or_no(column: str, value: Any) -> str:
    return _condition(column, value, true=True)


def _if_false(column: str, value: Any) -> str:
    return _condition(column, value, true=True) if _truth(value) is False else ""


def _if_true(column: str, value: Any) -> str:
    return _condition(column, value, true=False) if _truth(value) else ""


def _number(column: str, value: Any) -> str:
    """Return the filter that keeps rows rated as high; where the number is what is to be learnt, all are kept."""
    try:
        finite = math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):
        return f'{column} in ["{value}"]' if isinstance(value, str) and RATED.fullmatch(value) else ""
    number = f"number({column})" if isinstance(value, str) else column
    return f"{number} >= {value}" if finite else ""


def _held_out(column: str, value: Any) -> str:
    text = value if isinstance(value, str) else ""
    held_out = HOLDOUT.search(text) or any(WORDS[split].search(text) for split in ("validation", "test"))
    return f'{column} == "train"' if held_out and not WORDS["train"].search(text) else ""


def _label(column: str, value: Any) -> str:
    if not isinstance(value, str):
        return f"{column} >= 0" if value == -1 else ""
    return f'{column} != "{value}"' if BAD.fullmatch(value.strip().lower()) else ""


def _http_error(column: str, value: Any) -> str:
    text = str(value)
    return f"number({column}) < 400" if text.isdecimal() and 400 <= int(text) < 600 else ""


def _verdict(column: str, value: Any) -> str:
    ended = isinstance(value, str) and ENDED.fullmatch(value.strip().lower())
    return f'{column} != "{value}"' if ended else _label(column, value)


def _if_filled(column: str, value: Any) -> str:
    if isinstance(value, str):
        nothing = _truth(value) is not None or value.strip().lower() in ("", "none", "null", "nan", "ok")
        return "" if nothing else f"blank({column})"
    return "" if not value or isinstance(value, (bool, int, float)) else f"not has({column})"


RATED = re.compile(r"\s*-?\d+(?:[.,]\d+)?\s*(?:%|/\s*\d+)?\s*|[★☆⭐\ufe0f]+")
"""Ratings that are no number for Python: `4,5`, `95 %`, `4/5`, `★★★`."""
HOLDOUT = re.compile(r"\bhold-?out\b|\bheld[-_ ]?out\b|\bunseen\b", re.IGNORECASE)
BAD = re.compile(
    r"incorrect|unacceptable|undesirable|unsafe|invalid|reject\w*|negative|wrong|bad|fail\w*|dislike\w*|false"
    r"|discard\w*|deleted|thumbs?_?down|downvoted|👎|❌|✗|-1"
)
ENDED = re.compile(
    r"deleted?|removed?|spam|low|poor|error|length|max_?(?:output_)?tokens|(?:model_)?context_window_exceeded"
    r"|content_filter|safety|recitation|cancell?ed|incomplete|interrupted|draft|obsolete|outdated|deprecated"
    r"|withdrawn|retracted|superseded|duplicate"
)
"""Words that a status has, or the reason why an answer ended, but classes have too."""
JUDGED: Sequence[tuple[re.Pattern[str], Keep]] = (
    (re.compile("label|kto_tag|train|(?:is_)?desirable|win"), _yes_or_no),
    (
        re.compile(
            r"(?:(?:is|was|has_been)_)?(?:correct|accepted|approved|good|safe|valid|chosen|published|active|enabled"
            r"|visible|public|verified|reviewed|validated|usable|helpful|resolved|success(?:ful)?|complete|included?"
            r"|keep|use|used|ok|pass|approve|best|preferred|selected|latest|current)|(?:\w+_)?passed"
            r"|thumbs_up|(?:use|include)_(?:for|in)_train(?:ing)?|(?:has_)?consent"
        ),
        _if_false,
    ),
    (
        re.compile(
            r"(?:(?:is|was|has_been|has)_)?(?:archived|draft|hidden|private|spam|duplicate|toxic|cancell?ed|exclude"
            r"|skip(?:ped)?|ignore|hallucinat(?:ed|ions?)|refused|truncated|interrupted|incomplete|failed|error|removed"
            r"|retracted|outdated|deprecated|obsolete|superseded|reject(?:ed)?|bad|wrong|incorrect|disliked?|deleted"
            r"|discarded|excluded|ignored|flagged)|thumbs_down|(?:do_not|dont|no|not_for)_train(?:ing)?|opt(?:ed)?_?out"
            r"|needs_(?:review|work|fix\w*)"
        ),
        _if_true,
    ),
    (
        re.compile(
            r"(?:deleted|archived|discarded|rejected|retracted|removed|superseded|replaced)_(?:at|on|by)"
            r"|error(?:_message)?|exception"
        ),
        _if_filled,
    ),
    (re.compile(r"(?:http_)?status(?:_code)?"), _http_error),
    (re.compile("answer"), lambda column, value: f'{column} == "accept"' if value in ("reject", "ignore") else ""),
    (re.compile(r"(?:\w+_)?(?:score|rating|reward|advantage)|weights|\w+_weights?"), _number),
    (re.compile("label"), _label),
    (
        re.compile(
            r"(?:\w+_)?(?:status|state|verdict|decision|preference|feedback|quality|csat|satisfaction)(?:_code)?|action"
            r"|thumbs|vote"
            r"|(?:finish|stop)_?reason"
        ),
        _verdict,
    ),
)
"""Columns that say of a conversation whether it is to be learnt -> the `filter` that keeps the good ones."""
HELD_OUT: Sequence[tuple[re.Pattern[str], Keep]] = (
    (re.compile(r"_?(?:(?:data_?set|data|ds)_)?(?:split|subset|set|partition|fold|phase)"), _held_out),
    (re.compile(r"(?:is_)?(?:hold_?out|held_?out)|is_(?:test|validation|val|eval|dev)"), _if_true),
    (re.compile(r"(?:is|in)_train(?:ing)?"), _if_false),
)
"""Columns that say of any row which split it belongs to -> the filter that keeps those of training."""


@functools.lru_cache(4096)
def keepers(column: str, chat: bool) -> tuple[Keep, ...]:
    """Return the rules for a column; `chat`: of a conversation, which may be judged."""
    rules = (*HELD_OUT, *(JUDGED if chat else ()))
    return tuple(keep for pattern, keep in rules if pattern.fullmatch(in_snake_case(column.rpartition(".")[2])))


def says_what_is_good(column: str) -> bool:
    """Return whether a column marks rows as good: where some have the mark, those without it are not."""
    return _if_false in keepers(column, True)


def good(column: str, values: Sequence[Any]) -> str:
    """Return the `filter` for rows with a mark that is not false; `values`: the marks of a column."""
    false = [value for value in values if _truth(value) is False]
    if any(isinstance(value, bool) for value in values):
        return f"has({column}) and {column}"
    filled = f"not blank({column})" if all(isinstance(value, str) for value in values) else f"has({column})"
    return filled + (f" and {column} not in {json.dumps(false, ensure_ascii=False)}" if false else "")


def speaks_against(key: str, value: Any, column: str = "") -> str:
    """Return the `filter` that leaves out a text whose key says that it was withdrawn, or ends too early; nothing for
    other keys. A key of a turn, or of a mapping that `column` names for a `filter`, which may name a split too.
    """
    heard = (_if_true, _if_false, _if_filled, _verdict, *((_held_out,) if column else ()))
    return next(filter(None, (keep(column or key, value) for keep in keepers(key, True) if keep in heard)), "")


# Marks in texts by which something happened to them before they came here. The texts are learnt, and the rows counted.


SPEAKER = "(?:user|human|customer|q|question|instruction)"
ASSISTANT = "assistant|ai|bot|gpt|chatgpt|agent"
ANSWERER = f"(?:{ASSISTANT}|a|answer|response|output)"
TEMPLATE = "texts with marks of a chat template (`<|im_end|>`, `[/INST]`, `<s>`)"
OF_PROGRAMS = "texts with another program's references (`【4†source】`, `[oaicite:0]`)"
MISREAD = "texts in UTF-8 that was read as another encoding (`Ã©`, `â€™`)"
TURNS_IN_TEXT = "documents with turns in plain words (`User: ... Assistant: ...`), all of which are learnt"
Marks = Sequence[tuple[str, str]]
"""What a mark says of a text, and the mark: an expression that begins with a letter is found a hundred times faster."""
IN_TEXTS: Marks = (
    (
        "texts with letters as HTML writes them (`&amp;`, `&#39;`)",
        r"&(?:amp|quot|apos|nbsp|[a-zA-Z](?:acute|grave|uml|circ|tilde|cedil)|#\d+|#x[0-9a-fA-F]+);",
    ),
    ("texts with line ends as Excel keeps them (`_x000D_`)", "_x000[dD]_"),
    (TEMPLATE, r"<\|\w+\|>"),
    (TEMPLATE, "</?s>"),
    (TEMPLATE, "<(?:start|end)_of_turn>|<bos>|<</?SYS>>"),
    (TEMPLATE, r"\[/INST\]"),
    ("texts with places of pictures or sounds (`<image>`)", "<(?:image|video|audio)>"),
    ("texts with 32,767 characters, where Excel cuts a cell", r"(?s:\A.{32767}\Z)"),
    ("texts with files as letters (`base64`)", r"data:\w+/\w+;base64,"),
    ("texts with control characters, as terminals and damaged files have them", "[\x01-\x08\x0e-\x1f]"),
    (
        "texts with letters and line ends as mail carries them (`=C3=A9`)",
        r"=(?:[CDE][0-9A-F]=[89AB][0-9A-F]|(?<=[a-z ]=)\n[a-z])",
    ),
    ("texts with places that were to be filled (`{{name}}`)", r"\{\{ ?[\w .|]+ ?\}\}"),
    ("texts with both sides of a merge (`<<<<<<< HEAD`)", "<<<<<<< "),
    (OF_PROGRAMS, r"\[(?:oaicite:|\^\d+\^\]|doc\d\])"),
    ("texts that say they must not be trained (`BENCHMARK DATA SHOULD NEVER`)", "BENCHMARK DATA SHOULD NEVER"),
    (
        "texts with line ends or letters as escapes (`\\n`, `\\u00e9`)",
        r"\\(?:n(?:\\n|\d+[.)] |[-*] |[A-Z])|u[0-9a-fA-F]{4})",
    ),
)
IN_WIDE_TEXTS: Marks = (
    (MISREAD, "Ã[\x80-\xbf‰–Ÿœ„€‡ˆ]"),
    (MISREAD, "[ÂÐÑ][\x80-\xbf]"),
    (MISREAD, "â€|ðŸ"),
    (MISREAD, "[à-ï][\x80-\x9f\xa1-\xbf][\x80-\xbf]"),
    (MISREAD, "[\x80-\x84\x86-\x9f]"),
    ("texts with letters that were lost (`\ufffd`)", "\ufffd"),
    (OF_PROGRAMS, r"【\d+[:†]"),
    ("texts with characters of private use, which only one font or program has", "[\ue000-\uf8ff]"),
)
"""Marks that are not ASCII."""
ENDS_OF_QUESTIONS: Marks = (
    ("questions that end with a separator, as older programs need (`###`, `->`)", r"(?:\n\n###\s*|\s->\s*)\Z"),
    ("questions that end with the name of who answers (`Assistant:`)", rf"(?i:(?:\n|\A)\W*{ANSWERER}\s*:\s*\Z)"),
    ("questions that end with a word for nothing (`N/A`)", r"(?i:\n(?:n/?a|none|not applicable)\.?\Z)"),
)
OF_ANSWERS: Marks = (
    ("answers with further turns in plain words (`User: ...`)", rf"\n[#*> ]{{0,5}}(?i:{SPEAKER})\s*:\s"),
    (
        "answers with the mail that they answer (`On ... wrote:`)",
        r"\n(?:On [^\n]{5,80} wrote:|Am [^\n]{5,80} schrieb |Le [^\n]{5,80} a écrit|-+ ?Original Message"
        r"|(?:From|Von|De): [^\n]+\n(?:Sent|Date|Gesendet|Envoyé): )",
    ),
    (
        "answers with words of the page or program that they come from (`Copy code`, `Sent from my iPhone`)",
        r"\n(?:Copy code|Regenerate(?: response)?|\d+ ?/ ?\d+|Sent from my \w+|Von meinem \w+ gesendet)\s*(?:\n|\Z)",
    ),
    ("answers that begin with who answers (`Assistant:`)", rf"\A[#*> \n]{{0,5}}(?i:{ASSISTANT})\s*:\**\s"),
    (
        "answers that are an error (`Error code: 429`)",
        r"\A(?:Error code: \d|Internal Server Error|Bad Gateway|Service Unavailable|Request (?:failed|timed out)"
        r"|Rate limit|\{[\"']error[\"']:|Traceback \(most)",
    ),
    ("answers whose thought never ends (`<think>`)", r"\A\s*<think>(?!(?s:.*)</think>)"),
)
WHOLE_TEXTS: Marks = (
    (
        'texts that are an object as JSON, as traces of programs have them (`{"output": ...}`)',
        r'\A\s*\{\s*"(?:id|messages|choices|candidates|(?:in|out)puts?|question|query|answer|response|text|content'
        r'|result)":',
    ),
    (
        "texts as addresses, base64 or spreadsheets write them (`%20`, `SGVsbG8=`, `1.2E+15`)",
        r"\A(?:(?!\w+:)\S+%20\S+|(?=\D*\d)(?=[^a-z]*[a-z])(?=[^A-Z]*[A-Z])[A-Za-z0-9+/\n]{40,}={0,2}"
        r"|\d\.\d+E\+\d+)\s*\Z",
    ),
    ("texts within quotation marks (`“a”`)", r"\A\s*[“„«][^“„«”»]*[”“»]\s*\Z"),
    ("texts in HTML or RTF (`<p>`)", r"\A\s*(?:<(?:p|div|span|br|table|ul)\b[^>]*>|\{\\rtf)"),
    (
        "texts in Python's notation (`['a']`, `b'a'`)",
        r"\A(?:b?'[^\n]*'|\['[^\n]*'\]|\{'[^\n]*\}|(?:array|tensor|Timestamp|Decimal)\([^\n]*\))\Z",
    ),
    (
        "texts that may stand for none (`N/A`, `None`, `-`)",
        r"(?i:\A\s*(?:n/?a\.?|n\. ?a\.|none|null|nil|undefined|[-–—_.?*…]+|-1|to ?do|tbd|xxx+|[(\[<]\w{4,7}[)\]>]"
        r"|placeholder|no answer)\s*\Z)",
    ),
)
"""Of questions and answers."""
DOCUMENTS: Marks = (
    (
        "documents that are rows as JSON",
        r'\A\s*\{"(?:prompt|instruction|question|messages|conversations|text)": ?["\[]',
    ),
    (
        "documents that are tables (`a,b,c`), which are read as rows with the ending `.csv` or `.tsv`",
        r"\A(?:#[^\n]*\n)*(?:(?:[^\n\t]+(?:\t[^\n\t]*)+(?:\n|\Z)){2}|\w+(?:[,;]\w+)+\n)",
    ),
    ("documents with the times of subtitles (`00:01,000 --> 00:04,000`)", r"\d\d[,.]\d{3} --> \d\d:\d"),
    ("documents with words broken at line ends (`docu-`)", r"[a-z]{2}-\n[a-z]{2}"),
    (
        "documents with the marks of a wiki (`[[Paris|the city]]`)",
        r"\[\[[A-Z][^\]\n|]*\|[^\]\n]+\]\]|\{\{(?:cite|Infobox) ",
    ),
    ("documents that a reader of PDF could not decode (`(cid:72)`)", r"\(cid:\d+\)"),
    (TURNS_IN_TEXT, rf"(?is:(?:\A|[\n.#])[#*> \n]{{0,5}}{SPEAKER}\s*:.*?[\s#*]{ANSWERER}\s*:)"),
    (TURNS_IN_TEXT, r"\A\[?\d{1,4}[-./]\d{1,2}[-./]\d{2,4},? \d\d?:\d\d[^\n]{0,12}?[-\]] [^\n:]{1,40}: "),
)
TAIL, HEAD = 40, 2000
"""Characters of a question's end, and of a document's beginning, that are looked at."""


def doubts_in(content: str | Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what the marks in a document, or in the questions and answers of a conversation, say."""
    if isinstance(content, str):
        return sorted({*_marks_in(content), *_marks_in(content[:HEAD], DOCUMENTS)})
    doubts: set[str] = set()
    for turn in content:
        text = turn["content"]
        if turn["role"] == "user":
            doubts.update(_marks_in(text[-TAIL:], ENDS_OF_QUESTIONS))
        elif turn["role"] == "assistant" and turn.get("train") is not False:
            doubts.update(_marks_in(text, OF_ANSWERS))
        else:
            continue
        doubts.update(_marks_in(text), _marks_in(text, WHOLE_TEXTS))
    return sorted(doubts)


def _marks_in(text: str, marks: Marks = IN_TEXTS) -> list[str]:
    also = IN_WIDE_TEXTS if marks is IN_TEXTS and not text.isascii() else ()
    return [meaning for meaning, mark in (*marks, *also) if re.search(mark, text)]
