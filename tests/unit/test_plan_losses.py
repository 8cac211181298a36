"""When the plan computes head and loss in chunks, and what it says about it."""

from __future__ import annotations

from typing import Any

import pytest

from sft_play.config.schema import LoraSettings
from sft_play.plan.plan import Plan
from tests.plans import LLAMA, QWEN, SMALL, plan_of


def reason(plan: Plan) -> str:
    return next((text for text in plan.reasons if text.startswith("head and loss")), "")


@pytest.mark.parametrize(
    ("name", "mode", "length", "chunk"),
    [
        (SMALL, "lora", 1024, 1344),  # 768 MiB / (12 B x 49,152 words), whole 64s
        (LLAMA, "full", 8192, 1024),  # h/4: each chunk adds a gradient of the head's size
    ],
)  # fmt: skip
def test_chunks_take_768_mib_where_there_is_room(name: str, mode: Any, length: int, chunk: int) -> None:
    plan = plan_of(
        "8xH200", name=name, mode=mode, max_seq_len=length, batch_size=8, command_strategy="ddp" if mode != "full" else "fsdp2"
    )
    assert plan.loss_chunk == chunk
    assert reason(plan).startswith(f"head and loss in chunks of {chunk} label positions: ")
    assert all(rank.memory_bytes["logits"] < 5 * 2**30 for rank in plan.ranks)


def test_chunks_shrink_to_256_mib_where_there_is_no_room_or_memory_ran_out() -> None:
    case: dict[str, Any] = {"name": LLAMA, "mode": "qlora", "max_seq_len": 1024, "batch_size": 2, "gradient_checkpointing": False}
    tight, roomy = plan_of("20.5GB", **case), plan_of("H200", **case)
    assert (tight.loss_chunk, roomy.loss_chunk) == (128, 512)
    assert all(rank.peak_bytes <= rank.capacity_bytes for rank in (*tight.ranks, *roomy.ranks))
    assert plan_of("H200", **case, halvings=1).loss_chunk == 128
    assert plan_of("cpu", mode="lora", max_seq_len=1024, batch_size=4).loss_chunk == 448


def test_what_cannot_be_chunked_says_why() -> None:
    on_head = LoraSettings(target_modules=["q_proj", "lm_head"])
    case: dict[str, Any] = {"name": QWEN, "mode": "lora", "max_seq_len": 1024, "batch_size": 4, "lora": on_head}
    plan = plan_of("2xH200", command_strategy="zero", zero_stage=3, **case)
    assert plan.loss_chunk == 0 and reason(plan).endswith("ZeRO-3 gathers the head's adapters one by one")
    assert plan_of("2xH200", command_strategy="zero", zero_stage=2, **case).loss_chunk == 384
    unsloth = plan_of("H200", mode="qlora", backend="unsloth", max_seq_len=1024, batch_size=4)
    assert unsloth.loss_chunk == 0 and reason(unsloth).endswith("unsloth has its own loss")
