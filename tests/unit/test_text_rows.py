"""Plain text in rows: every token is a target exactly once, documents end with EOS, no row is longer than it may be."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sft_play.config.schema import Config, ModelConfig, TuningConfig
from sft_play.data import IGNORED
from sft_play.data.formats import Example
from sft_play.data.tokens import EMPTY, TEXT_END, TOO_LONG, Encoder, encode_texts
from sft_play.errors import DataError
from tests.chat_tokenizers import load_with, save_tokenizer


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[bool, Any]:
    """Return two tokenizers that split text alike, by whether they add BOS."""
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        bos: load_with(save_tokenizer(folder / str(bos), "gpt2", bos="<s>", eos="</s>", adds_bos=bos))
        for bos in (False, True)
    }


@settings(max_examples=200)
@given(
    st.text(alphabet="ab1. \n\u00e9\U0001f600", max_size=60),
    st.integers(2, 20),
    st.booleans(),
    st.sampled_from(["error", "split"]),
)
def test_every_token_but_the_first_is_a_target_exactly_once(
    tokenizers: Mapping[bool, Any], text: str, limit: int, bos: bool, overlong: str
) -> None:
    tokenizer = tokenizers[bos]
    rows = encode_texts([text], tokenizer, limit=limit, overlong=overlong)[0].rows
    whole = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    assert tokenizer.decode(whole[int(bos) : -1]) == text
    assert all(2 <= len(row.input_ids) <= limit and not row.prompt_ids and not row.reference for row in rows)
    assert all(
        label in (IGNORED, token) for row in rows for token, label in zip(row.input_ids, row.labels, strict=True)
    )
    assert [label for row in rows for label in row.labels[1:]] == (whole[1:] if text else [])
    assert all(a.input_ids[-1] == b.input_ids[0] for a, b in itertools.pairwise(rows)), (
        "only read again by the next row"
    )


def test_typed_policies_are_obeyed(tokenizers: Mapping[bool, Any]) -> None:
    long, short = encode_texts(["a1b2c3", "a"], tokenizers[False], limit=4, overlong="drop")
    assert long.dropped == TOO_LONG and not long.rows and len(short.rows[0].input_ids) == 2
    (cut,) = encode_texts(["a1b2c3"], tokenizers[False], limit=4, overlong="truncate")
    assert cut.overlong == 7 and cut.lost == TEXT_END and tokenizers[False].decode(cut.rows[0].input_ids) == "a1b2"
    assert cut.dropped is None and encode_texts([""], tokenizers[True], limit=4)[0].dropped == EMPTY


def test_tokens_that_a_text_already_has_are_not_added(tokenizers: Mapping[bool, Any]) -> None:
    (row,) = encode_texts(["<s>ab</s>"], tokenizers[True], limit=9)
    assert tokenizers[True].decode(row.rows[0].input_ids) == "<s>ab</s>"


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path: Path) -> None:
    tokenizer = load_with(save_tokenizer(tmp_path, "gpt2", template="{{ messages }}"))
    with pytest.raises(DataError, match="no end-of-sequence token"):
        encode_texts(["a"], tokenizer, limit=4)


@pytest.mark.parametrize(("task", "refused"), [("sft", "text"), ("cpt", "messages"), ("mixed", None)])
def test_the_task_decides_which_rows_are_learnt(task: Any, refused: str | None, tokenizers: Mapping[bool, Any]) -> None:
    config = Config(model=ModelConfig(name="x", max_seq_len=64), tuning=TuningConfig(task=task))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows: dict[str, dict[str, Any]] = {
        "text": {"text": "words"},
        "messages": {"messages": turns},
        "tokens": {"input_ids": [5, 6, 7]},
    }
    examples = [Example(place="a:1", form=form, **row) for form, row in rows.items()]
    for form, outcome in zip(rows, Encoder(config, tokenizers[False]).encode(examples), strict=True):
        assert bool(outcome.rows) == (outcome.error is None) == (form != refused)
        if outcome.error:
            assert f"`tuning.task: {task}`" in outcome.error.message and "mixed`" in (outcome.error.hint or "")
