"""Memory of one rank by closed formulas, in the parts that people ask about. Pure.

Formulas: saved activations per token and layer of Llama-style models under SDPA, checked against a trace of the real models to
0.1 %; nf4 0.515869 bytes per weight with double quantisation; ZeRO and FSDP2 shards (Rajbhandari et al. 2019, arXiv 1910.02054);
logits 12 bytes each at the worst moment of the backward pass (bf16 or fp32 copy, log-softmax and its gradient).
"""

from __future__ import annotations

from dataclasses import dataclass

from sft_play.config.schema import Config
from sft_play.plan.shape import ModelShape

MIB = 2**20
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Packed halves, 8-bit scales of 64, and their fp32 scales of 256."""
INT8_BYTES = 1.0
CONTEXT_BYTES = {"cuda": 700 * MIB, "cpu": 450 * MIB}
"""CUDA context and kernels (0.47 to 0.92 GiB were seen elsewhere; unverified here); Python and libraries on a CPU."""
WORKSPACE_BYTES = {"cuda": 32 * MIB, "cpu": 0}
FRAGMENTATION = {"cuda": 0.06, "cpu": 0.03}
"""Share of what comes and goes within a step that an allocator loses."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
OPTIMIZER_BYTES = {"adamw_bnb_8bit": 2.03, "adamw_8bit": 2.03, "paged_adamw_8bit": 2.03, "lion_8bit": 1.02, "paged_lion_8bit": 1.02,
                   "adafactor": 0.1, "sgd": 0.0, "lion_32bit": 4.0, "adagrad": 4.0, "rmsprop": 4.0}  # fmt: skip
