"""Compare planned memory with that of two real steps: `python -m benchmarks.memory [write=docs/memory.md]`.

Every table row is a `python -m sft_play plan` by trace, and one by a probe of the same plan: the longest rows of the
data, as many at a time as the table row says. On a GPU allocated, reserved and device memory are compared; on a CPU
only resident memory is known.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import MODEL, date_and_machine, markdown, options_of, publish
from sft_play.runs.folder import cache_folder

GIB = 2**30
CONFIG = "configs/quickstart.yaml"
CASES: Mapping[str, Sequence[str]] = {
    "LoRA, 1 row": ["TRAIN_BATCH_SIZE=1", "TRAIN_GLOBAL_BATCH_SIZE=2"],
    "LoRA, 4 rows": ["TRAIN_BATCH_SIZE=4", "TRAIN_GLOBAL_BATCH_SIZE=8"],
    "LoRA, 8 rows": ["TRAIN_BATCH_SIZE=8", "TRAIN_GLOBAL_BATCH_SIZE=16"],
    "LoRA, 8 rows, checkpointing": [
        "TRAIN_BATCH_SIZE=8",
        "TRAIN_GLOBAL_BATCH_SIZE=16",
        "TRAIN_GRADIENT_CHECKPOINTING=true",
    ],
    "every weight, 2 rows": ["TUNING_MODE=full", "TRAIN_BATCH_SIZE=2", "TRAIN_GLOBAL_BATCH_SIZE=4"],
}
ALLOWED_BYTES = 100 * 2**20
NOT_ALLOCATED = ("context", "fragmentation", "free")


def main(arguments: Sequence[str]) -> int:
    """Measure and publish; return 1 if a difference exceeds the bounds of `compare`."""
    numbers, document = options_of(arguments, cases=len(CASES))
    import torch

    head, rows, good = ["case"], list[list[str]](), True
    for quantity in ("growth", "allocated", "reserved", "device")[: 4 if torch.cuda.is_available() else 1]:
        head += [f"{quantity} planned, GiB", "measured, GiB", "difference"]
    for name, words in list(CASES.items())[: numbers["cases"]]:
        cells, holds = compare(measure(words), on_gpu=torch.cuda.is_available())
        print(name, *cells, file=sys.stderr, flush=True)
        rows.append([name, *cells])
        good = good and holds
    publish("\n".join([f"{date_and_machine()}:", "", *markdown(head, rows)]), document)
    return 0 if good else 1


def measure(words: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return the memory parts of the tightest rank by trace and by probe.

    The probe runs first, because it prepares the data, so that both know the longest row. Its record is removed, since
    it would correct the trace.
    """
    probe = plan(words, "probe")
    for path in (cache_folder() / "probes").glob("*.json"):
        path.unlink()
    return {"trace": plan(words, "trace"), "probe": probe}


def plan(words: Sequence[str], source: str) -> dict[str, int]:
    """Return the memory parts of the tightest rank."""
    command = [
        sys.executable,
        "-m",
        "sft_play",
        "plan",
        f"CONFIG={CONFIG}",
        f"MODEL_NAME={MODEL}",
        *words,
        f"SOURCE={source}",
        "JSON=1",
    ]
    planned = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    assert planned["source"] == source, planned["reasons"]
    return dict(max(planned["ranks"], key=lambda rank: rank["peak_bytes"])["memory_bytes"])


def compare(parts: Mapping[str, Mapping[str, int]], *, on_gpu: bool) -> tuple[list[str], bool]:
    """Return the table's cells, and whether the differences are within bounds.

    The growth must agree to 10 %; on a GPU also allocated memory to 2 %, and reserved and device memory to 5 %. There
    100 MiB are always allowed: cuBLAS and cublasLt allocate workspaces for each thread that calls them.
    """
    holds, cells = True, list[str]()
    # Parts to omit for the process's growth, torch's allocated memory, its reserved memory, and the process's memory.
    growth, *of_a_gpu = (
        (("context", "free"), 0.1),
        (NOT_ALLOCATED, 0.02),
        (("context", "free"), 0.05),
        (("free",), 0.05),
    )
    for omitted, bound in (growth, *(of_a_gpu if on_gpu else ())):
        planned, measured = (sum_without(parts[source], omitted) for source in ("trace", "probe"))
        cells += [f"{planned / GIB:.2f}", f"{measured / GIB:.2f}", f"{planned / measured - 1:+.1%}"]
        holds = holds and abs(planned - measured) <= max(bound * measured, ALLOWED_BYTES if on_gpu else 0)
    return cells, holds


def sum_without(parts: Mapping[str, Any], omitted: Sequence[str] = NOT_ALLOCATED) -> int:
    """Return the bytes of a rank's parts except those `omitted`: by default, what torch's allocator provides."""
    return sum(int(size) for name, size in parts.items() if name not in omitted)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
