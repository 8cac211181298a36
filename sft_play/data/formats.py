"""How a row of a file becomes a conversation. Pure functions; the error names what was found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sft_play.errors import DataError

Message = dict[str, str]
Row = Mapping[str, Any]

ROLES = ("system", "user", "assistant", "tool")
REFUSED = {
    "tool_calls": "tool calls are not trained yet",
    "function_call": "function calls are not trained yet",
    "weight": "turns cannot be weighted yet: every assistant turn is trained",
    "train": "turns cannot be left out yet: every assistant turn is trained",
}
"""Keys of a message that change what should be learnt: refused, since leaving them out in silence would teach another thing."""


def _messages(row: Row) -> list[Message]:
    found = row["messages"]
    if row.get("tools"):
        raise DataError("the row has `tools`, but tool calls are not trained yet")
    if not isinstance(found, Sequence) or isinstance(found, (str, bytes)):
        raise DataError(f"`messages` is {_kind(found)}; expected a list of messages")
    messages: list[Message] = []
    for index, message in enumerate(found):
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise DataError(f"`messages[{index}]` is not a mapping with `role` and `content`")
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise DataError(f"`messages[{index}].role` is `{role}`", hint=f"roles are {', '.join(ROLES)}")
        for key, reason in REFUSED.items():
            if message.get(key) not in (None, [], True, 1):
                raise DataError(f"`messages[{index}].{key}` is given, but {reason}")
        messages.append({"role": role, "content": _text(content, f"messages[{index}].content")})
        if role == "assistant" and not content.strip():
            raise DataError(f"`messages[{index}].content` is empty, so there is nothing to learn")
    if not any(m["role"] == "assistant" for m in messages):
        raise DataError("the row has no assistant message, so there is nothing to learn")
    while messages[-1]["role"] != "assistant":  # what follows the last answer is never seen
        messages.pop()
    return messages


def _pair(question: str, answer: str) -> Callable[[Row], list[Message]]:
    def convert(row: Row) -> list[Message]:
        return _turns(row, _text(row[question], question), answer)

    return convert


def _instruction(row: Row) -> list[Message]:
    """Alpaca: the input is added to the instruction and never replaces it."""
    instruction = _text(row["instruction"], "instruction")
    context = _text(row.get("input") or "", "input")
    return _turns(row, f"{instruction}\n\n{context}" if context.strip() else instruction, "output")


def _turns(row: Row, question: str, answer: str) -> list[Message]:
    text = _text(row[answer], answer)
    if not text.strip():
        raise DataError(f"`{answer}` is empty, so there is nothing to learn")
    system = _text(row.get("system") or "", "system")
    first = [{"role": "system", "content": system}] if system.strip() else []
    return [*first, {"role": "user", "content": question}, {"role": "assistant", "content": text}]


FORMATS: dict[str, tuple[frozenset[str], Callable[[Row], list[Message]]]] = {
    "messages": (frozenset({"messages"}), _messages),
    "prompt_completion": (frozenset({"prompt", "completion"}), _pair("prompt", "completion")),
    "instruction": (frozenset({"instruction", "output"}), _instruction),
    "question_answer": (frozenset({"question", "answer"}), _pair("question", "answer")),
}
"""Each format: the columns it needs, and the conversion."""


def recognise(row: Row) -> str:
    """Returns the format whose columns `row` has. Raises `DataError` when none or more than one fits."""
    fitting = [name for name, (columns, _) in FORMATS.items() if all(row.get(column) is not None for column in columns)]
    if len(fitting) == 1:
        return fitting[0]
    have = ", ".join(f"`{name}`" for name in row) or "none"
    if fitting:
        raise DataError(
            f"the columns fit more than one format: {', '.join(fitting)} (columns: {have})", hint="set `format` of the source"
        )
    near = [name for name, (columns, _) in FORMATS.items() if any(row.get(column) is not None for column in columns)]
    if len(near) == 1:
        _require(row, near[0])
    known = "; ".join(f"{name}: {', '.join(sorted(columns))}" for name, (columns, _) in FORMATS.items())
    raise DataError(f"no format fits the columns {have}", hint=f"formats and their columns are {known}")


def to_messages(row: Row, form: str) -> list[Message]:
    """Returns the conversation of `row` in the named format. Raises `DataError`."""
    _require(row, form)
    return FORMATS[form][1](row)


def _require(row: Row, form: str) -> None:
    """Raises `DataError` with the columns of the format that `row` lacks, or has as null."""
    columns = FORMATS[form][0]
    missing = sorted(column for column in columns if row.get(column) is None)
    if missing:
        have = ", ".join(f"`{name}`" for name in row) or "none"
        raise DataError(f"format `{form}` needs {', '.join(f'`{m}`' for m in missing)}; the columns are {have}")


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"`{name}` is {_kind(value)}; expected text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:  # JSON can write half of a surrogate pair; no tokenizer can read it
            raise DataError(f"`{name}` holds half of a surrogate pair at character {error.start + 1}, which is no text") from None
    return value


def _kind(value: Any) -> str:
    names = {
        "list": "a list",
        "dict": "a mapping",
        "int": "a number",
        "float": "a number",
        "NoneType": "empty",
        "bool": "true or false",
    }
    return names.get(type(value).__name__, "text" if isinstance(value, str) else type(value).__name__)
