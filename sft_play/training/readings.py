"""What each process and each machine of a run uses: sent along with the losses of a logging step, for the curves."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from typing import Any

import psutil
import torch

NODE = ("cpu_percent", "memory_gib", "network_mb_s")
"""Of a machine: CPU and memory in use, and what all interfaces but loopback sent and received, in MB/s."""


def peak_memory_bytes() -> int:
    """Returns this process's highest memory so far: allocated on its GPU, else resident."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Readings:
    """Reads this process, and in the first process of a machine also the machine, since the last reading."""

    def __init__(self) -> None:
        self._first = os.environ.get("LOCAL_RANK", "0") == "0"
        self._then, self._moved = time.perf_counter(), _network_bytes()
        psutil.cpu_percent()  # counts from now on

    def read(self) -> list[float]:
        """Returns the process's peak in GiB, then `NODE`; NaN for each of these in all but a machine's first process."""
        own = [peak_memory_bytes() / 2**30]
        if not self._first:
            return own + [math.nan] * len(NODE)
        now, moved = time.perf_counter(), _network_bytes()
        speed = (moved - self._moved) / 1e6 / max(now - self._then, 1e-9)
        self._then, self._moved = now, moved
        return [*own, psutil.cpu_percent(), psutil.virtual_memory().used / 2**30, speed]


def as_logs(ranks: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Returns the readings of all ranks by name: `rank_...` by rank, `node_...` by machine, in the order of their ranks."""
    nodes = [row[1:] for row in ranks if not math.isnan(row[1])]
    columns = zip(*nodes, strict=True)
    return {"rank_memory_gib": [row[0] for row in ranks]} | {
        f"node_{name}": list(c) for name, c in zip(NODE, columns, strict=True)
    }


def _network_bytes() -> int:
    found = psutil.net_io_counters(pernic=True)
    return sum(one.bytes_sent + one.bytes_recv for name, one in found.items() if not name.startswith("lo"))
