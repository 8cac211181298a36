"""A model's sizes and adapter targets, and its family's abilities: layouts without a mask, attention kernels. Pure.

The abilities of families (`families.json`) are facts of the pinned and of the oldest supported transformers, listed so
that the plan need not import it. `tests/numerics/test_layouts.py` compares them with what a tiny model of every family
computes, in both directions: a wrong name fails, and so does a missing one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Literal

from sft_play.config.reader import Count, closest_word
from sft_play.config.schema import Config, LoraSettings, TuningConfig
from sft_play.errors import UserError
from sft_play.files import read_json
from sft_play.runs.adapters import MUTATING, embeddings_of

ROUTER = re.compile(r"(?:^|\.)(?:router|gate|wg|classifier|\w*expert_gate)(?:\.|$)")
"""Layers that decide which experts process a token, or how much the shared expert contributes."""
ROUTES = "it routes tokens to experts"


def pattern_of(name: str) -> str:
    """Return a module's name with `*` for layer numbers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrices:
    """Matrices of the same name and size in all layers."""

    name: str
    """The module's name with `*` for numbers: `model.layers.*.self_attn.q_proj`."""
    inputs: int
    outputs: int
    count: int
    kind: Literal["linear", "experts", "ends", "vision"] = "linear"
    """`experts` are the matrices of fused experts, counted singly; `ends` are embedding and head."""
    auto: bool = False
    """Whether `tuning.lora.target_modules: auto` puts adapters on them."""
    quantised: bool = False
    """Whether bitsandbytes quantises them."""
    refused: str = ""
    """Why adapters cannot be on them (`sft_play.model.lora.why_not`)."""

    @property
    def parameters(self) -> int:
        """Number of all their weights."""
        return self.inputs * self.outputs * self.count

    def take_slice(self, ranks: int) -> Matrices:
        """Return a rank's slice: of the inputs for the last layer of attention or feed-forward part, or of outputs."""
        if self.kind != "linear":
            return self
        out = self.name.rsplit(".", 1)[-1] in ("o_proj", "down_proj", "dense", "dense_4h_to_h", "fc2", "c_proj")
        return replace(self, inputs=self.inputs // ranks) if out else replace(self, outputs=self.outputs // ranks)

    @property
    def typed(self) -> str:
        """Their name in `target_modules`."""
        return ".".join(self.name.split(".")[-2:]) if self.kind == "experts" else self.name.rsplit(".", 1)[-1]

    def rank(self, lora: LoraSettings) -> int:
        """Return the rank of adapters on them, by PEFT's rule for `rank_pattern`."""
        other = (rank for name, rank in lora.rank_pattern.items() if re.fullmatch(rf"(?:.*\.)?(?:{name})", self.name))
        return next(other, lora.r)

    def is_called(self, target: str) -> bool:
        """Return whether their name ends with a typed target."""
        return f".{self.name}".endswith(f".{pattern_of(target)}")

    def is_meant_by(self, target: str) -> bool:
        """Return whether a typed target puts adapters on them; a single word never means experts."""
        takes_it = {"linear": self.auto, "experts": "." in target, "ends": True, "vision": False}[self.kind]
        return takes_it and self.is_called(target)


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """Sizes counted on the model itself (`sft_play.trace.run`)."""

    parameters: Count
    largest_layer: Count
    """Parameters of the largest layer."""
    matrices: tuple[Matrices, ...]


DEFAULT_ATTENTION = ("sdpa", "flash_attention_2")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder-only transformer."""

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
    max_positions: Count
    qkv_bias: bool = False
    norms_per_layer: int = 2
    qk_norm: bool = False
    gated: bool = True
    """Whether the feed-forward part has a gate (SwiGLU): three matrices instead of two."""
    experts: int = 0
    experts_per_token: int = 0
    vision_parameters: Count = 0
    """Parameters of a vision tower and projector, which stay frozen."""
    quantization: str = ""
    """How a checkpoint is already quantised: `bitsandbytes int8`, `bitsandbytes nf4`, `gptq`, ...; or empty."""
    attention_dropout: float = 0.0
    """Share of attention weights dropped in training."""
    sliding_window: int = 0
    """Tokens that a token attends to in most layers, itself included; 0 for all before it."""
    moving_rope: bool = False
    """Whether rotary angles depend on the longest position of a sequence (dynamic NTK, LongRoPE)."""
    router_loss: bool = False
    """Whether `config.json` enables the router's balancing loss."""
    attention: tuple[str, ...] = DEFAULT_ATTENTION
    """Attention that transformers computes it with, apart from `eager`."""
    counted: Counted | None = None
    """Sizes counted on the model itself, for families that the formulas do not know."""

    @property
    def quantized_bits(self) -> int:
        """Bits of a linear weight in a checkpoint that is already quantised; otherwise 0."""
        return 0 if not self.quantization else 8 if self.quantization.endswith("int8") else 4

    @cached_property
    def matrices(self) -> tuple[Matrices, ...]:
        """Every matrix that tokens are multiplied with or looked up in."""
        if self.counted:
            return self.counted.matrices
        h, q, kv, f = self.hidden_size, self.heads * self.head_dim, self.kv_heads * self.head_dim, self.ffn_size
        layer = {
            "self_attn.q_proj": (h, q),
            "self_attn.k_proj": (h, kv),
            "self_attn.v_proj": (h, kv),
            "self_attn.o_proj": (q, h),
        }
        layer |= ({"mlp.gate_proj": (h, f)} if self.gated else {}) | {"mlp.up_proj": (h, f), "mlp.down_proj": (f, h)}
        linear = [
            Matrices(
                name=f"model.layers.*.{name}",
                inputs=inside,
                outputs=outside,
                count=self.layers,
                auto=True,
                quantised=True,
            )
            for name, (inside, outside) in layer.items()
        ]
        embedding = Matrices(name="model.embed_tokens", inputs=self.vocab_size, outputs=h, count=1, kind="ends")
        return (*linear, embedding, Matrices(name="lm_head", inputs=h, outputs=self.vocab_size, count=1, kind="ends"))

    def take_slice(self, ranks: int) -> ModelShape:
        """Return a rank's shape where `ranks` ranks hold slices of each layer (`launch.tensor_parallel`)."""
        if ranks == 1:
            return self
        counted = self.counted
        if counted:
            matrices = tuple(matrix.take_slice(ranks) for matrix in counted.matrices)
            removed = sum(
                matrix.parameters - mine.parameters for matrix, mine in zip(counted.matrices, matrices, strict=True)
            )
            counted = Counted(
                parameters=counted.parameters - removed,
                largest_layer=counted.largest_layer - removed // self.layers,
                matrices=matrices,
            )
        return replace(
            self,
            heads=self.heads // ranks,
            kv_heads=self.kv_heads // ranks,
            ffn_size=self.ffn_size // ranks,
            counted=counted,
        )

    def take_stage(self, layers: int, *, embeds: bool, predicts: bool) -> ModelShape:
        """Return the shape of a pipeline stage of `layers` layers, with the embedding if it `embeds` and the head if it
        `predicts`.
        """
        table, both = self.vocab_size * self.hidden_size, 1 if self.tied else 2
        each = (self.parameters - self.vision_parameters - both * table) / self.layers
        ends = int(embeds) + int(predicts) - int(embeds and predicts and self.tied)
        matrices = tuple(
            replace(matrix, count=max(1, matrix.count * layers // self.layers))
            for matrix in self.matrices
            if matrix.kind in ("linear", "experts")
        )
        counted = Counted(
            parameters=int(each * layers) + ends * table + self.vision_parameters,
            largest_layer=self.largest_layer_parameters,
            matrices=matrices,
        )
        return replace(self, layers=layers, counted=counted, vocab_size=self.vocab_size if predicts else 0)

    @property
    def linear_parameters(self) -> int:
        """Weights of all layers' linear maps and experts, without head and embedding."""
        return sum(matrix.parameters for matrix in self.matrices if matrix.kind in ("linear", "experts"))

    @property
    def layer_linear_parameters(self) -> int:
        """Mean weights of a layer's linear maps and experts."""
        return self.linear_parameters // self.layers

    @property
    def largest_layer_parameters(self) -> int:
        """All parameters of the largest layer."""
        return self.counted.largest_layer if self.counted else self.layer_linear_parameters + self._layer_vectors

    @property
    def expert_parameters(self) -> int:
        """Weights of fused experts, which are adapted only where typed."""
        return sum(matrix.parameters for matrix in self.matrices if matrix.kind == "experts")

    @property
    def quantised_parameters(self) -> int:
        """Weights that QLoRA quantises, including all of a vision tower that was not counted."""
        vision = 0 if self.counted else self.vision_parameters
        return vision + sum(matrix.parameters for matrix in self.matrices if matrix.quantised)

    @property
    def active_parameters(self) -> int:
        """Weights that a token is multiplied with, including the head: a measure of its arithmetic."""
        idle = self.expert_parameters * (1 - self.experts_per_token / self.experts) if self.experts else 0
        return int(self.linear_parameters - idle) + self.vocab_size * self.hidden_size

    @property
    def _layer_vectors(self) -> int:
        """Parameters of a layer's norms and biases."""
        bias = self.head_dim * (self.heads + 2 * self.kv_heads) if self.qkv_bias else 0
        return self.hidden_size * self.norms_per_layer + bias + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        if self.counted:
            return self.counted.parameters
        ends = self.hidden_size * (self.vocab_size * (1 if self.tied else 2) + 1)
        return self.layers * self.largest_layer_parameters + ends + self.vision_parameters

    def linear_maps(self) -> dict[str, tuple[int, int]]:
        """Return (inputs, outputs) of each linear map of a layer that `auto` adapts, keyed by the end of its name."""
        return {matrix.typed: (matrix.inputs, matrix.outputs) for matrix in self.matrices if matrix.auto}

    def adapter_targets(self, targets: str | Sequence[str]) -> list[Matrices]:
        """Return the matrices that `tuning.lora.target_modules` selects, counting only the selected layers."""
        if isinstance(targets, str):
            return [matrix for matrix in self.matrices if matrix.auto]
        adapted = []
        for matrix in self.matrices:
            names = [name for name in targets if matrix.is_meant_by(name)]
            layers = [
                name for name in names if name != pattern_of(name)
            ]  # `layers.5.self_attn.q_proj` is in one layer only
            alone = (
                len(layers) * (self.experts if matrix.kind == "experts" else 1)
                if len(layers) == len(names)
                else matrix.count
            )
            adapted += [replace(matrix, count=min(matrix.count, alone))] if names else []
        return adapted

    def called(self, matrices: Matrices) -> Iterator[str]:
        """Yield the names of these matrices in every layer, and of every expert's."""
        first, *later = matrices.name.split("*")
        for layer, *expert in product(range(self.layers), *(range(self.experts or 1) for _ in later[1:])):
            yield first + "".join(f"{index}{part}" for index, part in zip((layer, *expert), later, strict=False))

    def has_target(self, typed: str) -> bool:
        """Return whether a typed target is the end of the name of a module that takes an adapter."""
        return any(
            f".{name}".endswith(f".{typed}") for each in self.adapter_targets([typed]) for name in self.called(each)
        )

    def adapter_parameters(self, lora: LoraSettings, new_tokens: int = 0) -> int:
        """Return the number of parameters of adapters, and of modules, rows and biases that are trained with them."""
        targets = self.adapter_targets(lora.target_modules)
        parameters = sum(matrix.count * matrix.rank(lora) * (matrix.inputs + matrix.outputs) for matrix in targets)
        if lora.variant == "dora":
            parameters += sum(matrix.count * matrix.outputs for matrix in targets)
        trained = embeddings_of(lora, new_tokens)
        rows = {"none": 0, "new": new_tokens, "all": self.vocab_size}[trained]
        parameters += rows * self.hidden_size * (1 if self.tied else 2)
        saved = [
            matrix
            for matrix in self.matrices
            if any(matrix.is_called(name) for name in lora.modules_to_save)
            and not (trained == "all" and matrix.kind == "ends")
        ]
        parameters += sum(matrix.parameters for matrix in saved)
        if lora.bias != "none" and self.qkv_bias:
            biased = [matrix for matrix in (self.matrices if lora.bias == "all" else targets) if matrix.typed in BIASED]
            parameters += sum(matrix.count * matrix.outputs for matrix in biased)
        return parameters


BIASED = ("q_proj", "k_proj", "v_proj")

FAMILIES: Mapping[str, Sequence[str]] = read_json(Path(__file__).with_name("families.json"))
"""Model type -> what its family can do, and what it needs, by the words that are described here."""


def families(word: str) -> frozenset[str]:
    """Return the families that `families.json` describes by this word."""
    return frozenset(family for family, words in FAMILIES.items() if word in words)


CONV1D = families("conv1d")
"""Families whose linear layers are `Conv1D`, with a transposed weight."""
NEWER = (
    {"lfm2", "lfm2_moe", "llama4_text"}
    if tuple(map(int, version("transformers").split(".")[:2])) < (5, 23)
    else set[str]()
)
"""Families whose flattened rows an older transformers mixes."""
UNMASKED_MODEL_TYPES = families("unmasked")
"""Families in which no token attends to the padding after its row. Others were not tried."""
FLATTENED_MODEL_TYPES = families("flattened") - NEWER
"""Families whose flattened rows need only position ids. Others carry a state from token to token, count positions
themselves (bloom, mpt), or build their masks without position ids (afmoe, gpt_oss, opt).
"""
CHUNKED_HEAD_MODEL_TYPES = UNMASKED_MODEL_TYPES
"""Families whose loss in chunks equals the loss at once, even where logits change after the head (Gemma 2 caps them,
Granite and Cohere scale them); `tests/numerics/test_chunked_loss.py` proves each.
"""
VARLEN = "varlen"
"""Our name for attention over rows of different lengths (`model.kernels`): torch's own flash attention, on a CPU with
one call per row.
"""
BY_LENGTHS = frozenset({VARLEN, "flash_attention_2"})
"""Attention that keeps flattened rows apart by their lengths, without a mask."""
VARLEN_MODEL_TYPES = families("varlen") - NEWER
"""Families that `varlen` computes. Others cap their scores (gemma2), add a separate mask (bloom, mpt, llama4_text, the
sparse attention of deepseek_v32), or do not pass on the lengths (nemotron, stablelm, jamba, mamba) or their window
(qwen2_moe, phimoe).
"""
SINK_MODEL_TYPES = families("sinks")
"""Families of `VARLEN_MODEL_TYPES` whose heads have sinks: `varlen` takes one call per row on GPUs too, in any type."""
SLICED_MODEL_TYPES = families("sliced")
"""Families whose tokens interact only in `varlen` attention, so that ranks can hold slices of a sequence. Others carry
a state along it.
"""
TENSOR_PARALLEL_MODEL_TYPES = families("tensor parallel")
"""Families whose layers can be held in slices (`tests/numerics/test_tensor_parallel.py`). Others have fused layers,
norms over all heads, experts, or no plan in transformers.
"""
NOT_STAGED_MODEL_TYPES = families("not staged")
"""Families whose layers cannot form pipeline stages (`tests/numerics/test_stages.py`), since they read more than the
previous layer's output.
"""
TEXT_WITHIN = families("text within")
"""Image and text models whose text part trains like a language model (`tests/numerics/test_image_text.py`)."""
PROMPTED_ALONE = families("prompted alone")
"""Families that are prompted one at a time, since padding before a prompt changes their answers: compressed keys are
counted from the beginning of the sequence, or a cached state decays differently. `tests/numerics/test_row_alone.py`
tries all families.
"""
LIGER_MODEL_TYPES = families("liger")
"""Dense families with SwiGLU in which Liger replaces every norm and feed-forward part
(`tests/numerics/test_kernels.py`).
"""
FORMULA_MODEL_TYPES = families("formula")
"""Families whose every parameter and adapter the formulas count (`tests/numerics/test_shapes.py`); others are counted
on the model itself.
"""
TIED_BY_DEFAULT = families("tied")
"""Families with tied head and embedding whose `config.json` may not mention it, as before transformers 5."""
LAYER_OUTPUTS = {"bamba": 2, "bloom": 2, "falcon": 2, "falcon_h1": 1, "glm_moe_dsa": 2, "gptj": 2, "mpt": 2}
"""Model type -> length of the tuple that its layers return; layers of all others return only the hidden states."""
CHANGED_LOGITS: Mapping[str, str] = {
    **dict.fromkeys(
        ("gemma2", "gemma3_text", "gemma3n_text", "gemma4", "gemma4_text", "nanochat"), "final_logit_softcapping"
    ),
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared", "granitemoehybrid"), "logits_scaling"),
    **dict.fromkeys(("cohere", "cohere2"), "logit_scale"),
    "falcon_h1": "lm_head_multiplier",
}
"""Families that change logits after the head -> the field of their configuration that says how (`model.kernels`)."""

READ_DIRECTLY = frozenset({"correction_coefs"})
"""Layers whose weight the parent module reads directly, bypassing an adapter (Gemma 3n)."""
READ_BY_KERNELS = frozenset({"dt_proj", "out_proj", "x_proj"})
"""Layers of a Mamba mixer whose weights its kernels read directly."""
SILU = ("silu", "swish")
"""Names of the only activation that Liger's SwiGLU computes."""

FLATTENED_TOKENS = 4096
"""Tokens of the longest flattened micro-batch of several rows on a GPU where attention needs a block mask, whose size
is quadratic in them.
"""


def check_targets(config: Config, shape: ModelShape, device: str = "cuda") -> None:
    """Raise `UserError` for typed LoRA targets that this model does not have, or that cannot take adapters."""
    lora = config.tuning.lora
    if config.tuning.mode == "full":
        return
    if (
        lora.variant == "dora"
        and device == "cpu"
        and (config.tuning.mode, config.tuning.quantization) == ("qlora", "int8")
    ):
        raise UserError(
            "`tuning.lora.variant: dora` over int8 trains on a GPU only: on a CPU PEFT loses the scales of the weights",
            place="tuning.lora.variant",
            hint="TUNING_QUANTIZATION=nf4, or omit the variant",
        )
    own = {"tuning.lora.variant": lora.variant == "dora", "tuning.lora.init": lora.init in MUTATING}
    if shape.model_type in CONV1D and (key := next((key for key, asked in own.items() if asked), None)):
        value = lora.variant if key.endswith("variant") else lora.init
        raise UserError(
            f"`{key}` is `{value}`, which PEFT does not support on the `Conv1D` layers of a `{shape.model_type}` model",
            hint="omit it",
        )
    if isinstance(lora.target_modules, str):
        return
    on_experts = any(matrix.kind == "experts" for matrix in shape.adapter_targets(lora.target_modules))
    if on_experts and (lora.variant != "lora" or lora.init != "default" or lora.bias != "none"):
        raise UserError(
            "`tuning.lora.target_modules` names experts, on which PEFT supports only plain LoRA",
            hint="omit `tuning.lora.variant`, `init` and `bias`, or the experts",
        )
    missing = {name: "" for name in lora.target_modules if not shape.has_target(name)}
    for name in missing:
        why = next((matrix.refused for matrix in shape.matrices if matrix.refused and matrix.is_called(name)), "")
        if not why and shape.expert_parameters and ROUTER.search(name):
            # Routers that are not linear layers are not among the matrices.
            why = ROUTES
        missing[name] = f" ({why})" if why else ""
    if missing:
        quoted = ", ".join(f"`{name}`{why}" for name, why in missing.items())
        allowed = dict.fromkeys(
            matrix.typed for matrix in shape.matrices if matrix.kind in ("experts", "ends") or matrix.auto
        )
        raise UserError(
            f"`tuning.lora.target_modules` names {quoted}, where a `{shape.model_type}` model takes no adapter",
            place="tuning.lora.target_modules",
            hint=f"{_meant(list(missing), list(allowed))}it takes them on {', '.join(allowed)}; or `auto` for every"
            " linear layer but the head",
        )
    if shape.tied and any(matrix.kind == "ends" for matrix in shape.adapter_targets(lora.target_modules)):
        raise UserError(
            "`tuning.lora.target_modules` names the head or the input embeddings, which share one weight in this model:"
            " an adapter on one could not be merged without changing the other",
            hint="omit it",
        )
    if lora.dropout and on_experts:
        raise UserError(
            f"`tuning.lora.dropout` is {lora.dropout:g}, and adapters on fused experts have no dropout",
            hint="set `tuning.lora.dropout: 0`, or omit the experts from `tuning.lora.target_modules`",
        )


def check_patterns(config: Config, shape: ModelShape) -> None:
    """Raise `UserError` for an adapter's `rank_pattern` or `alpha_pattern` that PEFT would apply to none of them."""
    lora = config.tuning.lora
    if config.tuning.mode == "full" or config.model.trust_remote_code:  # own code may call its modules otherwise
        return
    for key in ("rank_pattern", "alpha_pattern"):
        typed: Mapping[str, float] = getattr(lora, key)
        adapted = shape.adapter_targets(lora.target_modules) if typed else ()
        for pattern in typed:
            if not any(
                re.fullmatch(rf"(?:.*\.)?(?:{pattern})", name) for each in adapted for name in shape.called(each)
            ):
                names = list(dict.fromkeys(matrix.typed for matrix in adapted))
                close = closest_word(pattern, names)
                raise UserError(
                    f"`tuning.lora.{key}` names `{pattern}`, which is no module with an adapter",
                    place=f"tuning.lora.{key}",
                    hint=(f"did you mean `{close}`? " if close else "") + f"adapters are on {', '.join(names)}",
                )


def _meant(typed: Sequence[str], names: Sequence[str]) -> str:
    """Return a hint for names of modules that are patterns, or typing errors; empty for others."""
    if any(re.search(r"[^\w.]", name) for name in typed):
        return "give names of modules, or the ends of names, instead of regular expressions; "
    close = [word for name in typed if (word := closest_word(name, names))]
    return f"did you mean {', '.join(f'`{word}`' for word in close)}? " if close else ""


def describe_adapters(config: Config, shape: ModelShape) -> dict[str, str]:
    """Return the reason that names the adapted layers and the number of adapter parameters."""
    lora = config.tuning.lora
    if config.tuning.mode == "full":
        return {}
    adapted = shape.adapter_targets(lora.target_modules)
    names = ", ".join(dict.fromkeys(matrix.typed for matrix in adapted))
    frozen = dict.fromkeys(
        matrix.typed for matrix in shape.matrices if matrix.kind == "experts" and matrix not in adapted
    )
    parameters = shape.adapter_parameters(lora, len(config.data.new_tokens))
    text = f"adapters of rank {lora.r} on {names}: {parameters:,} parameters"
    if config.model.adapter:
        start = "continue" if config.tuning.adapter == "continue" else "are new, over a base with"
        text += f"; they {start} `{config.model.adapter}`"
    text += "; DoRA runs as PEFT's own layers, which no kernel fuses" if lora.variant == "dora" else ""
    return {"adapters": text + (f"; {', '.join(frozen)} stay frozen" if frozen else "")}


def quantises_experts(tuning: TuningConfig, strategy: str) -> bool:
    """Return whether fused experts are held in nf4 like linear layers.

    int8 does not support them, FSDP2 and ZeRO-3 would have to shard their packed bytes, and PEFT 0.21 does not put
    adapters on such a weight.
    """
    typed = tuning.lora.target_modules
    adapted = not isinstance(typed, str) and any("experts." in name for name in typed)
    return (
        (tuning.mode, tuning.backend, tuning.quantization) == ("qlora", "bnb", "nf4")
        and strategy not in ("fsdp2", "zero3")
        and not adapted
    )


def fuses_adapters(strategy: str, lora: LoraSettings) -> bool:
    """Return whether a linear layer and its adapter run as one function (`model.kernels`).

    That requires complete weights outside their own forward pass, while ZeRO-3 and FSDP2 gather them in hooks.
    """
    return strategy in ("single", "ddp", "zero1", "zero2") and lora.variant == "lora"
