"""The numbers of a model's architecture: from its `config.json`, a table of the presets' models, or the hub's cache."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from sft_play.config.schema import ModelConfig
from sft_play.errors import DataError, UserError
from sft_play.files import read_json, text_sha256, write_json
from sft_play.plan.hub import hub_reachable
from sft_play.plan.scratch import is_scratch, label, scratch_architecture
from sft_play.plan.tracer import Tracer, versions
from sft_play.runs.folder import cache_folder

TABLE = Path(__file__).with_name("shapes.json")
FORMULA_MODEL_TYPES = frozenset({
    "arcee", "ernie4_5", "gemma", "gemma2", "gemma3_text", "granite", "llama", "ministral3", "mistral", "qwen2", "qwen3", "smollm3",
})  # fmt: skip
"""Families whose every parameter and adapter the formulas count (`tests/numerics/test_shapes.py`); the model itself is asked for others."""
BIASES = ("attention_bias", "mlp_bias", "use_bias")
"""Keys of `config.json` for weights that the formulas leave out."""
ROUTER = re.compile(r"(?:^|\.)(?:router|gate|wg|classifier|\w*expert_gate)(?:\.|$)")
"""Layers that decide which experts a token passes, or how much of the shared one."""
ROUTES = "it routes tokens to experts"
TIED_BY_DEFAULT = frozenset({"ernie4_5", "gemma", "gemma2", "gemma3_text", "smollm3"})
"""Families whose `config.json` may leave out that head and embedding are one: releases of transformers before 5 left it out."""
COUNT_VERSION = 2
"""Raised when the count itself changes, so that older results are not taken for new ones."""


def pattern_of(name: str) -> str:
    """Returns a module's name with `*` for the numbers of layers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrices:
    """Matrices of one name and size, in all layers together."""

    name: str
    """The module's name with `*` for numbers: `model.layers.*.self_attn.q_proj`."""
    inputs: int
    outputs: int
    count: int
    kind: Literal["linear", "experts", "ends", "vision"] = "linear"
    """`experts` are fused ones, each counted; `ends` the embedding and the head."""
    auto: bool = False
    """Whether adapters can be on them, and `tuning.lora.target_modules: auto` puts some there."""
    quantised: bool = False
    """Whether bitsandbytes quantises them."""
    refused: str = ""
    """Why adapters cannot be on them (`sft_play.model.lora.why_not`)."""

    @property
    def parameters(self) -> int:
        """All their weights."""
        return self.inputs * self.outputs * self.count

    @property
    def typed(self) -> str:
        """What `target_modules` calls them."""
        return ".".join(self.name.split(".")[-2:]) if self.kind == "experts" else self.name.rsplit(".", 1)[-1]

    def is_called(self, target: str) -> bool:
        """Whether a typed target is the end of their name."""
        return f".{self.name}".endswith(f".{pattern_of(target)}")

    def is_meant_by(self, target: str) -> bool:
        """Whether a typed target puts adapters on them; one word never means experts."""
        takes_it = {"linear": self.auto, "experts": "." in target, "ends": True, "vision": False}[self.kind]
        return takes_it and self.is_called(target)


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """What was counted on the model itself (`sft_play.trace.count`)."""

    parameters: int
    largest_layer: int
    """Parameters of the largest layer."""
    matrices: tuple[Matrices, ...]


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
    vision_parameters: int = 0
    """Parameters of a vision tower and projector, frozen here."""
    quantized_bits: int = 0
    """Bits of a linear weight when the checkpoint is quantised already, else 0."""
    attention_dropout: float = 0.0
    """Share of attention's weights that training drops."""
    sliding_window: int = 0
    """Tokens that a token sees in most layers, itself included; 0 for all before it."""
    counted: Counted | None = None
    """What the model itself says where the formulas do not know the family."""

    @staticmethod
    def read(row: Mapping[str, Any]) -> ModelShape:
        """Returns the shape of a row of JSON."""
        counted = row.get("counted")
        if not counted:
            return ModelShape(**row)
        matrices = tuple(Matrices(**one) for one in counted["matrices"])
        return ModelShape(**{**row, "counted": Counted(**{**counted, "matrices": matrices})})

    @property
    def matrices(self) -> tuple[Matrices, ...]:
        """Every weight that a token is multiplied with or looked up in."""
        if self.counted:
            return self.counted.matrices
        h, q, kv, f = self.hidden_size, self.heads * self.head_dim, self.kv_heads * self.head_dim, self.ffn_size
        layer = {"self_attn.q_proj": (h, q), "self_attn.k_proj": (h, kv), "self_attn.v_proj": (h, kv), "self_attn.o_proj": (q, h)}
        layer |= ({"mlp.gate_proj": (h, f)} if self.gated else {}) | {"mlp.up_proj": (h, f), "mlp.down_proj": (f, h)}
        linear = [
            Matrices(name=f"model.layers.*.{name}", inputs=inside, outputs=outside, count=self.layers, auto=True, quantised=True)
            for name, (inside, outside) in layer.items()
        ]
        embedding = Matrices(name="model.embed_tokens", inputs=self.vocab_size, outputs=h, count=1, kind="ends")
        return (*linear, embedding, Matrices(name="lm_head", inputs=h, outputs=self.vocab_size, count=1, kind="ends"))

    @property
    def linear_parameters(self) -> int:
        """Weights of all layers' linear maps and experts, head and embedding left out."""
        return sum(one.parameters for one in self.matrices if one.kind in ("linear", "experts"))

    @property
    def layer_linear_parameters(self) -> int:
        """Weights of one layer's linear maps, of several kinds their mean."""
        return self.linear_parameters // self.layers

    @property
    def largest_layer_parameters(self) -> int:
        """All parameters of the largest layer."""
        return self.counted.largest_layer if self.counted else self.layer_linear_parameters + self._layer_vectors

    @property
    def expert_parameters(self) -> int:
        """Weights of fused experts, which are not quantised, and not adapted unless typed."""
        return sum(one.parameters for one in self.matrices if one.kind == "experts")

    @property
    def quantised_parameters(self) -> int:
        """Weights that QLoRA quantises; of a vision tower that was not counted, all."""
        vision = 0 if self.counted else self.vision_parameters
        return vision + sum(one.parameters for one in self.matrices if one.quantised)

    @property
    def active_parameters(self) -> int:
        """Weights that a token is multiplied with, the head included: what its arithmetic costs."""
        idle = self.expert_parameters * (1 - self.experts_per_token / self.experts) if self.experts else 0
        return int(self.linear_parameters - idle) + self.vocab_size * self.hidden_size

    @property
    def _layer_vectors(self) -> int:
        """Norms and biases of a layer."""
        bias = self.head_dim * (self.heads + 2 * self.kv_heads) if self.qkv_bias else 0
        return self.hidden_size * self.norms_per_layer + bias + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def parameters(self) -> int:
        """All parameters."""
        if self.counted:
            return self.counted.parameters
        ends = self.hidden_size * (self.vocab_size * (1 if self.tied else 2) + 1)
        return self.layers * self.largest_layer_parameters + ends + self.vision_parameters

    def linear_maps(self) -> dict[str, tuple[int, int]]:
        """Returns (inputs, outputs) of each linear map of a layer that `auto` adapts, by the last part of its name."""
        return {one.typed: (one.inputs, one.outputs) for one in self.matrices if one.auto}

    def adapted(self, targets: str | Sequence[str]) -> list[Matrices]:
        """Returns what `tuning.lora.target_modules` means."""
        if isinstance(targets, str):
            return [one for one in self.matrices if one.auto]
        found = []
        for one in self.matrices:
            meant = [name for name in targets if one.is_meant_by(name)]
            layers = [name for name in meant if name != pattern_of(name)]  # `layers.5.self_attn.q_proj` is in one layer only
            alone = len(layers) * (self.experts if one.kind == "experts" else 1) if len(layers) == len(meant) else one.count
            found += [replace(one, count=min(one.count, alone))] if meant else []
        return found

    def adapter_parameters(self, r: int, targets: str | Sequence[str]) -> int:
        """Returns the parameters of LoRA adapters of rank `r`."""
        return r * sum(one.count * (one.inputs + one.outputs) for one in self.adapted(targets))


