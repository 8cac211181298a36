"""The turns of a conversation as files write them, made uniform: roles, text, tool calls, what is not learnt.

A turn comes out as chat templates take it: `role` and `content`, and where given `train`, `tool_calls`, `tool_call_id`,
`name` and `reasoning_content`. Arguments of tool calls are mappings, as the templates of models expect them, and never
JSON in a string.
"""

from __future__ import annotations

import ctypes
import functools
import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from sft_play.config.data_rules import MISSING, look_up
from sft_play.config.reader import kind_of, names_of
from sft_play.config.yaml_files import scalar_text
from sft_play.data import Message
from sft_play.data.judged import speaks_against
from sft_play.data.readers import LEAVE_OUT, parse_json
from sft_play.data.tools import TOOL_NAMES, tool_calls, tools_of
from sft_play.data.values import (
    ANSWERS,
    ASKS,
    SHOWN,
    SPEAKERS,
    in_snake_case,
    is_blank,
    is_list,
    lacks,
    leaves,
    list_of,
    looks_like_media,
    not_read,
    refuse_media,
    refuse_none,
    text_key,
    text_of,
)
from sft_play.errors import DataError

ROLES = ("system", "user", "assistant", "tool")
CALLS = "calls"
"""Stands for the roles whose words are calls of tools, as JSON."""
ROLE_NAMES: Mapping[str, str] = {
    **{role: role for role in ROLES},
    "developer": "system",
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "model", "chatgpt", "bing", "bard"), "assistant"),
    **dict.fromkeys(("function", "ipython", "observation", "function_response", "function_result"), "tool"),
    **dict.fromkeys(("tool_response", "tool_result", "tool_output"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), CALLS),
}
"""Names that data sets give to roles."""


def role_of(sender: Any) -> str | None:
    """Return the role that a name stands for, however it is spelt (`Tool-Response`)."""
    return ROLE_NAMES.get(in_snake_case(str(sender).lower()))


