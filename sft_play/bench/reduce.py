"""`python -m sft_play.bench.reduce RANK WORLD PORT BACKEND`: one of several processes that add up tensors; rank 0 prints times."""

from __future__ import annotations

import json
import sys
import time
from statistics import median

import torch
from torch import distributed

SIZES = (2**20, 16 * 2**20, 64 * 2**20)
"""Bytes."""
TRIES = 7


def measure(rank: int, world: int, port: int, backend: str) -> dict[str, float]:
    """Returns bytes (as text) -> median seconds of an all-reduce, the slowest rank's."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    distributed.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    found = {str(size): reduce_seconds(torch.ones(size // 4, device=device)) for size in SIZES}
    distributed.destroy_process_group()
    return found


def reduce_seconds(values: torch.Tensor) -> float:
    """Returns the median time in which all ranks have the sum of `values`, after two for nothing."""
    times = []
    for attempt in range(TRIES + 2):
        distributed.barrier()
        started = time.perf_counter()
        distributed.all_reduce(values)
        if values.is_cuda:
            torch.cuda.synchronize()
        slowest = torch.tensor([time.perf_counter() - started], device=values.device)
        distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
        values.fill_(1.0)
        times += [float(slowest)] if attempt > 1 else []
    return median(times)


if __name__ == "__main__":
    own, count, at, by = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    result = measure(own, count, at, by)
    if own == 0:
        print(json.dumps(result))
