"""The loss, summed over the label tokens of this rank's micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard
from torch import Tensor
from transformers import TrainingArguments

from sft_play.data import IGNORED, WEIGHTS
from sft_play.data.batches import Batch, Collator, GlobalBatchSampler
from sft_play.model.kernels import labels_for_head, total_of
from sft_play.model.objective import PLAIN, Objective
from sft_play.plan.epoch import row_order
from sft_play.runs.prepared import PreparedSplit, row_integers
from sft_play.training.balance import turns_of
from sft_play.training.loading import begin_loading, prepare_loading
from sft_play.training.ranks import Ranks, TrainContext

NOT_FOR_THE_MODEL = ("targets", WEIGHTS, "rows", "lengths", "tokens")


def token_loss_sum(model: Any, batch: dict[str, Any], objective: Objective = PLAIN) -> Tensor:
    """Return the summed loss (nats, an fp32 scalar) of a batch from `data.batches.Collator`, by `objective`.

    `logits_to_keep` selects positions inside the model's own forward pass, so the logits are [1, K, V] or [B, P, V] and
    never [B, T, V], and the hooks of DDP, ZeRO-3 and FSDP2 fire as usual. A head replaced by `model.kernels.chunk_head`
    computes the sum itself, chunk by chunk.
    """
    inputs = {name: value for name, value in batch.items() if name not in NOT_FOR_THE_MODEL}
    targets, weights = batch["targets"], batch.get(WEIGHTS) if objective.weighted else None
    with labels_for_head(targets, weights, objective) as labels:
        logits = model(**inputs, use_cache=False).logits
    if labels.total is not None:
        return total_of(labels, logits)
    flat = (logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1))
    return objective.total(*flat, None if weights is None else weights.reshape(-1))


def label_tokens(batch: dict[str, Any]) -> Tensor:
    """Return how many targets of a batch count (an integer scalar)."""
    count: Tensor = (batch["targets"] != IGNORED).sum()
    return count


def label_weight(batch: dict[str, Any]) -> Tensor:
    """Return the sum of the weights of a batch's targets, their number where they have none (64-bit, a scalar)."""
    weights: Tensor | None = batch.get(WEIGHTS)
    if weights is None:
        return label_tokens(batch).double()
    return ((batch["targets"] != IGNORED) * weights.double()).sum()


def sums_of(total: Tensor, batch: dict[str, Any]) -> Tensor:
    """Return [summed loss, weight of the label tokens, label tokens] of a batch (64-bit)."""
    return torch.stack([total.detach().double(), label_weight(batch), label_tokens(batch).double()])


IDLE = "idle"
"""Key of a batch, set if it is empty and can be skipped without missing a collective."""


def sampler_of(context: TrainContext, split: PreparedSplit, dataset: Any) -> GlobalBatchSampler:
    """Return the order of this rank's micro-batches, mixed by the sources' weights and packed as the plan says."""
    config, plan = context.config, context.plan
    assert len(dataset) == split.rows, (len(dataset), split.rows)
    lengths: Sequence[int] | None = None
    if plan.pack_tokens:
        lengths = row_integers(split, "lengths.i32")
        if lengths is None:
            lengths = [len(ids) for ids in dataset["input_ids"]]
    return GlobalBatchSampler(
        order=row_order(config.data, split, config.train.seed),
        global_batch=plan.global_batch_size,
        ranks=plan.slots,
        rank=context.ranks.data_rank,
        lengths=lengths or (),
        pack_tokens=plan.pack_tokens,
        turns=turns_of(config, plan),
    )


def train_loader(
    sampler: GlobalBatchSampler, dataset: Any, collator: Collator, args: TrainingArguments
) -> DataLoaderShard:
    """Return the loader of this rank's micro-batches, marked so that accelerate does not divide them again."""
    if args.dataloader_num_workers:
        prepare_loading()
    loader = DataLoaderShard(
        dataset,
        device=args.device,
        batch_sampler=sampler,
        collate_fn=collator,
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory,
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        worker_init_fn=begin_loading if args.dataloader_num_workers else None,
        _non_blocking=args.dataloader_pin_memory,
    )
    loader._is_accelerate_prepared = True
    return loader


def step_totals(ranks: Ranks, batches: list[Batch], *, together: bool) -> Tensor:
    """Return the weight of an optimizer step's label tokens over all ranks (1 without any), and mark the
    micro-batches that are left out.

    If ranks make every micro-step `together`, those are left out that are empty on every rank; otherwise all that are
    empty on this one except the last, in which gradients are reduced. One small collective operation: [weight,
    rows of micro-step 0, rows of micro-step 1, ...]; a single process needs none.
    """
    weights = [label_weight(batch) for batch in batches if batch["rows"]]
    weight = torch.stack(weights).sum() if weights else torch.zeros((), dtype=torch.double, device=ranks.device)
    rows = [len(batch["rows"]) for batch in batches]
    if ranks.world > 1:
        totals = ranks.total(torch.cat([weight[None].to(ranks.device), torch.tensor(rows).to(ranks.device)]))
        weight, all_rows = totals[0] / ranks.copies, totals[1:].tolist()
        rows = all_rows if together else rows[:-1] + all_rows[-1:]
    for batch, count in zip(batches, rows, strict=True):
        batch[IDLE] = count == 0
    return torch.where(weight > 0, weight, 1.0).float()