FOLLOWERS: Mapping[str | None, tuple[str, ...]] = {
    None: ("system", "user", "assistant"),
    "system": ("user", "assistant"),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
"""Role -> the roles that may come next; `None` begins."""
WORDS = ("content", "value", "text", "body", "message", "utterance", "parts")
"""Keys of a turn in data sets; those after the first two are for hints."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names under which data sets keep what was thought before an answer."""
PARTS_BY_NAME: Mapping[str, str] = {
    "a thought": (
        "(?:think|thinking|thoughts?|reasoning)(?:_?(?:content|text|details|steps|trace|process|chain))?"
        r"|chain_?of_?thoughts?|(?:\w+_)?cot|rationales?|scratchpad"
    ),
    "a system turn": "sys(?:tem)?(?:_?(?:prompt|message|msg|instructions?|role|text|content))?|preamble",
    "a part of the prompt": (
        "instructions?|inputs?|contexts?|passages?|articles?|paragraphs?|background|story|premise|hypothesis|documents"
        "|docs|ctxs?|chunks|snippets|search_results|tables?|transcripts?|dialogues?|starter_code|old_(?:code|contents?)"
        "|body|selftext|response_format|(?:chat_|conversation_)?history|question|prompt|\\w+_contexts?|retrieved_\\w+"
        "|evidences?|knowledge|support(?:ing_(?:facts|text))?|facts|personas?|few_shots?(?:_\\w+)?|(?:\\w+_)?schema"
    ),
    "a correction": (
        "(?:edited|corrected|revised|improved|fixed|rewritten)_?"
        "(?:answer|response|completion|output|text|content|value|message)|corrected|correction"
    ),
    "what follows the answer": "suffix",
    "a choice": "choices|options|(?:option|choice)_?[1-5]|(?:option|choice|op)_?[a-e]|(?-i:[A-E])",
}
"""What a column is by its name, if the answer follows from it; also those that are read."""
READ = frozenset({*SPEAKERS[:2], *WORDS[:2], *REASONING, "name", "tool_calls", "tool_call_id", "function_call"})
MASKS = ("train", "weight", "loss", "trainable", "is_trainable", "training", "loss_mask")
"""Names under which tools say of a turn whether it is learnt: true or 1, false or 0; `weight` may be between."""
WEIGHT = "weight"
"""How much the learnt tokens of a row, or of a turn, count."""
LIKE_A_MASK = re.compile(
    r"(?:^|_)(?:train\w*|loss|mask(?:ed)?|learn\w*|supervise[ds]?|weights?|labels?|ignored?|skip|exclude[ds]?)(?:$|_)"
)
MARKS_WHAT_IS_NOT_LEARNT = re.compile(
    r"(?:^|_)(?:mask(?:ed)?|ignored?|skip|exclude[ds]?|no|not|prompt|input|pad|rejected|deleted|incorrect|wrong|bad"
    "|down)(?:$|_)"
)
"""Of names of masks: those that most likely are 1 or true where nothing is learnt."""
JUDGES = ("rating", "score", "reward", "feedback")
"""Keys of an answer that say how good it is."""
OF_ANSWERS = ("tool_calls", "function_call", *REASONING)
"""Keys of a turn that only an answer has."""
CALL_NAMES = ("function_calls", "tool_call", "toolCalls", "calls")
"""Keys that are not read, though they look like `tool_calls`."""
TIME = re.compile(
    "(?:created?|sent|updated|posted)_?(?:at|on|time|date|utc)|(?:date_?)?time(?:stamp)?(?:_ms)?|ts|date"
    "|(?:(?:turn|message|utterance)_)?(?:index|idx|order|position|sequence|number|no)|turn(?:_id)?|seq|step"
)
PARENT = re.compile(r"(?:\w+_)?(?:parent|reply_to)(?:_\w+)?")
DATE, NUMBER = re.compile(r"\d{4}-\d\d"), re.compile(r"-?\d+(?:\.\d+)?")
"""When a turn was written: the key, a date that is ordered by its letters, and a number; what names the turn before."""
TEXT_PARTS = ("text", "input_text", "output_text")


def chat_turns(value: Any, name: str) -> list[Message]:
    """Return turns, `role` and `content` or ShareGPT's `from` and `value`, in the common form. Raise `DataError`.

    Calls that follow the answer they belong to, or one another, become one turn, as chat templates take them.
    """
    turns: list[Message] = []
    messages = list_of(value, name)
    if (out := out_of_order(messages)) and out[1]:
        raise DataError(f"`{name}` begins with its newest turn, by `{out[0]}`", hint="reverse the order of the turns")
    for index, message in enumerate(messages):
        turn, calls_only = _chat_turn(message, f"{name}[{index}]", messages)
        before = turns[-1] if turns else {}
        if turn["role"] == "system" and not turn["content"].strip() and "tools" not in turn:
            continue
        if calls_only and before.get("role") == "assistant" and "train" not in turn and "train" not in before:
            before["tool_calls"] = [*before.get("tool_calls", []), *turn["tool_calls"]]
        else:
            turns.append(turn)
    return turns


def turns_by_key(value: Any) -> Any:
    """Return turns that are one list for each key, as Arrow's `Sequence` stores them, as a list of turns; another value
    as it is.
    """
    if not (isinstance(value, Mapping) and any(key in value for key in SPEAKERS[:2])):
        return value
    if not all(map(is_list, value.values())) or len({*map(len, value.values())}) != 1:
        return value
    return [dict(zip(value, turn, strict=True)) for turn in zip(*value.values(), strict=True)]


def way_to_turns(listed: Sequence[Any], column: str = "COLUMN") -> str:
    """Return a command that makes turns of texts, or of pairs of question and answer; empty for other lists."""
    turn = "{role: %s, content: .%s}"
    if len(listed) > 1 and all(isinstance(text, str) for text in listed) and " " in "".join(listed):
        each = "to_entries[] | " + turn % ('["user", "assistant"][.key % 2]', "value")
        what = "texts whose speakers alternate"
    elif listed and isinstance(listed[0], Mapping):
        first = [key for key in listed[0] if role_of(key) == "user" or key.lower() in (*ASKS, "q")]
        then = [key for key in listed[0] if role_of(key) == "assistant" or key.lower() in (*ANSWERS, "a")]
        if not (len(first) == len(then) == 1) or first == then:
            return ""
        each = ".[] | " + turn % ('"user"', first[0]) + ", " + turn % ('"assistant"', then[0])
        what = "pairs"
    else:
        return ""
    return f"of {what}, `jq -c '{{messages: [.{column} | {each}]}}' OLD > NEW.jsonl` makes turns"


def out_of_order(turns: Sequence[Any]) -> tuple[str, bool] | None:
    """Return the key by which turns are not in the order of their times or numbers, and whether they run backwards, as
    many services list them.
    """
    for key in turns[0] if turns and all(isinstance(turn, Mapping) for turn in turns) else ():
        times = [_time(turn.get(key)) for turn in turns] if TIME.fullmatch(in_snake_case(key)) else []
        if len({*map(type, times)}) == 1 and None not in times and any(first > then for first, then in pairwise(times)):
            return key, all(first >= then for first, then in pairwise(times))
    return None


def branches(turns: Sequence[Any]) -> bool:
    """Return whether a turn names another parent than the turn before it, as exports of edited chats have them."""
    earlier: set[str] = set()
    for before, turn in pairwise(turns):
        parents = {str(turn[key]) for key in turn if turn[key] and PARENT.fullmatch(in_snake_case(key))}
        if parents & earlier.difference(names := {*map(str, before.values())}):
            return True
        earlier |= names
    return False


def _time(value: Any) -> Any:
    """Return a number, or a date as text that is ordered by its letters; `None` for another value."""
    text = re.sub(r"\A(\d\d)\.(\d\d)\.(\d{4})", r"\3-\2-\1", str(value))
    return text if DATE.match(text) else float(text) if NUMBER.fullmatch(text) else None


def _chat_turn(message: Any, name: str, all_turns: Sequence[Any]) -> tuple[Message, bool]:
    """Return a turn in the common form, and whether its role marks it as calls. Raise `DataError`."""
    column = name.partition("[")[0]
    if not isinstance(message, Mapping):
        raise DataError(
            f"`{name}` is {kind_of(message)}; expected a mapping with `role` and `content`",
            hint=way_to_turns(all_turns) or None,
        )
    speaker = next((key for key in SPEAKERS[:2] if message.get(key) is not None), None)
    words = next((key for key in WORDS[:2] if key in message), "content")
    content = message.get(words)
    if speaker is None:
        raise _no_turn(message, name, all_turns)
    sender = message[speaker]
    if (role := role_of(sender)) is None:
        hint = f"roles are {', '.join(ROLES)}; others by their names: {other_names(column, all_turns)}"
        raise DataError(f"`{name}.{speaker}` is `{sender}`", hint=hint)
    if role == CALLS:
        calls = parse_json(text_of(content, f"{name}.{words}"), f"{name}.{words}")
        message = {**message, words: None, "tool_calls": [calls] if isinstance(calls, dict) else calls}
    return _turn(message, name, "assistant" if role == CALLS else role, words), role == CALLS


def _no_turn(message: Mapping[str, Any], name: str, all_turns: Sequence[Any]) -> DataError:
    names = other_names(name.partition("[")[0], all_turns)
    return DataError(
        f"`{name}` lacks `role` or `content`; it has {names_of(message)}",
        hint=way_to_turns(all_turns) or (f"other names: {names}" if names else None),
    )


def _turn(message: Mapping[str, Any], name: str, role: str, words: str) -> Message:
    calls = tool_calls(message, name) if role == "assistant" else []
    content = message.get(words)
    if content is None and not calls:
        if words not in message:
            raise _no_turn(message, name, [message])
        raise DataError(f"`{name}.{words}` is empty; expected text", hint=LEAVE_OUT)
    others = {key: value for key, value in message.items() if key not in READ and value is not None}
    refuse_media(others, name)
    if role != "assistant":
        _refuse_answers_keys(message, name, role)
    other = WORDS[1] if words == WORDS[0] else WORDS[0]
    if not is_blank(message.get(other)) and message[other] != content:
        raise DataError(f"`{name}` has two texts that differ: {names_of((words, other))}", hint="keep one of them")
    turn: Message = {"role": role, "content": "" if content is None else content_of(content, f"{name}.{words}")}
    if role in ("user", "assistant"):
        refuse_none(turn["content"], f"{name}.{words}")
    if (train := _learnt_share(others, name, role)) is not None:
        turn["train"] = train
    if calls:
        turn["tool_calls"] = calls
    thoughts = {key: message[key] for key in REASONING if role == "assistant" and not is_blank(message.get(key))}
    if len(set(map(str, thoughts.values()))) > 1:
        raise DataError(f"`{name}` has two different thoughts: {names_of(thoughts)}")
    _refuse_parts(others, [turn["content"], *map(str, thoughts.values())], name, role)
    columns = {"name": "name", "tool_call_id": "tool_call_id", "reasoning_content": next(iter(thoughts), "")}
    turn |= {
        key: text_of(message[old], f"{name}.{old}") for key, old in columns.items() if message.get(old) is not None
    }
    described = [key for key in others if key in TOOL_NAMES and not is_blank(others[key])]
    if described and role == "system":
        turn["tools"] = tools_of(message, f"{name}.")
    elif described:
        raise DataError(
            f"`{name}.{described[0]}` describes tools for one turn; a template writes them once",
            hint="keep them in the row's `tools`, or in the system turn",
        )
    if role == "assistant" and not turn["content"].strip() and not calls and turn.get("train") is not False:
        raise DataError(f"`{name}.{words}` is empty, so there is nothing to learn", hint=LEAVE_OUT)
    return turn


def _refuse_answers_keys(message: Mapping[str, Any], name: str, role: str) -> None:
    for key in OF_ANSWERS:
        if not is_blank(message.get(key)) and message[key] != {}:
            raise not_read(f"{name}.{key}", f"belongs to an answer, but the turn's role is {role}", "correct the role")


def _refuse_parts(others: Mapping[str, Any], texts: Sequence[str], name: str, role: str) -> None:
    """Raise `DataError` for a key by whose name the answer follows from it, and whose text is not in the turn's."""
    column = name.partition("[")[0]
    for key, value in others.items() if role != "tool" else ():
        what = part_by_name(key)
        belongs = (what in ("a thought", "a correction")) == (role == "assistant")
        if what and belongs and key not in TOOL_NAMES and not is_blank(value) and lacks(value, texts):
            can_be_read = what == "a thought" and isinstance(value, str)
            way = (
                f"`columns: {scalar_text({f'{column}.reasoning_content': key})}` reads it"
                if can_be_read
                else "write it into the text"
            )
            raise not_read(f"{name}.{key}", f"seems to be {what}, and is not read", way)


def other_names(column: str, turns: Sequence[Any], new: str = "") -> str:
    """Return, for a hint, the `columns` that name a column's turns, keys and roles as formats do; nothing if these
    names are read.
    """
    new = new or column
    first: Mapping[str, Any] = next((turn for turn in turns if isinstance(turn, Mapping)), {})
    named = ((*SPEAKERS, "type"), WORDS)
    speaker, words = (next((key for key in keys if key in first), "NAME") for keys in named)
    entries = {} if new == column else {new: column}
    if not (speaker in SPEAKERS[:2] and words in WORDS[:2]):
        entries |= {f"{new}.{key}": old for key, old in (("role", speaker), ("content", words)) if key != old}
        role_key = "role"
    else:
        role_key = speaker
    if isinstance(first.get(speaker), Mapping):  # `author: {"id": "U1", "name": "Ann"}`
        inner = next((key for key in ("role", "type", "name", "id") if key in first[speaker]), "NAME")
        entries |= {f"{new}.role": (speaker := f"{speaker}.{inner}")}
    roles: dict[str, str] = {}
    before = None
    for sender in (look_up(turn, speaker) for turn in turns if isinstance(turn, Mapping)):
        role = roles.get(str(sender)) or role_of(sender)
        answers = role == "system" and before == "user"  # in dialogues with a service
        if sender is not MISSING and (role is None or answers):
            role = roles[str(sender)] = "assistant" if before == "user" else "user"
        before = role
    for role in roles.values():
        entries[f"{new}.{role_key}.{role}"] = "|".join(sender for sender, theirs in roles.items() if theirs == role)
    return f"`columns: {scalar_text(entries)}`" if entries else ""


@functools.lru_cache(4096)
def looks_like_a_mask(key: str) -> bool:
    """Return whether a key or column is named as if it said what is learnt."""
    return "." not in key and LIKE_A_MASK.search(in_snake_case(key)) is not None


@functools.lru_cache(4096)
def marks_what_is_not_learnt(key: str) -> bool:
    """Return whether a mask is named as if it were 1 where nothing is learnt: its opposite must not be taken for it."""
    return key not in MASKS and MARKS_WHAT_IS_NOT_LEARNT.search(key.lower()) is not None


def weight_of(value: Any, name: str) -> float:
    """Return a weight, from 0 to 1; tables may hold it as text. Raise `DataError`."""
    try:
        weight = float(value)
    except (TypeError, ValueError, OverflowError):
        weight = math.nan
    if not 0 <= weight <= 1:
        shown = f"`{str(value)[:SHOWN]}`" if isinstance(value, (str, int, float)) else kind_of(value)
        raise not_read(
            name,
            f"is {shown}; expected a number from 0 to 1",
            "0 is not learnt, 1 counts in full; divide larger weights by the largest, since only ratios count",
        )
    return counted(weight)


def counted(weight: float) -> float:
    """Return a weight, or 0 for one so small that it is 0 in fp32, which training computes in."""
    return weight if ctypes.c_float(weight).value else 0.0


def _learnt_share(others: Mapping[str, Any], name: str, role: str) -> bool | float | None:
    """Return what a turn's other keys say under any name of `MASKS`, `None` if they say nothing. Raise
    `DataError`.
    """
    column = name.partition("[")[0]
    flags: dict[str, bool | float] = {}
    for key, value in others.items():
        if key == WEIGHT:
            weight = weight_of(value, f"{name}.{key}")
            flags[key] = weight if 0 < weight < 1 else bool(weight)
        elif key in MASKS:
            if not isinstance(value, (bool, int, float)):
                raise DataError(f"`{name}.{key}` is {kind_of(value)}; expected true or false")
            if value not in (0, 1):
                hint = "0 excludes the turn from training, 1 trains it; write a value between as `weight`"
                raise DataError(f"`{name}.{key}` is `{value}`", hint=hint)
            flags[key] = bool(value)
        elif looks_like_a_mask(key) or (role == "assistant" and key.lower() in JUDGES):
            read = "train" if isinstance(value, bool) else WEIGHT
            way = f"where 1 or true means that the turn is learnt, `columns: {scalar_text({f'{column}.{read}': key})}`"
            if marks_what_is_not_learnt(key):
                way = "where it marks what is not learnt, write `train: false` into those turns"
            problem = "seems to mark which part of the turn is learnt, and is not read"
            raise not_read(f"{name}.{key}", problem, way if isinstance(value, (bool, int, float)) else "")
        elif role != "tool" and any(speaks_against(*leaf) for leaf in ((key, value), *leaves(value, key))):
            problem = "seems to say that the turn is no good, and is not read"
            raise not_read(f"{name}.{key}", problem, "leave such rows out (an answer: `train: false`)")
        elif key.rpartition(".")[2] in (*CALL_NAMES, "tool_calls") and role == "assistant" and not is_blank(value):
            way = f"`columns: {scalar_text({f'{column}.tool_calls': key})}` reads them"
            raise not_read(f"{name}.{key}", "seems to contain tool calls, and is not read", way)
    if role != "assistant" and flags.get(WEIGHT) is True:
        del flags[WEIGHT]  # what OpenAI's files have where nothing is said; only answers are weighed there
    if len(set(map(bool, flags.values()))) > 1:
        raise DataError(f"`{name}` is marked both as learnt and as not learnt: {names_of(flags)}")
    return flags.get(WEIGHT, next(iter(flags.values()), None))


def content_of(content: Any, name: str) -> str:
    """Return the text of a turn: text, or a list of text parts, which are put together. Raise `DataError`."""
    if isinstance(content, str) and PARTS_IN_TEXT.match(content):
        content = list_of(content, name, "parts")
    if not is_list(content):
        return text_of(content, name)
    if len(content) > 1 and all(isinstance(part, str) for part in content):
        raise DataError(f"`{name}` is a list of texts", hint="write one text, or parts: `{type: text, text: ...}`")
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, Mapping) and part.get("type", "text") not in TEXT_PARTS:
            raise DataError(f"`{name}[{index}]` is a part of type `{part.get('type')}`; only text is trained")
        if lost := [key for key, value in part.items() if _matters(key, value)] if isinstance(part, Mapping) else ():
            raise DataError(f"`{name}[{index}].{lost[0]}` is not read: a part is only text")
        texts.append(text_of(part.get("text") if isinstance(part, Mapping) else part, f"{name}[{index}].text"))
    return "".join(texts)


