"""What sharing a step costs on a network, choice by choice; which strategies a slow one does not carry; and shares of
ranks on unlike devices.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.load import load_config
from sft_play.config.schema import LoraSettings, ModelConfig
from sft_play.errors import UserError
from sft_play.plan.architecture import shape_of
from sft_play.plan.plan import Plan
from sft_play.plan.show import show_plan
from sft_play.text import figure
from tests.documents import on_page
from tests.plans import LLAMA, QWEN, SMALL, counts, message, plan_of

LLAMA2 = "meta-llama/Llama-2-7b-hf"
CARDS = "RTX5070TiLaptop+RTX3070Ti+RTX4070Laptop"


def planned(hardware: str, name: str = LLAMA2, mode: Any = "lora", **changes: Any) -> Plan:
    lora = LoraSettings(r=16, target_modules=["q_proj", "v_proj"])
    return plan_of(
        hardware, name=name, mode=mode, **{"lora": lora, "max_seq_len": 2048, "command_strategy": "auto"} | changes
    )


# Choices.


def test_the_plan_shows_a_table_of_network_choices() -> None:
    plan = planned(CARDS + "@1Gbit", mode="qlora", global_batch_size=24, compression="fp16")
    rows = {row["choice"]: row for row in plan.exchanges}
    assert list(rows) == [
        "compression: none (16 bits)",
        "compression: fp16",
        "compression: bf16",
        "local_steps: 16",
    ]
    assert rows["compression: none (16 bits)"]["seconds"] == pytest.approx(0.19, abs=0.002)
    assert plan.communication_seconds == pytest.approx(rows["compression: fp16"]["seconds"])
    # Where the cards' speed is unknown there is no share, and without a stated network no table.
    assert all(row["share"] is None for row in planned("12GB+8GB+8GB@1Gbit", mode="qlora").exchanges)
    assert planned("2xRTX4090", mode="qlora").exchanges == ()


@pytest.mark.parametrize(("command", "launch"), [("fsdp2", {"local_steps": 8}), ("zero", {"compression": "bf16"})])
def test_network_choices_are_refused_without_replicas(command: Any, launch: dict[str, Any]) -> None:
    text = message(UserError, "2xRTX4090", **launch, command_strategy=command)
    assert " has its own way to exchange" in text and "make train-distributed" in text


def test_a_plan_says_what_local_steps_do_and_where_they_do_nothing() -> None:
    assert "weights are averaged every 8 steps" in planned("2xRTX4090", local_steps=8).reasons["strategy"]
    alone = planned("RTX4090", local_steps=8)
    assert "`launch.local_steps` 8 has no effect: one process shares nothing" in alone.notices


def test_slices_of_a_machine_share_its_link_to_others() -> None:
    """32 GB of fp32 gradients leave each machine, however they are divided among its cards."""
    case: dict[str, Any] = {"name": LLAMA, "mode": "full", "num_nodes": 2, "command_strategy": "auto"}
    whole = planned("8xB200@10Gbit", **case, strategy="ddp").communication_seconds
    sliced = planned("8xB200@10Gbit", **case, tensor_parallel=4).communication_seconds
    assert whole and sliced and sliced > 0.8 * whole  # 2 x 3/4 against 2 x 15/16 of them


# The speed of the network.


def test_the_networks_speed_can_be_configured() -> None:
    plan = planned("RTX4090", max_seq_len=512, network="1Gbit", num_nodes=3)
    assert plan.communication_seconds == pytest.approx(0.381, abs=0.002)
    faster = planned("RTX4090@10Gbit", max_seq_len=512, network="1Gbit", num_nodes=3)  # what HARDWARE says wins
    assert faster.communication_seconds == pytest.approx(0.0381, abs=0.001)


@pytest.mark.parametrize("text", ["fast", "0Gbit"])
def test_an_invalid_network_is_refused_with_its_place(text: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        f"model: {{name: {QWEN}}}\ndata: {{train_path: examples/01_quickstart}}\nlaunch:\n  network: {text}\n"
    )
    with pytest.raises(UserError, match=r"`launch.network` is") as error:
        load_config(path, (), {})
    assert "c.yaml:4" in error.value.render() and "LAUNCH_NETWORK=1Gbit" in error.value.render()


# Weights over a slow network.


@pytest.mark.parametrize(
    ("hardware", "how"), [("3x24GB@1Gbit", {"command_strategy": "fsdp2"}), ("3xRTX4090@1Gbit", {"strategy": "zero3"})]
)
def test_weights_over_a_slow_network_are_refused_with_the_arithmetic(hardware: str, how: dict[str, Any]) -> None:
    case: dict[str, Any] = {"name": QWEN, "max_seq_len": 512, "command_strategy": "auto"} | how
    text = message(UserError, hardware, **case)
    assert re.search(
        r"would mostly wait for weights: every micro-step waits 173 s for weights = .* x 2/3 / 118 MB/s", text
    )
    assert re.search(r"LAUNCH_STRATEGY=ddp \(make train-distributed\) sends gradients alone: [\d.]+ s a step", text)
    assert on_page("slow-training-over-ethernet", text)
    assert "LAUNCH_SLOW_NETWORK=allow" in text
    assert plan_of(hardware, **case, slow_network="allow").reasons["slow"].startswith("SLOW: ")


@pytest.mark.parametrize(
    ("hardware", "mode", "network", "offered"),
    [
        ("8xH100", "full", "1Gbit", "pipeline"),
        ("H200", "full", "1Gbit", "pipeline"),
        ("8xH100", "lora", "1Gbit", "ddp"),
        ("L4", "full", "50Gbit", ""),
    ],
)
def test_what_is_offered_instead_of_gathering_fits_and_is_faster_by_the_forecast(
    hardware: str, mode: str, network: str, offered: str
) -> None:
    case: dict[str, Any] = {"name": QWEN, "mode": mode, "max_seq_len": 2048, "num_nodes": 2, "network": network}
    case |= {"name": SMALL, "batch_size": 8, "global_batch_size": 16} if not offered else {}
    gathering = plan_of(hardware, **case, command_strategy="fsdp2", slow_network="allow")
    note = gathering.reasons["slow"]
    assert re.findall(r"LAUNCH_STRATEGY=(\w+)", note) == ([offered] if offered else [])
    if offered:
        other = plan_of(hardware, **case, command_strategy="auto", strategy=offered)
        assert f": {figure(other.seconds_per_step or 0)} s a step instead of" in note
        assert (other.seconds_per_step or 0) < (gathering.seconds_per_step or 0) / 1.02


@pytest.mark.parametrize("recomputed", [True, False])
def test_fsdp2_gathers_as_often_with_recomputation(recomputed: bool) -> None:
    case: dict[str, Any] = {"name": QWEN, "max_seq_len": 512, "mode": "lora", "gradient_checkpointing": recomputed}
    for strategy, times in (("fsdp2", 2), ("zero3", 3 if recomputed else 2)):
        text = message(UserError, "24GB@1Gbit", **case, command_strategy="auto", strategy=strategy, num_nodes=2)
        assert f"for weights = {times} x 15.2 GB x 1/2" in text


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_fsdp2_gathers_trained_weights_in_bf16_whatever_their_configured_type(dtype: str) -> None:
    case: dict[str, Any] = {"name": QWEN, "max_seq_len": 512, "mode": "full", "command_strategy": "fsdp2"}
    assert "for weights = 2 x 15.2 GB x 15/16" in message(UserError, "8xH100@1Gbit", **case, num_nodes=2, dtype=dtype)


@pytest.mark.parametrize(("hardware", "forecast"), [("4xH100", False), ("2x24GB", False), ("cpu@1Gbit", True)])
def test_the_plan_says_how_to_find_out_a_speed(hardware: str, forecast: bool) -> None:
    shown = show_plan(planned(hardware, SMALL, max_seq_len=512, global_batch_size=8, strategy="ddp", num_nodes=2))
    assert ("LAUNCH_NETWORK=1Gbit" in shown) is not forecast
    assert ("tokens/s" in shown) is forecast


# Sequences that are cut over ranks: memory, batch and bytes by groups.


def sliced(hardware: str, size: int, *, moving: bool = False, **launch: Any) -> Plan:
    """Return the plan of Qwen2.5-7B: 28 heads, 4 of keys."""
    shape = replace(shape_of(ModelConfig(name=QWEN)), moving_rope=moving)
    return plan_of(
        hardware,
        name=QWEN,
        max_seq_len=16_384,
        batch_size=1,
        packing="off",
        gradient_checkpointing=True,
        command_strategy="auto",
        sequence_parallel=size,
        request_fields={"shape": shape},
        **launch,
    )


def test_groups_have_the_rows_and_ranks_the_slices() -> None:
    whole, cut = sliced("8xH100", 1), sliced("8xH100", 4)
    parts, quarter = (plan.ranks[0].memory_bytes for plan in (whole, cut))
    assert (
        quarter["activations"] == pytest.approx(parts["activations"] / 4, rel=0.01)
        and quarter["frozen"] == parts["frozen"]
    )
    assert [(rank.micro_batch, rank.accumulation) for rank in cut.ranks] == [(1, 16)] * 8
    assert cut.attn_implementation == "varlen" and cut.global_batch_size == whole.global_batch_size == 32
    text = show_plan(cut)
    assert "32 rows a step = micro-batch 1 x accumulation 16 x 2 groups of 4" in text
    assert "accumulation 16 = 32 global / (1 per group x 2 groups)" in text and "with 7 of 28 heads" in text
    assert (cut.communication_seconds or 0) > (whole.communication_seconds or 0)


@pytest.mark.parametrize(
    ("hardware", "size", "changes", "message"),
    [
        ("8xH100", 3, {}, "does not divide 8 processes"),
        ("8xH100", 8, {}, "28 attention heads cannot be divided evenly"),
        ("2xH100", 2, {"moving": True}, "rotary angles depend on the longest position"),
        ("1xH100@1Gbit", 2, {"num_nodes": 2}, "joins ranks of several machines over a network of 118 MB/s"),
    ],
)
def test_models_that_cannot_be_divided_are_refused_by_name(
    hardware: str, size: int, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        sliced(hardware, size, **changes)
    assert caught.value.hint


# Ranks on unlike devices: what each gets, what that gains, and when fewer machines would be faster.


def test_named_cards_get_rows_by_speed_and_memory() -> None:
    plan = planned(CARDS + "@1Gbit", mode="qlora", global_batch_size=24)
    assert sum(counts(plan)) == 24 == plan.global_batch_size
    first, second, third = counts(plan)
    assert first > second >= third > 0
    assert len({rank.accumulation for rank in plan.ranks}) > 1  # under DDP each has its micro-steps
    assert all(0 < rank.micro_batch <= rank.most_rows and rank.peak_bytes <= rank.capacity_bytes for rank in plan.ranks)
    why = plan.reasons["shares"]
    assert f"shares by speed and memory: {first}, {second}, {third} of 24 rows a step instead of 8, 8, 8" in why
    assert re.search(r"1\.1\d times as fast by the catalogue, until training has measured it", why), why
    unnamed = planned("12GB+8GB+8GB@1Gbit", mode="qlora", global_batch_size=24).reasons["shares"]
    assert unnamed.startswith("shares by memory, since no speed is known: ") and "as fast" not in unnamed
    off = planned(CARDS + "@1Gbit", mode="qlora", global_batch_size=24, balance="off")
    assert (plan.seconds_per_step or 0) < (off.seconds_per_step or 0) and counts(off) == (8, 8, 8)
    assert not plan.notices
    # The largest batch is each rank's own: the table has it.
    assert re.search(r"room +rows of up to [\d,]+ tokens would fit in these micro-batches\n", show_plan(plan))


def test_a_slow_network_is_reported_if_one_machine_alone_is_faster() -> None:
    case: dict[str, Any] = {"strategy": "ddp", "gradient_checkpointing": True, "optim": "sgd"}
    plan = planned("RTX4090+RTX3090+RTX3090@100Mbit", SMALL, "full", max_seq_len=512, global_batch_size=24, **case)
    assert any(notice.startswith("FASTER on rank 0 (RTX4090) alone: ") for notice in plan.notices)
