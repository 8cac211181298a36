"""The numbers of a model's architecture: from its `config.json`, a table of the presets' models, or the hub's cache."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sft_play.config.schema import ModelConfig
from sft_play.errors import DataError
from sft_play.files import read_json
from sft_play.plan.hub import hub_reachable
from sft_play.plan.scratch import is_scratch, scratch_architecture

TABLE = Path(__file__).with_name("shapes.json")
UNGATED = frozenset({
    "apertus", "arcee", "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt", "nemotron", "opt", "phi",
    "starcoder2",
})  # fmt: skip
"""Families whose feed-forward part is two matrices, without a gate."""
LEARNED_POSITIONS = frozenset({"gpt2", "gpt_bigcode", "gpt_neo", "opt"})
"""Families with an embedding of positions, as wide as that of tokens."""
UNQUANTISED = frozenset({"falcon"})
"""Families whose linear layers are a class of their own, which transformers does not give to bitsandbytes."""
TIED_BY_DEFAULT = frozenset({
    "bloom", "cohere", "cohere2", "ernie4_5", "falcon", "gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "gpt_bigcode", "gpt_neo",
    "lfm2", "mpt", "opt", "smollm3", "starcoder2",
})  # fmt: skip
"""Families whose `config.json` may leave out that head and embedding are one: releases of transformers before 5 left it out."""
DEFAULTS: dict[str, dict[str, int]] = {
    "gemma3_text": {
        "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "intermediate_size": 9216, "vocab_size": 262208, "max_position_embeddings": 131072,
    },
}  # fmt: skip
"""What published `config.json` files leave out: those of gemma-3 name only what differs from transformers' defaults."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A decoder-only transformer in numbers."""

    model_type: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    tied: bool
    """Whether head and embedding are one matrix."""
    max_positions: int
    qkv_bias: bool = False
    norms_per_layer: int = 2
    qk_norm: bool = False
    gated: bool = True
    """Whether the feed-forward part has a gate (SwiGLU): three matrices instead of two."""
    experts: int = 0
    experts_per_token: int = 0
    shared_ffn_size: int = 0
    """Width of the feed-forward part that every token passes beside its experts."""
    learned_positions: bool = False
    vision_parameters: int = 0
    """Parameters of a vision tower and projector, frozen here."""
    quantized_bits: int = 0
    """Bits of a linear weight when the checkpoint is quantised already, else 0."""
    attention_dropout: float = 0.0
    """Share of attention's weights that training drops."""
    sliding_window: int = 0
    """Tokens that a token sees in most layers, itself included; 0 for all before it."""

    @property
    def layer_linear_parameters(self) -> int:
        """Weights of one layer's linear maps."""
        attention = self.hidden_size * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        width = self.ffn_size * max(1, self.experts) + self.shared_ffn_size
        return attention + (3 if self.gated else 2) * self.hidden_size * width

    @property
    def expert_parameters(self) -> int:
        """Weights of fused experts, which are neither quantised nor adapted."""
        return self.layers * 3 * self.hidden_size * self.ffn_size * self.experts if self.experts else 0

    @property
    def active_parameters(self) -> int:
        """Weights that a token is multiplied with, the head included: what its arithmetic costs."""
        idle = self.expert_parameters * (1 - self.experts_per_token / self.experts) if self.experts else 0
        return int(self.linear_parameters - idle) + self.vocab_size * self.hidden_size

    @property
    def linear_parameters(self) -> int:
        """Weights of all layers' linear maps, head and embedding left out: what is quantised."""
        return self.layers * self.layer_linear_parameters

    @property
    def other_parameters(self) -> int:
        """Embedding, untied head, norms, biases and the vision tower."""
        embedding = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        norms = self.hidden_size * (self.norms_per_layer * self.layers + 1)
        bias = self.layers * self.head_dim * (self.heads + 2 * self.kv_heads) if self.qkv_bias else 0
        qk = self.layers * 2 * self.head_dim if self.qk_norm else 0
        positions = self.max_positions * self.hidden_size if self.learned_positions else 0
        return embedding + positions + norms + bias + qk + self.vision_parameters

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.linear_parameters + self.other_parameters

    def linear_maps(self) -> dict[str, tuple[int, int]]:
        """Returns (inputs, outputs) of each linear map of a layer that can have an adapter."""
        h, q, kv = self.hidden_size, self.heads * self.head_dim, self.kv_heads * self.head_dim
        f = self.shared_ffn_size if self.experts else self.ffn_size
        maps = {"q_proj": (h, q), "k_proj": (h, kv), "v_proj": (h, kv), "o_proj": (q, h)}
        if f:
            maps |= {"gate_proj": (h, f)} if self.gated else {}
            maps |= {"up_proj": (h, f), "down_proj": (f, h)}
        return maps

    def target_names(self, targets: str | list[str]) -> list[str]:
        """Returns the last parts of the names that `tuning.lora.target_modules` means."""
        return list(self.linear_maps()) if isinstance(targets, str) else [name.rsplit(".", 1)[-1] for name in targets]

    def adapter_parameters(self, r: int, targets: str | list[str]) -> int:
        """Returns the parameters of LoRA adapters of rank `r`; a name that is not in `linear_maps` counts as a square map."""
        maps, square = self.linear_maps(), (self.hidden_size, self.hidden_size)
        return self.layers * r * sum(sum(maps.get(name, square)) for name in self.target_names(targets))