def _matters(key: str, value: Any) -> bool:
    """Return whether a key next to a part's text says that it is more than text, not learnt, or a thought."""
    named = looks_like_media(key) or looks_like_a_mask(key) or key == "thought" or re.fullmatch(DATA_OF_A_PART, key)
    return bool(named) and not is_blank(value) and not (value is False and key == "thought")


DATA_OF_A_PART = "(?:inline|file)_?[dD]ata|(?:function|tool)_?(?:[cC]alls?|[rR]esponses?)"
PARTS_IN_TEXT = re.compile(
    r"""\s*\[\s*\{\s*"type"\s*:\s*"(?:(?:input_|output_)?text|image(?:_url)?|tool_use|tool_result|thinking)"\s*,"""
)
"""How a text begins that is a list of parts as JSON."""


def end_at_answer(turns: list[Message]) -> list[Message]:
    """Return the turns up to the last answer, in an order that a conversation can have. Raise `DataError`."""
    before: str | None = None
    for index, turn in enumerate(turns):
        role = turn["role"]
        if role not in FOLLOWERS[before]:
            order = ", ".join(t["role"] for t in turns[: index + 3]) + (", ..." if len(turns) > index + 3 else "")
            after = f"after {before}" if before else "at the start"
            way = "join the two turns of one role, or omit one"
            if index and turns[index - 1].get("tool_calls"):
                way = f"the result (a `tool` turn) of the call in turn {index} is missing"
            hint = f"{after} comes {' or '.join(FOLLOWERS[before])}; {way}"
            raise DataError(
                f"the roles are out of order: {role} {after} (turn {index + 1}); expected {order}", hint=hint
            )
        before = role
        if role == "user" and not turn["content"].strip():
            raise DataError(f"the user's turn {index + 1} is empty", hint=LEAVE_OUT)
    if not any(turn["role"] == "assistant" for turn in turns):
        raise DataError(
            "the row has no assistant message, so there is nothing to learn",
            hint="`columns: {prompt: messages, completion: NAME}` reads the answer from another column",
        )
    while turns[-1]["role"] != "assistant":  # what follows the last answer is never seen
        turns.pop()
    return turns


