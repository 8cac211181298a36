"""The model of a case, as training would hold it, without its weights: built on the meta device, then given fake tensors."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from sft_play.config.schema import LoraSettings
from sft_play.model import lora, varlen
from sft_play.model.chunked_head import chunk_head
from sft_play.model.fused_lora import fuse_adapters
from sft_play.plan.trace_case import Case
from sft_play.runs.prepared import ResolvedModel
from sft_play.trace.quantised import Int8Linear, NF4Linear, quantise

BASE = ResolvedModel(name="", path="", source="folder", revision=None, fingerprint="", tokenizer_fingerprint="")


def dtype_of(name: str) -> torch.dtype:
    """Returns torch's type of a name such as `bfloat16` or `bf16`."""
    found: torch.dtype = getattr(torch, {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(name, name))
    return found


def settings_of(case: Case) -> Any:
    """Returns the whole model's configuration. Raises `KeyError` for a family that transformers does not know."""
    values = copy.deepcopy(case.architecture)
    family = values.pop("model_type")
    for own in ("quantization_config", "auto_map", "architectures", "torch_dtype", "dtype"):
        values.pop(own, None)
    return CONFIG_MAPPING[family].from_dict(values)


def layer_kinds(settings: Any) -> list[str]:
    """Returns the kind of each layer (`full_attention`, `sliding_attention`), all alike where the family has no kinds."""
    text = settings.get_text_config()
    kinds = getattr(text, "layer_types", None)
    return list(kinds) if kinds else ["layer"] * int(text.num_hidden_layers)


def with_layers(settings: Any, kinds: Sequence[str]) -> Any:
    """Returns a copy of the configuration with these layers."""
    shorter = copy.deepcopy(settings)
    text = shorter.get_text_config()
    text.num_hidden_layers = len(kinds)
    derived = isinstance(getattr(type(text), "layer_types", None), property)  # Mamba's follow from the number of layers
    if getattr(text, "layer_types", None) and not derived:
        text.layer_types = list(kinds)
    return shorter


def depths(kinds: Sequence[str]) -> tuple[list[str], dict[str, list[str]], Counter[str]]:
    """Returns the layers of the smallest model, those of a model with one more layer of each kind, and how often each kind is.

    The smallest has a first and a last layer, and one of each kind.
    """
    counts = Counter(kinds)
    smallest = list(counts) if len(counts) > 1 else [kinds[0]] * min(2, len(kinds))
    return smallest, {kind: sorted([*smallest, kind], key=list(counts).index) for kind in counts}, counts


def build(case: Case, settings: Any) -> nn.Module:
    """Returns the model on the meta device: its types, quantisation, adapters and recomputation as `model.load` sets them."""
    frozen_type = dtype_of(case.weights_dtype)
    varlen.register()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, dtype=frozen_type, attn_implementation=case.attention)
        if case.quantization != "none":
            quantise(model, case.quantization, dtype_of(case.precision))
        if case.mode == "full":
            lora.free_text_part(model)
        else:
            model.requires_grad_(False)
            adapters = LoraSettings(
                r=case.lora_r, alpha=2.0 * case.lora_r, dropout=case.lora_dropout, target_modules=cast(Any, case.target_modules)
            )
            model, _ = lora.add_adapters(model, adapters, BASE, dtype_of(case.adapter_dtype))
            if case.autocast:
                lora.leave_casts_to_autocast(model)
            if case.fused_adapters:
                fuse_adapters(model)
    if case.loss_chunk:
        chunk_head(model, case.loss_chunk)
    model.train()
    model.config.get_text_config().use_cache = False
    if case.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if case.mode != "full":
            model.enable_input_require_grads()
    return model


def under_autocast(model: Any, precision: str, device: str) -> None:
    """Wraps the forward pass as `Accelerator.prepare_model` does for mixed precision."""
    forward = torch.autocast(device_type=device, dtype=dtype_of(precision))(model.forward)
    model.forward = convert_outputs_to_fp32(forward)


def materialise(model: nn.Module, device: str) -> None:
    """Gives every meta parameter and buffer a tensor on `device`, tied ones the same; inside a fake mode they hold nothing."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                if id(parameter) not in made:
                    content = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
                    made[id(parameter)] = nn.Parameter(content, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)


def parts_of(model: nn.Module, case: Case) -> list[tuple[Tensor, str]]:
    """Returns every tensor that the model holds with the part it counts under."""
    own = "trained" if case.mode == "full" else "adapters"
    state = {
        id(buffer)
        for module in model.modules()
        if isinstance(module, (NF4Linear, Int8Linear))
        for buffer in module.buffers(recurse=False)
    }
    held = [(parameter, own if parameter.requires_grad else "frozen") for parameter in model.parameters()]
    return held + [(buffer, "quant_state" if id(buffer) in state else "frozen") for buffer in model.buffers()]


def decoder_layers(model: Any, count: int) -> list[nn.Module]:
    """Returns the text model's layers, first to last. Raises `ValueError` where they are not one list."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for module in base.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise ValueError(f"no list of {count} layers is found in {type(base).__name__}")
