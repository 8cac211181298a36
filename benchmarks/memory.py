"""`python -m benchmarks.memory [write=docs/memory.md]`: what a plan predicts by trace beside what two real steps needed.

Every row is a whole `python -m sft_play plan` by trace, and one by a probe of the same plan: the longest rows of the data, as many at
once as the row says. On a GPU allocated, reserved and the device's total are compared; on a CPU only the resident memory is known.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.training import describe_machine
from sft_play.files import write_text

GIB = 2**30
CONFIG = "configs/quickstart.yaml"
CASES: Mapping[str, Sequence[str]] = {
    "LoRA, 1 row": ["TRAIN_BATCH_SIZE=1", "TRAIN_GLOBAL_BATCH_SIZE=2"],
    "LoRA, 4 rows": ["TRAIN_BATCH_SIZE=4", "TRAIN_GLOBAL_BATCH_SIZE=8"],
    "LoRA, 8 rows": ["TRAIN_BATCH_SIZE=8", "TRAIN_GLOBAL_BATCH_SIZE=16"],
    "LoRA, 8 rows, checkpointing": ["TRAIN_BATCH_SIZE=8", "TRAIN_GLOBAL_BATCH_SIZE=16", "TRAIN_GRADIENT_CHECKPOINTING=true"],
    "every weight, 2 rows": ["TUNING_MODE=full", "TRAIN_BATCH_SIZE=2", "TRAIN_GLOBAL_BATCH_SIZE=4"],
}
ALLOWED_BYTES = 100 * 2**20
NOT_ALLOCATED = ("context", "fragmentation", "free")
INTRODUCTION = """# Memory: planned and measured

Written by `python -m benchmarks.memory write=docs/memory.md`; do not edit by hand. SmolLM2-135M-Instruct on `builtin:docstrings`, each
case planned by trace, then probed: two real steps with the longest rows. *Growth* comes on top of Python and its libraries, which the plan
counts as `context`.

GPU: not measured yet (unverified).
"""


def main(arguments: Sequence[str]) -> int:
    """Prints the table, and writes the page when asked; 1 where a difference exceeds the bounds of `compare`."""
    options = dict(argument.split("=", 1) for argument in arguments)
    document = options.pop("write", None)
    if options:
        print(f"unknown arguments: {', '.join(options)}; there is write", file=sys.stderr)
        return 2
    import torch

    rows, good = [], True
    for name, words in CASES.items():
        with tempfile.TemporaryDirectory(prefix="bench-memory-") as folder:
            row, held = compare(name, measure(words, Path(folder)), on_gpu=torch.cuda.is_available())
        print(row, flush=True)
        rows.append(row)
        good = good and held
    if document:
        write_text(Path(document), page(rows))
    return 0 if good else 1


def measure(words: Sequence[str], cache: Path) -> dict[str, dict[str, int]]:
    """Returns the parts of the tightest rank by trace and by probe.

    The probe runs first, since it prepares the data: then both know the longest row. It lives in a cache of its own, so that it
    does not correct the trace; only the model's cache is shared, through the environment's `SFT_PLAY_CACHE`.
    """
    probe = plan(words, "probe", os.environ)
    for path in Path(os.environ.get("SFT_PLAY_CACHE") or Path.home() / ".cache" / "sft_play").glob("probes/*.json"):
        path.rename(cache / path.name)
    return {"trace": plan(words, "trace", os.environ), "probe": probe}


def plan(words: Sequence[str], source: str, environment: Mapping[str, str]) -> dict[str, int]:
    """Returns the parts of the tightest rank."""
    command = [sys.executable, "-m", "sft_play", "plan", f"CONFIG={CONFIG}", *words, f"SOURCE={source}", "JSON=1"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout)
    assert found["source"] == source, found["reasons"]
    return dict(max(found["ranks"], key=lambda rank: rank["peak_bytes"])["memory_bytes"])


def compare(name: str, found: Mapping[str, Mapping[str, int]], *, on_gpu: bool) -> tuple[str, bool]:
    """Returns the table's row, and whether the growth agrees to 10 %, on a GPU allocated memory to 2 %, reserved and device memory to 5 %.

    On a GPU 100 MiB are always allowed: cuBLAS and cublasLt take workspaces for each thread that calls them.
    """
    held, cells = True, [name]
    of_a_gpu = ((_allocated, 0.02), (_reserved, 0.05), (_device, 0.05)) if on_gpu else ()
    for quantity, bound in ((_growth, 0.1), *of_a_gpu):
        planned, measured = quantity(found["trace"]), quantity(found["probe"])
        cells += [f"{planned / GIB:.2f}", f"{measured / GIB:.2f}", f"{planned / measured - 1:+.1%}"]
        held = held and abs(planned - measured) <= max(bound * measured, ALLOWED_BYTES if on_gpu else 0)
    return "| " + " | ".join(cells) + " |", held


def _allocated(parts: Mapping[str, Any]) -> int:
    return sum(int(size) for name, size in parts.items() if name not in NOT_ALLOCATED)


def _reserved(parts: Mapping[str, Any]) -> int:
    """Returns what torch's allocator holds: what is allocated, and what is lost between blocks."""
    return _allocated(parts) + int(parts.get("fragmentation", 0))


def _device(parts: Mapping[str, Any]) -> int:
    """Returns what the process holds of the device, with context and libraries."""
    return sum(int(size) for name, size in parts.items() if name != "free")


def _growth(parts: Mapping[str, Any]) -> int:
    return sum(int(size) for name, size in parts.items() if name not in ("context", "free"))


def page(rows: Sequence[str]) -> str:
    """Returns the document."""
    names = [
        "case",
        "growth planned, GiB",
        "measured, GiB",
        "difference",
        *(f"{what} planned, GiB|measured, GiB|difference" for what in ("allocated", "reserved", "device")),
    ]
    names = "|".join(names).split("|")
    columns = len(rows[0].split("|")) - 2
    head = ["| " + " | ".join(names[:columns]) + " |", "|---" * columns + "|"]
    return "\n".join([INTRODUCTION, f"{time.strftime('%Y-%m-%d')}, {describe_machine()}:", "", *head, *rows]) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
