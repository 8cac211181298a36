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
    if isinstance(value, bool):
        return _if_false(column, value)
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
    against = isinstance(value, str) and AGAINST.fullmatch(value.strip().lower())
    return f'{column} != "{value}"' if against else _label(column, value)


def _ended_early(column: str, value: Any) -> str:
    word = value if isinstance(value, str) and value.isidentifier() else "stop"
    return "" if ENDED.fullmatch(in_snake_case(word)) else f'{column} != "{value}"'


def _if_filled(column: str, value: Any) -> str:
    if isinstance(value, str):
        nothing = _truth(value) is not None or value.strip().lower() in ("", "none", "null", "nan", "ok")
        return "" if nothing else f"blank({column})"
    empty = f" or len({column}) == 0" if isinstance(value, list) else ""
    filled = any(value.values()) if isinstance(value, Mapping) else value
    return "" if not filled or isinstance(value, (bool, int, float)) else f"not has({column}){empty}"


RATED = re.compile(r"\s*-?\d+(?:[.,]\d+)?\s*(?:%|/\s*\d+)?\s*|[★☆⭐\ufe0f]+")
"""Ratings that are no number for Python: `4,5`, `95 %`, `4/5`, `★★★`."""
HOLDOUT = re.compile(r"\bhold-?out\b|\bheld[-_ ]?out\b|\bunseen\b", re.IGNORECASE)
BAD = re.compile(
    r"incorrect|unacceptable|undesirable|unsafe|invalid|reject\w*|negative|wrong|bad|fail\w*|dislike\w*|false"
    r"|discard\w*|deleted|thumbs?_?down|downvoted|👎|❌|✗|-1"
    r"|abgelehnt|entwurf|gelöscht|verworfen|fehlerhaft|ungültig|rechazad[oa]|borrador|incorrect[oae]|rejetée?|refusée?"
    r"|brouillon|rifiutat[oa]|bozza|rejeitad[oa]|rascunho|отклонен[оа]?|отклонён|черновик|удален[оа]?|удалён|неверно"
    r"|拒绝|已拒绝|驳回|草稿|已删除|错误|却下|下書き|削除済み|不正解"
)
AGAINST = re.compile(
    r"deleted?|removed?|spam|low|poor|error|cancell?ed|incomplete|interrupted|truncated|draft|obsolete|outdated"
    r"|deprecated|withdrawn|retracted|superseded|(?:.*\W)?duplicate|skipped|expired|revoked|blocked|quarantined|aborted"
    r"|time(?:d[ _-]?)?out|pending|rework|dissatisfied|(?:\w+_)?note|internal|private|whisper|\w+_(?:join|leave)"
    r"|un(?:approved|verified|answered|helpful|satisfied|reviewed|usable)"
    r"|not[ _-](?!rated|set|required|needed|available|applicable|yet[ _-]rated).*|(?:needs?|pending|awaiting|to[ _-]be)"
    r"[ _-].*|(?:exit|status)[ _-](?:error|cost|timeout)"
)
"""Words that a status has, but classes have too."""
ENDED = re.compile(
    r"(?:finish_reason_)?(?:stop\w*|end\w*|eo[st]\w*|(?:tool|function)_?(?:calls?|use)|complet\w+|finish\w*|success\w*"
    r"|done|normal|ok|null|none|unspecified|unknown)"
)
"""Reasons why an answer ended where it should; services have many others."""
NO_JUDGE = r"(?!(?:\w+_)?(?:not|non|no|never|num|number|n|count|total|times|if|can|requires?)_)(?:\w+_)?"
"""What may stand before the name of a judgement: not what turns it round, nor what counts."""
JUDGED: Mapping[str, Keep] = {
    "labels?|kto_tag|train|(?:is_)?desirable|win": _yes_or_no,
    (
        r"(?:(?:is|was|has_been)_)?(?:good|chosen|published|active|enabled|visible|public|verified|reviewed"
        r"|validated|usable|included?|keep|use|used|ok|pass|approve|best|preferred|selected|latest|current|final)"
        rf"|{NO_JUDGE}(?:correct|accepted|approved|safe|valid|helpful|resolved|solved|success(?:ful)?|completed?"
        r"|finished|passed|latest_version|review_result)"
        r"|thumbs_up|(?:use|include)_(?:for|in)_train(?:ing)?|(?:has_)?consent"
    ): _if_false,
    (
        r"(?:(?:is|was|has_been|has)_)?(?:archived|hidden|private|exclude|skip(?:ped)?|ignore|error|removed"
        r"|retracted|outdated|deprecated|obsolete|superseded|reject|bad|wrong|disliked?|excluded|ignored|internal"
        r"|(?:private_|internal_)note|whisper|partial)"
        rf"|{NO_JUDGE}(?:draft|spam|duplicate|toxic|cancell?ed|hallucinat(?:ed|ions?)|refused|truncated|interrupted"
        r"|incomplete|failed|rejected|incorrect|deleted|discarded|flagged|contaminated|aborted|timed_out)"
        r"|thumbs_down|(?:do_not|dont|no|not_for)_train(?:ing)?|opt(?:ed)?_?out|needs_(?:review|work|fix\w*)"
    ): _if_true,
    (
        r"(?:deleted|archived|discarded|rejected|retracted|removed|superseded|replaced|banned)_(?:at|on|by)(?:_\w+)?"
        r"|errors?(?:_message)?|exception|flags|violations|duplicate_of|merged_(?:into|to)"
        r"|(?:reject(?:ion)?|removal|deletion|flag|refusal|failure)_reason"
    ): _if_filled,
    r"(?:http_)?status(?:_code)?": _http_error,
    (
        r"(?:\w+_)?(?:score|rating|reward|advantage)|score_\w+|weights|\w+_weights?|pass_rate"
        r"|(?:rating|reward)_(?:of_)?(?:chosen|answer|response|output|completion)"
        r"|(?:\w+_)?(?:helpfulness|correctness)|stars|(?:up_?)?votes"
    ): _number,
    "label": _label,
    (
        r"(?:\w+_)?(?:status|state|verdict|decision|preference|feedback|quality|csat|satisfaction|outcome|result"
        r"|resolution|visibility)(?:_code)?|(?:message_|part_|comment_)(?:sub_?)?type|sub_?type|(?:re)?action|thumbs"
        r"|vote"
    ): _verdict,
    "(?:finish|stop)_?reason": _ended_early,
}
"""Columns that say of a conversation whether it is to be learnt -> the `filter` that keeps the good ones."""
HELD_OUT: Mapping[str, Keep] = {
    r"_?(?:(?:data_?set|data|ds)_)?(?:split|subset|set|partition|fold|phase)": _held_out,
    r"(?:is_)?(?:hold_?out|held_?out)|(?:is|in)_(?:test|validation|val|eval|dev)(?:_set|_split)?": _if_true,
    r"(?:is|in)_train(?:ing)?": _if_false,
    "answer": lambda column, value: f'{column} == "accept"' if value in ("reject", "ignore") else "",
}
"""Columns that say of any row whether it belongs to training -> the filter that keeps those that do."""
OF_ANOTHER = re.compile(
    r"(?:score|rating|reward)_(?:\w+_)?(?:rejected|loser)|(?:rejected|loser)_(?:\w+_)?(?:score|rating|reward)"
)
"""Columns that judge another answer than the one that is learnt."""


