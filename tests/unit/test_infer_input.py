"""Prompts from files: texts and JSON lines, and every bad line by its number."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, cast

import pytest

from sft_play.__main__ import COMMANDS
from sft_play.config.call import parse_call
from sft_play.config.load import load_config, save_config
from sft_play.config.schema import DataSource
from sft_play.errors import DataError, UserError
from sft_play.evaluation.evaluate import read_settings
from sft_play.infer import read_questions


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("not json", "is not JSON"),
        ('{"text": "x"}', "no column contains a prompt: expected `messages`"),
        ('{"query": "x"}', "hint: rename the column of the prompts to `prompt`"),
        ('{"messages": [{"role": "user"}]}', "`messages[0]` lacks `role` or `content`; it has `role`"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "has no turn that can be answered"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n{line}\n')
    with pytest.raises(UserError) as caught:
        read_questions(path)
    text = caught.value.render()
    assert caught.value.exit_code == 4
    assert text.count(words) == 1 and f"{path}:2" in text and "(2 such rows; the first is here)" in text


def test_other_rows_are_scored_with_the_columns_and_filter_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table of the same kind as the training's; one with our names, or without what is filtered, is read as it is."""
    monkeypatch.chdir(tmp_path)
    mapped = {"prompt": "text", "completion": "label"}
    for condition, name, columns, rule in (
        ("", "same.csv", mapped, None),
        ("", "ours.csv", {}, None),
        (", filter: number(ok) == 1", "same.csv", mapped, None),
        (", filter: number(ok) == 1", "marked.csv", mapped, "number(ok) == 1"),
    ):
        Path("my.yaml").write_text(
            "model: {name: a/b}\n"
            f"data: {{sources: [{{path: t.csv, columns: {{prompt: text, completion: label}}{condition}}}]}}\n"
        )
        save_config(load_config(Path("my.yaml")), Path("runs/one/config.json"))
        Path("same.csv").write_text("text,label\nIt broke,bug\n")
        Path("ours.csv").write_text("prompt,completion\nIt broke,bug\n")
        Path("marked.csv").write_text("text,label,ok\nIt broke,bug,1\n")
        call = parse_call(["eval", "RUN=runs/one", f"DATA={name}"], COMMANDS)
        [source] = cast(list[DataSource], read_settings(call).config.data.validation)
        assert (source.path, source.columns, source.filter) == (name, columns, rule)
        assert ("the run's filter are scored: number(ok) == 1" in capsys.readouterr().err) == (rule is not None)


def test_a_table_without_the_runs_columns_is_answered_with_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    columns = {"prompt": "Nachricht", "completion": "Abteilung"}
    Path("my.yaml").write_text(
        f"model: {{name: a/b}}\ndata: {{sources: [{{path: t.csv, columns: {json.dumps(columns)}}}]}}\n"
    )
    save_config(load_config(Path("my.yaml")), Path("runs/one/config.json"))
    Path("new.csv").write_text("text,Nachricht,Ziel\n1,Hallo,a\n")
    with pytest.raises(DataError, match="the run's `columns` names `Abteilung`, which the row lacks") as caught:
        read_settings(parse_call(["eval", "RUN=runs/one", "DATA=new.csv"], COMMANDS))
    typed = "DATA_VALIDATION=[{path: new.csv, columns: {prompt: Nachricht, completion: NAME}}]"
    assert caught.value.place == "new.csv" and shlex.split((caught.value.hint or "").partition(": ")[2]) == [typed]
    word = typed.replace("NAME", "Ziel")
    [source] = cast(
        list[DataSource],
        read_settings(parse_call(["eval", "RUN=runs/one", word], COMMANDS)).config.data.validation,
    )
    assert source.columns == {"prompt": "Nachricht", "completion": "Ziel"}
    Path("new.csv").write_text("Text\nHallo\n")
    with pytest.raises(DataError, match="expected `Nachricht` as in the run's `columns`, or `messages`") as caught:
        read_questions(Path("new.csv"), [columns])
    assert "rename the column of the prompts to `Nachricht`" in (caught.value.hint or "")


ASKED = [{"role": "user", "content": "2+2?"}]


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}


@pytest.mark.parametrize(
    ("row", "contents", "reference"),
    [
        (
            {"instruction": "Add.", "input": "2+2", "output": "4", "system": "Be brief."},
            ["Be brief.", "Add.\n\n2+2"],
            "4",
        ),
        (
            {
                "messages": [
                    *ASKED,
                    {"role": "assistant", "content": "", "tool_calls": [CALL]},
                    {"role": "tool", "content": "4"},
                ]
            },
            ["2+2?", "", "4"],
            None,
        ),
    ],
)
def test_the_last_answer_of_a_training_row_becomes_the_reference(
    tmp_path: Path, row: dict[str, Any], contents: list[str], reference: str | None
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row | {"tools": [{"type": "function"}]}) + "\n")
    (question,) = read_questions(path)
    assert ([turn["content"] for turn in question.messages], question.reference) == (contents, reference)
    assert question.tools == [{"type": "function"}] and not any("train" in turn for turn in question.messages)


def test_what_a_row_thinks_is_no_part_of_its_question_but_a_context_is_not_ignored(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "2+2?", "answer": "4", "rationale": "2 twice", "thought": "hm"}) + "\n")
    (question,) = read_questions(path)
    assert (question.messages, question.reference) == (ASKED, "4")
    path.write_text(json.dumps({"question": "2+2?", "context": "in base 3"}) + "\n")
    with pytest.raises(DataError, match="`context` seems to be a part of the prompt"):
        read_questions(path)


@pytest.mark.parametrize("empty", ["", " \n", None, []])
def test_an_empty_last_answer_is_requested(tmp_path: Path, empty: Any) -> None:
    turn = {"role": "assistant", "content": empty}
    rows = [
        {"messages": [*ASKED, turn]},
        {"messages": [*ASKED, {"role": "assistant", "content": "5"}, *ASKED, turn]},
        {"prompt": ASKED, "completion": [turn]},
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": empty}]},
        {"prompt": "2+2?", "completion": empty},
        {"prompt": ASKED, "completion": []},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    questions = read_questions(path)
    assert [
        (question.messages[-1]["role"], question.messages[-1]["content"], question.reference) for question in questions
    ] == [("user", "2+2?", None)] * len(rows)
    assert [len(question.messages) for question in questions] == [1, 3, 1, 1, 1, 1]


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe\x00bad"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "questions.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"no prompts|UTF-8"):
        read_questions(path)
