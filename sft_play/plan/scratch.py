"""The shape of a model that starts from scratch (`model.init: random`), from the configuration alone: no torch, no hub.

It is a Llama in the shape of Llama 3 where the keys leave something open: heads for keys and values as for queries, a gated
feed-forward part of 8/3 of the width rounded up to a multiple of 256 (64 for models narrower than 1,024; Touvron et al. 2023,
arXiv 2302.13971, section 2.2), no biases, RMSNorm with 1e-5, head and embedding one matrix, rotary positions with base 10,000 up to
4,096 positions and 500,000 beyond, weights drawn with a standard deviation of 0.02.
"""

from __future__ import annotations

from typing import Any

from sft_play.config.schema import ModelConfig

SHAPE_KEYS = ("vocab_size", "hidden_size", "attention_heads", "layers")
LONG_POSITIONS = 4096
ROPE_THETA, LONG_ROPE_THETA = 10_000.0, 500_000.0


def is_scratch(model: ModelConfig) -> bool:
    """Whether the model's shape comes from the keys and not from another model's `config.json`."""
    return model.init == "random" and not model.name


def trains_tokenizer(model: ModelConfig) -> bool:
    """Whether the tokenizer is made from the training data: asked for, or from scratch and nothing else was said."""
    return model.tokenizer == "train" or (is_scratch(model) and model.tokenizer is None)


def label(model: ModelConfig) -> str:
    """Returns what the model is called where `model.name` may be missing: in stamps, plans and messages."""
    if not is_scratch(model):
        return f"{model.name} (random weights)" if model.init == "random" else model.name
    return f"from scratch ({model.layers} x {model.hidden_size}, {model.attention_heads} heads, {model.vocab_size} tokens)"


def intermediate_size(hidden_size: int) -> int:
    """Returns the width of the feed-forward part: 8/3 of the model's, rounded up."""
    multiple = 256 if hidden_size >= 1024 else 64
    return -(-8 * hidden_size // (3 * multiple)) * multiple


def scratch_architecture(model: ModelConfig) -> dict[str, Any]:
    """Returns the `config.json` of a model whose shape the keys give, without the ids of special tokens."""
    assert model.hidden_size and model.attention_heads and model.layers and model.vocab_size, "checked by `config.rules`"
    theta = ROPE_THETA if model.max_seq_len <= LONG_POSITIONS else LONG_ROPE_THETA
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": intermediate_size(model.hidden_size),
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.attention_heads,
        "num_key_value_heads": model.attention_heads,
        "head_dim": model.hidden_size // model.attention_heads,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_seq_len,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
    }
