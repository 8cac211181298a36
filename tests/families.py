"""A tiny random model of every decoder family that the pinned transformers trains: 2 layers, hidden 64, 4 experts,
built in a moment.

`FAMILIES` holds what a family needs beyond `COMMON`, of which each configuration class takes the fields that it has.
"""

from __future__ import annotations

import copy
import dataclasses
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.tiny_models import save_model

VOCAB = 1088
"""More than `tiny_models.build_tokenizer` writes: some tokenizer classes add further tokens."""
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "n_embd": 64, "d_model": 64, "word_embed_proj_dim": 64,
    "intermediate_size": 128, "ffn_dim": 128, "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "n_positions": 512, "max_seq_len": 512, "bos_token_id": None, "eos_token_id": 2,
    "pad_token_id": 3,
    # Rows in tests are longer than windows and chunks.
    "sliding_window": 8, "attention_chunk_size": 16, "index_topk": 32, "attention_dropout": 0.0,
    "residual_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "dropout": 0.0,
    "router_jitter_noise": 0.0, "input_jitter_noise": 0.0,
    # Mixtures of experts: a dense layer first, where a family has those.
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_k": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32, "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 32,
    "moe_num_shared_experts": 1, "intermediate_size_mlp": 96, "first_k_dense_replace": 1, "num_dense_layers": 1,
    "n_group": 1, "topk_group": 1,
    # Latent attention, whose rotated part is a head.
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "index_head_dim": 32, "index_n_heads": 2, "o_groups": 2, "o_lora_rank": 16,
    # Linear attention and state spaces: an inner width of 128.
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_head_dim": 16, "linear_num_heads": 4, "mamba_n_heads": 4, "mamba_num_heads": 8, "mamba_head_dim": 16,
    "mamba_d_ssm": 128, "mamba_d_state": 16, "mamba_chunk_size": 16, "mamba_expand": 2, "ssm_state_size": 16,
    "state_size": 16, "chunk_size": 16, "num_heads": 8, "n_groups": 1,
    # Embeddings of each layer.
    "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "position_embedding_size": 16,
    "deepstack_visual_indexes": [0],
}
WINDOW = {"layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
CONVOLUTION = {"layer_types": ["conv", "full_attention"]}
EQUAL_HEADS = {"num_key_value_heads": 4}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}}
IN_SECOND_LAYER = {"use_sliding_window": True, "max_window_layers": 1}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys((
        "afmoe", "cohere2", "exaone4", "exaone_moe", "gemma2", "gemma3_text", "gpt_oss", "mellum", "mimo_v2_flash",
        "ministral", "olmo3",
    ), WINDOW),
    **dict.fromkeys(
        ("granitemoehybrid", "minimax", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), LINEAR
    ),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), IN_SECOND_LAYER),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"), EQUAL_HEADS),
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v4": {
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "gemma3n_text": WINDOW | {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.0], "laurel_rank": 8},
    "gemma4_text": WINDOW | {"global_head_dim": 32},
    "gptj": {"rotary_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "kimi_linear": LINEAR | EQUAL_HEADS | {"mlp_layer_types": ["dense", "sparse"]},
    **dict.fromkeys(("lfm2", "lfm2_moe"), CONVOLUTION),
    "lfm3": {"num_hidden_layers": 3, "layer_types": ["conv", "sliding_attention", "full_attention"]},
    "mamba2": {"head_dim": 16},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "smollm3": {"no_rope_layers": [1, 0]},
    **dict.fromkeys(("glm4v_text", "qwen2_5_vl_text", "qwen2_vl_text"), MROPE),
    "glm4v_moe_text": {
        "rope_parameters": MROPE["rope_parameters"] | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
    },
}  # fmt: skip
IMAGE = {"image_token_id": 1085, "video_token_id": 1086}
GEMMA3 = {"image_token_index": 1085, "boi_token_index": 1086, "eoi_token_index": 1087, "mm_tokens_per_image": 4}
COMPOSITE: dict[str, tuple[str, str, dict[str, int]]] = {
    "gemma3": ("gemma3_text", "siglip_vision_model", GEMMA3),
    "gemma4": ("gemma4_text", "gemma4_vision", {"image_token_id": 1085, "boi_token_id": 1086, "eoi_token_id": 1087}),
    "mistral3": ("mistral", "pixtral", {"image_token_index": 1085}),
    "qwen3_5": ("qwen3_5_text", "qwen3_5_vision", IMAGE),
    "qwen3_5_moe": ("qwen3_5_moe_text", "qwen3_5_moe_vision", IMAGE),
    "qwen3_vl": ("qwen3_vl_text", "qwen3_vl_vision", IMAGE),
    "aya_vision": ("cohere2", "siglip_vision_model", {"image_token_index": 1085}),
    "cohere2_vision": ("cohere2", "siglip_vision_model", {"image_token_id": 1085}),
    "exaone4_5": ("exaone4", "exaone4_5_vision", IMAGE),
    "glm4v": ("glm4v_text", "glm4v_vision", IMAGE),
    "glm4v_moe": ("glm4v_moe_text", "glm4v_moe_vision", IMAGE),
    "internvl": ("qwen2", "internvl_vision", {"image_token_id": 1085}),
    "kimi_k25": ("deepseek_v3", "kimi_k25_vision", {}),
    "lfm2_vl": ("lfm2", "siglip2_vision_model", {"image_token_id": 1085}),
    "llava": ("llama", "clip_vision_model", {"image_token_index": 1085}),
    "qwen2_5_vl": ("qwen2_5_vl_text", "qwen2_5_vl_vision", IMAGE),
    "qwen2_vl": ("qwen2_vl_text", "qwen2_vl_vision", IMAGE),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", "qwen3_vl_moe_vision", IMAGE),
    "smolvlm": ("llama", "smolvlm_vision", {"image_token_id": 1085}),
}
"""Image-text families: a text part and a tower. transformers has a causal model of `gemma3`, `gemma4` and `qwen3_5*`.
"""
DENSE = (
    "apertus", "arcee", "bloom", "cohere", "cohere2", "ernie4_5", "exaone4", "falcon", "gemma", "gemma2", "gemma3",
    "gemma3_text", "gemma3n_text", "gemma4", "gemma4_text", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neox", "gptj",
    "granite", "helium", "hunyuan_v1_dense", "jais2", "llama", "ministral", "ministral3", "mistral", "mistral3", "mpt",
    "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "opt", "phi", "phi3", "qwen2", "qwen3", "qwen3_vl", "seed_oss",
    "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
MIXTURES = (
    "afmoe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "dots1", "ernie4_5_moe", "exaone_moe",
    "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "granitemoe", "granitemoeshared",
    "hunyuan_v1_moe", "hy_v3", "llama4_text", "mellum", "mimo_v2_flash", "minimax_m2", "mixtral", "olmoe", "phimoe",
    "qwen2_moe", "qwen3_moe", "solar_open",
)  # fmt: skip
HYBRIDS = (
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "lfm3",
    "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_next",
)  # fmt: skip
"""Families with linear attention or state spaces, mixtures of experts among them."""
UNKNOWN: set[str] = {"lfm3"} if version("transformers").startswith("5.17.") else set()
"""To the oldest transformers that is supported."""
FAMILIES = tuple(name for name in (*DENSE, *MIXTURES, *HYBRIDS) if name not in UNKNOWN)


def _taken(config_class: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return those of `values` that a configuration class has a field for."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    return {name: value for name, value in values.items() if name in fields}


def tiny_config(name: str, **own: Any) -> Any:
    """Return a fresh configuration of a family; `own` overrides it (its text part's)."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class: Any = CONFIG_MAPPING[name]
    if name not in COMPOSITE:
        return config_class(**_taken(config_class, COMMON) | copy.deepcopy(OWN.get(name, {})) | own)
    text, vision, tokens = COMPOSITE[name]
    tower: Any = CONFIG_MAPPING[vision]
    return config_class(
        text_config=tiny_config(text, **own),
        vision_config=tower(**_taken(tower, VISION)),
        **tokens,
        tie_word_embeddings=True,
    )


LONG_ROPE_SWITCH = 24


def long_rope(name: str) -> dict[str, Any]:
    """Return LongRoPE's settings, as Phi-3.5's, for rows of more than `LONG_ROPE_SWITCH` tokens."""
    half = COMMON["head_dim"] // 2
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * half,
        "original_max_position_embeddings": LONG_ROPE_SWITCH,
        "long_factor": [1.0 + index for index in range(half)],
        "factor": 8.0,
    }
    if name == "phimoe":
        rope |= {"short_mscale": 1.1, "long_mscale": 1.3}
    own = {} if name == "phimoe" else {"original_max_position_embeddings": LONG_ROPE_SWITCH}
    return {"rope_parameters": rope, "max_position_embeddings": 8 * LONG_ROPE_SWITCH, **own}


def plain_attention(name: str) -> str:
    """Return `sdpa`, or `eager` for a family without such a kernel."""
    from sft_play.model.published import model_class

    config = tiny_config(name)
    return "sdpa" if model_class(config)._model_mapping[type(config)]._supports_sdpa else "eager"


def tiny_model(name: str, device: str = "cpu", *, attention: str | None = None, **own: Any) -> Any:
    """Return the causal model of `tiny_config`, for a family that has none the image-text model; weights by seed 0."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config, kind = tiny_config(name, **own), AutoModelForCausalLM
    if type(config) not in AutoModelForCausalLM._model_mapping:
        kind = AutoModelForImageTextToText
    torch.manual_seed(0)
    with torch.device(device):
        model = kind.from_config(config, attn_implementation=attention)
    for key, weight in model.named_parameters():
        if key.endswith("correct_output_scale"):  # a new Gemma 3n multiplies each layer's inputs by 0
            torch.nn.init.ones_(weight)
    return model


def build_family(folder: Path, name: str, **own: Any) -> Path:
    """Write `tiny_model` with a tokenizer as an ordinary Hugging Face folder, and return `folder`."""
    return save_model(tiny_model(name, **own), folder)
