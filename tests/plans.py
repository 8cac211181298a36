"""Plans and prepared models for tests that drive one layer alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from sft_play.config.load import LoadedConfig
from sft_play.config.schema import Config, LaunchConfig, ModelConfig, TrainConfig, TuningConfig
from sft_play.errors import UserError
from sft_play.plan.architecture import shape_of
from sft_play.plan.batch import spans
from sft_play.plan.hardware import GIB, Device, Hardware, parse_hardware
from sft_play.plan.make import make_plan
from sft_play.plan.plan import LaunchRequest, Plan, RankPlan
from sft_play.plan.request import Request
from sft_play.runs.prepared import Prepared, PreparedSplit, ResolvedModel

SMALL, QWEN, LLAMA = "HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen2.5-7B-Instruct", "meta-llama/Meta-Llama-3-8B"
CPU = Hardware(
    kind="cpu",
    devices=(Device(name="a CPU", memory_bytes=32 * GIB, free_bytes=24 * GIB, bf16=False),),
    cpu_threads=8,
    ram_bytes=32 * GIB,
)


def planned(
    config: Config | LoadedConfig, hardware: Hardware | str = CPU, launch: LaunchRequest | None = None, **fields: Any
) -> Plan:
    """Return the plan of a configuration; `fields`: further fields of the request."""
    if isinstance(config, LoadedConfig):
        config, fields = config.config, {"typed": config.typed} | fields
    fields = {"shape": shape_of(config.model)} | fields if "shape" not in fields else fields
    parsed = parse_hardware(hardware) if isinstance(hardware, str) else hardware
    return make_plan(Request(config=config, hardware=parsed, launch=launch or LaunchRequest(), **fields))


def plan_of(
    hardware: Hardware | str = CPU,
    *,
    name: str = SMALL,
    mode: Any = "lora",
    rows: int | None = None,
    data: Prepared | None = None,
    request_fields: Mapping[str, Any] = MappingProxyType({}),
    **changes: Any,
) -> Plan:
    """Return the plan with fields of configuration and launch by name, and with further fields of the request."""
    hardware = parse_hardware(hardware) if isinstance(hardware, str) else hardware

    def part(kind: type) -> dict[str, Any]:
        fields = changes.keys() & kind.__dataclass_fields__  # type: ignore[attr-defined]
        return {field: changes.pop(field) for field in fields}

    request = LaunchRequest(**part(LaunchRequest))
    tuning, launch, train, model = part(TuningConfig), part(LaunchConfig), part(TrainConfig), part(ModelConfig)
    config = Config(
        model=ModelConfig(name=name, **({"max_seq_len": 256} | model)),
        tuning=TuningConfig(mode=mode, **tuning),
        train=TrainConfig(**train),
        launch=LaunchConfig(**launch),
    )
    assert not changes, changes
    typed = {*(f"train.{key}" for key in train), *(f"launch.{key}" for key in launch)}
    data = data or (prepared_rows(rows, most_labels=50) if rows else None)
    return planned(config, hardware, request, typed=typed.__contains__, prepared=data, **request_fields)


def with_ram(hardware: str, gib: int) -> Hardware:
    """Return described hardware whose machine's memory is known."""
    return replace(parse_hardware(hardware), ram_bytes=gib * GIB, ram_known=True)


def message(kind: type[UserError], *arguments: Any, **changes: Any) -> str:
    """Return the rendered error of a plan that must be refused."""
    with pytest.raises(kind) as error:
        plan_of(*arguments, **changes)
    assert error.value.exit_code == kind.exit_code
    assert error.value.hint or kind is UserError
    return error.value.render()


def counts(plan: Plan) -> tuple[int, ...]:
    """Return the rows that each rank gets of a step."""
    return spans(plan.global_batch_size, [(rank.micro_batch, rank.accumulation) for rank in plan.ranks])


def rank_plan(rank: int = 0, **changes: Any) -> RankPlan:
    """Return the plan of a rank on the CPU, with `changes`."""
    values: dict[str, Any] = {
        "device": "cpu",
        "device_name": "cpu",
        "micro_batch": 2,
        "accumulation": 8,
        "memory_bytes": {},
        "peak_bytes": 0,
        "capacity_bytes": 1,
    }
    return RankPlan(rank=rank, **(values | changes))


def prepared_rows(rows: int, *, longest: int = 100, each: int = 60, **changes: Any) -> Prepared:
    """Return the prepared facts of rows of `each` tokens, 20 of them labels."""
    values: dict[str, Any] = {
        "path": "train",
        "rows": rows,
        "dropped": 0,
        "tokens": rows * each,
        "label_tokens": rows * 20,
        "longest": longest,
        "median": each,
        "fingerprint": "f",
    }
    return prepared_model(Path("m"), train=PreparedSplit(**(values | changes)))


def simple_plan(**changes: Any) -> Plan:
    """Return the plan of one fp32 process on the CPU, with `changes`."""
    values: dict[str, Any] = {
        "world_size": 1, "num_nodes": 1, "device": "cpu", "backend": "none", "strategy": "single", "source": "formula",
        "precision": "fp32", "weights_dtype": "float32", "attn_implementation": "sdpa", "layout": "flattened",
        "gradient_checkpointing": False, "optim": "adamw_torch", "learning_rate": 2e-4, "ranks": (),
        "global_batch_size": 8, "steps": 4, "steps_per_epoch": 4, "warmup_steps": 0, "eval_batch_size": 4,
        "tokens_per_second": None,
        "communication_share": None, "seconds_per_step": None, "total_seconds": None, "reasons": {},
    }  # fmt: skip
    return Plan(**(values | changes))


def prepared_model(folder: Path, train: PreparedSplit | None = None, **changes: Any) -> Prepared:
    """Return the prepared facts of a model folder, without data unless `train` is set."""
    values: dict[str, Any] = {
        "name": str(folder),
        "path": str(folder),
        "source": "folder",
        "revision": None,
        "fingerprint": "f",
        "tokenizer_fingerprint": "t",
    }
    return Prepared(model=ResolvedModel(**(values | changes)), train=train, validation=None)
