"""The model of a case, as training would hold it, without its weights: built on the meta device, then given fake
tensors.
"""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from peft.tuners.lora import dora
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.nn.utils import parametrize
from transformers.pytorch_utils import Conv1D

from sft_play.config.schema import LoraSettings
from sft_play.files import text_sha256
from sft_play.model import kernels, lora
from sft_play.model.load import settings_of
from sft_play.model.parallel import Skipped, Slicer, list_of_layers
from sft_play.model.published import model_class
from sft_play.plan.shape import LAYER_OUTPUTS, SILU
from sft_play.plan.sources import Case
from sft_play.runs.prepared import ResolvedModel
from sft_play.trace.step import HOST, count_as
from sft_play.training.offload import offload_inputs

BASE = ResolvedModel(name="", path="", source="folder", revision=None, fingerprint="", tokenizer_fingerprint="")

MOST_KINDS = 6
"""Kinds of layers that also differ by their settings."""
NUMBERING = re.compile(r"id$|idx|index|number")
"""Settings that say only which layer it is."""


def dtype_of(name: str) -> torch.dtype:
    """Return torch's type of a name such as `bfloat16` or `bf16`."""
    dtype: torch.dtype = getattr(torch, {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(name, name))
    return dtype


def on_meta(settings: Any, dtype: torch.dtype = torch.bfloat16, attention: str | None = None) -> Any:
    """Return the model on the meta device. Raise `DataError` for a family that is not trained here."""
    kernels.register()
    with torch.device("meta"):
        model = model_class(settings).from_config(settings, dtype=dtype, attn_implementation=attention)
    kernels.keep_rows_apart(model)
    return model


def model_of(case: Case) -> Any:
    """Return the case's whole model on the meta device."""
    return on_meta(settings_of(case.architecture), dtype_of(case.weights_dtype), case.attention)


def layer_kinds(layers: Sequence[nn.Module]) -> list[str]:
    """Return a name of each layer's kind: alike are layers of the same modules, sizes and settings."""
    kinds = [_signature(layer, settings=True) for layer in layers]
    return kinds if len(set(kinds)) <= MOST_KINDS else [_signature(layer, settings=False) for layer in layers]


def _signature(layer: nn.Module, *, settings: bool) -> str:
    parts: list[Any] = [(name, tuple(p.shape)) for name, p in layer.named_parameters()]
    for name, module in layer.named_modules():
        own = vars(module).items() if settings else ()
        plain = {
            k: v
            for k, v in own
            if isinstance(v, (bool, str, int)) and not k.startswith("_") and not NUMBERING.search(k)
        }
        parts.append((name, type(module).__name__, plain))
    return text_sha256(repr(parts))[:8]


def depths(kinds: Sequence[str]) -> tuple[list[int], dict[str, list[int]], Counter[str]]:
    """Return the layers of the smallest model, those of a model with one more layer of each kind, and how often each
    kind is.

    The smallest of several kinds has the first and the last layer, and the last one of each kind between them: where a
    peak is, layers that are added before it only add what they hold.
    """
    counts, between = Counter(kinds), range(1, len(kinds) - 1)
    ends = {0, len(kinds) - 1}
    smallest = sorted(ends | {max(i for i in between if kinds[i] == kind) for kind in {kinds[i] for i in between}})
    if len(counts) == 1:
        smallest = list(range(len(kinds)))[:2]
    grown = {}
    for kind in counts:
        extra = next(
            (index for index, layer_kind in enumerate(kinds) if layer_kind == kind and index not in smallest), None
        )
        if extra is not None:
            grown[kind] = sorted([*smallest, extra])
    return smallest, grown, counts


def with_layers(model: Any, indices: Sequence[int]) -> Any:
    """Return a copy of the model in which only these layers compute; the others stay in their places, so that all
    numbering holds.
    """
    holder, name = list_of_layers(model)
    layers = getattr(holder, name)
    answers = LAYER_OUTPUTS.get(model.config.model_type, 0)
    try:
        setattr(
            holder,
            name,
            nn.ModuleList(layer if index in indices else Skipped(answers, index) for index, layer in enumerate(layers)),
        )
        return copy.deepcopy(model)
    finally:
        setattr(holder, name, layers)


def build(case: Case, model: Any) -> nn.Module:
    """Return `model`, of the meta device, with quantisation, adapters and recomputation as `model.load` sets them."""
    with torch.device("meta"):
        if case.quantization != "none":
            quantise(model, case.quantization, dtype_of(case.precision))
        if case.nf4_experts:
            quantise_experts(model)
        return prepare(case, model)


def prepare(case: Case, model: Any) -> nn.Module:
    """Return a model that is quantised already with what trains, its slices, its head in chunks, and recomputation."""
    if case.kernels == "liger":
        fuse_like_liger(model)
    if case.mode == "full":
        lora.free_text_part(model)
    else:
        model.requires_grad_(False)
        model = lora.add_adapters(
            model, LoraSettings(**case.lora), BASE, dtype_of(case.adapter_dtype), range(case.new_tokens)
        )
        if case.autocast:
            lora.leave_casts_to_autocast(model)
        if case.fused_adapters:
            lora.fuse_adapters(model)
    if case.tensor_parallel > 1:
        Slicer(0, case.tensor_parallel).cut(model)
    if case.loss_chunk:
        kernels.chunk_head(model, case.loss_chunk)
    model.train()
    model.config.get_text_config().use_cache = False
    if case.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if case.activation_offload:
            offload_inputs(model, lambda: saved_tensors_hooks(_to_host, Tensor.clone))
        if case.mode != "full":
            model.enable_input_require_grads()
    return cast(nn.Module, model)


def _to_host(tensor: Tensor) -> Tensor:
    with count_as(HOST):
        return tensor.clone()


def materialise(model: nn.Module, device: str) -> None:
    """Give every meta parameter and buffer a tensor on `device`, tied ones the same; inside a fake mode they hold
    nothing.
    """
    copies: dict[Tensor, Tensor] = {}
    for module in model.modules():
        tensors: dict[str, Any]
        for tensors in (module._parameters, module._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is not None and tensor not in copies:
                    copies[tensor] = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
                    if isinstance(tensor, nn.Parameter):
                        copies[tensor] = nn.Parameter(copies[tensor], requires_grad=tensor.requires_grad)
                tensors[name] = None if tensor is None else copies[tensor]


def parts_of(model: nn.Module, case: Case) -> list[tuple[Tensor, str]]:
    """Return every tensor that the model holds with the part it counts under."""
    own = "trained" if case.mode == "full" else "adapters"
    state = {
        id(buffer)
        for module in model.modules()
        if isinstance(module, (NF4Linear, NF4Experts, Int8Linear))
        for buffer in module.buffers(recurse=False)
    }
    tensors = [(parameter, own if parameter.requires_grad else "frozen") for parameter in model.parameters()]
    return tensors + [(buffer, "quant_state" if id(buffer) in state else "frozen") for buffer in model.buffers()]


def decoder_layers(model: Any) -> list[nn.Module]:
    """Return the text model's layers, first to last. Raise `ValueError` if they are not one list."""
    holder, name = list_of_layers(model)
    return list(getattr(holder, name))


BLOCK, NESTED_BLOCK = 64, 256


def _packed(weights: int) -> nn.Parameter:
    """Return two weights a byte."""
    return nn.Parameter(torch.empty((weights + 1) // 2, 1, dtype=torch.uint8, device="meta"), requires_grad=False)


def _hold_scales(module: nn.Module, weights: int) -> None:
    """Give a module the scales of so many weights, which are quantised too."""
    blocks = -(-weights // BLOCK)
    module.register_buffer("absmax", torch.empty(blocks, dtype=torch.uint8, device="meta"))
    module.register_buffer("nested_absmax", torch.empty(-(-blocks // NESTED_BLOCK), dtype=torch.float32, device="meta"))
    module.register_buffer("codes", torch.empty(16 + 256 + 1, dtype=torch.float32, device="meta"))


class NF4Linear(nn.Linear):
    """A linear layer in doubly quantised nf4; its numbers mean nothing, its sizes everything."""

    def __init__(self, plain: nn.Linear, compute: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.compute = plain.in_features, plain.out_features, compute
        weights = plain.in_features * plain.out_features
        self.weight = _packed(weights)
        self.bias = plain.bias
        _hold_scales(self, weights)

    def expand(self, dtype: torch.dtype) -> Tensor:
        """Return room for the whole weight."""
        return _expand(self.weight, (self.out_features, self.in_features), dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the layer's output shape and type."""
        result: Tensor = _Quantised.apply(x.to(self.compute), self, self.bias).to(x.dtype)
        return result


class _Quantised(torch.autograd.Function):
    """Expands the weight in each pass. int8 keeps its input as an attribute, as bitsandbytes does, past the hooks by
    which checkpointing frees saved tensors.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: NF4Linear | Int8Linear, bias: Tensor | None) -> Tensor:
        ctx.layer, ctx.dtype, ctx.kept = layer, x.dtype, x if isinstance(layer, Int8Linear) else None
        return functional.linear(x, layer.expand(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        expanded = ctx.layer.expand(ctx.dtype)
        return (grad.to(ctx.dtype) @ expanded if ctx.needs_input_grad[0] else None), None, None


def _expand(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return room for the whole weight; its fp32 scales exist while it is filled."""
    with count_as("dequantised"):
        scales = like.new_zeros(-(-math.prod(shape) // BLOCK), dtype=torch.float32)
        weight = like.new_zeros(shape, dtype=dtype)
        del scales
    return weight


class NF4Experts(nn.Module):
    """What expands a fused expert weight each time that its module runs, as `bitsandbytes.nn.parametrize` does."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        _hold_scales(self, shape.numel())

    def forward(self, packed: Tensor) -> Tensor:
        """Return room for the whole weight."""
        return _expand(packed, self.shape, self.dtype)


class Int8Linear(nn.Linear):
    """A linear layer in int8 with a scale a row."""

    def __init__(self, plain: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        shape = (plain.out_features, plain.in_features)
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.int8, device="meta"), requires_grad=False)
        self.bias = plain.bias
        self.register_buffer("scales", torch.empty(plain.out_features, dtype=torch.float32, device="meta"))

    def expand(self, dtype: torch.dtype) -> Tensor:
        """Return the whole weight."""
        with count_as("dequantised"):
            return self.weight.to(dtype).mul_(self.scales.unsqueeze(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the layer's output shape and type."""
        out: Tensor = _Quantised.apply(x, self, self.bias)
        return out


def _expand_for_dora(module: nn.Module, plain: Callable[[nn.Module], Tensor] = dora.dequantize_module_weight) -> Tensor:
    """Return room for the weight that DoRA measures: bitsandbytes' nf4 in the computation's type, its int8 in fp32."""
    if isinstance(module, (NF4Linear, Int8Linear)):
        return module.expand(module.compute if isinstance(module, NF4Linear) else torch.float32)
    return plain(module)


dora.dequantize_module_weight = _expand_for_dora


class _RMSNorm(torch.autograd.Function):
    """Keeps its input as it is, and overwrites the gradient that arrives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight = ctx.saved_tensors[1]
        return grads[0], torch.empty_like(weight) if ctx.needs_input_grad[1] else None


class _SwiGLU(torch.autograd.Function):
    """Keeps gate and up, and overwrites them with their gradients."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate := gate.contiguous(), up.contiguous())
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return gate, up


def fuse_like_liger(model: nn.Module) -> None:
    """Make norms and SwiGLU keep what Liger's kernels keep (liger-kernel 0.8.5); rotary embeddings keep the same."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_norm, module)
        elif hasattr(module, "down_proj") and model.config.hidden_act in SILU:
            module.forward = partial(_feed_forward, module)


def _norm(module: Any, x: Tensor) -> Tensor:
    out: Tensor = _RMSNorm.apply(x.contiguous(), module.weight)
    return out


def _feed_forward(module: Any, x: Tensor) -> Tensor:
    out: Tensor
    if hasattr(module, "gate_up_proj"):
        both = module.gate_up_proj(x)
        out = module.down_proj(_SwiGLU.apply(*both.chunk(2, dim=-1)))
    else:
        out = module.down_proj(_SwiGLU.apply(module.gate_proj(x), module.up_proj(x)))
    return out


def quantise_experts(model: nn.Module) -> None:
    """Pack every fused expert weight, as `model.load` does; in place, on the meta device."""
    for module in {model.get_submodule(name.rpartition(".")[0]): None for name in lora.expert_names(model)}:
        module.register_forward_pre_hook(_expands_once)
        module.register_forward_hook(_has_expanded, always_call=True)
        for leaf, plain in list(module.named_parameters(recurse=False)):
            if plain.dim() == 3:
                setattr(module, leaf, _packed(plain.numel()))
                parametrize.register_parametrization(module, leaf, NF4Experts(plain.shape, plain.dtype), unsafe=True)


def _expands_once(*_: Any) -> None:
    parametrize._cache_enabled += 1


def _has_expanded(*_: Any) -> None:
    parametrize._cache_enabled -= 1
    if not parametrize._cache_enabled:
        parametrize._cache = {}


def quantise(model: nn.Module, quantization: str, compute: torch.dtype) -> None:
    """Replace every linear layer but the head, as bitsandbytes does through transformers; in place, on the meta
    device.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is head or not (isinstance(child, Conv1D) or type(child) is nn.Linear):
                continue  # Falcon's linear layers are a class of their own
            plain = nn.Linear(child.nx, child.nf, device="meta") if isinstance(child, Conv1D) else child
            setattr(parent, name, NF4Linear(plain, compute) if quantization == "nf4" else Int8Linear(plain))
