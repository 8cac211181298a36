"""Model FLOPs utilisation: which share of the device's peak the training reaches."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from sft_play.errors import HardwareError

SIZE, TRIES = 768, 4
"""A CPU's peak is measured by this many fp32 products of square matrices of this size: about 50 ms."""


def operations_per_token(model: Any) -> int:
    """Returns the operations of one token, forward and backward.

    For a weight 2 forward, 2 for the gradient by its input, and 2 more for its own gradient when it is trained (PaLM, appendix
    B, without attention's own products). An embedding that is not the head too is only looked up.
    """
    looked_up = None if getattr(model.config.get_text_config(), "tie_word_embeddings", False) else model.get_input_embeddings()
    table = next(iter(looked_up.parameters())) if looked_up is not None else None
    return sum((6 if p.requires_grad else 4) * weights_in(p) for p in model.parameters() if p is not table)


def weights_in(parameter: Any) -> int:
    """Returns the weights that a parameter stands for: all of a shard's whole, both of a byte's two."""
    packed = getattr(parameter, "quant_state", None)
    if packed is not None:
        return int(torch.Size(packed.shape).numel())
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def peak_operations(device: str) -> float | None:
    """Returns a device's operations per second: a GPU's in bf16 by its data sheet, a CPU's in fp32 by a short measurement.

    `None` for a GPU that the table does not know.
    """
    if device == "cuda":
        from sft_play.plan.detect import detect

        try:
            devices = detect().devices
        except HardwareError:  # the driver's figures are never worth a run
            return None
        return devices[int(os.environ.get("LOCAL_RANK", "0")) % len(devices)].peak_flops
    left, right = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)), torch.eye(SIZE)
    best = float("inf")
    for _ in range(TRIES):
        started = time.perf_counter()
        torch.mm(left, right)
        best = min(best, time.perf_counter() - started)
    return 2 * SIZE**3 / best
