"""Rows of every format as data sets write them, and the errors for unusable ones."""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

import pytest

from sft_play.config.schema import DataSource
from sft_play.data.formats import FORMATS, Example, recognise, understand
from sft_play.errors import DataError

Row = dict[str, Any]

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ROWS: dict[str, Row] = {
    "messages": {"messages": [USER, ANSWER]},
    "prompt_completion": {"prompt": "q", "completion": "a"},
    "instruction": {"instruction": "q", "output": "a"},
    "question_answer": {"question": "q", "answer": "a"},
}


def read(row: Row, **options: Any) -> Example:
    return understand(("f.jsonl:3", row), None, **options)


def refused(row: Row, **options: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        read(row, **options)
    assert caught.value.place == "f.jsonl:3"
    return caught.value


def test_every_format_can_be_named() -> None:
    assert set(get_args(get_type_hints(DataSource)["format"])) == {"auto", *FORMATS}


@pytest.mark.parametrize("form", ROWS)
def test_each_format_is_recognised_and_a_system_column_becomes_the_first_message(form: str) -> None:
    assert recognise(ROWS[form]) == form
    assert read({**ROWS[form], "system": "s"}).messages == [{"role": "system", "content": "s"}, USER, ANSWER]
    assert read({**ROWS[form], "system": None}).messages == [USER, ANSWER]


@pytest.mark.parametrize(("added", "expected"), [("text", "q\n\ntext"), ("", "q"), ("  ", "q"), (None, "q")])
def test_alpaca_input_is_added_to_the_instruction_and_never_replaces_it(added: str | None, expected: str) -> None:
    assert read({**ROWS["instruction"], "input": added}).messages == [{**USER, "content": expected}, ANSWER]


def test_alpaca_history_comes_before_the_question() -> None:
    example = read({"instruction": "q2", "output": "a2", "history": [["q", "a"]], "system": "s"})
    assert [turn["content"] for turn in example.messages or ()] == ["s", "q", "a", "q2", "a2"]


def test_tools_calls_and_results_are_stored_in_one_form() -> None:
    asks = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    }
    gives = {"role": "tool", "content": "2", "tool_call_id": "1", "name": "add"}
    example = read({"messages": [USER, asks, gives, ANSWER], "tools": json.dumps([{"name": "add"}])})
    assert example.messages == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "1"}]},
        gives,
        ANSWER,
    ]
    assert example.tools == [{"name": "add"}]


@pytest.mark.parametrize(
    ("row", "train"), [({"train": False}, False), ({"weight": 0}, False), ({"weight": 1}, True), ({}, None)]
)
def test_a_turn_says_whether_it_is_learnt(row: Row, train: bool | None) -> None:
    messages = read({"messages": [USER, {**ANSWER, **row}, USER, ANSWER]}).messages or []
    assert messages[1].get("train") is train


def test_text_parts_names_and_thoughts_are_read() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    rows = {"messages": [{"role": "developer", "content": parts}, USER, {**ANSWER, "reasoning": "hm", "name": None}]}
    assert read(rows).messages == [{"role": "system", "content": "ab"}, USER, {**ANSWER, "reasoning_content": "hm"}]


def test_sharegpt_turns_are_read_with_their_calls() -> None:
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": "let me see"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "a"},
    ]
    assert read({"conversations": turns}).messages == [
        {"role": "system", "content": "s"},
        USER,
        {"role": "assistant", "content": "let me see", "tool_calls": [CALL]},
        {"role": "tool", "content": "2"},
        ANSWER,
    ]


def test_message_lists_in_prompt_and_completion_train_the_completion_alone() -> None:
    example = read({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]})
    assert example.messages == [USER, {**ANSWER, "train": False}, USER, ANSWER]


