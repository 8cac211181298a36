"""Ranks with slices of a line compute what one process does with all of it, for every family (contract B16)."""

from __future__ import annotations

from pathlib import Path

import pytest

from sft_play.plan.shape import SLICED_MODEL_TYPES
from tests.families import MIXTURES
from tests.numerics.rank_processes import results_of_ranks

EXACT = 2e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "families"),
    [
        (2, ["llama", "gpt_oss"]),
        pytest.param(4, ["llama", "deepseek_v3", "gemma3_text", "gpt_oss", "qwen3"], marks=pytest.mark.long),
        pytest.param(2, sorted(SLICED_MODEL_TYPES), marks=pytest.mark.long),
    ],
)
def test_slices_are_exact_and_rows_independent_bit_for_bit(world: int, families: list[str], tmp_path: Path) -> None:
    """Logits and gradients; with 4 ranks 2 grouped keys are repeated. Another token in the first row changes no bit of
    the others' logits.

    Mixtures of experts multiply all tokens of an expert at once, so their number changes the rounding of the last bits.
    """
    result = results_of_ranks("slice_ranks", tmp_path, world, families)[0]
    wrong = {
        kind: facts
        for kind, facts in result.items()
        if facts["worst"] > EXACT or facts["leak"] > (EXACT if kind in MIXTURES else 0.0) or not facts["changed"]
    }
    assert wrong == {}
