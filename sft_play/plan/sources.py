"""The sources of a plan's memory: closed formulas, a trace of the real step, a probe on the device; each corrects the
previous one.

The plan itself stays a pure function: it is computed again with each observation, until it decides on a case that was
observed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from sft_play.config.call import Call
from sft_play.config.load import LoadedConfig
from sft_play.config.schema import Config
from sft_play.errors import DataError, Problems, UserError
from sft_play.files import read_json, text_sha256, write_json
from sft_play.plan.architecture import (
    architecture_of,
    ask,
    end_tracer,
    key_of,
    local_folder,
    shape_of,
    trains_tokenizer,
)
from sft_play.plan.detect import detect, require_kernels
from sft_play.plan.hardware import Hardware, parse_hardware
from sft_play.plan.make import make_plan
from sft_play.plan.memory import MIB, MOVING, STATES, WORKSPACE_BYTES, rank_memory, trained_bytes, trains_layers
from sft_play.plan.plan import LaunchRequest, Plan, Setup, setup_of
from sft_play.plan.request import DoesNotFitError, Request
from sft_play.plan.shape import ModelShape, fuses_adapters, quantises_experts
from sft_play.plan.throughput import past_runs
from sft_play.runs.folder import cache_folder
from sft_play.runs.prepared import Prepared, lookup

Source = Literal["formula", "trace", "probe", "known", "auto"]
"""`known` uses a cached trace, otherwise the formula, and never starts a trace. `auto`, for training, also starts one
where the formula comes near the limit; both trace a family that the formulas do not know. `probe` is a trace, corrected
by what `launch.attempt.probe` measured; measurements of earlier probes correct every plan except one by `formula`.
"""
ROUNDS = 10
WORTH_A_TRACE = 0.5
"""Share of a rank's capacity above which training traces instead of relying on the formulas."""


def parse_source(text: str | None, default: Source) -> Source:
    """Return the source that `SOURCE` names. Raise `UserError`."""
    sources: dict[str | None, Source] = {None: default, "formula": "formula", "trace": "trace", "probe": "probe"}
    if text not in sources:
        raise UserError(
            f"`SOURCE` is `{text}`; expected `formula`, `trace` or `probe`",
            hint="omit it for the best available source",
        )
    return sources[text]


UNSLOTH = (
    "memory by formula, which unsloth's own kernels should stay below (from its source, unverified on a GPU): fp32"
    " adapters, logits of all positions; recomputed layers count on the GPU though it moves their inputs to the host"
)


def plan_by_source(request: Request, source: Source) -> Plan:
    """Return the plan by this source. Raise like `make_plan`, and `UserError` for a probe of pipeline stages."""
    pipeline = request.config.launch.strategy == "pipeline"
    if source == "probe" and pipeline:
        raise UserError(
            "`SOURCE=probe` measures complete models, and `launch.strategy` is `pipeline`", hint="omit SOURCE"
        )
    if source == "formula":
        return _by_formula(request)
    if request.config.tuning.backend == "unsloth":
        return _by_formula(request, UNSLOTH)
    if pipeline:
        return _by_formula(request, "memory by formula: the stages of a pipeline are not traced")
    unknown = request.shape.counted or trains_layers(request.config, request.shape)
    if unknown and (source == "known" or request.prepared):
        source = "probe" if source == "probe" else "trace"
    if source == "auto":
        source = "trace" if _is_near(request) else "known"
    try:
        memory = memory_of(request.config, request.prepared)
    except (DataError, OSError, ValueError):
        return _by_formula(request)  # the plan itself reports what is wrong with the model
    memory.traces = source in ("trace", "probe")
    return _by_trace(request, memory)


def _by_formula(request: Request, why: str = "") -> Plan:
    plan = make_plan(replace(request, memory=rank_memory))
    if request.shape.counted:
        plan = plan.with_reason("family", f"{_unknown(request.shape)} as if it were a Llama of these sizes")
    return plan.with_reason("source", why) if why else plan


def _unknown(shape: ModelShape) -> str:
    return (
        f"the formulas do not know `{shape.model_type}`: parameters and adapters are counted on the model itself,"
        " activations"
    )


