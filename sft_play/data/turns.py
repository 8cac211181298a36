"""The turns of a conversation as files write them, made uniform: roles, text, tool calls, what is not learnt.

A turn comes out as chat templates take it: `role` and `content`, and where given `train`, `tool_calls`, `tool_call_id`, `name`
and `reasoning_content`. Arguments of tool calls are mappings, as the templates of models expect them, and never JSON in a string.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sft_play.config.reader import kind_of, names_of
from sft_play.errors import DataError

Message = dict[str, Any]
"""`role` and `content`; optionally `train` (`False`: this turn is not learnt), `tool_calls`, `tool_call_id`, `name`,
`reasoning_content`."""


ROLES = ("system", "user", "assistant", "tool")
OTHER_ROLES = {"developer": "system", "function": "tool"}
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
    return [chat_turn(message, f"{name}[{index}]") for index, message in enumerate(list_of(found, name))]


def chat_turn(message: Any, name: str) -> Message:
    """Return one `role` and `content` mapping made uniform. Raise `DataError`."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise _no_turn(message, name)
    role = OTHER_ROLES.get(str(message["role"]), message["role"])
    if role not in ROLES:
        hint = f"roles are {', '.join(ROLES)}; others by their names: `columns: {{messages.role.user: {role}}}`"
        raise DataError(f"`{name}.role` is `{role}`", hint=hint)
    calls = tool_calls(message, name) if role == "assistant" else []
    content = message.get("content")
    if content is None and not calls:
        if "content" not in message:
            raise _no_turn(message, name)
        raise DataError(f"`{name}.content` is empty; expected text")
    turn: Message = {"role": role, "content": "" if content is None else content_of(content, f"{name}.content")}
    if (train := _train(message, name)) is not None:
        turn["train"] = train
    if calls:
        turn["tool_calls"] = calls
    thought = next((key for key in REASONING if message.get(key) is not None and role == "assistant"), "")
    for key, given in (("name", "name"), ("tool_call_id", "tool_call_id"), ("reasoning_content", thought)):
        if given and message.get(given) is not None:
            turn[key] = text_of(message[given], f"{name}.{given}")
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
    if not is_list(content):
        return text_of(content, name)
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, Mapping) and part.get("type", "text") != "text":
            raise DataError(f"`{name}[{index}]` is a part of type `{part.get('type')}`; only text is trained")
        texts.append(text_of(part.get("text") if isinstance(part, Mapping) else part, f"{name}[{index}].text"))
    return "".join(texts)


def tool_calls(message: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the calls of an assistant turn, from `tool_calls` or the older `function_call`. Raise `DataError`."""
    if single := message.get("function_call"):
        return [_call(single, f"{name}.function_call")]
    calls = list_of(message.get("tool_calls") or (), f"{name}.tool_calls", "calls")
    return [_call(call, f"{name}.tool_calls[{index}]") for index, call in enumerate(calls)]


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
    for index, tool in enumerate(list_of(found, "tools", "functions")):
        if not isinstance(tool, Mapping):
            raise DataError(f"`tools[{index}]` is {kind_of(tool)}; expected the description of a function")
    return list(found)


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
    for index, message in enumerate(list_of(found, name)):
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
            hint = f"{after} comes {' or '.join(FOLLOWERS[before])}; put two turns of one role together, or leave one out"
            raise DataError(f"the roles are out of order: {role} {after} (turn {index + 1}); they come as {order}", hint=hint)
        before = role
    if not any(turn["role"] == "assistant" for turn in turns):
        raise DataError("the row has no assistant message, so there is nothing to learn")
    while turns[-1]["role"] != "assistant":  # what follows the last answer is never seen
        turns.pop()
    return turns


def list_of(found: Any, name: str, of: str = "messages") -> Sequence[Any]:
    if not is_list(found):
        raise DataError(f"`{name}` is {kind_of(found)}; expected a list of {of}")
    return found


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


def is_list(value: Any) -> bool:
    """Whether a value is a list, of whatever type a reader makes them."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
