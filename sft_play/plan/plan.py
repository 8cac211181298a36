"""The plan: every decision about a run, with its reason, as plain data that `plan.json` keeps and workers obey."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import Any, Literal

from sft_play.errors import CheckpointError, first_line
from sft_play.files import read_json, write_json

Strategy = Literal["single", "ddp", "zero1", "zero2", "zero3", "fsdp2"]
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
    """Micro-steps per optimizer step; with packing the most there can be, and empty ones are skipped."""
    memory_bytes: Mapping[str, int]
    """Parts: frozen, quant_state, adapters, gradients, optimizer, buffers, activations, recompute, logits, context, ..."""
    peak_bytes: int
    capacity_bytes: int
    most_rows: int = 0
    """The largest micro-batch that fits this rank; 0 in plans of earlier versions."""
    cost: tuple[float, float] | tuple[()] = ()
    """(seconds of a micro-step however few its rows, seconds of each row or pack), measured or by prior; `()` when unknown."""

    @property
    def worst_rows(self) -> int:
        """Rows that memory is planned for: of a rank that gets none too, which runs one empty micro-step."""
        return max(1, self.micro_batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All decisions of a run. Workers take every value from here and decide nothing themselves."""

    world_size: int
    num_nodes: int
    device: Literal["cpu", "cuda"]
    backend: Literal["none", "gloo", "nccl"]
    strategy: Strategy
    source: Literal["formula", "trace", "probe"]
    precision: Precision
    """Computation: autocast type, or fp32."""
    weights_dtype: str
    """Type in which frozen weights are held: `float32`, `bfloat16`, `float16`."""
    attn_implementation: str
    layout: Layout
    """How the rows of a micro-batch become a tensor."""
    gradient_checkpointing: bool
    optim: str
    """Optimizer that really runs, after any substitution."""
    learning_rate: float
    ranks: tuple[RankPlan, ...]
    global_batch_size: int
    steps: int | None
    """Optimizer steps in all; `None` until rows are known and `max_steps` is -1."""
    steps_per_epoch: int | None
    warmup_steps: int | None
    eval_batch_size: int
    """Prompts generated for together, and rows of a loss batch, per device."""
    tokens_per_second: float | None
    """Forecast over all ranks."""
    communication_share: float | None
    seconds_per_step: float | None
    total_seconds: float | None
    epoch_seconds: float | None = None
    communication_seconds: float | None = None
    """Of a step, unless computation hides it."""
    mfu: float | None = None
    """Forecast share of the devices' peak that goes into what every token must cost (recomputation left out)."""
    speed_basis: str | None = None
    """What the forecast rests on: a prior, or a calibration with its date."""
    energy_kwh: float | None = None
    """At most, of the GPUs at their power limits, for all steps; `None` where a limit is not known."""
    cost: float | None = None
    """Of all steps, in the currency of `PRICE_PER_HOUR`; `None` when no price was given."""
    offload_optimizer: bool = False
    """Whether DeepSpeed keeps optimizer states and gradients in the machine's memory."""
    offload_parameters: bool = False
    """Whether ZeRO-3 keeps the weights there too."""
    expandable_segments: bool = True
    """Whether torch's allocator grows its blocks in place on the GPUs; not under WSL2."""
    nf4_experts: bool = False
    """Whether fused experts are quantised too, as nf4."""
    node_ranks: tuple[int, ...] = ()
    """Ranks of each node; empty where all have the same number."""
    exchanges: tuple[Mapping[str, Any], ...] = ()
    """What each way to share gradients costs over the given network (`plan.network.Exchange`); empty where none was given."""
    kernels: Literal["off", "liger"] = "off"
    """Whose kernels compute norms, rotary embeddings and SwiGLU: transformers' own, or Liger's."""
    loss_chunk: int = 0
    """Label positions for which head and loss are computed at a time; 0 for all at once."""
    most_rows: int = 0
    """Rows of the largest micro-batch that fits the tightest rank."""
    longest_row: int = 0
    """Tokens of the longest rows of which the planned micro-batch fits it, the model's context at most."""
    row_tokens: int = 0
    """Tokens of a row of the worst micro-batch."""
    label_share: float = 1.0
    """Share of its tokens that a loss is computed for."""
    pack_tokens: int = 0
    """The most tokens of the sequences that rows are packed into, which micro-batches then count; 0 without packing."""
    peak_at: str | None = None
    """Where in a step the peak stands, in words."""
    peak_remedy: str | None = None
    """What the peak is mostly made of, what would make that smaller, and by how much; `None` where nothing would."""
    recoveries: tuple[Mapping[str, Any], ...] = ()
    """What was changed because memory ran out, oldest first (`launch.recovery.Recovery`)."""
    reasons: tuple[str, ...]
    remedies: tuple[str, ...]
    notices: tuple[str, ...] = ()
    """Reasons that may surprise, shown with every plan."""

    @property
    def ranks_by_node(self) -> tuple[int, ...]:
        """How many ranks each node has."""
        return self.node_ranks or (self.world_size // self.num_nodes,) * self.num_nodes

    def save(self, path: Path) -> None:
        write_json(path, self.to_json())

    def to_json(self) -> dict[str, Any]:
        value = asdict(self)
        value["ranks"] = [dict(r) for r in value["ranks"]]
        return value

    @staticmethod
    def load(path: Path) -> Plan:
        """Reads a run's plan. Raises `CheckpointError` for a file that is none."""
        try:
            return Plan.from_json(read_json(path))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            lost, cut = isinstance(error, FileNotFoundError), isinstance(error, JSONDecodeError)
            why = "it is missing" if lost else f"it is cut short, or no JSON ({first_line(error)})" if cut else first_line(error)
            hint = "put it back from a backup, or from a run of another RUN_NAME that the same command starts"
            raise CheckpointError(f"not the plan of a run: {why}", place=str(path), hint=hint) from error

    @staticmethod
    def from_json(value: dict[str, Any]) -> Plan:
        return Plan(
            **{
                **value,
                "ranks": tuple(_rank(rank) for rank in value["ranks"]),
                "node_ranks": tuple(value.get("node_ranks", ())),
                "reasons": tuple(value["reasons"]),
                "remedies": tuple(value["remedies"]),
                "notices": tuple(value.get("notices", ())),
                "recoveries": tuple(value.get("recoveries", ())),
                "exchanges": tuple(value.get("exchanges", ())),
            }
        )


def _rank(value: dict[str, Any]) -> RankPlan:
    return RankPlan(**{**value, "cost": tuple(value.get("cost", ()))})
