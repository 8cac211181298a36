"""Memory that was measured, kept in the cache: a trace of the real step (acts: runs `python -m sft_play.trace`), or two steps on the device."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from sft_play.config.schema import Config
from sft_play.files import read_json, text_sha256, write_json
from sft_play.plan.memory import WORKSPACE_BYTES, rank_memory, trained_bytes
from sft_play.plan.plan import Plan, Setup, setup_of
from sft_play.plan.shape import ModelShape, fuses_adapters, quantises_experts

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
    traces: bool = False
    """Whether what is not in the cache is traced."""
    found: dict[tuple[Setup, int], Observation] = field(default_factory=dict)
    error: str | None = None
    """Why the architecture could not be traced."""

    def __call__(self, config: Config, shape: ModelShape, setup: Setup, micro_batch: int) -> dict[str, int]:
        """Return the bytes of every part."""
        if config is self.config and (exact := self.found.get((setup, micro_batch))):
            return dict(exact.parts)
        parts = rank_memory(config, shape, setup, micro_batch)
        near = self._nearest(setup, micro_batch) if config is self.config else None
        if near is None:
            return parts
        (other, rows), observed = near
        return _scale_parts(parts, rank_memory(config, shape, other, rows), observed.parts)

    def probe_path(self, plan: Plan) -> Path:
        """Return where a probe of this plan keeps what it measured: by what runs, on which devices, under which strategy."""
        cases = [case_of(self.config, self.architecture, plan, rank.worst_rows).key() for rank in plan.ranks]
        facts = [cases, plan.strategy, plan.world_size, [rank.device_name for rank in plan.ranks]]
        return self.cache_folder.parent / "probes" / f"{text_sha256(json.dumps(facts))[:32]}.json"

    def correct(self, shape: ModelShape, plan: Plan, probes: Sequence[Probed]) -> None:
        """Take over what a probe of this plan measured."""
        setup = setup_of(plan)
        for rank, probe in zip(plan.ranks, probes, strict=True):
            key = setup, rank.worst_rows
            known = self.found.get(key)
            parts = dict(known.parts) if known else rank_memory(self.config, shape, setup, rank.worst_rows)
            moment, operation = (known.moment, known.operation) if known else ("", "")
            fixed = correct_parts(parts, probe, rank.capacity_bytes)
            self.found[key] = Observation(parts=fixed, moment=moment, operation=operation)

    def _nearest(self, setup: Setup, micro_batch: int) -> tuple[tuple[Setup, int], Observation] | None:
        """Return the observation with the same setup but for its rows, with most nearly as many tokens."""
        tokens = micro_batch * setup.row_tokens

        def alike(other: Setup) -> bool:
            same: dict[str, Any] = dict.fromkeys(
                ("row_tokens", "layout", "accumulates", "label_share", "loss_chunk", "pack_tokens"), 0
            )
            return replace(other, **same) == replace(setup, **same)

        candidates = [(key, value) for key, value in self.found.items() if alike(key[0])]
        return min(candidates, key=lambda item: abs(item[0][1] * item[0][0].row_tokens - tokens), default=None)

    def observe(self, shape: ModelShape, setup: Setup, micro_batches: Sequence[int]) -> bool:
        """Trace what is not known yet of these micro-batches; return whether anything new came of it."""
        missing = [rows for rows in dict.fromkeys(micro_batches) if (setup, rows) not in self.found]
        if not missing or self.error:
            return False
        cases = [case_of(self.config, self.architecture, setup, rows) for rows in missing]
        paths = [self.cache_folder / f"{case.key()}.json" for case in cases]
        unknown = [(case, path) for case, path in zip(cases, paths, strict=True) if self.traces and not path.is_file()]
        answers = running_tracer().ask([asdict(case) for case, _ in unknown]) if unknown else []
        for (_, path), answer in zip(unknown, answers, strict=True):
            if "error" in answer:
                self.error = str(answer["error"])
                return False
            write_json(path, answer)
        known = [(rows, path) for rows, path in zip(missing, paths, strict=True) if path.is_file()]
        for rows, path in known:
            self.found[setup, rows] = assemble(self.config, shape, setup, rows, read_json(path))
        return bool(known)


def _scale_parts(parts: Mapping[str, int], formula: Mapping[str, int], observed: Mapping[str, int]) -> dict[str, int]:
    """Return what was observed, scaled as the formula grew; what moves as a whole, since the formula's peak may be another moment."""
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
    """Return a rank's parts at its worst moment: what moves as traced; states as traced, or as the strategy shards them."""
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
        by_formula = int(share * sum(best.parts.get(name, 0) for name in MOVING))
        lost = int(result.get("lost_bytes", by_formula)) if _grows_segments(setup) else by_formula
    return replace(best, parts={**best.parts, "fragmentation": lost})


def _grows_segments(setup: Setup) -> bool:
    """Whether workers run the allocator that a trace replays, `expandable_segments`: where they can, and unless the user chose otherwise."""
    own = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    return setup.expandable_segments if own is None else "expandable_segments:true" in own.lower()


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


def save(path: Path, found: Sequence[Probed]) -> None:
    """Keep a measurement of all ranks."""
    write_json(path, [asdict(one) for one in found])


def load(path: Path) -> list[Probed]:
    """Return a measurement of all ranks, empty where none was made."""
    rows: list[dict[str, Any]] = read_json(path) if path.is_file() else []
    return [Probed(**row) for row in rows]


