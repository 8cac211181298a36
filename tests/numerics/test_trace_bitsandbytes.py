"""The trace's stand-ins for quantised layers against bitsandbytes' own layers: a real step on a CPU, through the same
tracker.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn.parametrize import Bnb4bitParametrization
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from sft_play.model.load import settings_of, with_experts
from sft_play.model.lora import fuse_adapters
from sft_play.plan.sources import Case
from sft_play.trace.build import dtype_of, model_of, parts_of, prepare
from sft_play.trace.run import follow, observe
from sft_play.trace.step import Peak
from tests.families import tiny_config
from tests.numerics.test_trace import ARCHITECTURES, BF16, MODES, PLAIN, peaks_of, total_of

WIDE = {"hidden_size": 256, "intermediate_size": 640, "head_dim": 64}
DORA = {"lora": {"r": 8, "variant": "dora"}, "fused_adapters": False}
MIXTURE = tiny_config("qwen3_moe", hidden_size=256, moe_intermediate_size=256, head_dim=64).to_dict()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("quantization", "changes"),
    [
        ("nf4", {}),
        ("nf4", BF16),
        ("int8", {}),
        ("int8", BF16),
        ("nf4", {"architecture": MIXTURE, "layout": "unmasked", "nf4_experts": True}),
        ("nf4", DORA | BF16),
        ("int8", DORA),
    ],
    ids=["nf4 fp32", "nf4 bf16", "int8 fp32", "int8 bf16", "experts in nf4", "DoRA nf4 bf16", "DoRA int8 fp32"],
)
@pytest.mark.broad_but("True")
def test_bitsandbytes_allocates_the_memory_of_its_stand_in(
    quantization: str, changes: dict[str, Any], checkpointing: bool, tmp_path: Path
) -> None:
    if (quantization, checkpointing) == ("int8", True) and not changes.get("fused_adapters", True):
        pytest.skip("on a CPU PEFT's DoRA loses the scales of int8 in its first pass; the plan refuses it")
    case = replace(
        PLAIN,
        **(
            {"architecture": ARCHITECTURES["llama"] | WIDE, "gradient_checkpointing": checkpointing}
            | MODES[quantization]
            | changes
        ),
    )
    traced, real = (
        max(peaks_of(places).values(), key=total_of)
        for places in (observe(case, model_of(case)), _real_step(case, tmp_path))
    )
    for part in ("frozen", "quant_state", "adapters", "gradients", "optimizer"):
        assert traced.parts[part] == real.parts[part], part
    assert traced.total == real.total


def _real_step(case: Case, folder: Path) -> dict[str, dict[str, Peak]]:
    """Return the peaks of two steps of a model that transformers and bitsandbytes quantised."""
    settings = settings_of(case.architecture)
    dtype = dtype_of(case.weights_dtype)
    AutoModelForCausalLM.from_config(settings, dtype=dtype).save_pretrained(folder)
    if case.quantization == "int8":
        quantised = BitsAndBytesConfig(load_in_8bit=True)
    else:
        quantised = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype_of(case.precision),
        )
        if case.nf4_experts:
            quantised = with_experts(quantised)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantised, dtype=dtype, attn_implementation=case.attention
    )
    model = prepare(case, model)
    assert fuse_adapters(model) == (0 if not case.fused_adapters else 8 if case.nf4_experts else 14), (
        "PEFT's layers over bitsandbytes' are known by their module"
    )
    experts = [module for module in model.modules() if isinstance(module, Bnb4bitParametrization)]
    state = [
        (tensor, "quant_state") for owner in (*model.parameters(), *experts) for tensor in _quantisation_state(owner)
    ]
    return follow(case, model, [*parts_of(model, case), *state], "cpu").places


def _quantisation_state(owner: torch.nn.Parameter | torch.nn.Module) -> list[torch.Tensor]:
    state = getattr(owner, "quant_state", None)
    if state is None:
        scales = getattr(owner, "SCB", None)
        return [] if scales is None else [scales]
    return [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