def test_token_rows_are_read_without_their_padding() -> None:
    row = {"input_ids": [0, 1, 2, 3, 0], "labels": [-100, -100, 2, 3, -100]}
    whole, cut = read(row), read(row | {"attention_mask": [0, 1, 1, 1, 0]})
    assert (whole.input_ids, whole.labels) == (row["input_ids"], row["labels"])
    assert (cut.input_ids, cut.labels) == ([1, 2, 3], [-100, 2, 3])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": 3, "completion": "a"}, "`prompt` is a number"),
        ({"prompt": "q", "completion": "  \n"}, "nothing to learn"),
        ({"messages": [USER, {**ANSWER, "content": " "}]}, "nothing to learn"),
        ({"messages": [{"role": "customer", "content": "q"}]}, "`messages[0].role` is `customer`"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "`messages[0].content[0]` is a part of type `image`",
        ),
        ({"messages": [USER, ANSWER, {"role": "tool", "content": "2"}, USER, ANSWER]}, "user after tool (turn 4)"),
        ({"messages": [USER, {**ANSWER, "train": "no"}]}, "`messages[1].train` is text; expected true or false"),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": "add()"}]},
            "is text that is not JSON",
        ),
        ({"instruction": "q", "output": "a", "history": [["q"]]}, "`history[0]` is not a pair"),
        ({"input_ids": [1, -5]}, "`input_ids` contains -5"),
        ({"input_ids": [1, 2], "labels": [1, -100]}, "`labels` is -100 everywhere"),
        ({"input_ids": [1, 2], "weight": [0, 0]}, "`weight` is 0 everywhere"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "is 0 between tokens"),
    ],
)
def test_rows_that_cannot_be_learnt_are_refused_with_the_reason(row: Row, message: str) -> None:
    assert message in refused(row).message


@pytest.mark.parametrize(
    ("row", "message", "hint"),
    [
        (
            {**ROWS["prompt_completion"], **ROWS["question_answer"]},
            "prompt_completion, question_answer",
            '{"prompt": "q", "completion": "a"',
        ),
        ({"instruction": "i", "context": "c", "response": "r"}, "", "columns: {output: response, input: context}"),
        ({"review": "p", "sentiment": "s"}, "", "columns: {prompt: review, completion: sentiment}"),
        ({"Message": "p", "Category": "s"}, "", "columns: {prompt: Message, completion: Category}"),
        ({"article": "p", "highlights": "s", "id": "1"}, "", "columns: {prompt: article, completion: highlights}"),
        ({"q": "Why is it?", "a": "It is so because of that one thing."}, "", "columns: {prompt: q, completion: a}"),
        ({"system": "Be brief.", "chat": "USER: q ASSISTANT: a"}, "", "columns: {messages: NAME}"),
        ({"v1": "ham", "v2": "See you later"}, "", "columns: {prompt: v2, completion: v1}"),
        ({"translation": {"en": "x", "fr": "y"}}, "", "columns: {prompt: translation.en, completion: translation.fr}"),
        ({"English": "The cat", "Español": "El gato"}, "", 'columns: {prompt: English, completion: "Español"}'),
        (
            {"article_body": "A long text", "abstract": "It", "number": 7},
            "",
            "columns: {prompt: article_body, completion: abstract}",
        ),
        ({"Texte": "a b", "Genre": "x", "Date": "2026-01-02"}, "", "columns: {prompt: NAME, completion: NAME}"),
        ({"question": "p", "answers": ["s"]}, "", "columns: {answer: NAME}"),
        ({"Question": "p", "Answer": "s", "Notes": ""}, "", "columns: {question: Question, answer: Answer}"),
    ],
)
def test_ambiguous_and_unknown_columns_are_refused_with_suggestions(row: Row, message: str, hint: str) -> None:
    error = refused(row)
    assert message in error.message and hint in (error.hint or "")


@pytest.mark.parametrize(
    ("row", "message"), [({}, "is missing"), ({"author": None}, "is empty"), ({"author": ["a"]}, "is a list")]
)
def test_a_row_without_a_group_is_refused(row: Row, message: str) -> None:
    assert message in refused({"text": "t", **row}, group_by="author").message
