"""How a row of a file becomes a training example. Pure functions; the error names what was found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sft_play.config.types import kind_of, names_of
from sft_play.data.example import Example, Message, answer_of, shown, system_of, text_of
from sft_play.data.turns import ROLES, chat_turns, finished, sharegpt_turns, tools_of
from sft_play.errors import DataError

Row = Mapping[str, Any]
Parts = dict[str, Any]
"""Fields of an `Example`."""

__all__ = ["FORMATS", "ROLES", "Message", "Row", "recognise", "to_example", "understand"]


def _messages(row: Row) -> Parts:
    return {"messages": finished([*system_of(row), *chat_turns(row["messages"], "messages")])}


def _sharegpt(row: Row) -> Parts:
    return {"messages": finished([*system_of(row), *sharegpt_turns(row["conversations"], "conversations")])}


def _prompt(row: Row) -> Parts:
    """Text, or lists of messages as TRL writes them: then the prompt's own answers are context and are not trained."""
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return _turns(row, text_of(prompt, "prompt"), "completion")
    both = (prompt, completion)
    if not all(isinstance(part, Sequence) and not isinstance(part, (str, bytes)) for part in both):
        if any(isinstance(part, (list, tuple)) for part in both) and any(isinstance(part, str) for part in both):
            raise DataError(
                f"`prompt` is {kind_of(prompt)} and `completion` is {kind_of(completion)}; expected text in both, or lists of messages"
            )
        text_of(prompt, "prompt")
        text_of(completion, "completion")
    context = chat_turns(prompt, "prompt")
    for turn in context:
        if turn["role"] == "assistant":
            turn.setdefault("train", False)
    answer = chat_turns(completion, "completion")
    if not any(turn["role"] == "assistant" for turn in answer):
        raise DataError("`completion` has no assistant message, so there is nothing to learn")
    return {"messages": finished([*system_of(row), *context, *answer])}


def _question(row: Row) -> Parts:
    return _turns(row, text_of(row["question"], "question"), "answer")


def _instruction(row: Row) -> Parts:
    """Alpaca: the input is added to the instruction and never replaces it."""
    instruction = text_of(row["instruction"], "instruction")
    context = text_of(row.get("input") or "", "input")
    parts = [part for part in (instruction, context) if part.strip()]
    return _turns(row, "\n\n".join(parts) if parts else instruction, "output")


def _turns(row: Row, question: str, answer: str) -> Parts:
    last = [{"role": "user", "content": question}, {"role": "assistant", "content": answer_of(row[answer], answer)}]
    return {"messages": [*system_of(row), *_history(row.get("history")), *last]}


def _history(found: Any) -> list[Message]:
    """Returns the earlier turns of an Alpaca row: a list of question and answer pairs."""
    if not found:
        return []
    if not isinstance(found, Sequence) or isinstance(found, (str, bytes)):
        raise DataError(f"`history` is {kind_of(found)}; expected a list of pairs: question and answer")
    turns: list[Message] = []
    for index, pair in enumerate(found):
        if not isinstance(pair, Sequence) or isinstance(pair, (str, bytes)) or len(pair) != 2:
            raise DataError(f"`history[{index}]` is not a pair: question and answer")
        turns.append({"role": "user", "content": text_of(pair[0], f"history[{index}][0]")})
        turns.append({"role": "assistant", "content": answer_of(pair[1], f"history[{index}][1]")})
    return turns


def _text(row: Row) -> Parts:
    text = text_of(row["text"], "text")
    if not text or text.isspace():
        raise DataError("`text` is empty", hint="`filter: not blank(text)` leaves such rows out")
    return {"text": text}