@functools.lru_cache(4096)
def part_by_name(column: str) -> str:
    """Return what a column is by its name, if the answer follows from it, else nothing."""
    column = column.rpartition(".")[2]
    spelt = (column, in_snake_case(column))
    return next((w for w, names in PARTS_BY_NAME.items() for n in spelt if re.fullmatch(names, n, re.IGNORECASE)), "")


def refuse_unwritten(row: Mapping[str, Any], read: Sequence[str], messages: Sequence[Message]) -> None:
    """Raise `DataError` for a column by whose name the answer follows from it, and whose text is in no turn.

    `read` are the columns of the row's format.
    """
    last = messages[-1]["content"].strip().lower()
    for name, value in row.items():
        named = last in [*"abcde"] and in_snake_case(name).rpartition("_")[2] == last  # `B` and `choice_b` for B
        what = part_by_name(name) or ("a choice" if named else "")
        if not what or name in read or is_blank(value) or (what == "a thought" and isinstance(value, Mapping)):
            continue
        rendered = all(isinstance(text, str) for text in (value, row[read[0]])) and row[read[0]].strip() in value
        texts = [text for turn in messages for text in (turn["content"], turn.get("reasoning_content", ""))]
        if rendered or not lacks(value, texts):  # the question in a template, or what the turns contain
            continue
        columns: dict[str, str] = {}
        texts_alone = all(isinstance(row[column], str) for column in (name, *read))
        if what == "a system turn" and (isinstance(value, str) or text_key(value)):
            columns = {"system": f"{name}{text_key(value)}"}
        elif what == "a thought" and len(read) > 1 and isinstance(value, str):
            columns = {"reasoning_content": name}
        elif what == "a part of the prompt" and len(read) > 1 and texts_alone:
            parts = (name, read[0]) if name.lower().startswith("instruction") else (read[0], name)
            columns = dict(zip(("instruction", "input", "output"), (*parts, read[-1]), strict=True))
        columns = {new: old for new, old in columns.items() if new != old}
        reads = f"`columns: {scalar_text(columns)}` reads it" if columns else "write it into a turn"
        raise not_read(name, f"seems to be {what}, and is not read: its text is in no turn", reads)
