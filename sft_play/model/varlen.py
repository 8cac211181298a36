"""Attention over rows of unlike length in one line, without a mask: torch's own FlashAttention on GPUs, one call per row on CPUs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from sft_play.plan.layouts import VARLEN


def register() -> None:
    """Makes `attn_implementation="varlen"` known to transformers. Its mask interface is not told, so that no mask is ever built."""
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
    cu_seq_lens_q: Tensor | tuple[int, ...] | None = None,
    max_length_q: int = 0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Returns [1, T, H, D] for `query` [1, H, T, D], `key` and `value` [1, K, T, D], row i from `cu_seq_lens_q[i]` to `[i + 1]`.

    A token sees those before it in its row, `sliding_window` of them at most, itself included. `data.collate.Collator` makes the
    lengths, on a CPU as numbers. The plan keeps to `sdpa` or `eager` what this kernel does not have: soft caps, sinks, dropout, a cache of keys.
    """
    assert cu_seq_lens_q is not None and attention_mask is None, "this batch lacks the lengths of its rows"
    assert not dropout and softcap is None and s_aux is None, f"`varlen` does not compute {type(module).__name__}"
    if isinstance(cu_seq_lens_q, tuple):
        return _row_by_row((query, key, value), cu_seq_lens_q, scaling, sliding_window), None
    from torch.nn.attention import varlen  # imports torch's compiler: for runs that use it

    device = query.device.type
    # As autocast casts for sdpa: norms of queries and keys with fp32 weights return fp32.
    computed = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    query_THD, key_TKD, value_TKD = (states[0].transpose(0, 1).to(computed) for states in (query, key, value))
    found: Any = varlen.varlen_attn(
        query_THD, key_TKD, value_TKD, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling, enable_gqa=True,
        window_size=(sliding_window - 1 if sliding_window else -1, 0),
    )  # fmt: skip
    return found[None], None


def _row_by_row(
    states: tuple[Tensor, Tensor, Tensor], ends: tuple[int, ...], scaling: float | None, window: int | None
) -> Tensor:
    """Returns [1, T, H, D]. Only a row that is longer than the window has a mask, of its own size."""
    found = []
    for row in zip(*(state.split([end - start for start, end in pairwise(ends)], 2) for state in states), strict=True):
        tokens = row[0].shape[2]
        mask = torch.ones(tokens, tokens, dtype=torch.bool).tril().triu(1 - window) if window and tokens > window else None
        part = nn.functional.scaled_dot_product_attention(*row, mask, is_causal=mask is None, scale=scaling, enable_gqa=True)
        found.append(part.transpose(1, 2))
    return torch.cat(found, 1)
