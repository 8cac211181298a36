"""The plan of ranks on unlike devices: what each gets, what that gains, when fewer machines would be faster, and nodes that have met."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sft_play.config.schema import LoraSettings
from sft_play.errors import HardwareError
from sft_play.plan.calibration import Calibration, StepFit, of_all_nodes
from sft_play.plan.hardware import GIB, Device, Hardware
from sft_play.plan.plan import Plan
from tests.plans import SMALL, counts, plan_of, reason

CARDS = "RTX5070TiLaptop+RTX3070Ti+RTX4070Laptop"


def planned(hardware: Hardware | str, name: str = "meta-llama/Llama-2-7b-hf", mode: Any = "qlora", **changes: Any) -> Plan:
    lora = LoraSettings(r=16, target_modules=["q_proj", "v_proj"])
    case = {"lora": lora, "max_seq_len": 2048, "command_strategy": "auto", "global_batch_size": 24} | changes
    return plan_of(hardware, name=name, mode=mode, **case)


def gain(plan: Plan) -> float:
    """Returns what the plan says that shares gain over equal ones."""
    return float(reason(plan, "unequal shares: ").split(" a step, ")[1].split(" times")[0])


# What each rank gets.


def test_named_cards_get_rows_by_speed_and_memory() -> None:
    plan = planned(CARDS + "@1Gbit")
    assert sum(counts(plan)) == 24 == plan.global_batch_size
    rows = dict(zip((rank.device_name for rank in plan.ranks), counts(plan), strict=True))
    assert rows["RTX5070TiLaptop"] > rows["RTX3070Ti"] >= rows["RTX4070Laptop"] > 0
    assert len({rank.accumulation for rank in plan.ranks}) > 1  # under DDP each has micro-steps of its own
    assert all(0 < rank.micro_batch <= rank.most_rows and rank.peak_bytes <= rank.capacity_bytes for rank in plan.ranks)
    assert all(len(rank.cost) == 2 and rank.cost[1] > 0 for rank in plan.ranks)
    told = reason(plan, "shares by speed and memory, of 24 rows a step: rank 0 ")
    assert f"rank 2 {rows['RTX4070Laptop']} row" in told and "would fit" in told
    assert gain(plan) > 1.1
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


# Machines.


def gpu(name: str, gib: float, flops: float, free: float | None = None) -> Device:
    return Device(
        name=name, memory_bytes=int(gib * GIB), free_bytes=int((free or gib) * GIB), bf16=True, peak_flops=flops, bandwidth=5e11
    )


def machine(*devices: Device) -> Hardware:
    return Hardware(kind="cuda", devices=devices, cpu_threads=8, ram_bytes=32 * GIB)


def test_nodes_that_have_met_make_one_plan() -> None:
    desktop, laptop = gpu("desktop", 12, 6e13), gpu("laptop", 8, 2e13)
    met = ((desktop, desktop), (laptop,))
    plans = [
        planned(
            replace(machine(*met[node]), cpu_threads=4 + node),
            max_seq_len=1024,
            network="1Gbit",
            num_nodes=2,
            node_rank=node,
            num_gpus=len(met[node]),
            node_devices=met,
        )
        for node in (0, 1)
    ]
    assert plans[0] == plans[1] and plans[0].node_ranks == (2, 1) and plans[0].world_size == 3
    assert [rank.device for rank in plans[0].ranks] == ["cuda:0", "cuda:1", "cuda:0"]
    assert min(counts(plans[0])[:2]) > counts(plans[0])[2] > 0
    assert gain(plans[0]) > 1.1


def fitted(name: str, flops: float) -> Calibration:
    """Returns what `make bench` found on a card: a line through steps of other work than is planned."""
    fit = StepFit(
        work={"mode": "full"}, model="small", seconds_per_micro_step=0.001, flops_per_second=flops, threads=1.0, layers=24,
        flops_per_token=5e8, points=10, spread=0.02, measured="2026-11-21",
    )  # fmt: skip
    return Calibration(device=name, kind="cuda", threads=8, measured="2026-11-21", steps=(fit,))


def test_shares_rest_on_what_each_node_measured_on_its_own_card() -> None:
    """By their data sheets the two are alike; the second was measured at a third of the speed."""
    met = ((gpu("a", 24, 6e13),), (gpu("b", 24, 6e13),))
    fast, slow = fitted("a", 3e13), fitted("b", 1e13)
    case: dict[str, Any] = {"max_seq_len": 512, "network": "10Gbit", "num_nodes": 2, "node_devices": met}

    def shares(here: Calibration | None, *nodes: tuple[Calibration, ...]) -> tuple[int, ...]:
        more = {"calibration": of_all_nodes(here, nodes)}
        return counts(planned(machine(*met[0]), SMALL, "lora", more=more, **case))

    assert shares(fast, (fast,), ()) == (12, 12), "one of the two was never measured: both are guessed"
    first, second = shares(fast, (fast,), (slow,))
    assert first + second == 24 and 2 * second <= first


def test_a_full_gpu_of_another_node_is_named() -> None:
    met = ((gpu("a", 12, 6e13),), (gpu("b", 8, 3e13, free=0.1),))
    with pytest.raises(HardwareError, match=r"GPU 0 of node 1 \(b\) is full: 0\.1 of 8\.0 GiB free"):
        planned(machine(*met[0]), num_nodes=2, node_devices=met)
