"""Where a plan's memory comes from: the closed formulas, a trace of the real step, a probe on the device; each corrects the last.

The plan itself stays a pure function: it is asked again with what was found, until what it decides is what was looked at.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from sft_play.config.call import Call
from sft_play.config.layers import PRESETS
from sft_play.config.load import LoadedConfig
from sft_play.config.schema import Config
from sft_play.errors import DataError, HardwareError, UserError
from sft_play.plan.architecture import architecture_of, shape_of
from sft_play.plan.calibration import load_calibration
from sft_play.plan.detect import detect
from sft_play.plan.hardware import Hardware, parse_hardware
from sft_play.plan.make import make_plan
from sft_play.plan.measured import TracedMemory, end_tracer, load
from sft_play.plan.memory import rank_memory
from sft_play.plan.plan import LaunchRequest, Plan, Setup, setup_of
from sft_play.plan.remedies import with_peak
from sft_play.plan.request import DoesNotFitError, Request
from sft_play.plan.shape import ModelShape
from sft_play.runs.folder import cache_folder
from sft_play.runs.prepared import Prepared, lookup

Source = Literal["formula", "trace", "probe", "known", "auto"]
"""`known`: a trace where an earlier one is in the cache, else the formula; never starts one. `auto`, for training: `known`, and a
new trace where the formula comes near the limit; both trace a family that the formulas do not know. `probe`: a trace, corrected by what
`launch.preparation` measured; measurements of earlier probes correct every plan but one by `formula`."""
ROUNDS = 5
UNSETTLED = "memory by formula, scaled by {seen} traces of other batches: after {rounds} rounds the plan still went to a new one"
WORTH_A_TRACE = 0.5
"""Share of the memory above which training looks closer than the formulas do."""


def parse_source(text: str | None, default: Source) -> Source:
    """Return what `SOURCE` asks for. Raise `UserError`."""
    known: dict[str | None, Source] = {None: default, "formula": "formula", "trace": "trace", "probe": "probe"}
    if text not in known:
        raise UserError(
            f"`SOURCE` is `{text}`; expected `formula`, `trace` or `probe`", hint="omit it for the best that is known"
        )
    return known[text]


def plan_by_source(request: Request, source: Source) -> Plan:
    """Return the plan by the source that was asked for. Raise as `make_plan`, and `UserError` for a probe of stages."""
    if source == "probe" and request.config.launch.strategy == "pipeline":
        raise UserError("`SOURCE=probe` measures whole models, and `launch.strategy` is `pipeline`", hint="omit SOURCE")
    try:
        return _plan_by(request, source)
    finally:
        end_tracer()


def _plan_by(request: Request, source: Source) -> Plan:
    if source == "formula":
        return _by_formula(request)
    if request.config.tuning.backend == "unsloth":
        return _with_reason(_by_formula(request), "memory by formula: unsloth's own kernels cannot be traced here, and need less")
    if request.config.launch.strategy == "pipeline":
        return _with_reason(_by_formula(request), "memory by formula: the stages of a pipeline are not traced")
    if request.shape.counted and (source == "known" or request.prepared):
        source = "probe" if source == "probe" else "trace"
    if source == "auto":
        source = "trace" if _is_near(request) else "known"
    try:
        memory = memory_of(request.config, request.prepared)
    except (DataError, OSError, ValueError):
        return _by_formula(request)  # the plan itself says what is wrong with the model
    memory.traces = source in ("trace", "probe")
    return _by_trace(request, memory)


def _by_formula(request: Request) -> Plan:
    config, shape = request.config, request.shape
    plan = with_peak(make_plan(replace(request, memory=rank_memory)), config, shape)
    return _with_reason(plan, f"{_unknown(shape)} as if it were a Llama of these sizes") if shape.counted else plan


def _unknown(shape: ModelShape) -> str:
    return f"the formulas do not know `{shape.model_type}`: parameters and adapters are counted on the model itself, activations"


def memory_of(config: Config, prepared: Prepared | None) -> TracedMemory:
    """Return the memory of a model as traces in the cache know it. Raise `DataError`, `OSError` or `ValueError`."""
    architecture = architecture_of(config.model, prepared)
    return TracedMemory(config=config, architecture=architecture, cache_folder=cache_folder() / "traces")


def _is_near(request: Request) -> bool:
    """Whether the formula's peak is so near the limit that its error could matter."""
    try:
        plan = make_plan(replace(request, memory=rank_memory))
    except DoesNotFitError:
        return True
    return any(rank.peak_bytes > WORTH_A_TRACE * rank.capacity_bytes for rank in plan.ranks)


def _by_trace(request: Request, memory: TracedMemory) -> Plan:
    config, shape, traced = request.config, request.shape, replace(request, memory=memory)
    for _ in range(ROUNDS):
        try:
            plan = make_plan(traced)
        except DoesNotFitError as error:
            if memory.observe(shape, error.setup, [error.micro_batch]):
                continue
            raise
        if not memory.observe(shape, setup_of(plan), [rank.worst_rows for rank in plan.ranks]):
            break
    plan, probed = _by_probe(traced, memory, plan)
    setup = setup_of(plan)
    if memory.error and not probed:
        return _with_reason(_by_formula(request), f"memory by formula: the trace cannot run this architecture ({memory.error})")
    seen = [memory.found.get((setup, rank.worst_rows)) for rank in plan.ranks]
    worst = max((found for found in seen if found), key=lambda found: sum(found.parts.values()), default=None)
    if worst is None or None in seen:
        plan = with_peak(plan, config, shape)
        if memory.traces and memory.found:
            plan = _with_reason(plan, UNSETTLED.format(rounds=ROUNDS, seen=len(memory.found)))
        return plan
    plan = with_peak(plan, config, shape, worst.moment, worst.operation)
    if probed:
        return plan
    plan = _with_reason(plan, f"{_unknown(shape)} are traced") if shape.counted else plan
    return replace(_with_reason(plan, f"memory by trace of {_traced(setup)}"), source="trace")


