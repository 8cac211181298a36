"""One rank's training step under the tracker: the loss that training uses, backward, clipping, update, release."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers.masking_utils as masks
from torch import Tensor, nn
from transformers.integrations import moe

from sft_play.data.batches import Batch, lengths_of
from sft_play.plan.layouts import BY_LENGTHS
from sft_play.plan.trace_case import Case
from sft_play.trace.tracker import StorageTracker
from sft_play.training.loss import token_loss_sum

FUSED = "adamw_torch_fused"
MOMENTS = (
    "forward first", "forward middle", "forward last", "forward head", "backward head", "backward last", "backward middle", "backward first",
    "update",
)  # fmt: skip


def batch_of(case: Case, device: str) -> Batch:
    """Returns the worst micro-batch: `rows` rows of `row_tokens` tokens, `labels` positions with a target."""
    if case.layout == "flattened":
        length = case.rows * case.row_tokens
        row = case.row_tokens // 2 if case.packed else case.row_tokens  # of a pack's two rows
        positions = (torch.arange(length, device=device) % max(1, row))[None]
        ids = torch.zeros((1, length), dtype=torch.long, device=device)
        keep, targets = _kept(min(case.labels, length), length, 1, device)
        batch = {"input_ids": ids, "position_ids": positions, "logits_to_keep": keep, "targets": targets[0]}
        if case.attention in BY_LENGTHS:
            lengths = lengths_of([*range(0, length, max(1, row)), length], max(1, row), case.device)
            batch |= {name: value.to(device) if isinstance(value, Tensor) else value for name, value in lengths.items()}
        return batch
    ids = torch.zeros((case.rows, case.row_tokens), dtype=torch.long, device=device)
    keep, targets = _kept(min(-(-case.labels // case.rows), case.row_tokens), case.row_tokens, case.rows, device)
    batch = {"input_ids": ids, "logits_to_keep": keep, "targets": targets}
    if case.layout == "unmasked":
        return batch
    mask = torch.ones_like(ids)
    if case.rows > 1:
        mask[-1, -1] = 0  # rows of unequal length: attention needs a mask
    return batch | {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


def _kept(count: int, length: int, rows: int, device: str) -> tuple[Tensor, Tensor]:
    """Returns label positions [K] and targets [rows, K]."""
    count = max(1, count)
    return torch.arange(length - count, length, device=device), torch.zeros((rows, count), dtype=torch.long, device=device)


@contextlib.contextmanager
def real_branches(case: Case) -> Iterator[None]:
    """Makes transformers' mask code take the branches that real data take; for fake tensors it takes those of a compiler."""
    packed, padded = case.layout == "flattened" and (case.rows > 1 or case.packed), case.layout == "padded" and case.rows > 1
    find, ignore = masks.find_packed_sequence_indices, masks._ignore_causal_mask_sdpa

    def found(position_ids: Tensor) -> Tensor | None:
        first = position_ids[:, :1] - 1
        indices = (torch.diff(position_ids, prepend=first, dim=-1) != 1).cumsum(-1)
        return indices if packed else None

    def ignored(padding_mask: Any, _q: Any, kv_length: Any, _q_offset: Any, _kv_offset: Any, local: Any = None) -> bool:
        if local is not None and kv_length >= local:
            return False
        return padding_mask is None or not padded

    def grouped(_input: Tensor, weight: Tensor, _offsets: Tensor) -> bool:
        return weight.dtype == torch.bfloat16  # fake tensors refuse others; the fallback's results are as large

    usable = moe._can_use_grouped_mm
    masks.find_packed_sequence_indices, masks._ignore_causal_mask_sdpa, moe._can_use_grouped_mm = found, ignored, grouped
    try:
        yield
    finally:
        masks.find_packed_sequence_indices, masks._ignore_causal_mask_sdpa, moe._can_use_grouped_mm = find, ignore, usable


def optimizer_of(case: Case, parameters: list[nn.Parameter]) -> torch.optim.Optimizer | None:
    """Returns the optimizer that transformers would build, or `None` where its states are counted by formula."""
    if case.optim == "none":
        return None
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True if case.optim == FUSED else None)


class StepTrace:
    """Runs steps of a model under a tracker and names their moments by the layer that runs."""

    def __init__(self, model: nn.Module, layers: list[nn.Module], case: Case, tracker: StorageTracker) -> None:
        self.model, self.layers, self.case, self.tracker = model, layers, case, tracker
        self.backward = False
        self.trained = [p for p in model.parameters() if p.requires_grad]
        for index, layer in enumerate(layers):
            where = "first" if index == 0 else "last" if index == len(layers) - 1 else "middle"
            layer.register_forward_pre_hook(self._entering(where))
            layer.register_forward_hook(self._left(where, is_last=index == len(layers) - 1))
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self._gradient)

    def _entering(self, where: str) -> Callable[..., None]:
        def note(_module: nn.Module, _arguments: Any) -> None:
            if not self.backward:
                self.tracker.moment = f"forward {where}"

        return note

    def _left(self, where: str, *, is_last: bool) -> Callable[..., None]:
        def note(_module: nn.Module, _arguments: Any, output: Any) -> None:
            if self.backward:
                return
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:
                hidden.register_hook(lambda _: self._returning(where))
            if is_last:
                self.tracker.moment = "forward head"

        return note

    def _returning(self, where: str) -> None:
        self.tracker.moment = f"backward {where}"
        self.tracker.part = "recompute" if self.case.gradient_checkpointing else "workspace"

    def _gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.tracker.hold(parameter.grad, "gradients")

    def micro_step(self, batch: Batch, tokens: Tensor) -> None:
        """Forward and backward pass of one micro-batch."""
        self.tracker.part, self.backward = "activations", False
        self.tracker.moment = "forward first"
        loss = token_loss_sum(self.model, batch) * 1 / tokens
        self.backward = True
        self.tracker.moment, self.tracker.part = "backward head", "workspace"
        loss.backward()

    def update(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Clips, updates and releases gradients."""
        self.tracker.moment, self.tracker.part = "update", "workspace"
        if self.case.clips:
            torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        if optimizer is not None:
            optimizer.step()
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        self.tracker.hold(value, "optimizer")
        for parameter in self.trained:
            parameter.grad = None

    def run(self, batch: Batch) -> None:
        """The second optimizer step's last micro-step: of all it holds the most. Gradients and states before it are held, not computed."""
        tokens = torch.ones((), dtype=torch.long, device=batch["input_ids"].device)
        optimizer = optimizer_of(self.case, self.trained)
        self._hold_gradients()
        self.update(optimizer)
        if self.case.accumulates:
            self._hold_gradients()
        self.micro_step(batch, tokens)
        self.update(optimizer)

    def _hold_gradients(self) -> None:
        for parameter in self.trained:
            parameter.grad = torch.zeros_like(parameter)
            self._gradient(parameter)