@functools.lru_cache(4096)
def keepers(column: str, chat: bool) -> tuple[Keep, ...]:
    """Return the rules for a column; `chat`: of a conversation, which may be judged."""
    rules, spelt = {**HELD_OUT, **(JUDGED if chat else {})}, in_snake_case(column.rpartition(".")[2])
    if OF_ANOTHER.fullmatch(spelt):
        return ()
    return tuple(keep for pattern, keep in rules.items() if re.fullmatch(pattern, spelt))


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
    heard = (_if_true, _if_false, _if_filled, _verdict, _ended_early, *((_held_out,) if column else ()))
    return next(filter(None, (keep(column or key, value) for keep in keepers(key, True) if keep in heard)), "")


# Marks in texts by which something happened to them before they came here. The texts are learnt, and the rows counted.


SPEAKER = "(?:user|human|customer|q|question|instruction)"
OTHER_SPEAKERS = (
    "benutzer|nutzer|kunde|frage|usuario|cliente|pregunta|utilisateur|client|utente|domanda|usuário|пользователь|вопрос"
    "|用户|问|ユーザー|사용자"
)
ASSISTANT = "assistant|ai|bot|gpt|chatgpt|agent"
ANSWERER = f"(?:{ASSISTANT}|a|answer|response|output)"
HTML = "texts with letters as HTML writes them (`&amp;`, `&#39;`)"
PLACES = "texts with places of pictures, sounds or files (`<image>`, `![](a.png)`)"
RESULTS = "answers with the results of tools, which are learnt (`Observation:`)"
ESCAPES = "texts with line ends or letters as escapes (`\\n`, `\\u00e9`)"
TEMPLATE = "texts with marks of a chat template or a tokenizer (`<|im_end|>`, `[/INST]`, `<s>`, `[SEP]`)"
TOKENS = "texts that were cut into tokens (`do n't`, `-LRB-`, `##ing`)"
TO_FILL = "texts with places that were to be filled, or were made unknown (`${name}`, `____`, `XXXX`)"
NONE = "texts that may stand for none, or for another (`N/A`, `None`, `-`, `see above`)"
CUT = "answers that end as if they were cut (`...`, a code block without its end)"
ECHO = "answers that begin with all of their question"
SWAPPED = "answers that end as questions do (`?`), to what does not"
AGAIN = "questions that their conversation has asked before, as when an answer was regenerated"
OF_PROGRAMS = "texts with another program's references (`【4†source】`)"
TURNS_IN_TEXT = "documents with turns in plain words (`User: ... Assistant: ...`), all of which are learnt"
Marks = Mapping[str, str]
"""A mark, as an expression -> what it says of a text; one that begins with a letter is found much faster."""
IN_TEXTS: Marks = {
    (
        r"&(?:amp|quot|apos|nbsp|lt|gt|[lr][sd]quo|[nm]dash|hellip|euro|[a-zA-Z](?:acute|grave|uml|circ|tilde|cedil)"
        r"|#\d+|#x[0-9a-fA-F]+);"
    ): HTML,
    "_x000[dD]_": "texts with line ends as Excel keeps them (`_x000D_`)",
    r"<\|\w+\|>": TEMPLATE,
    "</?s>": TEMPLATE,
    r"<(?:(?:start|end)_of_turn|[be]os|pad|unk|sep|fim_\w+|extra_id_\d+|</?SYS>)>": TEMPLATE,
    r"\[(?:/INST|SEP|CLS|PAD|UNK|MASK|/?TOOL_\w+|/?AVAILABLE_TOOLS|/?THINK)\]": TEMPLATE,
    "__eo[ut]__": TEMPLATE,
    r" (?:n't |@[-,.]@ |##\w|-[LR][RCS]B-|NEWLINE_CHAR|, [a-z][^\n]{0,200} [.!?](?:\s|\Z))": TOKENS,
    "<(?:(?:image|video|audio)>|img src=)": PLACES,
    r"!\[[^\]\n]*\]\(": PLACES,
    r"(?s:\A.{32767}\Z)": "texts with 32,767 characters, where Excel cuts a cell",
    r"data:\w+/\w+;base64,": "texts with files as letters (`base64`)",
    "[\x01-\x08\x0e-\x1f]": "texts with control characters, as terminals and damaged files have them",
    (
        r"=(?:[CDE][0-9A-F]=[89AB][0-9A-F]|(?<=[a-z ]=)\n[a-z]|20\n|\?[Uu][Tt][Ff]-8\?[BQ]\?)"
    ): "texts with letters and line ends as mail carries them (`=C3=A9`)",
    r"\$\{\w+\}": TO_FILL,
    r"%\(\w+\)s": TO_FILL,
    "XX(?:XX|/XX)": TO_FILL,
    r"\[\*\*": TO_FILL,
    "<<<<<<< ": "texts with both sides of a merge (`<<<<<<< HEAD`)",
    "BENCHMARK DATA SHOULD NEVER": "texts that say they must not be trained (`BENCHMARK DATA SHOULD NEVER`)",
    (r"\\(?:n(?:\\n|\d+[.)] |[-*] |[A-Z]|(?<=[.:]\\n)[a-z])|u[0-9a-fA-F]{4}|/\\?/|\.br\\|(?<=[a-z]\\)'[a-z])"): ESCAPES,
    r"<\\/": ESCAPES,
    "''(?<=[a-z]'')[a-z]": ESCAPES,
    r"\\x[0-9a-f]{2}": ESCAPES,
    r"-\n(?<=[a-z]{2}-\n)[a-z]{2}": "texts with words broken at line ends (`docu-`)",
    r"2\.(?<=[a-z]{2}2\.) [A-Z]": "texts whose line ends were lost (`First2. Second`)",
    r" (?<=\b[^\W\d_] ) ?(?:[^\W\d_] {1,2}){5}": "texts with blanks between letters (`T h e`)",
}
IN_WIDE_TEXTS: Marks = {
    (
        "Ã[\x80-\xbf‰–Ÿœ„€‡ˆ]|[ÂÐÑ][\x80-\xbf]|â€|ðŸ|[à-ï][\x80-\x9f\xa1-\xbf][\x80-\xbf]|[\x80-\x84\x86-\x9f]"
        "|(?:[РС][^\x00-\x7f]){4}|锟斤拷"
    ): "texts in UTF-8 that was read as another encoding (`Ã©`, `â€™`)",
    "\ufffd": "texts with letters that were lost (`\ufffd`)",
    r"【\d+[:†]": OF_PROGRAMS,
    (
        "[\ue000-\uf8ff\ufb00-\ufb06\u2028\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]"
    ): "texts with characters that nobody sees, or only one font or program has",
    r"<｜[^｜\n]+｜>|◁/?think▷": TEMPLATE,
    r"▁\w|\wĠ\w": TOKENS,
    "█{3}": TO_FILL,
}
"""Marks that are not ASCII."""
OF_QUESTIONS: Marks = {
    (
        rf"\n(?:(?:user|assistant)\n|\W{{0,5}}(?i:{ASSISTANT})\s*:\s*\S)"
    ): "questions with turns in plain words (`User: ... Assistant: ...`)",
    r"\A\W*[A-Z]?\d+(?:[.):]\s.*)?\Z": "questions that are a number, or begin with theirs (`1. `)",
}
ENDS_OF_ANSWERS: Marks = {
    r"(?:\.\.\.|…|\[(?:truncated|cut|continued|…)\])\s*\Z|\A(?s:.{100,})[.!?] [A-Z][^\n.!?]{20,}[a-z,]\Z": CUT
}
ENDS_OF_QUESTIONS: Marks = {
    r"(?:\n\n###\s*|\s->\s*)\Z": "questions that end with a separator, as older programs need (`###`, `->`)",
    rf"(?i:(?:\n|\A)\W*{ANSWERER}\s*:\s*\Z)": "questions that end with the name of who answers (`Assistant:`)",
    r"/(?:no_?)?think\s*\Z": "questions that end with a switch of a model (`/no_think`)",
    r"(?i:\n(?:n/?a|none|not applicable)\.?\Z)": "questions that end with a word for nothing (`N/A`)",
}
OF_ANSWERS: Marks = {
    (
        rf"\n[#*> <]{{0,5}}(?i:{SPEAKER}|{OTHER_SPEAKERS})>?\s*(?::\s|：)"
    ): "answers with further turns in plain words (`User: ...`)",
    (
        r"\n(?:On [^\n]{5,80} wrote:|Am [^\n]{5,80} schrieb |Le [^\n]{5,80} a écrit|El [^\n]{5,80} escribió:"
        r"|Il [^\n]{5,80} ha scritto:|Em [^\n]{5,80} escreveu:|Op [^\n]{5,80} schreef "
        r"|-+ ?(?:Original Message|Ursprüngliche Nachricht|Mensaje original|Message d'origine|Messaggio originale)"
        r"|(?:From|Von|De|Da): [^\n]+\n(?:Sent|Date|Gesendet|Envoyé|Betreff|Enviado|Inviato): "
        r"|>[^\n]*(?:\n>[^\n]*)+\s*\Z)"
    ): "answers with the mail that they answer (`On ... wrote:`)",
    (
        r"\n(?:Copy code|Regenerate(?: response)?|\d+ ?/ ?\d+|Sent from my \w+|Von meinem \w+ gesendet|-- ?"
        r"|Get Outlook for \w+|Enviado desde [^\n]+|Envoyé de(?:puis)? [^\n]+|Inviato da[^\n]+|(?:Read|See|Show) more"
        r"|Was this [^\n]{3,40}\?[^\n]*|This (?:e-?mail|message) [^\n]*(?:confidential|intended)[^\n]*)\s*(?:\n|\Z)"
        r"|\n\s*2[\t|:][^\n]*\n\s*3[\t|:]"
    ): "answers with words of the page or program that they come from (`Copy code`, `Sent from my iPhone`)",
    (
        rf"\A(?:[#*> \n]{{0,5}}(?i:{ASSISTANT}|answer|response)\s*:\**\s|(?:assistant|model)\n"
        r"|(?:ChatGPT|Claude|Gemini|Copilot) (?:said|responded):)"
    ): "answers that begin with who answers (`Assistant:`)",
    "_____": TO_FILL,
    r"\A[^\S\n]": "answers that begin with a blank, as older programs need",
    r"\n(?:Observation|FUNCTION RESPONSE): ": RESULTS,
    r"```(?:output|stdout)\n": RESULTS,
    (
        r"\A(?:I['’]m (?:sorry, but|unable)|Sorry, but|I (?:cannot|can['’]t) (?:help|assist|provide|answer)|As an AI\b)"
    ): "answers that refuse, or speak of themselves (`I'm sorry, but`, `As an AI`)",
    (
        r"\A(?:Error code: \d|Internal Server Error|Bad Gateway|Service Unavailable|Request (?:failed|timed out)"
        r"|Rate limit|\{[\"']error[\"']:|Traceback \(most)"
    ): "answers that are an error (`Error code: 429`)",
    (
        r"\A(?:\s*<(?:think>(?!(?s:.*)</think>)|(?:thinking|thoughts?|reasoning|scratchpad)>)"
        r"|(?!\s*<think>)(?s:.*)</think>)"
    ): "answers whose thought never ends, never begins, or is in other marks (`<thinking>`)",
}
WHOLE_TEXTS: Marks = {
    (
        r'\A\s*\[?\s*\{\s*"(?:messages|id|choices|candidates|(?:in|out)puts?|question|query|answer|response|text'
        r'|content|result|type|role|parts|aliases|generated_text|value)":|\A\s*\["[^\n]*"\]\s*\Z'
    ): 'texts that are an object as JSON, as traces of programs have them (`{"output": ...}`)',
    (
        r"\A(?:https?://\S+|(?!\w+:)\S+%[0-9A-F]{2}\S+|[\w\\/:.-]+\.(?:pdf|docx?|xlsx?|pptx?|txt)|[A-Z]{1,6}-?\d{3,}"
        r"|\w+(?:\+\w+){3,}|[0-9a-f]{32,64}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
        r"|=[A-Z]+\([^\n]*\)|\d\d?-(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)|\d+\.0"
        r"|(?=\D*\d)(?=[^a-z]*[a-z])(?=[^A-Z]*[A-Z])[A-Za-z0-9+/\n]{40,}={0,2}"
        r"|\d\.\d+E\+\d+)\s*\Z"
    ): "texts as addresses, base64, hashes or spreadsheets write them (`%20`, `SGVsbG8=`, `1.2E+15`, `2-Jan`)",
    r"\A\s*(?:[“„«][^“„«”»]*[”“»]|\"(?:[^\"\\\n]|\\.)*\")\s*\Z": "texts within quotation marks (`“a”`)",
    r"\A\s*(?:<(?:p|div|span|br|table|ul)\b[^>]*>|\{\\rtf)": "texts in HTML or RTF (`<p>`)",
    (
        r"\A(?:b?'[^\n]*'|\[[('][^\n]*[)']\]|\[?\{'[^\n]*\}\]?|(?:array|tensor|Timestamp|Decimal)\([^\n]*\)"
        r"|\[?[A-Z]\w+\(\w+=[^\n]*\)\]?|content='[^\n]*|<[\w. ]+ at 0x\w+>)\Z"
    ): "texts in Python's notation (`['a']`, `b'a'`)",
    (
        r"(?i:\A\W*(?:same as [^\n]{1,30}|ditto|dito|idem|(?:see|as) (?:above|below|(?:previous|attach|row)[\w ]{0,24})"
        r"|siehe (?:oben|anhang)|test|asdf\w*|lorem ipsum [^\n]+|(?:todo|fixme|tbd|wip)\b[^\n]+|\w+ omitted"
        r"|missed \w+ call"
        r"|(?:you deleted )?this message(?: (?:was|has been) deleted)?|diese nachricht wurde gelöscht"
        r"|[^\n]{1,40} (?:joined|left) the (?:chat|channel|group|conversation)|this (?:chat|conversation|ticket) (?:was"
        r"|has been) [^\n]{3,40})\W*\Z)"
    ): NONE,
    (
        r"(?i:\A\s*(?:n/?a\.?|n\. ?a\.|none|null|nil|undefined|[-–—_.?*…]+|-1|to ?do|tbd|xxx+|[(\[<]\w{4,7}[)\]>]"
        r"|placeholder|no answer)\s*\Z)"
    ): NONE,
}
"""Of questions and answers."""
DOCUMENTS: Marks = {
    (
        r'\A\s*(?:\{"|- )(?:prompt|instruction|question|messages|conversations|text)"?: ?\S'
    ): "documents that are rows as JSON or YAML",
    (
        r"\A(?:#[^\n]*\n)*(?:(?:[^\n\t]+(?:\t[^\n\t]*)+(?:\n|\Z)){2}|\w+(?:[,;]\w+)+\n)"
    ): "documents that are tables (`a,b,c`), which are read as rows with the ending `.csv` or `.tsv`",
    r"\d\d[,.]\d{3} --> \d\d:\d": "documents with the times of subtitles (`00:01,000 --> 00:04,000`)",
    (
        r"(?m:^(?:\\documentclass\b|diff --git |@@ -\d|\*\*\* START OF |\S+ [A-Z]{2,4} (?:\S+ )?[BI]-[A-Z]+$))"
    ): "documents with the marks of a program or a publisher (LaTeX, `diff`, the head of a book)",
    r"\A---\n\w+:": "documents that begin with front matter (`---`), which is learnt",
    (
        r"\[\[[A-Z][^\]\n|]*\|[^\]\n]+\]\]|\{\{(?:cite|Infobox) "
    ): "documents with the marks of a wiki (`[[Paris|the city]]`)",
    r"\(cid:\d+\)": "documents that a reader of PDF could not decode (`(cid:72)`)",
    (
        rf"(?is:(?:\A|[\n.#])[#*> \n]{{0,5}}{SPEAKER}\s*:.*?[\s#*]{ANSWERER}\s*:)"
        r"|\A\[?\d{1,4}[-./]\d{1,2}[-./]\d{2,4},? \d\d?:\d\d[^\n]{0,12}?[-\]] [^\n:]{1,40}: "
    ): TURNS_IN_TEXT,
}
TAIL, HEAD, LEAST_ASKED, MOST_LETTERS = 300, 2000, 10, 30
"""Characters of a turn's end, and of a document's beginning, that are looked at; of a question that an answer does not
begin with by chance; and of a mark that are shown.
"""


