"""How a row of a file becomes a training example. Pure functions; the error names what was found."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sft_play.config.reader import kind_of, names_of
from sft_play.data.readers import Placed, show_row
from sft_play.data.turns import Message, chat_turns, end_at_answer, is_list, list_of, sharegpt_turns, text_of, tools_of
from sft_play.errors import DataError
from sft_play.files import text_sha256

Row = Mapping[str, Any]
Parts = dict[str, Any]
"""Fields of an `Example`."""


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


def _messages(row: Row) -> Parts:
    return {"messages": end_at_answer([*system_of(row), *chat_turns(row["messages"], "messages")])}


def _sharegpt(row: Row) -> Parts:
    return {"messages": end_at_answer([*system_of(row), *sharegpt_turns(row["conversations"], "conversations")])}


def _prompt(row: Row) -> Parts:
    """Text, or lists of messages as TRL writes them: then the prompt's own answers are context and are not trained."""
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return _turns(row, text_of(prompt, "prompt"), "completion")
    if not (is_list(prompt) and is_list(completion)):
        if any(map(is_list, (prompt, completion))) and any(isinstance(part, str) for part in (prompt, completion)):
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
    return {"messages": end_at_answer([*system_of(row), *context, *answer])}


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
    """Return the earlier turns of an Alpaca row: a list of question and answer pairs."""
    turns: list[Message] = []
    for index, pair in enumerate(list_of(found, "history", "pairs: question and answer") if found else ()):
        if not is_list(pair) or len(pair) != 2:
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
    values = list(list_of(found, name, "integers"))
    if set(map(type, values)) - {int}:
        index = next(i for i, value in enumerate(values) if type(value) is not int)
        raise DataError(f"`{name}[{index}]` is {kind_of(values[index])}; expected an integer")
    if (least := min(values, default=minimum)) < minimum:
        raise DataError(f"`{name}` holds {least}; the least is {minimum}")
    return values


def _unpadded(mask: list[int]) -> tuple[int, int]:
    """Return where the row begins and ends without its padding: `attention_mask` is 1 in between. Raise `DataError`."""
    if 1 not in mask:
        return 0, 0
    start, end = mask.index(1), len(mask) - mask[::-1].index(1)
    if any(value != 1 for value in mask[start:end]) or max(mask) > 1:
        raise DataError("`attention_mask` is 0 between tokens; only padding at the ends can be left out")
    return start, end


FORMATS: Mapping[str, tuple[tuple[str, ...], Callable[[Row], Parts]]] = {
    "messages": (("messages",), _messages),
    "sharegpt": (("conversations",), _sharegpt),
    "prompt_completion": (("prompt", "completion"), _prompt),
    "question_answer": (("question", "answer"), lambda row: _turns(row, text_of(row["question"], "question"), "answer")),
    "instruction": (("instruction", "output"), _instruction),
    "text": (("text",), _text),
    "tokens": (("input_ids",), _tokens),
}
"""Each format: the columns it needs, of a conversation the one that asks first, and the conversion."""


ALSO_CALLED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("output", "answer", "completion"), ("response", "output", "answer", "completion", "target", "reply", "summary", "label")),
    **dict.fromkeys(("prompt", "question", "instruction"), ("prompt", "query", "input", "instruction", "question")),
    "input": ("context",),
}  # fmt: skip
"""Column of a format -> what data sets call it, for hints."""


def recognise(row: Row) -> str:
    """Return the format whose columns `row` has. Raise `DataError` when none or more than one fits."""
    fitting = _fitting(row)
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise DataError(
            f"the columns fit more than one format: {', '.join(fitting)} (columns: {names_of(row)})",
            hint=f"set `format` of the source; the row is {show_row(row)}",
        )
    if row.get("chosen") is not None and row.get("rejected") is not None:
        chosen = "completion: chosen" if isinstance(row["chosen"], str) or row.get("prompt") is not None else "messages: chosen"
        raise DataError(
            "the row has `chosen` and `rejected`: preferences are not trained here",
            hint=f"to train on the chosen answers, give the source `columns: {{{chosen}}}`",
        )
    begun = [form for form, (columns, _) in FORMATS.items() if any(row.get(column) is not None for column in columns)]
    if len(begun) == 1:
        _require(row, begun[0])
    turns = next(
        (name for name, value in row.items() if isinstance(value, list) and value and isinstance(value[0], Mapping)), None
    )
    if turns:
        hint = (
            f"a conversation may have other names: `columns: {{messages: {turns}, messages.role: NAME, messages.content: NAME, "
            f"messages.role.user: VALUE}}`; a turn in `{turns}` has {names_of(row[turns][0])}"
        )
    else:
        known = "; ".join(f"{form}: {', '.join(columns)}" for form, (columns, _) in FORMATS.items())
        alike = max(FORMATS, key=lambda form: sum(new == old.lower() or 0.5 for new, old in _alike(row, form).items()))
        hint = f"{_suggest_columns(row, alike)}; a dot leads into a column: `meta.text`; formats and their columns are {known}"
    raise DataError(f"no format fits the columns {names_of(row)}", hint=f"{hint}; the row is {show_row(row)}")


def _fitting(row: Row) -> list[str]:
    return [form for form, (columns, _) in FORMATS.items() if all(row.get(column) is not None for column in columns)]


def understand(placed: Placed, source: int, form: str | None, *, group_by: str | None = None) -> Example:
    """Return the example of a row that a reader gave; `form` is `None` where the row itself must tell.

    `source` is the index of the row's source in its split, `group_by` is `data.group_by`. Raise `DataError` with the row's place.
    """
    place, row = placed
    try:
        if isinstance(row, DataError):
            raise row
        group = group_of(row, group_by) if group_by is not None else None
        form = form or recognise(row)
        _require(row, form)
        parts = FORMATS[form][1](row)
        tools = tools_of(row) if "tools" in row and "messages" in parts else None
        return Example(place=place, form=form, source=source, group=group, tools=tools, **parts)
    except DataError as error:
        error.place = error.place or place
        raise


def group_of(row: Row, column: str) -> str:
    """Return the value of `data.group_by`. Raise `DataError` where a row has none."""
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
    """Raise `DataError` with the columns of the format that `row` lacks, or has as null."""
    missing = sorted(column for column in FORMATS[form][0] if row.get(column) is None)
    if missing:
        others = " or ".join(_fitting(row))
        raise DataError(
            f"format `{form}` needs {', '.join(f'`{m}`' for m in missing)}; the columns are {names_of(row)}",
            hint=f"this row looks like {others}, but a source has one format: give each format its own source"
            if others
            else _suggest_columns(row, form),
        )


def _alike(row: Row, form: str) -> dict[str, str]:
    """Return the columns of a format -> what `row` calls them: in other capitals, or by another name that data sets have."""
    found: dict[str, str] = {}
    for new in (*sorted(FORMATS[form][0]), *(["input"] if form == "instruction" else [])):
        names = (name for alias in (new, *ALSO_CALLED.get(new, ())) for name in row if name.lower() == alias)
        if old := next((name for name in names if name not in found.values()), None):
            found[new] = old
    return found


def _suggest_columns(row: Row, form: str) -> str:
    """Return the `columns` that would give `row` what a format lacks; what it has no name for is left open."""
    columns = dict.fromkeys(sorted(FORMATS[form][0]), "NAME") | _alike(row, form)
    listed = ", ".join(f"{new}: {old}" for new, old in columns.items() if new != old)
    return f"`sources: [{{path: FILE, columns: {{{listed}}}}}]` instead of `train_path`"