def memory_of(config: Config, prepared: Prepared | None) -> TracedMemory:
    """Return the memory of a model by its cached traces. Raise `DataError`, `OSError` or `ValueError`."""
    architecture = architecture_of(config.model, prepared)
    return TracedMemory(config=config, architecture=architecture)


def _is_near(request: Request) -> bool:
    """Return whether the formula's peak is near enough to the limit for its error to matter."""
    try:
        plan = make_plan(replace(request, memory=rank_memory))
    except DoesNotFitError:
        return True
    return any(rank.peak_bytes > WORTH_A_TRACE * rank.capacity_bytes for rank in plan.ranks)


def _by_trace(request: Request, memory: TracedMemory) -> Plan:
    shape, traced = request.shape, replace(request, memory=memory)
    for rounds_left in reversed(range(ROUNDS)):
        try:
            plan = make_plan(traced)
        except DoesNotFitError as error:
            if rounds_left and memory.observe(shape, error.setup, [error.micro_batch]):
                continue
            raise
        if not memory.learn(shape, plan):
            break
    setup = setup_of(plan)
    cases = {(setup, rank.worst_rows) for rank in plan.ranks}
    if cases <= memory.probed:
        margin = min(1 - rank.peak_bytes / rank.capacity_bytes for rank in plan.ranks)
        plan = plan.with_reason(
            "source",
            f"memory by a probe: two steps of the worst batch on these devices; {margin:.0%} of what may be used stays"
            " free",
        )
        return replace(plan, source="probe")
    if memory.error:
        return _by_formula(request, f"memory by formula: the trace cannot run this architecture ({memory.error})")
    if not cases <= memory.observations.keys():
        return plan
    plan = plan.with_reason("family", f"{_unknown(shape)} are traced") if shape.counted else plan
    return replace(plan.with_reason("source", f"memory by trace of {_traced(setup)}"), source="trace")


def _traced(setup: Setup) -> str:
    """Return which part of a step was traced, in words; shards are arithmetic, since a single process cannot gather."""
    if not setup.sharded:
        return "the training step itself"
    name = "FSDP2" if setup.strategy == "fsdp2" else f"ZeRO-{setup.strategy[-1]}"
    return (
        f"a complete replica's forward and backward pass; what {name} shards, gathers and buffers, and its optimizer's"
        " step, by formula"
    )


def hardware_of(call: Call) -> Hardware:
    """Return the hardware that `HARDWARE` describes, or this machine's. Raise `HardwareError`."""
    described = call.options.get("HARDWARE")
    return require_kernels(parse_hardware(described), f"HARDWARE={described}") if described else detect()


def plan_for(
    loaded: LoadedConfig,
    hardware: Hardware,
    launch: LaunchRequest,
    prepared: Prepared | None = None,
    source: Source = "known",
    shape: ModelShape | None = None,
) -> Plan:
    """Return the plan with the facts of the data: `prepared`, or unless it is `early` those of an earlier preparation.

    Raise `UserError`.
    """
    config = loaded.config
    asked = Request(
        config=config,
        hardware=hardware,
        shape=shape or shape_of(config.model),
        launch=launch,
        typed=loaded.typed,
        prepared=prepared or (None if launch.early else lookup(config)),
        runs=past_runs(),
    )
    own = None if asked.prepared or trains_tokenizer(config.model) else config.model.tokenizer
    try:
        if own:
            local_folder(own, "tokenizer")
        return plan_by_source(asked, source)
    except UserError as error:
        for problem in error.problems if isinstance(error, Problems) else (error,):
            if problem.place:
                problem.place = loaded.origins.get(problem.place, problem.place)  # where the key was written
        raise
    finally:
        end_tracer()


def needs_several(loaded: LoadedConfig, hardware: Hardware, request: LaunchRequest) -> bool:
    """Return whether a run would have more than one process, by its hardware or by what was typed."""
    asked = (request.num_gpus or 1) > 1 or request.num_nodes > 1 or loaded.config.launch.strategy != "auto"
    return asked or (hardware.kind == "cuda" and len(hardware.devices) > 1 and request.num_gpus != 1)


