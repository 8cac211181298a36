"""Rows of unlike length in one line, without a mask: attention and recurrent layers that know where each row ends.

Attention is torch's own FlashAttention on GPUs, and one call per row on CPUs and where heads have sinks.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
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
    row_ends: tuple[int, ...] | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Returns [1, T, H, V] for `query` [1, H, T, D], `key` [1, K, T, D] and `value` [1, K, T, V], row i from `row_ends[i]` to `[i + 1]`.

    A token sees those before it in its row, `sliding_window` of them at most, itself included; and its head's sink `s_aux` [H], a
    score without a value. `data.batches.Collator` makes the lengths. The plan keeps to `sdpa` or `eager` what this kernel does not
    have: soft caps, dropout, a cache of keys.
    """
    assert row_ends is not None and attention_mask is None, "this batch lacks the lengths of its rows"
    assert not dropout and softcap is None, f"`varlen` does not compute {type(module).__name__}"
    width = value.shape[-1]
    if query.shape[-1] > width:  # latent attention: kernels want heads of one size
        value = functional.pad(value, (0, query.shape[-1] - width))
    if cu_seq_lens_q is None or s_aux is not None:
        return _row_by_row((query, key, value), row_ends, scaling, sliding_window, s_aux)[..., :width], None
    from torch.nn.attention import varlen  # imports torch's compiler: for runs that use it

    device = query.device.type
    # As autocast casts for sdpa: norms of queries and keys with fp32 weights return fp32.
    computed = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    query_THD, key_TKD, value_TKD = (states[0].transpose(0, 1).to(computed) for states in (query, key, value))
    found: Any = varlen.varlen_attn(
        query_THD, key_TKD, value_TKD, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling, enable_gqa=True,
        window_size=(sliding_window - 1 if sliding_window else -1, 0),
    )  # fmt: skip
    return found[None, ..., :width], None


def _row_by_row(
    states: tuple[Tensor, Tensor, Tensor], ends: tuple[int, ...], scaling: float | None, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Returns [1, T, H, D]. Only a row that is longer than the window has a mask, of its own size."""
    found = []
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
        found.append(part[:, :, first:].transpose(1, 2))
    return torch.cat(found, 1)


def _after_a_sink(row: tuple[Tensor, ...], sinks: Tensor) -> tuple[Tensor, ...]:
    """Returns a row's states with one token more in front, whose value is 0, and whose score, through 8 dimensions more, is the head's sink."""
    query, key, value = (functional.pad(state, (0, 8, 1, 0)) for state in row)
    query[..., -1] = sinks[:, None]
    key[..., 0, -1] = 1
    return query, key, value


def keep_rows_apart(model: nn.Module) -> None:
    """Lets layers that carry a state along the line (state spaces, gated delta rules, convolutions) begin every row without one.

    Those of transformers know the ends of rows only where packages with kernels for it are installed, and fail elsewhere. Here rows of about
    one length (the longest at most 1.42 times the shortest) are computed side by side, padded behind, where no token of theirs looks.
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
    alike: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        alike.setdefault(round(2 * math.log2(len(row))), []).append(index)
    found = list(rows)
    for indices in alike.values():
        computed = forward(pad_sequence([rows[index] for index in indices], batch_first=True), *others, **kwargs)
        for index, result in zip(indices, computed, strict=True):
            found[index] = result[: len(rows[index])]
    return torch.cat(found)[None]