def _tokens(row: Row) -> Parts:
    ids = _integers(row["input_ids"], "input_ids", minimum=0)
    labels = None if row.get("labels") is None else _integers(row["labels"], "labels", minimum=-100)
    mask = None if row.get("attention_mask") is None else _integers(row["attention_mask"], "attention_mask", minimum=0)
    for name, other in (("labels", labels), ("attention_mask", mask)):
        if other is not None and len(other) != len(ids):
            raise DataError(f"`{name}` has {len(other)} entries and `input_ids` {len(ids)}")
    if mask is not None and 0 in mask:
        start, end = _unpadded(mask)
        ids, labels = ids[start:end], None if labels is None else labels[start:end]
    if not ids:
        raise DataError("`input_ids` is empty, so there is nothing to learn")
    if labels is not None:
        if any(label < 0 and label != -100 for label in labels):
            raise DataError("`labels` holds a negative number other than -100, which marks what is not trained")
        if all(label == -100 for label in labels[1:]):  # the first token follows nothing, so it is never a target
            raise DataError("`labels` is -100 everywhere, so there is nothing to learn")
    return {"input_ids": ids, "labels": labels}


def _integers(found: Any, name: str, minimum: int) -> list[int]:
    if not isinstance(found, Sequence) or isinstance(found, (str, bytes)):
        raise DataError(f"`{name}` is {kind_of(found)}; expected a list of integers")
    values = list(found)
    if not values:
        return values
    if set(map(type, values)) != {int}:
        index = next(i for i, value in enumerate(values) if type(value) is not int)
        raise DataError(f"`{name}[{index}]` is {kind_of(values[index])}; expected an integer")
    if min(values) < minimum:
        raise DataError(f"`{name}` holds {min(values)}; the least is {minimum}")
    return values


def _unpadded(mask: list[int]) -> tuple[int, int]:
    """Returns where the row begins and ends without its padding: `attention_mask` is 1 in between. Raises `DataError`."""
    if 1 not in mask:
        return 0, 0
    start, end = mask.index(1), len(mask) - mask[::-1].index(1)
    if any(value != 1 for value in mask[start:end]) or max(mask) > 1:
        raise DataError("`attention_mask` is 0 between tokens; only padding at the ends can be left out")
    return start, end


FORMATS: dict[str, tuple[frozenset[str], Callable[[Row], Parts]]] = {
    "messages": (frozenset({"messages"}), _messages),
    "sharegpt": (frozenset({"conversations"}), _sharegpt),
    "prompt_completion": (frozenset({"prompt", "completion"}), _prompt),
    "instruction": (frozenset({"instruction", "output"}), _instruction),
    "question_answer": (frozenset({"question", "answer"}), _question),
    "text": (frozenset({"text"}), _text),
    "tokens": (frozenset({"input_ids"}), _tokens),
}
"""Each format: the columns it needs, and the conversion."""


_ANSWERS = ("response", "output", "answer", "completion", "target", "reply", "summary", "label")
_QUESTIONS = ("prompt", "query", "input", "instruction", "question")
ALSO_CALLED: Mapping[str, tuple[str, ...]] = {
    "output": _ANSWERS, "answer": _ANSWERS, "completion": _ANSWERS, "prompt": _QUESTIONS, "question": _QUESTIONS,
    "instruction": _QUESTIONS, "input": ("context",),
}  # fmt: skip
"""Column of a format -> what data sets call it, for hints."""


