"""Target modules that a model does not have."""

from __future__ import annotations

import pytest

from sft_play.errors import UserError
from sft_play.model.lora import find_targets
from tests.families import tiny_model


def test_names_that_match_nothing_are_listed_beside_what_there_is() -> None:
    with pytest.raises(UserError, match="`query`, `c_attn`") as caught:
        find_targets(tiny_model("llama", "meta"), ["q_proj", "query", "c_attn"])
    layers = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert all(f"`{name}`" in (caught.value.hint or "") for name in layers)
