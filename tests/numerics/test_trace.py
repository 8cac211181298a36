"""The trace against reality: the same step with real tensors, through the same tracker, allocates the same bytes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from sft_play.config.schema import ModelConfig
from sft_play.plan.architecture import shape_of
from sft_play.plan.sources import Case
from sft_play.plan.throughput import muon_flops
from sft_play.trace.build import model_of
from sft_play.trace.run import observe
from sft_play.trace.step import Peak
from sft_play.training.muon import MuonWithAdamW

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": SMALL | {"model_type": "llama", "tie_word_embeddings": False},
    "qwen2": SMALL | {"model_type": "qwen2", "tie_word_embeddings": True},
    "gemma3_text": (
        SMALL
        | {
            "model_type": "gemma3_text",
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        }
    ),
    "mistral": SMALL | {"model_type": "mistral", "sliding_window": 16},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512, "n_positions": 256},
}
PLAIN = Case(
    architecture=ARCHITECTURES["llama"],
    device="cpu",
    mode="lora",
    quantization="none",
    lora={"r": 8},
    new_tokens=0,
    weights_dtype="float32",
    adapter_dtype="float32",
    precision="fp32",
    autocast=False,
    gradient_checkpointing=False,
    activation_offload=False,
    layout="flattened",
    attention="sdpa",
    optim="adamw_torch_fused",
    fused_adapters=True,
    loss_chunk=0,
    rows=3,
    row_tokens=40,
    labels=50,
    accumulates=True,
    clips=True,
)
BF16 = {"weights_dtype": "bfloat16", "adapter_dtype": "bfloat16", "precision": "bf16", "autocast": True}
AUTOCAST = {"precision": "bf16", "autocast": True}
MODES: dict[str, dict[str, Any]] = {
    "full fp32": {"mode": "full"},
    "full autocast": {"mode": "full", **AUTOCAST},
    "full bf16": {"mode": "full", **BF16},
    "lora fp32": {},
    "lora bf16": BF16,
    "lora bf16, fp32 adapters": BF16 | {"adapter_dtype": "float32"},
    "nf4": {"mode": "qlora", "quantization": "nf4"},
    "int8": {"mode": "qlora", "quantization": "int8"},
}


def total_of(peak: Peak) -> int:
    return peak.total


def peaks_of(places: Mapping[str, Mapping[str, Peak]]) -> dict[str, Peak]:
    """Return the peak of each moment."""
    return {moment: max(operations.values(), key=total_of) for moment, operations in places.items()}


def traced_exactly(case: Case) -> None:
    fake, real = (peaks_of(observe(case, model_of(case), real=real)) for real in (False, True))
    assert fake == real and max(fake.values(), key=total_of).total > 200_000


WAYS = [(False, "flattened"), (True, "padded"), (True, "flattened"), (False, "padded")]


@pytest.mark.parametrize(
    ("family", "mode", "checkpointing", "layout"),
    [(*pair, *WAYS[index % len(WAYS)]) for index, pair in enumerate(itertools.product(ARCHITECTURES, MODES))],
)
@pytest.mark.broad_but("llama", "gemma3_text")
def test_a_traced_step_allocates_what_a_real_one_does(family: str, mode: str, checkpointing: bool, layout: str) -> None:
    case = replace(PLAIN, architecture=ARCHITECTURES[family], gradient_checkpointing=checkpointing, layout=layout)
    traced_exactly(replace(case, **MODES[mode]))


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 1},
        {"rows": 1, "packed": True},
        {"packed": True, **BF16},
        {"rows": 1, "layout": "padded"},
        {"layout": "unmasked"},
        {"attention": "varlen"},
        {"attention": "varlen", "architecture": ARCHITECTURES["mistral"], **BF16},
        {"attention": "varlen", "packed": True, "row_tokens": 41, "gradient_checkpointing": True, **AUTOCAST},
        {"lora": {"r": 8, "dropout": 0.1}},
        {"lora": {"r": 8, "variant": "dora"}, "fused_adapters": False},
        {"new_tokens": 3},
        {"loss": "dft", **BF16},
        {"label_smoothing": 0.1, "labels": 120, "loss_chunk": 50},
        {"lora": {"r": 8, "modules_to_save": ["embed_tokens"], "rank_pattern": {"q_proj": 2}}},
        {"fused_adapters": False, **BF16},
        {"optim": "adamw_torch"},
        {"optim": "none"},
        {"kernels": "liger", **BF16},
        {"kernels": "liger", "mode": "full", "gradient_checkpointing": True, **AUTOCAST},
        {"optim": "muon", "mode": "full"},
        {"optim": "muon", "mode": "full", "architecture": ARCHITECTURES["gpt2"], **BF16},
        {"accumulates": False},
        {"clips": False},
        {"attention": "eager", "layout": "padded"},
        {"lora": {"r": 8, "target_modules": ["q_proj", "v_proj"]}},
        {"labels": 120},
        {"labels": 120, "loss_chunk": 50},
        {"labels": 120, "loss_chunk": 50, "mode": "full"},
        {"labels": 120, "loss_chunk": 50, "architecture": ARCHITECTURES["gemma3_text"], "layout": "padded", **AUTOCAST},
    ],
)
def test_other_choices_are_traced_exactly(changes: dict[str, Any]) -> None:
    traced_exactly(replace(PLAIN, **changes))


def test_muons_products_are_counted(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with FlopCounterMode(display=False) as counter:
        MuonWithAdamW(torch.optim.AdamW(model.parameters()), model).step()
    assert counter.get_total_flops() == muon_flops(shape_of(ModelConfig(name=str(tiny))))


def test_inputs_that_wait_on_the_host_are_counted_where_they_come_back() -> None:
    case = replace(PLAIN, gradient_checkpointing=True, device="cuda", mode="full")
    moved = replace(case, activation_offload=True)
    traced_exactly(moved)
    resident, offloaded = (peaks_of(observe(variant, model_of(variant))) for variant in (case, moved))
    inputs = 3 * 40 * SMALL["hidden_size"] * 4
    for moment, recomputed in {"backward head": 0, "backward last": inputs}.items():
        before, after = resident[moment].parts, offloaded[moment].parts
        assert before["activations"] - after["activations"] == SMALL["num_hidden_layers"] * inputs
        assert after.get("recompute", 0) - before.get("recompute", 0) == recomputed


@pytest.mark.parametrize(("changes", "width"), [({}, 4), (BF16, 2)])
def test_muons_temporaries_are_those_of_its_largest_matrix(changes: dict[str, Any], width: int) -> None:
    case = replace(PLAIN, mode="full", optim="muon", clips=False, **changes)
    update = peaks_of(observe(case, model_of(case)))["update"].parts
    assert update["workspace"] == (width + 4) * 64 * 160 + 4 * 64**2
