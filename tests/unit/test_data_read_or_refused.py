"""Columns next to a row's text, under the names of known data sets, are used or refused by name, never ignored."""

from __future__ import annotations

import datetime
import json
import math
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.schema import DataSource
from sft_play.config.yaml_files import parse_yaml
from sft_play.data.bad_rows import as_in_file
from sft_play.data.formats import Example, understand
from sft_play.data.sources import read_source
from sft_play.data.tools import NO_RESULT, OTHER_ARGUMENTS, OTHER_RESULTS, TWICE, UNDESCRIBED
from sft_play.errors import DataError

Row = dict[str, Any]
USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
PAIR = {"prompt": "q", "completion": "a"}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
HALF = "\ud83d"


def called(arguments: Any, **columns: Any) -> Row:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}
    return {"messages": [USER, call, {"role": "tool", "content": "2"}, ANSWER], "tools": [TOOL], **columns}


def read(row: Row, **options: Any) -> Example:
    return understand(("f.jsonl:3", row), None, **options)


def refused(row: Row, **options: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        read(row, **options)
    assert caught.value.place == "f.jsonl:3"
    return caught.value


def examples(folder: Path, rows: list[Row], **options: Any) -> list[Example]:
    """Read rows as a source would, with what a hint says typed into it."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    source = DataSource(path=str(path), **options)
    form = None if source.format == "auto" else source.format
    return [understand(placed, form) for placed in read_source(source)]


# ---- Masks of turns


@pytest.mark.parametrize("mark", ["train", "loss", "trainable", "is_trainable", "training", "loss_mask", "weight"])
@pytest.mark.parametrize("value", [False, True, 0, 1])
def test_each_tools_mark_of_a_turn_is_read(mark: str, value: Any) -> None:
    messages = read({"messages": [USER, {**ANSWER, mark: value}, USER, ANSWER]}).messages or []
    assert messages[1]["train"] is bool(value)
    shared = read(
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", mark: value}] * 2}
    ).messages
    assert shared and shared[1]["train"] is bool(value)


@pytest.mark.parametrize(
    "mark", ["mask", "train_detail", "no_loss", "lossWeight", "is_masked", "label", "ignore", "learnable_loss"]
)
def test_a_key_of_a_turn_that_looks_like_a_mask_is_refused_by_name(mark: str) -> None:
    assert (
        f"`messages[1].{mark}` seems to mark which part of the turn is learnt"
        in refused({"messages": [USER, {**ANSWER, mark: 0}]}).message
    )
    assert read({"messages": [USER, {**ANSWER, mark: None}]}).messages == [
        USER,
        ANSWER,
    ], "null says nothing, as in Arrow"


def test_marks_that_contradict_each_other_are_refused_and_a_users_weight_says_nothing() -> None:
    assert (
        "both as learnt and as not learnt"
        in refused({"messages": [USER, {**ANSWER, "train": True, "loss": 0}]}).message
    )
    assert read({"messages": [{**USER, "weight": 1}, ANSWER]}).messages == [USER, ANSWER]
    assert read({"messages": [{**USER, "weight": 0}, ANSWER]}).messages == [{**USER, "train": False}, ANSWER]


# ---- Weights


def test_weights_of_rows_and_turns_are_read_in_every_format(tmp_path: Path) -> None:
    messages = [USER, {**ANSWER, "weight": 0.3}, USER, {**ANSWER, "train": True, "weight": "0.5"}]
    example = read({"messages": messages, "weight": 0.25})
    assert [turn.get("train") for turn in example.messages or []] == [None, 0.3, None, 0.5] and example.weight == 0.25
    for row in (PAIR, {"text": "t"}, {"input_ids": [5, 6]}, {"prompt": "q", "completion": [ANSWER]}):
        assert [read({**row, "weight": weight}).weight for weight in (0.3, "0.3", 0, 1, True, None)] == [
            *(0.3, 0.3, 0.0, 1.0, 1.0, 1.0)
        ]
        assert read({**row, "weight": 0.3}).key == read(row).key, "it keeps its side of a split"
    tokens = read({"input_ids": [5, 6, 7, 8], "weight": [0, 0.5, 1, 1], "attention_mask": [1, 1, 1, 0]})
    assert (tokens.labels, tokens.weights, tokens.weight) == ([-100, 6, 7], [0.0, 0.5, 1.0], 1.0)
    table = tmp_path / "rows.csv"
    table.write_text("question,answer,weight\nq,a,0.3\nq,a,\n")
    source = DataSource(path=str(table))
    assert [understand(placed, None).weight for placed in read_source(source)] == [0.3, 1.0]


@pytest.mark.parametrize("value", [1.5, "high", -0.1, math.nan, math.inf, 10**400, [0.5], {}])
def test_other_weights_are_refused_with_their_place(value: Any) -> None:
    shown = "" if isinstance(value, (list, dict)) else f"`{str(value)[:50]}"
    for row, name, new in (
        ({**PAIR, "weight": value}, "weight", "note: weight"),
        ({"messages": [USER, {**ANSWER, "weight": value}]}, "messages[1].weight", "messages.note: weight"),
        ({"input_ids": [5, 6], "weight": [1, value]}, "weight[1]", "note: weight"),
    ):
        error = refused(row)
        assert error.message.startswith(f"`{name}` is {shown}") and "expected a number from 0 to 1" in error.message
        assert error.place and f"`columns: {{{new}}}`" in (error.hint or "")


def test_weights_under_other_names_lead_to_weight() -> None:
    hint = refused({"messages": [USER, {**ANSWER, "loss_scale": 0.5}]}).hint or ""
    assert "`columns: {messages.weight: loss_scale}`" in hint
    hint = refused({"messages": [USER, ANSWER], "systemInstruction": {"parts": [{"text": "s"}]}}).hint or ""
    assert "`columns: {system: systemInstruction.parts}`" in hint
    assert "`columns: {weight: loss_weights}`" in (refused({"input_ids": [5, 6], "loss_weights": [0.5, 1]}).hint or "")


# ---- Tools and calls


@pytest.mark.parametrize(
    "name", ["tools", "functions", "tool_defs", "available_tools", "tool_definitions", "function_definitions"]
)
@pytest.mark.parametrize("as_text", [False, True])
def test_descriptions_of_tools_are_read_under_their_names(name: str, as_text: bool) -> None:
    row = called({"a": 1})
    tools = row.pop("tools")
    description = json.dumps(tools) if as_text else tools
    assert read({**row, name: description}).tools == tools
    system = {"role": "system", "content": "s", name: description}
    example = read({"messages": [system, *row["messages"]]})
    assert example.tools == tools and example.messages and example.messages[0] == {"role": "system", "content": "s"}


def test_calls_without_tools_are_counted_and_an_unread_description_is_refused() -> None:
    row = called({"a": 1})
    del row["tools"]
    assert UNDESCRIBED in read(row).doubts and not read(called({"a": 1})).doubts
    instructed = {"messages": [{"role": "system", "content": "You may call add(a)."}, *row["messages"]]}
    assert not read(instructed).doubts, "a text describes it"
    turns = called({})["messages"]
    error = refused({"messages": [turns[0], turns[1], turns[3]], "tools": [TOOL]})
    assert "the result (a `tool` turn) of the call in turn 2 is missing" in (error.hint or "")
    error = refused({**row, "api": json.dumps([TOOL])})
    assert "`api` describes tools" in error.message and "`columns: {tools: api}`" in (error.hint or "")


def test_tools_that_the_system_turn_describes_too_are_said() -> None:
    for text, count in (('<tools>[{"name": "add"}]</tools>', 1), ("You may add.", 0)):
        row = called({})
        row["messages"].insert(0, {"role": "system", "content": text})
        assert sum(doubt == TWICE for doubt in read(row).doubts) == count


def test_an_answer_that_is_calls_as_json_becomes_calls_where_tools_are_described() -> None:
    calls = json.dumps([{"name": "add", "arguments": {"a": 1}}])
    expected = called({"a": 1})["messages"][1]["tool_calls"]
    for answer in (calls, calls[1:-1]):
        turn = (read({**PAIR, "completion": answer, "tools": json.dumps([TOOL])}).messages or [])[-1]
        assert turn["tool_calls"] == [{"type": "function", **expected[0]}] and turn["content"] == ""
        assert (read({**PAIR, "completion": answer}).messages or [])[-1]["content"] == answer
    for answer in ('{"name": "add"}', "[]", '[{"name": "add", "arguments": {}}, 3]', "[1"):
        turn = (read({**PAIR, "completion": answer, "tools": [TOOL]}).messages or [])[-1]
        assert turn["content"] == answer and "tool_calls" not in turn


def test_names_of_arguments_calls_and_roles_are_read() -> None:
    expected = read(called({"a": 1})).messages
    for key in ("parameters", "args", "input"):
        row = called(None)
        row["messages"][1] = {
            "role": "assistant",
            "content": None,
            "tool_calls": json.dumps([{"name": "add", key: {"a": 1}}]),
        }
        assert read(row).messages == expected, "calls as JSON in text"
    row = called({"a": 1})
    call = {"role": "tool_call", "content": '{"name": "add", "arguments": {"a": 1}}'}
    for result in ("function", "ipython", "tool_response", "observation"):
        turns = [
            {"role": "Human", "content": "q"},
            call,
            {"role": result, "content": "2"},
            {"role": "model", "content": "a"},
        ]
        assert read({"messages": turns, "tools": [TOOL]}).messages == expected
    assert (
        "seems to contain tool calls"
        in refused({"messages": [USER, {**ANSWER, "function_calls": [{"name": "add"}]}]}).message
    )


def test_json_inside_text_is_read() -> None:
    row = called({"a": 1})
    assert read({**row, "messages": json.dumps(row["messages"])}) == read(row)
    assert read({"input_ids": "[1, 2, 3]"}).input_ids == [1, 2, 3]
    python = refused({"messages": str(row["messages"])})
    assert "is text that is not JSON" in python.message and "json.dumps" in (python.hint or "")
    parts = [{"type": "input_text", "text": "q"}]
    answer = {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
    assert read({"messages": [{"role": "user", "content": parts}, answer]}).messages == [USER, ANSWER]


# ---- What JSON does not have, wherever JSON is written


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (HALF, "an unpaired surrogate"),
        ({HALF: 1}, "an unpaired surrogate"),
        (float("nan"), "is nan, which JSON cannot represent"),
        (float("inf"), "is inf"),
        (datetime.date(2026, 1, 1), "date"),
        (datetime.datetime(2026, 1, 1), "datetime"),
        (Decimal("1.5"), "Decimal"),
        (b"x", "bytes"),
        ({1: 2}, "is a number"),
    ],
)
def test_rows_with_values_outside_json_are_refused_with_the_field(value: Any, message: str) -> None:
    deep = refused(called({"a": [{"b": value}]}))
    assert (
        "`messages[1].tool_calls[0].arguments.a[0].b" in deep.message.replace("a key of ", "")
        and message in deep.message
    )
    described = {"type": "function", "function": {"name": "add", "parameters": {"default": value}}}
    assert "tools[0].function.parameters.default" in refused(called({"a": 1}, tools=[described])).message


def test_an_unpaired_surrogate_is_refused_in_names_groups_and_text() -> None:
    row = called({"a": 1})
    row["messages"][1]["tool_calls"][0]["function"]["name"] = HALF
    assert "an unpaired surrogate" in refused(row).message
    assert "`author` contains an unpaired" in refused({**PAIR, "author": HALF}, group_by="author").message
    assert "an unpaired surrogate" in refused({"messages": [USER, {**ANSWER, "name": HALF}]}).message
    assert "the key `a` appears more than once" in refused(called('{"a": 1, "a": 2}')).message
    assert "is nan" in refused(called('{"a": NaN}')).message


# ---- Columns that a text is not learnt without


@pytest.mark.parametrize(
    "column",
    [
        {"image": "a.png"},
        {"images": ["a.png"]},
        {"images": [{"bytes": b"x", "path": None}]},
        {"shot": {"bytes": b"x"}},
        {"video_url": "a"},
        {"file_name": "1.jpg"},
        {"audios": ["x"]},
        {"pixel_values": b"x"},
    ],
)
def test_pictures_in_a_column_are_refused_like_picture_parts(column: Row) -> None:
    for row in (PAIR, {"messages": [USER, ANSWER]}, {"text": "<image> a"}, {"input_ids": [1, 2]}):
        assert "contains pictures, sounds or files; only text is trained" in refused({**row, **column}).message
    assert "messages[0]." in refused({"messages": [{**USER, **column}, ANSWER]}).message
    assert read({**PAIR, "images": [], "image": None, "file_name": "notes.txt"}).messages


@pytest.mark.parametrize("value", [0, False, {}, 0.0])
@pytest.mark.parametrize("column", ["system", "input"])
def test_a_falsy_value_is_refused_like_any_other(column: str, value: Any) -> None:
    row = {"instruction": "q", "output": "a", column: value}
    assert f"`{column}` is " in refused(row).message
    assert read({**row, column: None}) == read({**row, column: ""}), "nothing is given"


@pytest.mark.parametrize("column", ["tools", "history"])
@pytest.mark.parametrize("value", [0, False, {}])
def test_a_falsy_list_is_refused_too(column: str, value: Any) -> None:
    assert f"`{column}` is " in refused({"instruction": "q", "output": "a", column: value}).message
    assert read({"instruction": "q", "output": "a", column: []}).messages == [USER, ANSWER]


@pytest.mark.parametrize(
    ("judged", "filtered"),
    [
        ({"label": False}, "label"),
        ({"label": 0}, "label == 1"),
        ({"label": "False"}, 'label == "True"'),
        ({"label": "0"}, 'label == "1"'),
        ({"score": 2.5}, "score >= 2.5"),
        ({"Label": False}, "Label"),
        ({"is_correct": False}, "is_correct"),
        ({"reward_score": 0.5}, "reward_score >= 0.5"),
        ({"rating": "3"}, "number(rating) >= 3"),
        ({"kto_tag": True}, "kto_tag"),
        ({"sample_weight": 0}, "sample_weight >= 0"),
        ({"weights": 0.5}, "weights >= 0.5"),
        ({"train": False}, "train"),
    ],
)
def test_rows_that_judge_their_answer_need_a_filter(judged: Row, filtered: str, tmp_path: Path) -> None:
    good = {**PAIR, next(iter(judged)): {"False": "True", "0": "1", "3": "3"}.get(str(next(iter(judged.values()))), 5)}
    if isinstance(next(iter(judged.values())), (bool, int)):
        good = {**PAIR, next(iter(judged)): type(next(iter(judged.values())))(1)}
    for row in ({**PAIR, **judged}, {"messages": [USER, ANSWER], **judged}):
        with pytest.raises(DataError) as caught:
            examples(tmp_path, [row])
        assert "seems to say whether to learn the row" in caught.value.message and f"`filter: {filtered}`" in (
            caught.value.hint or ""
        )
        column = next(iter(judged))
        assert f"`filter: has({column}) or not has({column})` all" in (caught.value.hint or "")
        assert (f"`columns: {{weight: {column}}}`" in (caught.value.hint or "")) == ("weight" in column)
    assert len(examples(tmp_path, [{**PAIR, **judged}, good], filter=filtered)) in (1, 2)
    assert len(examples(tmp_path, [{**PAIR, **judged}, good, PAIR], filter=f"has({column}) or not has({column})")) == 3
    assert len(examples(tmp_path, [{"text": "t", **judged}], format="text")) == 1, "a text has no answer"


@pytest.mark.parametrize(
    ("values", "good_rows"),
    [
        (("yes", "", "yes"), 2),
        (("", "x", "X ", "nein"), 2),
        ((True, None, False), 1),
        ((None, 1, 0), 1),
        (("anna", "", "2024-01-01"), 2),
    ],
)
def test_a_mark_that_only_good_rows_have_needs_a_filter(
    values: tuple[Any, ...], good_rows: int, tmp_path: Path
) -> None:
    rows = [{**PAIR, "approved": value} for value in values]
    marked = [value for value in values if value]
    with pytest.raises(DataError, match="marks some rows and not others") as caught:
        examples(tmp_path, rows)
    chosen, all_rows = typed(caught.value.hint or "")
    assert len(examples(tmp_path, rows, **chosen)) == good_rows and len(examples(tmp_path, rows, **all_rows)) == len(
        rows
    )
    assert f"`{marked[0]}` (" in caught.value.message and "nothing (1)" in caught.value.message
    assert len(examples(tmp_path, [{**PAIR, "approved": marked[0]}] * 2)) == 2, "all rows are alike"


def test_rows_of_another_split_are_not_silently_trained(tmp_path: Path) -> None:
    rows = [{**PAIR, "split": split} for split in ("train", "test", "dev")]
    assert len(examples(tmp_path, rows[:1])) == 1
    with pytest.raises(DataError) as caught:
        examples(tmp_path, rows)
    assert caught.value.place == f"{tmp_path / 'rows.jsonl'}:2"
    chosen, all_rows = typed(caught.value.hint or "")
    assert len(examples(tmp_path, rows, **chosen)) == 1 and len(examples(tmp_path, rows, **all_rows)) == 3


def test_a_text_that_an_annotator_rejected_needs_a_filter(tmp_path: Path) -> None:
    rows = [{"text": f"t{answer}", "label": "pos", "answer": answer} for answer in ("accept", "reject")]
    with pytest.raises(DataError, match="`answer` seems to say"):
        examples(tmp_path, rows)
    (good,) = examples(tmp_path, rows, filter='answer == "accept"')
    assert good.answer_column == "label"


def test_a_class_label_does_not_count_as_a_judgement(tmp_path: Path) -> None:
    assert len(examples(tmp_path, [{**PAIR, "label": "positive", "score": None}, {**PAIR, "label": 7}])) == 2


# ---- Token rows


@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks", "assistant_mask", "loss_mask"])
@pytest.mark.parametrize("kind", [int, bool])
def test_a_mask_of_tokens_is_used(name: str, kind: type) -> None:
    mask = [kind(value) for value in (0, 0, 1, 1, 0)]
    assert read({"input_ids": [5, 6, 7, 8, 9], name: mask}).labels == [-100, -100, 7, 8, -100]
    both = read(
        {"input_ids": [5, 6, 7, 8, 9], "labels": [5, 6, 7, -100, 9], name: mask, "attention_mask": [1, 1, 1, 1, 0]}
    )
    assert (both.input_ids, both.labels) == ([5, 6, 7, 8], [-100, -100, 7, -100])


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"target_ids": [6, 7, 8]}, "`target_ids` seems to mark which tokens are learnt"),
        ({"prompt_mask": [1, 1, 0]}, "`prompt_mask` seems to mark"),
        ({"loss_weights": [0.0, 0.5, 1.0]}, "`loss_weights` seems to mark"),
        ({"prompt_length": 1}, "`prompt_length` seems to mark where the learnt part begins"),
        ({"completion_start": 0}, "`completion_start` seems to mark where"),
        ({"prompt_ids": [5]}, "`prompt_ids` seems to mark where"),
        ({"position_ids": [0, 1, 0]}, "`position_ids` marks a row that packs several rows"),
        ({"seq_lengths": [1, 2]}, "`seq_lengths` marks a row that packs several rows"),
        ({"labels": [6, 7, -100]}, "`labels[0]` is 6 and `input_ids[0]` is 5"),
        ({"labels": [-100, 7, 7]}, "`labels[1]` is 7 and `input_ids[1]` is 6"),
        ({"completion_mask": [0, 2, 1]}, "`completion_mask` contains 2"),
        ({"completion_mask": [0, 1]}, "`completion_mask` has 2 entries and `input_ids` 3"),
    ],
)
def test_token_masks_are_used_or_refused(column: Row, message: str) -> None:
    assert message in refused({"input_ids": [5, 6, 7], **column}).message


def test_tokens_that_a_tokenizer_adds_to_every_row_are_not_a_mask() -> None:
    added = {
        "attention_mask": [1, 1, 1],
        "token_type_ids": [0, 0, 0],
        "special_tokens_mask": [1, 0, 0],
        "position_ids": [0, 1, 2],
    }
    assert read({"input_ids": [5, 6, 7], **added, "seq_lengths": [3]}).labels is None


# ---- Hints

HINTS: dict[str, list[Row]] = {
    "chosen after a question": [{"messages": [USER, ANSWER, USER], "chosen": [ANSWER], "rejected": [ANSWER]}],
    "turns as input and output": [{"input": [USER], "output": [{"type": "message", **ANSWER}]}],
    "null answer": [{"prompt": "q", "completion": None}, PAIR],
    "null answer of a turn": [{"messages": [USER, {**ANSWER, "content": None}]}, {"messages": [USER, ANSWER]}],
    "empty answer": [{"prompt": "q", "completion": " "}, PAIR],
    "empty text": [{"text": " "}, {"text": "t"}],
    "two formats": [{**PAIR, "question": "q", "answer": "a"}],
    "text and prompt": [{**PAIR, "text": "t"}],
    "chosen": [{"prompt": "q", "chosen": "a", "rejected": "b"}],
    "chosen without prompt": [{"chosen": "q a", "rejected": "b"}],
    "chosen of instruction": [{"instruction": "q", "chosen": "a", "rejected": "b"}],
    "chosen of question": [{"question": "q", "chosen": "a", "rejected": "b"}],
    "chosen turns": [{"prompt": "q", "chosen": [ANSWER], "rejected": [ANSWER]}],
    "chosen turns of instruction": [{"instruction": "q", "chosen": [ANSWER], "rejected": [ANSWER]}],
    "chosen conversations": [{"prompt": "q", "chosen": [USER, ANSWER], "rejected": [USER, ANSWER]}],
    "chosen conversations alone": [{"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]}],
    "chosen of lists": [{"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER]}],
    "chosen after a conversation": [
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "gpt", "value": "a"},
                {"from": "human", "value": "q"},
            ],
            "chosen": {"from": "gpt", "value": "b"},
            "rejected": {"from": "gpt", "value": "c"},
        }
    ],
    "roles": [{"messages": [{"role": "customer", "content": "q"}, {"role": "agent", "content": "a"}]}],
    "roles of sharegpt": [{"conversations": [{"from": "visitor", "value": "q"}, {"from": "bot", "value": "a"}]}],
    "role with a colon": [{"messages": [{"role": "user: a, b #1", "content": "q"}, ANSWER]}],
    "number as text": [{**PAIR, "score": "4,5"}],
    "keys of turns": [{"messages": [{"speaker": "user", "text": "q"}, {"speaker": "assistant", "text": "a"}]}],
    "names of turns": [{"thread": [{"who": "x", "body": "q"}, {"who": "y", "body": "a"}]}],
    "read names of turns": [{"dialog": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}],
    "columns": [{"Question": "q", "Response": "a"}],
    "columns of alpaca": [{"instruction": "q", "context": "c", "response": "a"}],
    "mask": [{"messages": [USER, {**ANSWER, "mask": 1}]}],
    "detail": [
        {"messages": [USER, {**ANSWER, "train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}]}
    ],
    "calls": [{"messages": [USER, {**ANSWER, "function_calls": [{"name": "add", "arguments": {}}]}], "tools": [TOOL]}],
    "tools": [{**{k: v for k, v in called({}).items() if k != "tools"}, "api": [TOOL]}],
    "pictures": [{**PAIR, "images": ["a.png"]}],
    "pictures of a turn": [{"messages": [{**USER, "images": ["a.png"]}, ANSWER]}],
    "label": [{**PAIR, "label": True}],
    "score": [{**PAIR, "score": 4}],
    "mask of tokens": [{"input_ids": [5, 6, 7], "train_mask": [0, 1, 1]}],
    "labels of tokens": [{"input_ids": [5, 6, 7], "target_ids": [-100, 6, 7]}],
    "where the answer begins": [{"input_ids": [5, 6, 7], "prompt_len": 2}],
    "mask of the turns": [{"messages": [USER, ANSWER], "loss_mask": [0, 1]}],
    "packed": [{"input_ids": [5, 6, 7], "position_ids": [0, 1, 0]}],
    "context": [{"question": "q", "context": "c", "answer": "a"}],
    "context of alpaca": [{"instruction": "q", "context": "c", "output": "a"}],
    "input of a prompt": [{**PAIR, "input": "c"}],
    "instruction of a question": [{"instruction": "i", "question": "q", "answer": "a"}],
    "options": [{"question": "q", "options": {"A": "x", "B": "y"}, "answer": "B"}],
    "choices in columns": [{"question": "q", "A": "x", "answer": "A"}],
    "suffix": [{**PAIR, "suffix": "s"}],
    "documents": [{"messages": [USER, ANSWER], "documents": [{"title": "t", "text": "d"}]}],
    "system turn": [{"messages": [USER, ANSWER], "systemPrompt": "s"}],
    "system turn of parts": [{"messages": [USER, ANSWER], "systemInstruction": {"parts": [{"text": "s"}]}}],
    "thought": [{**PAIR, "Rationale": "r, so a"}],
    "steps of a thought": [{**PAIR, "reasoning_steps": ["r, so a"]}],
    "thought of a conversation": [{"messages": [USER, ANSWER], "reasoning": "r, so a"}],
    "thought of a turn": [{"messages": [USER, {**ANSWER, "thought": "r"}]}],
    "switch": [{**PAIR, "reasoning": "on"}],
    "effort": [{**PAIR, "reasoning": "medium"}],
    "dialogues with a system": [
        {"turns": [{"speaker": "USER", "utterance": "q"}, {"speaker": "SYSTEM", "utterance": "a"}]}
    ],
    "objects as JSON": [{"in": json.dumps({"q": "Which one is it?"}), "out": json.dumps({"a": "That one."})}],
    "answer after a conversation": [{"messages": [USER, ANSWER, USER], "response": "a"}],
    "attachments": [{"messages": [{**USER, "attachments": [{"file_name": "a.txt"}]}, ANSWER]}],
    "empty question": [{"prompt": "", "completion": "a"}, PAIR],
    "empty turn": [{"messages": [{**USER, "content": " "}, ANSWER]}, {"messages": [USER, ANSWER]}],
    "null conversation": [{"messages": None}, {"messages": [USER, ANSWER]}],
    "header with a space": [{"question": "q", " answer": "a"}],
}


def typed(hint: str) -> list[dict[str, Any]]:
    """Return what each piece in backticks that a source takes means, as YAML would read it."""
    settings = []
    for piece in re.findall(r"`([^`]+)`", hint):
        if re.match(r"(?:columns|format|filter|data\.sources): ", piece):
            read = parse_yaml(piece, "hint").plain()
            settings.append({k: v for k, v in read.get("data.sources", [read])[0].items() if k != "path"})
        elif piece == "DATA_BAD_ROWS=drop":
            settings.append({"bad_rows": "drop"})
    return settings


@pytest.mark.parametrize("name", HINTS)
def test_every_followed_hint_is_accepted(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        examples(tmp_path, HINTS[name])
    ways = typed(caught.value.hint or "")
    assert ways, f"nothing to type: {caught.value.message}: {caught.value.hint}"
    for way in ways:
        rows = HINTS[name]
        if way.pop("bad_rows", None):
            rows = rows[1:]
        assert examples(tmp_path, rows, **way), way


@pytest.mark.parametrize(
    ("sender", "role"),
    [("User ", "user"), ("ChatGPT", "assistant"), ("Tool-Response", "tool"), ("function-call", "assistant")],
)
def test_roles_are_read_however_they_are_spelt(sender: str, role: str) -> None:
    words = json.dumps({"name": "add", "arguments": {}})
    asked = [] if role == "user" else called({})["messages"][:2] if role == "tool" else [USER]
    after = [] if role == "assistant" else [ANSWER]
    messages = read({"messages": [*asked, {"role": sender, "content": words}, *after]}).messages or []
    assert messages[len(asked)]["role"] == role


def test_a_blank_system_turn_is_none_and_an_equal_one_is_one() -> None:
    blank, system = {"role": "system", "content": " "}, {"role": "system", "content": "s"}
    assert read({"messages": [blank, USER, ANSWER], "system": []}).messages == [USER, ANSWER]
    assert read({"prompt": [blank, USER], "completion": [ANSWER]}).messages == [USER, ANSWER]
    assert read({"messages": [system, USER, ANSWER], "system": "s"}).messages == [system, USER, ANSWER]
    assert "out of order" in refused({"messages": [system, USER, ANSWER], "system": "t"}).message


def test_how_much_was_to_be_thought_and_marks_that_are_all_false_refuse_no_row(tmp_path: Path) -> None:
    row = {"messages": [USER, ANSWER], "reasoning": {"effort": "high"}, "flags": {"spam": False}}
    assert examples(tmp_path, [row])[0].messages == [USER, ANSWER]
    with pytest.raises(DataError, match="`flags` seems to say"):
        examples(tmp_path, [{**row, "flags": {"spam": True}}])


def test_a_history_may_be_turns() -> None:
    assert read({**PAIR, "history": [USER, ANSWER]}).messages == [USER, ANSWER, USER, ANSWER]


def test_an_answer_that_is_a_call_as_json_is_one_in_any_format() -> None:
    for value, calls in (({"name": "add", "arguments": {"a": 1}}, 1), ({"name": "Ann", "input": "no JSON"}, 0)):
        words = json.dumps(value)
        for row in ({"prompt": "q", "completion": words}, {"messages": [USER, {**ANSWER, "content": words}]}):
            answer = (read({**row, "tools": [TOOL]}).messages or [])[-1]
            assert len(answer.get("tool_calls", ())) == calls and answer["content"] == ("" if calls else words)


def test_results_in_another_order_than_their_calls_are_said() -> None:
    calls = [{"id": name, "function": {"name": "add", "arguments": {}}} for name in ("0", "1")]
    results = [{"role": "tool", "content": "2", "tool_call_id": name} for name in ("0", "1")]
    call = {"role": "assistant", "content": "", "tool_calls": calls}
    for order, wrong in ((results, 0), (results[::-1], 1), ([*results, call, *results], 0), ([results[0]] * 2, 1)):
        assert read({"messages": [USER, call, *order, ANSWER], "tools": [TOOL]}).doubts == (OTHER_RESULTS,) * wrong


def test_calls_without_a_result_and_with_other_arguments_are_said() -> None:
    parameters = {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "add", "description": "d", "parameters": parameters}}]

    def doubts(*calls: dict[str, Any], results: int) -> tuple[str, ...]:
        asked = [{"id": str(i), "function": {"name": "add", "arguments": a}} for i, a in enumerate(calls)]
        answered = [{"role": "tool", "content": "2", "tool_call_id": str(i)} for i in range(results)]
        turns = [USER, {"role": "assistant", "content": "", "tool_calls": asked}, *answered, ANSWER]
        return read({"messages": turns, "tools": tools}).doubts

    assert doubts({"a": 1}, {"a": 1, "b": 2}, results=2) == ()
    assert doubts({"a": 1}, {"a": 2}, results=1) == (NO_RESULT,)
    assert doubts({"c": 1}, results=1) == doubts({"b": 1}, results=1) == (OTHER_ARGUMENTS,)
    assert doubts({"a": 1, "c": 1}, results=1) == (OTHER_ARGUMENTS,)
    for wrong in ({"name": ["add"]}, {"parameters": {**parameters, "required": [["a"]]}}):
        tools[0]["function"] = {"name": "add", "description": "d", "parameters": parameters, **wrong}
        assert len(doubts({"a": 1}, results=1)) == 1


def test_ratings_of_both_answers_ask_for_a_filter_by_that_of_the_learnt_one(tmp_path: Path) -> None:
    row = {**PAIR, "rejected": "b", "rating_chosen": 5, "rating_rejected": 1, "rejected_score": 0}
    with pytest.raises(DataError, match="`rating_chosen` seems to say") as caught:
        examples(tmp_path, [row])
    assert "`filter: rating_chosen >= 5`" in (caught.value.hint or "")
    assert len(examples(tmp_path, [row], filter="rating_chosen >= 4")) == 1


def test_an_object_is_learnt_as_json_where_the_columns_say_so(tmp_path: Path) -> None:
    receipt = {"total": 1.5, "vendor": "Müller", "items": [1, None]}
    words = '{"total": 1.5, "vendor": "Müller", "items": [1, null]}'
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": receipt}]
    for row, columns in (
        ({"ocr": "q", "expected": receipt}, {"prompt": "ocr", "completion": "expected"}),
        ({"messages": turns}, {}),
    ):
        with pytest.raises(DataError) as caught:
            examples(tmp_path, [row], columns=columns)
        error = as_in_file(caught.value, columns)
        way = next(way["columns"] for way in typed(error.hint or "") if "json(" in str(way))
        assert examples(tmp_path, [row], columns=way)[0].messages == [USER, {**ANSWER, "content": words}]
        part = next(way["columns"] for way in typed(error.hint or "") if ".vendor" in str(way))
        assert examples(tmp_path, [row], columns=part)[0].messages == [USER, {**ANSWER, "content": "Müller"}]
    text = {"ocr": "q", "expected": words}
    columns = {"prompt": "ocr", "completion": "json(expected)"}
    for value, content in ((words, words), (5, "5"), (False, "false")):
        row = {"ocr": "q", "expected": value}
        assert examples(tmp_path, [row], columns=columns)[0].messages == [USER, {**ANSWER, "content": content}]
    with pytest.raises(DataError, match="names `expectd`"):
        examples(tmp_path, [text], columns={**columns, "completion": "json(expectd)"})


def test_the_columns_of_a_hint_are_those_of_the_file() -> None:
    error = refused({"prompt": "q", "completion": "a", "context": "c"})
    hint = as_in_file(error, {"prompt": "frage", "completion": "antwort"}).hint or ""
    assert "`columns: {instruction: frage, input: context, output: antwort}`" in hint
    columns = {"messages": "thread", "messages.content": "body"}
    error = as_in_file(refused({"messages": [USER, {**ANSWER, "content": {"a": 1}}]}), columns)
    assert error.message.startswith("`thread[1].body` is a mapping")
    assert "`columns: {messages: thread, messages.content: json(body)}`" in (error.hint or "")


def test_swapped_columns_are_refused_with_the_right_order(tmp_path: Path) -> None:
    row = {"frage": "q", "antwort": "a"}
    with pytest.raises(DataError) as caught:
        examples(tmp_path, [row], columns={"frage": "question", "antwort": "answer"})
    (way,) = [way for way in typed(caught.value.hint or "") if "columns" in way]
    assert examples(tmp_path, [row], **way)[0].messages == [USER, ANSWER]


@pytest.mark.parametrize(
    ("column", "setting"),
    [
        ({"Split": "test"}, 'Split == "train"'),
        ({"subset": "validation"}, 'subset == "train"'),
        ({"is_test": True}, "not is_test"),
        ({"is_rejected": True}, "not is_rejected"),
        ({"status": "rejected"}, 'status != "rejected"'),
        ({"verdict": "wrong"}, 'verdict != "wrong"'),
        ({"status": "discarded"}, 'status != "discarded"'),
        ({"deleted": True}, "not deleted"),
        ({"answer": "reject"}, 'answer == "accept"'),
        ({"is_rejected": "True"}, 'is_rejected == "False"'),
        ({"is_test": "1"}, 'is_test == "0"'),
        ({"approved": "no"}, 'approved == "yes"'),
    ],
)
def test_columns_that_say_not_to_train_a_row_are_refused_under_other_names(
    column: Row, setting: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as caught:
        examples(tmp_path, [{**PAIR, **column}])
    assert f"`filter: {setting}`" in (caught.value.hint or "")
    others = {True: False, "True": "False", "1": "0", "no": "yes", "reject": "accept"}
    other = {name: others.get(value, "train") for name, value in column.items()}
    assert len(examples(tmp_path, [{**PAIR, **column}, {**PAIR, **other}], filter=setting)) == 1, "the hint, as typed"


def test_a_thought_and_a_system_turn_are_read_under_their_names() -> None:
    messages = read({**PAIR, "reasoning": "Hm.", "system_prompt": "Be brief."}).messages
    assert messages == [{"role": "system", "content": "Be brief."}, USER, {**ANSWER, "reasoning_content": "Hm."}]
    parts = [{"type": "text", "text": "Be "}, {"text": "brief."}]
    assert (read({**PAIR, "system": parts}).messages or [])[0]["content"] == "Be brief."
    assert "system turns that differ" in refused({**PAIR, "system": "a", "system_prompt": "b"}).message


def test_a_mask_of_unlearnt_tokens_is_not_suggested_as_its_opposite() -> None:
    for name in ("prompt_mask", "ignore_mask", "input_mask"):
        hint = refused({"input_ids": [5, 6, 7], name: [1, 1, 0]}).hint or ""
        assert "loss_mask" not in hint and "write `labels`" in hint
    for name in ("masked", "skip", "ignored", "no_loss"):
        hint = refused({"messages": [USER, {**ANSWER, name: True}]}).hint or ""
        assert "messages.train" not in hint and "`train: false`" in hint


def test_parts_of_the_prompt_that_the_turns_contain_are_no_news() -> None:
    asked = {"role": "user", "content": "Which?\nA) x\nB) y"}
    rows: list[Row] = [
        {"messages": [asked, ANSWER], "prompt": "Which?  A) x B) y", "choices": ["x", "y"]},
        {
            "instruction": "q",
            "input": "i",
            "output": "a",
            "prompt": "### Instruction:\nq\n### Input:\ni\n### Response:",
        },
        {"messages": [USER, {**ANSWER, "reasoning": "r", "reasoning_details": [{"type": "text", "text": "r"}]}]},
        {"instruction": "q", "output": "a", "history": json.dumps([["x", "y"]])},
        {"messages": [USER, ANSWER], "context": None, "documents": [], "options": {}, "history": ""},
    ]
    for row in rows:
        assert read(row).messages


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"content": [{"type": "text", "text": "a", "train": False}]}, "`messages[1].content[0].train` is not read"),
        ({"content": [{"text": "a", "inlineData": {"data": "x"}}]}, "content[0].inlineData` is not read"),
        ({"content": [{"type": "text", "text": "a", "image": "a.png"}]}, "content[0].image` is not read"),
        ({"content": [{"text": "a", "thought": True}]}, "content[0].thought` is not read"),
        ({"content": ["a", "b"]}, "is a list of texts"),
        ({"value": "b"}, "has two texts that differ: `content`, `value`"),
        ({"rating": -1}, "`messages[1].rating` seems to mark"),
        ({"deleted": True}, "`messages[1].deleted` seems to say that the turn is no good"),
        ({"is_correct": "no"}, "`messages[1].is_correct` seems to say that the turn is no good"),
        ({"content": "<think>r</think>a", "reasoning": "r"}, "has its thoughts twice"),
        (
            {"function_call": {"name": "f", "arguments": "{}"}, "tool_calls": [{"function": {"name": "g"}}]},
            "has `function_call` and `tool_calls`",
        ),
        ({"tool_calls": [{"function": {"name": "f"}, "arguments": {"a": 1}}]}, "tool_calls[0].arguments` is not read"),
    ],
)
def test_what_an_answer_says_twice_or_in_other_places_is_refused(turn: Row, message: str) -> None:
    assert message in refused({"messages": [USER, {**ANSWER, **turn}]}).message


def test_keys_of_parts_that_say_nothing_are_not_in_the_way() -> None:
    part = {"type": "text", "text": "a", "image": None, "thought": False, "cache_control": {"type": "ephemeral"}}
    assert read({"messages": [USER, {**ANSWER, "content": [part], "value": None}]}).messages == [USER, ANSWER]


def test_lists_of_messages_in_the_text_of_a_table_are_read_as_turns() -> None:
    row = {"prompt": [USER], "completion": [ANSWER]}
    assert read({name: json.dumps(turns) for name, turns in row.items()}) == read(row)
    python = refused({name: str(turns) for name, turns in row.items()})
    assert "is text that is not JSON" in python.message and "json.dumps" in (python.hint or "")


@pytest.mark.parametrize("value", ["nan", "<noinput>", "NaN", "None", "N/A"])
def test_words_that_stand_for_no_input_are_refused(value: str) -> None:
    assert "which stands for none" in refused({"instruction": "q", "input": value, "output": "a"}).message
    assert read({"instruction": "q", "input": "none", "output": "a"}).messages


@pytest.mark.parametrize("value", [3, 0.5, True, datetime.date(2024, 1, 1)])
def test_answers_that_are_no_text_lead_to_quotes(value: Any) -> None:
    error = refused({"prompt": "q", "completion": value})
    assert "expected text" in error.message and error.hint == "write it as text, in quotes"
