"""Rows that are too long: no answer is cut unless requested, a call keeps its result, and what was lost is counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sft_play.data import IGNORED, Message
from sft_play.data.chat import Encoded
from sft_play.data.tokens import ANSWER_TOO_LONG
from tests.chat_tokenizers import learnt_runs, load_with, outcome_of, save_tokenizer

END = "<|im_end|>"
SYSTEM: Message = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = save_tokenizer(tmp_path_factory.mktemp("tokenizer"), "llama3", special=["<|im_start|>", END], eos=END)
    return {name: load_with(folder, name) for name in ("chatml", "qwen3")}


@pytest.fixture(scope="module")
def chatml(tokenizers: dict[str, Any]) -> Any:
    return tokenizers["chatml"]


@pytest.fixture(scope="module")
def qwen3(tokenizers: dict[str, Any]) -> Any:
    return tokenizers["qwen3"]


def exchange(number: int, words: int = 3) -> list[Message]:
    question = " ".join(["why"] * words) + f" {number}?"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": f"answer {number}"}]


def learnt(tokenizer: Any, rows: Sequence[Encoded]) -> list[str]:
    """Return each answer that is learnt, without its end, in order."""
    return [text.removesuffix(END).removeprefix("<think>\n\n</think>\n\n") for text in learnt_runs(tokenizer, rows)]


def test_truncate_drops_the_oldest_exchanges_and_keeps_the_system_turn(chatml: Any) -> None:
    messages = [SYSTEM, *exchange(1, words=30), *exchange(2), *exchange(3)]
    outcome = outcome_of(chatml, overlong="truncate", limit=80, messages=messages)
    assert outcome.lost == {"user turns", "assistant turns"} and learnt(chatml, outcome.rows) == [
        "answer 2",
        "answer 3",
    ]
    text = chatml.decode(outcome.rows[0].input_ids)
    assert text.startswith(f"<|im_start|>system\nBe brief.{END}\n<|im_start|>user\nwhy why why 2?")


def test_truncate_cuts_the_beginning_of_a_long_question(chatml: Any) -> None:
    outcome = outcome_of(chatml, overlong="truncate", limit=64, messages=[SYSTEM, *exchange(1, words=300)])
    (row,) = outcome.rows
    assert outcome.lost == {"the beginning of a user turn"}, "a shorter prompt is no answer without its end"
    text = chatml.decode(row.input_ids)
    assert len(row.input_ids) <= 64 and learnt(chatml, [row]) == ["answer 1"]
    assert "Be brief." in text and text.endswith(f"why 1?{END}\n<|im_start|>assistant\nanswer 1{END}")
    assert len(row.input_ids) > 50, "no more than needed is cut"
    assert row.input_ids[: len(row.prompt_ids)] == row.prompt_ids


def test_an_answer_that_never_fits_is_cut_only_where_that_is_asked_and_teaches_no_stop(chatml: Any) -> None:
    messages: list[Message] = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so " * 300}]
    for policy in ("truncate", "split"):
        outcome_left = outcome_of(chatml, overlong=policy, limit=64, messages=messages)
        assert (outcome_left.rows, outcome_left.dropped) == (
            (),
            "whose answer, with what cannot be cut before it, does not fit into model.max_seq_len",
        )
    outcome = outcome_of(chatml, overlong="truncate_answers", limit=64, messages=messages)
    (row,) = outcome.rows
    assert outcome.lost == {"the end of an answer"}
    stop = chatml.convert_tokens_to_ids(END)
    assert len(row.input_ids) == 64 and stop not in [label for label in row.labels if label != IGNORED]
    assert chatml.decode(row.input_ids).startswith(f"<|im_start|>user\nwhy?{END}\n<|im_start|>assistant\nso so")


@pytest.mark.parametrize("name", ["chatml", "qwen3"])
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_split_learns_each_answer_exactly_once(name: str, data: st.DataObject, tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers[name]
    sizes = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=7))
    turns = [turn for number, words in enumerate(sizes) for turn in exchange(number, words)]
    start = [SYSTEM] if data.draw(st.booleans()) else []
    outcome = outcome_of(tokenizer, overlong="split", limit=64, messages=[*start, *turns])
    assert outcome.error is None
    assert learnt(tokenizer, outcome.rows) == [f"answer {number}" for number in range(len(sizes))]
    for row in outcome.rows:
        assert len(row.input_ids) <= 64
        assert row.input_ids[: len(row.prompt_ids)] == row.prompt_ids
        assert ("Be brief." in tokenizer.decode(row.input_ids)) == bool(start)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def with_call(words: int, answer: int) -> list[Message]:
    return [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": " ".join(["four"] * words)},
        {"role": "assistant", "content": "So four." + " indeed" * answer},
    ]


@pytest.mark.parametrize("policy", ["drop", "truncate", "split"])
def test_a_call_is_never_learnt_without_its_result(qwen3: Any, policy: str) -> None:
    limit = (
        len(outcome_of(qwen3, overlong="error", limit=4096, messages=with_call(1, 1), tools=[TOOL]).rows[-1].input_ids)
        + 20
    )
    too_long = with_call(1, 300)
    assert not outcome_of(qwen3, overlong=policy, limit=limit, messages=too_long, tools=[TOOL]).rows, (
        "the call alone would fit"
    )
    outcome = outcome_of(qwen3, overlong=policy, limit=limit, messages=with_call(300, 1), tools=[TOOL])
    if policy == "drop":
        assert (outcome.rows, outcome.dropped, outcome.lost) == ((), "longer than model.max_seq_len", frozenset())
    else:
        assert outcome.lost == {"the beginning of a tool turn"} and len(outcome.rows) == 2
        assert learnt(qwen3, outcome.rows[1:]) == ["So four. indeed"]
    both = outcome_of(qwen3, overlong=policy, limit=limit, messages=[*too_long, *with_call(1, 1)], tools=[TOOL])
    assert len(both.rows) == (0 if policy == "drop" else 2)


def test_truncated_tokens_keep_the_learnt_part(chatml: Any) -> None:
    ids, labels = list(range(100)), [IGNORED] * 80 + list(range(80, 100))
    (row,) = outcome_of(chatml, overlong="truncate", limit=50, input_ids=ids, labels=labels).rows
    assert (row.input_ids, row.labels[-20:]) == (ids[50:], labels[80:])
    long_answer = [IGNORED] * 30 + ids[30:]
    assert outcome_of(chatml, overlong="truncate", limit=50, input_ids=ids, labels=long_answer).rows == ()
    outcome = outcome_of(chatml, overlong="truncate_answers", limit=50, input_ids=ids, labels=long_answer)
    assert outcome.lost == {"the end of an answer"} and outcome.rows[0].input_ids == ids[5:55]


def test_tokens_are_split_and_each_is_learnt_once(chatml: Any) -> None:
    ids = list(range(100))
    outcome = outcome_of(chatml, overlong="split", limit=40, input_ids=ids)
    assert [label for row in outcome.rows for label in row.labels[1:]] == ids[1:]
    assert all(len(row.input_ids) <= 40 for row in outcome.rows)


@pytest.mark.parametrize(
    ("parts", "limit", "prompt", "learnt"),
    [
        ([(False, 150), (True, 50)], 64, 14, 50),
        ([(False, 150), (True, 63)], 64, 1, 63),
        ([(False, 150), (True, 64)], 64, 0, 0),
        ([(False, 100), (True, 20), (False, 40), (True, 30)], 64, 34, 30),
        ([(False, 100), (True, 20), (False, 10), (True, 10)], 64, 34, 30),
        ([(False, 9), (True, 60), (False, 9), (True, 5)], 64, 59, 5),
    ],
)
def test_token_rows_keep_every_last_answer_that_fits(
    chatml: Any, parts: list[tuple[bool, int]], limit: int, prompt: int, learnt: int
) -> None:
    labels = [label for trained, count in parts for label in ([60] if trained else [IGNORED]) * count]
    outcome = outcome_of(chatml, limit=limit, overlong="truncate", input_ids=[60] * len(labels), labels=labels)
    if not learnt:
        assert outcome.dropped == ANSWER_TOO_LONG
        return
    (row,) = outcome.rows
    between = sum(label == IGNORED for label in row.labels)
    assert len(row.input_ids) <= limit and (between, len(row.labels) - between) == (prompt, learnt)
    assert row.labels[-1] == 60 and "the end of an answer" not in outcome.lost