def _by_probe(request: Request, memory: TracedMemory, plan: Plan) -> tuple[Plan, bool]:
    """Return the plan as probes of it correct it, and whether the last one was probed itself."""

    def decided(plan: Plan) -> tuple[Setup, list[int]]:
        return setup_of(plan), [rank.micro_batch for rank in plan.ranks]

    for _ in range(ROUNDS):
        found = load(memory.probe_path(plan))
        if not found:
            return plan, False
        memory.correct(request.shape, plan, found)
        before, plan = plan, make_plan(request)
        if decided(plan) == decided(before):
            margin = min(1 - rank.peak_bytes / rank.capacity_bytes for rank in plan.ranks)
            reason = (
                f"memory by a probe: two steps of the worst batch on these devices; {margin:.0%} of what may be used stays free"
            )
            return replace(_with_reason(plan, reason), source="probe"), True
        memory.observe(request.shape, setup_of(plan), [rank.worst_rows for rank in plan.ranks])
        plan = make_plan(request)
    return plan, False


def _traced(setup: Setup) -> str:
    """Return what of a step was traced, in words: shards are arithmetic, since one process has no others to gather from."""
    if not setup.zero and setup.strategy != "fsdp2":
        return "the very step that trains"
    name = "FSDP2" if setup.strategy == "fsdp2" else f"ZeRO-{setup.strategy[-1]}"
    return f"a whole replica's forward and backward pass; what {name} shards, gathers and buffers, and its optimizer's step, by formula"


def _with_reason(plan: Plan, reason: str) -> Plan:
    return replace(plan, reasons=(*plan.reasons, reason))


LAN = "12GB+8GB+8GB@1Gbit"
MADE_FOR = {
    "run_bnb": "24GB", "run_unsloth": "24GB", "rtx4090_sli": "2xRTX4090", "a100_pair": "2xA100", "h100_pair": "2xH100",
    "h200_pair": "2xH200", "h200_quad": "4xH200", "l40s_single": "L40S", "l40s_pair": "2xL40S", "home_lan": LAN, "home_lan_13b": LAN,
    "smoke": "8GB+8GB@1Gbit", "from_scratch": "24GB", "run_bnb_qwen3_5": "16GB", "rtx4090_sli_gemma4": "2xRTX4090",
    "home_lan_smollm3": LAN, "h200_pair_gemma4": "2xH200", "h200_single_gpt_oss": "H200",
}  # fmt: skip
"""Preset -> the hardware that it is for, as docs/presets.md has it."""


def hardware_of(call: Call) -> Hardware:
    """Return the hardware that `HARDWARE` describes, else this machine's. Raise `HardwareError`."""
    described = call.options.get("HARDWARE")
    return parse_hardware(described) if described else detect()


def explain_refusal(loaded: LoadedConfig, hardware: Hardware, error: HardwareError) -> HardwareError:
    """Return the refusal of a plan with where the key that it names was written.

    One of too little memory here gets the hardware that the preset is for: the file itself, or one that it extends.
    """
    if error.place and error.place in loaded.origins:
        error.place = loaded.origins[error.place]
    if hardware.described or not isinstance(error, DoesNotFitError):
        return error
    files = [str(loaded.path), *(loaded.origins[key].rpartition(":")[0] for key in ("model.name", *loaded.origins))]
    presets = (file for file in map(Path, files) if file.stem in MADE_FOR and file.resolve().parent == PRESETS)
    name = next((file.stem for file in presets), None)
    if name is None:
        return error
    return error.add(notes=(f"the preset `{name}` is for HARDWARE={MADE_FOR[name]}, which `make plan` plans for",))


def plan_for(
    loaded: LoadedConfig, hardware: Hardware, request: LaunchRequest, prepared: Prepared | None = None, source: Source = "known"
) -> Plan:
    """Return the plan with what is known of the data: `prepared`, or what an earlier preparation found. Raise `UserError`."""
    config = loaded.config
    asked = Request(
        config=config, hardware=hardware, shape=shape_of(config.model), launch=request, typed=loaded.typed,
        prepared=prepared or lookup(config), calibration=load_calibration(hardware),
    )  # fmt: skip
    try:
        return plan_by_source(asked, source)
    except HardwareError as error:
        raise explain_refusal(loaded, hardware, error) from None


def needs_several(loaded: LoadedConfig, hardware: Hardware, request: LaunchRequest) -> bool:
    """Whether a run would be more than one process: several GPUs, or something that was asked for."""
    asked = (request.num_gpus or 1) > 1 or request.num_nodes > 1 or loaded.config.launch.strategy != "auto"
    return asked or (hardware.kind == "cuda" and len(hardware.devices) > 1 and request.num_gpus != 1)