def correct_parts(parts: Mapping[str, int], found: Probed, capacity: int) -> dict[str, int]:
    """Return the parts so that they add up to what was measured.

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


TRACE_SECONDS = 300
"""A trace takes seconds; one that takes minutes hangs."""
PACKAGES = ("torch", "transformers", "peft", "accelerate")


_running: dict[int, Tracer] = {}
"""By process, since a forked one must not use its parent's."""


def running_tracer() -> Tracer:
    """Return the tracer that counts a model and then traces it, so that torch is imported once; it ends with `end_tracer`, or with us."""
    if os.getpid() not in _running:
        _running[os.getpid()] = Tracer()
    return _running[os.getpid()]


def end_tracer() -> None:
    """End this process's tracer."""
    if os.getpid() in _running:
        _running.pop(os.getpid()).close()


class Tracer:
    """One `python -m sft_play.trace`, ended by `close`."""

    def __init__(self) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`, as the process is
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sft_play.trace"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip

    def ask(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the result of each request (a case, or `{"count": architecture}`), `{"error": "..."}` where there is none."""
        assert self._process.stdin and self._process.stdout
        line = b""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(requests).encode() + b"\n")
            self._process.stdin.flush()
            ready, _, _ = select.select([self._process.stdout], [], [], TRACE_SECONDS)
            line = self._process.stdout.readline() if ready else b""
        if not line:
            return [{"error": f"the trace {self._failure()}"}] * len(requests)
        found: list[dict[str, Any]] = json.loads(line)
        return found

    def _failure(self) -> str:
        """Return how the process failed, with the last line that it or a library wrote to stderr."""
        try:
            code = self._process.wait(timeout=5)  # its output closes a moment before it ends
        except subprocess.TimeoutExpired:
            return f"took longer than {TRACE_SECONDS} s"
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return f"ended with code {code}" + (f": {lines[-1].strip()[:300]}" if lines else "")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
        self._said.close()


@cache
def versions() -> str:
    """Return the versions of the packages that decide what a step allocates."""
    from importlib.metadata import version

    return " ".join(f"{name}=={version(name)}" for name in PACKAGES)


TRACED_OPTIMIZERS = frozenset({"adamw_torch", "adamw_torch_fused"})
"""Optimizers whose step is traced; the states of others are counted by formula."""
TRACE_VERSION = 8
"""Raised when the trace itself changes, so that older results are not taken for new ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One micro-batch of one rank."""

    architecture: dict[str, Any]
    """The model's `config.json`."""
    device: str
    """`cpu` or `cuda`: what is planned for."""
    mode: str
    quantization: str
    """`nf4`, `int8`, or `none`."""
    lora_r: int
    lora_dropout: float
    target_modules: str | list[str]
    weights_dtype: str
    adapter_dtype: str
    precision: str
    autocast: bool
    gradient_checkpointing: bool
    layout: str
    attention: str
    optim: str
    """torch's name of an AdamW, or `none` where its states are counted by formula."""
    fused_adapters: bool
    loss_chunk: int
    rows: int
    row_tokens: int
    labels: int
    """Label positions of the whole micro-batch."""
    accumulates: bool
    """Whether gradients of an earlier micro-step are held while this one runs."""
    clips: bool
    """Whether gradients are clipped by their norm."""
    packed: bool = False
    """Whether each of the `rows` is a pack of several, told apart by a mask."""
    nf4_experts: bool = False
    """Whether fused experts are quantised too."""
    tensor_parallel: int = 1
    """Ranks that hold slices of the layers; one of them is traced."""

    def key(self) -> str:
        """Return a name for the case's result, by everything that it depends on."""
        return text_sha256(json.dumps([TRACE_VERSION, versions(), asdict(self)], sort_keys=True))[:32]


def case_of(config: Config, architecture: dict[str, Any], setup: Setup, micro_batch: int) -> Case:
    """Return the case of a rank's worst micro-batch.

    Under ZeRO and FSDP2 a whole replica is traced in the type that is computed in, without an optimizer: shards, states and what is
    gathered are arithmetic (`plan.measured`).
    """
    tuning, lora = config.tuning, config.tuning.lora
    sharding = setup.zero or setup.strategy == "fsdp2"
    computed = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[setup.precision]
    base = computed if sharding else setup.weights_dtype
    adapter = {2: "bfloat16", 4: "float32"}[trained_bytes(config, setup)] if tuning.mode != "full" else "float32"
    quantized = bool(architecture.get("quantization_config"))
    # A rank's slice; all tokens of few heads are as much as few of all.
    row_tokens = -(-setup.row_tokens // setup.sequence_parallel)
    return Case(
        architecture=architecture,
        device=setup.device,
        mode=tuning.mode,
        quantization=tuning.quantization if tuning.mode == "qlora" or quantized else "none",
        nf4_experts=not quantized and quantises_experts(tuning, setup.strategy),
        lora_r=lora.r, lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        weights_dtype=base,
        adapter_dtype=computed if sharding else adapter,
        precision=setup.precision,
        autocast=setup.precision != "fp32" and not sharding,
        gradient_checkpointing=setup.gradient_checkpointing,
        layout=setup.layout,
        attention=setup.attn_implementation,
        optim=setup.optim if setup.optim in TRACED_OPTIMIZERS and not sharding else "none",
        fused_adapters=fuses_adapters(setup.strategy),
        loss_chunk=setup.loss_chunk,
        rows=micro_batch,
        row_tokens=row_tokens,
        labels=max(1, math.ceil(micro_batch * row_tokens * setup.slice_label_share)),
        accumulates=setup.accumulates,
        clips=config.train.max_grad_norm > 0 and not sharding,
        packed=setup.pack_tokens > 0, tensor_parallel=setup.tensor_parallel,
    )  # fmt: skip
