"""`launch.sequence_parallel` in the plan: memory, batch and bytes by groups, and what cannot be cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sft_play.config.schema import ModelConfig
from sft_play.errors import HardwareError, UserError
from sft_play.plan.architecture import shape_of
from sft_play.plan.plan import Plan
from sft_play.plan.show import show_plan
from tests.plans import QWEN, plan_of


def planned(hardware: str, size: int, *, shape: dict[str, Any] | None = None, **launch: Any) -> Plan:
    """Return the plan of Qwen2.5-7B: 28 heads, 4 of keys."""
    own = replace(shape_of(ModelConfig(name=QWEN)), **(shape or {}))
    return plan_of(
        hardware, name=QWEN, max_seq_len=16_384, batch_size=1, packing="off", gradient_checkpointing=True, command_strategy="auto",
        sequence_parallel=size, more={"shape": own}, **launch,
    )  # fmt: skip


def test_groups_have_the_rows_and_ranks_the_slices() -> None:
    whole, cut = planned("8xH100", 1), planned("8xH100", 4)
    parts, quarter = (plan.ranks[0].memory_bytes for plan in (whole, cut))
    assert quarter["activations"] == pytest.approx(parts["activations"] / 4, rel=0.01) and quarter["frozen"] == parts["frozen"]
    assert len(cut.ranks) == 8 and [(rank.micro_batch, rank.accumulation) for rank in cut.ranks] == [(1, 16)] * 8
    assert cut.attn_implementation == "varlen" and cut.global_batch_size == whole.global_batch_size == 32
    text = show_plan(cut)
    assert "32 rows a step = micro-batch 1 x accumulation 16 x 2 groups of 4" in text
    assert "accumulation 16 = 32 global / (1 per group x 2 groups)" in text and "with 7 of 28 heads" in text
    # 2 (28 + 4 heads) x 128 x 2 bytes a token, 28 layers, 3 passes; of 16 rows a group each rank sends 3 of its 4 quarters of a quarter.
    tokens = 16 * cut.row_tokens
    assert f"a rank sends {2 * 32 * 128 * 2 * 28 * 3 * tokens / 4 * 3 / 4 / 1e9:,.0f} GB" in text
    assert (cut.communication_seconds or 0) > (whole.communication_seconds or 0)


@pytest.mark.parametrize(
    ("hardware", "size", "changes", "said"),
    [
        ("8xH100", 3, {}, "does not divide 8 processes"),
        ("8xH100", 8, {}, "28 attention heads cannot be shared out evenly"),
        ("2xH100", 2, {"shape": {"moving_rope": True}}, "rotary angles depend on the longest position"),
        ("1xH100@1Gbit", 2, {"num_nodes": 2}, "joins ranks of several machines over a network of 118 MB/s"),
    ],
)
def test_what_cannot_be_cut_is_named(hardware: str, size: int, changes: dict[str, Any], said: str) -> None:
    with pytest.raises((UserError, HardwareError)) as caught:
        planned(hardware, size, **changes)
    assert said in str(caught.value) and caught.value.hint
