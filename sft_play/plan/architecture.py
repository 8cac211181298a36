"""The `config.json` of a model, for the trace: its own where it is at hand, else made from the table of shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sft_play.config.schema import ModelConfig
from sft_play.files import read_json
from sft_play.plan.scratch import is_scratch, scratch_architecture
from sft_play.plan.shape import ModelShape, config_file, known_models, shape_of
from sft_play.runs.prepared import Prepared

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