def shape_of(model: ModelConfig) -> ModelShape:
    """Returns the shape of the configured model. Raises `DataError` where its numbers cannot be had."""
    if is_scratch(model):
        return shape_from_config(scratch_architecture(model))
    found, row = config_file(model), known_models().get(model.name)
    if found is None and row:
        return shape_of_config(row["config"], model.name) if "config" in row else ModelShape.read(row)
    if found is None and (model.name.startswith((".", "/", "~")) or model.name.count("/") > 1):
        raise DataError("there is no such model folder", place=model.name)
    return shape_from_file(found or _fetched_config(model), trusts_code=model.trust_remote_code)


def check_length(model: ModelConfig, positions: int) -> None:
    """Raises `UserError` where rows may be longer than the `positions` that the model knows."""
    if model.max_seq_len > positions:
        raise UserError(
            f"`model.max_seq_len` is {model.max_seq_len}, but `{label(model)}` knows {positions} positions",
            hint=f"MODEL_MAX_SEQ_LEN={positions} at most",
        )


def positions_in(config: Mapping[str, Any]) -> int:
    """Returns the positions of a parsed `config.json`, of its text part where it has parts; a huge number where it names none."""
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    return int(text.get("max_position_embeddings") or text.get("n_positions") or 2**31)


def config_file(model: ModelConfig) -> Path | None:
    """Returns where the model's `config.json` is on this machine (or must be, in a folder), `None` for one to be fetched."""
    folder = Path(model.name).expanduser()
    return folder / "config.json" if folder.is_dir() else _cached_config(model)


