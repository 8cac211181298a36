"""What `make bench` measures in processes of their own, which print JSON: `python -m sft_play.bench.measure KIND`, or `... RANK WORLD PORT BACKEND`.

The first multiplies matrices and copies on the first device that it sees, the second adds up tensors with its peers.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import distributed

WIDTHS = {"cpu": (256, 512, 1024, 2048), "cuda": (1024, 2048, 4096, 8192)}
COPIED_BYTES = {"cpu": 2**28, "cuda": 2**30}
"""Far more than any cache holds."""
LEAST_SECONDS, LEAST_TRIES, MOST_TRIES = 0.5, 5, 50
REDUCED_BYTES, REDUCE_TRIES = (2**20, 16 * 2**20, 64 * 2**20), 7


def device(kind: str) -> dict[str, Any]:
    """Return `{"dtype", "matmul": {width: FLOP/s}, "bandwidth": bytes/s read and written}`, each a median."""
    here = torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")
    dtype = torch.float32
    if kind == "cuda":
        dtype = torch.bfloat16 if torch.cuda.get_device_capability(here) >= (8, 0) else torch.float16
    matmul = {}
    for width in WIDTHS[kind]:
        left, right = (torch.randn(width, width, device=here).to(dtype) for _ in range(2))
        matmul[str(width)] = 2 * width**3 / _typical_seconds(partial(torch.mm, left, right), here)
    source = torch.ones(COPIED_BYTES[kind], dtype=torch.uint8, device=here)
    target = torch.empty_like(source)
    bandwidth = 2 * COPIED_BYTES[kind] / _typical_seconds(lambda: target.copy_(source), here)
    return {"dtype": str(dtype).removeprefix("torch."), "matmul": matmul, "bandwidth": bandwidth}


def _typical_seconds(work: Callable[[], object], here: torch.device) -> float:
    """Return the median time of `work` after two runs for nothing."""
    times: list[float] = []
    for attempt in range(MOST_TRIES + 2):
        started = time.perf_counter()
        work()
        if here.type == "cuda":
            torch.cuda.synchronize(here)
        times += [time.perf_counter() - started] if attempt > 1 else []
        if len(times) >= LEAST_TRIES and sum(times) > LEAST_SECONDS:
            break
    return median(times)


def all_reduce(rank: int, world: int, port: int, backend: str) -> dict[str, float]:
    """Return bytes (as text) -> median seconds in which all ranks have the sum, the slowest rank's, after two for nothing."""
    here = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(here)
    distributed.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    found = {}
    for size in REDUCED_BYTES:
        times, values = [], torch.ones(size // 4, device=here)
        for _ in range(REDUCE_TRIES + 2):
            distributed.barrier()
            started = time.perf_counter()
            distributed.all_reduce(values)
            if values.is_cuda:
                torch.cuda.synchronize()
            slowest = torch.tensor([time.perf_counter() - started], device=here)
            distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
            values.fill_(1.0)
            times.append(float(slowest))
        found[str(size)] = median(times[2:])
    distributed.destroy_process_group()
    return found


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print(json.dumps(device(sys.argv[1])))
    else:
        result = all_reduce(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
        if sys.argv[1] == "0":
            print(json.dumps(result))
