"""CPU kernels for torch's `varlen_attn`, which has none: the same operators, row by row, so that everything around them
is torch's.

In place of FlashAttention only: `register` gives them to torch for the whole process.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

ATTEND = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
ATTEND_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@cache
def register() -> None:
    """Let `varlen_attn` run on a CPU, forward and backward."""
    from torch.nn.attention import varlen

    varlen._varlen_attn.register_kernel("cpu")(_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(_backward)


def _rows(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, causal: bool, window: Any
) -> Iterator[tuple[slice, list[Tensor], Tensor]]:
    """Yield each row's place, its query, key and value [1, H, t, D] in fp32, and its causal or window mask."""
    before, after = window
    for start, end in pairwise(ends.tolist()):
        row = slice(start, end)
        tensors = [
            x[row].transpose(0, 1).repeat_interleave(query.shape[1] // x.shape[1], 0)[None] for x in (query, key, value)
        ]
        back = torch.arange(end - start)[:, None] - torch.arange(end - start)
        seen = back >= (0 if causal or after == 0 else -(end - start))
        if before >= 0:
            seen &= back <= before
        yield row, [x.float() for x in tensors], torch.zeros(back.shape).masked_fill(~seen, float("-inf"))


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Any = None,
    enable_gqa: bool = False,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    lengths = cu_seq_q.diff()
    assert (
        cu_seq_q.dtype == torch.int32 and int(cu_seq_q[0]) == 0 and int(cu_seq_q[-1]) == query.shape[0] == key.shape[0]
    )
    assert torch.equal(cu_seq_q, cu_seq_k) and max_q == max_k == int(lengths.max()) and type(max_q) is int
    assert query.dtype == key.dtype == value.dtype and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    out = torch.empty_like(query)
    for row, tensors, mask in _rows(query, key, value, cu_seq_q, is_causal, window_size):
        out[row] = ATTEND(*tensors, attn_mask=mask, scale=scale)[0][0].transpose(0, 1)
    return out, torch.zeros(query.shape[1], query.shape[0]), torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    for row, tensors, mask in _rows(query, key, value, cu_seq_q, is_causal, window_size):
        upstream, attended = grad_out[row].transpose(0, 1)[None].float(), ATTEND(*tensors, attn_mask=mask, scale=scale)
        parts = ATTEND_BACKWARD(upstream, *tensors, *attended, 0.0, False, attn_mask=mask, scale=scale)
        for grad, part in zip(grads, parts, strict=True):
            grad[row] = part[0].unflatten(0, (grad.shape[1], -1)).sum(1).transpose(0, 1)
    return grads
