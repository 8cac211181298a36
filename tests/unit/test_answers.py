"""Thought, text and calls of an answer, by the marks of each family's template: a model that writes its training rows
scores 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sft_play.data.answers import AnswerParts, Marks, marks_of, parts_of
from sft_play.evaluation.scores import score_parts
from tests.chat_families import CHAT_FAMILIES, TOOL, asked, call, save_family
from tests.chat_tokenizers import load_with, rows_of


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("answers")
    return {name: load_with(save_family(folder / name, name), family.named) for name, family in CHAT_FAMILIES.items()}


def learnt(tokenizer: Any, messages: list[dict[str, Any]], tools: Any = None) -> AnswerParts:
    """Return the parts of a row's last answer that are learnt."""
    row = rows_of(tokenizer, messages, tools)[-1]
    return parts_of(tokenizer, row.input_ids[len(row.prompt_ids) : -1])


THINKING = [name for name, family in CHAT_FAMILIES.items() if family.thoughts]
CALLING = [name for name, family in CHAT_FAMILIES.items() if family.tools]


@pytest.mark.parametrize("name", CHAT_FAMILIES)
@pytest.mark.parametrize(
    "words", ["Oslo", '{"label": "a", "score": 1}', '{"name": "Bob", "parameters": {}}', "a <b> c", "yes\n\nno"]
)
def test_a_plain_answer_has_only_text(name: str, words: str, tokenizers: dict[str, Any]) -> None:
    assert learnt(tokenizers[name], asked("2+2?", content=words)) == AnswerParts(words)


@pytest.mark.parametrize("name", THINKING)
def test_a_thought_is_separate_from_the_answer(name: str, tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers[name]
    messages = [*asked("2+2?", content="Four."), *asked("3+3?", content="Six.", reasoning_content="Three\nand three.")]
    assert learnt(tokenizer, messages) == AnswerParts("Six.", "Three\nand three.")


@pytest.mark.parametrize("name", CHAT_FAMILIES)
def test_a_thought_within_the_answer_is_separate_too(name: str, tokenizers: dict[str, Any]) -> None:
    messages = asked("2+2?", content="<think>\nTwo and two.\n</think>\n\nFour.")
    assert learnt(tokenizers[name], messages) == AnswerParts("Four.", "Two and two.")
    assert marks_of(tokenizers[name]).cut(messages[1]["content"], generated=False).text == "Four."


@pytest.mark.parametrize("name", CALLING)
def test_calls_are_read_in_every_form(name: str, tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers[name]
    written_call = '{"name": "add", "arguments": {"a": 2, "of": "x y"}}'
    rows = learnt(tokenizer, asked("2+2?", tool_calls=[call(a=2, of="x y")]), [TOOL])
    assert marks_of(tokenizer).called(rows) == AnswerParts("", calls=(written_call,))
    if name in ("qwen3", "qwen3_5", "mistral"):
        rows = learnt(tokenizer, asked("2+2?", tool_calls=[call(a=2, of="x y"), call(ident="abcdefghj")]), [TOOL])
        assert rows == AnswerParts("", calls=(written_call, '{"name": "add", "arguments": {}}'))
    if name in ("qwen3", "qwen3_5"):
        rows = learnt(tokenizer, asked("2+2?", content="I add.", tool_calls=[call(a=2, of="x y")]), [TOOL])
        assert rows == AnswerParts("I add.", calls=(written_call,))
    if name in ("qwen3", "qwen3_5", "gpt_oss"):
        rows = learnt(tokenizer, asked("2+2?", reasoning_content="Sum.", tool_calls=[call(a=2, of="x y")]), [TOOL])
        assert rows == AnswerParts("", "Sum.", (written_call,))


@pytest.mark.parametrize(
    ("name", "raw", "expected"),
    [
        ("qwen3", "<think>\nnot done", AnswerParts("", "not done")),
        ("qwen3_5", "not done", AnswerParts("", "not done")),
        ("qwen3_5", "so\n</think>\n\nOslo", AnswerParts("Oslo", "so")),
        ("deepseek_r1", "not done", AnswerParts("", "not done")),
        ("gpt_oss", "<|channel|>analysis<|message|>not done", AnswerParts("", "not done")),
        ("gpt_oss", "<|channel|>final<|message|>say to=functions.add", AnswerParts("say to=functions.add")),
        (
            "qwen3",
            '<tool_call>{"arguments": {"b":1.0,"a":[true]},"name":"f"}</tool_call>',
            AnswerParts("", calls=('{"name": "f", "arguments": {"b": 1.0, "a": [true]}}',)),
        ),
        ("qwen3", '<tool_call>{"name": "f", }', AnswerParts("", calls=('<tool_call>{"name": "f", }',))),
        ("qwen3", "Oslo<|im_start|>", AnswerParts("Oslo")),
    ],
)
def test_answers_of_any_form_are_parsed(name: str, raw: str, expected: AnswerParts, tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers[name]
    assert parts_of(tokenizer, tokenizer(raw, add_special_tokens=False)["input_ids"]) == expected


def test_the_same_call_in_another_order_is_the_same_answer() -> None:
    calls = ('{"name": "f", "arguments": {"b": 2.0, "a": {"d": 1, "c": 0}}}', '{"arguments": {"b": 2}, "name": "g"}')
    others = ('{"arguments": {"a": {"c": 0, "d": 1}, "b": 2}, "name": "f"}', '{"name": "g", "arguments": {"b": 2}}')
    pairs = [(AnswerParts("", calls=calls), AnswerParts("", calls=others))]
    assert score_parts(["exact_match"], pairs).each == ({"exact_match": 1.0},)
    pairs = [(AnswerParts("", calls=calls), AnswerParts("", calls=others[::-1]))]
    assert score_parts(["exact_match"], pairs).each == ({"exact_match": 0.0},)


def test_a_template_that_fails_leaves_answers_unchanged(tmp_path: Path) -> None:
    tokenizer = load_with(save_family(tmp_path / "t", "qwen3"), text="{{ raise_exception('no') }}")
    marks: Marks = marks_of(tokenizer)
    assert marks.cut(" Oslo ") == AnswerParts("Oslo") and marks.form is None
