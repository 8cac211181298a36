"""Plain text in rows: every token is a target exactly once, documents end with EOS, no row is longer than it may be."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sft_play.config.schema import Config, ModelConfig, TuningConfig
from sft_play.data.chat import IGNORED, Encoded
from sft_play.data.formats import Example
from sft_play.data.tokens import EMPTY, TEXT_END, TOO_LONG, Encoder, encode_texts
from sft_play.errors import DataError
from sft_play.model.tokenizer import load_tokenizer
from tests.tiny_models import build_tokenizer


class Letters:
    """A tokenizer of one token a letter; `bos` as an attribute of the instance."""

    eos_token_id: int | None = 2

    def __init__(self, bos: int | None = None) -> None:
        self.bos_token_id = bos

    def __call__(self, texts: str | list[str], add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        first = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        one = [first + [ord(letter) for letter in text] for text in ([texts] if isinstance(texts, str) else texts)]
        return {"input_ids": one[0] if isinstance(texts, str) else one}


def encode_text(text: str, tokenizer: Any, *, limit: int, overlong: str = "split") -> Sequence[Encoded]:
    return encode_texts([text], tokenizer, limit=limit, overlong=overlong)[0].rows


def targets(rows: Sequence[Encoded]) -> list[int]:
    """Returns what the loss sees, after the shift by one."""
    found = []
    for row in rows:
        assert len(row.input_ids) == len(row.labels) and not row.prompt_ids and not row.reference
        assert all(label in (IGNORED, token) for token, label in zip(row.input_ids, row.labels, strict=True))
        found += [label for label in row.labels[1:] if label != IGNORED]
    return found


@settings(max_examples=200, deadline=None)
@given(
    st.text(alphabet="abcdefg", max_size=60), st.integers(2, 20), st.sampled_from([None, 1]), st.sampled_from(["error", "split"])
)
def test_every_token_but_the_first_is_a_target_exactly_once(text: str, limit: int, bos: int | None, overlong: str) -> None:
    rows = encode_text(text, Letters(bos), limit=limit, overlong=overlong)
    whole = ([bos] if bos else []) + [ord(letter) for letter in text] + [2]
    assert all(2 <= len(row.input_ids) <= limit for row in rows)
    assert targets(rows) == (whole[1:] if text else [])
    if text:  # chunks overlap by the one token that the next row only reads
        joined = rows[0].input_ids + [token for row in rows[1:] for token in row.input_ids[1:]]
        assert joined == whole and all(a.input_ids[-1] == b.input_ids[0] for a, b in itertools.pairwise(rows))


def test_typed_policies_are_obeyed() -> None:
    long, short = encode_texts(["abcdef", "a"], Letters(), limit=4, overlong="drop")
    assert long.dropped == TOO_LONG and not long.rows and short.rows[0].input_ids == [97, 2]
    (cut,) = encode_texts(["abcdef"], Letters(), limit=4, overlong="truncate")
    assert cut.overlong == 7 and cut.lost == TEXT_END and cut.rows[0].input_ids == [97, 98, 99, 100] and cut.dropped is None
    assert encode_texts([""], Letters(1), limit=4)[0].dropped == EMPTY


def test_nothing_is_added_that_a_text_has_already() -> None:
    tokenizer = Letters(1)
    assert encode_text("\x01ab\x02", tokenizer, limit=9)[0].input_ids == [1, 97, 98, 2]


def test_a_tokenizer_without_an_end_is_refused() -> None:
    tokenizer = Letters()
    tokenizer.eos_token_id = None
    with pytest.raises(DataError, match="no end-of-sequence token"):
        encode_text("a", tokenizer, limit=4)


def test_a_real_tokenizer_gives_the_text_back(tmp_path: Path) -> None:
    build_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    text = "Ein Satz mit Umlauten: größer, 12345, \U0001f600.\n\n    indented"
    rows = encode_text(text, tokenizer, limit=16)
    assert len(rows) > 1 and rows[-1].input_ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(rows[0].input_ids[:1] + targets(rows)[:-1]) == text


@pytest.mark.parametrize(("task", "refused"), [("sft", "text"), ("cpt", "messages"), ("mixed", None)])
def test_the_task_decides_which_rows_are_learnt(task: Any, refused: str | None, tmp_path: Path) -> None:
    build_tokenizer(tmp_path)
    config = Config(model=ModelConfig(name="x", max_seq_len=64), tuning=TuningConfig(task=task))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows: dict[str, dict[str, Any]] = {
        "text": {"text": "words"},
        "messages": {"messages": turns},
        "tokens": {"input_ids": [5, 6, 7]},
    }
    examples = [Example(place="a:1", form=form, source=0, **row) for form, row in rows.items()]
    for form, outcome in zip(rows, Encoder(config, load_tokenizer(tmp_path)).encode(examples), strict=True):
        assert bool(outcome.rows) == (outcome.error is None) == (form != refused)
        if outcome.error:
            assert f"`tuning.task: {task}`" in outcome.error.message and "mixed`" in (outcome.error.hint or "")
