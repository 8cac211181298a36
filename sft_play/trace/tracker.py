"""Follows every storage that a step creates and frees: what is held at the worst moment, and what it is for."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

CUDA_ROUNDING = 512
"""The smallest block of CUDA's caching allocator, and the step that sizes are rounded up to."""
ATTENTION_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
VARLEN_BACKWARD = "torch_attn._varlen_attn_backward.default"


_named: list[str] = []


@contextlib.contextmanager
def named(part: str) -> Iterator[None]:
    """Counts what is created inside under `part`, in whatever tracker is on."""
    _named.append(part)
    try:
        yield
    finally:
        _named.pop()


@dataclass(kw_only=True, slots=True)
class Peak:
    """The most that was held during one moment of a step."""

    total: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    operation: str = ""
    """Operation that ran when it was reached."""


@dataclass(slots=True)
class _Block:
    size: int
    part: str


class StorageTracker(TorchDispatchMode):
    """Counts storages by weak references, so that memory is given back in the count when it really is.

    Works on real and on fake tensors alike. `device` is the device that is planned for: on `cuda` sizes are rounded as its
    allocator does, and what its kernels need beside the CPU's is added (memory facts A.2: flash attention's backward pass).
    """

    def __init__(self, *, device: str, logit_width: int, log: bool = False) -> None:
        super().__init__()
        self.cuda = device == "cuda"
        self.logit_width = logit_width
        self.held = 0
        self.parts: dict[str, int] = {}
        self.peaks: dict[str, Peak] = {}
        self.moment = "start"
        self.part = "activations"
        self.events: list[tuple[int, int, int]] | None = [] if log else None
        """(+1 or -1, block, bytes) of every allocation and release, for a replay of the allocator."""
        self._blocks: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._next = 0

    def hold(self, tensor: Tensor, part: str) -> None:
        """Counts a tensor's storage under `part` from now on; one that is counted already only changes its part."""
        storage = tensor.untyped_storage()
        known = self._blocks.get(storage)
        if known is not None:
            block: _Block = known[0]
            self._add(block.part, -block.size)
            block.part = part
            self._add(part, block.size)
            return
        size = storage.size()
        if self.cuda:
            size = -(-size // CUDA_ROUNDING) * CUDA_ROUNDING
        block = _Block(size, part)
        self._next += 1
        number = self._next
        self._blocks[storage] = (block, weakref.ref(storage, lambda _: self._release(number, block)))
        self._add(part, size)
        self.held += size
        if self.events is not None:
            self.events.append((1, number, size))

    def part_of(self, tensor: Tensor) -> str | None:
        """Returns what a tensor's storage is counted under."""
        known = self._blocks.get(tensor.untyped_storage())
        return known[0].part if known else None

    def _add(self, part: str, size: int) -> None:
        self.parts[part] = self.parts.get(part, 0) + size

    def _release(self, number: int, block: _Block) -> None:
        self.held -= block.size
        self._add(block.part, -block.size)
        if self.events is not None:
            self.events.append((-1, number, block.size))

    def mark(self, operation: str, extra: int = 0) -> None:
        """Notes what is held now, with `extra` bytes that live only inside the operation."""
        peak = self.peaks.setdefault(self.moment, Peak())
        total = self.held + extra
        if total > peak.total:
            peak.total, peak.operation, peak.parts = total, operation, dict(self.parts)
            if extra:
                peak.parts["workspace"] = peak.parts.get("workspace", 0) + extra

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func)
        part = _named[-1] if _named else self.part
        if name.startswith("aten._to_copy") and self.part_of(args[0]) in ("frozen", "trained", "adapters"):
            part = "casts"
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and self._blocks.get(tensor.untyped_storage()) is None:
                wide = tensor.dim() > 0 and tensor.shape[-1] == self.logit_width
                self.hold(tensor, "logits" if wide else part)
        self.mark(name, self._inside(name, args))
        return out

    def _inside(self, name: str, args: Any) -> int:
        """Returns bytes that a CUDA kernel needs only while it runs, where the CPU's needs none.

        Flash attention's backward pass accumulates dQ in fp32, padded to 128 rows and 32 columns, beside one fp32 sum a row; with
        grouped heads it makes dK and dV for all heads first (flash-attention's `mha_bwd`).
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
