"""What readers give: a training example, read and not yet in tokens; its values in words; and what was skipped, and why."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sft_play.config.reader import kind_of, names_of
from sft_play.errors import DataError
from sft_play.files import text_sha256

Message = dict[str, Any]
"""`role` and `content`; optionally `train` (`False`: this turn is not learnt), `tool_calls`, `tool_call_id`, `name`,
`reasoning_content`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """Exactly one of `messages`, `text` and `input_ids` is given."""

    place: str
    """`file:line`, or `file, row n`."""
    form: str
    """The format that it was read as: a key of `data.formats.FORMATS`."""
    source: int
    """Index into the split's sources."""
    messages: list[Message] | None = None
    """A conversation that ends with an answer."""
    tools: list[Any] | None = None
    """Descriptions of the functions that the conversation may call, for the chat template."""
    text: str | None = None
    """A document, or a piece of plain text."""
    input_ids: list[int] | None = None
    """Already tokenised."""
    labels: list[int] | None = None
    """With `input_ids`: -100 where not trained; `None` trains all."""
    group: str | None = None
    """The value of `data.group_by`."""

    @property
    def key(self) -> str:
        """A hash of the content."""
        content = [self.messages, self.tools, self.text, self.input_ids, self.labels]
        return text_sha256(json.dumps(content, ensure_ascii=False, sort_keys=True))


# What a single value of a row is: text, a kind of thing in words, a row short enough to print.


SHOWN_CHARACTERS = 60
"""Of a single value in a message."""
SHOWN_COLUMNS = 8


