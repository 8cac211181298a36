"""The plan's numbers of a model against the model that transformers builds from the same configuration (on the meta device)."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from sft_play.config.schema import ModelConfig
from sft_play.plan.shape import DEFAULTS, TIED_BY_DEFAULT, ModelShape, shape_from_config, shape_of

SMALL: dict[str, Any] = {
    "vocab_size": 5000, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PLAIN: dict[str, Any] = {name: SMALL[name] for name in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")}
GPT = PLAIN | {"n_embd": 256, "n_layer": 6, "n_head": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
EXACT = (
    "llama",
    "mistral",
    "ministral3",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "smollm3",
    "granite",
    "glm",
    "ernie4_5",
    "arcee",
)
NEARLY: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("olmo", "olmo2", "olmo3", "glm4", "cohere", "cohere2", "exaone4", "stablelm", "starcoder2", "phi", "nemotron", "granitemoe"), SMALL
    ),
    "qwen3_moe": SMALL | EXPERTS,
    "olmoe": SMALL | {"num_experts": 4, "num_experts_per_tok": 2}, "mixtral": SMALL | {"num_local_experts": 4},
    "qwen2_moe": SMALL | EXPERTS | {"shared_expert_intermediate_size": 160},
    "gpt2": GPT | {"n_positions": 512}, "gptj": GPT | {"rotary_dim": 16}, "gpt_bigcode": GPT | {"n_positions": 512},
    "gpt_neox": PLAIN | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8},
    "opt": PLAIN | {"hidden_size": 256, "ffn_dim": 1024, "num_hidden_layers": 6, "num_attention_heads": 8, "word_embed_proj_dim": 256,
                    "max_position_embeddings": 512},
    "bloom": PLAIN | {"hidden_size": 256, "n_layer": 6, "n_head": 8},
    "falcon": PLAIN | {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8},
    "mpt": PLAIN | {"d_model": 256, "n_layers": 6, "n_heads": 8},
}  # fmt: skip


def built(config: Any) -> Any:
    """Returns the model on the meta device: every parameter has a shape, none has memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def count(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def config_of(shape: ModelShape) -> Any:
    """Returns transformers' configuration of a row of the table."""
    from transformers import AutoConfig, Gemma3Config

    text: dict[str, Any] = {
        "vocab_size": shape.vocab_size, "hidden_size": shape.hidden_size, "intermediate_size": shape.ffn_size,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.max_positions, "tie_word_embeddings": shape.tied,
    }  # fmt: skip
    if shape.model_type != "gemma3":
        return AutoConfig.for_model(shape.model_type, **text, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    vision = {
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16, "image_size": 896,
        "patch_size": 14, "vision_use_head": False,
    }  # fmt: skip
    return Gemma3Config(text_config=text | {"head_dim": shape.head_dim}, vision_config=vision)


# Sizes of the published checkpoints, in parameters.
PUBLISHED = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008, "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512, "Qwen/Qwen2.5-14B-Instruct": 14_770_033_664,
    "google/gemma-3-27b-it": 27_432_406_640, "meta-llama/Llama-3.1-70B-Instruct": 70_553_706_496, "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320, "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_table_counts_every_parameter(name: str) -> None:
    shape = shape_of(ModelConfig(name=name))
    model = built(config_of(shape))
    assert shape.parameters == count(model) == PUBLISHED[name]
    heads = {id(model.get_output_embeddings()), id(model.get_input_embeddings())}
    linear = [m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and id(m) not in heads and "vision" not in n]
    assert shape.linear_parameters == sum(m.weight.numel() for m in linear)


@pytest.mark.parametrize("kind", EXACT)
def test_families_whose_parameters_are_counted_exactly(kind: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, **SMALL)
    assert shape_from_config(json.loads(config.to_json_string())).parameters == count(built(config))


@pytest.mark.parametrize("kind", sorted(NEARLY))
def test_other_families_are_counted_to_half_a_percent(kind: str) -> None:
    """What is left out are biases and small norms."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, **NEARLY[kind])
    shape = shape_from_config(json.loads(config.to_json_string()))
    assert shape.parameters == pytest.approx(count(built(config)), rel=0.005)


def test_a_config_file_that_leaves_out_what_transformers_takes_for_granted() -> None:
    """google/gemma-3-4b-it publishes these keys and no others of the text part."""
    from transformers import Gemma3Config, Gemma3TextConfig

    published = {
        "model_type": "gemma3",
        "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
                        "sliding_window": 1024},
        "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "model_type": "siglip_vision_model", "num_attention_heads": 16,
                          "num_hidden_layers": 27, "image_size": 896, "patch_size": 14, "vision_use_head": False},
    }  # fmt: skip
    shape = shape_from_config(published)
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.vocab_size, shape.tied) == (8, 4, 256, 262208, True)
    config = Gemma3Config(text_config=published["text_config"], vision_config=published["vision_config"])
    assert shape.parameters == pytest.approx(count(built(config)), rel=0.005)
    own = Gemma3TextConfig()
    assert DEFAULTS["gemma3_text"] == {name: getattr(own, name) for name in DEFAULTS["gemma3_text"]}


def test_families_that_tie_unless_told() -> None:
    from transformers import AutoConfig

    assert all(AutoConfig.for_model(kind).tie_word_embeddings for kind in TIED_BY_DEFAULT)
    assert not AutoConfig.for_model("llama").tie_word_embeddings
