"""The plan: every decision about a run, with its reason, as plain data that `plan.json` keeps and workers obey."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from sft_play.config.reader import Positive, Range, misfit, record_of
from sft_play.config.schema import Config
from sft_play.errors import CheckpointError, first_line
from sft_play.files import read_json, write_json
from sft_play.plan.hardware import Device
from sft_play.runs.manifest import SHARDED
from sft_play.runs.origin import code_sha256, git_state, machine, versions
from sft_play.runs.prepared import Prepared
from sft_play.runs.stamp import Stamp, fixed_settings

Strategy = Literal["single", "ddp", "zero1", "zero2", "zero3", "fsdp2"]
DISTRIBUTED_TYPE: Mapping[Strategy, str] = {
    "single": "NO",
    "ddp": "MULTI_GPU",
    "zero1": "DEEPSPEED",
    "zero2": "DEEPSPEED",
    "zero3": "DEEPSPEED",
    "fsdp2": "FSDP",
}
"""Accelerate's name of a strategy; DDP on CPUs is `MULTI_CPU`."""
CommandStrategy = Literal["single", "ddp", "zero", "fsdp2", "auto"]
"""Strategy that a command implies: `make train` is `single`, `make train-distributed` is `auto`."""
Precision = Literal["fp32", "bf16", "fp16"]
Layout = Literal["flattened", "unmasked", "padded"]
"""Rows in one line, or one line per row, padded on the right without an attention mask or with one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlan:
    """What one process does and needs."""

    rank: int
    device: str
    """`cpu` or `cuda:LOCAL_INDEX`."""
    device_name: str
    micro_batch: int
    """Rows per micro-step; packs where rows are packed."""
    accumulation: int
    """Micro-steps per optimizer step; with packing an upper bound, since empty ones are skipped."""
    memory_bytes: Mapping[str, int]
    """Parts: frozen, quant_state, adapters, gradients, optimizer, buffers, activations, recompute, logits, context, ...
    """
    peak_bytes: int
    capacity_bytes: int
    most_rows: int = 0
    """The largest micro-batch that fits this rank; 0 in plans of earlier versions."""

    @property
    def worst_rows(self) -> int:
        """Rows that memory is planned for; at least 1, since a rank without rows runs one empty micro-step."""
        return max(1, self.micro_batch)


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def tightest(ranks: Sequence[RankPlan]) -> RankPlan:
    """Return the rank whose peak is the largest share of its capacity."""
    return max(ranks, key=lambda rank: rank.peak_bytes / max(1, rank.capacity_bytes))


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """How a run computes: what the memory of a rank depends on, next to configuration and shape."""

    device: Literal["cpu", "cuda"]
    strategy: Strategy
    world_size: int
    precision: Precision
    """Type of the computation: the autocast type, or fp32."""
    weights_dtype: str
    """Type of the base's weights as they are held: `float32`, `bfloat16`, `float16`."""
    optim: str
    """Optimizer that runs, after any substitution."""
    gradient_checkpointing: bool
    layout: Layout
    """How the rows of a micro-batch become a tensor."""
    attn_implementation: str
    kernels: Literal["off", "liger"] = "off"
    """Kernels for norms, rotary embeddings and SwiGLU: those of transformers (`off`), or Liger's."""
    activation_offload: bool = False
    """Whether the inputs of recomputed layers wait in host memory."""
    label_share: float = 1.0
    """Share of the tokens of the worst micro-batch that a loss is computed for: logits exist only there."""
    row_tokens: int = 0
    """Tokens of the rows of that micro-batch: the longest row of the data, or `model.max_seq_len`."""
    accumulates: bool = True
    """Whether the gradients of earlier micro-steps stay in memory while later ones run."""
    loss_chunk: int = 0
    """Label positions per chunk of head and loss; 0 computes all at once."""
    offload_optimizer: bool = False
    """Whether DeepSpeed keeps optimizer states and gradients in host memory."""
    offload_parameters: bool = False
    """Whether ZeRO-3 keeps the weights in host memory too."""
    pack_tokens: int = 0
    """Largest number of tokens in a pack, the unit that micro-batches then count; 0 without packing."""
    expandable_segments: bool = True
    """Whether torch's allocator grows its blocks in place on the GPUs; not under WSL2."""
    sequence_parallel: int = 1
    """Neighbouring ranks that hold slices of the same sequences and therefore share one micro-batch."""
    tensor_parallel: int = 1
    """Neighbouring ranks that hold slices of the same layers and therefore compute the same rows."""
    stages: tuple[int, ...] = ()
    """Layers of each pipeline stage, whose ranks are neighbours; empty without a pipeline."""
    stage: int | None = None
    """Index of the stage that this setup describes; `None` for the one that needs most memory."""

    def on(self, rank: int) -> Self:
        """Return the setup of a rank: in a pipeline, that of its stage."""
        return replace(self, stage=rank % len(self.stages)) if self.stages else self

    @property
    def stage_count(self) -> int:
        """Ranks per pipeline; 1 without one."""
        return max(1, len(self.stages))

    @property
    def copies(self) -> int:
        """Ranks that compute all tokens of the same rows, each with different weights."""
        return self.tensor_parallel * self.stage_count

    @property
    def group_size(self) -> int:
        """Neighbouring ranks that train the same rows."""
        return self.sequence_parallel * self.copies

    @property
    def data_world(self) -> int:
        """Number of rank groups that train different rows."""
        return self.world_size // self.group_size

    @property
    def slice_label_share(self) -> float:
        """Largest share of a slice's tokens that have labels: all labels of a sequence may be in one slice."""
        return min(1.0, self.label_share * self.sequence_parallel)

    @property
    def autocast(self) -> bool:
        """Whether autocast multiplies fp32 weights in a narrower type."""
        # DeepSpeed casts the weights themselves, FSDP2 those that it gathers.
        return self.precision != "fp32" and self.weights_dtype == "float32" and not self.sharded

    @property
    def zero(self) -> bool:
        """Whether DeepSpeed holds weights, gradients and optimizer."""
        return self.strategy.startswith("zero")

    @property
    def sharded(self) -> bool:
        """Whether ranks divide states, by an engine under which all make the same micro-steps (ZeRO, FSDP2)."""
        return self.strategy in SHARDED

    @property
    def gathers(self) -> bool:
        """Whether weights are sharded, and sent in every micro-step."""
        return self.strategy in ("zero3", "fsdp2")

    @property
    def passes(self) -> int:
        """Passes through the layers in a micro-step: forward, backward, and forward again where recomputed."""
        return 3 if self.gradient_checkpointing else 2

    @property
    def gatherings(self) -> int:
        """How often a micro-step gathers sharded weights: ZeRO-3 for each pass; FSDP2 for forward and backward, within
        which they stay gathered for the recomputation (torch 2.13: `FSDPState._pre_forward`, and measured).
        """
        return 2 if self.strategy == "fsdp2" else self.passes

    @property
    def width(self) -> int:
        """Bytes of an operand of a matrix multiplication."""
        return 4 if self.precision == "fp32" and self.weights_dtype == "float32" else 2

    @property
    def weight_bytes(self) -> int:
        """Bytes of a base weight."""
        return DTYPE_BYTES[self.weights_dtype]


