"""Counts where Python waits for the GPU: a value that is read, data that go between host and device, a shape that
depends on values.
"""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

BY_VALUE = ("nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive", "is_nonzero")
"""Operations whose result has a size, or is an answer, that only the GPU knows."""
UNSET = ("stopping.py", "saving.py", "checkpoint_files.py", "grad_scaler.py")
"""Who asks here is answered 0: nobody asks the run to stop, no save has failed, and no gradient is infinite."""


class Counts:
    """`log` counts (phase, what, where); `matmuls` (phase, device and type) of what linear layers compute; `attention`
    (phase, kernel).
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = "build"
        self.log: Counter[tuple[str, str, str]] = Counter()
        self.matmuls: Counter[tuple[str, str]] = Counter()
        self.attention: Counter[tuple[str, str]] = Counter()


class Waits(Counts, TorchDispatchMode):
    """Where the project's worker would wait on fake GPUs, by the operations that it asks torch for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        space, operation, *_ = str(func).split(".")
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        on_gpu = first is not None and first.device.type == "cuda"
        if operation in ("mm", "addmm"):
            self.matmuls[self.phase, f"{args[-1].device.type} {args[-1].dtype}".replace("torch.", "")] += 1
        if space == "torch_attn":
            self.attention[self.phase, f"varlen, {args[0].dtype}".replace("torch.", "")] += 1
        if on_gpu and operation in BY_VALUE:
            self._note(operation)
        if (
            on_gpu
            and operation == "index"
            and any(index is not None and index.dtype == torch.bool for index in args[1])
        ):
            self._note("index by mask")
        if on_gpu and operation == "repeat_interleave" and not kwargs.get("output_size"):
            self._note(operation)
        if operation in ("_to_copy", "device_put") and first is not None:
            self._moved(
                first.device, torch.device(kwargs.get("device") or first.device), bool(kwargs.get("non_blocking"))
            )
        if operation == "copy_" and first is not None:
            self._moved(args[1].device, first.device, bool(len(args) > 2 and args[2]))
        if operation == "_local_scalar_dense" and first is not None:
            if on_gpu:
                self._note("value read")
            if isinstance(first, FakeTensor):
                return _answer(func, first)
        return func(*args, **kwargs)

    def _moved(self, source: torch.device, to: torch.device, non_blocking: bool) -> None:
        if source.type != to.type:
            self._note(f"{source.type} to {to.type}" + (" non_blocking" if non_blocking else ""))

    def _note(self, what: str) -> None:
        frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and "fake_cuda" not in f.filename]
        where = " < ".join(f"{'/'.join(f.filename.split('/')[-2:])}:{f.lineno} {f.name}" for f in reversed(frames[-3:]))
        self.log[self.phase, what, where] += 1


def _answer(func: Any, tensor: Any) -> Any:
    """Return the value of a fake scalar: the Python number that it was made from, else 1, 1.0 or False."""
    if tensor.constant is not None:
        return func(tensor.constant)
    if any(frame.filename.endswith(UNSET) for frame in traceback.extract_stack(limit=14)):
        return 0.0
    return False if tensor.dtype == torch.bool else 1.0 if tensor.dtype.is_floating_point else 1


class DeviceWaits(Counts, ExitStack):
    """`Waits` on a real card, as CUDA reports them (`torch.cuda.set_sync_debug_mode`): only `log` is filled."""

    def __enter__(self) -> Self:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        self.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        warnings.showwarning = self._said
        return super().__enter__()

    def _said(self, message: Any, _category: Any, filename: str, lineno: int, *_: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            self.log[self.phase, "wait", f"{filename}:{lineno}"] += 1
