"""Rows as exports of other tools have them: what says that a row is no good, belongs elsewhere, is a piece of something
or is written twice is refused by name.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.schema import DataSource
from sft_play.config.yaml_files import parse_yaml
from sft_play.data.formats import AFTER, UNORDERED, Example, understand
from sft_play.data.sources import read_source
from sft_play.errors import DataError

Row = dict[str, Any]
USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
PAIR = {"prompt": "q", "completion": "a"}


def read(row: Row) -> Example:
    return understand(("f.jsonl:3", row), None)


def refused(row: Row) -> DataError:
    with pytest.raises(DataError) as caught:
        read(row)
    assert caught.value.place == "f.jsonl:3"
    return caught.value


def filters(error: DataError) -> list[str]:
    """Return the `filter`s of a hint as YAML reads them."""
    return [parse_yaml(text, "hint").plain() for text in re.findall(r"`filter: (.+?)`", error.hint or "")]


def kept(folder: Path, rows: list[Row], **options: Any) -> int:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return sum(not isinstance(row, DataError) for _, row in read_source(DataSource(path=str(path), **options)))


@pytest.mark.parametrize(
    ("bad", "good"),
    [
        ({"finish_reason": "length"}, {"finish_reason": "stop"}),
        ({"stop_reason": "max_tokens"}, {"stop_reason": "end_turn"}),
        ({"deleted_at": "2024-01-01"}, {"deleted_at": None}),
        ({"deleted_at": "2024-01-01"}, {"deleted_at": ""}),
        ({"error": "timeout"}, {"error": None}),
        ({"published": False}, {"published": True}),
        ({"published": "no"}, {"published": "yes"}),
        ({"is_helpful": 0}, {"is_helpful": 1}),
        ({"use_for_training": False}, {"use_for_training": True}),
        ({"archived": True}, {"archived": False}),
        ({"was_cancelled": "True"}, {"was_cancelled": "False"}),
        ({"truncated": 1}, {"truncated": 0}),
        ({"review_status": "rejected"}, {"review_status": "approved"}),
        ({"quality": "low"}, {"quality": "high"}),
        ({"is_train": False}, {"is_train": True}),
        ({"split": "held-out"}, {"split": "train"}),
        ({"is_holdout": True}, {"is_holdout": False}),
        ({"IsHoldout": "True"}, {"IsHoldout": "False"}),
        ({"Data Split": "Test"}, {"Data Split": "train"}),
        ({"review-status": "Draft"}, {"review-status": "Published"}),
        ({"Published": "FALSCH"}, {"Published": "WAHR"}),
        ({"archived": "✓"}, {"archived": "✗"}),
        ({"Marked As Duplicate": "", "deleted": "x"}, {"Marked As Duplicate": "", "deleted": ""}),
        ({"Is Approved?": "No"}, {"Is Approved?": "Yes"}),
        ({"metadata": {"deleted": True}}, {"metadata": {"deleted": False}}),
        ({"metadata": {"split": "test"}}, {"metadata": {"split": "train"}}),
        ({"meta": {"Finish Reason": "length"}}, {"meta": {"Finish Reason": "stop", "score": 1}}),
        ({"do_not_train": True}, {"do_not_train": False}),
        ({"consent": "no"}, {"consent": "yes"}),
        ({"tests_passed": False}, {"tests_passed": True}),
        ({"http_status": 500}, {"http_status": 200}),
        ({"user_feedback": "thumbs_down"}, {"user_feedback": "thumbs_up"}),
        ({"finishReason": "PROHIBITED_CONTENT"}, {"finishReason": "STOP"}),
        ({"stop_reason": "refusal"}, {"stop_reason": "<|im_end|>"}),
        ({"review_result": False}, {"review_result": True}),
        ({"outcome": "failure"}, {"outcome": "success"}),
        ({"status": "Not approved"}, {"status": "Approved"}),
        ({"review_status": "Needs revision"}, {"review_status": "not rated"}),
        ({"Status": "abgelehnt"}, {"Status": "freigegeben"}),
        ({"status": "Closed - Duplicate"}, {"status": "Closed"}),
        ({"satisfaction": "unsatisfied"}, {"satisfaction": "satisfied"}),
        ({"duplicate_of": "Q-17"}, {"duplicate_of": None}),
        ({"rejection_reason": "wrong facts"}, {"rejection_reason": ""}),
        ({"flags": ["toxic"]}, {"flags": []}),
        ({"response_truncated": True}, {"response_truncated": False, "num_truncated": 1, "not_safe": False}),
        ({"IsLatestVersion": False}, {"IsLatestVersion": True}),
        ({"in_test_set": True}, {"in_test_set": False}),
        ({"answer_correct": False}, {"answer_correct": True, "tool_use": False, "search_enabled": False}),
    ],
)
def test_only_rows_that_speak_against_themselves_need_a_filter(bad: Row, good: Row, tmp_path: Path) -> None:
    rows = [{**PAIR, **good}, {**PAIR, **bad}]
    errors = []
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for _, row in read_source(DataSource(path=str(path))):
        errors += [row] if isinstance(row, DataError) else []
    assert [error.place for error in errors] == [f"{path}:2"], "the good row is read"
    condition, everything = filters(errors[0])
    assert kept(tmp_path, rows, filter=condition) == 1
    assert kept(tmp_path, rows, filter=everything) == 2, everything
    assert kept(tmp_path, [{**PAIR, "label": "low", "state": "Ohio"}]) == 1, "a class is no status"


@pytest.mark.parametrize(
    ("column", "good", "bad", "condition"),
    [
        ("isCorrect", "VRAI", "FAUX", 'isCorrect == "VRAI"'),
        ("Is Correct", "ja", "nein", 'column("Is Correct") == "ja"'),
        ("Human Rating", 5, 1, 'column("Human Rating") >= 5'),
        ("score", "4,5", "1,0", 'score in ["4,5"]'),
        ("rating", "★★★★", "★", 'rating in ["★★★★"]'),
        ("stars", 5, 1, "stars >= 5"),
        ("reaction", "👍", "👎", 'reaction != "👎"'),
        ("is_correct", 1, -1, "is_correct == 1"),
        ("is_deleted", "", "X ", "blank(is_deleted)"),
        ("label", "1", "-1", 'label == "1"'),
        ("feedback", 1, -1, "feedback >= 0"),
        ("is_latest", True, False, "is_latest"),
        ("Preferred", "yes", "no", 'Preferred == "yes"'),
        ("status_code", "OK", "ERROR", 'status_code != "ERROR"'),
        ("label", "desirable", "undesirable", 'label != "undesirable"'),
    ],
)
def test_a_judgement_is_known_in_every_spelling_and_in_the_words_of_sheets(
    column: str, good: Any, bad: Any, condition: str, tmp_path: Path
) -> None:
    rows = [{**PAIR, column: good}, {"prompt": "q2", "completion": "a2", column: bad}]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    [error, *_] = [row for _, row in read_source(DataSource(path=str(path))) if isinstance(row, DataError)]
    assert f"`{column}` seems to say" in error.message and filters(error)[0] == condition
    assert kept(tmp_path, rows, filter=condition) == 1


def test_a_judgement_is_known_at_any_depth(tmp_path: Path) -> None:
    rows = [{**PAIR, "meta": {"review": {"by": "a", "status": status}}} for status in ("approved", "rejected")]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (error,) = [row for _, row in read_source(DataSource(path=str(path))) if isinstance(row, DataError)]
    assert "`meta.review.status` seems to say" in error.message
    assert kept(tmp_path, rows, filter=filters(error)[0]) == 1


@pytest.mark.parametrize("column", ["b", "answer_b", "choice_b", "opb", "Option B", "option 2"])
def test_choices_are_known_by_the_letter_that_is_the_answer(column: str) -> None:
    row = {"question": "q", "answer": "B", column: "two"}
    assert f"`{column}` seems to be a choice" in refused(row).message
    assert read({"question": "q (b) two", "answer": "B", column: "two"}).messages
    if column in ("b", "answer_b"):
        assert read({"question": "q", "answer": "a", column: "two"}).unread == ((column, "two"),)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({**PAIR, "Image URL": "x.png"}, "`Image URL`"),
        ({"messages": [USER, ANSWER, USER], "Model Response": "a"}, "`Model Response` seems to be the answer"),
        ({"text": "hi", "Speaker": "User"}, "`Speaker` is `User`"),
        ({**PAIR, "Retrieved Docs": "a passage"}, "`Retrieved Docs` seems to be a part of the prompt"),
    ],
)
def test_names_of_columns_are_known_in_every_spelling(row: Row, problem: str) -> None:
    assert problem in refused(row).message


@pytest.mark.parametrize("answer", ["#NV", "#BEZUG!", "#¿NOMBRE?", "#VALEUR!", "#REF!", "#N/A"])
def test_a_sheets_error_is_no_answer_in_any_language(answer: str) -> None:
    assert "stands for none" in refused({**PAIR, "completion": answer}).message
    assert read({**PAIR, "completion": f"{answer} is an error"}).messages


@pytest.mark.parametrize(
    "key",
    [
        *({"deleted": True}, {"is_error": True}, {"status": "error"}, {"finish_reason": "length"}, {"private": True}),
        *({"is_internal": True}, {"subtype": "channel_join"}, {"visibility": "internal"}),
    ],
)
def test_a_turn_that_was_withdrawn_or_cut_is_refused(key: Row) -> None:
    for messages in ([{**USER, **key}, ANSWER], [USER, {**ANSWER, **key}]):
        assert f".{next(iter(key))}` seems to" in refused({"messages": messages}).message
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    result = {"role": "tool", "content": "x", **({} if "deleted" in key else key)}
    assert read({"messages": [USER, call, result, ANSWER]}).messages, "a tool's error is what the answer is about"
    assert read({"messages": [{**USER, "deleted": False}, {**ANSWER, "status": "ok"}]}).messages == [USER, ANSWER]
    assert "messages[1].metadata`" in refused({"messages": [USER, {**ANSWER, "metadata": key}]}).message


@pytest.mark.parametrize("key", ["tool_calls", "function_call", "reasoning_content", "thinking"])
def test_what_only_answers_have_is_refused_in_other_turns(key: str) -> None:
    value = {"name": "f", "arguments": "{}"} if key == "function_call" else [{"function": {"name": "f"}}]
    value = "hm" if "ing" in key else value
    assert "but the turn's role is user" in refused({"messages": [{**USER, key: value}, ANSWER]}).message
    for nothing in (None, [], "", {}):
        assert read({"messages": [{**USER, key: nothing}, ANSWER]}).messages == [USER, ANSWER]


@pytest.mark.parametrize(
    ("turn", "what"),
    [
        ({**USER, "context": "passage"}, "a part of the prompt"),
        ({**USER, "documents": [{"text": "passage"}]}, "a part of the prompt"),
        ({**USER, "system": "be short"}, "a system turn"),
        ({**USER, "choices": ["x", "y"]}, "a choice"),
        ({**ANSWER, "edited_content": "better"}, "a correction"),
        ({**ANSWER, "corrected": "better"}, "a correction"),
    ],
)
def test_texts_beside_a_turns_own_are_refused(turn: Row, what: str) -> None:
    messages = [turn, ANSWER] if turn["role"] == "user" else [USER, turn]
    assert f"seems to be {what}" in refused({"messages": messages}).message
    inside = {**turn, "content": f"{turn['content']} passage be short x y better"}
    assert read({"messages": [inside, ANSWER] if turn["role"] == "user" else [USER, inside]}).messages


@pytest.mark.parametrize(
    "column",
    [
        *("evidence", "sql_context", "schema", "retrieved_docs", "edited_completion", "corrected_answer", "body"),
        *("docs", "search_results", "transcript", "old_contents", "starter_code", "response_format"),
    ],
)
def test_a_columns_text_that_belongs_to_the_row_is_refused(column: str) -> None:
    assert f"`{column}` seems to be a" in refused({**PAIR, column: "other words"}).message
    assert read({"prompt": "q: other words", "completion": "a", column: "other words"}).messages
    assert read({**PAIR, "edited_at": "2024-01-01", "edited": True}).messages


@pytest.mark.parametrize("column", ["ideal", "expected_output", "ground_truth", "content", "model_response"])
def test_the_answer_that_a_conversation_waits_for_is_refused_elsewhere(column: str) -> None:
    row = {"messages": [USER, ANSWER, USER], column: [{"type": "text", "text": "final"}]}
    assert f"`{column}` seems to be the answer" in refused(row).message
    assert read({"messages": [USER, ANSWER], column: "a"}).messages == [USER, ANSWER]
    after = read({"messages": [USER, ANSWER, USER]})
    assert after.messages == [USER, ANSWER] and after.doubts == (AFTER,)


@pytest.mark.parametrize(
    "times",
    [
        (3, 2, 1.5),
        ("2024-01-02T10:00", "2024-01-02T09:59", "2024-01-01"),
        ("2024-01-02T10:00", "2024-01-02T10:00", "2024-01-01"),
        ("1700000300.0001", "1700000200.0001", "999999999"),
        ("02.01.2024 10:00", "02.01.2024 09:00", "31.12.2023"),
    ],
)
def test_turns_that_begin_with_the_newest_are_refused(times: tuple[Any, ...]) -> None:
    turns = [{**turn, "createdAt": time} for turn, time in zip([USER, ANSWER, USER], times, strict=True)]
    assert "begins with its newest turn, by `createdAt`" in refused({"messages": turns}).message
    assert read({"messages": [*turns[:2], {**USER, "createdAt": "?"}]}).messages, "no times"
    assert not read({"messages": [{**turn, "ts": 1} for turn in (USER, ANSWER)]}).doubts, "at once"
    shuffled = [
        {**turn, "createdAt": times[number]} for turn, number in zip([USER, ANSWER, USER], (1, 2, 0), strict=True)
    ]
    assert UNORDERED in read({"messages": [*shuffled, {**ANSWER, "createdAt": times[0]}]}).doubts
    assert "by `index`" in refused({"messages": [{**USER, "index": 3}, {**ANSWER, "index": 2}]}).message


@pytest.mark.parametrize(
    ("parents", "branches"),
    [
        (("", "a", "b", "c"), False),
        (("0", "a", "0", "c"), True),  # the first question, edited
        (("", "a", "b", "c", "b", "e"), True),
        (("t", "t", "t", "t"), False),  # all answer what began their thread
        (("", None, "", None), False),
    ],
)
def test_turns_that_do_not_follow_their_parents_are_said(parents: tuple[Any, ...], branches: bool) -> None:
    turns = [
        {**(ANSWER if index % 2 else USER), "id": "abcdef"[index], "parentMessageId": parent}
        for index, parent in enumerate(parents)
    ]
    assert (UNORDERED in read({"messages": turns}).doubts) == branches


@pytest.mark.parametrize(
    ("row", "columns", "messages"),
    [
        ({"question": "q", "answers": {"text": ["a", "b"]}}, {"answer": "answers.text.0"}, [USER, ANSWER]),
        ({"a": {"b": {"q": "q"}, "c": {"a": "a"}}}, {"prompt": "a.b.q", "completion": "a.c.a"}, [USER, ANSWER]),
        ({"in": '{"q": "q"}', "out": '["a"]'}, {"prompt": "in.q", "completion": "out.0"}, [USER, ANSWER]),
        (
            {"body": {"messages": [USER]}, "choices": [{"message": ANSWER}]},
            {"prompt": "body.messages", "completion": "choices.0.message"},
            [USER, ANSWER],
        ),
        (
            {"messages": [{"role": "user", "content": [{"text": {"value": "q"}}]}, ANSWER]},
            {"messages.content": "content.0.text.value"},
            [USER, ANSWER],
        ),
        (
            {"in": {"q": "q", "context": "c"}, "out": "a"},
            {"prompt": "in.q", "completion": "out"},
            "`in.context` seems to be a part of the prompt",
        ),
        (
            {"in": {"q": "q", "context": "c"}, "out": "a"},
            {"prompt": "in.q", "completion": "out", "note": "in"},
            [USER, ANSWER],
        ),
        (
            {"api": {"system": "s", "messages": [USER, ANSWER]}},
            {"messages": "api.messages"},
            "`api.system` seems to be a system turn",
        ),
        (
            {"in.q": "q", "in.context": "c", "out": "a"},
            {"prompt": "in.q", "completion": "out"},
            "`in.context` seems to be a part of the prompt",
        ),
        (
            {
                "turns": [
                    {"by": "user", "m": {"c": "q"}},
                    {"by": "assistant", "m": {"c": "a", "tool_calls": [{"name": "f"}]}},
                ]
            },
            {"messages": "turns", "messages.role": "by", "messages.content": "m.c"},
            "m.tool_calls` seems to contain tool calls",
        ),
    ],
)
def test_what_stands_next_to_a_part_of_a_column_is_heeded(
    row: Row, columns: dict[str, str], messages: list[Row] | str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row), encoding="utf-8")
    (placed,) = read_source(DataSource(path=str(path), columns=columns))
    if isinstance(messages, str):
        with pytest.raises(DataError, match=re.escape(messages)):
            understand(placed, None)
    else:
        assert understand(placed, None).messages == messages


@pytest.mark.parametrize(
    ("name", "value", "judged"),
    [("b.finish_reason", "length", True), ("b.0.finish_reason", "length", True), ("b.0.finish_reason", "stop", False)],
)
def test_what_stands_next_to_a_part_of_a_column_judges_the_row(
    name: str, value: str, judged: bool, tmp_path: Path
) -> None:
    inner = {"text": "a", "finish_reason": value}
    row, answer = {"prompt": "q", "b": [inner] if "0" in name else inner}, name.replace("finish_reason", "text")
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row), encoding="utf-8")
    ((_, error),) = read_source(DataSource(path=str(path), columns={"completion": answer}))
    assert isinstance(error, DataError) == judged
    for condition in filters(error)[1:] if isinstance(error, DataError) else ():
        assert kept(tmp_path, [row], filter=condition, columns={"completion": answer}) == 1


@pytest.mark.parametrize("column", ["system", "tools", "history", "thinking"])
def test_a_text_reads_none_of_what_belongs_to_conversations(column: str) -> None:
    assert read({"text": "t", column: "two words"}).unread == ((column, "two words"),)


def test_turns_as_json_are_read_in_either_of_prompt_and_completion_and_refused_elsewhere() -> None:
    asked, answered = json.dumps([USER]), json.dumps(ANSWER)
    expected = read({"prompt": [USER], "completion": [ANSWER]}).messages
    for prompt, completion in ((asked, "a"), ("q", answered), (asked, answered), ([USER], ANSWER), ("q", [ANSWER])):
        assert read({"prompt": prompt, "completion": completion}).messages == expected
    for row in (
        {"question": asked, "answer": "a"},
        {"instruction": "q", "output": answered},
        {"text": json.dumps([USER, ANSWER])},
    ):
        assert "contains turns as JSON" in refused(row).message
    assert "is text that is not JSON" in refused({"prompt": str([USER]), "completion": "a"}).message
    flights = json.dumps([{"from": "BER", "value": 1}])
    assert (read({"prompt": "q", "completion": flights}).messages or [])[-1]["content"] == flights, "an answer in JSON"
    parts = json.dumps([{"type": "text", "text": "q"}])
    assert read({"messages": [{"role": "user", "content": parts}, ANSWER]}).messages == [USER, ANSWER]
    assert (
        "functionCall"
        in refused(
            {"messages": [USER, {"role": "model", "content": [{"text": "a", "functionCall": {"name": "f"}}]}]}
        ).message
    )


@pytest.mark.parametrize(
    "prompt",
    [
        "<s>[INST] q [/INST]",
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n",
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<start_of_turn>user\nq<end_of_turn>\n<start_of_turn>model\n",
        "<|user|>\nq<|end|>\n<|assistant|>\n",
    ],
)
def test_a_prompt_that_any_template_has_rendered_is_refused(prompt: str) -> None:
    assert "marks of a chat template already" in refused({"prompt": prompt, "completion": "a"}).message
    assert read({"prompt": f"What does `{prompt}` mean?", "completion": "a"}).messages


@pytest.mark.parametrize("word", ["nan", "#REF!", "#NAME?", "\\N", "<NA>"])
def test_what_tables_write_for_no_value_is_no_text(word: str) -> None:
    for row in (
        {"question": "q", "answer": word},
        {"question": word, "answer": "a"},
        {"question": "q", "answer": "a", "system": word},
        {"instruction": "q", "input": word, "output": "a"},
    ):
        assert "stands for none" in refused(row).message
    assert read({"question": "q", "answer": "None"}).messages and read({"question": "q", "answer": "NA"}).messages
    assert "NUL" in refused({"question": "q", "answer": "a\0b"}).message


def test_turns_in_rows_of_their_own_are_not_learnt_alone() -> None:
    for who in ({"speaker": "user"}, {"role": "prompter", "parent_id": None}):
        assert "seems to be a turn of a conversation" in refused({**who, "text": "t"}).message
    assert read({"text": "Write a sum.", "code": "print(1)"}).answer_column == "code", "refused where all rows are so"
    assert read({"speaker": "A. Merkel", "text": "t"}).text == "t"


@pytest.mark.parametrize(
    ("earlier", "later", "column"),
    [
        ({}, {"conversation_id": 1, "turn_id": "2"}, "turn_id"),
        ({}, {"Conversation ID": "1", "turnIndex": "2"}, "turnIndex"),
        ({"chat_id": 1, "round": 1}, {"chat_id": 2, "round": 2}, "round"),
        ({"session_id": 7}, {"session_id": 7, "prompt": "And in winter?"}, "session_id"),
        ({"Ticket ID": "7"}, {"Ticket ID": "7", "prompt": "And in winter?"}, "Ticket ID"),
    ],
)
def test_a_row_that_continues_a_conversation_is_refused(earlier: Row, later: Row, column: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({**PAIR, **row}) + "\n" for row in (earlier, later)), encoding="utf-8")
    (error,) = [row for _, row in read_source(DataSource(path=str(path))) if isinstance(row, DataError)]
    assert f"`{column}` is" in error.message and "seems to continue the conversation" in error.message
    assert kept(tmp_path, [{**PAIR, **earlier}, {**PAIR, **later}], columns={"note": column}) >= 1
    for good in ({"session_id": 7}, {"session_id": None, "prompt": "r"}, {"turn_id": 2}):
        assert kept(tmp_path, [{**PAIR, "session_id": 7 if "session_id" in good else None}, {**PAIR, **good}]) == 2
    growing = [{"session_id": 7, "messages": [USER, ANSWER] * count} for count in (1, 2)]
    assert kept(tmp_path, growing) == 2, "logs that repeat a conversation for each of its turns"


@pytest.mark.parametrize("text", ["nan", "[deleted]", "[object Object]", "<Media omitted>"])
def test_a_text_that_stands_for_none_is_refused_in_turns_and_columns(text: str) -> None:
    for row in ({**PAIR, "completion": text}, {"messages": [USER, {**ANSWER, "content": text}]}):
        assert f"is `{text}`, which stands for none" in refused(row).message
    assert read({"messages": [USER, {**ANSWER, "content": f"It is {text}."}]}).messages


@pytest.mark.parametrize(
    ("question", "answer", "what"),
    [
        ("Où ?".encode().decode("latin-1"), "a", "read as another encoding"),
        ("q", "It’s".encode().decode("cp1252"), "read as another encoding"),
        ("q", "gro\ufffd", "letters that were lost"),
        ("q", "It&#39;s", "as HTML writes them"),
        ("q", "One._x000D_\nTwo.", "as Excel keeps them"),
        ("q", "a<|eot_id|>b", "marks of a chat template"),
        ("<image>\nq", "a", "places of pictures"),
        ("q", "1. One\\n2. Two", "as escapes"),
        ("Q: q\nA:", "a", "the name of who answers"),
        ("### Instruction:\nq\n\n### Response:\n", "a", "the name of who answers"),
        ("q\n\n###\n\n", "a", "a separator"),
        ("q", "a\nUser: and b?\nAssistant: c", "further turns"),
        ("q", "a\n\nOn Mon, 1 Jan 2024, Bob <b@x.org> wrote:\n> q", "the mail that they answer"),
        ("q", "Assistant: a", "begin with who answers"),
        ("q", "<p>a</p>", "in HTML"),
        ("q", "['a', 'b']", "Python's notation"),
        ("q", "Error code: 429 - {}", "an error"),
        ("q", "n. a.", "stand for none"),
        ("q", "<think>\nhm", "never ends"),
        ("q", "a" * 32767, "32,767 characters"),
        ("q", "x\n<<<<<<< HEAD\na", "both sides of a merge"),
        ("q", "A long line=\nof a mail", "as mail carries them"),
        ('{"messages": [{"role": "user"}], "model": "x"}', "a", "object as JSON"),
        ("q", '{"output": "a"}', "object as JSON"),
        ("q", "Guten%20Tag", "base64"),
        ("q", "SG9sZCB0aGUgYnV0dG9uIGZvciB0ZW4gc2Vjb25kcywgdGhlbg==", "base64"),
        ("q", "1.23457E+15", "spreadsheets"),
        ("q", "“Fine.”", "within quotation marks"),
        ("q", "-1", "stand for none"),
        ("q", "Sure:\n\nbash\nCopy code\nls", "words of the page"),
        ("q", "a\n\nFrom: Bob <b@x.org>\nSent: Monday\nTo: c", "the mail that they answer"),
        ("q", "a\n\nEl lun, 1 ene 2024, Bob escribió:\nq", "the mail that they answer"),
        ("q", "a\n\n> q\n> thanks", "the mail that they answer"),
        ("What is the warranty?", "What is the warranty? Two years.", "all of their question"),
        ("q", "Dear ${name}", "to be filled"),
        ("q", "Account XXXX XXXX", "to be filled"),
        ("q", "Dr. [**Name**]", "to be filled"),
        ("q", "Two years, but...", "as if they were cut"),
        ("q", "Use:\n```\nx", "as if they were cut"),
        ("q", "One sentence is here. " * 9 + "In that case you send it to the addr", "as if they were cut"),
        ("q", "I'm sorry, but I can't.", "that refuse"),
        ("q", "assistant\n\na", "begin with who answers"),
        ("q", "### Response:\na", "begin with who answers"),
        ("q", "ChatGPT said:\na", "begin with who answers"),
        ("system\n\ns\nuser\n\nq", "a", "turns in plain words"),
        ("User: a\nAssistant: b\nUser: q", "a", "turns in plain words"),
        ("q /no_think", "a", "a switch of a model"),
        ("q", "a\nBenutzer: und b?", "further turns"),
        ("q", "是。\n用户：那么b呢？", "further turns"),
        ("q", "Use a search.\nObservation: 2\nIt is 2.", "results of tools"),
        ("q", "hm\n</think>\na", "never begins"),
        ("q", "<thinking>hm</thinking>a", "in other marks"),
        ("q", "It isn\\'t", "as escapes"),
        ("q", "I do n't know .", "cut into tokens"),
        ("q", "The ▁war", "cut into tokens"),
        ("q", "a [SEP] b", "marks of a chat template"),
        ("q", "<｜User｜>a", "marks of a chat template"),
        ("What is ![](a.png)?", "a", "places of pictures"),
        ("q", "a\n\nWas this helpful? Yes No", "words of the page"),
        ("q", "a\n-- \nJane", "words of the page"),
        ("q", " a", "begin with a blank"),
        ("q", '"{\\"label\\": \\"a\\"}"', "within quotation marks"),
        ("q", "\u200fa\u200b", "that nobody sees"),
        ("q", "see above", "stand for none"),
        ("q", "Jane has joined the chat.", "stand for none"),
        ("q", "You deleted this message.", "stand for none"),
        ("q", "See row 12", "stand for none"),
        ("q", '[{"text": "a"}]', "object as JSON"),
        ("q", "content='a' additional_kwargs={}", "Python's notation"),
        ("q", "2-Jan", "spreadsheets"),
        ("q", "=CONCAT(A1)", "spreadsheets"),
        ("q", "5d41402abc4b2a76b9719d911017c592", "hashes"),
        ("q", "РџСЂРёРІРµС‚", "read as another encoding"),
        ("q", "\u202aa\u202c", "that nobody sees"),
        ("q", "Con\ufb01rm it.", "only one font"),
        ("q", "Hold the but-\nton", "broken at line ends"),
        ("q", "1. Hold the button2. Wait3. Done", "line ends were lost"),
        ("q", "T h e  q u i c k", "blanks between letters"),
        ("q", "Caf\\xc3\\xa9", "as escapes"),
        ("q", "https://x.org/a", "addresses"),
        ("Q-0001", "a", "addresses"),
        ("q", "manual_v2.pdf", "addresses"),
        ("1. q", "a", "begin with theirs"),
        ("It is so.", "Why?", "end as questions do"),
    ],
)
def test_marks_of_what_happened_to_a_text_are_said(question: str, answer: str, what: str) -> None:
    for row in (
        {"prompt": question, "completion": answer},
        {"messages": [{**USER, "content": question}, {**ANSWER, "content": answer}]},
    ):
        (doubt,) = read(row).doubts
        assert what in doubt
    result = [{"role": "tool", "content": answer}]
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "q"}}]}
    assert not read({"messages": [USER, call, *result, ANSWER], "tools": [{"name": "q"}]}).doubts, "a tool's words"


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("Big :contentReference[oaicite:0]{index=0}.", {":contentReference["}),
        ("Hi <@U02AB3CD>, see <tool_call>", {"<@U0AB0CD>", "<tool_call>"}),
        ("[quote]q[/quote] a", {"[quote]"}),
        ("[inaudible 00:03] a", {"[inaudible 0:0]"}),
        ("Dear {{ticket.requester.name}} %NAME%", {"{{ticket.requester.name}}", "%NAME%"}),
        ("Dear [NAME_1],\nBest,\n[Your Name]", {"[NAME_0]", "NAME_0", "[Your Name]"}),
        ("One.<br>Two. (edited)", {"<br>", "(edited)"}),
        ("<human>: q\n<bot>: a", {"<human>", "<bot>"}),
        ("[|Human|] q\n[|AI|] a", {"[|Human|]", "[|AI|]"}),
        ("Patient: q\nDoctor: a", {"Patient:", "Doctor:"}),
        ("问：q\n\n答：a", {"问：", "答："}),
        ("DRAFT - a :white_check_mark:", {"DRAFT -", ":white_check_mark:"}),
        ("The capital is Rome.[3] [source: manual.pdf, p. 3]", {"[0]", "[source: manual.pdf, p. 0]"}),
        ("Use `a[0]`:\n```python\nx = {y}\n<a>\n```", set()),
        ("see [this](https://a.b) and x[i], $\\frac{a}{b}$, f(x) in (a, b): it is so", set()),
    ],
)
def test_what_looks_like_a_mark_of_any_program_is_listed(text: str, shapes: set[str]) -> None:
    for row in ({**PAIR, "completion": text}, {"text": text}):
        assert read(row).marks == shapes


def test_a_documents_turns_in_plain_words_are_said() -> None:
    for text in ("### Human: q### Assistant: a", "\n\nHuman: q\n\nAssistant: a", "[01/02/24, 10:00:01] Bob: q\n"):
        assert any("turns in plain words" in doubt for doubt in read({"text": text}).doubts), text
    for text in ("Ask a question: what is data: a list?", "The user: a study.\n\nIt begins.", "Été à Genève, 5 °C"):
        assert not read({"text": text}).doubts, text


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("prompt,completion\nq1,a1\n", "tables"),
        ("#separator:tab\none\teins\ntwo\tzwei", "tables"),
        ("1\n00:00:01,000 --> 00:00:04,000\nHello.", "subtitles"),
        ("The docu-\nment", "broken at line ends"),
        ("The [[France|French Republic]].", "marks of a wiki"),
        ("---\ntitle: One\n---\n\nTwo.", "begin with front matter"),
        ("- question: q\n  answer: a", "rows as JSON or YAML"),
        ("[('q', 'a')]", "Python's notation"),
    ],
)
def test_a_document_of_another_kind_is_said(text: str, what: str) -> None:
    (doubt,) = read({"text": text}).doubts
    assert what in doubt
    assert not read({"text": "One, two,\nthree, four.\n\nA well-\n\nknown [[1, 2]] list"}).doubts


def test_columns_and_keys_that_nothing_reads_are_listed() -> None:
    row = {"messages": [{**USER, "ts": 1}, {**ANSWER, "ts": 2, "train": True}], "id": 7, "empty": "", "note": "n"}
    assert read(row).unread == (("id", "7"), ("messages.ts", "1, 2"))
    assert read({**PAIR, "system": "s", "weight": 1, "answer.responses": ["b"]}).unread == (("answer.responses", "b"),)
    assert read({"input_ids": [5, 6], "labels": [5, 6], "id": 1}).unread == (("id", "1"),)
    inner = {"meta": json.dumps({"by": "x" * 30, "reviews": [{"status": "bad"}, {"status": "ok"}]}), "odd": "a\x00"}
    assert read({**PAIR, **inner}).unread == (("meta.by", ""), ("meta.reviews.status", "bad, ok"), ("odd", ""))


def test_an_answer_without_the_right_one_next_to_it_is_said() -> None:
    for name, right, count in (("ground_truth", "4", 1), ("Expected Output", "5", 0), ("correct", True, 0)):
        doubts = read({"prompt": "2+3?", "completion": "It is 5.", name: right}).doubts
        assert len(doubts) == count and all(f"`{name}`" in doubt for doubt in doubts)


@pytest.mark.parametrize(
    "answer",
    [
        'Use:\n```python\nprint(f"{a}\\n", x[0])\n```\nIt prints `a`, e.g. for [this](https://a.b/c).',
        "SELECT a FROM t WHERE b = 'it' AND c <> '' GROUP BY a;",
        "Hence $\\nu \\neq \\nabla f$, so \\boxed{55}.",
        "Ответ: Россия, США и СССР. РЕСУРС.",
        "La réponse : « oui », dit-il ; c'est vrai !",
        "Hi Anna,\n\nit is on its way.\n\nBest regards,\nBob",
        "The user: a study. Use :class:`x` and items.map(x => x[0]).",
    ],
)
def test_nothing_is_said_of_answers_as_people_write_them(answer: str) -> None:
    assert not read({"prompt": "Show me.", "completion": answer}).doubts
