"""One rank's training step, every storage of it followed: what is held at the worst moment, and what it is for."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import transformers.masking_utils as masks
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers.integrations import moe

from sft_play.config.optimizers import OPTIMIZERS
from sft_play.data import IGNORED
from sft_play.data.batches import Batch, Collator
from sft_play.model.objective import FACTORS, Objective
from sft_play.plan.sources import Case
from sft_play.training.loss import token_loss_sum
from sft_play.training.muon import MuonWithAdamW


def batch_of(case: Case, device: str) -> Batch:
    """Return the worst micro-batch as training makes it: `labels` tokens at the ends of rows are trained; a pack has
    two rows.
    """
    count, length = (2 * case.rows, case.row_tokens // 2) if case.packed else (case.rows, case.row_tokens)
    trained = [min(length - 1, (case.labels + place) // count) for place in range(count)]
    rows = [{"input_ids": [0] * length, "labels": [IGNORED] * (length - many) + [0] * many} for many in trained]
    if case.layout == "padded" and count > 1:  # rows of unequal length: attention needs a mask
        rows[0] = {name: values[1:] for name, values in rows[0].items()}
    batch = Collator(case.layout, 0, case.attention, case.device)(rows)
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


@contextlib.contextmanager
def real_branches(case: Case) -> Iterator[None]:
    """Make transformers' mask code take the branches that real data take; for fake tensors it takes those of a
    compiler.
    """
    packed, padded = (
        case.layout == "flattened" and (case.rows > 1 or case.packed),
        case.layout == "padded" and case.rows > 1,
    )

    def positions(position_ids: Tensor) -> Tensor | None:
        first = position_ids[:, :1] - 1
        indices = (torch.diff(position_ids, prepend=first, dim=-1) != 1).cumsum(-1)
        return indices if packed else None

    def ignored(padding_mask: Any, _q: Any, kv_length: Any, _q_offset: Any, _kv_offset: Any, local: Any = None) -> bool:
        if local is not None and kv_length >= local:
            return False
        return padding_mask is None or not padded

    def grouped(_input: Tensor, weight: Tensor, _offsets: Tensor) -> bool:
        return weight.dtype == torch.bfloat16  # fake tensors refuse others; the fallback's results are as large

    with (
        patch.object(masks, "find_packed_sequence_indices", positions),
        patch.object(masks, "_ignore_causal_mask_sdpa", ignored),
        patch.object(moe, "_can_use_grouped_mm", grouped),
    ):
        yield


class StepTrace:
    """Runs steps of a model under a tracker and names their moments by the layer that runs."""

    def __init__(self, model: nn.Module, layers: list[nn.Module], case: Case, tracker: StorageTracker) -> None:
        self.model, self.layers, self.case, self.tracker = model, layers, case, tracker
        self.backward = False
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.objective = Objective(factor=FACTORS[case.loss], smoothing=case.label_smoothing)
        for index, layer in enumerate(layers):
            where = "first" if index == 0 else "last" if index == len(layers) - 1 else "middle"
            layer.register_forward_pre_hook(partial(self._enter, where))
            layer.register_forward_hook(partial(self._leave, where))
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self._gradient)

    def _enter(self, where: str, _layer: nn.Module, _arguments: Any) -> None:
        if not self.backward:
            self.tracker.moment = f"forward {where}"

    def _leave(self, where: str, layer: nn.Module, _arguments: Any, output: Any) -> None:
        if self.backward:
            return
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self._returning(where))
        if layer is self.layers[-1]:
            self.tracker.moment = "forward head"

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
        loss = token_loss_sum(self.model, batch, self.objective) * 1 / tokens
        self.backward = True
        self.tracker.moment, self.tracker.part = "backward head", "workspace"
        loss.backward()

    def update(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Clip, update and release gradients."""
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
        """The second optimizer step's last micro-step: of all it holds the most. Gradients and states before it are
        held, not computed.
        """
        tokens = torch.ones((), dtype=torch.long, device=batch["input_ids"].device)
        optimizer: torch.optim.Optimizer | None = None  # where its states are counted by formula
        if self.case.optim != "none":
            fused = True if self.case.optim != "adamw_torch" else None
            optimizer = torch.optim.AdamW(self.trained, lr=1e-4, fused=fused)
            if OPTIMIZERS[self.case.optim].matrices:
                optimizer = MuonWithAdamW(optimizer, self.model)
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


CUDA_ROUNDING = 512
"""The smallest block of CUDA's caching allocator, and the step that sizes are rounded up to."""
ATTENTION_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
VARLEN_BACKWARD = "torch_attn._varlen_attn_backward.default"


aten = torch.ops.aten
BY_SHAPE = frozenset({
    aten._to_copy.default, aten._unsafe_view.default, aten.add_.Tensor, aten.bmm.default, aten.clone.default,
    aten.copy_.default, aten.detach.default, aten.expand.default, aten.mm.default, aten.mul_.Tensor,
    aten.new_zeros.default, aten.select.int, aten.slice.Tensor, aten.slice_backward.default, aten.squeeze.dim,
    aten.t.default, aten.transpose.int, aten.unsqueeze.default, aten.view.default,
})  # fmt: skip
"""Two operations of three, whose results' shapes follow from those of their arguments without exception, and in C++:
three times as fast as a fake mode's bookkeeping.
"""