def shape_of(model: ModelConfig) -> ModelShape:
    """Returns the shape of the configured model. Raises `DataError` where its numbers cannot be had."""
    if is_scratch(model):
        return shape_from_config(scratch_architecture(model))
    if found := config_file(model):
        return shape_from_file(found)
    if model.name in _table():
        return _table()[model.name]
    if model.name.startswith((".", "/", "~")) or model.name.count("/") > 1:
        raise DataError("there is no such model folder", place=model.name)
    return shape_from_file(_fetched_config(model))


def config_file(model: ModelConfig) -> Path | None:
    """Returns where the model's `config.json` is on this machine (or must be, in a folder), `None` for one to be fetched."""
    folder = Path(model.name).expanduser()
    return folder / "config.json" if folder.is_dir() else _cached_config(model)


def shape_from_file(path: Path) -> ModelShape:
    """Returns the shape that a `config.json` describes. Raises `DataError`."""
    try:
        config = read_json(path)
        if not isinstance(config, dict):
            raise ValueError("it holds no JSON object")
        return shape_from_config(config)
    except FileNotFoundError:
        raise DataError(
            "the folder has no `config.json`",
            place=str(path.parent),
            hint="a model folder holds config.json, weights and a tokenizer",
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"cannot be read: {error}", place=str(path)) from None
    except KeyError as error:
        raise DataError(f"lacks {error}, so its memory cannot be planned", place=str(path)) from None


