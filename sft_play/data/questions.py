"""What `make infer` is asked: the rows of a data file without their last answer, or a text file with one prompt a line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sft_play.config.types import names_of
from sft_play.data.example import Message, text_of
from sft_play.data.files_read import TABLES, Placed, read_file
from sft_play.data.formats import to_example
from sft_play.data.select import rename
from sft_play.data.unpack import kind, open_bytes
from sft_play.errors import DataError, UserError, raise_all

SHOWN_PROBLEMS = 20
TO_COME = "\N{HORIZONTAL ELLIPSIS}"
"""Stands for the answer while a row is read as its format, which needs one."""
FORMS: Mapping[str, tuple[str, str]] = {
    "messages": ("messages", ""),
    "conversations": ("sharegpt", ""),
    "prompt": ("prompt_completion", "completion"),
    "question": ("question_answer", "answer"),
    "instruction": ("instruction", "output"),
}
"""Column that asks -> format, and its column with the answer; the first one that a row has counts."""


class Row(NamedTuple):
    """One line or row of `INPUT`."""

    place: str
    """`file:line`."""
    messages: list[Message]
    """The conversation up to the turn that is to be answered; none where the line is empty."""
    tools: list[Any] | None = None
    reference: str | None = None
    """The answer that the row has already."""


def read_questions(path: Path, columns: Sequence[Mapping[str, str]] = ()) -> list[Row]:
    """Returns as many rows as the file has, in order. `columns`: new names of columns (`data.sources[].columns`), the first that apply.

    Raises `DataError` with the places of all bad rows, and for a file without prompts.
    """
    if not path.is_file():
        raise DataError("`INPUT` cannot be read: there is no such file", place=str(path))
    try:
        if kind(path) in TABLES:
            rows = _rows_of_table(path, columns)
        else:
            with open_bytes(path) as stream:
                lines = stream.read().decode("utf-8-sig").removesuffix("\n").split("\n")
            rows = [Row(f"{path}:{number}", _asked(line.strip())) for number, line in enumerate(lines, 1)]
    except OSError as error:
        raise DataError(f"`INPUT` cannot be read: {error.strerror}", place=str(path)) from error
    except UnicodeDecodeError as error:
        raise DataError("`INPUT` is not UTF-8 text", place=str(path)) from error
    if not any(row.messages for row in rows):
        raise DataError("`INPUT` holds no prompts", place=str(path))
    return rows


def _rows_of_table(path: Path, columns: Sequence[Mapping[str, str]]) -> list[Row]:
    rows: list[Row] = []
    problems: list[UserError] = []
    for placed in read_file(path):
        try:
            rows.append(_row(placed, columns))
        except DataError as error:
            problems.append(DataError(error.message, place=error.place or placed[0], hint=error.hint))
    raise_all(problems[:SHOWN_PROBLEMS])
    if kind(path) in (".jsonl", ".ndjson"):
        with open_bytes(path) as stream:
            blank = [number for number, line in enumerate(stream, 1) if not line.strip()]
        for number in blank:
            rows.insert(number - 1, Row(f"{path}:{number}", []))
    return rows


def _row(placed: Placed, columns: Sequence[Mapping[str, str]]) -> Row:
    place, row = placed
    if isinstance(row, DataError):
        raise row
    for names in columns:
        if there := {new: old for new, old in names.items() if old.partition(".")[0] in row or "." in new}:
            row = rename(row, there)
            break
    asks = next((column for column in FORMS if row.get(column) is not None), None)
    if asks is None:
        raise DataError(f"no column asks: expected {', '.join(f'`{c}`' for c in FORMS)}; the columns are {names_of(row)}")
    if isinstance(row[asks], str) and not row[asks].strip():
        return Row(place, [])
    form, answer = FORMS[asks]
    example = to_example(_answered(row, asks, answer), form, place=place, source=0)
    *asked, last = example.messages or []
    if not any(turn["role"] == "user" for turn in asked):
        raise DataError(f"`{asks}` holds no turn that could be answered")
    reference = last["content"] or json.dumps(last.get("tool_calls", []), ensure_ascii=False)
    messages = [{key: value for key, value in turn.items() if key != "train"} for turn in asked]
    return Row(place, messages, example.tools, None if reference == TO_COME else reference)


def _answered(row: Mapping[str, Any], asks: str, answer: str) -> Mapping[str, Any]:
    """Returns a row that ends with an answer: its own, or `TO_COME`."""
    said = row[asks]
    if not answer:
        name, words = ("role", "content") if asks == "messages" else ("from", "value")
        last = said[-1] if isinstance(said, Sequence) and not isinstance(said, str) and said else None
        ended = isinstance(last, Mapping) and last.get(name, last.get("role")) in ("assistant", "gpt", "model", "function_call")
        return row if ended else {**row, asks: [*said, {name: "assistant", words: TO_COME}] if last else said}
    found = row.get(answer)
    if found is not None and not (isinstance(found, str) and not found.strip()):
        return row
    return {**row, answer: TO_COME if isinstance(said, str) or asks != "prompt" else [{"role": "assistant", "content": TO_COME}]}


def _asked(text: str) -> list[Message]:
    return [{"role": "user", "content": text_of(text, "the line")}] if text else []