def _by_shape(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what a fake mode would."""
    tensors = [tensor for tensor in args if isinstance(tensor, Tensor)]
    first = tensors[0]
    if kwargs.get("device") or any(
        type(tensor) is not FakeTensor or tensor.constant is not None or tensor.fake_device != first.fake_device
        for tensor in tensors
    ):
        return func(*args, **kwargs)
    with in_kernel_invocation_manager(first.fake_mode):
        out = func(*args, **kwargs)
    return out if out is first else FakeTensor(first.fake_mode, out, first.fake_device)


BEFORE = "before"
"""Moment before the step, in which only what it starts with is made."""
HOST = "host"
"""Part of what a GPU would not hold; it is not counted."""
_named: list[str] = []


@contextlib.contextmanager
def count_as(part: str) -> Iterator[None]:
    """Count what is created inside under `part`, in whatever tracker is on."""
    _named.append(part)
    try:
        yield
    finally:
        _named.pop()


@dataclass(kw_only=True, slots=True)
class Peak:
    """The most that was held during one kind of operation in a moment of a step."""

    total: int = 0
    parts: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Block:
    size: int
    part: str


class StorageTracker(TorchDispatchMode):
    """Counts storages by weak references, so that memory is released in the count when it really is.

    Works on real and on fake tensors alike. `device` is the device that is planned for: on `cuda` sizes are rounded as
    its allocator does, and what its kernels need in addition to the CPU's is added (memory facts A.2: flash attention's
    backward pass).
    """

    def __init__(self, *, device: str, logit_width: int) -> None:
        super().__init__()
        self.cuda = device == "cuda"
        self.logit_width = logit_width
        self.held = 0
        self.parts: dict[str, int] = {}
        self.places: dict[str, dict[str, Peak]] = {}
        """Moment -> kind of operation -> the most that was held during such an operation."""
        self.moment = BEFORE
        self.part = "activations"
        self._blocks: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def hold(self, tensor: Tensor, part: str) -> None:
        """Count a tensor's storage under `part` from now on; one that is counted already only changes its part."""
        storage = tensor.untyped_storage()
        entry = self._blocks.get(storage)
        if entry is not None:
            block: _Block = entry[0]
            self._add(block.part, -block.size)
            block.part = part
            self._add(part, block.size)
            return
        size = storage.size()
        if self.cuda:
            size = -(-size // CUDA_ROUNDING) * CUDA_ROUNDING
        block = _Block(size, part)
        self._blocks[storage] = (block, weakref.ref(storage, lambda _: self._release(block)))
        self._add(part, size)
        self.held += size

    def part_of(self, tensor: Tensor) -> str | None:
        """Return what a tensor's storage is counted under."""
        entry = self._blocks.get(tensor.untyped_storage())
        return entry[0].part if entry else None

    def _add(self, part: str, size: int) -> None:
        self.parts[part] = self.parts.get(part, 0) + size

    def _release(self, block: _Block) -> None:
        self.held -= block.size
        self._add(block.part, -block.size)

    def mark(self, operation: str, extra: int = 0) -> None:
        """Note what is held now, with `extra` bytes that live only inside the operation."""
        peak = self.places.setdefault(self.moment, {}).setdefault(operation, Peak())
        total = self.held + extra
        if total > peak.total:
            peak.total, peak.parts = total, dict(self.parts)
            if extra:
                peak.parts["workspace"] = peak.parts.get("workspace", 0) + extra

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # two calls of three: C++ asks a fake tensor for its device this way
            return args[0].fake_device
        out = _by_shape(func, args, kwargs or {}) if func in BY_SHAPE else func(*args, **(kwargs or {}))
        name = str(func)
        part = _named[-1] if _named else self.part
        if name.startswith("aten._to_copy") and self.part_of(args[0]) in ("frozen", "trained", "adapters"):
            part = "casts"
        for tensor in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if part != HOST and isinstance(tensor, Tensor) and self._blocks.get(tensor.untyped_storage()) is None:
                wide = tensor.dim() > 0 and tensor.shape[-1] == self.logit_width
                self.hold(tensor, "logits" if wide else part)
        self.mark(name, self._inside(name, args))
        return out

    def _inside(self, name: str, args: Any) -> int:
        """Return bytes that a CUDA kernel, unlike the CPU's, needs only while it runs.

        Flash attention's backward pass accumulates dQ in fp32, padded to 128 rows and 32 columns, and one fp32 sum
        per row; with grouped heads it makes dK and dV for all heads first (flash-attention's `mha_bwd`).
        """
        if not self.cuda or name not in (ATTENTION_BACKWARD, VARLEN_BACKWARD):
            return 0
        query, key = args[1], args[2]
        if name == VARLEN_BACKWARD:  # [T, H, D], and one such padding for each row of the line
            tokens, heads, width = query.shape
            padded = tokens + 128 * (args[6].shape[0] - 1)
        else:
            batch, heads, length, width = query.shape
            tokens, padded = batch * length, batch * -(-length // 128) * 128
        inside = 4 * heads * padded * (-(-width // 32) * 32 + 1)
        if key.shape[1] != heads:
            inside += 2 * heads * tokens * width * query.element_size()
        return int(inside)
