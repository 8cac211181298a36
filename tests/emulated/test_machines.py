"""Machines with absent GPUs, each from `make plan` to steps of the project's own worker (`tests.fake_cuda` says what is
fake).

All workers are children of one process, which imports torch once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import call_program, environment
from tests.emulated.machines import Start, ready, steps
from tests.nvml_double import emulated

STEPS = 2
CONFIG = """
model: {{name: {model}, max_seq_len: 64}}
data: {{train_path: rows.jsonl, val_path: rows.jsonl}}
train: {{batch_size: 4, dataloader_num_workers: 0, kernels: "off", global_batch_size: 8, max_steps: 2, save_steps: 2,
  eval_strategy: steps, eval_steps: 2}}
"""
# Fake tensors can neither leave the process that made them, for loaders, nor meet Triton's kernels.

pytestmark = [pytest.mark.broad, pytest.mark.slow, pytest.mark.cold]  # its worker loads the guard before torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is typed on a machine, and its expected result."""

    machine: str
    command: str = "train"
    words: tuple[str, ...] = ()
    shown: str | None = None
    """The user's `CUDA_VISIBLE_DEVICES`."""
    sees: tuple[str, ...] = ("GPU-0000",)
    """UUIDs of the cards that each worker sees."""
    computes: str = "bfloat16"
    frozen: str | None = "bfloat16"
    layout: str = "flattened"
    attention: str = "varlen"


PAIR = Case(machine="rtx3090_pair", command="train-distributed", sees=("GPU-0000", "GPU-1111"))
CASES = {
    "T4": Case(machine="t4", computes="float16", frozen="float16", attention="sdpa"),
    "H200, every weight, recomputed": Case(
        machine="h200", words=("TUNING_MODE=full", "TRAIN_GRADIENT_CHECKPOINTING=true"), frozen=None
    ),
    "4080 with 4070": Case(machine="unlike_pair", sees=("GPU-1111",)),
    "two RTX 3090, a process each": PAIR,
    "two RTX 3090, a stage each": replace(PAIR, words=("LAUNCH_STRATEGY=pipeline",)),
    "two RTX 3090, slices of layers": replace(PAIR, words=("LAUNCH_TENSOR_PARALLEL=2",)),
    "two RTX 3090, slices of lines": replace(PAIR, words=("LAUNCH_SEQUENCE_PARALLEL=2",)),
    "the second RTX 3090, recomputed": Case(
        machine="rtx3090_pair", shown="1", sees=("GPU-1111",), words=("TRAIN_GRADIENT_CHECKPOINTING=true",)
    ),
    "WSL2": Case(machine="wsl2"),
    "a MIG slice": Case(machine="mig", sees=("MIG-11111111-0000-0000-0000-000000000002",)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture(scope="module")
def machines(folder: Path, tiny: Path) -> Mapping[str, dict[str, str]]:
    """Return the environment of a process on each case's machine."""
    (folder / "train.yaml").write_text(CONFIG.format(model=tiny), encoding="utf-8")
    return {
        name: (
            environment(folder / "cache", folder / "runs", emulated(folder / "machines" / case.machine, case.machine))
            | ({"CUDA_VISIBLE_DEVICES": case.shown} if case.shown else {})
        )
        for name, case in CASES.items()
    }


@pytest.fixture(scope="module")
def starts(folder: Path, machines: Mapping[str, dict[str, str]]) -> Mapping[str, list[Start]]:
    return {
        name: ready(
            folder / "runs" / name, case.command, [f"CONFIG={folder / 'train.yaml'}", *case.words], machines[name]
        )
        for name, case in CASES.items()
    }


@pytest.fixture(scope="module")
def reports(starts: Mapping[str, list[Start]], cache: Path) -> Mapping[str, list[dict[str, Any]]]:
    import torch

    if torch.version.cuda:
        pytest.skip("this torch was built with CUDA: the guard of `tests/fake_cuda` is for one without")
    return steps(starts, cache)


each = pytest.mark.parametrize("name", CASES)


@each
def test_make_plan_says_what_make_train_does(
    name: str, folder: Path, machines: Any, starts: Mapping[str, list[Start]]
) -> None:
    case, plan = CASES[name], starts[name][0].plan
    words = [f"CONFIG={folder / 'train.yaml'}", *case.words, f"NUM_GPUS={plan.world_size}", "JSON=1"]
    done = call_program(["plan", *words], machines[name])
    assert done.code == 0, done.err
    assert plan.device == "cuda" and plan.strategy == ("single" if case.command == "train" else "ddp")
    for key in ("device", "strategy", "precision", "weights_dtype", "attn_implementation", "layout", "optim"):
        assert done.json[key] == getattr(plan, key), key
    assert (plan.layout, plan.attn_implementation) == (case.layout, case.attention)


@each
def test_the_worker_runs_from_arguments_to_the_published_model(
    name: str, reports: Any, starts: Mapping[str, list[Start]]
) -> None:
    for start, report in zip(starts[name], reports[name], strict=True):
        assert start.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        expandable = "expandable_segments:True" in start.environment.get("PYTORCH_ALLOC_CONF", "")
        assert expandable == (CASES[name].machine != "wsl2")
        assert "error" not in report, report["error"]
        assert (report["code"], report["steps"]) == (0, STEPS)
    run = starts[name][0].run
    assert run.model.is_dir() and (
        (run.checkpoints / "step-000002" / "manifest.json").is_file() or len(starts[name]) > 1
    )


@each
def test_one_process_has_one_card(name: str, reports: Any) -> None:
    for rank, report in enumerate(reports[name]):
        assert tuple(report["visible"]) == CASES[name].sees
        assert report["n_gpu"] == 1
        assert set(report["contexts"]) <= {rank}, "a question to another card makes a context there"
        assert not report["data_parallel"]
        assert len(reports[name]) == 1 or report["ddp"] == [rank]


@each
def test_everything_is_on_that_card_in_the_planned_types(name: str, reports: Any) -> None:
    case = CASES[name]
    for rank, report in enumerate(reports[name]):
        frozen = {f"frozen cuda:{rank} {case.frozen}"} if case.frozen else set()
        assert set(report["parameters"]) == {f"trained cuda:{rank} float32"} | frozen
        assert set(report["states"]) == {f"cuda:{rank} float32"}
        for phase in ("forward", "backward"):
            assert set(report["matmuls"][phase]) == {f"cuda {case.computes}"}, phase
        assert report["mixed_precision"] == {"bfloat16": "bf16", "float16": "fp16"}[case.computes]
        assert report["scaler"] == ("GradScaler" if case.computes == "float16" else None)
        assert (report["optimizer"], report["fused"]) == ("AdamW", True)


@each
def test_the_host_waits_only_where_it_must(name: str, reports: Any) -> None:
    for report in reports[name]:
        waits = [wait for wait in report["waits"] if wait["phase"] != "build"]
        batches = [wait for wait in waits if "send_to_device" in wait["where"]]
        assert {wait["what"] for wait in batches} <= {"cpu to cuda", "cpu to cuda non_blocking"}
        places = {wait["where"] for wait in waits if wait["phase"] in ("begin", "step") and wait["count"] >= STEPS}
        places -= {wait["where"] for wait in batches} | {
            place for place in places if "saving.py" in place or "states/" in place
        }
        assert len(places) <= (13 if len(reports[name]) == 1 else 14), "\n".join(sorted(places))
        if CASES[name].attention == "varlen":
            assert not [wait for wait in waits if wait["phase"] in ("forward", "backward")]
            assert set(report["attention"]["forward"]) == {"varlen, bfloat16"}
