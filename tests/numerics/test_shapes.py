"""The plan's numbers of a model against the model that transformers builds from the same configuration (on the meta
device).

Families that the formulas know are read by formula, all others counted by `sft_play.trace.run`, as the plan does in a
separate process (`tests/contract/test_plan_families.py`).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any, cast

import pytest
import torch
from transformers import AutoConfig

from sft_play.config.reader import record_of
from sft_play.config.schema import LoraSettings, ModelConfig
from sft_play.model import lora
from sft_play.plan.architecture import shape_from_config, shape_of
from sft_play.plan.shape import FORMULA_MODEL_TYPES, ModelShape
from sft_play.trace.build import BASE
from sft_play.trace.run import count
from tests.families import FAMILIES, tiny_config, tiny_model

SMALL: dict[str, Any] = {
    "vocab_size": 5000,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


# Sizes of the published checkpoints, in parameters.
PUBLISHED = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-14B-Instruct": 14_770_033_664,
    "google/gemma-3-27b-it": 27_432_406_640,
    "meta-llama/Llama-3.1-70B-Instruct": 70_553_706_496,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_table_counts_every_parameter(name: str) -> None:
    assert shape_of(ModelConfig(name=name)).parameters == PUBLISHED[name]


def trained(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def largest_layer(model: Any) -> int:
    """Return the most parameters under one number of the decoder's longest list."""
    sizes: Counter[str] = Counter()
    for name, parameter in model.get_decoder().named_parameters():
        if match := re.search(r"(?:^|\.)(?:layers|h|blocks)\.\d+", name):
            sizes[match[0]] += parameter.numel()
    return max(sizes.values())


@pytest.mark.parametrize("name", FAMILIES)
def test_every_parameter_of_every_family_is_counted(name: str) -> None:
    """All, those that train under full tuning, adapters by `auto` and on typed experts, and the largest layer."""
    config = json.loads(tiny_config(name).to_json_string())
    by_formula = config["model_type"] in FORMULA_MODEL_TYPES
    shape, model = (
        shape_from_config(config) if by_formula else record_of(count(config), ModelShape),
        tiny_model(name, "meta"),
    )
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.largest_layer_parameters == largest_layer(model)
    lora.free_text_part(model)
    assert shape.parameters - shape.vision_parameters == trained(model)
    with torch.device("meta"):
        adapted = lora.add_adapters(model, LoraSettings(r=4), BASE, torch.float32)
    assert shape.adapter_parameters(LoraSettings(r=4)) == trained(adapted)
    experts = sorted({matrix.typed for matrix in shape.matrices if matrix.kind == "experts"})
    assert bool(experts) == bool(shape.experts) and shape.experts in (0, 4) and shape.experts_per_token in (0, 2)
    if experts:
        idle = shape.expert_parameters // 2
        assert shape.active_parameters == shape.linear_parameters - idle + shape.vocab_size * shape.hidden_size


@pytest.mark.parametrize("kind", sorted(FORMULA_MODEL_TYPES))
def test_the_formulas_say_what_is_counted(kind: str) -> None:
    config = json.loads(AutoConfig.for_model(kind, **SMALL).to_json_string())
    formula, counted = shape_from_config(config), record_of(count(config), ModelShape)
    for name in (
        "parameters",
        "linear_parameters",
        "quantised_parameters",
        "active_parameters",
        "largest_layer_parameters",
        "tied",
        "attention",
    ):
        assert getattr(formula, name) == getattr(counted, name), name
    for settings in (
        {},
        {"target_modules": ["q_proj", "v_proj"], "variant": "dora"},
        {"target_modules": ["self_attn.o_proj"], "rank_pattern": {"o_proj": 2}, "modules_to_save": ["embed_tokens"]},
    ):
        lora = LoraSettings(r=8, **cast(Any, settings))
        assert formula.adapter_parameters(lora) == counted.adapter_parameters(lora)
