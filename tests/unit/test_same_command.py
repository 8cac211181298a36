"""`launch.auto_resume` on fewer or more nodes and GPUs: what the same command amounts to, pure but for a run folder's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.call import Call
from sft_play.config.layers import Override
from sft_play.config.load import LoadedConfig, load_config, save_config
from sft_play.launch.job import read_options
from sft_play.launch.resume import as_resume, launch_facts, options_of_run, with_its_batch
from sft_play.launch.run_folder import record_event
from sft_play.plan.plan import Plan
from sft_play.runs.folder import RunFolder
from tests.plans import simple_plan

COMMANDS: dict[str, Any] = {"train": "single", "train-distributed": "auto", "train-fsdp": "fsdp2", "train-deepspeed": "zero"}
ON_TWO = {"NUM_GPUS": "2", "NUM_NODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "10.0.0.1"}


def config(folder: Path, **train: object) -> LoadedConfig:
    path = folder / "one.yaml"
    lines = "".join(f"  {key}: {value}\n" for key, value in train.items())
    path.write_text(
        "model: {name: x/y}\ndata: {train_path: rows.jsonl}\nlaunch: {auto_resume: true}\ntrain:\n  max_steps: 4\n" + lines
    )
    return load_config(path, environ={})


def again(folder: Path, run: RunFolder, command: str, options: Mapping[str, str], loaded: LoadedConfig | None = None) -> Call:
    """Returns what a start amounts to."""
    loaded = loaded or config(folder)
    call = Call(command=command, options={"RUN_NAME": "demo", **options})
    found, loaded = read_options(call, loaded, COMMANDS[command])
    return as_resume(call, found, loaded, run)


def begun(folder: Path, command: str, options: Mapping[str, str], loaded: LoadedConfig | None = None) -> RunFolder:
    """Returns the folder of a run that was started so, with eight rows a step."""
    run = RunFolder(folder / "demo")
    run.path.mkdir()
    loaded = loaded or config(folder)
    found, loaded = read_options(Call(command=command, options={"RUN_NAME": "demo", **options}), loaded, COMMANDS[command])
    save_config(loaded, run.config)
    nodes = found.request.num_nodes
    world = nodes * (found.request.num_gpus or 1)
    strategy: Any = "single" if world == 1 else "ddp"
    simple_plan(num_nodes=nodes, world_size=world, strategy=strategy, backend="gloo").save(run.plan)
    record_event(run, "started", launch=launch_facts(found))
    return run


@pytest.mark.parametrize(
    ("before", "first", "now", "options", "expected"),
    [
        ("train-distributed", ON_TWO, "train-distributed", {"NUM_GPUS": "2", "NUM_NODES": "1"}, ("ddp", 1, 2)),
        ("train-distributed", ON_TWO, "train", {"NUM_GPUS": "1"}, ("ddp", 1, 1)),
        ("train-distributed", {"NUM_GPUS": "2"}, "train-distributed", ON_TWO, ("ddp", 2, 2)),
        ("train-distributed", ON_TWO, "train-distributed", {**ON_TWO, "NUM_NODES": "3", "NODE_RANK": "2"}, ("ddp", 3, 2)),
        ("train", {}, "train-distributed", {**ON_TWO, "NUM_GPUS": "1"}, ("ddp", 2, 1)),
        ("train-fsdp", ON_TWO, "train-fsdp", {"NUM_GPUS": "2"}, ("fsdp2", 1, 2)),
    ],
)
def test_nodes_and_processes_may_be_others(
    tmp_path: Path, before: str, first: dict[str, str], now: str, options: dict[str, str], expected: tuple[str, int, int],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run = begun(tmp_path, before, first)
    call = again(tmp_path, run, now, options)
    assert (call.command, call.overrides) == ("resume", ())
    request = options_of_run(call, run, Plan.load(run.plan)).request
    assert (request.command_strategy, request.num_nodes, request.num_gpus) == expected
    said = capsys.readouterr().err
    assert ("and continues with" in said) == (first.get("NUM_NODES", "1") != options.get("NUM_NODES", "1"))


def loaded(folder: Path, *typed: str, **train: object) -> tuple[LoadedConfig, Call]:
    path = folder / "x.yaml"
    lines = "".join(f"  {key}: {value}\n" for key, value in train.items())
    path.write_text("model: {name: x}\ndata: {train_path: x.jsonl}\ntrain:\n  max_steps: 4\n" + lines)
    overrides = tuple(
        Override(key=f"train.{key}", text=str(value), origin="make") for key, value in (one.split("=") for one in typed)
    )
    return load_config(path, overrides), Call(command="resume", overrides=overrides)


@pytest.mark.parametrize(
    ("typed", "train", "world", "expected"),
    [
        ((), {"batch_size": 2, "grad_accum": 2}, 2, (2, 2, "auto")),
        ((), {"batch_size": 2, "grad_accum": 2}, 3, (2, "auto", 8)),
        (("batch_size=1",), {"batch_size": 2, "grad_accum": 2}, 2, (1, "auto", 8)),
        (("batch_size=1", "grad_accum=1"), {"batch_size": 2, "grad_accum": 2}, 2, (1, 1, "auto")),
        ((), {"batch_size": 4, "global_batch_size": 8}, 4, ("auto", "auto", 8)),
    ],
)
def test_the_global_batch_stays(
    typed: tuple[str, ...], train: dict[str, object], world: int, expected: tuple[object, ...], tmp_path: Path
) -> None:
    config, call = loaded(tmp_path, *typed, **train)
    found, note = with_its_batch(config, call, replace(simple_plan(), global_batch_size=8), world)
    now = found.config.train
    assert (now.batch_size, now.grad_accum, now.global_batch_size) == expected
    changed = (now.batch_size, now.grad_accum) != (config.config.train.batch_size, config.config.train.grad_accum)
    assert bool(note) == changed
    if note:
        assert "stays 8 rows" in note and "is computed again" in note


def test_ranks_with_slices_of_the_same_rows_count_once(tmp_path: Path) -> None:
    config, call = loaded(tmp_path, batch_size=8)
    config = replace(config, config=replace(config.config, launch=replace(config.config.launch, tensor_parallel=2)))
    assert with_its_batch(config, call, replace(simple_plan(), global_batch_size=8), 2)[1] is None
