"""Tools that a row describes, calls of them in its answers, and what is doubtful about both."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sft_play.config.reader import kind_of, names_of
from sft_play.config.yaml_files import scalar_text
from sft_play.data import Message
from sft_play.data.readers import Filled, parse_json
from sft_play.data.values import is_blank, is_list, json_of, list_of, text_of
from sft_play.errors import DataError

ARGUMENTS = ("arguments", "parameters", "args", "input")
TOOL_NAMES = (
    *("tools", "functions", "tool_defs", "tool_definitions", "available_tools", "available_functions"),
    *("function_definitions", "tool_list", "function_list"),
)
"""Columns, or keys of the system turn, that describe what may be called."""
DESCRIPTIONS = {"parameters", "description", "input_schema", "arguments", "inputs"}
OTHER_CALLS = "calls of functions that the row's tools do not describe"
OTHER_ARGUMENTS = "calls with arguments that the tool's description lacks, or without those that it requires"
TWICE = "rows whose system turn describes the tools, which the chat template writes too"
OTHER_RESULTS = "results whose `tool_call_id` is not that of the call in their place"
NO_RESULT = "answers after several calls of which not all have a result"
UNDESCRIBED = "calls are learnt, but no tool is described (`columns: {tools: NAME}` names the column that does)"
FILLED = "nulls in arguments or tools, read as missing keys since Arrow cannot tell them apart"


def tool_calls(message: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the calls of an assistant turn, from `tool_calls` or the older `function_call`. Raise `DataError`."""
    single, several = message.get("function_call"), message.get("tool_calls")
    if not is_blank(single) and single != {}:
        if not is_blank(several):
            raise DataError(f"`{name}` has `function_call` and `tool_calls`", hint="keep one of them")
        return [_call(single, f"{name}.function_call")]
    calls = () if is_blank(several) else list_of(several, f"{name}.tool_calls", "calls")
    return [_call(call, f"{name}.tool_calls[{index}]") for index, call in enumerate(calls)]


def _call(call: Any, name: str) -> dict[str, Any]:
    if isinstance(call, str):
        call = parse_json(call, name)
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"`{name}` is not a call: a mapping with `function`, which has `name` and `arguments`")
    if function is not call and (outside := [key for key in ARGUMENTS if call.get(key) is not None]):
        raise DataError(f"`{name}.{outside[0]}` is not read", hint="arguments are in the `function` that is called")
    present = [key for key in ARGUMENTS if function.get(key) is not None]
    if len(present) > 1:
        raise DataError(f"`{name}` has its arguments more than once: {names_of(present)}")
    key = present[0] if present else "arguments"
    arguments = function.get(key)
    if isinstance(arguments, str):
        arguments = parse_json(arguments, f"{name}.{key}") if arguments.strip() else {}
    if not isinstance(arguments, Mapping) and arguments is not None:
        raise DataError(f"`{name}.{key}` is {kind_of(arguments)}; expected a mapping")
    function = {
        "name": text_of(function["name"], f"{name}.name"),
        "arguments": json_of(arguments or {}, f"{name}.{key}"),
    }
    call_turn: dict[str, Any] = {"type": "function", "function": function}
    if call.get("id") is not None:
        call_turn["id"] = text_of(call["id"], f"{name}.id")
    return call_turn


def tools_of(row: Mapping[str, Any], name: str = "") -> list[Any] | None:
    """Return the functions that a row, or a system turn, describes: a list, or JSON of one in a string. Raise
    `DataError`.
    """
    lists = [(key, _tools(row[key], name + key)) for key in TOOL_NAMES if not is_blank(row.get(key))]
    described = [(key, tools) for key, tools in lists if tools]
    if any(tools != described[0][1] for _, tools in described):
        raise DataError(f"the tools are described twice, differently: {names_of(name + key for key, _ in described)}")
    return described[0][1] if described else None


def _tools(value: Any, name: str) -> list[Any]:
    if isinstance(value, str):
        value = parse_json(value, name)
    tools = []
    for index, tool in enumerate(list_of(value, name, "functions")):
        described = parse_json(tool, f"{name}[{index}]") if isinstance(tool, str) else tool
        if not isinstance(described, Mapping):
            raise DataError(f"`{name}[{index}]` is {kind_of(tool)}; expected the description of a function")
        tools.append(json_of(described, f"{name}[{index}]"))
    return tools


