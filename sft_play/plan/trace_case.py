"""What is traced: a model's `config.json`, how the model is held and tuned, and the worst micro-batch. Plain data."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sft_play.config.schema import Config, ModelConfig
from sft_play.files import read_json, text_sha256
from sft_play.plan.backends import fuses_adapters, quantises_experts
from sft_play.plan.memory import Setup, trained_bytes
from sft_play.plan.plan import Plan
from sft_play.plan.scratch import is_scratch, scratch_architecture
from sft_play.plan.shape import ModelShape, config_file, known_models, shape_of
from sft_play.runs.prepared import Prepared

TRACED_OPTIMIZERS = frozenset({"adamw_torch", "adamw_torch_fused"})
"""Optimizers whose step is traced; the states of others are counted by formula."""
TRACE_VERSION = 7
"""Raised when the trace itself changes, so that older results are not taken for new ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One micro-batch of one rank."""

    architecture: dict[str, Any]
    """The model's `config.json`."""
    device: str
    """`cpu` or `cuda`: what is planned for."""
    mode: str
    quantization: str
    """`nf4`, `int8`, or `none`."""
    lora_r: int
    lora_dropout: float
    target_modules: str | list[str]
    weights_dtype: str
    adapter_dtype: str
    precision: str
    autocast: bool
    gradient_checkpointing: bool
    layout: str
    attention: str
    optim: str
    """torch's name of an AdamW, or `none` where its states are counted by formula."""
    fused_adapters: bool
    loss_chunk: int
    rows: int
    row_tokens: int
    labels: int
    """Label positions of the whole micro-batch."""
    accumulates: bool
    """Whether gradients of an earlier micro-step are held while this one runs."""
    clips: bool
    """Whether gradients are clipped by their norm."""
    packed: bool = False
    """Whether each of the `rows` is a pack of several, told apart by a mask."""
    nf4_experts: bool = False
    """Whether fused experts are quantised too."""

    def key(self, versions: str) -> str:
        """Returns a name for the case's result, by everything that it depends on."""
        return text_sha256(json.dumps([TRACE_VERSION, versions, asdict(self)], sort_keys=True))[:32]


def setup_of(plan: Plan) -> Setup:
    """Returns what the memory of a plan's ranks depends on."""
    return Setup(
        device=plan.device, strategy=plan.strategy, world_size=plan.world_size, precision=plan.precision, weights_dtype=plan.weights_dtype,
        optim=plan.optim, gradient_checkpointing=plan.gradient_checkpointing, layout=plan.layout, attention=plan.attn_implementation,
        label_share=plan.label_share, row_tokens=plan.row_tokens, loss_chunk=plan.loss_chunk,
        accumulates=any(rank.accumulation > 1 for rank in plan.ranks), offload_optimizer=plan.offload_optimizer,
        offload_parameters=plan.offload_parameters, packed=plan.pack_tokens > 0, expandable_segments=plan.expandable_segments,
    )  # fmt: skip


def case_of(config: Config, architecture: dict[str, Any], setup: Setup, micro_batch: int) -> Case:
    """Returns the case of a rank's worst micro-batch.

    Under ZeRO and FSDP2 a whole replica is traced in the type that is computed in, without an optimizer: shards, states and what is
    gathered are arithmetic (`plan.measured`).
    """
    tuning, lora = config.tuning, config.tuning.lora
    sharding = setup.zero or setup.strategy == "fsdp2"
    computed = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[setup.precision]
    base = computed if sharding else setup.weights_dtype
    adapter = {2: "bfloat16", 4: "float32"}[trained_bytes(config, setup)] if tuning.mode != "full" else "float32"
    quantized = bool(architecture.get("quantization_config"))
    return Case(
        architecture=architecture,
        device=setup.device,
        mode=tuning.mode,
        quantization=tuning.quantization if tuning.mode == "qlora" or quantized else "none",
        nf4_experts=not quantized and quantises_experts(tuning, setup.strategy),
        lora_r=lora.r,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        weights_dtype=base,
        adapter_dtype=computed if sharding else adapter,
        precision=setup.precision,
        autocast=setup.precision != "fp32" and not sharding,
        gradient_checkpointing=setup.gradient_checkpointing,
        layout=setup.layout,
        attention=setup.attention,
        optim=setup.optim if setup.optim in TRACED_OPTIMIZERS and not sharding else "none",
        fused_adapters=fuses_adapters(setup.strategy),
        loss_chunk=setup.loss_chunk,
        rows=micro_batch,
        row_tokens=setup.row_tokens,
        labels=max(1, math.ceil(micro_batch * setup.row_tokens * setup.label_share)),
        accumulates=setup.accumulates,
        clips=config.train.max_grad_norm > 0 and not sharding,
        packed=setup.packed,
    )


# The `config.json` of a model, for the trace: its own where it is at hand, else made from the table of shapes.


SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
    "image_size": 896, "patch_size": 14,
}  # fmt: skip
"""The tower of every multimodal gemma-3."""


def architecture_of(model: ModelConfig, prepared: Prepared | None = None) -> dict[str, Any]:
    """Returns the parsed `config.json`. Raises `DataError` where neither file nor table nor hub has it."""
    if prepared is not None:
        path: Path | None = Path(prepared.model.path) / "config.json"
    elif is_scratch(model):
        return scratch_architecture(model)
    else:
        path = config_file(model)
    if path is not None and path.is_file():
        found: dict[str, Any] = read_json(path)
        return found
    row = known_models().get(model.name, {})
    return dict(row["config"]) if "config" in row else from_shape(shape_of(model))


def from_shape(shape: ModelShape) -> dict[str, Any]:
    """Returns a `config.json` with the numbers of a shape; what a shape does not hold is the family's default."""
    text = {
        "model_type": shape.model_type, "hidden_size": shape.hidden_size, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn_size, "vocab_size": shape.vocab_size, "tie_word_embeddings": shape.tied,
        "max_position_embeddings": shape.max_positions,
    }  # fmt: skip
    if shape.model_type != "gemma3":
        return text
    text["model_type"] = "gemma3_text"
    return {"model_type": "gemma3", "text_config": text, "vision_config": SIGLIP, "tie_word_embeddings": shape.tied}
