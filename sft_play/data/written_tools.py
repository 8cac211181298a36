"""Proof that a chat template writes a conversation's tools, calls and results, which many templates leave out without a
word.

Names, arguments and results are replaced by marks that occur nowhere else, and the marks are looked for in the
rendered text: a short value (`1`) would be found anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sft_play.data import CLOSE, Message
from sft_play.errors import DataError

WRITING_CALLS = ("qwen3",)
"""The named templates that write tools and calls."""
HINT = (
    f"train with a template that writes calls: `data.chat_template: {', '.join(WRITING_CALLS)}`, or omit the key if"
    " the model's own template does (models that were trained to call tools)"
)
_NUMBER = 790_531_000
"""The mark of the first number: a number stays one, since a template may write text otherwise."""

Render = Callable[[Sequence[Message], Sequence[Any] | None, bool], str]
"""Gives the text of messages and tools, with the generation prompt or without."""


@dataclass(slots=True)
class _Marks:
    """Marks that stand for values, and what each stands for."""

    meaning: dict[str, str] = field(default_factory=dict)

    def text(self, meaning: str) -> str:
        mark = f"qMark{len(self.meaning)}z"
        self.meaning[mark] = meaning
        return mark

    def value(self, value: Any, turn: str) -> Any:
        """Return an argument with a mark for each text and number in it."""
        if isinstance(value, Mapping):
            return {key: self.value(inner, turn) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(inner, turn) for inner in value]
        meaning = f"{turn}: the argument `{_short(value)}`"
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            number = _NUMBER + len(self.meaning)
            self.meaning[str(number)] = meaning
            return number
        return self.text(meaning)

    def missing(self, text: str) -> str | None:
        """Return what the first mark that `text` lacks stands for."""
        return next((meaning for mark, meaning in self.meaning.items() if mark not in text), None)


def has_tools(messages: Sequence[Message], tools: Sequence[Any] | None) -> bool:
    """Return whether there is anything to prove."""
    return bool(tools) or any(turn["role"] == "tool" or turn.get("tool_calls") for turn in messages)


def check_written(messages: Sequence[Message], tools: Sequence[Any] | None, render: Render) -> None:
    """Raise `DataError` if the text of a conversation that ends with an answer lacks its tools, a call or a
    result.
    """
    marks = _Marks()
    turns = [_marked_turn(turn, index + 1, marks) for index, turn in enumerate(messages)]
    described = _marked_tools(tools or [], marks)
    missing = marks.missing(render(turns, described or None, False))
    if missing is None and tools and not any(_name(tool) for tool in tools):  # nothing to mark
        last = messages[:-1]
        missing = "`tools`" if render(last, tools, True) == render(last, None, True) else None
    if missing is not None:
        raise DataError(f"the chat template does not write {missing}", hint=HINT)


def check_answer(
    messages: Sequence[Message],
    index: int,
    prompt: str,
    learnt: str,
    tools: Sequence[Any] | None,
    render: Render,
    end: Callable[[str], int],
) -> None:
    """Raise `DataError` unless `learnt`, what is learnt of message `index`, contains its calls and its words. `end`: of
    a turn in a text.
    """
    message, number = messages[index], index + 1
    marks = _Marks()
    text = render([*messages[:index], _marked_turn({**message, "content": ""}, number, marks)], tools, False)
    rest = text.removeprefix(prompt)
    if (missing := marks.missing(rest)) is not None:
        raise DataError(f"the chat template does not write {missing}", hint=HINT)
    if marks.missing(rest[: end(rest)]) is not None:
        raise DataError(
            f"the chat template does not write the calls of turn {number} before the end of the turn", hint=HINT
        )
    words = message["content"].rpartition(CLOSE)[2].strip()
    if words not in learnt:
        raise DataError(
            f"the chat template does not write the text of turn {number} next to its calls",
            hint="remove the text from that turn, or use another template: `data.chat_template`",
        )


def _marked_turn(turn: Message, number: int, marks: _Marks) -> Message:
    """Return a turn with marks for the names and arguments of its calls, or for the result that it is."""
    if turn["role"] == "tool" and turn["content"].strip():
        return {**turn, "content": marks.text(f"the result of turn {number}")}
    if not turn.get("tool_calls"):
        return turn
    calls, of = [], f"the calls of turn {number}"
    for call in turn["tool_calls"]:
        function = call["function"]
        name = marks.text(f"{of}: the name `{function['name']}`")
        calls.append(
            {**call, "function": {**function, "name": name, "arguments": marks.value(function["arguments"], of)}}
        )
    return {**turn, "tool_calls": calls}


def _marked_tools(tools: Sequence[Any], marks: _Marks) -> list[Any]:
    marked = []
    for tool in tools:
        if name := _name(tool):
            mark = {"name": marks.text(f"the function `{name}` of `tools`")}
            function = tool.get("function")
            marked.append(
                {**tool, "function": {**function, **mark}} if isinstance(function, Mapping) else {**tool, **mark}
            )
        else:
            marked.append(tool)
    return marked


def _name(tool: Mapping[str, Any]) -> str | None:
    function = tool.get("function")
    name = (function if isinstance(function, Mapping) else tool).get("name")
    return name if isinstance(name, str) and name else None


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
