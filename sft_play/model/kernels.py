"""Custom computations: layers that keep the rows of a packed line apart, and the loss in chunks of label positions."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import pairwise
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface

from sft_play.model.objective import Objective
from sft_play.plan.shape import CHANGED_LOGITS, VARLEN

COMPUTE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def register() -> None:
    """Register `attn_implementation="varlen"` with transformers, but not with its masks, so that it builds none."""
    AttentionInterface.register(VARLEN, varlen_attention)


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    row_ends: tuple[int, ...] | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return [1, T, H, V] for `query` [1, H, T, D], `key` [1, K, T, D] and `value` [1, K, T, V].

    Row i is from `row_ends[i]` to `row_ends[i + 1]`, as `data.batches.Collator` computes them. A token attends to those
    before it in its row, at most `sliding_window` with itself, and to its head's sink `s_aux` [H], a score without a
    value. For what this kernel lacks (soft caps, dropout, a key cache) the plan chooses `sdpa` or `eager`.
    """
    assert row_ends is not None and attention_mask is None, "this batch has no row lengths"
    assert not dropout and softcap is None, f"`varlen` does not compute {type(module).__name__}"
    width = value.shape[-1]
    if query.shape[-1] > width:  # latent attention: kernels need heads of one size
        value = functional.pad(value, (0, query.shape[-1] - width))
    if cu_seq_lens_q is None or s_aux is not None:
        return _row_by_row((query, key, value), row_ends, scaling, sliding_window, s_aux)[..., :width], None
    from torch.nn.attention import varlen  # imported here because it imports torch's compiler

    computed = compute_dtype(value)
    query_THD, key_TKD, value_TKD = (states[0].transpose(0, 1).to(computed) for states in (query, key, value))
    # torch 2.10 and 2.11 have no such argument: their kernel accepts fewer key heads without it.
    grouped = {"enable_gqa": True} if "enable_gqa" in signature(varlen.varlen_attn).parameters else {}
    attended: Any = varlen.varlen_attn(
        query_THD,
        key_TKD,
        value_TKD,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(sliding_window - 1 if sliding_window else -1, 0),
        **grouped,
    )
    return attended[None, ..., :width], None


def compute_dtype(states: Tensor) -> torch.dtype:
    """Return the dtype in which a matrix product computes with `states`: autocast's, or their own.

    Attention goes by its values, since query and key norms with fp32 weights return fp32.
    """
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype


