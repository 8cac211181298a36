"""Faster kernels for the same numbers: Liger's (`train.kernels`), and a linear layer together with its adapter."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from torch.nn import functional

SILU = ("silu", "swish")


def use_kernels(model: Any) -> None:
    """Replaces what Liger has kernels for, the loss apart: ours runs in chunks (`model.chunked_head`). Call it before adapters are added.

    Parameters and names stay. Rotary embeddings are replaced in the family's module, for all models of this process.
    """
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(
        model,
        rope=True,
        rms_norm=True,
        swiglu=model.config.hidden_act in SILU,  # Liger takes it for granted
        cross_entropy=False,
        fused_linear_cross_entropy=False,
    )


# A linear layer with its adapter, the same numbers with fewer passes over memory.
#
# PEFT computes `base(x) + B(A(x)) * scale` as five operations and keeps two results as wide as the layer; over a 4-bit base it also
# copies the result. Here the scale goes to the r-wide side and the sum happens inside the matrix product. Over a plain frozen layer
# one autograd function does all of it, so that both gradients of x meet inside a matrix product too.


QUANTISED = "peft.tuners.lora.bnb"
"""PEFT's module of layers over bitsandbytes' ones; importing it would import bitsandbytes."""


def fuse_adapters(model: nn.Module) -> int:
    """Replaces the forward pass of the model's linear layers with one adapter each; returns how many.

    The modules, their parameters and what is saved stay as they are.
    """
    layers = [module for module in model.modules() if isinstance(module, LoraLayer) and _fusible(module)]
    for layer in layers:
        layer.forward = MethodType(_forward, layer)
    return len(layers)


def _fusible(layer: Any) -> bool:
    """Whether a layer is what `_forward` computes: one adapter over a matrix product, without bias or variant."""
    if type(layer) is not LoraLinear and type(layer).__module__ != QUANTISED:
        return False
    if len(layer.lora_A) != 1 or layer.lora_variant or layer.fan_in_fan_out:
        return False
    (name,) = layer.lora_A
    return layer.lora_A[name].bias is None and layer.lora_B[name].bias is None


def _forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    names, base, device = self.active_adapters, self.base_layer, x.device.type
    autocast = torch.is_autocast_enabled(device)
    computed = torch.get_autocast_dtype(device) if autocast else x.dtype
    plain = type(base) is nn.Linear and not base.weight.requires_grad and (base.bias is None or not base.bias.requires_grad)
    if self.disable_adapters or self.merged or args or kwargs or len(names) != 1:
        return type(self).forward(self, x, *args, **kwargs)
    (name,) = names
    a, b, dropout = self.lora_A[name].weight, self.lora_B[name].weight, self.lora_dropout[name]
    if not autocast and any(weight.dtype != x.dtype for weight in (a, b, *([base.weight] if plain else []))):
        return type(self).forward(self, x, *args, **kwargs)
    a, b, scale = a.to(computed), b.to(computed), self.scaling[name]
    if plain and isinstance(dropout, nn.Identity):
        bias = None if base.bias is None else base.bias.to(computed)
        y_TO = _Fused.apply(x.to(computed).reshape(-1, x.shape[-1]), base.weight.to(computed), bias, a, b, scale)
        return y_TO.view(
            *x.shape[:-1], b.shape[0]
        )  # a view that the function itself returned could not be added to in place (Llama 4)
    y = base(x)
    h_TR = functional.linear(dropout(x).to(computed), a).reshape(-1, a.shape[0])
    y_TO = torch.addmm(y.to(computed).reshape(-1, b.shape[0]), h_TR, b.t(), alpha=scale)
    return y_TO.view(y.shape).to(y.dtype)


class _Fused(torch.autograd.Function):
    """y = x W^T + bias + scale (x A^T) B^T, with gradients for x, A and B; all of one type."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        h_TR = x_TI @ a.t()
        y_TO = x_TI @ weight.t() if bias is None else torch.addmm(bias, x_TI, weight.t())
        y_TO.addmm_(h_TR, b.t(), alpha=scale)
        ctx.save_for_backward(x_TI, h_TR, weight, a, b)
        ctx.scale = scale
        return y_TO

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, h_TR, weight, a, b = ctx.saved_tensors
        grad_TR = (grad_TO @ b).mul_(ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad_TO @ weight).addmm_(grad_TR, a)
        return grad_x, None, None, grad_TR.t() @ x_TI, (grad_TO.t() @ h_TR).mul_(ctx.scale), None