@dataclass(kw_only=True, slots=True)
class TracedMemory:
    """A rank's memory: exact where it was traced, otherwise by the formula, scaled by part to the nearest trace."""

    config: Config
    architecture: dict[str, Any]
    traces: bool = False
    """Whether to trace cases that are not in the cache."""
    observations: dict[tuple[Setup, int], dict[str, int]] = field(default_factory=dict)
    """What a trace observed of a micro-batch: bytes of every part at the peak."""
    probed: set[tuple[Setup, int]] = field(default_factory=set)
    """Observations that a probe corrected."""
    error: str | None = None
    """Why the architecture could not be traced."""

    def __call__(self, config: Config, shape: ModelShape, setup: Setup, micro_batch: int) -> dict[str, int]:
        """Return the bytes of every part."""
        # A trace is of one configuration; apart from the setup, memory depends on its tuning alone.
        same = config.tuning == self.config.tuning
        if same and (exact := self.observations.get((setup, micro_batch))):
            return dict(exact)
        parts = rank_memory(config, shape, setup, micro_batch)
        near = self._nearest(setup, micro_batch) if same else None
        if near is None:
            return parts
        (other, rows), observed = near
        return _scale_parts(parts, rank_memory(config, shape, other, rows), observed)

    def probe_path(self, plan: Plan) -> Path:
        """Return the file of a probe's measurements, named by what runs, on which devices, under which strategy."""
        cases = [key_of(self._question(plan, rank.worst_rows)) for rank in plan.ranks]
        facts = [cases, plan.strategy, plan.world_size, [rank.device_name for rank in plan.ranks]]
        return cache_folder() / "probes" / f"{text_sha256(json.dumps(facts))[:32]}.json"

    def learn(self, shape: ModelShape, plan: Plan) -> bool:
        """Observe what this plan decides, by a trace and by what a probe of it measured; return whether any is new."""
        setup, earlier = setup_of(plan), set(self.probed)
        new = self.observe(shape, setup, [rank.worst_rows for rank in plan.ranks])
        for rank, probe in zip(plan.ranks, load_probe(self.probe_path(plan)), strict=False):
            case = setup, rank.worst_rows
            if case in earlier:
                continue
            parts = self.observations.get(case) or rank_memory(self.config, shape, setup, rank.worst_rows)
            self.observations[case] = correct_parts(parts, probe, rank.capacity_bytes)
            self.probed.add(case)
            new = True
        return new

    def _nearest(self, setup: Setup, micro_batch: int) -> tuple[tuple[Setup, int], dict[str, int]] | None:
        """Return the observation nearest in tokens whose setup differs only in its rows."""
        tokens = micro_batch * setup.row_tokens

        def alike(other: Setup) -> bool:
            same: dict[str, Any] = dict.fromkeys(
                ("row_tokens", "layout", "accumulates", "label_share", "loss_chunk", "pack_tokens"), 0
            )
            return replace(other, **same) == replace(setup, **same)

        candidates = [(key, value) for key, value in self.observations.items() if alike(key[0])]
        return min(candidates, key=lambda item: abs(item[0][1] * item[0][0].row_tokens - tokens), default=None)

    def observe(self, shape: ModelShape, setup: Setup, micro_batches: Sequence[int]) -> bool:
        """Trace these micro-batches where they are not known yet; return whether there are new observations."""
        missing = [rows for rows in dict.fromkeys(micro_batches) if (setup, rows) not in self.observations]
        if not missing or self.error:
            return False
        answers = ask([self._question(setup, rows) for rows in missing], starts=self.traces)
        self.error = next((str(answer["error"]) for answer in answers if "error" in answer), None)
        if refused := next((answer for answer in answers if answer.get("configured")), None):
            raise UserError(refused["error"], hint=refused["hint"])
        answered = [(rows, answer) for rows, answer in zip(missing, answers, strict=True) if answer and not self.error]
        for rows, answer in answered:
            self.observations[setup, rows] = assemble(self.config, shape, setup, rows, answer)
        return bool(answered)

    def _question(self, setup: Setup, micro_batch: int) -> dict[str, Any]:
        return asdict(case_of(self.config, self.architecture, setup, micro_batch))