def _row_by_row(
    states: tuple[Tensor, Tensor, Tensor],
    ends: tuple[int, ...],
    scaling: float | None,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return attention [1, T, H, D], one row at a time; only rows longer than the window get a mask."""
    outputs = []
    scale = states[0].shape[-1] ** -0.5 if scaling is None else scaling
    first = 0 if sinks is None else 1
    for row in zip(*(state.split([end - start for start, end in pairwise(ends)], 2) for state in states), strict=True):
        queries, keys, values = row if sinks is None else _after_a_sink(row, sinks / scale)
        tokens, mask = queries.shape[2], None
        if window and tokens - first > window:
            mask = torch.ones(tokens, tokens, dtype=torch.bool, device=queries.device).tril().triu(1 - window)
            mask[:, :first] = True
        part = functional.scaled_dot_product_attention(
            queries, keys, values, mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        outputs.append(part[:, :, first:].transpose(1, 2))
    return torch.cat(outputs, 1)


def _after_a_sink(row: tuple[Tensor, ...], sinks: Tensor) -> tuple[Tensor, ...]:
    """Return a row's states with a token in front whose value is 0 and whose score is the head's sink.

    Eight extra dimensions carry that score.
    """
    query, key, value = (functional.pad(state, (0, 8, 1, 0)) for state in row)
    query[..., -1] = sinks[:, None]
    key[..., 0, -1] = 1
    return query, key, value


def keep_rows_apart(model: nn.Module) -> None:
    """Reset layers that carry a state along the line (state spaces, gated delta rules, convolutions) at every row.

    Those of transformers handle row ends only if packages with kernels are installed, and fail otherwise. Here rows of
    similar length (the longest at most 1.42 times the shortest) are computed as a batch, padded at the end, which no
    token attends to.
    """
    for module in model.modules():
        if any(isinstance(child, nn.Conv1d) for child in module.children()):
            module.forward = MethodType(_forward_by_rows, module)


def _forward_by_rows(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    ends: tuple[int, ...] | None = kwargs.pop("row_ends", None)
    forward = partial(type(module).forward, module)
    if ends is None:
        return forward(*args, **kwargs)
    kwargs.pop("cu_seq_lens_q", None)
    line, *others = args or (kwargs.pop("hidden_states"),)
    rows = line[0].split([end - start for start, end in pairwise(ends)])
    similar: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        similar.setdefault(round(2 * math.log2(len(row))), []).append(index)
    outputs = list(rows)
    for indices in similar.values():
        computed = forward(pad_sequence([rows[index] for index in indices], batch_first=True), *others, **kwargs)
        for index, result in zip(indices, computed, strict=True):
            outputs[index] = result[: len(rows[index])]
    return torch.cat(outputs)[None]


FP16_FACTOR = 32.0
"""Factor of gradients in fp16, divided out again in fp32.

The loss scaler's factor comes only later, and the smallest gradients would be lost. The value is about what loss
scaling leaves after dividing by a step's tokens.
"""


@dataclass(kw_only=True, slots=True, eq=False)
class Labels:
    """A chunked head's targets, and its results."""

    targets: Tensor
    """Next tokens [B, P] or [K], `IGNORED` in other places."""
    weights: Tensor | None
    """Of the targets, of the same shape; `None`: all 1."""
    objective: Objective
    total: Tensor | None = None
    """Summed loss (nats, an fp32 scalar without a graph) after the head ran; `None` if no head is chunked."""
    upstream: Tensor | None = None
    """Gradient of the sum, once the backward pass has started."""


_LABELS: ContextVar[Labels | None] = ContextVar("labels", default=None)


@contextlib.contextmanager
def labels_for_head(targets: Tensor, weights: Tensor | None, objective: Objective) -> Iterator[Labels]:
    """Let a chunked head that runs in the body compute the loss of these targets instead of logits."""
    labels = Labels(targets=targets, weights=weights, objective=objective)
    token = _LABELS.set(labels)
    try:
        yield labels
    finally:
        _LABELS.reset(token)


def total_of(labels: Labels, output: Tensor) -> Tensor:
    """Return the summed loss with its graph, which `output`, returned by the model as its logits, only carries."""
    total: Tensor = _Total.apply(output, labels)
    return total


def chunk_head(model: Any, chunk: int) -> None:
    """Make the model's head compute the loss `chunk` positions at a time inside `labels_for_head`.

    Outside it returns logits as before. `model` may have adapters, on the head too.
    """
    head = model.get_output_embeddings()
    forward, change = head.forward, _change_of(model)

    def chunked(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        labels = _LABELS.get()
        if labels is None:
            logits: Tensor = forward(hidden, *args, **kwargs)
            return logits
        weights = [weight for weight in head.parameters() if weight.requires_grad]
        carrier, labels.total = _ChunkedLoss.apply(hidden, labels, forward, change, chunk, *weights)
        return carrier

    head.forward = chunked


@dataclass(frozen=True, kw_only=True, slots=True)
class _Change:
    """The change that a model applies to its head's logits."""

    factor: float = 1.0
    cap: float | None = None

    def apply(self, logits: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the changed logits, modified in place, and the derivative of the change."""
        if self.factor != 1.0:
            logits = logits.mul_(self.factor)
        if self.cap is None:
            return logits, self.factor
        bent = logits.div_(self.cap).tanh_()
        slope = torch.mul(bent, bent).mul_(-self.factor).add_(self.factor)
        return bent.mul_(self.cap), slope


def _change_of(model: Any) -> _Change:
    name = CHANGED_LOGITS.get(model.config.model_type)
    value = getattr(model.config.get_text_config(), name) if name else 1.0
    if name == "final_logit_softcapping":
        return _Change(cap=value)
    return _Change(factor=1 / value if name == "logits_scaling" else value)


class _ChunkedLoss(torch.autograd.Function):
    """Compute (a zero that carries the graph, the summed loss), with gradients while a chunk's logits exist.

    The model may still cap, scale or round the zero, which makes its gradient meaningless: `labels.upstream` is used
    instead.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        labels: Labels,
        head: Callable[[Tensor], Tensor],
        change: _Change,
        chunk: int,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        hidden_KH, targets_K = hidden.reshape(-1, hidden.shape[-1]), labels.targets.reshape(-1)
        weights_K = None if labels.weights is None else labels.weights.reshape(-1)
        needs_grad = any(ctx.needs_input_grad)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_KH = torch.empty_like(hidden_KH) if ctx.needs_input_grad[0] else None
        sums: list[Tensor] = []  # over chunks, in fp32 where there is more than one
        unscaled = _fp16_factor(hidden, weights)
        for start in range(0, hidden_KH.shape[0], chunk):
            part = slice(start, start + chunk)
            with torch.set_grad_enabled(needs_grad):
                part_CH = hidden_KH[part].detach().requires_grad_(grad_KH is not None)
                logits_CV = head(part_CH)
            losses, slope_CV = _losses_and_slope(
                logits_CV,
                targets_K[part],
                None if weights_K is None else weights_K[part],
                labels.objective,
                change,
                unscaled if needs_grad else None,
            )
            total += losses
            if slope_CV is None:
                continue
            inputs = [part_CH, *weights] if grad_KH is not None else list(weights)
            chunk_grads = list(torch.autograd.grad(logits_CV, inputs, slope_CV))
            if grad_KH is not None:
                grad_KH[part] = chunk_grads.pop(0)
            sums = (
                [total.float().add_(added) for total, added in zip(sums, chunk_grads, strict=True)]
                if sums
                else chunk_grads
            )
            del logits_CV, slope_CV, chunk_grads  # before those of the next chunk are made
        of_weights = [total.to(weight.dtype) for total, weight in zip(sums, weights, strict=True)] if sums else []
        ctx.gradients = (None if grad_KH is None else grad_KH.view_as(hidden), *of_weights) if needs_grad else ()
        ctx.labels, ctx.unscaled = labels, unscaled
        ctx.mark_non_differentiable(total)
        return torch.zeros_like(total), total

    @staticmethod
    def backward(ctx: Any, _carrier: Tensor, _total: Tensor) -> tuple[Any, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the chunked loss can be differentiated only once: its gradients are scaled in place")
        (hidden, *weights), ctx.gradients = ctx.gradients, None
        factor = ctx.labels.upstream / ctx.unscaled
        scaled = [None if grad is None else grad.mul_(factor) for grad in (hidden, *weights)]
        return scaled[0], None, None, None, None, *scaled[1:]


class _Total(torch.autograd.Function):
    """Pass the sum from `labels` on, and its gradient back through `labels`, whatever happens to the carrier's."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, labels: Labels) -> Tensor:
        assert labels.total is not None, "the head has run"
        ctx.labels, ctx.like = labels, (carrier.dtype, carrier.device)
        return labels.total.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.labels.upstream = gradient
        dtype, device = ctx.like
        return torch.ones((), dtype=dtype, device=device), None


def _losses_and_slope(
    logits_CV: Tensor,
    targets_C: Tensor,
    weights_C: Tensor | None,
    objective: Objective,
    change: _Change,
    unscaled: float | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the chunk's summed loss, and its gradient for the head's logits times `unscaled`, unless that is `None`.

    It works in place where possible: in one fp32 buffer, and in the logits themselves if they are narrower.
    """
    with torch.no_grad():
        changed, slope = change.apply(logits_CV.detach().float())
        logs = functional.log_softmax(changed, dim=-1)
        del changed
        total, grad = objective.total_and_slope(logs, targets_C, weights_C, slope=unscaled is not None)
        if grad is None or unscaled is None:
            return total, None
        grad = grad if unscaled == 1.0 else grad.mul_(unscaled)
        grad = grad if isinstance(slope, float) and slope == 1.0 else grad.mul_(slope)
        return total, grad.to(logits_CV.dtype)


def _fp16_factor(hidden: Tensor, weights: tuple[Tensor, ...]) -> float:
    """Return the factor of gradients: 1 for a trained head, whose sums are large enough and could overflow."""
    return FP16_FACTOR if compute_dtype(hidden) == torch.float16 and not weights else 1.0
