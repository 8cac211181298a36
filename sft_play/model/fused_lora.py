"""One autograd function for a linear layer with its adapter: the same numbers with fewer passes over memory.

PEFT computes `base(x) + B(A(x)) * scale` as five operations and keeps two results as wide as the layer. Here the scale goes to
the r-wide side and the sum happens inside the matrix product.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn


def fuse_adapters(model: nn.Module) -> int:
    """Replaces the forward pass of the model's plain adapter layers; returns how many.

    The modules, their parameters and what is saved stay as they are.
    """
    layers = [module for module in model.modules() if isinstance(module, LoraLinear) and _plain(module)]
    for layer in layers:
        layer.forward = MethodType(_forward, layer)
    return len(layers)


def _plain(layer: Any) -> bool:
    """Whether a layer is what the function computes: one adapter, no dropout, bias or variant, over an unquantised `Linear`."""
    base = layer.base_layer
    if type(base) is not nn.Linear or len(layer.lora_A) != 1 or layer.lora_variant:
        return False
    (name,) = layer.lora_A
    a, b = layer.lora_A[name], layer.lora_B[name]
    weights = (base.weight, a.weight, b.weight)
    return (
        type(layer) is LoraLinear
        and isinstance(layer.lora_dropout[name], nn.Identity)
        and not layer.fan_in_fan_out
        and a.bias is None
        and b.bias is None
        and not base.weight.requires_grad
        and (base.bias is None or not base.bias.requires_grad)
        and all(weight.dtype == torch.float32 for weight in weights)
    )


def _forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    names = self.active_adapters
    if self.disable_adapters or self.merged or args or kwargs or len(names) != 1 or x.dtype != torch.float32:
        return LoraLinear.forward(self, x, *args, **kwargs)
    (name,) = names
    base = self.base_layer
    return _Fused.apply(x, base.weight, base.bias, self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name])


class _Fused(torch.autograd.Function):
    """y = x W^T + bias + scale (x A^T) B^T, with gradients for x, A and B."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        x_TI = x.reshape(-1, x.shape[-1])
        h_TR = x_TI @ a.t()
        y_TO = x_TI @ weight.t() if bias is None else torch.addmm(bias, x_TI, weight.t())
        y_TO.addmm_(h_TR, b.t(), alpha=scale)
        ctx.save_for_backward(x_TI, h_TR, weight, a, b)
        ctx.scale = scale
        return y_TO.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, h_TR, weight, a, b = ctx.saved_tensors
        grad_TO = grad.reshape(-1, grad.shape[-1])
        grad_TR = (grad_TO @ b).mul_(ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad_TO @ weight).addmm_(grad_TR, a).view(*grad.shape[:-1], weight.shape[1])
        return grad_x, None, None, grad_TR.t() @ x_TI, (grad_TO.t() @ h_TR).mul_(ctx.scale), None
