"""Thoughts of reasoning models: where each template writes and learns them, and the count of those that it leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sft_play.config.schema import Config, DataConfig, ModelConfig, TrainConfig
from sft_play.data.chat import IGNORED
from sft_play.data.encode import Encoder, Outcome
from sft_play.data.example import Example, Message
from sft_play.data.templates import chat_format
from sft_play.model.tokenizer import load_tokenizer
from tests.chat_tokenizers import by_hand, save_tokenizer

ASKED: Message = {"role": "user", "content": "2+2?"}
AGAIN: Message = {"role": "user", "content": "And 3+3?"}
APART: list[Message] = [
    ASKED,
    {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two."},
    AGAIN,
    {"role": "assistant", "content": "Six.", "reasoning_content": "Three and three."},
]
WITHIN: list[Message] = [
    ASKED,
    {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\nFour."},
    AGAIN,
    {"role": "assistant", "content": "<think>\nThree and three.\n</think>\n\nSix."},
]
FIRST = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
SECOND = "<|im_start|>user\nAnd 3+3?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    special = ["<|im_start|>", "<|im_end|>"]
    return save_tokenizer(tmp_path_factory.mktemp("thoughts") / "t", "llama3", special=special, bos="<s>", eos="<|im_end|>")


def outcome(saved: Path, template: str, messages: list[Message], loss_on: Any = "assistant") -> tuple[Any, Outcome]:
    tokenizer = load_tokenizer(saved, chat_format(DataConfig(chat_template=template)))
    encoder = Encoder(Config(model=ModelConfig(name="tiny"), train=TrainConfig(loss_on=loss_on)), tokenizer)
    (found,) = encoder.encode([Example(place="a:1", form="messages", source=0, messages=messages)])
    assert found.error is None, found.error
    return tokenizer, found


def rows_of(found: Outcome) -> list[tuple[list[int], list[int]]]:
    return [(row.input_ids, row.labels) for row in found.rows]


@pytest.mark.parametrize("messages", [APART, WITHIN], ids=["reasoning_content", "<think>"])
def test_qwen3_learns_each_thought_in_a_row_of_its_own_and_loses_none(saved: Path, messages: list[Message]) -> None:
    tokenizer, found = outcome(saved, "qwen3", messages)
    assert rows_of(found) == [
        by_hand(tokenizer, row)
        for row in (
            f"{FIRST}\u2039<think>\nTwo and two.\n</think>\n\nFour.<|im_end|>\u203a",
            f"{FIRST}Four.<|im_end|>\n{SECOND}\u2039<think>\nThree and three.\n</think>\n\nSix.<|im_end|>\u203a",
        )
    ]
    assert found.thoughts == 0


def test_one_row_of_everything_loses_the_earlier_thought_and_it_is_counted(saved: Path) -> None:
    tokenizer, found = outcome(saved, "qwen3", APART, loss_on="all")
    assert rows_of(found) == [
        by_hand(tokenizer, row)
        for row in (f"\u2039{FIRST}Four.<|im_end|>\n{SECOND}<think>\nThree and three.\n</think>\n\nSix.<|im_end|>\u203a",)
    ]
    assert found.thoughts == 1


def test_a_template_that_knows_no_thoughts_loses_what_stands_apart_and_keeps_what_stands_in_the_answer(saved: Path) -> None:
    _, apart = outcome(saved, "chatml", APART)
    assert apart.thoughts == 2
    tokenizer, within = outcome(saved, "chatml", WITHIN)
    (row,) = within.rows
    learnt = tokenizer.decode([token for token in row.labels if token != IGNORED])
    assert learnt == "".join(f"{turn['content']}<|im_end|>" for turn in WITHIN[1::2]) and within.thoughts == 0
    unlearnt = [{**message, "train": False} if message is APART[1] else message for message in APART]
    assert outcome(saved, "chatml", unlearnt)[1].thoughts == 1