def recognise(row: Row) -> str:
    """Returns the format whose columns `row` has. Raises `DataError` when none or more than one fits."""
    fitting = [name for name, (columns, _) in FORMATS.items() if all(row.get(column) is not None for column in columns)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise DataError(
            f"the columns fit more than one format: {', '.join(fitting)} (columns: {names_of(row)})",
            hint=f"set `format` of the source; the row is {shown(row)}",
        )
    if row.get("chosen") is not None and row.get("rejected") is not None:
        chosen = "completion: chosen" if isinstance(row["chosen"], str) or row.get("prompt") is not None else "messages: chosen"
        raise DataError(
            "the row has `chosen` and `rejected`: preferences are not trained here",
            hint=f"to train on the chosen answers, give the source `columns: {{{chosen}}}`",
        )
    near = [name for name, (columns, _) in FORMATS.items() if any(row.get(column) is not None for column in columns)]
    if len(near) == 1:
        _require(row, near[0])
    within = [
        (f"{name}.{key}", value) for name, inner in row.items() if isinstance(inner, Mapping) for key, value in inner.items()
    ]
    turns, first = next(
        (
            (name, value[0])
            for name, value in [*row.items(), *within]
            if isinstance(value, list) and value and isinstance(value[0], Mapping)
        ),
        (None, {}),
    )
    if turns is not None:
        keys = [f"`{key}`" for key in first]
        names = f"columns: {{messages: {turns}, messages.role: NAME, messages.content: NAME, messages.role.user: VALUE}}"
        raise DataError(
            f"no format fits the columns {names_of(row)}",
            hint=f"a conversation may have other names: `{names}`; a turn in `{turns}` has {', '.join(keys)}; the row is {shown(row)}",
        )
    known = "; ".join(f"{name}: {', '.join(sorted(columns))}" for name, (columns, _) in FORMATS.items())
    raise DataError(
        f"no format fits the columns {names_of(row)}",
        hint="rename them: `sources: [{path: FILE, columns: {question: NAME, answer: NAME}}]` instead of `train_path`; formats and their "
        f"columns are {known}; the row is {shown(row)}",
    )


def to_example(row: Row, form: str, *, place: str, source: int, group: str | None = None) -> Example:
    """Returns the training example that `row` is in the named format. Raises `DataError` without its place."""
    columns, convert = FORMATS[form]
    for column in columns:
        if row.get(column) is None:
            _require(row, form)
    parts = convert(row)
    tools = tools_of(row) if "tools" in row and "messages" in parts else None
    return Example(place=place, form=form, source=source, group=group, tools=tools, **parts)


def understand(placed: tuple[str, Row | DataError], source: int, form: str | None, *, group_by: str | None = None) -> Example:
    """Returns the example of a row that a reader gave; `form` is `None` where the row itself must tell.

    `source` is the index of the row's source in its split, `group_by` is `data.group_by`. Raises `DataError` with the row's place.
    """
    place, row = placed
    try:
        if isinstance(row, DataError):
            raise row
        group = group_of(row, group_by) if group_by is not None else None
        return to_example(row, form or recognise(row), place=place, source=source, group=group)
    except DataError as error:
        error.place = error.place or place
        raise


def group_of(row: Row, column: str) -> str:
    """Returns the value of `data.group_by`. Raises `DataError` where a row has none."""
    value = row.get(column)
    if value is None:
        said = "is empty" if column in row else "is missing"
        raise DataError(
            f"`data.group_by` names the column `{column}`, which {said}; the columns are {names_of(row)}",
            hint="every row needs a group, so that a group is wholly training or wholly validation",
        )
    if isinstance(value, (str, int, float)):
        return str(value)
    raise DataError(f"`{column}`, which `data.group_by` names, is {kind_of(value)}; expected text or a number")


def _require(row: Row, form: str) -> None:
    """Raises `DataError` with the columns of the format that `row` lacks, or has as null."""
    columns = FORMATS[form][0]
    missing = sorted(column for column in columns if row.get(column) is None)
    if not missing:
        return
    others = [name for name, (needs, _) in FORMATS.items() if name != form and all(row.get(c) is not None for c in needs)]
    raise DataError(
        f"format `{form}` needs {', '.join(f'`{m}`' for m in missing)}; the columns are {names_of(row)}",
        hint=f"this row looks like {' or '.join(others)}, but a source has one format: give each format a source of its own"
        if others
        else _renamed(row, form, missing),
    )


def _renamed(row: Row, form: str, missing: list[str]) -> str:
    """Returns the `columns` that would give `row` what a format lacks: by the names that data sets have for it, else left open."""
    wanted = [*missing, *(["input"] if form == "instruction" and "input" not in row else [])]
    names = {new: next((name for name in ALSO_CALLED[new] if name in row), None) for new in wanted if new in ALSO_CALLED}
    columns = ", ".join(f"{new}: {old or 'NAME'}" for new, old in names.items() if old or new in missing)
    return f"`sources: [{{path: FILE, columns: {{{columns}}}}}]` instead of `train_path`"
