"""Ranks with different micro-batches and micro-steps: the same updates as one process, and shares that follow measured
speed (B11).
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sft_play.plan.batch import spans
from sft_play.runs.folder import RunFolder
from tests.quota import move, quota, worker_of
from tests.tiny_models import build_tiny_llama
from tests.training_runs import (
    Trained,
    Trial,
    command,
    holdings,
    logs,
    make_plan,
    make_run,
    must_train,
    resume_from,
    rows,
    same_curves,
)
from tests.waiting import until

LONG = pytest.mark.long


@LONG
@pytest.mark.parametrize(
    ("strategy", "slots", "pack"),
    [
        ("ddp", ((4, 3), (1, 5), (0, 1)), 0),
        ("ddp", ((1, 6), (1, 2)), 64),
        ("zero2", ((3, 2), (1, 2)), 0),
        ("fsdp2", ((3, 2), (1, 2)), 0),
    ],
)
def test_ranks_with_different_micro_steps_make_the_same_updates(
    strategy: str, slots: tuple[tuple[int, int], ...], pack: int, trained: Trained
) -> None:
    """This includes a world in which one of three ranks has no rows."""
    alone, run = trained(Trial()), trained(Trial(strategy=strategy, ranks=slots, plan=(("pack_tokens", pack),)))
    same_curves(run.path, alone.path)
    for part in ("rows_trained", "rows_scored"):
        actual, expected = (sorted(row for rank in holdings(folder) for row in rank[part]) for folder in (run, alone))
        assert actual == expected, part


# ---- Shares that follow measured speed

ROWS, STEPS, EVERY, SECONDS = 16, 20, 5, 300
"""Rows and steps of a run, steps between two checkpoints; an epoch of 20 rows has two steps, so step 15 stands in the
middle of one.
"""
PLANNED = ((4, 2), (4, 3))
"""More for the rank that will be slow."""


def slowed(run: RunFolder) -> RunFolder:
    """Train `run` with rank 1 limited to a quarter of a core from its first step."""
    arguments, variables = command(run)
    with (
        quota(0.25) as group,
        subprocess.Popen(
            arguments, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        try:
            worker = worker_of(process.pid, 1)
            until(
                lambda: run.metrics.is_file() and rows(run),
                process=process,
                seconds=SECONDS,
                explanation=lambda: logs(run),
            )
            move(worker, group)
            output, _ = process.communicate(timeout=SECONDS)
        finally:
            process.terminate()  # the launcher takes its workers along
    assert process.returncode == 0, f"{output}\n{logs(run)}"
    (run.logs / "said.txt").write_text(output, encoding="utf-8")
    return run


def heavy(*added: str, named: bool, **changes: Any) -> Trial:
    """Return a trial of two ranks that compute long enough to be timed; `named`: on devices of two names."""
    settings = (
        f"train.max_steps: {STEPS}",
        f"train.global_batch_size: {ROWS}",
        f"train.save_steps: {EVERY}",
        "train.eval_strategy: 'no'",
        "train.eval_steps: null",
        "train.save_total_limit: 9",
        *added,
    )
    values: dict[str, Any] = {"strategy": "ddp", "ranks": PLANNED, "mode": "lora", "settings": settings, "steps": STEPS}
    trial = Trial(**(values | changes))
    extra: dict[str, Any] = {"global_batch_size": ROWS, "steps_per_epoch": 2}
    if named:
        extra["ranks"] = tuple(replace(rank, device_name=f"CPU {rank.rank}") for rank in make_plan(trial).ranks)
    return replace(trial, plan=tuple(extra.items()))


@pytest.fixture(scope="module")
def heavier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
    }
    return build_tiny_llama(tmp_path_factory.mktemp("heavier") / "llama", **shape)


@pytest.fixture(scope="module")
def heavy_alone(heavier: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    trial = heavy("train.save_strategy: 'no'", named=False, strategy="single", ranks=((16, 1),))
    return must_train(make_run(tmp_path_factory.mktemp("alone") / "run", heavier, trial))


@pytest.fixture(scope="module")
def half_speed(heavier: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Return a run whose rank 1 is limited to part of a core, under a plan with different devices, so that shares
    change soon.
    """
    return slowed(make_run(tmp_path_factory.mktemp("slowed") / "run", heavier, heavy(named=True)))


def share_of_rank_0(rows: list[dict[str, Any]]) -> float:
    """Return its part of the trained tokens."""
    counts = [sum(row["rank_tokens"][rank] for row in rows) for rank in (0, 1)]
    return float(counts[0] / sum(counts))


def whole_steps(run: RunFolder) -> list[dict[str, Any]]:
    return [row for row in rows(run) if sum(row["rank_rows"]) == ROWS]


@pytest.mark.quiet
def test_a_rank_at_half_speed_gets_fewer_rows(half_speed: RunFolder, heavy_alone: RunFolder) -> None:
    """The trained rows stay those of one process, with unequal shares from the first step and others later."""
    run, planned = half_speed, list(spans(ROWS, PLANNED))
    same_curves(run.path, heavy_alone.path)
    changes = rows(run, "balance")
    assert changes, logs(run)
    first, last = changes[0], changes[-1]
    assert sum(last["rows"]) == ROWS and last["rows"][0] > planned[0]
    whole = whole_steps(run)
    before = [row for row in whole if row["step"] < first["from_step"]]
    after = [row for row in whole if row["step"] >= last["from_step"]]
    assert before and all(row["rank_rows"] == planned for row in before)
    assert after and all(row["rank_rows"] == last["rows"] for row in after)
    assert share_of_rank_0(after) > share_of_rank_0(before)
    output = (run.logs / "said.txt").read_text()
    now, then = (" + ".join(map(str, counts)) for counts in (first["rows"], planned))
    slower = rf"from step {first['from_step']} on: rank 1 is [\d.]+ times slower than rank 0"
    notice = f"{slower}: rows per step {re.escape(now)} instead of {re.escape(then)}"
    assert re.search(notice, output), output


@pytest.mark.broad
def test_a_run_continues_in_mid_epoch_with_other_shares(heavier: Path, heavy_alone: RunFolder, tmp_path: Path) -> None:
    """A resumed run uses the shares of its plan until ranks are measured again."""
    unequal = must_train(make_run(tmp_path / "unequal", heavier, heavy(named=False)))
    slots = ((2, 8), (1, 1))
    again = resume_from(
        unequal, tmp_path / "again", 15, replace(heavy(named=False, ranks=slots), plan=heavy(named=False).plan)
    )
    same_curves(again.path, heavy_alone.path)
    assert all(row["rank_rows"] == list(spans(ROWS, slots)) for row in whole_steps(again) if row["step"] > 15)