def _scale_parts(parts: Mapping[str, int], formula: Mapping[str, int], observed: Mapping[str, int]) -> dict[str, int]:
    """Return the observed parts, scaled as the formula grows.

    Temporary parts are scaled together, since the formula's peak may be at another moment.
    """
    now, then = (sum(of.get(name, 0) for name in MOVING) for of in (parts, formula))
    states = {
        name: int(size * observed.get(name, 0) / formula[name]) if formula.get(name) else size
        for name, size in parts.items()
        if name not in MOVING
    }
    return states | {name: int(observed.get(name, 0) * now / then) for name in MOVING}


def assemble(
    config: Config, shape: ModelShape, setup: Setup, micro_batch: int, result: Mapping[str, Any]
) -> dict[str, int]:
    """Return a rank's parts at its peak: temporary parts as traced, states as traced or as the strategy shards them."""
    formula = rank_memory(config, shape, setup, micro_batch)
    best: dict[str, int] = {}
    for traced_parts in result["moments"].values():
        parts = {name: max(0, traced_parts.get(name, 0)) for name in MOVING}
        for name in STATES:
            if name in formula:
                parts[name] = formula[name] if setup.sharded else traced_parts.get(name, 0)
        if setup.optim not in TRACED_OPTIMIZERS or setup.sharded:
            parts["optimizer"] = formula["optimizer"]
        parts["workspace"] += WORKSPACE_BYTES[setup.device]
        parts |= {name: formula[name] for name in ("buffers", "context")}
        best = max(best, parts, key=lambda parts: sum(parts.values()))
    traced = setup.device == "cuda" and setup.expandable_segments
    return best | {"fragmentation": SEGMENTS_BYTES if traced else formula["fragmentation"]}


NOT_ALLOCATED = ("context", "fragmentation")


@dataclass(frozen=True, kw_only=True, slots=True)
class Probed:
    """The measurements of one rank in a probe."""

    allocated_bytes: int
    """Peak of torch's allocations on a GPU; 0 on a CPU, where it is not measured."""
    reserved_bytes: int
    """Peak of what torch's allocator reserved on a GPU; 0 on a CPU."""
    device_bytes: int
    """Peak of the process: on a GPU its device memory, including context and libraries; on a CPU its resident size."""
    failed: bool = False
    """Whether memory ran out."""


def save_probe(path: Path, measurements: Sequence[Probed]) -> None:
    """Save the measurements of all ranks."""
    write_json(path, [asdict(measurement) for measurement in measurements])


def load_probe(path: Path) -> list[Probed]:
    """Return the measurements of all ranks; empty if no probe was made."""
    rows: list[dict[str, Any]] = read_json(path) if path.is_file() else []
    return [Probed(**row) for row in rows]


def correct_parts(parts: Mapping[str, int], measurement: Probed, capacity: int) -> dict[str, int]:
    """Return the parts, adjusted to add up to the measurement.

    On a GPU the context is what the process used beyond torch's reserve, fragmentation is what was reserved but not
    allocated, and the activations take the remaining difference. On a CPU only the resident size is known, and the
    heap's gaps take the difference. Where memory ran out, the activations are raised until the parts exceed `capacity`.
    """
    fixed = dict(parts)
    if measurement.failed:
        short = capacity + 1 - sum(fixed.values())
        return fixed | {"activations": fixed["activations"] + max(0, short)}
    if not measurement.allocated_bytes:
        rest = sum(size for name, size in fixed.items() if name != "fragmentation")
        return fixed | {"fragmentation": max(0, measurement.device_bytes - rest)}
    allocated = sum(size for name, size in fixed.items() if name not in NOT_ALLOCATED)
    return fixed | {
        "activations": max(0, fixed["activations"] + measurement.allocated_bytes - allocated),
        "context": max(0, measurement.device_bytes - measurement.reserved_bytes),
        "fragmentation": max(0, measurement.reserved_bytes - measurement.allocated_bytes),
    }


