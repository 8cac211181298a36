"""One of several ranks that hold slices of a line: run by `test_sequence_parallel.py`.

    torchrun -m tests.numerics.slice_ranks FOLDER FAMILY...

`FOLDER/RANK.json` gets a JSON object: of each family the relative deviation of logits and gradients from the whole
line's in one process, and that of the other rows' logits where a row has another token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

from sft_play.data.batches import Collator
from sft_play.model import kernels
from sft_play.model.parallel import share_heads
from sft_play.training.loss import NOT_FOR_THE_MODEL, token_loss_sum
from sft_play.training.ranks import Ranks, group_of
from tests.families import tiny_model
from tests.numerics.rank_processes import answer

ROWS = [[5, 9, 11, 30, 7, 21, 8], [6, 40], [33], [17, 3, 3, 60, 61, 62, 63, 64, 65, 12, 11], [44], list(range(50, 73))]
"""Some longer than windows, chunks and the sparse selection of the tiny models, some of one token."""


def batch_of(collate: Collator, first: int) -> tuple[Any, dict[str, Any]]:
    """Return the batch of all rows, of which the first begins with token `first`, and what the model gets to compute
    all logits.
    """
    rows = [[first, *ROWS[0][1:]], *ROWS[1:]]
    batch = collate([{"input_ids": row, "labels": row, "row": i} for i, row in enumerate(rows)])
    return batch, {name: value for name, value in batch.items() if name not in (*NOT_FOR_THE_MODEL, "logits_to_keep")}


def computed(model: Any, ranks: Ranks, first: int = 5) -> tuple[Tensor, Tensor]:
    """Return the logits [T, V] of all positions and the gradient of the loss, each of all ranks' slices together."""
    batch, inputs = batch_of(Collator("flattened", 0, "varlen", "cpu", ranks.part), first)
    model.zero_grad()
    token_loss_sum(model, batch).backward()
    gradient = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits[0]
    if ranks.group_size == 1:
        return logits, gradient
    parts = [torch.empty_like(logits) for _ in range(ranks.world)]
    distributed.all_gather(parts, logits.contiguous())
    distributed.all_reduce(gradient)
    return torch.cat(parts)[: sum(map(len, ROWS))], gradient


def deviations(kind: str, ranks: Ranks, group: Any) -> dict[str, Any]:
    """Return the figures of a family that the module's docstring describes."""
    kernels.register()
    model = tiny_model(kind, attention="varlen").train()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(3)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    alone = computed(model, Ranks())
    share_heads(group)
    mine, other = computed(model, ranks), computed(model, ranks, first=6)
    worst = max(float((a - b).norm() / b.norm()) for a, b in zip(mine, alone, strict=True))
    own = len(ROWS[0])
    return {
        "worst": worst,
        "leak": float((mine[0][own:] - other[0][own:]).norm() / mine[0][own:].norm()),
        "changed": not torch.equal(mine[0][:own], other[0][:own]),
    }


def work(rank: int, world: int, families: list[str]) -> dict[str, Any]:
    ranks = Ranks(rank, world, group_size=world)
    group = group_of(ranks, 60)
    return {kind: deviations(kind, ranks, group) for kind in families}


if __name__ == "__main__":
    answer(work)
