"""Stand-ins for bitsandbytes' linear layers: the same storages, the same temporaries, on any device and under fake tensors.

Sizes follow bitsandbytes 0.50: nf4 packs two weights to a byte, one 8-bit scale for 64 weights, one fp32 scale for 256 of
those; both passes expand one whole weight to the computation's type. int8 keeps a byte a weight and one fp32 scale a row, and
its autograd function keeps its input, and not as a saved tensor: recomputation cannot let go of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from transformers.pytorch_utils import Conv1D

from sft_play.model.lora import expert_names
from sft_play.trace.tracker import named

BLOCK, NESTED_BLOCK = 64, 256


class NF4Linear(nn.Linear):
    """A linear layer in doubly quantised nf4; its numbers mean nothing, its sizes everything."""

    def __init__(self, plain: nn.Linear, compute: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.compute = plain.in_features, plain.out_features, compute
        weights = plain.in_features * plain.out_features
        blocks = -(-weights // BLOCK)
        meta = {"device": "meta"}
        self.weight = nn.Parameter(torch.empty((weights + 1) // 2, 1, dtype=torch.uint8, **meta), requires_grad=False)
        self.bias = plain.bias
        self.register_buffer("absmax", torch.empty(blocks, dtype=torch.uint8, **meta))
        self.register_buffer("nested_absmax", torch.empty(-(-blocks // NESTED_BLOCK), dtype=torch.float32, **meta))
        self.register_buffer("codes", torch.empty(16 + 256 + 1, dtype=torch.float32, **meta))

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the layer's output shape and type."""
        bias = None if self.bias is None else self.bias.to(self.compute)
        out = _NF4.apply(x.to(self.compute), self.weight, self.out_features, self.in_features, bias)
        result: Tensor = out.to(x.dtype)
        return result


class _NF4(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, outputs: int, inputs: int, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.shape = (outputs, inputs)
        return functional.linear(x, _expanded(x, outputs, inputs), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        outputs, inputs = ctx.shape
        return (grad @ _expanded(grad, outputs, inputs) if ctx.needs_input_grad[0] else None), None, None, None, None


def _expanded(like: Tensor, outputs: int, inputs: int) -> Tensor:
    """Returns room for the whole weight in the computation's type; its fp32 scales exist while it is filled."""
    with named("dequantised"):
        scales = like.new_zeros(-(-outputs * inputs // BLOCK), dtype=torch.float32)
        weight = like.new_zeros(outputs, inputs)
        del scales
    return weight


class NF4Experts(nn.Module):
    """What expands a fused expert weight each time that its module runs, as `bitsandbytes.nn.parametrize` does."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        blocks = -(-shape.numel() // BLOCK)
        self.register_buffer("absmax", torch.empty(blocks, dtype=torch.uint8, device="meta"))
        self.register_buffer("nested_absmax", torch.empty(-(-blocks // NESTED_BLOCK), dtype=torch.float32, device="meta"))
        self.register_buffer("codes", torch.empty(16 + 256 + 1, dtype=torch.float32, device="meta"))

    def forward(self, packed: Tensor) -> Tensor:
        """Returns room for the whole weight; its fp32 scales exist while it is filled."""
        with named("dequantised"):
            scales = packed.new_zeros(-(-self.shape.numel() // BLOCK), dtype=torch.float32)
            weight = packed.new_zeros(self.shape, dtype=self.dtype)
            del scales
        return weight


class Int8Linear(nn.Linear):
    """A linear layer in int8 with a scale a row."""

    def __init__(self, plain: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        shape = (plain.out_features, plain.in_features)
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.int8, device="meta"), requires_grad=False)
        self.bias = plain.bias
        self.register_buffer("scales", torch.empty(plain.out_features, dtype=torch.float32, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the layer's output shape and type."""
        out: Tensor = _Int8.apply(x, self.weight, self.scales, self.bias)
        return out


class _Int8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        ctx.kept = (
            x,
            weight,
            scales,
        )  # bitsandbytes sets attributes too, past the hooks by which checkpointing frees saved tensors
        return functional.linear(x, _rescaled(weight, scales, x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight, scales = ctx.kept
        expanded = _rescaled(weight, scales, x.dtype)
        return (grad.to(x.dtype) @ expanded if ctx.needs_input_grad[0] else None), None, None, None


def _rescaled(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    with named("dequantised"):
        return weight.to(dtype).mul_(scales.unsqueeze(1))


def quantise_experts(model: nn.Module) -> None:
    """Packs every fused expert weight, as `model.quantise` does; in place, on the meta device."""
    for module in {model.get_submodule(name.rpartition(".")[0]): None for name in expert_names(model)}:
        module.register_forward_pre_hook(_expands_once)
        module.register_forward_hook(_has_expanded, always_call=True)
        for leaf, plain in list(module.named_parameters(recurse=False)):
            if plain.dim() == 3:
                packed = torch.empty((plain.numel() + 1) // 2, 1, dtype=torch.uint8, device="meta")
                setattr(module, leaf, nn.Parameter(packed, requires_grad=False))
                parametrize.register_parametrization(module, leaf, NF4Experts(plain.shape, plain.dtype), unsafe=True)


def _expands_once(*_: Any) -> None:
    parametrize._cache_enabled += 1


def _has_expanded(*_: Any) -> None:
    parametrize._cache_enabled -= 1
    if not parametrize._cache_enabled:
        parametrize._cache = {}


def quantise(model: nn.Module, quantization: str, compute: torch.dtype) -> None:
    """Replaces every linear layer but the head, as bitsandbytes does through transformers; in place, on the meta device."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is head or not (isinstance(child, Conv1D) or type(child) is nn.Linear):
                continue  # Falcon's linear layers are a class of their own
            plain = nn.Linear(child.nx, child.nf, device="meta") if isinstance(child, Conv1D) else child
            setattr(parent, name, NF4Linear(plain, compute) if quantization == "nf4" else Int8Linear(plain))