def text_of(value: Any, name: str) -> str:
    """Return `value`, which is text that a tokenizer can read. Raise `DataError`."""
    if not isinstance(value, str):
        raise DataError(f"`{name}` is {kind_of(value)}; expected text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:  # JSON can write half of a surrogate pair; no tokenizer can read it
            raise DataError(f"`{name}` holds half of a surrogate pair at character {error.start + 1}, which is no text") from None
    return value


def answer_of(value: Any, name: str) -> str:
    """Return `value`, which is text with something in it. Raise `DataError`."""
    text = text_of(value, name)
    if not text or text.isspace():
        raise DataError(f"`{name}` is empty, so there is nothing to learn")
    return text


def system_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the system turn of a row's `system` column, or nothing. Raise `DataError`."""
    found = row.get("system")
    if not found:
        return []
    text = text_of(found, "system")
    return [] if text.isspace() else [{"role": "system", "content": text}]


def show_row(row: Mapping[str, Any]) -> str:
    """Return a row as JSON with long values cut, for messages."""
    values = {
        name: value if len(text := str(value)) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
        for name, value in islice(row.items(), SHOWN_COLUMNS)
    }
    return json.dumps(values, ensure_ascii=False, default=str)


# What a reader left out, and why; and what it read, where a path does not say that.


SCANNED = "pictures without text: it must be read by OCR first"
EMPTY = "no text"
OTHER_FILE = "no file of the kind that is read here"
"""Why a document gives nothing to learn."""
BAD = "bad row"
"""With `data.bad_rows: drop`, whatever is wrong with it."""
SHOWN_FAULTS = 5
SHOWN_PLACES = 20
"""Of what was left out for one reason."""


class LeftOut:
    """Counts rows and files that were read and are no part of the data, by reason, with the first places of each."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.places: dict[str, list[str]] = {}
        self.there: int | None = None
        """How many rows there were, where `rows` asks for more."""
        self.commit: str | None = None
        """Of a hub dataset, the commit that was read."""

    def add(self, reason: str, place: str) -> None:
        """Count one."""
        self.counts[reason] += 1
        places = self.places.setdefault(reason, [])
        if len(places) < SHOWN_PLACES:
            places.append(place)


class Faults:
    """What is wrong with rows: the first of each kind, numbers aside, with how many there are."""

    def __init__(self) -> None:
        self._first: dict[str, DataError] = {}
        self._alike: Counter[str] = Counter()
        self.rows = 0

    def add(self, error: DataError) -> None:
        """Count one row; of more than `SHOWN_FAULTS` kinds the first are kept, since a file may hold a million."""
        self.rows += 1
        kind = re.sub(r"\d+", "0", error.message)
        if kind in self._first or len(self._first) < SHOWN_FAULTS:
            self._first.setdefault(kind, error)
            self._alike[kind] += 1

    def errors(self) -> list[DataError]:
        """Return one error for each kind."""
        more = {kind: f" ({rows:,} such rows; the first is here)" if rows > 1 else "" for kind, rows in self._alike.items()}
        return [DataError(one.message + more[kind], place=one.place, hint=one.hint) for kind, one in self._first.items()]


# The turns of a conversation as files write them, made uniform: roles, text, tool calls, what is not learnt.
#
# A turn comes out as chat templates take it: `role` and `content`, and where given `train`, `tool_calls`, `tool_call_id`, `name`
# and `reasoning_content`. Arguments of tool calls are mappings, as the templates of models expect them, and never JSON in a string.


ROLES = ("system", "user", "assistant", "tool")
ALSO_CALLED = {"developer": "system", "function": "tool"}
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "function_call",
}
FOLLOWERS: Mapping[str | None, tuple[str, ...]] = {
    None: ("system", "user", "assistant"),
    "system": ("user", "assistant"),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
"""Role -> the roles that may come next; `None` begins."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names under which data sets keep what was thought before an answer."""


def chat_turns(found: Any, name: str) -> list[Message]:
    """Return a list of `role` and `content` mappings made uniform. Raise `DataError`."""
    return [chat_turn(message, f"{name}[{index}]") for index, message in enumerate(_list(found, name))]


def chat_turn(message: Any, name: str) -> Message:
    """Return one `role` and `content` mapping made uniform. Raise `DataError`."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise _no_turn(message, name)
    role = message["role"]
    if role not in ROLES:
        role = ALSO_CALLED.get(role) if isinstance(role, str) else None
        if role is None:
            hint = f"roles are {', '.join(ROLES)}; others by their names: `columns: {{messages.role.user: {message['role']}}}`"
            raise DataError(f"`{name}.role` is `{message['role']}`", hint=hint)
    calls = tool_calls(message, name) if role == "assistant" else []
    content = message.get("content")
    if content is None and not calls:
        if "content" not in message:
            raise _no_turn(message, name)
        raise DataError(f"`{name}.content` is empty; expected text")
    turn: Message = {"role": role, "content": "" if content is None else content_of(content, f"{name}.content")}
    train = _train(message, name)
    if train is not None:
        turn["train"] = train
    if calls:
        turn["tool_calls"] = calls
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            turn[key] = text_of(message[key], f"{name}.{key}")
    for key in REASONING:
        if message.get(key) is not None and role == "assistant":
            turn["reasoning_content"] = text_of(message[key], f"{name}.{key}")
            break
    if role == "assistant" and not turn["content"].strip() and not calls and turn.get("train") is not False:
        raise DataError(f"`{name}.content` is empty, so there is nothing to learn")
    return turn


def _no_turn(message: Any, name: str) -> DataError:
    if not isinstance(message, Mapping):
        return DataError(f"`{name}` is {kind_of(message)}; expected a mapping with `role` and `content`")
    hint = "other names: `columns: {messages: ..., messages.role: NAME, messages.content: NAME, messages.role.user: VALUE}`"
    return DataError(f"`{name}` lacks `role` or `content`; it has {names_of(message)}", hint=hint)


def _train(message: Mapping[str, Any], name: str) -> bool | None:
    """Return `train`, or what `weight` (0 or 1, as OpenAI's files write it) says; `None` where the turn says nothing."""
    train, weight = message.get("train"), message.get("weight")
    if train is not None:
        if not isinstance(train, bool):
            raise DataError(f"`{name}.train` is {kind_of(train)}; expected true or false")
        return train
    if weight is None:
        return None
    if weight not in (0, 1):
        raise DataError(f"`{name}.weight` is `{weight}`", hint="0 leaves the turn out of training, 1 trains it; nothing between")
    return bool(weight)


def content_of(content: Any, name: str) -> str:
    """Return the text of a turn: text, or a list of text parts, which are put together. Raise `DataError`."""
    if isinstance(content, Mapping):
        raise DataError(f"`{name}` is {kind_of(content)}; expected text", hint="write it as JSON in a string")
    if isinstance(content, str) or not isinstance(content, Sequence) or isinstance(content, bytes):
        return text_of(content, name)
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, Mapping) and part.get("type", "text") != "text":
            raise DataError(f"`{name}[{index}]` is a part of type `{part.get('type')}`; only text is trained")
        texts.append(text_of(part.get("text") if isinstance(part, Mapping) else part, f"{name}[{index}].text"))
    return "".join(texts)


def tool_calls(message: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the calls of an assistant turn, from `tool_calls` or the older `function_call`. Raise `DataError`."""
    calls, single = message.get("tool_calls"), message.get("function_call")
    if single:
        return [_call(single, f"{name}.function_call")]
    if not calls:
        return []
    return [_call(call, f"{name}.tool_calls[{index}]") for index, call in enumerate(_list(calls, f"{name}.tool_calls", "calls"))]


def _call(call: Any, name: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"`{name}` is not a call: a mapping with `function`, which has `name` and `arguments`")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = parse_json(arguments, f"{name}.arguments") if arguments.strip() else {}
    if not isinstance(arguments, Mapping) and arguments is not None:
        raise DataError(f"`{name}.arguments` is {kind_of(arguments)}; expected a mapping")
    made: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}
    if call.get("id") is not None:
        made["id"] = text_of(call["id"], f"{name}.id")
    return made


def tools_of(row: Mapping[str, Any]) -> list[Any] | None:
    """Return the functions that a row's conversation may call: a list, or JSON of one in a string. Raise `DataError`."""
    found = row.get("tools")
    if isinstance(found, str) and found.strip():
        found = parse_json(found, "tools")
    if not found:
        return None
    tools = list(_list(found, "tools", "functions"))
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise DataError(f"`tools[{index}]` is {kind_of(tool)}; expected the description of a function")
    return tools


def parse_json(text: str, name: str) -> Any:
    """Return what JSON in a string says. Raise `DataError`."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"`{name}` is text that is not JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise DataError(f"`{name}` is JSON nested too deep") from None


def sharegpt_turns(found: Any, name: str) -> list[Message]:
    """Return ShareGPT's `from` and `value` turns made uniform; `role` and `content` are taken too. Raise `DataError`.

    Calls that follow the answer they belong to, or one another, become one turn, as chat templates take them.
    """
    turns: list[Message] = []
    for index, message in enumerate(_list(found, name)):
        turn = _sharegpt_turn(message, f"{name}[{index}]")
        before = turns[-1] if turns else {}
        mergeable = before.get("role") == "assistant" and "train" not in turn and "train" not in before
        if turn.get("tool_calls") and not turn["content"] and mergeable:
            before["tool_calls"] = [*before.get("tool_calls", []), *turn["tool_calls"]]
        else:
            turns.append(turn)
    return turns


def _sharegpt_turn(message: Any, name: str) -> Message:
    if not isinstance(message, Mapping) or not ("from" in message or "role" in message):
        raise DataError(f"`{name}` is not a mapping with `from` and `value`")
    if message.get("from") is None:
        return chat_turn(message, name)
    said = message["from"]
    role = SHAREGPT_ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise DataError(f"`{name}.from` is `{said}`", hint=f"known are {', '.join(SHAREGPT_ROLES)}")
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    if role != "function_call":
        if isinstance(message.get("value"), (int, float, Mapping)):  # else it would be called `content`, which the row lacks
            text_of(message["value"], f"{name}.value")
        return chat_turn({**rest, "role": role, "content": message.get("value")}, name)
    calls = parse_json(text_of(message.get("value"), f"{name}.value"), f"{name}.value")
    return chat_turn(
        {**rest, "role": "assistant", "content": None, "tool_calls": [calls] if isinstance(calls, dict) else calls}, name
    )


def end_at_answer(turns: list[Message]) -> list[Message]:
    """Return the turns up to the last answer, in an order that a conversation can have. Raise `DataError`."""
    before: str | None = None
    for index, turn in enumerate(turns):
        role = turn["role"]
        if role not in FOLLOWERS[before]:
            order = ", ".join(t["role"] for t in turns[: index + 3]) + (", ..." if len(turns) > index + 3 else "")
            after = f"after {before}" if before else "at the start"
            raise DataError(
                f"the roles are out of order: {role} {after} (turn {index + 1}); they come as {order}",
                hint=f"{'after ' + before if before else 'at the start'} comes {' or '.join(FOLLOWERS[before])}; "
                "put two turns of one role together, or leave one out",
            )
        before = role
    if not any(turn["role"] == "assistant" for turn in turns):
        raise DataError("the row has no assistant message, so there is nothing to learn")
    while turns[-1]["role"] != "assistant":  # what follows the last answer is never seen
        turns.pop()
    return turns


def _list(found: Any, name: str, of: str = "messages") -> Sequence[Any]:
    if not isinstance(found, Sequence) or isinstance(found, (str, bytes)):
        raise DataError(f"`{name}` is {kind_of(found)}; expected a list of {of}")
    return found
