"""Memory that was measured, kept in the cache: a trace of the real step (acts: runs `python -m sft_play.trace`), or two steps on the device."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sft_play.config.schema import Config
from sft_play.files import read_json, text_sha256, write_json
from sft_play.plan.memory import WORKSPACE_BYTES, Setup, rank_memory
from sft_play.plan.plan import Plan
from sft_play.plan.shape import ModelShape
from sft_play.plan.trace_case import TRACED_OPTIMIZERS, Case, case_of, setup_of
from sft_play.plan.tracer import Tracer, versions

STATES = ("frozen", "quant_state", "trained", "adapters", "gradients", "optimizer")
MOVING = ("activations", "recompute", "logits", "casts", "dequantised", "workspace")


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What a trace says of one micro-batch."""

    parts: Mapping[str, int]
    """Bytes of every part at the worst moment."""
    moment: str
    operation: str


@dataclass(kw_only=True, slots=True)
class TracedMemory:
    """A rank's memory: exact where it was traced, elsewhere by the formula, scaled by what the nearest trace found of each part."""

    config: Config
    architecture: dict[str, Any]
    cache_folder: Path
    tracer: Tracer | None = None
    """What traces; without it only the cache is read."""
    found: dict[tuple[Setup, int], Observation] = field(default_factory=dict)
    error: str | None = None
    """Why the architecture could not be traced."""

    def __call__(self, config: Config, shape: ModelShape, setup: Setup, micro_batch: int) -> dict[str, int]:
        """Returns the bytes of every part."""
        if config is self.config and (exact := self.found.get((setup, micro_batch))):
            return dict(exact.parts)
        parts = rank_memory(config, shape, setup, micro_batch)
        near = self._nearest(setup, micro_batch) if config is self.config else None
        if near is None:
            return parts
        (other, rows), observed = near
        return _scaled(parts, rank_memory(config, shape, other, rows), observed.parts)

    def probe_path(self, plan: Plan) -> Path:
        """Returns where a probe of this plan keeps what it measured."""
        setup = setup_of(plan)
        cases = [case_of(self.config, self.architecture, setup, rank.worst_rows) for rank in plan.ranks]
        return probe_path(self.cache_folder.parent / "probes", cases, plan, versions())

    def correct(self, shape: ModelShape, plan: Plan, probes: Sequence[Probed]) -> None:
        """Takes over what a probe of this plan measured."""
        setup = setup_of(plan)
        for rank, probe in zip(plan.ranks, probes, strict=True):
            key = setup, rank.worst_rows
            known = self.found.get(key)
            parts = dict(known.parts) if known else rank_memory(self.config, shape, setup, rank.worst_rows)
            moment, operation = (known.moment, known.operation) if known else ("", "")
            fixed = corrected(parts, probe, rank.capacity_bytes)
            self.found[key] = Observation(parts=fixed, moment=moment, operation=operation)

    def _nearest(self, setup: Setup, micro_batch: int) -> tuple[tuple[Setup, int], Observation] | None:
        """Returns the observation with the same setup but for its rows, with most nearly as many tokens."""
        tokens = micro_batch * setup.row_tokens

        def alike(other: Setup) -> bool:
            same: dict[str, Any] = {
                "row_tokens": 0,
                "layout": "",
                "accumulates": True,
                "label_share": 0.0,
                "loss_chunk": 0,
                "packed": False,
            }
            return replace(other, **same) == replace(setup, **same)

        candidates = [(key, value) for key, value in self.found.items() if alike(key[0])]
        return min(candidates, key=lambda item: abs(item[0][1] * item[0][0].row_tokens - tokens), default=None)

    def observe(self, shape: ModelShape, setup: Setup, micro_batches: Sequence[int]) -> bool:
        """Traces what is not known yet of these micro-batches; returns whether anything new came of it."""
        missing = [rows for rows in dict.fromkeys(micro_batches) if (setup, rows) not in self.found]
        if not missing or self.error:
            return False
        cases = [case_of(self.config, self.architecture, setup, rows) for rows in missing]
        new = False
        for rows, result in zip(missing, traced(cases, self.cache_folder, self.tracer), strict=True):
            if result is None:
                continue
            if "error" in result:
                self.error = str(result["error"])
                return False
            self.found[setup, rows] = assemble(self.config, shape, setup, rows, result)
            new = True
        return new


def _scaled(parts: Mapping[str, int], formula: Mapping[str, int], observed: Mapping[str, int]) -> dict[str, int]:
    """Returns what was observed, scaled as the formula grew; what moves as a whole, since the formula's peak may be another moment."""
    found = {
        name: int(size * observed.get(name, 0) / formula[name]) if formula.get(name) else size for name, size in parts.items()
    }
    now, then = (sum(of.get(name, 0) for name in MOVING) for of in (parts, formula))
    seen = {name: observed.get(name, 0) for name in MOVING}
    if not then or not any(seen.values()):
        return found
    return {name: size for name, size in found.items() if name not in MOVING} | {
        name: int(size * now / then) for name, size in seen.items() if size or name in parts
    }


def assemble(config: Config, shape: ModelShape, setup: Setup, micro_batch: int, result: Mapping[str, Any]) -> Observation:
    """Returns a rank's parts at its worst moment: what moves as traced; states as traced, or as the strategy shards them."""
    formula = rank_memory(config, shape, setup, micro_batch)
    sharded = setup.strategy not in ("single", "ddp")
    best: Observation | None = None
    for moment, traced_parts in result["moments"].items():
        parts = {name: max(0, traced_parts.get(name, 0)) for name in MOVING}
        for name in STATES:
            if name in formula:
                parts[name] = formula[name] if sharded else traced_parts.get(name, 0)
        if setup.optim not in TRACED_OPTIMIZERS or sharded:
            parts["optimizer"] = formula["optimizer"]
        parts["workspace"] += WORKSPACE_BYTES[setup.device]
        parts |= {name: formula[name] for name in ("buffers", "context")}
        if best is None or sum(parts.values()) > sum(best.parts.values()):
            best = Observation(parts=parts, moment=moment, operation=result["operations"].get(moment, ""))
    assert best is not None, "a trace has moments"
    lost = formula["fragmentation"]
    if setup.device == "cuda":
        share = lost / max(1, sum(formula.get(name, 0) for name in MOVING))
        lost = int(result.get(_allocator(setup), share * sum(best.parts.get(name, 0) for name in MOVING)))
    return replace(best, parts={**best.parts, "fragmentation": lost})


def _allocator(setup: Setup) -> str:
    """Returns which allocator's loss counts: workers grow segments in place where they can, unless the user's own setting says otherwise."""
    own = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    grows = setup.expandable_segments if own is None else "expandable_segments:true" in own.lower()
    return "lost_bytes" if grows else "lost_bytes_native"


def traced(cases: Sequence[Case], folder: Path, tracer: Tracer | None) -> list[dict[str, Any] | None]:
    """Returns each case's result, from the cache or from the tracer, and `None` for what is in neither."""
    paths = [folder / f"{case.key(versions())}.json" for case in cases]
    results: list[dict[str, Any] | None] = [read_json(path) if path.is_file() else None for path in paths]
    missing = [index for index, result in enumerate(results) if result is None]
    if missing and tracer is not None:
        fresh = tracer.ask([asdict(cases[index]) for index in missing])
        for index, result in zip(missing, fresh, strict=True):
            results[index] = result
            if "error" not in result:
                write_json(paths[index], result)
    return results


# What two real steps at the worst batch needed on the very devices, kept in the cache, and how it corrects a plan's parts.


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
