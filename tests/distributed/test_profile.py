"""`train.profile` and `make profile`: traces of the requested ranks, explained, while the update stays the same."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType

from sft_play.plan.plan import Plan
from sft_play.training.profiling import where_time_goes
from tests.conftest import Program, metrics
from tests.launcher import Launcher
from tests.tiny_models import build_tiny_llama


@pytest.mark.broad
def test_a_profile_of_two_ranks(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, build_tiny_llama(tmp_path / "model"))
    config = f"CONFIG={launcher.config}"
    done = launcher("profile", config, "NUM_GPUS=2", "TRAIN_PROFILE_RANKS=[0,1]", "RUN_NAME=two")
    assert done.code == 0, done.err
    folder = launcher.runs / "two" / "profile"
    for rank in (0, 1):
        assert f"rank{rank}: steps 4 to 6, " in done.out
        trace = json.loads(gzip.decompress((folder / f"rank{rank}.pt.trace.json.gz").read_bytes()))
        names = {event["name"] for event in trace["traceEvents"]}
        assert {"ProfilerStep#1", "ProfilerStep#3", "aten::mm"} <= names and trace["distributedInfo"]["rank"] == rank
        summary = json.loads((folder / f"rank{rank}.json").read_text())
        assert summary["steps"] == 3 and sum(summary["shares"].values()) == pytest.approx(1)
        assert summary["shares"]["communication"] > 0 and summary["shares"]["kernels"] > 0
        costs = [row["seconds"] for row in summary["operators"]]
        assert costs == sorted(costs, reverse=True) and costs[0] < summary["step_seconds"]
    assert "waiting for communication" in done.out and "aten::mm" in done.out and str(folder) in done.out
    again = launcher("profile", "RUN=two")
    assert again.code == 0 and again.out in done.out

    assert "is for a new one" in launcher("profile", "RUN=two", "TRAIN_PROFILE_STEPS=2").err

    launcher("train", config, "RUN_NAME=plain", "TRAIN_MAX_STEPS=4")
    words = ("RUN_NAME=watched", "TRAIN_MAX_STEPS=4", "TRAIN_PROFILE_START=2", "TRAIN_PROFILE_STEPS=2")
    assert launcher("train", config, *words).code == 0
    losses = [[row["loss"] for row in metrics(launcher.runs / name)] for name in ("plain", "watched")]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    none = launcher("profile", "RUN=plain")
    assert none.code == 2 and "has no profile" in none.err and "TRAIN_PROFILE_STEPS=3" in none.err


@pytest.mark.broad
def test_fsdp2_gathers_a_layer_as_often_as_the_plan_counts(tmp_path: Path) -> None:
    """Once forward and once backward, within which the layer is recomputed from the same weights."""
    launcher = Launcher(tmp_path, build_tiny_llama(tmp_path / "model"))
    words = (
        "TRAIN_GRADIENT_CHECKPOINTING=true",
        "TRAIN_PROFILE_STEPS=1",
        "TRAIN_PROFILE_START=2",
        "TRAIN_MAX_STEPS=3",
        "RUN_NAME=sharded",
    )
    done = launcher("train-fsdp", f"CONFIG={launcher.config}", "NUM_GPUS=2", *words)
    assert done.code == 0, done.err
    run = launcher.runs / "sharded"
    plan = Plan.load(run / "plan.json")
    trace = json.loads(gzip.decompress((run / "profile" / "rank0.pt.trace.json.gz").read_bytes()))
    names = [event["name"] for event in trace["traceEvents"]]
    gathered = Counter(name for name in names if re.fullmatch(r"FSDP::all_gather \(.*layers\.\d+\)", name))
    assert plan.gradient_checkpointing and gathered
    assert set(gathered.values()) == {plan.gatherings * plan.ranks[0].accumulation}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("TRAIN_PROFILE_START=5", "`train.profile` is given without `steps`"),
        (
            "TRAIN_PROFILE_STEPS=2 TRAIN_PROFILE_RANKS=[3]",
            "`train.profile.ranks` names rank 3, but the ranks are 0 to 0",
        ),
    ],
)
def test_profiles_that_cannot_be_taken_are_refused(in_process: Program, words: str, message: str) -> None:
    in_process("plan", "CONFIG=quickstart", *words.split()).refused(2, message)


def test_operators_that_call_others_count_as_computing_on_a_cpu() -> None:
    """`aten::mm` passes little on to `aten::resolve_conj`; nodes of the graph only call."""

    def event(name: str, start: float, end: float, *children: Any) -> Any:
        return SimpleNamespace(
            name=name,
            time_range=SimpleNamespace(start=start, end=end),
            is_user_annotation=False,
            device_type=DeviceType.CPU,
            cpu_children=list(children),
        )

    copy, conj = event("aten::copy_", 60, 70), event("aten::resolve_conj", 10, 12)
    product = event("aten::mm", 10, 70, conj, copy)
    events = [event("MmBackward0", 0, 90, product), product, conj, copy]
    shares = where_time_goes(events, gpu=False, wall=100, data=0)
    assert shares == pytest.approx({"kernels": 0.5, "communication": 0, "copies": 0.1, "data": 0, "gaps": 0.4})


def test_time_that_kernels_hide_does_not_count_as_waiting() -> None:
    kernels = {"##DDP": (0, 100), "sgemm": (0, 40), "ncclDevKernel_AllReduce": (30, 60), "Memcpy HtoD": (55, 65)}
    events: list[Any] = [
        SimpleNamespace(
            name=name,
            time_range=SimpleNamespace(start=start, end=end),
            is_user_annotation=name.startswith("##"),
            device_type=DeviceType.CUDA,
        )
        for name, (start, end) in kernels.items()
    ]
    shares = where_time_goes(events, gpu=True, wall=100, data=15)
    assert shares == pytest.approx({"kernels": 0.4, "communication": 0.2, "copies": 0.05, "data": 0.15, "gaps": 0.2})