def doubts_in(content: str | Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what the marks in a document, or in the questions and answers of a conversation, say."""
    if isinstance(content, str):
        begins = (*_marks_in(content[:HEAD], DOCUMENTS), *_marks_in(content, WHOLE_TEXTS))
        return sorted({*_marks_in(content), *begins})
    doubts: set[str] = set()
    asked, before = "", set[str]()
    for turn in content:
        text = turn["content"]
        if turn["role"] == "user":
            asked = text.strip()
            doubts |= {AGAIN} if asked in before else set()
            before.add(asked)
            doubts.update(_marks_in(text[-TAIL:], ENDS_OF_QUESTIONS), _marks_in(text, OF_QUESTIONS))
        elif turn["role"] == "assistant" and turn.get("train") is not False:
            doubts.update(_marks_in(text[-TAIL:], ENDS_OF_ANSWERS), _marks_in(text, OF_ANSWERS))
            echo = text.strip() == asked or (len(asked) >= LEAST_ASKED and text.strip().startswith(asked))
            doubts |= {ECHO} if echo else set()
            doubts |= {SWAPPED} if asked[-1:] in (".", "!", "。") and text.rstrip()[-1:] in ("?", "？") else set()
            doubts |= {CUT} if text.count("```") % 2 else set()
        else:
            continue
        doubts.update(_marks_in(text), _marks_in(text, WHOLE_TEXTS))
    return sorted(doubts)


SHAPES = tuple(
    map(
        re.compile,
        (
            r"<<?[|@#:!&]*[^\W\d][^<>\n]{0,60}>{1,2}",
            r"\[(?<=[a-z.]\[)\^?\d+\](?![(\w])",
            r"\[(?<![\w\])\\]\[)\w+: ?[^\[\]\n]{1,60}\]",
            r"\[(?<![\w\])\\]\[)\[?(?:[\d:.]+|[^\[\]\n,]{0,12}[^\W\d_][^\[\]\n,]{0,12})\]{1,2}(?!\()",
            r"\{(?<![\w\\^_}$]\{)\{?%? ?[^\W\d][\w .|:]{0,23}%?\}{1,2}",
            r":(?<![\w:]:)[a-zA-Z_+]\w{1,20}(?::(?![\w:])|\[)",
            r"(?m:^)\d\d?:\d\d\b",
            "%[A-Z_]{3,20}%",
            r"[A-Z](?<!\w[A-Z])[A-Z]{2,}(?:(?::| -)(?=\s)|_\d+\b)",
            r"\([^\W\d][^()\n]{0,23}\)\s*\Z",
            r"(?m:^)[ \t#*>(\[|-]{0,6}[^\W\da-z][\w -]{0,19}(?: \([^()\n]{1,20}\))?[|\]*)]{0,3}(?:：|:(?=\s|\Z))",
        ),
    )
)
"""What looks like a mark, of whatever program: tags, brackets, fields, emoji, times, what a line begins with.

Most begin with a character instead of an assertion, which makes them ten times as fast.
"""
CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)


def shapes_in(content: str | Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Return what looks like a mark in the beginnings and ends of a document, or of questions and answers, outside
    code, with 0 for each number.
    """
    turns = [{"role": "user", "content": content}] if isinstance(content, str) else content
    marks: set[str] = set()
    for turn in turns:
        if turn["role"] == "user" or (turn["role"] == "assistant" and turn.get("train") is not False):
            text = turn["content"]
            seen = CODE.sub("`", text if len(text) <= HEAD else f"{text[:HEAD]}\n{text[-TAIL:]}")
            marks.update(mark.lstrip("#*>-\t ") for shape in SHAPES for mark in shape.findall(seen))
    return frozenset(re.sub(r"\d+", "0", " ".join(mark.split()))[:MOST_LETTERS] for mark in marks)


def _marks_in(text: str, marks: Marks = IN_TEXTS) -> list[str]:
    also = IN_WIDE_TEXTS.items() if marks is IN_TEXTS and not text.isascii() else ()
    return [meaning for mark, meaning in (*marks.items(), *also) if _searcher(mark)(text)]


@functools.cache
def _searcher(mark: str) -> Callable[[str], Any]:
    return re.compile(mark).search
