"""A model in numbers, what adapters can be on, and what its family can do: layouts without a mask, attention kernels.
Pure.

What families can do are facts of the pinned transformers and of the oldest supported, so that the plan knows them
without importing it. `tests/numerics/test_layouts.py` compares them with what a tiny model of every family computes,
both ways: a wrong name fails, and so does a missing one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, Literal

from sft_play.config.schema import Config, LoraSettings, TuningConfig
from sft_play.errors import UserError
from sft_play.runs.adapters import embeddings_of

ROUTER = re.compile(r"(?:^|\.)(?:router|gate|wg|classifier|\w*expert_gate)(?:\.|$)")
"""Layers that decide which experts a token passes, or how much of the shared one."""
ROUTES = "it routes tokens to experts"


def pattern_of(name: str) -> str:
    """Return a module's name with `*` for the numbers of layers."""
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

    def take_slice(self, ranks: int) -> Matrices:
        """Return a rank's slice: columns of the layers out of attention and the feed-forward part, rows of those into
        them.
        """
        if self.kind != "linear":
            return self
        out = self.name.rsplit(".", 1)[-1] in ("o_proj", "down_proj", "dense", "dense_4h_to_h", "fc2", "c_proj")
        return replace(self, inputs=self.inputs // ranks) if out else replace(self, outputs=self.outputs // ranks)

    @property
    def typed(self) -> str:
        """What `target_modules` calls them."""
        return ".".join(self.name.split(".")[-2:]) if self.kind == "experts" else self.name.rsplit(".", 1)[-1]

    def rank(self, lora: LoraSettings) -> int:
        """Return the rank of adapters on them, by PEFT's rule for `rank_pattern`."""
        other = (rank for name, rank in lora.rank_pattern.items() if re.fullmatch(rf"(?:.*\.)?(?:{name})", self.name))
        return next(other, lora.r)

    def is_called(self, target: str) -> bool:
        """Whether a typed target is the end of their name."""
        return f".{self.name}".endswith(f".{pattern_of(target)}")

    def is_meant_by(self, target: str) -> bool:
        """Whether a typed target puts adapters on them; one word never means experts."""
        takes_it = {"linear": self.auto, "experts": "." in target, "ends": True, "vision": False}[self.kind]
        return takes_it and self.is_called(target)


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """What was counted on the model itself (`sft_play.trace.run`)."""

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
    moving_rope: bool = False
    """Whether rotary angles depend on the longest position of a line (dynamic NTK, LongRoPE)."""
    router_loss: bool = False
    """Whether `config.json` asks for the router's balancing loss."""
    counted: Counted | None = None
    """What the model itself says where the formulas do not know the family."""

    @staticmethod
    def read(row: Mapping[str, Any]) -> ModelShape:
        """Return the shape of a row of JSON."""
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
        """Return what a rank computes with where so many hold slices of each layer (`launch.tensor_parallel`)."""
        if ranks == 1:
            return self
        counted = self.counted
        if counted:
            matrices = tuple(one.take_slice(ranks) for one in counted.matrices)
            less = sum(one.parameters - mine.parameters for one, mine in zip(counted.matrices, matrices, strict=True))
            counted = Counted(
                parameters=counted.parameters - less,
                largest_layer=counted.largest_layer - less // self.layers,
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
        """Return a stage of a pipeline: so many layers, with the embedding where it begins the model and the head where
        it ends it.
        """
        table, both = self.vocab_size * self.hidden_size, 1 if self.tied else 2
        each = (self.parameters - self.vision_parameters - both * table) / self.layers
        ends = int(embeds) + int(predicts) - int(embeds and predicts and self.tied)
        matrices = tuple(
            replace(one, count=max(1, one.count * layers // self.layers))
            for one in self.matrices
            if one.kind in ("linear", "experts")
        )
        counted = Counted(
            parameters=int(each * layers) + ends * table + self.vision_parameters,
            largest_layer=self.largest_layer_parameters,
            matrices=matrices,
        )
        return replace(self, layers=layers, counted=counted, vocab_size=self.vocab_size if predicts else 0)

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
        """Return (inputs, outputs) of each linear map of a layer that `auto` adapts, by the last part of its name."""
        return {one.typed: (one.inputs, one.outputs) for one in self.matrices if one.auto}

    def adapter_targets(self, targets: str | Sequence[str]) -> list[Matrices]:
        """Return what `tuning.lora.target_modules` means."""
        if isinstance(targets, str):
            return [one for one in self.matrices if one.auto]
        found = []
        for one in self.matrices:
            meant = [name for name in targets if one.is_meant_by(name)]
            layers = [
                name for name in meant if name != pattern_of(name)
            ]  # `layers.5.self_attn.q_proj` is in one layer only
            alone = (
                len(layers) * (self.experts if one.kind == "experts" else 1) if len(layers) == len(meant) else one.count
            )
            found += [replace(one, count=min(one.count, alone))] if meant else []
        return found

    def adapter_parameters(self, lora: LoraSettings, new_tokens: int = 0) -> int:
        """Return the parameters of adapters, of the modules and of the biases that are trained with them."""
        targets = self.adapter_targets(lora.target_modules)
        found = sum(one.count * one.rank(lora) * (one.inputs + one.outputs) for one in targets)
        if lora.variant == "dora":
            found += sum(one.count * one.outputs for one in targets)
        rows = {"none": 0, "new": new_tokens, "all": self.vocab_size}[embeddings_of(lora, new_tokens)]
        found += rows * self.hidden_size * (1 if self.tied else 2)
        saved = [one for one in self.matrices if any(one.is_called(name) for name in lora.modules_to_save)]
        found += sum(one.parameters for one in saved)
        if lora.bias != "none" and self.qkv_bias:
            biased = [one for one in (self.matrices if lora.bias == "all" else targets) if one.typed in BIASED]
            found += sum(one.count * one.outputs for one in biased)
        return found


BIASED = ("q_proj", "k_proj", "v_proj")
CONV1D = ("gpt2", "openai-gpt", "imagegpt")
"""Families whose linear layers are `Conv1D`, with the weight the other way round."""


NEWER = (
    {"lfm2", "lfm2_moe", "llama4_text"}
    if tuple(map(int, version("transformers").split(".")[:2])) < (5, 23)
    else set[str]()
)
"""Families whose rows in one line are mixed by an older transformers."""

UNMASKED_MODEL_TYPES = frozenset({
    "afmoe", "apertus", "arcee", "bamba", "bloom", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "dots1",
    "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon", "falcon_h1", "falcon_mamba", "flex_olmo", "gemma", "gemma2", "gemma3",
    "gemma3_text", "gemma3n_text", "gemma4", "gemma4_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt2", "gpt_bigcode",
    "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe", "granitemoehybrid", "granitemoeshared", "helium", "hunyuan_v1_dense",
    "hunyuan_v1_moe", "hy_v3", "jais2", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "llama", "llama4_text", "mamba", "mamba2",
    "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "ministral", "ministral3", "mistral", "mistral3", "mixtral", "mpt", "nanochat",
    "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "opt", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl", "seed_oss", "smollm3", "solar_open",
    "stablelm", "starcoder2",
})  # fmt: skip
"""No token of theirs sees the padding behind its row. Others were not tried."""

FLATTENED_MODEL_TYPES = UNMASKED_MODEL_TYPES - NEWER - {
    "afmoe", "bamba", "bloom", "deepseek_v4", "falcon", "falcon_h1", "falcon_mamba", "gpt_oss", "granitemoehybrid", "jamba", "kimi_linear",
    "lfm2", "lfm2_moe", "lfm3", "mamba", "mamba2", "minimax", "mpt", "nemotron_h", "olmo_hybrid", "opt", "qwen3_5", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
}  # fmt: skip
"""Rows of these in one line need position ids only. Others carry a state from token to token, count positions
themselves (bloom, mpt), or make their masks without position ids (afmoe, gpt_oss, opt).
"""

CHUNKED_HEAD_MODEL_TYPES = UNMASKED_MODEL_TYPES
"""Families whose loss in chunks equals the whole one, changes to logits after the head included (Gemma 2 bends them,
Granite and Cohere scale them); `tests/numerics/test_chunked_loss.py` proves each.
"""

VARLEN = "varlen"
"""Our name for attention over rows of unlike length (`model.kernels`): torch's own flash attention, on a CPU one call
per row.
"""

BY_LENGTHS = frozenset({VARLEN, "flash_attention_2"})
"""Attention that tells the rows of a line apart by their lengths, without a mask."""

VARLEN_MODEL_TYPES = UNMASKED_MODEL_TYPES - NEWER - {
    "bloom", "deepseek_v32", "deepseek_v4", "falcon", "falcon_mamba", "gemma2", "glm_moe_dsa", "gptj", "jamba", "llama4_text", "mamba",
    "mamba2", "minimax", "mpt", "nemotron", "phimoe", "qwen2_moe", "stablelm",
}  # fmt: skip
"""Families that `varlen` computes. Others bend their scores (gemma2), add a mask of their own (bloom, mpt, llama4_text,
the sparse attention of deepseek_v32), do not pass the lengths on (nemotron, stablelm, jamba, mamba), or not their
window (qwen2_moe, phimoe).
"""

SLICED_MODEL_TYPES = VARLEN_MODEL_TYPES - {
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
}
"""Families whose tokens meet in `varlen` attention alone, so that ranks can hold slices of a line. Others carry a state
along it.
"""

TENSOR_PARALLEL_MODEL_TYPES = frozenset({
    "apertus", "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3", "gemma3_text", "gpt_neox", "granite",
    "helium", "jais2", "llama", "ministral", "ministral3", "mistral", "mistral3", "nanochat", "nemotron", "olmo", "phi", "qwen2", "qwen3", "seed_oss",
    "smollm3", "starcoder2",
})  # fmt: skip
"""Families whose layers can be held in slices (`tests/numerics/test_tensor_parallel.py`). Others have fused layers,
norms over all heads, experts, or no plan in transformers.
"""

NOT_STAGED_MODEL_TYPES = frozenset(
    {
        "bloom",
        "deepseek_v4",
        "gemma3n_text",
        "gemma4",
        "gemma4_text",
        "gpt2",
        "gpt_bigcode",
        "mistral3",
        "nemotron_h",
        "opt",
        "qwen3_vl",
    }
)
"""Families whose layers cannot be the stages of a pipeline (`tests/numerics/test_stages.py`): they read more than the
layer before.
"""

SINK_MODEL_TYPES = frozenset({"gpt_oss", "mimo_v2_flash"})
"""Families of `VARLEN_MODEL_TYPES` whose heads have sinks: one call per row on GPUs too, of any type."""

TEXT_WITHIN = frozenset({
    "aya_vision", "cohere2_vision", "exaone4_5", "glm4v", "glm4v_moe", "internvl", "kimi_k25", "lfm2_vl", "llava", "mistral3", "qwen2_5_vl",
    "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm",
})  # fmt: skip
"""Image and text models whose text part trains like a language model (`tests/numerics/test_image_text.py`)."""

LAYER_OUTPUTS = {"bamba": 2, "bloom": 2, "falcon": 2, "falcon_h1": 1, "glm_moe_dsa": 2, "gptj": 2, "mpt": 2}
"""How long a tuple a layer returns, by model type; the layers of all others return the hidden states alone."""

PROMPTED_ALONE = frozenset({"deepseek_v4", "minimax"})
"""Families whose answers depend on padding before a prompt (compressed keys are counted from the line's beginning; a
cached state decays otherwise): they are prompted one at a time. `tests/numerics/test_row_alone.py` tries all families.
"""
CHANGED_LOGITS: Mapping[str, str] = {
    **dict.fromkeys(
        ("gemma2", "gemma3_text", "gemma3n_text", "gemma4", "gemma4_text", "nanochat"), "final_logit_softcapping"
    ),
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared", "granitemoehybrid"), "logits_scaling"),
    **dict.fromkeys(("cohere", "cohere2"), "logit_scale"),
    "falcon_h1": "lm_head_multiplier",
}
"""Families that change logits after the head, and the field of their configuration that says how (`model.kernels`)."""

READ_DIRECTLY = frozenset({"correction_coefs"})
"""Layers whose weight is read by what they are in, past an adapter (Gemma 3n)."""
READ_BY_KERNELS = frozenset({"dt_proj", "out_proj", "x_proj"})
"""Layers of a Mamba mixer that are such: its kernels take their weights."""

LIGER_MODEL_TYPES = frozenset({"granite", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3"})
"""Dense families with SwiGLU in which Liger replaces every norm and feed-forward part
(`tests/numerics/test_kernels.py`).
"""

FLATTENED_TOKENS = 4096
"""Longest flattened micro-batch of several rows on a GPU where attention is not by lengths: the block mask is quadratic
in it.
"""

WITHOUT_SDPA = frozenset({
    "big_bird", "bigbird_pegasus", "blip", "bloom", "codegen", "cpmant", "deepseek_v4", "falcon_mamba", "flint", "gemma2", "git",
    "got_ocr2", "gpt_neo", "gpt_neox_japanese", "gpt_oss", "gptj", "granite_swa", "granitemoe_swa", "hy_v4", "inkling2", "inkling2_text",
    "mamba", "mamba2", "megatron-bert", "mimo_v2_flash", "mpt", "mvp", "openai-gpt", "pp_chart2table", "prophetnet", "reformer", "rembert",
    "roformer", "rwkv", "trocr", "vaultgemma", "xglm", "xlm", "xlnet", "xlstm",
})  # fmt: skip
"""Families that refuse `attn_implementation="sdpa"`: soft-capped or sink logits, or no attention at all."""

WITHOUT_FLASH_ATTENTION = frozenset({
    "axk2", "big_bird", "bigbird_pegasus", "blip", "blip-2", "bloom", "blt", "codegen", "cpmant", "deepseek_ocr2", "deepseek_v32",
    "deepseek_v4", "doge", "dots3_note", "dots3_note_text", "evolla", "falcon_mamba", "flint", "git", "glm5_next", "glm_moe_dsa",
    "got_ocr2", "gpt_neox_japanese", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "idefics", "inkling2", "inkling2_text",
    "inkling_mm_model", "inkling_text", "kosmos-2", "llama4", "llama4_text", "mamba", "mamba2", "megatron-bert", "mimo_v2_flash",
    "minimax_m3_vl", "minimax_m3_vl_text", "mistral_large4", "mllama", "mpt", "mvp", "openai-gpt", "pix2struct", "pp_chart2table",
    "pp_formulanet", "prophetnet", "qwen4_exp", "qwen4_exp_text", "reformer", "rembert", "roformer", "rwkv", "step3p7", "t5gemma2", "trocr",
    "udop", "unlimited_ocr", "xglm", "xlm", "xlnet", "xlstm",
})  # fmt: skip
"""Families that refuse `attn_implementation="flash_attention_2"`, or would fetch another kernel in its place."""


def check_targets(config: Config, shape: ModelShape) -> None:
    """Raise `UserError` for typed LoRA targets that mean nothing in this model, or what no adapter can be on."""
    lora = config.tuning.lora
    if config.tuning.mode == "full":
        return
    own = {"tuning.lora.variant": lora.variant == "dora", "tuning.lora.init": lora.init in ("pissa", "olora")}
    if shape.model_type in CONV1D and (key := next((key for key, asked in own.items() if asked), None)):
        value = lora.variant if key.endswith("variant") else lora.init
        raise UserError(
            f"`{key}` is `{value}`, which PEFT does not do over the `Conv1D` layers of a `{shape.model_type}` model",
            hint="omit it",
        )
    if isinstance(lora.target_modules, str):
        return
    on_experts = any(one.kind == "experts" for one in shape.adapter_targets(lora.target_modules))
    if on_experts and (lora.variant != "lora" or lora.init != "default" or lora.bias != "none"):
        raise UserError(
            "`tuning.lora.target_modules` names experts, over which PEFT puts plain LoRA alone",
            hint="omit `tuning.lora.variant`, `init` and `bias`, or the experts",
        )
    missing = {name: "" for name in lora.target_modules if not shape.adapter_targets([name])}
    for name in missing:
        why = next((one.refused for one in shape.matrices if one.refused and one.is_called(name)), "")
        if not why and shape.expert_parameters and ROUTER.search(name):  # many a router is no linear layer
            why = ROUTES
        missing[name] = f" ({why})" if why else ""
    if missing:
        quoted = ", ".join(f"`{name}`{why}" for name, why in missing.items())
        known = dict.fromkeys(one.typed for one in shape.matrices if one.kind in ("experts", "ends") or one.auto)
        raise UserError(
            f"`tuning.lora.target_modules` names {quoted}, where a `{shape.model_type}` model takes no adapter",
            hint=f"it takes them on {', '.join(known)}; or `auto` for every linear layer but the head",
        )
    if shape.tied and any(one.kind == "ends" for one in shape.adapter_targets(lora.target_modules)):
        raise UserError(
            "`tuning.lora.target_modules` names the head or the input embeddings, which share one weight in this model:"
            " an adapter on one could not be merged without changing the other",
            hint="leave it out",
        )
    if lora.dropout and on_experts:
        raise UserError(
            f"`tuning.lora.dropout` is {lora.dropout:g}, and adapters on fused experts have no dropout",
            hint="set `tuning.lora.dropout: 0`, or leave the experts out of `tuning.lora.target_modules`",
        )


def describe_adapters(config: Config, shape: ModelShape) -> dict[str, str]:
    """Return the reason that names what is adapted, with the parameters of its adapters."""
    lora = config.tuning.lora
    if config.tuning.mode == "full":
        return {}
    found = shape.adapter_targets(lora.target_modules)
    names = ", ".join(dict.fromkeys(one.typed for one in found))
    frozen = dict.fromkeys(one.typed for one in shape.matrices if one.kind == "experts" and one not in found)
    text = f"adapters of rank {lora.r} on {names}: {shape.adapter_parameters(lora, len(config.data.new_tokens)):,} parameters"
    text += "; DoRA runs as PEFT's own layers, which no kernel fuses" if lora.variant == "dora" else ""
    return {"adapters": text + (f"; {', '.join(frozen)} stay frozen" if frozen else "")}


def quantises_experts(tuning: TuningConfig, strategy: str) -> bool:
    """Whether fused experts are held in nf4 like linear layers.

    int8 has no form for them, FSDP2 and ZeRO-3 would have to shard their packed bytes, and PEFT 0.21 puts no adapters
    over such a weight.
    """
    typed = tuning.lora.target_modules
    adapted = not isinstance(typed, str) and any("experts." in name for name in typed)
    return (
        (tuning.mode, tuning.backend, tuning.quantization) == ("qlora", "bnb", "nf4")
        and strategy not in ("fsdp2", "zero3")
        and not adapted
    )


def fuses_adapters(strategy: str, lora: LoraSettings) -> bool:
    """Whether a linear layer and its adapter run as one function (`model.kernels`).

    That needs weights that are whole outside their own forward pass: ZeRO-3 and FSDP2 gather them in hooks.
    """
    return strategy in ("single", "ddp", "zero1", "zero2") and lora.variant == "lora"
