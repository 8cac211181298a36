"""Rows of every format, files of every kind, and what is said of those that cannot be read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.schema import DataSource
from sft_play.data.datasets import read_builtin
from sft_play.data.example import Message
from sft_play.data.formats import recognise, to_example
from sft_play.data.readers import read_file
from sft_play.data.sources import read_source
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
    messages = to_example(row, form, place="", source=0).messages
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


# ---- Files


def source(path: Path | str, **options: Any) -> DataSource:
    return DataSource(path=str(path), **options)


def unreadable(path: Path | str) -> DataError:
    with pytest.raises(DataError) as caught:
        for _, row in read_source(source(path)):
            if isinstance(row, DataError):  # a line that is no row: preparation goes on to show the next ones too
                raise row
    return caught.value


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


TWO = [{"prompt": 'a, "b"', "completion": "c\nd"}, {"prompt": "ä", "completion": "2"}]
CONTENTS: dict[str, str] = {
    "rows.jsonl": "\n".join(json.dumps(row) for row in TWO) + "\n\n",
    "rows.json": json.dumps(TWO, indent=1),
    "lines.json": "\n".join(json.dumps(row) for row in TWO),
    "rows.csv": 'prompt,completion\r\n"a, ""b""","c\nd"\r\nä,2\r\n',
}


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "bom"])
def test_each_kind_of_file_gives_the_same_rows(name: str, mark: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, mark + CONTENTS[name])
    assert [row for _, row in read_file(path)] == TWO


def test_globs_and_folders_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b", "a", "deep/c"):
        write(tmp_path / f"{name}.jsonl", json.dumps({"prompt": name}))
    write(tmp_path / "notes.txt", "not data")
    (tmp_path / "empty.json").mkdir()

    def prompts(pattern: Path) -> list[str]:
        return [row["prompt"] for _, row in read_source(source(pattern)) if not isinstance(row, DataError)]

    assert prompts(tmp_path / "*.jsonl") == ["a", "b"]
    assert prompts(tmp_path / "**" / "*.jsonl") == ["a", "b", "deep/c"]
    assert prompts(tmp_path) == ["a", "b", "deep/c"]


@pytest.mark.parametrize("name", ["missing.jsonl", "./missing", "deep/folder/missing"])
def test_a_missing_file_is_named(name: str) -> None:
    error = unreadable(name)
    assert (error.place, error.message) == (name, "there is no such file")


def test_a_glob_without_a_match_and_a_folder_without_data_are_named(tmp_path: Path) -> None:
    assert f"no file matches `{tmp_path}/*.csv`" in unreadable(tmp_path / "*.csv").message
    assert unreadable(tmp_path).place == str(tmp_path)


@pytest.mark.parametrize(("content", "kind"), [("[1]", "list"), ("3", "a number"), ('"text"', "text"), ("null", "empty")])
def test_a_line_that_is_no_object_is_named(content: str, kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", content)
    error = unreadable(path)
    assert error.place == f"{path}:1"
    assert kind in error.message


# ---- The built-in set


@pytest.mark.slow
def test_the_built_in_set_is_stable_and_its_modules_do_not_overlap() -> None:
    train, validation = list(read_builtin("docstrings", "train")), list(read_builtin("docstrings", "validation"))
    assert len(train) > 1000
    assert len(validation) == 80
    assert {place.split()[0] for place, _ in train}.isdisjoint(place.split()[0] for place, _ in validation)
    assert validation == list(read_builtin("docstrings", "validation"))
    assert all(recognise(row) == "messages" for _, row in train + validation)


@pytest.mark.parametrize(("path", "split"), [("builtin:poems", None), ("builtin:docstrings", "test")])
def test_an_unknown_built_in_set_or_split_names_what_there_is(path: str, split: str | None) -> None:
    with pytest.raises(DataError) as caught:
        list(read_source(source(path, split=split)))
    assert "docstrings" in f"{caught.value.message} {caught.value.hint}"
