"""Weights of rows and turns, from files to each learnt token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest

from sft_play.data import IGNORED, Message
from sft_play.data.chat import Encoded
from sft_play.data.formats import understand
from sft_play.data.tokens import WEIGHTLESS
from sft_play.data.turns import weight_of
from tests.chat_tokenizers import load_with, outcome_of, rows_of, save_tokenizer

END = "<|im_end|>"
SPECIAL = ["<|im_start|>", END]


@pytest.fixture(scope="module", params=["llama3", "llama2"])
def chatml(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a tokenizer whose pieces are those of the complete text, or one that marks its beginning."""
    return load_with(save_tokenizer(tmp_path_factory.mktemp("t"), request.param, special=SPECIAL, eos=END), "chatml")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_with(save_tokenizer(tmp_path_factory.mktemp("t"), "llama3", special=SPECIAL, eos=END), "qwen3")


def chat(*weights: float | None) -> list[Message]:
    """Return exchanges as read from a file with weighted answers."""
    turns = []
    for number, weight in enumerate(weights):
        turns.append({"role": "user", "content": f"why {number}?"})
        turns.append({"role": "assistant", "content": f"so {number}", "weight": weight})
    return understand(("f.jsonl:1", {"messages": turns}), None).messages or []


def runs(tokenizer: Any, rows: Sequence[Encoded]) -> list[tuple[str, float]]:
    """Return each run of learnt tokens of one weight: its text, without the end of a turn, and that weight."""
    runs_of_weights = []
    for row in rows:
        weights = row.weights or [1.0] * len(row.labels)
        assert len(weights) == len(row.labels) == len(row.input_ids)
        marked = zip(row.labels, weights, strict=True)
        for (learnt, weight), tokens in groupby(marked, lambda pair: (pair[0] != IGNORED, pair[1])):
            if learnt:
                runs_of_weights.append(
                    (tokenizer.decode([token for token, _ in tokens]).removesuffix(END).strip(), weight)
                )
    return runs_of_weights


def test_each_answer_has_its_weight(chatml: Any) -> None:
    assert runs(chatml, rows_of(chatml, chat(0.3, None, 1, 0, 0.5))) == [
        *(("so 0", 0.3), ("so 1", 1.0), ("so 2", 1.0), ("so 4", 0.5))
    ]
    assert rows_of(chatml, chat(0, 1)) == rows_of(chatml, chat(False, True))
    assert all(row.weights is None for row in rows_of(chatml, chat(0, 1, None)))
    assert runs(chatml, rows_of(chatml, chat(0.3, 0.5), loss_on="last")) == [("so 1", 0.5)]


def test_an_answer_in_a_separate_row_keeps_its_weight(qwen3: Any) -> None:
    messages = [
        {**turn, "reasoning_content": "Hm."} if turn["role"] == "assistant" else turn for turn in chat(0.3, 0.6)
    ]
    rows = rows_of(qwen3, messages)
    assert len(rows) == 2 and [weight for _, weight in runs(qwen3, rows)] == [0.3, 0.6]


def test_if_everything_is_learnt_every_turn_has_its_weight(chatml: Any) -> None:
    messages = chat(0.3, None)
    messages[2]["train"] = 0.25
    weighed = runs(chatml, rows_of(chatml, messages, loss_on="all"))
    assert ("so 0", 0.3) in weighed and [text for text, weight in weighed if weight == 0.25] == ["why 1?"]
    assert {weight for _, weight in weighed} == {0.3, 0.25, 1.0} and weighed[-1][0].endswith("so 1")


def test_only_answers_are_weighed_unless_everything_is_learnt(chatml: Any) -> None:
    messages = chat(None)
    messages[0]["train"] = 0.25
    error = outcome_of(chatml, messages=messages).error
    assert error and error.message.startswith("turn 1 (user) has `weight: 0.25`") and "loss_on: all" in str(error.hint)


@pytest.mark.parametrize("policy", ["truncate", "split", "truncate_answers"])
def test_weights_stay_with_their_answers_when_rows_are_cut(policy: str, chatml: Any) -> None:
    messages = [*chat(0.3), {"role": "user", "content": "why " * 60}, *chat(0.6, 0.8)[1:]]
    weighed = runs(chatml, outcome_of(chatml, messages=messages, overlong=policy, limit=64, weight=0.5).rows)
    expected = [("so 0", 0.15), ("so 0", 0.3), ("so 1", 0.4)]
    assert weighed == (expected if policy == "split" else expected[-len(weighed) :]) and weighed


def test_rows_of_text_and_tokens_have_weights_too(chatml: Any) -> None:
    ids = list(range(5, 25))
    weights = [index / 20 for index in range(20)]
    (whole,) = outcome_of(chatml, input_ids=ids, labels=[IGNORED, *ids[1:]], weights=weights, weight=0.5).rows
    assert whole.weights == [weight / 2 for weight in weights]
    pieces = outcome_of(chatml, input_ids=ids, weights=weights, limit=8, overlong="split").rows
    learnt = [
        (label, weight)
        for piece in pieces
        for label, weight in zip(piece.labels, piece.weights or [], strict=True)
        if label != IGNORED
    ]
    assert learnt == list(zip(ids, weights, strict=True))[1:]
    (cut,) = outcome_of(chatml, input_ids=ids, weights=weights, limit=8, overlong="truncate").rows
    assert cut.weights == weights[:8] and cut.input_ids == ids[:8]


@pytest.mark.parametrize("content", [{"messages": chat(None)}, {"input_ids": [5, 6, 7]}])
def test_a_row_of_weight_0_is_skipped_with_this_reason(content: dict[str, Any], chatml: Any) -> None:
    for weight in (0.0, 1e-300):
        outcome = outcome_of(chatml, weight=weight, **content)
        assert (outcome.rows, outcome.dropped, outcome.error) == ((), WEIGHTLESS, None)


def test_a_weight_that_is_0_in_fp32_counts_as_0(chatml: Any) -> None:
    assert weight_of(1e-300, "weight") == 0 and weight_of(1e-30, "weight") == 1e-30
    outcome = outcome_of(chatml, input_ids=[5, 6, 7], weights=[1e-30] * 3, weight=1e-30)
    assert (outcome.rows, outcome.dropped) == ((), WEIGHTLESS)