SEGMENTS_BYTES = 96 * MIB
"""What a GPU's allocator loses with `expandable_segments` where a step is traced: replays of eleven traced steps with a
model of that allocator lost 10 to 86 MiB, with and without recomputation, whatever the size of the step.
"""
TRACED_OPTIMIZERS = frozenset({"adamw_torch", "adamw_torch_fused", "muon"})
"""Optimizers whose step is traced; the states of others are counted by formula."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A micro-batch of a rank, as a trace runs it."""

    architecture: dict[str, Any]
    """The model's `config.json`."""
    device: str
    """`cpu` or `cuda`: the device that the plan is for."""
    mode: str
    quantization: str
    """`nf4`, `int8`, or `none`."""
    lora: dict[str, Any]
    """`tuning.lora`."""
    new_tokens: int
    weights_dtype: str
    adapter_dtype: str
    precision: str
    autocast: bool
    gradient_checkpointing: bool
    activation_offload: bool
    layout: str
    attention: str
    optim: str
    """A word of `train.optim` that is traced, or `none` where its states are counted by formula."""
    fused_adapters: bool
    loss_chunk: int
    rows: int
    row_tokens: int
    labels: int
    """Label positions of the micro-batch."""
    accumulates: bool
    """Whether the gradients of earlier micro-steps stay in memory while this one runs."""
    clips: bool
    """Whether gradients are clipped by their norm."""
    kernels: str = "off"
    packed: bool = False
    """Whether each of the `rows` is a pack of several, kept apart by a mask."""
    nf4_experts: bool = False
    """Whether fused experts are quantised too."""
    tensor_parallel: int = 1
    """Number of ranks that hold slices of the layers; one of them is traced."""
    loss: str = "nll"
    label_smoothing: float = 0.0


def case_of(config: Config, architecture: dict[str, Any], setup: Setup, micro_batch: int) -> Case:
    """Return the case of a rank's worst micro-batch.

    Under ZeRO and FSDP2 a complete replica is traced in the type of the computation, without an optimizer: shards,
    states and gathered weights are arithmetic.
    """
    tuning, lora = config.tuning, config.tuning.lora
    computed = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[setup.precision]
    base = computed if setup.sharded else setup.weights_dtype
    adapter = {2: "bfloat16", 4: "float32"}[trained_bytes(config, setup)] if tuning.mode != "full" else "float32"
    quantized = bool(architecture.get("quantization_config"))
    # A rank's slice of the sequence: in attention, all tokens of some heads take as much memory as some tokens of all.
    row_tokens = -(-setup.row_tokens // setup.sequence_parallel)
    return Case(
        architecture=architecture,
        device=setup.device,
        mode=tuning.mode,
        quantization=tuning.quantization if tuning.mode == "qlora" or quantized else "none",
        nf4_experts=not quantized and quantises_experts(tuning, setup.strategy),
        lora=asdict(replace(lora, init="default")),
        new_tokens=len(config.data.new_tokens),
        weights_dtype=base,
        adapter_dtype=computed if setup.sharded else adapter,
        precision=setup.precision,
        autocast=setup.precision != "fp32" and not setup.sharded,
        gradient_checkpointing=setup.gradient_checkpointing,
        activation_offload=setup.activation_offload and setup.device == "cuda",
        layout=setup.layout,
        attention=setup.attn_implementation,
        optim=setup.optim if setup.optim in TRACED_OPTIMIZERS and not setup.sharded else "none",
        fused_adapters=fuses_adapters(setup.strategy, lora),
        loss_chunk=setup.loss_chunk,
        kernels=setup.kernels,
        rows=micro_batch,
        row_tokens=row_tokens,
        labels=max(1, math.ceil(micro_batch * row_tokens * setup.slice_label_share)),
        accumulates=setup.accumulates,
        clips=config.train.max_grad_norm > 0 and not setup.sharded,
        packed=setup.pack_tokens > 0,
        tensor_parallel=setup.tensor_parallel,
        loss=config.train.loss,
        label_smoothing=config.train.label_smoothing_factor,
    )
