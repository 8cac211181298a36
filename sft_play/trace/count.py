"""A model's numbers, counted on the model itself: built on the meta device, where parameters have shapes and no memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from torch import nn
from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError
from transformers.pytorch_utils import Conv1D

from sft_play.errors import DataError
from sft_play.model import lora
from sft_play.plan.shape import Counted, Matrices, ModelShape, pattern_of, quantized_bits
from sft_play.trace import build

PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k")
"""What families call the experts that a token passes."""


def count(architecture: dict[str, Any]) -> dict[str, Any]:
    """Returns the `ModelShape` of a `config.json` as plain data. Raises `DataError` for a model that is not trained here."""
    family = architecture.get("model_type")
    try:
        settings = build.settings_of(architecture)
        model = build.on_meta(settings)
    except (KeyError, ValueError, TypeError, AttributeError, ImportError) as error:
        said = str(error).strip().splitlines() or [""]
        raise DataError(f"transformers cannot build this `{family}` model: {type(error).__name__}: {said[0]}") from error
    text = settings.get_text_config()
    layers = build.decoder_layers(model)
    matrices = matrices_of(model)
    lora.free_text_part(model)
    experts = {one.name for one in matrices if one.kind == "experts"}

    def number(*names: str) -> int:
        found = next((value for value in (_setting(text, name) for name in names) if value), 0)
        return int(max(found) if isinstance(found, (list, tuple)) else found)

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    shape = ModelShape(
        model_type=str(family),
        hidden_size=hidden,
        layers=len(layers),
        heads=heads,
        kv_heads=number("num_key_value_heads") or heads,
        head_dim=number("qk_head_dim", "head_dim") or hidden // max(1, heads),
        ffn_size=number("moe_intermediate_size") * bool(experts)
        or number("intermediate_size", "ffn_dim", "n_inner")
        or 4 * hidden,
        vocab_size=number("vocab_size"),
        tied=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        max_positions=number("max_position_embeddings", "max_seq_len") or 2**31,
        gated=any("gate" in one.typed for one in matrices),
        experts=number("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts") if experts else 0,
        experts_per_token=number(*PER_TOKEN) if experts else 0,
        vision_parameters=sum(p.numel() for p in model.parameters() if not p.requires_grad),
        quantized_bits=quantized_bits(architecture.get("quantization_config")),
        attention_dropout=float(getattr(text, "attention_dropout", None) or getattr(text, "attn_pdrop", None) or 0.0),
        sliding_window=number("sliding_window") if getattr(text, "use_sliding_window", True) else 0,
        counted=Counted(
            parameters=sum(p.numel() for p in model.parameters()),
            largest_layer=max(sum(p.numel() for p in layer.parameters()) for layer in layers),
            matrices=matrices,
        ),
    )
    return asdict(shape)


def _setting(text: Any, name: str) -> Any:
    """Returns a setting of the text model, a list of all layers' where they differ (Gemma 4's heads), `None` without."""
    try:
        return getattr(text, name, None)
    except AmbiguousGlobalPerLayerAttributeError:
        return [getattr(text.per_layer_config[index], name) for index in range(text.num_hidden_layers)]


def matrices_of(model: Any) -> tuple[Matrices, ...]:
    """Returns every matrix of a model, alike ones of its layers together; a fused weight of experts counts each of them."""
    head, adapted, prefix = model.get_output_embeddings(), set(lora.linear_names(model)), lora.text_prefix(model)
    found: Counter[Matrices] = Counter()
    for name, module in model.named_modules():
        inside, pattern = not prefix or name.startswith(f"{prefix}."), pattern_of(name)
        if isinstance(module, nn.Embedding) or module is head:
            if inside or module is head:
                outputs, inputs = module.weight.shape[::-1] if isinstance(module, nn.Embedding) else module.weight.shape
                found[Matrices(name=pattern, inputs=inputs, outputs=outputs, count=1, kind="ends")] += 1
        elif lora.is_linear(module):
            inputs, outputs = (module.nx, module.nf) if isinstance(module, Conv1D) else (module.in_features, module.out_features)
            plain = type(module) in (nn.Linear, Conv1D)  # others transformers does not give to bitsandbytes
            kind: Any = "linear" if inside else "vision"
            one = Matrices(
                name=pattern, inputs=inputs, outputs=outputs, count=1, kind=kind, auto=name in adapted, quantised=plain,
                refused=lora.why_not(model, name) or "",
            )  # fmt: skip
            found[one] += 1
        elif not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            for own, parameter in module.named_parameters(recurse=False):
                if parameter.dim() == 3 and inside:
                    number, outputs, inputs = parameter.shape
                    full = f"{pattern}.{own}".removesuffix(".weight")
                    found[Matrices(name=full, inputs=inputs, outputs=outputs, count=1, kind="experts")] += number
    return tuple(Matrices(**{**asdict(one), "count": number}) for one, number in found.items())
