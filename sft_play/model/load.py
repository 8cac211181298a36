"""The model and its tokenizer, ready to train (`load_for_training`) or to answer (`load_for_use`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from sft_play.config.schema import Config
from sft_play.errors import CheckpointError
from sft_play.model import lora, quantise
from sft_play.model.chunked_head import chunk_head
from sft_play.model.kernels import fuse_adapters, use_kernels
from sft_play.model.read import read_model, tell
from sft_play.model.tokenizer import load_tokenizer
from sft_play.model.use import load_for_use
from sft_play.plan.backends import fuses_adapters
from sft_play.plan.plan import Plan
from sft_play.runs.prepared import Prepared

__all__ = ["load_base", "load_for_training", "load_for_use", "read_model"]


def load_for_training(config: Config, plan: Plan, prepared: Prepared) -> tuple[Any, Any]:
    """Returns (model, tokenizer): what is tuned requires gradients, everything else is frozen, the cache is off.

    The model is on the CPU, or on this process's GPU unless a sharding engine places it (ZeRO-3, FSDP2). Every rank draws the
    same fresh weights, since the seed is set here. For ZeRO-3, `TrainingArguments` with the DeepSpeed configuration must be
    alive before, so that transformers shards while it loads. Raises `UserError`, `CheckpointError` or `HardwareError`.
    """
    tokenizer = load_tokenizer(prepared.model.path, prepared.model.chat, trust=config.model.trust_remote_code)
    if config.tuning.backend == "unsloth":
        from sft_play.model import unsloth

        return unsloth.load(config, plan, prepared), tokenizer
    set_seed(config.train.seed)
    model = load_base(config, plan, prepared)
    check_vocabulary(model, tokenizer, prepared.model.name)
    model.config.get_text_config().use_cache = False
    if plan.kernels == "liger":
        use_kernels(model)
    if config.tuning.mode == "full":
        _free_text_part(model)
    else:
        model.requires_grad_(False)
        # Again: loading may have drawn numbers for weights that it then read, and not equally many on every rank.
        set_seed(config.train.seed)
        model, notes = lora.add_adapters(model, config.tuning.lora, prepared.model, adapter_dtype(config, plan))
        if plan.precision != "fp32" and not plan.strategy.startswith("zero"):
            lora.leave_casts_to_autocast(model)
        if fuses_adapters(plan.strategy):
            fuse_adapters(model)
        tell(*notes)
    if plan.loss_chunk:
        chunk_head(model, plan.loss_chunk)
    if plan.gradient_checkpointing and config.tuning.mode != "full":
        model.enable_input_require_grads()
    return model, tokenizer


def load_base(config: Config, plan: Plan, prepared: Prepared) -> Any:
    """Returns the base model as training sees it: in the plan's type, or quantised."""
    folder = Path(prepared.model.path)
    existing = quantise.quantisation_of(folder)
    settings = None
    if existing is not None:
        tell(quantise.check_existing(existing, config.tuning, plan.strategy))
    elif config.tuning.mode == "qlora":
        settings = quantise.bnb_settings(config.tuning, plan)
    model = read_model(
        folder,
        config.model,
        dtype=_held_dtype(plan),
        attention=plan.attn_implementation,
        quantization_config=settings,
        # Shared out from the CPU layer by layer, since the whole quantised base need not fit on the card.
        device="cpu" if settings is not None and plan.strategy == "fsdp2" else _placement(plan),
    )
    if settings is not None and not plan.nf4_experts:
        plain = sum(model.get_parameter(name).numel() for name in lora.expert_names(model))
        if plain:
            tell(f"{plain:,} parameters of fused experts stay in {plan.weights_dtype}")
    return model


def _held_dtype(plan: Plan) -> torch.dtype:
    """Returns the type that weights are held in: DeepSpeed casts them before it makes its fp32 copy, so that nothing wider is of use."""
    narrow = plan.strategy.startswith("zero") and plan.precision != "fp32"
    return quantise.COMPUTE_TYPES[plan.precision] if narrow else getattr(torch, plan.weights_dtype)


def adapter_dtype(config: Config, plan: Plan) -> torch.dtype:
    """Returns the type of the adapters' weights.

    fp32, except over a quantised base in bf16: there autocast has no fp32 copies of inputs to keep, and fp32 adapters would
    make some, one for each layer. fp16 needs fp32 adapters for its loss scaling.
    """
    if config.tuning.mode == "qlora" and plan.weights_dtype == "bfloat16":
        return torch.bfloat16
    return torch.float32


def check_vocabulary(model: Any, tokenizer: Any, name: str) -> None:
    """Raises `CheckpointError` when the tokenizer has tokens that the model has no embedding for."""
    rows = model.config.get_text_config().vocab_size
    if len(tokenizer) > rows:
        raise CheckpointError(
            f"the tokenizer of `{name}` has {len(tokenizer)} tokens, but the model's embeddings have {rows} rows",
            hint="tokenizer and weights are of different models: fetch both again",
        )


def _free_text_part(model: Any) -> None:
    """Lets the text model and its head train, and says what stays frozen."""
    prefix = lora.free_text_part(model)
    if prefix:
        frozen = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters() if not p.requires_grad)  # ZeRO-3 keeps shards
        tell(
            f"multimodal model: `{prefix}` and the head are tuned; {frozen:,} parameters of vision tower and projector are frozen"
        )


def _placement(plan: Plan) -> str | None:
    """Returns the device to load to; `None` where the sharding engine moves the weights itself."""
    if plan.device != "cuda" or plan.strategy in ("zero3", "fsdp2"):
        return None
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