def _functions(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the descriptions of functions, with or without the mapping around each."""
    return [tool["function"] if isinstance(tool.get("function"), Mapping) else tool for tool in tools]


def describes_tools(value: Any) -> bool:
    """Return whether a column looks like descriptions of functions."""
    try:
        tools = _tools(value, "")
    except DataError:
        return False
    described = _functions(tools)
    return bool(tools) and all(isinstance(tool.get("name"), str) and {*tool} & DESCRIPTIONS for tool in described)


def doubtful_calls(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield doubts about the calls of a row and their results."""
    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    calls = [call for turn in messages for call in turn.get("tool_calls", ())]
    functions = _functions(tools)
    names = [function.get("name") for function in functions]
    if tools and None not in names and any(call["function"]["name"] not in names for call in calls):
        yield OTHER_CALLS
    described = ((call["function"], function) for call in calls for function in functions)
    if any(_is_miscalled(call, function) for call, function in described if call["name"] == function.get("name")):
        yield OTHER_ARGUMENTS
    if names and all(f'"{name}"' in system for name in names):
        yield TWICE
    waiting: list[Any] = []
    for turn in messages:
        if turn["role"] == "tool" and turn.get("tool_call_id") not in (None, *waiting[:1]):
            yield OTHER_RESULTS
            return
        if turn["role"] == "assistant" and any(name is not None for name in waiting):
            yield NO_RESULT
            return
        waiting = waiting[1:] if turn["role"] == "tool" else [call.get("id") for call in turn.get("tool_calls", ())]


def _is_miscalled(call: Mapping[str, Any], function: Mapping[str, Any]) -> bool:
    """Return whether a call's arguments are not those of the function's JSON schema, by their names."""
    names, schema = [*call["arguments"]], function.get("parameters")
    if not isinstance(schema, Mapping) or not isinstance(properties := schema.get("properties"), Mapping):
        return False
    required = schema.get("required", ())
    lacks = is_list(required) and any(name not in names for name in required)
    return lacks or (not schema.get("additionalProperties") and not {*names} <= {*properties})


def calls_undescribed(messages: Sequence[Message]) -> bool:
    """Return whether a function is called that no text before the call names; for rows without tools."""
    described = ""
    for turn in messages:
        if any(call["function"]["name"] not in described for call in turn.get("tool_calls", ())):
            return True
        described += turn["content"] if turn["role"] in ("system", "user") else ""
    return False


def is_filled(value: Any, within: bool) -> bool:
    """Return whether call arguments in a value, or all of it (`within`), have an Arrow struct that lost its nulls."""
    if isinstance(value, Mapping):
        lost = within and isinstance(value, Filled)
        return lost or any(is_filled(part, within or key in ARGUMENTS) for key, part in value.items())
    return is_list(value) and any(is_filled(part, within) for part in value)


def _calls_in(text: str) -> list[dict[str, Any]]:
    """Return the calls that an answer consists of as JSON, as xLAM's rows have them; none for other answers."""
    with contextlib.suppress(ValueError, RecursionError, DataError):
        calls = json.loads(text)
        calls = calls if is_list(calls) else [calls]
        if all(isinstance(call, dict) and {"name", *ARGUMENTS} & {*call} > {"name"} for call in calls):
            return tool_calls({"tool_calls": calls}, "")
    return []


def take_tools(row: Mapping[str, Any], messages: list[Message]) -> tuple[list[Any] | None, tuple[str, ...]]:
    """Return the tools that a row or its system turn describes, and doubts about them.

    Raise `DataError` if a column describes them that is not read.
    """
    tools = tools_of(row)
    for turn in messages:
        described = turn.pop("tools", None)
        if described and tools not in (None, described):
            raise DataError("the tools of the row and of its system turn differ")
        tools = tools or described
    for turn in messages if tools else ():
        if turn["role"] == "assistant" and "tool_calls" not in turn and (calls := _calls_in(turn["content"])):
            turn |= {"content": "", "tool_calls": calls}
    called = any(turn.get("tool_calls") for turn in messages)
    filled = (called or tools) and any(is_filled(value, name in TOOL_NAMES) for name, value in row.items())
    doubts = (*((FILLED,) if filled else ()), *doubtful_calls(messages, tools or ()))
    if tools or not called:
        return tools, doubts
    if column := next((name for name, value in row.items() if describes_tools(value)), None):
        raise DataError(
            f"`{column}` describes tools, and is not read: calls would be learnt without them",
            hint=f"`columns: {scalar_text({'tools': column})}` reads it",
        )
    return None, (*doubts, UNDESCRIBED) if calls_undescribed(messages) else doubts