"""State per trained weight; everything else is Adam's two fp32 moments."""
ADAM_BYTES = 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What the memory of a rank depends on, beside configuration and shape."""

    device: str
    strategy: str
    world_size: int
    precision: str
    weights_dtype: str
    optim: str
    gradient_checkpointing: bool
    layout: str
    label_share: float
    """Share of tokens that a loss is computed for: logits exist only there."""
    row_tokens: int
    """Tokens of a row: the longest one of the data, or `model.max_seq_len`."""


def trainable_parameters(config: Config, shape: ModelShape) -> int:
    """Returns how many weights are trained."""
    if config.tuning.mode == "full":
        return shape.parameters - shape.vision_parameters
    return shape.adapter_parameters(config.tuning.lora.r, config.tuning.lora.target_modules)


def rank_memory(config: Config, shape: ModelShape, setup: Setup, micro_batch: int) -> dict[str, int]:
    """Returns the bytes of every part on one rank at the worst moment of a step."""
    parts = _states(config, shape, setup)
    tokens = micro_batch * setup.row_tokens
    saved = _saved_bytes_per_token(config, shape, setup)
    layers = shape.layers
    if setup.gradient_checkpointing:
        parts["activations"] = _width(setup) * shape.hidden_size * layers * tokens  # only each layer's input
        parts["recompute"] = int(saved * tokens)
    else:
        parts["activations"] = int(saved * layers * tokens)
        parts["recompute"] = 0
    parts["logits"] = int(tokens * setup.label_share * shape.vocab_size * (12 + (0 if _width(setup) == 4 else 2)))
    if config.tuning.mode == "qlora":
        # Both passes expand one weight at a time to the computation's type.
        parts["dequantised"] = _width(setup) * max(shape.ffn_size, shape.heads * shape.head_dim) * shape.hidden_size
    moving = parts["activations"] + parts["recompute"] + parts["logits"]
    parts["workspace"] = WORKSPACE_BYTES[setup.device]
    parts["context"] = CONTEXT_BYTES[setup.device]
    parts["fragmentation"] = int(FRAGMENTATION[setup.device] * moving)
    return {name: int(size) for name, size in parts.items()}


def _width(setup: Setup) -> int:
    """Bytes of an activation."""
    return 4 if setup.precision == "fp32" and setup.weights_dtype == "float32" else 2


def _states(config: Config, shape: ModelShape, setup: Setup) -> dict[str, float]:
    """Weights, gradients, optimizer and buffers, after sharding."""
    trained = trainable_parameters(config, shape)
    weight = DTYPE_BYTES[setup.weights_dtype]
    shard = setup.world_size
    quant_state = 0.0
    if config.tuning.mode == "full":
        frozen, adapters = float(shape.vision_parameters * weight), 0.0
        trained_weights: float = trained * weight
    else:
        adapters = float(trained * (2 if config.tuning.mode == "qlora" and setup.weights_dtype == "bfloat16" else 4))
        trained_weights = 0.0
        frozen, quant_state = _frozen(config, shape, weight)
    autocast = setup.precision != "fp32" and setup.weights_dtype == "float32"
    gradient_width = adapters / trained if adapters else float(weight)
    gradients = trained * gradient_width
    optimizer = trained * OPTIMIZER_BYTES.get(setup.optim, ADAM_BYTES if gradient_width == 4 else ADAM_BYTES / 2)
    if setup.strategy.startswith("zero") and setup.precision != "fp32":
        optimizer += trained * 4  # fp32 master weights
    buffers = gradients if setup.strategy == "ddp" else 0.0
    if setup.strategy in ("zero1", "zero2", "zero3", "fsdp2"):
        optimizer /= shard
        bucket = min(2 * shape.hidden_size**2, int(trained)) * 4
        buffers = 2.0 * bucket
    if setup.strategy in ("zero2", "zero3", "fsdp2"):
        gradients /= shard
    if setup.strategy in ("zero3", "fsdp2"):
        # Two layers are whole at a time: the one that computes and the next one.
        layer = shape.layer_linear_parameters * (frozen / max(1, shape.parameters) if frozen else weight)
        buffers += 2 * layer + shape.vocab_size * shape.hidden_size * weight
        frozen, quant_state, adapters, trained_weights = (x / shard for x in (frozen, quant_state, adapters, trained_weights))
    if autocast:
        buffers += 2 * (trained if config.tuning.mode == "full" else 0)  # cached bf16 copies of fp32 weights
    parts: dict[str, float] = {
        "frozen": frozen, "quant_state": quant_state, "adapters": adapters, "gradients": gradients, "optimizer": optimizer, "buffers": buffers,
    }  # fmt: skip
    return {"trained": trained_weights, **parts} if trained_weights else parts


def _frozen(config: Config, shape: ModelShape, weight: int) -> tuple[float, float]:
    """Returns bytes of the frozen base and of its quantisation state."""
    if config.tuning.mode != "qlora":
        return shape.parameters * weight, 0.0
    other = shape.other_parameters * weight
    if config.tuning.quantization == "int8":
        return other + shape.linear_parameters * INT8_BYTES, shape.layers * 7 * 4 * shape.hidden_size
    return other + shape.linear_parameters * 0.5, shape.linear_parameters * (NF4_BYTES - 0.5)


def _saved_bytes_per_token(config: Config, shape: ModelShape, setup: Setup) -> float:
    """Returns the bytes that one layer keeps per token for its backward pass.

    Widths are those of bf16; fp32 doubles all but the norms' fp32 copies. `r` is kv heads / heads.
    """
    h, f = shape.hidden_size, shape.ffn_size * max(1, min(shape.experts, 2))
    attention = shape.heads * shape.head_dim
    kv = shape.kv_heads * shape.head_dim
    lse = 8 * shape.heads
    qkv_out = 4 * attention + 4 * kv
    mode, width = config.tuning.mode, _width(setup)
    if mode == "full":
        per_token = 16 * h + qkv_out + 8 * f
    else:
        fp32_adapters = not (mode == "qlora" and setup.weights_dtype == "bfloat16")
        per_token = 8 * h + 2 * h + 2 * h + qkv_out + 6 * f + 2 * f
        if fp32_adapters and setup.weights_dtype != "float32":
            per_token += 4 * (3 * h + attention + 2 * h + f)  # each adapter keeps its own fp32 copy of its input
        if config.tuning.lora.dropout > 0:
            per_token += 3 * (6 * h + f)
    eager = 0.0
    scale = width / 2
    if setup.layout == "padded" or config.model.attn_implementation == "eager":
        eager = 2.0 * setup.row_tokens * (shape.heads if config.model.attn_implementation == "eager" else 1)
    return per_token * scale + lse + eager
