"""Fused experts in nf4: quantised while they are loaded, expanded layer by layer when they compute (bitsandbytes' parametrisation)."""

from __future__ import annotations

from typing import Any

from bitsandbytes.nn.parametrize import replace_parameter_4bit
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name

from sft_play.model.lora import is_expert

METHOD = "bitsandbytes_with_experts"


def with_experts(settings: BitsAndBytesConfig) -> BitsAndBytesConfig:
    """Makes transformers quantise fused experts too; nf4 in blocks of 64 with quantised scales, as for linear layers."""
    settings.quant_method = METHOD
    return settings


class _Quantise(Bnb4bitQuantize):
    """What becomes of a weight when it is loaded."""

    def convert(self, input_dict: dict[str, Any], model: Any = None, missing_keys: Any = None, **others: Any) -> dict[str, Any]:
        layers = {}
        for name, value in input_dict.items():
            module, leaf = get_module_from_name(model, name)
            if not is_expert(name, module._parameters[leaf]):
                layers[name] = value
                continue
            weight, dtype = value[0] if isinstance(value, list) else value, module._parameters[leaf].dtype
            setattr(module, leaf, nn.Parameter(weight, requires_grad=False))
            replace_parameter_4bit(module, leaf, compress_statistics=True, quant_type="nf4")
            module.parametrizations[leaf][0].quant_state.dtype = dtype  # else that of the file
            module._is_hf_initialized = True
            missing_keys.discard(name)
        return dict(super().convert(layers, model=model, missing_keys=missing_keys, **others))


@register_quantizer(METHOD)
class _Quantizer(Bnb4BitHfQuantizer):
    """bitsandbytes' 4 bits for linear layers and fused experts."""

    def param_needs_quantization(self, model: Any, param_name: str, **others: Any) -> bool:
        module, leaf = get_module_from_name(model, param_name)
        own = module._parameters.get(leaf)
        return super().param_needs_quantization(model, param_name, **others) or (own is not None and is_expert(param_name, own))

    def get_quantize_ops(self) -> _Quantise:
        return _Quantise(self)
