"""What two real steps at the worst batch needed on the very devices, kept in the cache, and how it corrects a plan's parts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sft_play.files import read_json, text_sha256, write_json
from sft_play.plan.plan import Plan
from sft_play.plan.trace_case import Case

NOT_ALLOCATED = ("context", "fragmentation")


@dataclass(frozen=True, kw_only=True, slots=True)
class Probed:
    """What one rank measured."""

    rank: int
    micro_batch: int
    allocated_bytes: int
    """Most that torch had allocated on a GPU; 0 on a CPU, where nothing tells it."""
    reserved_bytes: int
    """Most that torch's allocator had reserved on a GPU; 0 on a CPU."""
    device_bytes: int
    """Most that the process held: of the GPU, with context and libraries; else resident."""
    seconds_per_step: float
    failed: bool = False
    """Whether memory ran out."""


def probe_path(folder: Path, cases: Sequence[Case], plan: Plan, versions: str) -> Path:
    """Returns where the measurement of a plan is kept: by what runs, on which devices, under which strategy."""
    facts = [[case.key(versions) for case in cases], plan.strategy, plan.world_size, [rank.device_name for rank in plan.ranks]]
    return folder / f"{text_sha256(json.dumps(facts))[:32]}.json"


def save(path: Path, found: Sequence[Probed]) -> None:
    """Keeps a measurement of all ranks."""
    write_json(path, [asdict(one) for one in found])


def load(path: Path) -> list[Probed]:
    """Returns a measurement of all ranks, empty where none was made."""
    rows: list[dict[str, Any]] = read_json(path) if path.is_file() else []
    return [Probed(**row) for row in rows]


def corrected(parts: Mapping[str, int], found: Probed, capacity: int) -> dict[str, int]:
    """Returns the parts so that they add up to what was measured.

    On a GPU the context is what the process held beyond torch's reserve, fragmentation what was reserved and not allocated, and
    what is left goes to the activations. On a CPU only the resident size is known: the heap's gaps take the difference. Where
    memory ran out, the activations are made to exceed what there is.
    """
    fixed = dict(parts)
    if found.failed:
        short = capacity + 1 - sum(fixed.values())
        return fixed | {"activations": fixed["activations"] + max(0, short)}
    if not found.allocated_bytes:
        rest = sum(size for name, size in fixed.items() if name != "fragmentation")
        return fixed | {"fragmentation": max(0, found.device_bytes - rest)}
    allocated = sum(size for name, size in fixed.items() if name not in NOT_ALLOCATED)
    return fixed | {
        "activations": max(0, fixed["activations"] + found.allocated_bytes - allocated),
        "context": max(0, found.device_bytes - found.reserved_bytes),
        "fragmentation": max(0, found.reserved_bytes - found.allocated_bytes),
    }
