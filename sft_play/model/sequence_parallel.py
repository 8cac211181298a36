"""Attention over lines that the ranks of a group hold in slices (Ulysses, Jacobs et al. 2023, arXiv 2309.14509).

An all-to-all turns each rank's slice with all heads into the whole line with its share of the heads; `kernels.varlen_attention` computes them
with every row apart, as in one process; another all-to-all turns them back. Everything else in a layer works token by token.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, all_to_all_single
from transformers import AttentionInterface

from sft_play.model.kernels import attention_dtype, varlen_attention
from sft_play.plan.shape import VARLEN


def share_heads(group: ProcessGroup) -> None:
    """Makes `attn_implementation="varlen"` compute lines whose slices lie on the ranks of `group`, from now on in this process."""
    AttentionInterface.register(VARLEN, partial(sliced_attention, group))


def sliced_attention(
    group: ProcessGroup,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    s_aux: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Returns [1, t, H, V], as `varlen_attention` does, of this rank's slice: `query` [1, H, t, D], `key` [1, K, t, D], `value` [1, K, t, V].

    All ranks of the group call it together. `settings` has the lengths of the whole line. N must divide H.
    """
    ranks, dtype = group.size(), attention_dtype(query, value)
    parts = [_by_rank(states.to(dtype), ranks) for states in (query, key, value)]
    sizes = [part.shape[2:] for part in parts]
    line = _exchange(torch.cat([part.flatten(2) for part in parts], 2), group).flatten(0, 1)
    states = line.split([size.numel() for size in sizes], 1)
    query, key, value = (one.unflatten(1, size).transpose(0, 1)[None] for one, size in zip(states, sizes, strict=True))
    sinks = None if s_aux is None else s_aux.chunk(ranks)[group.rank()]
    found, _ = varlen_attention(module, query, key, value, attention_mask, s_aux=sinks, **settings)
    return _exchange(found[0].unflatten(0, (ranks, -1)), group).transpose(0, 1).flatten(1, 2)[None], None


def _by_rank(states: Tensor, ranks: int) -> Tensor:
    """Returns [N, t, H / N, D] of [1, H, t, D]: each rank's heads, repeated where N does not divide them, as grouped attention would."""
    heads = states[0].repeat_interleave(math.lcm(states.shape[1], ranks) // states.shape[1], 0)
    return heads.unflatten(0, (ranks, -1)).transpose(1, 2)


def _exchange(parts: Tensor, group: ProcessGroup) -> Tensor:
    found: Tensor = _AllToAll.apply(parts, group)
    return found


class _AllToAll(torch.autograd.Function):
    """Part i goes to rank i of the group, and rank i's part comes into its place. Gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.forward(ctx, gradients[0], ctx.group), None
