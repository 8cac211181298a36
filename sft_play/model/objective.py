"""What is minimised for each label token: a new loss is a row of `FACTORS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sft_play.config.schema import TrainConfig
from sft_play.data import IGNORED

Factor = Callable[[Tensor], Tensor]
FACTORS: Mapping[str, Factor | None] = {
    "nll": None,
    "dft": torch.exp,  # Wu et al. 2025, arXiv 2508.05629
}
"""Word of `train.loss` -> the constant factor of a token's cross-entropy, from the log-probability [N] of its target;
other losses have the factor 1.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """The loss of a label token: its cross-entropy with a target that may be smoothed, times a factor."""

    factor: Factor | None = None
    smoothing: float = 0.0
    """Share of each target that is spread evenly over the vocabulary (Szegedy et al. 2016, arXiv 1512.00567)."""
    weighted: bool = False
    """Whether tokens count by the weights of their rows; else all alike."""

    def total(self, logits_NV: Tensor, targets_N: Tensor, weights_N: Tensor | None) -> Tensor:
        """Return the sum over all targets but `IGNORED`, with its graph (fp32, a scalar)."""
        if self.factor is None and not self.smoothing:
            losses_N = functional.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction="none")
            # Added up in one way with and without weights: weights of 0.5 halve the sum to the bit.
            return (losses_N if weights_N is None else losses_N * weights_N).sum()
        total: Tensor = _SumOverRanks.apply(logits_NV, targets_N, weights_N, self)
        return total

    def total_and_slope(
        self, logs_NV: Tensor, targets_N: Tensor, weights_N: Tensor | None, *, slope: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the sum of log-probabilities without a graph, and its gradient [N, V] with respect to the logits."""
        index, scale = targets_N.clamp(min=0)[:, None], targets_N != IGNORED
        if weights_N is not None:
            scale = scale * weights_N
        picked = logs_NV.gather(-1, index)[:, 0]
        if self.factor is not None:
            scale = scale * self.factor(picked)
        losses = (1 - self.smoothing) * picked + self.smoothing * logs_NV.mean(-1) if self.smoothing else picked
        total = -(losses * scale).sum()
        if not slope:
            return total, None
        own = torch.full_like(index, self.smoothing - 1, dtype=logs_NV.dtype)
        grad = logs_NV.exp_().scatter_add_(-1, index, own)
        if self.smoothing:
            grad = grad.sub_(self.smoothing / logs_NV.shape[-1])
        return total, grad.mul_(scale[:, None])


class _SumOverRanks(torch.autograd.Function):
    """The sum; its gradient replaces the log-probabilities, so that it needs as much memory as cross-entropy."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, targets_N: Tensor, weights_N: Tensor | None, objective: Objective
    ) -> Tensor:
        logs_NV = torch.log_softmax(logits_NV, dim=-1)
        total, ctx.slope = objective.total_and_slope(logs_NV, targets_N, weights_N, slope=ctx.needs_input_grad[0])
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.slope * gradient, None, None, None


PLAIN = Objective()
"""What evaluations measure, whatever is minimised: of every token alike."""


def objective_of(train: TrainConfig) -> Objective:
    """Return what a configuration minimises."""
    return Objective(factor=FACTORS[train.loss], smoothing=train.label_smoothing_factor, weighted=True)
