"""The size of a row decides where a chunk ends, before anybody knows whether the row is one."""

from __future__ import annotations

from typing import Any

import pytest

from sft_play.data.formats import understand
from sft_play.data.processes import size_of
from sft_play.errors import DataError


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"messages": [{"role": "user", "content": 5}, {"role": "assistant", "content": "a"}]},
            "`messages[0].content` is a number",
        ),
        (
            {"messages": [{"role": "user", "content": True}, {"role": "assistant", "content": "a"}]},
            "`messages[0].content` is true or false",
        ),
        (
            {"conversations": [{"from": "human", "value": 3}, {"from": "gpt", "value": "a"}]},
            "`conversations[0].value` is a number",
        ),
    ],
)
def test_a_turn_that_is_no_text_has_a_size_and_one_clear_error(row: dict[str, Any], said: str) -> None:
    assert size_of(row) > 0
    with pytest.raises(DataError) as caught:
        understand(("x:1", row), 0, None)
    assert caught.value.place == "x:1"
    assert said in caught.value.message
    assert "expected text" in caught.value.message


def test_the_size_counts_texts_one_level_deep() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "abc"}]}, {"from": "gpt", "value": "1234567890"}]
    assert size_of({"text": "abcde", "messages": parts, "input_ids": [1, 2]}) >= 5 + 10 + 16
    assert size_of(DataError("four")) == 4