Speed = Annotated[float, Range(above=0, maximum=1e30)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The facts about model and hardware by which speeds are compared."""

    devices: tuple[str, ...]
    """`plan.throughput.same_name` of each kind of device."""
    world_size: Positive
    strategy: str
    mode: str
    precision: str
    offload: bool
    flops_per_token: Speed
    """Operations that a token requires, without recomputation and attention's own products."""
    guess: Speed
    """Tokens per second by arithmetic alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PastRun:
    """A complete run."""

    name: str
    work: Work
    steady_tokens_per_second: Speed
    """Speed at the median of its steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(Setup):
    """All decisions of a run. Workers take every value from here and decide nothing themselves."""

    num_nodes: int
    backend: Literal["none", "gloo", "nccl"]
    source: Literal["formula", "trace", "probe"]
    learning_rate: float
    ranks: tuple[RankPlan, ...]
    global_batch_size: int
    steps: int | None
    """Optimizer steps in all; `None` until rows are known and `max_steps` is -1."""
    steps_per_epoch: int | None
    warmup_steps: int | None
    eval_batch_size: int
    """Prompts per batch of generation, and rows per batch of the loss, per device."""
    tokens_per_second: float | None = None
    """Forecast over all ranks."""
    communication_share: float | None = None
    seconds_per_step: float | None = None
    total_seconds: float | None = None
    communication_seconds: float | None = None
    """Of a step, unless computation hides it."""
    mfu: float | None = None
    """Forecast share of the devices' peak spent on the arithmetic that tokens require, without recomputation."""
    speed_basis: str | None = None
    """Source of the forecast: a measured run, or an estimate with its arithmetic."""
    work: Work | None = None
    """What later forecasts compare this run by, with what arithmetic alone predicts for it."""
    cost: float | None = None
    """Cost of all steps, in the currency of `PRICE_PER_HOUR`; `None` without a price."""
    nf4_experts: bool = False
    """Whether fused experts are quantised too, as nf4."""
    node_ranks: tuple[int, ...] = ()
    """Number of ranks of each node; empty if all nodes have the same number."""
    exchanges: tuple[Mapping[str, Any], ...] = ()
    """Cost of each way to share gradients over the network (`plan.network.exchanges`); empty without a network."""
    most_rows: int = 0
    """Rows of the largest micro-batch that fits the tightest rank."""
    longest_row: int = 0
    """Tokens of the longest rows with which the planned micro-batch fits, at most the model's context."""
    recoveries: tuple[Mapping[str, Any], ...] = ()
    """Changes made because memory ran out, oldest first (`launch.recovery.facts`)."""
    reasons: Mapping[str, str]
    """Kind of a choice, such as `strategy` -> its reason, in the order of the choices."""
    notices: tuple[str, ...] = ()
    """Reasons that may surprise, shown with every plan."""

    def layers_of(self, rank: int) -> tuple[int, int]:
        """Return the half-open range of layers in a rank's stage."""
        stage = rank % len(self.stages)
        return sum(self.stages[:stage]), sum(self.stages[: stage + 1])

    def with_reason(self, kind: str, text: str) -> Plan:
        """Return the plan with the reason of a choice."""
        return replace(self, reasons={**self.reasons, kind: text})

    @property
    def slots(self) -> tuple[tuple[int, int], ...]:
        """Micro-batch and micro-steps of each group of ranks that train the same rows."""
        return tuple((rank.micro_batch, rank.accumulation) for rank in self.ranks[:: self.group_size])

    @property
    def ranks_by_node(self) -> tuple[int, ...]:
        """How many ranks each node has."""
        return self.node_ranks or (self.world_size // self.num_nodes,) * self.num_nodes

    def save(self, path: Path) -> None:
        write_json(path, self.to_json())

    def to_json(self) -> dict[str, Any]:
        value = asdict(self)
        del value["stage"]
        return value

    @staticmethod
    def load(path: Path) -> Plan:
        """Read a run's plan. Raise `CheckpointError` for a file that is not a valid plan."""
        try:
            value = read_json(path, follow=False)
            if (key := misfit(value, Plan)) is not None:
                raise ValueError(f"`{key}` is of another type")
            return Plan.from_json(value)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            why = "it is missing" if isinstance(error, FileNotFoundError) else first_line(error)
            hint = "restore it from a backup, or copy it from a run that the same command starts under another RUN_NAME"
            raise CheckpointError(f"not the plan of a run: {why}", place=str(path), hint=hint) from error

    @staticmethod
    def from_json(value: dict[str, Any]) -> Plan:
        value = {name: part for name, part in value.items() if name in Plan.__dataclass_fields__}  # some were dropped
        lists = {name: tuple(items) for name, items in value.items() if isinstance(items, list)}
        work = value["work"] and record_of(value["work"], Work)
        return Plan(**{**value, **lists, "work": work, "ranks": tuple(RankPlan(**rank) for rank in value["ranks"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRequest:
    """The launch as the user typed it; `None` leaves a choice to the plan."""

    command_strategy: CommandStrategy = "single"
    num_gpus: int | None = None
    """Processes on this machine."""
    num_nodes: int = 1
    node_rank: int = 0
    by_accelerate: tuple[str, ...] = ()
    """What an accelerate config decides: `strategy`, and keys of `train.`."""
    node_devices: tuple[tuple[Device, ...], ...] = ()
    """Devices of every node's ranks, in node order; empty before nodes have met, when all are assumed to be alike."""
    zero_stage: int | None = None
    """Stage of a user's own DeepSpeed JSON."""
    offload_optimizer: bool = False
    """Whether that JSON keeps optimizer states and gradients in host memory."""
    offload_parameters: bool = False
    """Whether that JSON keeps the weights in host memory too (stage 3)."""
    early: bool = False
    """Whether the data are not prepared yet: then lack of memory is refused only where no data could change it."""
    halvings: int = 0
    """How often the micro-batch was halved because memory ran out."""
    force_checkpointing: bool = False
    """Whether to recompute activations because memory ran out at a micro-batch of 1; a typed `false` outranks it."""
    unpack: bool = False
    """Whether to leave rows unpacked because memory ran out with one pack; a typed `on` outranks it."""

    def without_json(self, command: CommandStrategy) -> LaunchRequest:
        """Return the launch by another command, without a DeepSpeed JSON."""
        without: dict[str, Any] = {"zero_stage": None, "offload_optimizer": False, "offload_parameters": False}
        return replace(self, command_strategy=command, by_accelerate=(), **without)

    def with_offloading(self) -> LaunchRequest:
        """Return the launch under ZeRO-3 with all states in host memory."""
        return replace(self, command_strategy="zero", zero_stage=3, offload_optimizer=True, offload_parameters=True)


COMMANDS: Mapping[str, str] = {
    "single": "train",
    "ddp": "train-distributed",
    "auto": "train-distributed",
    "fsdp2": "train-fsdp",
    "zero": "train-deepspeed",
}
"""Strategy that a command implies -> the command's name."""


def command_of(strategy: str) -> str:
    """Return the command that trains with a strategy, such as `train-distributed`."""
    return COMMANDS.get("zero" if strategy.startswith("zero") else strategy, "train")


def setup_of(plan: Plan) -> Setup:
    """Return the part of a plan that the memory of its ranks depends on."""
    return Setup(**{field.name: getattr(plan, field.name) for field in fields(Setup)})


# The stamp of a run.


def make_stamp(config: Config, plan: Plan, prepared: Prepared) -> Stamp:
    """Return the stamp of a run, from what is known before it starts."""
    tuning, devices = config.tuning, Counter(rank.device_name for rank in plan.ranks)
    splits = {"train": prepared.train, "validation": prepared.validation}
    return Stamp(
        backend=tuning.backend,
        mode=tuning.mode,
        quantization=(
            "none" if tuning.mode != "qlora" else tuning.quantization + (" with experts" if plan.nf4_experts else "")
        ),
        base_model=prepared.model.name,
        base_revision=prepared.model.revision,
        base_fingerprint=prepared.model.fingerprint,
        tokenizer_fingerprint=prepared.model.tokenizer_fingerprint,
        lora=asdict(tuning.lora) if tuning.mode != "full" else None,
        parent=parent_facts(config, prepared),
        max_seq_len=config.model.max_seq_len,
        precision=plan.precision,
        weights_dtype=plan.weights_dtype,
        train_data=prepared.train.fingerprint if prepared.train else None,
        validation_data=prepared.validation.fingerprint if prepared.validation else None,
        seed=config.train.seed,
        global_batch_size=plan.global_batch_size,
        strategy=plan.strategy,
        world_size=plan.world_size,
        versions=versions(),
        mixture=_mixture(config, prepared),
        recoveries=tuple(plan.recoveries),
        # Fused kernels and paging change no optimizer state.
        optimizer=plan.optim.removesuffix("_fused").removeprefix("paged_"),
        template=next((split.template for split in splits.values() if split), None),
        plan={name: getattr(plan, name) for name in PLANNED} | {"batches": describe_batches(plan.ranks)},
        settings=fixed_settings(config),
        data_files={
            f"{name}:{source.name}": source.content
            for name, split in splits.items()
            if split
            for source in split.sources
        },
        code=code_sha256(),
        git=git_state(),
        machine=machine([f"{count} x {name}" for name, count in devices.items()], cuda=plan.device == "cuda"),
    )


def parent_facts(config: Config, prepared: Prepared) -> dict[str, Any] | None:
    """Return a stamp's facts about the adapter from which a run started; `None` without one."""
    adapter = prepared.adapter
    if adapter is None:
        return None
    return {"name": adapter.name, "fingerprint": adapter.fingerprint, "use": config.tuning.adapter}


PLANNED = (
    "device",
    "num_nodes",
    "backend",
    "optim",
    "learning_rate",
    "attn_implementation",
    "layout",
    "gradient_checkpointing",
    "activation_offload",
    "steps",
    "warmup_steps",
    "loss_chunk",
    "pack_tokens",
    "offload_optimizer",
    "offload_parameters",
)
"""Facts of a plan that a repetition of the run must reproduce."""


def describe_batches(ranks: Sequence[RankPlan]) -> list[str]:
    """Return the distinct divisions of a batch as ranks x micro-batch x accumulation."""
    counts = Counter((rank.micro_batch, rank.accumulation) for rank in ranks)
    return [f"{count} x {micro} x {steps}" for (micro, steps), count in counts.items()]


def _mixture(config: Config, prepared: Prepared) -> dict[str, Any] | None:
    sources = prepared.train.sources if prepared.train else ()
    if not any(source.weight for source in sources):
        return None
    weights = [source.weight for source in sources]
    return {"weights": weights, "mix_by": config.data.mix_by, "exhausted": config.data.exhausted}
