"""The loss: cross-entropy summed over label tokens, with the head run only where there are labels.

For one optimizer step with N label tokens in the whole global batch, each backward pass uses `world_size * sum / N`: data
parallelism averages gradients over ranks, so any split into micro-batches and ranks gives the same gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sft_play.data.collate import IGNORED
from sft_play.model.chunked_head import labels_for_head, total_of

NOT_FOR_THE_MODEL = ("targets", "rows", "tokens")


def token_loss_sum(model: Any, batch: dict[str, Any]) -> Tensor:
    """Returns the summed cross-entropy (nats, fp32, a scalar) of a batch made by `data.collate.Collator`.

    `logits_to_keep` selects positions inside the model's own forward pass, so the logits are [1, K, V] or [B, P, V] and never
    [B, T, V], and the hooks of DDP, ZeRO-3 and FSDP2 fire as usual. A head that `model.chunked_head.chunk_head` changed computes
    the sum itself, chunk by chunk.
    """
    inputs = {name: value for name, value in batch.items() if name not in NOT_FOR_THE_MODEL}
    targets = batch["targets"]
    with labels_for_head(targets) as labels:
        logits = model(**inputs, use_cache=False).logits
    if labels.total is not None:
        return total_of(labels, logits)
    return functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1), ignore_index=IGNORED, reduction="sum"
    )


def label_tokens(batch: dict[str, Any]) -> Tensor:
    """Returns how many targets of a batch count (an integer scalar)."""
    count: Tensor = (batch["targets"] != IGNORED).sum()
    return count


def all_sum(values: Tensor) -> Tensor:
    """Returns the sum over all ranks; `values` itself in a single process."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(values)
    return values
