"""The plan as a function: choices with reasons, refusals with a way out, and what holds for every world."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sft_play.config.schema import LoraSettings, ModelConfig
from sft_play.errors import HardwareError, UserError
from sft_play.plan.architecture import shape_of
from sft_play.plan.hardware import GIB
from tests.documents import on_page
from tests.plans import CPU, LLAMA, QWEN, SMALL, message, plan_of, prepared_rows, with_ram

SHAPE = shape_of(ModelConfig(name=SMALL))

# What a run on a CPU is.


def test_cpu_processes_share_threads_and_memory() -> None:
    single, plan = plan_of(), plan_of(command_strategy="auto", num_gpus=3)
    assert (single.device, single.world_size, single.strategy, single.backend) == ("cpu", 1, "single", "none")
    assert sum(single.ranks[0].memory_bytes.values()) == single.ranks[0].capacity_bytes  # `free` is one of them
    assert (plan.world_size, plan.strategy, plan.backend) == (3, "ddp", "gloo")
    assert all(rank.capacity_bytes == int(24 * GIB * 0.85 / 3) for rank in plan.ranks)
    assert plan_of(command_strategy="auto").world_size == 2  # without NUM_GPUS


# Choices.


def test_precision_follows_the_hardware() -> None:
    assert "precision fp32: this CPU has no bfloat16 units" in plan_of().reasons.values()
    assert "precision fp16: T4 has no bfloat16" in plan_of("T4").reasons.values()
    assert on_page("expected-scalar-type", message(HardwareError, "H100+T4", command_strategy="auto", bf16=True))
    assert "this CPU does not compute in bfloat16" in message(HardwareError, bf16=True)
    assert "fp16 with loss scaling needs a GPU" in message(HardwareError, fp16=True)
    fast = replace(CPU, devices=(replace(CPU.devices[0], bf16=True),))
    assert plan_of(fast, bf16=True).precision == "bf16"
    assert "zero2 on a CPU computes in fp32 only" in message(HardwareError, fast, bf16=True, command_strategy="zero")


def test_a_typed_optimizer_runs_or_the_plan_says_what_does() -> None:
    there = plan_of(optim="paged_adamw_8bit")  # bitsandbytes has kernels for CPUs, with states in fp32
    assert there.optim == "paged_adamw_8bit" and not there.notices
    states = [plan_of(optim=optim).ranks[0].memory_bytes["optimizer"] for optim in ("paged_adamw_8bit", "adamw_torch")]
    assert states[0] == states[1]
    quantised: dict[str, Any] = {"name": QWEN, "mode": "qlora", "max_seq_len": 512}
    large = plan_of("24GB", **quantised, lora=LoraSettings(r=128)).reasons.values()
    assert (
        "optimizer paged_adamw_8bit: AdamW's states of these adapters are 1.2 GiB, more than 3% of the memory" in large
    )
    sharded = plan_of("2xH100", name=LLAMA, command_strategy="zero", optim="adamw_bnb_8bit")
    assert (
        "optimizer adamw_torch instead of adamw_bnb_8bit: its states cannot be sharded by zero2"
        in sharded.reasons.values()
    )
    assert "`train.optim: adamw_bnb_8bit` does not run" in sharded.notices[0]
    assert "needs complete parameters, but zero2" in message(
        UserError, command_strategy="zero", optim="schedule_free_sgd"
    )


def test_inputs_of_layers_are_moved_where_the_machine_has_the_memory_for_them() -> None:
    case: dict[str, Any] = {"name": LLAMA, "max_seq_len": 8192, "activation_offload": "on", "batch_size": 8}
    plan = plan_of(with_ram("H200", 256), **case)
    assert plan.activation_offload and plan.gradient_checkpointing
    assert "gradient checkpointing on: `train.activation_offload` needs it" in plan.reasons.values()
    assert "offloaded to this machine's memory: 16.0 GiB for 1 process, of 256.0 GiB" in plan.notices
    assert plan.ranks[0].peak_bytes < plan_of("H200", **case | {"activation_offload": "off"}).ranks[0].peak_bytes
    error = message(HardwareError, with_ram("H200", 12), **case)
    assert "needs 16.0 GiB of this machine's memory for micro-batches of 8 rows, and it has 12.0 GiB" in error
    assert "hint: a smaller TRAIN_BATCH_SIZE, or TRAIN_ACTIVATION_OFFLOAD=off" in error
    assert "moves nothing here" in plan_of(activation_offload="on").notices[0]
    assert "TRAIN_ACTIVATION_OFFLOAD=on" in message(HardwareError, "24GB", **case | {"activation_offload": "off"})


def test_muon_has_one_moment_of_a_layers_matrices_and_needs_them_whole() -> None:
    muon, adamw = (plan_of(mode="full", optim=word).ranks[0].memory_bytes for word in ("muon", "adamw_torch_fused"))
    assert adamw["optimizer"] - muon["optimizer"] == 4 * SHAPE.linear_parameters
    for changes in ({"command_strategy": "zero"}, {"command_strategy": "fsdp2"}):
        assert "`muon`, which needs complete parameters" in message(
            UserError, "2xH100", mode="full", optim="muon", **changes
        )
    sliced = {"command_strategy": "auto", "tensor_parallel": 2}
    sliced = message(UserError, "2xB200", name=LLAMA, mode="full", optim="muon", **sliced)
    assert "`launch.tensor_parallel` shards them" in sliced


def test_a_warm_up_longer_than_the_run_is_refused_where_steps_are_known() -> None:
    data = prepared_rows(64, longest=100, each=50)
    assert "is 100, but the run has 2 steps" in message(UserError, data=data, epochs=1, warmup_steps=100)
    assert plan_of(data=data, epochs=1, warmup_steps=2).warmup_steps == 2
    assert "needs one to decay" in message(
        UserError, data=data, epochs=1, warmup_steps=2, lr_scheduler_type="polynomial"
    )
    assert plan_of(data=data, epochs=1, lr_scheduler_type="constant").warmup_steps == 0


def test_a_schedule_that_cannot_decay_is_refused() -> None:
    assert "ends at 1e-07, but the learning rate is 1e-08" in message(
        UserError, lr_scheduler_type="polynomial", learning_rate=1e-8
    )
    floor: dict[str, Any] = {"lr_scheduler_type": "cosine_with_min_lr", "learning_rate": 0.0}
    assert "the learning rate is 0" in message(UserError, extra={"lr_scheduler_kwargs": {"min_lr": 1e-5}}, **floor)
    for settings, end in (({"min_lr": 1.0}, "1"), ({"min_lr_rate": 20}, "0.2")):
        for schedule in ("cosine_with_min_lr", "cosine_warmup_with_min_lr"):
            text = message(
                UserError, lr_scheduler_type=schedule, learning_rate=0.01, extra={"lr_scheduler_kwargs": settings}
            )
            assert f"`{schedule}`, which ends at {end}, but the learning rate is 0.01" in text


def test_a_fall_that_is_longer_than_the_run_is_refused() -> None:
    """transformers would begin in the middle of it, at a small part of the learning rate."""
    wsd: dict[str, Any] = {"lr_scheduler_type": "warmup_stable_decay", "max_steps": 10, "warmup_steps": 2}
    assert plan_of(**wsd, extra={"lr_scheduler_kwargs": {"num_decay_steps": 8}}).warmup_steps == 2
    text = message(UserError, **wsd, extra={"lr_scheduler_kwargs": {"num_decay_steps": 9}})
    assert "`train.lr_scheduler_kwargs.num_decay_steps` is 9 after a warm-up of 2, but the run has 10 steps" in text


def test_rows_are_padded_where_flattening_is_not_proven_or_slow() -> None:
    ragged = prepared_rows(64, longest=1000, each=200)
    case: dict[str, Any] = {"name": LLAMA, "max_seq_len": 1024, "batch_size": 4, "attn_implementation": "sdpa"}
    assert plan_of("H100", **case, data=ragged).layout == "flattened"
    assert plan_of("H100", **case).layout == "flattened"  # nothing is known of the rows
    same_length = prepared_rows(64, longest=1000, each=1000)
    even = plan_of("H100", **case, data=same_length)  # rows of one length need no padding, and no mask
    assert even.layout == "unmasked" and "0% of padding costs less than a mask" in even.reasons["layout"]
    for family, layout in {"mamba2": "unmasked", "zamba2": "padded"}.items():
        plan = plan_of(batch_size=4, data=ragged, request_fields={"shape": replace(SHAPE, model_type=family)})
        assert plan.layout == layout and f"`{family}` is not among the families" in plan.reasons["layout"]


def test_attention_follows_the_hardware_and_the_family() -> None:
    assert plan_of(attn_implementation="eager").attn_implementation == "eager"
    assert "needs a GPU" in message(HardwareError, attn_implementation="flash_attention_2")
    assert "torch trains on GPUs only" in message(HardwareError, attn_implementation="flex_attention")
    assert plan_of("H100", attn_implementation="flex_attention").attn_implementation == "flex_attention"
    assert "attention varlen: row by row, without a mask" in plan_of().reasons.values()
    assert "T4 has 7.5" in message(HardwareError, "T4", attn_implementation="varlen")
    family = {"shape": replace(SHAPE, model_type="gemma2", attention=("flash_attention_2",))}
    plan = plan_of(request_fields=family)
    assert (plan.attn_implementation, plan.layout) == ("eager", "unmasked")
    assert "attention eager: transformers has no sdpa kernel for `gemma2`" in plan.reasons.values()
    assert "no such kernel for `gemma2`" in message(UserError, request_fields=family, attn_implementation="sdpa")


def test_a_typed_accumulation_decides_how_many_rows_must_fit() -> None:
    case: dict[str, Any] = {"name": LLAMA, "mode": "qlora", "max_seq_len": 2048, "grad_accum": 4}
    plan = plan_of("24GB", **case)
    assert (plan.ranks[0].micro_batch, plan.ranks[0].accumulation) == (8, 4)
    assert "gradient checkpointing on: 8 rows per device would not fit without it" in plan.reasons.values()
    text = message(HardwareError, "24GB", **case | {"grad_accum": 1})
    assert (
        "a micro-batch of 32 rows of 2048 tokens does not fit (`train.grad_accum` 1 needs it: 32 global / (1 x 1 rank))"
        in text
    )
    assert "TRAIN_GRAD_ACCUM=auto: " in text


# Strategies and their contradictions.


@pytest.mark.parametrize(
    ("command", "configured", "right"),
    [("zero", "fsdp2", "make train-fsdp"), ("single", "zero1", "make train-deepspeed")],
)
def test_command_and_configuration_may_not_contradict_each_other(command: Any, configured: Any, right: str) -> None:
    text = message(
        UserError, command_strategy=command, num_gpus=None if command == "single" else 2, strategy=configured
    )
    assert f"`launch.strategy` is `{configured}`" in text and right in text


# What does not fit, and what is not there.


def test_more_gpus_than_available_are_refused() -> None:
    text = message(HardwareError, "2xH100", name=LLAMA, command_strategy="auto", num_gpus=3)
    assert (
        "`NUM_GPUS` is 3, but there are 2 (H100, H100)" in text and "NUM_GPUS=2, or describe more in HARDWARE" in text
    )
    assert "`make train` runs one process" in message(UserError, num_gpus=2)
    assert "`NUM_GPUS` is 65" in message(HardwareError, command_strategy="auto", num_gpus=65)


def test_early_refusals_do_not_depend_on_the_data() -> None:
    tight: dict[str, Any] = {"name": LLAMA, "max_seq_len": 8192, "batch_size": 4}
    message(HardwareError, "24GB", **tight)
    early = plan_of("24GB", **tight, early=True)
    assert "rank 0 may run short" in early.reasons["room"]
    short = plan_of("24GB", **tight, rows=64)  # the longest of these rows has 100 tokens
    assert short.ranks[0].peak_bytes < short.ranks[0].capacity_bytes and "room" not in short.reasons
    message(HardwareError, "24GB", name=LLAMA, mode="full", early=True)


@pytest.mark.parametrize(
    ("hardware", "rows", "micro", "steps"),
    [("cpu", 32, 4, 8), ("H200", 256, 64, 4), ("H200", 100, 50, 2), ("H200", 16, 16, 1)],
)
def test_the_largest_micro_batch_that_fits_and_divides(hardware: str, rows: int, micro: int, steps: int) -> None:
    """At most 4 rows on a CPU and 64 on a GPU, where memory holds more; no forecast takes part in it."""
    plan = plan_of(hardware, max_seq_len=64, global_batch_size=rows, packing="off")
    assert [(rank.micro_batch, rank.accumulation) for rank in plan.ranks] == [(micro, steps)]
    assert plan.most_rows > micro


def test_more_micro_steps_than_rows_are_refused() -> None:
    text = message(UserError, grad_accum=1_000_000)
    assert "a step has 32 rows: 999968 micro-steps would be empty" in text and "TRAIN_GRAD_ACCUM=32 at most" in text


def test_a_requested_balancing_loss_is_reported_as_off() -> None:
    from sft_play.plan.architecture import asks_for_router_loss

    assert asks_for_router_loss({"text_config": {"output_router_logits": True}}) and not asks_for_router_loss({})
    plan = plan_of(request_fields={"shape": replace(SHAPE, router_loss=True)})
    assert "balancing loss" in plan.notices[0] and not plan_of().notices
