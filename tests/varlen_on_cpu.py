"""CPU kernels for torch's `varlen_attn`, which has none: the same operators, row by row, so that everything around them is torch's.

In place of FlashAttention only: `register` gives them to torch for the whole process.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def register() -> None:
    """Lets `varlen_attn` run on a CPU, forward and backward."""
    from torch.nn.attention import varlen

    varlen._varlen_attn.register_kernel("cpu")(_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(_backward)


def _rows(
    query_THD: Tensor, key_TKD: Tensor, ends: Tensor, causal: bool, scale: float | None, window: Any
) -> Iterator[tuple[slice, Tensor]]:
    """Yields each row's place and its attention weights [H, t, t]: causal, or the window's `left` tokens before and `right` after."""
    left, right = window
    groups = query_THD.shape[1] // key_TKD.shape[1]
    for start, end in zip(ends.tolist(), ends.tolist()[1:], strict=False):
        row = slice(start, end)
        query, key = query_THD[row].transpose(0, 1).float(), key_TKD[row].transpose(0, 1).repeat_interleave(groups, 0).float()
        scores = query @ key.transpose(1, 2) * (query.shape[-1] ** -0.5 if scale is None else scale)
        back = torch.arange(end - start)[:, None] - torch.arange(end - start)
        seen = back >= (0 if causal or right == 0 else -(end - start))
        if left >= 0:
            seen &= back <= left
        yield row, scores.masked_fill(~seen, float("-inf")).softmax(-1)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, is_causal: bool = False,
    scale: float | None = None, window_size: Any = None, enable_gqa: bool = False, *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    lengths = cu_seq_q.diff()
    assert cu_seq_q.dtype == torch.int32 and int(cu_seq_q[0]) == 0 and int(cu_seq_q[-1]) == query.shape[0] == key.shape[0]
    assert torch.equal(cu_seq_q, cu_seq_k) and max_q == max_k == int(lengths.max()) and type(max_q) is int
    assert query.dtype == key.dtype == value.dtype and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    out, groups = torch.empty_like(query), query.shape[1] // key.shape[1]
    for row, weights in _rows(query, key, cu_seq_q, is_causal, scale, window_size):
        values = value[row].transpose(0, 1).repeat_interleave(groups, 0).float()
        out[row] = (weights @ values).transpose(0, 1).to(out.dtype)
    sums = torch.zeros(query.shape[1], query.shape[0], dtype=torch.float)
    return out, sums, torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor,
    max_q: int, max_k: int, is_causal: bool, rng_state: Tensor, scale: float | None = None, window_size: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    heads, groups = key.shape[1], query.shape[1] // key.shape[1]
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    for row, weights in _rows(query, key, cu_seq_q, is_causal, scale, window_size):
        upstream, asked = grad_out[row].transpose(0, 1).float(), query[row].transpose(0, 1).float()
        keys, values = (x[row].transpose(0, 1).repeat_interleave(groups, 0).float() for x in (key, value))
        of_weights = upstream @ values.transpose(1, 2)
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * factor
        parts = of_scores @ keys, of_scores.transpose(1, 2) @ asked, weights.transpose(1, 2) @ upstream
        for grad, part in zip(grads, parts, strict=True):
            summed = part if grad is grads[0] else part.unflatten(0, (heads, groups)).sum(1)
            grad[row] = summed.transpose(0, 1).to(grad.dtype)
    return grads
