"""What `auto` turns to when a replica does not fit, and what loading takes."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import pytest

from sft_play.config.schema import LoraSettings
from sft_play.errors import HardwareError
from sft_play.plan.hardware import GIB, Device, Hardware
from sft_play.plan.memory import CONTEXT_BYTES
from sft_play.plan.plan import Plan
from sft_play.plan.show import show_plan
from sft_play.text import figure
from tests.plans import LLAMA, QWEN, SMALL, message, plan_of, with_ram

LLAMA_70B = "meta-llama/Llama-3.1-70B-Instruct"
FULL_8B: dict[str, Any] = {"name": LLAMA, "mode": "full", "max_seq_len": 2048, "command_strategy": "auto"}


# The ladder on one machine: replicas, shards, 8-bit states, the machine's memory.


def test_8_bit_states_are_chosen_if_only_the_optimizer_does_not_fit() -> None:
    small: dict[str, Any] = {"name": "HuggingFaceTB/SmolLM3-3B", "mode": "full", "max_seq_len": 1024}
    plan = plan_of("48GB", **small)
    assert plan.optim == "adamw_bnb_8bit" and plan.strategy == "single"
    assert "with adamw_torch_fused a rank needs" in plan.reasons["optimizer"]
    message(HardwareError, "48GB", **small, optim="adamw_torch")  # what was typed is kept


def test_auto_shards_what_does_not_fit_as_replicas() -> None:
    plan = plan_of("8xH100", **FULL_8B)
    assert (plan.strategy, plan.optim, plan.global_batch_size) == ("fsdp2", "adamw_torch_fused", 32)
    assert "a complete replica on each needs 137.2 of 73.4 GiB, so weights are sharded" in plan.reasons["strategy"]
    assert plan_of("8x192GB", **FULL_8B).strategy == "ddp"


def test_recomputation_that_makes_a_sharded_step_sooner_is_named() -> None:
    """Without it the micro-batches are small, and each gathers all weights."""
    case: dict[str, Any] = {"name": "Qwen/Qwen2.5-14B-Instruct", "mode": "full", "max_seq_len": 1024}
    case |= {"command_strategy": "fsdp2"}
    plan = plan_of("4xA100", **case)
    assert not plan.gradient_checkpointing and plan.seconds_per_step
    recomputed = plan_of("4xA100", gradient_checkpointing=True, **case).seconds_per_step or 0.0
    assert plan.seconds_per_step > 1.2 * recomputed
    words = f"{figure(recomputed)} s a step instead of {figure(plan.seconds_per_step)} s"
    assert f"FASTER with TRAIN_GRADIENT_CHECKPOINTING=true: {words}" in plan.notices
    typed = plan_of("4xA100", gradient_checkpointing=False, **case).notices
    assert not any("CHECKPOINTING" in notice for notice in typed), "what was typed is kept"


@pytest.mark.parametrize(
    ("hardware", "case", "way"),
    [
        ("2xH100", {"mode": "qlora", "max_seq_len": 32_768}, "sequence_parallel 2"),
        ("2x24GB", {"mode": "qlora", "max_seq_len": 512}, "pipeline"),
        ("2x4xA100@1Gbit", {"mode": "lora", "max_seq_len": 512, "num_nodes": 2}, "tensor_parallel 2"),
        ("2x4xRTX3090@1Gbit", {"mode": "qlora", "max_seq_len": 512, "num_nodes": 2}, "pipeline"),
    ],
)
def test_ranks_share_by_rule_without_shards_or_a_fast_network(hardware: str, case: dict[str, Any], way: str) -> None:
    """Lines before layers, which need NVLink; else a pipeline."""
    plan = plan_of(hardware, name=LLAMA_70B, command_strategy="auto", **case)
    assert plan.reasons["strategy"].startswith(f"strategy ddp: {way}, since a complete replica on each needs ")
    sizes = plan.sequence_parallel, plan.tensor_parallel, len(plan.stages)
    key, _, size = way.partition(" ")
    assert show_plan(plan).startswith(f"plan: {way.replace('_', ' ')}"), "ddp is only between the groups"
    assert sizes == (
        (1, 1, plan.world_size) if key == "pipeline" else (2, 1, 0) if key == "sequence_parallel" else (1, int(size), 0)
    )


def test_ways_without_gathering_are_named_where_they_are_faster() -> None:
    plan = plan_of("2x8xH100@400Gbit", name=LLAMA_70B, command_strategy="auto", mode="lora")
    (note,) = (notice for notice in plan.notices if notice.startswith("FASTER"))
    assert plan.strategy == "fsdp2" and re.match(r"FASTER with LAUNCH_(TENSOR_PARALLEL=\d|STRATEGY=pipeline): ", note)


def test_offloading_needs_enough_known_memory_of_the_machine() -> None:
    plan = plan_of(with_ram("2x24GB", 512), **FULL_8B)
    assert plan.offload_optimizer and plan.offload_parameters
    assert plan.gradient_checkpointing and plan.ranks[0].micro_batch == 16, "few passes over PCIe"
    assert "shards do not fit either" in (why := plan.reasons["strategy"]) and "of 512.0 GiB; slow" in why
    assert all(rank.peak_bytes <= rank.capacity_bytes for rank in plan.ranks)
    assert plan.tokens_per_second is None and "unknown with offloading" in show_plan(plan, why=False), (
        "PCIe was never measured"
    )
    assert Plan.from_json(plan.to_json() | {"a field of an older version": None}) == plan
    for machine in (with_ram("2x24GB", 64), "2x24GB"):  # too small, and not known
        message(HardwareError, machine, **FULL_8B)
    typed = {"command_strategy": "zero", "zero_stage": 3, "offload_optimizer": True, "offload_parameters": True}
    tight = plan_of(with_ram("2x24GB", 160), **FULL_8B | typed)
    assert any("leaves little for loading" in notice for notice in tight.notices), tight.notices
    unfit = message(HardwareError, with_ram("2x24GB", 160), **FULL_8B)
    assert "adamw_bnb_8bit" not in unfit, "not obeyed"
    assert re.search(r"zero3_offload.json: .* \(128.0 of 160 may be used\).*, still too much", unfit), "no margin"


def test_one_card_that_is_faster_than_a_pipeline_of_all_is_named() -> None:
    case: dict[str, Any] = {
        "name": SMALL,
        "mode": "full",
        "max_seq_len": 512,
        "strategy": "pipeline",
        "command_strategy": "auto",
    }
    plan = plan_of("RTX4090+RTX3060+RTX3070@1Gbit", **case)
    (warning,) = (notice for notice in plan.notices if notice.startswith("FASTER"))
    alone = plan_of("RTX4090", **{**case, "strategy": "auto", "command_strategy": "single"})
    assert plan.stages and f"on rank 0 (RTX4090) alone: {figure(alone.seconds_per_step or 0)} s a step" in warning
    assert "FASTER" in show_plan(plan, why=False), "a warning is shown whatever WHY is"


def test_a_card_without_which_the_others_are_faster_is_named() -> None:
    case: dict[str, Any] = {"name": "Qwen/Qwen2.5-7B-Instruct", "mode": "qlora", "max_seq_len": 2048}
    plan = plan_of("2xRTX4090+RTX3060@10Gbit", command_strategy="ddp", **case)
    assert any(notice.startswith("FASTER without rank 2 (RTX3060): ") for notice in plan.notices), plan.notices


def test_machines_that_make_no_step_sooner_are_named() -> None:
    case: dict[str, Any] = {"name": QWEN, "mode": "qlora", "max_seq_len": 2048, "command_strategy": "ddp"}
    case |= {"num_nodes": 4}
    (note,) = plan_of("RTX4090@100Gbit", global_batch_size=1, **case).notices
    assert re.fullmatch(r"AS FAST with less, on node 0 \(RTX4090\) alone: [\d.]+ s a step", note)
    assert not plan_of("RTX4090@100Gbit", global_batch_size=32, **case).notices


# Several machines: each plans by itself, from its own GPUs, and all must come to the same run.


@pytest.mark.parametrize("mode", ["lora", "qlora", "full"])
def test_machines_with_different_gpus_agree_or_refuse(mode: str) -> None:
    expected, case = (
        set(),
        {"name": "HuggingFaceTB/SmolLM3-3B", "mode": mode, "max_seq_len": 1024, "command_strategy": "auto"},
    )
    for rank, size in enumerate(("80GB", "12GB", "8GB")):
        with suppress(HardwareError):
            plan = plan_of(size, **case, num_nodes=3, node_rank=rank)
            expected.add(
                (plan.strategy, plan.optim, plan.offload_optimizer, plan.global_batch_size, plan.learning_rate)
            )
    assert len(expected) <= 1 and all(strategy == "ddp" for strategy, *_ in expected)


def gpus(*free: float) -> Hardware:
    devices = tuple(
        Device(name=f"GPU {i}", memory_bytes=int(24 * GIB), free_bytes=int(f * GIB), bf16=True, number=i + 2)
        for i, f in enumerate(free)
    )
    return Hardware(kind="cuda", devices=devices, cpu_threads=8, ram_bytes=64 * GIB)


def test_a_full_gpu_is_named_with_the_way_to_exclude_it() -> None:
    text = message(HardwareError, gpus(23, 0.4, 23), name=SMALL, command_strategy="auto")
    assert "other programs hold 23.6 of GPU 3's 24.0 GiB (`make memory-check` names them)" in text
    assert "CUDA_VISIBLE_DEVICES=2,4: 2 of 3 GPUs hold it" in text
    assert plan_of(gpus(0.4, 23), name=SMALL).ranks[0].device == "cuda:1"  # one process takes the free one


# What loading takes counts too.


def test_a_quantised_base_in_shards_is_quantised_in_the_machines_memory() -> None:
    """nf4 of 70B takes 37 GiB, which need not fit on a card; its scales are no parameters, and stay whole."""
    case: dict[str, Any] = {"name": LLAMA_70B, "mode": "qlora", "max_seq_len": 512, "command_strategy": "fsdp2"}
    assert "each of 4 processes holds all weights quantised before they are sharded" in message(
        HardwareError, with_ram("4xRTX3090", 128), **case
    )
    four, eight = (plan_of(with_ram(cards, 512), **case).ranks[0].memory_bytes for cards in ("4xRTX3090", "8xRTX3090"))
    assert (
        four["frozen"] == pytest.approx(2 * eight["frozen"], rel=1e-6)
        and four["quant_state"] == eight["quant_state"] > GIB
    )


def test_full_tuning_in_shards_needs_the_machines_memory_to_load() -> None:
    """fp32 in every process: 8 x 30 GiB for 8B."""
    refused = message(HardwareError, with_ram("8xH100", 200), **FULL_8B | {"command_strategy": "fsdp2"})
    needed = 8 * (8_030_261_248 * 4 + CONTEXT_BYTES["cpu"]) / GIB
    assert (
        f"under fsdp2: each of 8 processes holds all weights in fp32 before they are sharded, {needed:.1f} GiB"
        in refused
    )
    assert "make train-deepspeed" in refused
    assert plan_of(with_ram("8xH100", 300), **FULL_8B).strategy == "fsdp2"


# When head and loss are computed in chunks.


@pytest.mark.parametrize(
    ("name", "mode", "length", "chunk"),
    [
        (SMALL, "lora", 1024, 1344),  # 768 MiB / (12 B x 49,152 words), whole 64s
        (LLAMA, "full", 8192, 1024),  # h/4: each chunk adds a gradient of the head's size
    ],
)
def test_chunks_take_768_mib_if_memory_allows(name: str, mode: Any, length: int, chunk: int) -> None:
    plan = plan_of(
        "8xH200",
        name=name,
        mode=mode,
        max_seq_len=length,
        batch_size=8,
        command_strategy="ddp" if mode != "full" else "fsdp2",
    )
    assert plan.loss_chunk == chunk
    assert plan.reasons["head and loss"].startswith(f"head and loss in chunks of {chunk} label positions: ")
    assert all(rank.memory_bytes["logits"] < 5 * 2**30 for rank in plan.ranks)


def test_chunks_shrink_to_256_mib_if_memory_is_short_or_ran_out() -> None:
    case: dict[str, Any] = {
        "name": LLAMA,
        "mode": "qlora",
        "max_seq_len": 1024,
        "batch_size": 2,
        "gradient_checkpointing": False,
    }
    tight = plan_of("20.5GB", **case)
    assert tight.loss_chunk == 128 and tight.ranks[0].peak_bytes <= tight.ranks[0].capacity_bytes
    assert plan_of("H200", **case).loss_chunk == 512 and plan_of("H200", **case, halvings=1).loss_chunk == 128
    assert plan_of("cpu", max_seq_len=1024, batch_size=4).loss_chunk == 448


def test_models_that_cannot_be_chunked_have_a_reason() -> None:
    on_head = LoraSettings(target_modules=["q_proj", "lm_head"])
    case: dict[str, Any] = {"name": QWEN, "mode": "lora", "max_seq_len": 1024, "batch_size": 4, "lora": on_head}
    plan = plan_of("2xH200", command_strategy="zero", zero_stage=3, **case)
    assert plan.loss_chunk == 0 and plan.reasons["head and loss"].endswith(
        "ZeRO-3 gathers the head's adapters one by one"
    )
    assert plan_of("2xH200", command_strategy="zero", zero_stage=2, **case).loss_chunk == 384
    unsloth = plan_of("H200", mode="qlora", backend="unsloth", max_seq_len=1024, batch_size=4)
    assert unsloth.loss_chunk == 0 and unsloth.reasons["head and loss"].endswith("unsloth has its own loss")
