"""The model of a case, as training would hold it, without its weights: built on the meta device, then given fake tensors."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import torch
import transformers
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig

from sft_play.config.schema import LoraSettings
from sft_play.errors import DataError
from sft_play.files import text_sha256
from sft_play.model import lora, varlen
from sft_play.model.chunked_head import chunk_head
from sft_play.model.folder import code_not_trusted
from sft_play.model.kernels import fuse_adapters
from sft_play.model.read import model_class
from sft_play.plan.trace_case import Case
from sft_play.runs.prepared import ResolvedModel
from sft_play.trace.quantised import Int8Linear, NF4Experts, NF4Linear, quantise, quantise_experts

BASE = ResolvedModel(name="", path="", source="folder", revision=None, fingerprint="", tokenizer_fingerprint="")

MOST_KINDS = 6
"""Kinds of layers that are told apart by their settings too."""
NUMBERING = re.compile(r"id$|idx|index|number")
"""Settings that say only which layer it is."""


def dtype_of(name: str) -> torch.dtype:
    """Returns torch's type of a name such as `bfloat16` or `bf16`."""
    found: torch.dtype = getattr(torch, {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(name, name))
    return found


def settings_of(architecture: dict[str, Any]) -> Any:
    """Returns the whole model's configuration. Raises `DataError` for a family that transformers does not know."""
    values = copy.deepcopy(architecture)
    family = values.pop("model_type", None)
    if family not in CONFIG_MAPPING:
        if values.get("auto_map"):
            raise code_not_trusted("model", "config.json")
        raise DataError(
            f"transformers {transformers.__version__} knows no `model_type: {family}`", hint="a newer transformers may"
        )
    for own in ("quantization_config", "auto_map", "architectures", "torch_dtype", "dtype"):
        values.pop(own, None)
    return CONFIG_MAPPING[family].from_dict(PreTrainedConfig._decode_special_floats(values))


def on_meta(settings: Any, dtype: torch.dtype = torch.bfloat16, attention: str | None = None) -> Any:
    """Returns the model on the meta device. Raises `DataError` for a family that is not trained here."""
    varlen.register()
    with torch.device("meta"):
        model = model_class(settings).from_config(settings, dtype=dtype, attn_implementation=attention)
    varlen.keep_rows_apart(model)
    return model


def model_of(case: Case) -> Any:
    """Returns the case's whole model on the meta device."""
    return on_meta(settings_of(case.architecture), dtype_of(case.weights_dtype), case.attention)


def layer_kinds(layers: Sequence[nn.Module]) -> list[str]:
    """Returns a name of each layer's kind: alike are layers of the same modules, sizes and settings."""
    kinds = [_signature(layer, settings=True) for layer in layers]
    return kinds if len(set(kinds)) <= MOST_KINDS else [_signature(layer, settings=False) for layer in layers]


def _signature(layer: nn.Module, *, settings: bool) -> str:
    parts: list[Any] = [(name, tuple(p.shape)) for name, p in layer.named_parameters()]
    for name, module in layer.named_modules():
        own = vars(module).items() if settings else ()
        plain = {k: v for k, v in own if isinstance(v, (bool, str, int)) and not k.startswith("_") and not NUMBERING.search(k)}
        parts.append((name, type(module).__name__, plain))
    return text_sha256(repr(parts))[:8]


def depths(kinds: Sequence[str]) -> tuple[list[int], dict[str, list[int]], Counter[str]]:
    """Returns the layers of the smallest model, those of a model with one more layer of each kind, and how often each kind is.

    The smallest of several kinds has the first and the last layer, and the last one of each kind between them: where a peak is, layers
    that are added before it only add what they hold.
    """
    counts, between = Counter(kinds), range(1, len(kinds) - 1)
    ends = {0, len(kinds) - 1}
    smallest = sorted(ends | {max(i for i in between if kinds[i] == kind) for kind in {kinds[i] for i in between}})
    if len(counts) == 1:
        smallest = list(range(len(kinds)))[:2]
    grown = {}
    for kind in counts:
        more = next((index for index, one in enumerate(kinds) if one == kind and index not in smallest), None)
        if more is not None:
            grown[kind] = sorted([*smallest, more])
    return smallest, grown, counts


class Skipped(nn.Module):
    """A layer that a trace leaves out: hands on what it gets, in the form in which the layers that run answer."""

    def __init__(self, answers: list[Any]) -> None:
        super().__init__()
        self.answers = answers
        """What a layer that ran answered with: `tuple`, and of how many, or nothing."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Returns the hidden states."""
        hidden = arguments[0] if arguments else named["hidden_states"]
        return (hidden, *(None,) * (self.answers[0] - 1)) if self.answers and self.answers[0] else hidden


def with_layers(model: Any, kept: Sequence[int]) -> Any:
    """Returns a copy of the model in which only these layers compute; the others stay in their places, so that all numbering holds."""
    holder, name = _list_of_layers(model)
    layers = getattr(holder, name)
    try:
        setattr(holder, name, nn.ModuleList(layer if index in kept else Skipped([]) for index, layer in enumerate(layers)))
        shorter = copy.deepcopy(model)
    finally:
        setattr(holder, name, layers)
    answers: list[Any] = []
    found = decoder_layers(shorter)

    def note(_module: nn.Module, _arguments: Any, output: Any) -> None:
        answers[:] = [len(output) if isinstance(output, tuple) else 0]

    for layer in found:
        if isinstance(layer, Skipped):
            layer.answers = answers
        else:
            layer.register_forward_hook(note)
    return shorter


def build(case: Case, model: Any) -> nn.Module:
    """Returns `model`, of the meta device, with quantisation, adapters and recomputation as `model.load` sets them."""
    with torch.device("meta"):
        if case.quantization != "none":
            quantise(model, case.quantization, dtype_of(case.precision))
        if case.nf4_experts:
            quantise_experts(model)
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
        if isinstance(module, (NF4Linear, NF4Experts, Int8Linear))
        for buffer in module.buffers(recurse=False)
    }
    held = [(parameter, own if parameter.requires_grad else "frozen") for parameter in model.parameters()]
    return held + [(buffer, "quant_state" if id(buffer) in state else "frozen") for buffer in model.buffers()]


def decoder_layers(model: Any) -> list[nn.Module]:
    """Returns the text model's layers, first to last. Raises `ValueError` where they are not one list."""
    holder, name = _list_of_layers(model)
    return list(getattr(holder, name))


def _list_of_layers(model: Any) -> tuple[nn.Module, str]:
    """Returns the module that holds the text model's layers, and under which name."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    wanted = base.config.get_text_config().num_hidden_layers
    for module in base.get_decoder().modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == wanted:
                return module, name
    raise ValueError(f"no list of {wanted} layers is found in {type(base).__name__}")
