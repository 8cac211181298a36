"""`python -m sft_play.bench.device KIND`: products of matrices and copies on the first device that it sees, as JSON. A process of its own."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

SIZES = {"cpu": (256, 512, 1024, 2048), "cuda": (1024, 2048, 4096, 8192)}
COPIED_BYTES = {"cpu": 2**28, "cuda": 2**30}
"""Far more than any cache holds."""
LEAST_SECONDS, LEAST_TRIES, MOST_TRIES = 0.5, 5, 50


def measure(kind: str) -> dict[str, Any]:
    """Returns `{"dtype", "matmul": {size: FLOP/s}, "bandwidth": bytes/s read and written}`, each a median."""
    device = torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")
    dtype = torch.float32
    if kind == "cuda":
        dtype = torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    matmul = {str(size): 2 * size**3 / product_seconds(size, device, dtype) for size in SIZES[kind]}
    source = torch.ones(COPIED_BYTES[kind], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * COPIED_BYTES[kind] / typical_seconds(lambda: target.copy_(source), device)
    return {"dtype": str(dtype).removeprefix("torch."), "matmul": matmul, "bandwidth": bandwidth}


def product_seconds(size: int, device: torch.device, dtype: torch.dtype) -> float:
    """Returns the time of one product of two square matrices."""
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    return typical_seconds(lambda: torch.mm(left, right), device)


def typical_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Returns the median time of `work` after two runs for nothing."""
    times: list[float] = []
    for attempt in range(MOST_TRIES + 2):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times += [time.perf_counter() - started] if attempt > 1 else []
        if len(times) >= LEAST_TRIES and sum(times) > LEAST_SECONDS:
            break
    return median(times)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