def shape_from_config(config: dict[str, Any]) -> ModelShape:
    """Returns the shape of a parsed `config.json`; a multimodal one's text part. Raises `KeyError`."""
    kind = str(config.get("model_type", "unknown"))
    nested = config.get("text_config") or {}
    family = str(nested.get("model_type") or kind)
    text = {**DEFAULTS.get(family, {}), **config, **nested}

    def first(*names: str) -> Any:
        for name in names:
            if text.get(name) is not None:
                return text[name]
        raise KeyError(names[0])

    hidden, heads = (
        int(first("hidden_size", "n_embd", "d_model")),
        int(first("num_attention_heads", "n_head", "num_heads", "n_heads")),
    )
    experts = int(text.get("num_local_experts") or text.get("num_experts") or text.get("n_routed_experts") or 0)
    return ModelShape(
        model_type=kind,
        hidden_size=hidden,
        layers=int(first("num_hidden_layers", "n_layer", "num_layers", "n_layers")),
        heads=heads,
        kv_heads=_kv_heads(text, heads),
        head_dim=int(text.get("head_dim") or hidden // heads),
        ffn_size=_ffn_size(text, experts, hidden),
        vocab_size=int(first("vocab_size")),
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", kind in TIED_BY_DEFAULT))),
        max_positions=int(text.get("max_position_embeddings") or text.get("n_positions") or text.get("max_seq_len") or 2**31),
        qkv_bias=kind == "qwen2" or bool(text.get("attention_bias")),
        norms_per_layer=4 if kind.startswith(("gemma2", "gemma3")) else 2,
        qk_norm=kind.startswith(("gemma3", "qwen3")),
        gated=family not in UNGATED,
        experts=experts,
        experts_per_token=int(text.get("num_experts_per_tok") or 0) if experts else 0,
        shared_ffn_size=_shared_ffn_size(text) if experts else 0,
        learned_positions=family in LEARNED_POSITIONS,
        vision_parameters=_vision_parameters(config.get("vision_config"), hidden),
        quantized_bits=_quantized_bits(config.get("quantization_config")),
        attention_dropout=float(text.get("attention_dropout") or text.get("attn_pdrop", 0.1 if family == "gpt2" else 0.0)),
        sliding_window=int(text.get("sliding_window") or 0) if text.get("use_sliding_window", True) else 0,
    )


def _kv_heads(text: dict[str, Any], heads: int) -> int:
    """Returns the heads of keys and values; older multi-query families have one and say so in their own words."""
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1
    return int(text.get("num_key_value_heads") or text.get("num_kv_heads") or heads)


def _shared_ffn_size(text: dict[str, Any]) -> int:
    """Returns the width of what is beside the experts: qwen2_moe names it, DeepSeek counts it in experts."""
    named = text.get("shared_expert_intermediate_size") or text.get("shared_intermediate_size")
    return int(named or int(text.get("n_shared_experts") or 0) * int(text.get("moe_intermediate_size") or 0))


def _ffn_size(text: dict[str, Any], experts: int, hidden: int) -> int:
    """Returns the width of the feed-forward part, of one expert where there are several."""
    if experts and text.get("moe_intermediate_size"):
        return int(text["moe_intermediate_size"])
    return int(text.get("intermediate_size") or text.get("n_inner") or text.get("ffn_dim") or 4 * hidden)


def _vision_parameters(vision: dict[str, Any] | None, hidden: int) -> int:
    """Returns the weights of a ViT tower and its projector; 0 for a text model. Embeddings and norms are left out (1 %)."""
    if not vision or not vision.get("hidden_size"):
        return 0
    size = int(vision["hidden_size"])
    inner = int(vision.get("intermediate_size") or 4 * size)
    layers = int(vision.get("num_hidden_layers") or vision.get("depth") or 0)
    return layers * (4 * size**2 + 2 * size * inner) + size * hidden


def _quantized_bits(settings: dict[str, Any] | None) -> int:
    if not settings:
        return 0
    if settings.get("load_in_8bit") or settings.get("quant_method") == "fp8":
        return 8
    return int(settings.get("bits") or 4)


@cache
def _table() -> dict[str, ModelShape]:
    return {name: ModelShape(**row) for name, row in json.loads(TABLE.read_text(encoding="utf-8")).items()}


def _cached_config(model: ModelConfig) -> Path | None:
    """Returns the `config.json` of an earlier download, found without the hub's library."""
    home = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "hub"
    folder = Path(home) / f"models--{model.name.replace('/', '--')}"
    revision = model.revision or "main"
    try:
        commit = (folder / "refs" / revision).read_text().strip()
    except OSError:
        commit = revision
    path = folder / "snapshots" / commit / "config.json"
    return path if path.is_file() else None


def _fetched_config(model: ModelConfig) -> Path:
    """Fetches only `config.json` from the hub. Raises `DataError`."""
    unreachable = DataError(
        "no such folder, and the hub cannot be reached",
        place=model.name,
        hint="check the network; or set `model.name` to a folder, or HF_HOME to a cache that holds the model",
    )
    if not hub_reachable():
        raise unreachable
    from huggingface_hub import hf_hub_download

    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", "4")
    try:
        return Path(hf_hub_download(model.name, "config.json", revision=model.revision))
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            raise DataError(
                "the model is gated or private",
                place=model.name,
                hint=f"accept its licence at https://huggingface.co/{model.name}, then set HF_TOKEN",
            ) from error
        raise unreachable from error
