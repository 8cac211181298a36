"""The plan of ranks on unlike devices: what each gets, what that gains, when fewer machines would be faster, and nodes that have met."""

from __future__ import annotations

from typing import Any

from sft_play.config.schema import LoraSettings
from sft_play.plan.hardware import Hardware
from sft_play.plan.plan import Plan
from tests.plans import SMALL, counts, plan_of, reason

CARDS = "RTX5070TiLaptop+RTX3070Ti+RTX4070Laptop"


def planned(hardware: Hardware | str, name: str = "meta-llama/Llama-2-7b-hf", mode: Any = "qlora", **changes: Any) -> Plan:
    lora = LoraSettings(r=16, target_modules=["q_proj", "v_proj"])
    case = {"lora": lora, "max_seq_len": 2048, "command_strategy": "auto", "global_batch_size": 24} | changes
    return plan_of(hardware, name=name, mode=mode, **case)


def test_named_cards_get_rows_by_speed_and_memory() -> None:
    plan = planned(CARDS + "@1Gbit")
    assert sum(counts(plan)) == 24 == plan.global_batch_size
    rows = dict(zip((rank.device_name for rank in plan.ranks), counts(plan), strict=True))
    assert rows["RTX5070TiLaptop"] > rows["RTX3070Ti"] >= rows["RTX4070Laptop"] > 0
    assert len({rank.accumulation for rank in plan.ranks}) > 1  # under DDP each has micro-steps of its own
    assert all(0 < rank.micro_batch <= rank.most_rows and rank.peak_bytes <= rank.capacity_bytes for rank in plan.ranks)
    told = reason(plan, "shares by speed and memory, of 24 rows a step: rank 0 ")
    assert f"rank 2 {rows['RTX4070Laptop']} row" in told
    assert float(reason(plan, "unequal shares: ").split(" a step, ")[1].split(" times")[0]) > 1.1
    off = planned(CARDS + "@1Gbit", balance="off")
    assert (plan.seconds_per_step or 0) < (off.seconds_per_step or 0) and counts(off) == (8, 8, 8)
    assert off.global_batch_size == 24


# When fewer would be faster.


def test_a_slow_network_is_told_when_one_machine_alone_is_faster() -> None:
    case: dict[str, Any] = {"strategy": "ddp", "gradient_checkpointing": True, "optim": "sgd"}
    plan = planned("RTX4090+RTX3090+RTX3090@100Mbit", SMALL, "full", max_seq_len=512, **case)
    told = reason(plan, "FASTER on rank 0 (RTX4090) alone: ")
    assert "the network included" in told
    assert not any(one.startswith("FASTER") for one in planned(CARDS + "@1Gbit").reasons)
