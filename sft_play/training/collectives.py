"""What torch's flight recorder knows of this rank's collective operations, read from memory as JSON: its files are pickles.

Standard library only; torch is asked where it is loaded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from sft_play.files import write_text

DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Functions of `torch._C._distributed_c10d`: of builds with NCCL, and of all."""


def begun() -> int | None:
    """Returns how many collective operations this rank has enqueued, in all process groups; `None` where torch does not tell."""
    counts = [
        sum(int(group["last_enqueued_collective"]) for group in _groups(dump)) for dump in _dumps(entries=False) if _groups(dump)
    ]
    return max(counts, default=None)


def keep_trace(path: Path) -> None:
    """Writes the last collective operations of this rank, with their sizes and states, as JSON; nothing where there were none."""
    if found := next((dump for dump in _dumps(entries=True) if _groups(dump)), None):
        write_text(path, json.dumps(found) + "\n")


def _dumps(*, entries: bool) -> list[dict[str, Any]]:
    module = sys.modules.get("torch._C._distributed_c10d")
    functions = [getattr(module, name) for name in DUMPS if hasattr(module, name)]
    return [json.loads(function(includeCollectives=entries, onlyActive=False)) for function in functions]


def _groups(dump: dict[str, Any]) -> list[dict[str, str]]:
    return list(dump.get("pg_status", {}).values())
