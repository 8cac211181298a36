"""Where a plan's memory comes from: the closed formulas, a trace of the real step, a probe on the device; each corrects the last.

The plan itself stays a pure function: it is asked again with what was found, until what it decides is what was looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from sft_play.config.schema import Config
from sft_play.errors import DataError, UserError
from sft_play.plan.fit import DoesNotFitError, Memory
from sft_play.plan.measured import TracedMemory, load
from sft_play.plan.memory import Setup, rank_memory
from sft_play.plan.plan import Plan
from sft_play.plan.remedies import with_peak
from sft_play.plan.shape import ModelShape
from sft_play.plan.trace_case import architecture_of, setup_of
from sft_play.plan.tracer import Tracer
from sft_play.runs.folder import cache_folder
from sft_play.runs.prepared import Prepared

Source = Literal["formula", "trace", "probe", "known", "auto"]
"""`known`: a trace where an earlier one is in the cache, else the formula; never starts one. `auto`, for training: `known`, and a
new trace where the formula comes near the limit; both trace a family that the formulas do not know. `probe`: a trace, corrected by what
`launch.preparation` measured; measurements of earlier probes correct every plan but one by `formula`."""
ROUNDS = 5
UNSETTLED = "memory by formula, scaled by {seen} traces of other batches: after {rounds} rounds the plan still went to a new one"
WORTH_A_TRACE = 0.5
"""Share of the memory above which training looks closer than the formulas do."""


def parse_source(text: str | None, default: Source) -> Source:
    """Returns what `SOURCE` asks for. Raises `UserError`."""
    known: dict[str | None, Source] = {None: default, "formula": "formula", "trace": "trace", "probe": "probe"}
    if text not in known:
        raise UserError(
            f"`SOURCE` is `{text}`; expected `formula`, `trace` or `probe`", hint="leave it away for the best that is at hand"
        )
    return known[text]


def planned(
    make: Callable[[Memory], Plan],
    config: Config,
    shape: ModelShape,
    prepared: Prepared | None,
    source: Source,
) -> Plan:
    """Returns the plan by the source that was asked for. Raises what `make` raises."""
    if source == "formula":
        return _by_formula(make, config, shape)
    if config.tuning.backend == "unsloth":
        plan = _by_formula(make, config, shape)
        return _with_reason(plan, "memory by formula: unsloth's own kernels cannot be traced here, and need less")
    if shape.counted and (source == "known" or prepared):
        source = "probe" if source == "probe" else "trace"
    if source == "auto":
        source = "trace" if _is_near(make) else "known"
    try:
        memory = memory_of(config, prepared)
    except (DataError, OSError, ValueError):
        return _by_formula(make, config, shape)  # the plan itself says what is wrong with the model
    tracer = memory.tracer = Tracer() if source in ("trace", "probe") else None
    try:
        return _by_trace(make, memory, shape)
    finally:
        if tracer:
            tracer.close()


def _by_formula(make: Callable[[Memory], Plan], config: Config, shape: ModelShape) -> Plan:
    plan = with_peak(make(rank_memory), config, shape)
    return _with_reason(plan, f"{_unknown(shape)} as if it were a Llama of these sizes") if shape.counted else plan


def _unknown(shape: ModelShape) -> str:
    """Returns what the formulas do not know, in words."""
    return f"the formulas do not know `{shape.model_type}`: parameters and adapters are counted on the model itself, activations"


def memory_of(config: Config, prepared: Prepared | None) -> TracedMemory:
    """Returns the memory of a model as traces in the cache know it. Raises `DataError`, `OSError` or `ValueError`."""
    architecture = architecture_of(config.model, prepared)
    return TracedMemory(config=config, architecture=architecture, cache_folder=cache_folder() / "traces")


def _is_near(make: Callable[[Memory], Plan]) -> bool:
    """Whether the formula's peak is so near the limit that its error could matter."""
    try:
        plan = make(rank_memory)
    except DoesNotFitError:
        return True
    return any(rank.peak_bytes > WORTH_A_TRACE * rank.capacity_bytes for rank in plan.ranks)


def _by_trace(make: Callable[[Memory], Plan], memory: TracedMemory, shape: ModelShape) -> Plan:
    for _ in range(ROUNDS):
        try:
            plan = make(memory)
        except DoesNotFitError as error:
            if memory.observe(shape, error.setup, [error.micro_batch]):
                continue
            raise
        setup = setup_of(plan)
        if not memory.observe(shape, setup, [rank.worst_rows for rank in plan.ranks]):
            break
    plan, probed = _by_probe(make, memory, shape, plan)
    setup, config = setup_of(plan), memory.config
    if memory.error and not probed:
        plan = _by_formula(make, config, shape)
        return _with_reason(plan, f"memory by formula: the trace cannot run this architecture ({memory.error})")
    seen = [memory.found.get((setup, rank.worst_rows)) for rank in plan.ranks]
    worst = max((found for found in seen if found), key=lambda found: sum(found.parts.values()), default=None)
    if worst is None or None in seen:
        plan = with_peak(plan, config, shape)
        if memory.tracer and memory.found:
            plan = _with_reason(plan, UNSETTLED.format(rounds=ROUNDS, seen=len(memory.found)))
        return plan
    plan = with_peak(plan, config, shape, worst.moment, worst.operation)
    if probed:
        return plan
    plan = _with_reason(plan, f"{_unknown(shape)} are traced") if shape.counted else plan
    return replace(_with_reason(plan, f"memory by trace of {_traced(setup)}"), source="trace")


def _by_probe(
    make: Callable[[Memory], Plan], memory: TracedMemory, shape: ModelShape, plan: Plan
) -> tuple[Plan, bool]:  # fmt: skip
    """Returns the plan as probes of it correct it, and whether the last one was probed itself."""
    for _ in range(ROUNDS):
        found = load(memory.probe_path(plan))
        if not found:
            return plan, False
        memory.correct(shape, plan, found)
        before, plan = plan, make(memory)
        if [rank.micro_batch for rank in plan.ranks] == [rank.micro_batch for rank in before.ranks] and setup_of(
            plan
        ) == setup_of(before):
            margin = min(1 - rank.peak_bytes / rank.capacity_bytes for rank in plan.ranks)
            reason = (
                f"memory by a probe: two steps of the worst batch on these devices; {margin:.0%} of what may be used stays free"
            )
            return replace(_with_reason(plan, reason), source="probe"), True
        memory.observe(shape, setup_of(plan), [rank.worst_rows for rank in plan.ranks])
        plan = make(memory)
    return plan, False


def _traced(setup: Setup) -> str:
    """Returns what of a step was traced, in words: shards are arithmetic, since one process has no others to gather from."""
    if not setup.zero and setup.strategy != "fsdp2":
        return "the very step that trains"
    name = "FSDP2" if setup.strategy == "fsdp2" else f"ZeRO-{setup.strategy[-1]}"
    return f"a whole replica's forward and backward pass; what {name} shards, gathers and buffers, and its optimizer's step, by formula"


def _with_reason(plan: Plan, reason: str) -> Plan:
    return replace(plan, reasons=(*plan.reasons, reason))
