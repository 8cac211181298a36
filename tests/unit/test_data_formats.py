"""Rows of every format, and what is said of those that cannot be understood."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from sft_play.data.formats import Message, recognise, understand
from sft_play.errors import DataError

Row = dict[str, Any]

MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
ROWS: dict[str, Row] = {
    "messages": {"messages": MESSAGES},
    "prompt_completion": {"prompt": "q", "completion": "a"},
    "instruction": {"instruction": "q", "output": "a"},
    "question_answer": {"question": "q", "answer": "a"},
}


def to_messages(row: Mapping[str, Any], form: str) -> list[Message]:
    messages = understand(("", row), 0, form).messages
    assert messages is not None
    return messages


def refused(row: Mapping[str, Any], form: str | None = None) -> DataError:
    with pytest.raises(DataError) as caught:
        to_messages(row, form or recognise(row))
    return caught.value


@pytest.mark.parametrize("form", ROWS)
def test_each_format_is_recognised_and_a_system_column_becomes_the_first_message(form: str) -> None:
    assert recognise(ROWS[form]) == form
    assert to_messages({**ROWS[form], "system": "s"}, form) == [{"role": "system", "content": "s"}, *MESSAGES]
    assert to_messages({**ROWS[form], "system": None}, form) == MESSAGES


@pytest.mark.parametrize(("given", "wanted"), [("text", "q\n\ntext"), ("", "q"), ("  ", "q"), (None, "q")])
def test_alpaca_input_is_added_to_the_instruction_and_never_replaces_it(given: str | None, wanted: str) -> None:
    assert to_messages({**ROWS["instruction"], "input": given}, "instruction")[0]["content"] == wanted


def test_columns_that_fit_two_formats_are_refused_with_both_names() -> None:
    error = refused({**ROWS["prompt_completion"], **ROWS["question_answer"]})
    assert "prompt_completion, question_answer" in error.message
    assert (error.hint or "").startswith("set `format` of the source; the row is {")
    assert '"completion": "a"' in (error.hint or "")


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"instruction": "i", "context": "c", "response": "r"}, "columns: {output: response, input: context}"),
        ({"question": "p", "answers": ["s"]}, "columns: {answer: NAME}"),
        ({"Question": "p", "Answer": "s", "Notes": ""}, "columns: {answer: Answer, question: Question}"),
    ],
)
def test_a_missing_column_is_answered_with_the_one_that_may_be_meant(row: dict[str, Any], columns: str) -> None:
    with pytest.raises(DataError) as caught:
        recognise(row)
    assert columns in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"prompt": 3, "completion": "a"}, "`prompt` is a number"),
        ({"messages": [{"role": "human", "content": "q"}]}, "`messages[0].role` is `human`"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "`messages[0].content[0]` is a part of type `image`"),
    ],
)
def test_a_value_of_the_wrong_type_is_named_with_what_it_is(row: Row, named: str) -> None:
    assert named in refused(row).message


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "completion": "  \n"},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": " "}]},
    ],
)
def test_a_row_without_an_answer_is_refused(row: Row) -> None:
    assert "nothing to learn" in refused(row).message