def shape_from_file(path: Path, *, trusts_code: bool = False) -> ModelShape:
    """Returns the shape that a `config.json` describes. Raises `DataError`."""
    try:
        config = read_json(path)
        if not isinstance(config, dict):
            raise ValueError("it holds no JSON object")
        return shape_of_config(config, str(path), trusts_code=trusts_code)
    except FileNotFoundError:
        raise DataError(
            "the folder has no `config.json`",
            place=str(path.parent),
            hint="a model folder holds config.json, weights and a tokenizer",
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"cannot be read: {error}", place=str(path)) from None


def shape_of_config(config: dict[str, Any], place: str, *, trusts_code: bool = False) -> ModelShape:
    """Returns the shape of a parsed `config.json`, by formula or counted on the model itself. Raises `DataError`.

    Of a family that only code of its own knows, which the plan does not run, the shape is read as a Llama's where that code is trusted.
    """
    if (config.get("quantization_config") or {}).get("quant_method") == "mxfp4":
        raise DataError(
            "the weights are in MXFP4, which is not trained here",
            place=place,
            hint="take the same model in bfloat16 (`unsloth/gpt-oss-20b-BF16`), with `tuning.mode: qlora` to make it small",
        )
    try:
        if config.get("model_type") in FORMULA_MODEL_TYPES and not any(config.get(key) for key in BIASES):
            return shape_from_config(config)
        try:
            return _counted(config, place)
        except DataError:
            if not (trusts_code and config.get("auto_map")):
                raise
            return shape_from_config(config)
    except KeyError as error:
        raise DataError(f"lacks {error}, so its memory cannot be planned", place=place) from None


def _counted(config: dict[str, Any], place: str) -> ModelShape:
    """Returns the shape counted on the model itself, without weights (acts: runs `python -m sft_play.trace`, keeps the result in the cache).

    Raises `DataError` for a model that transformers does not know, or that is not trained here.
    """
    key = text_sha256(json.dumps([COUNT_VERSION, versions(), config], sort_keys=True))[:32]
    path = cache_folder() / "shapes" / f"{key}.json"
    if path.is_file():
        return ModelShape.read(read_json(path))
    tracer = Tracer()
    try:
        row = tracer.ask([{"count": config}])[0]
    finally:
        tracer.close()
    if "error" in row:
        raise DataError(row["error"], place=place, hint=row.get("hint"))
    write_json(path, row)
    return ModelShape.read(row)


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """Returns the shape of a parsed `config.json` of a family like Llama. Raises `KeyError`."""
    kind = str(config.get("model_type", "unknown"))
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    return ModelShape(
        model_type=kind,
        hidden_size=hidden,
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        ffn_size=int(config.get("intermediate_size") or 4 * hidden),
        vocab_size=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", kind in TIED_BY_DEFAULT)),
        max_positions=positions_in(config),
        qkv_bias=kind == "qwen2",
        norms_per_layer=4 if kind in ("gemma2", "gemma3_text") else 2,
        qk_norm=kind in ("gemma3_text", "qwen3"),
        gated=kind != "arcee",
        quantized_bits=quantized_bits(config.get("quantization_config")),
        attention_dropout=float(config.get("attention_dropout") or 0.0),
        sliding_window=int(config.get("sliding_window") or 0) if config.get("use_sliding_window", True) else 0,
    )


def quantized_bits(settings: Mapping[str, Any] | None) -> int:
    """Returns the bits of a linear weight by a `quantization_config`, 0 without one."""
    if not settings:
        return 0
    if settings.get("load_in_8bit") or settings.get("quant_method") == "fp8":
        return 8
    return int(settings.get("bits") or 4)


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """Returns the models that are planned without their files: a row of `ModelShape` each, or its `config.json` under `config`."""
    rows: dict[str, dict[str, Any]] = read_json(TABLE)
    return rows


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
