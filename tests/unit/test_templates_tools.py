"""Calls of tools and thoughts: written and learnt, refused or counted; never silently omitted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sft_play.config.names import template_names
from sft_play.data import Message
from sft_play.data.tokens import DOUBLED, THOUGHTS
from sft_play.data.written_tools import WRITING_CALLS
from sft_play.errors import DataError
from sft_play.evaluation.generation import prompt_ids
from tests.chat_tokenizers import by_hand, learnt_runs, load_with, outcome_of, rows_of, save_tokenizer

SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>",
    "<end_of_turn>", "[INST]", "[/INST]", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<\uff5cUser\uff5c>",
    "<\uff5cAssistant\uff5c>",
]  # fmt: skip
TOOL = {"type": "function", "function": {"name": "add", "description": "Sum.", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "of": ["x", {"deep": True}]}}}
OTHER = {"type": "function", "function": {"name": "add", "arguments": {}}}
ASKED: list[Message] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
CHAT: list[Message] = [
    *ASKED,
    {"role": "assistant", "content": "", "tool_calls": [CALL, OTHER]},
    {"role": "tool", "content": "4"},
    {"role": "tool", "content": "five"},
    {"role": "assistant", "content": "Four."},
]
SYSTEM = (
    "<|im_start|>system\nBe brief.\n\n# Tools\n\nYou may call one or more functions to assist with the user"
    ' query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{"type":'
    ' "function", "function": {"name": "add", "description": "Sum.", "parameters": {"type":'
    ' "object"}}}\n</tools>\n\nFor each function call, return a json object with function name and arguments within'
    ' <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments":'
    " <args-json-object>}\n</tool_call><|im_end|>\n"
)
CALLED = (
    '<tool_call>\n{"name": "add", "arguments": {"a": 2, "of": ["x", {"deep": true}]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>'
)
RESULTS = (
    "\n<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\nfive\n</tool_response><|im_end|>\n"
)
QUESTION = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tools") / "t", "llama3", special=SPECIAL, bos="<s>", eos="</s>")


def own(saved: Path, turn: str) -> Any:
    """Return a tokenizer whose template writes the tools, then each message by `turn`."""
    text = (
        "{{ (tools or []) | tojson }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        + turn
        + "<|im_end|>\n{% endfor %}"
    )
    return load_with(saved, text=text + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def test_qwen3_writes_tools_calls_and_results_as_the_published_template_does(saved: Path) -> None:
    tokenizer = load_with(saved, "qwen3")
    expected = [
        f"{SYSTEM}{QUESTION}\u2039<think>\n\n</think>\n\n{CALLED}\u203a",
        f"{SYSTEM}{QUESTION}{CALLED}{RESULTS}<|im_start|>assistant\n\u2039<think>\n\n</think>\n\nFour.<|im_end|>\u203a",
    ]
    rows = rows_of(tokenizer, CHAT, [TOOL])
    assert [(row.input_ids, row.labels) for row in rows] == [by_hand(tokenizer, row) for row in expected]


@pytest.mark.parametrize("name", template_names())
@pytest.mark.parametrize("loss_on", ["assistant", "last", "all"])
def test_a_named_template_writes_calls_or_refuses_them(name: str, loss_on: Any, saved: Path) -> None:
    tokenizer = load_with(saved, name)
    if name in WRITING_CALLS:
        assert rows_of(tokenizer, CHAT, [TOOL], loss_on=loss_on)
        return
    with pytest.raises(DataError):
        rows_of(tokenizer, CHAT, loss_on=loss_on)
    with pytest.raises(DataError, match=r"does not write the function `\w+` of `tools`") as caught:
        rows_of(tokenizer, [*ASKED, {"role": "assistant", "content": "Four."}], [TOOL], loss_on=loss_on)
    assert caught.value.hint is not None and "`data.chat_template: qwen3`" in caught.value.hint


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ("{{ m['content'] }}", "does not write the calls of turn 3: the name `add`"),
        (
            "{{ m['content'] }}{{ m['tool_calls'] | map(attribute='function.name') | join }}",
            "does not write the calls of turn 3: the argument `2`",
        ),
        (
            "{{ m['tool_calls'] | tojson if m['tool_calls'] else m['content'] if m['role'] != 'tool' }}",
            "does not write the result of turn 4",
        ),
        (
            "{{ m['content'] }}<|im_end|>{{ m['tool_calls'] | tojson if m['tool_calls'] }}",
            "does not write the calls of turn 3 before the end of the turn",
        ),
    ],
)
def test_parts_that_a_template_drops_are_named(turn: str, message: str, saved: Path) -> None:
    with pytest.raises(DataError) as caught:
        rows_of(own(saved, turn), CHAT, [TOOL])
    assert message in caught.value.message
    assert caught.value.hint


def test_a_prompt_whose_calls_the_template_omits_is_refused(saved: Path) -> None:
    assert prompt_ids(load_with(saved, "qwen3"), CHAT[:-1], [TOOL])
    with pytest.raises(DataError, match="does not write the calls of turn 3"):
        prompt_ids(own(saved, "{{ m['content'] }}"), CHAT[:-1])


# Thoughts of reasoning models: where each template writes and learns them, and the count of those that it leaves out.


FIRST_ASKED: Message = {"role": "user", "content": "2+2?"}
AGAIN: Message = {"role": "user", "content": "And 3+3?"}
APART: list[Message] = [
    FIRST_ASKED,
    {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two."},
    AGAIN,
    {"role": "assistant", "content": "Six.", "reasoning_content": "Three and three."},
]
WITHIN: list[Message] = [
    FIRST_ASKED,
    {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\nFour."},
    AGAIN,
    {"role": "assistant", "content": "<think>\nThree and three.\n</think>\n\nSix."},
]
FIRST = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
SECOND = "<|im_start|>user\nAnd 3+3?<|im_end|>\n<|im_start|>assistant\n"


TWO_ROWS = (
    f"{FIRST}\u2039<think>\nTwo and two.\n</think>\n\nFour.<|im_end|>\u203a",
    f"{FIRST}Four.<|im_end|>\n{SECOND}\u2039<think>\nThree and three.\n</think>\n\nSix.<|im_end|>\u203a",
)
ONE_ROW = (f"\u2039{FIRST}Four.<|im_end|>\n{SECOND}<think>\nThree and three.\n</think>\n\nSix.<|im_end|>\u203a",)


@pytest.mark.parametrize(
    ("messages", "loss_on", "rows", "lost"),
    [(APART, "assistant", TWO_ROWS, False), (WITHIN, "assistant", TWO_ROWS, False), (APART, "all", ONE_ROW, True)],
    ids=["reasoning_content", "<think>", "one row of everything"],
)
def test_qwen3_learns_each_thought_in_a_separate_row_and_says_what_is_lost(
    saved: Path, messages: list[Message], loss_on: str, rows: tuple[str, ...], lost: bool
) -> None:
    tokenizer = load_with(saved, "qwen3")
    outcome = outcome_of(tokenizer, messages=messages, loss_on=loss_on)
    assert [(row.input_ids, row.labels) for row in outcome.rows] == [by_hand(tokenizer, row) for row in rows]
    assert (THOUGHTS in outcome.doubts) == lost


def test_results_with_the_marks_that_the_template_writes_are_said(saved: Path) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    for words, doubled in (("<tool_response>\n4\n</tool_response>", True), ("4", False)):
        messages = [APART[0], call, {"role": "tool", "content": words}, {"role": "assistant", "content": "Four."}]
        assert (DOUBLED in outcome_of(load_with(saved, "qwen3"), messages=messages).doubts) == doubled


def test_a_template_without_thoughts_drops_separate_ones_and_keeps_those_in_the_answer(
    saved: Path,
) -> None:
    tokenizer = load_with(saved, "chatml")
    unlearnt = [{**message, "train": False} if message is APART[1] else message for message in APART]
    assert [THOUGHTS in outcome_of(tokenizer, messages=messages).doubts for messages in (APART, WITHIN, unlearnt)] == [
        True,
        False,
        True,
    ]
    assert learnt_runs(tokenizer, rows_of(tokenizer, WITHIN)) == [
        f"{turn['content']}<|im_end|>" for turn in WITHIN[1::2]
    ]
