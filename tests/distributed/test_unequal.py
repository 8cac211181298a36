"""Ranks with micro-batches and micro-steps of their own: the same updates as one process, and shares that follow measured speed (B11)."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sft_play.plan.balance import spans
from sft_play.plan.plan import Plan
from sft_play.runs.folder import RunFolder
from tests.quota import move, quota, worker_of
from tests.tiny_models import build_tiny_llama
from tests.training_runs import Trial, column, command, copy_run, holdings, logs, make_plan, make_run, must_train, rows

HERE = 4
"""The checkpoint to go on from, in the middle of the second epoch: an epoch has 3 steps."""
LONG = pytest.mark.long


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("base") / "llama")


@pytest.fixture(scope="module")
def alone(base: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return must_train(make_run(tmp_path_factory.mktemp("alone") / "run", base, Trial(ranks=((8, 1),))))


def same_updates(run: RunFolder, wanted: RunFolder) -> None:
    assert column(run, "step") == column(wanted, "step")
    for name in ("loss", "grad_norm"):
        assert column(run, name) == pytest.approx(column(wanted, name), rel=1e-5)
    assert column(run, "eval_loss", "eval") == pytest.approx(column(wanted, "eval_loss", "eval"), rel=1e-5)
    mine, whole = ([row for rank in holdings(one) for row in rank["rows_trained"]] for one in (run, wanted))
    assert sorted(mine) == sorted(whole)
    scored = [row for rank in holdings(run) for row in rank["rows_scored"]]
    assert sorted(scored) == sorted(row for rank in holdings(wanted) for row in rank["rows_scored"])


def set_plan(run: RunFolder, plan: Plan) -> None:
    plan.save(run.plan)


def test_ranks_with_their_own_micro_steps_make_the_same_updates(alone: RunFolder, base: Path, tmp_path: Path) -> None:
    """One of the three has no rows at all; then two others go on from its checkpoint, in mid-epoch."""
    slots = ((4, 3), (1, 5), (0, 1))
    run = must_train(make_run(tmp_path / "run", base, Trial(strategy="ddp", ranks=slots)))
    same_updates(run, alone)
    whole = [row for row in rows(run) if sum(row["rank_rows"]) == 8]
    assert [row["rank_rows"] for row in whole] == [list(spans(8, slots))] * 6
    assert all((tokens > 0) == (count > 0) for row in rows(run) for tokens, count in zip(row["rank_tokens"], row["rank_rows"], strict=True))
    again = copy_run(run, tmp_path / "again")
    shutil.rmtree(again.checkpoint(8))
    again.last.unlink()
    shutil.rmtree(again.model)
    set_plan(again, make_plan(Trial(strategy="ddp", ranks=((1, 2), (3, 4)))))
    must_train(again, again.checkpoint(HERE))
    for name in ("loss", "grad_norm"):
        assert column(again, name) == pytest.approx(column(alone, name), rel=1e-5)
    assert [row["rank_rows"] for row in rows(again)][HERE] == list(spans(8, ((1, 2), (3, 4))))


@LONG
@pytest.mark.parametrize(
    ("strategy", "slots", "pack"),
    [
        ("ddp", ((1, 7), (2, 1)), 0),
        ("ddp", ((0, 1), (2, 4)), 0),
        ("ddp", ((1, 6), (1, 2)), 64),
        ("ddp", ((2, 4), (0, 1)), 64),
        ("zero1", ((3, 2), (1, 2)), 0),
        ("zero2", ((3, 2), (1, 2)), 0),
        ("zero3", ((3, 2), (1, 2)), 0),
        ("fsdp2", ((3, 2), (1, 2)), 0),
    ],
)
def test_other_shares_and_strategies_do_too(
    strategy: str, slots: tuple[tuple[int, int], ...], pack: int, alone: RunFolder, base: Path, tmp_path: Path
) -> None:
    trial = Trial(strategy=strategy, ranks=slots, plan=(("pack_tokens", pack),))
    run = must_train(make_run(tmp_path / "run", base, trial))
    same_updates(run, alone)


# ---- Shares that follow measured speed

ROWS = 16


def slowed(run: RunFolder, *, share: float, timeout: float = 300) -> RunFolder:
    """Trains `run` with rank 1 held at `share` of a core from its first step on."""
    arguments, variables = command(run)
    with quota(share) as group, subprocess.Popen(arguments, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            worker = worker_of(process.pid, 1)
            end = time.monotonic() + timeout
            while not (run.metrics.is_file() and rows(run)):
                assert process.poll() is None and time.monotonic() < end, logs(run)
                time.sleep(0.02)
            move(worker, group)
            said, _ = process.communicate(timeout=max(1.0, end - time.monotonic()))
        finally:
            process.kill()
    assert process.returncode == 0, f"{said}\n{logs(run)}"
    (run.logs / "said.txt").write_text(said, encoding="utf-8")
    return run


def heavy(steps: int, *more: str, named: bool, **changes: Any) -> Trial:
    """Returns a trial of two ranks that compute long enough to be timed; `named`: on devices of two names."""
    settings = (
        f"train.max_steps: {steps}", f"train.global_batch_size: {ROWS}", "train.save_steps: 8", "train.eval_strategy: no", "train.eval_steps: null",
        "train.save_total_limit: 9", *more,
    )  # fmt: skip
    values: dict[str, Any] = {"strategy": "ddp", "ranks": ((4, 2), (4, 2)), "mode": "lora", "settings": settings, "steps": steps}
    trial = Trial(**(values | changes))
    extra: dict[str, Any] = {"global_batch_size": ROWS, "steps_per_epoch": 2}
    if named:
        extra["ranks"] = tuple(replace(rank, device_name=f"CPU {rank.rank}") for rank in make_plan(trial).ranks)
    return replace(trial, plan=tuple(extra.items()))


@pytest.fixture(scope="module")
def heavier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(
        tmp_path_factory.mktemp("heavier") / "llama", hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8
    )


def shares_told(run: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines() if '"balance"' in line]


def test_a_rank_at_half_speed_gets_fewer_rows(heavier: Path, tmp_path: Path) -> None:
    """The kernel holds it to half a core. What is trained stays what one process trains; a resumed run begins with the shares found."""
    run = slowed(make_run(tmp_path / "run", heavier, heavy(24, named=True)), share=0.4)
    alone = must_train(make_run(tmp_path / "alone", heavier, heavy(24, named=False, strategy="single", ranks=((16, 1),))))
    for name in ("loss", "grad_norm"):
        assert column(run, name) == pytest.approx(column(alone, name), rel=1e-5)
    told = shares_told(run)
    assert told, logs(run)
    first, last = told[0], told[-1]
    assert sum(last["rows"]) == ROWS and last["rows"][0] > last["rows"][1]
    whole = [row for row in rows(run) if sum(row["rank_rows"]) == ROWS]
    before = [row["rank_rows"] for row in whole if row["step"] < first["from_step"]]
    after = [row for row in whole if row["step"] >= last["from_step"]]
    assert before and all(counts == [8, 8] for counts in before)
    assert after and all(row["rank_rows"] == last["rows"] for row in after)
    assert sum(row["rank_tokens"][0] for row in after) > 1.2 * sum(row["rank_tokens"][1] for row in after)
    said = (run.logs / "said.txt").read_text()
    assert "rank 1 is " in said and "times slower: rows per step " in said and "instead of 8 + 8" in said
    states = json.loads((run.checkpoint(24) / "states.json").read_text())
    assert states["counters"]["shares"][-1][1] == last["shares"]


@LONG
def test_a_resumed_run_goes_on_with_the_shares_that_were_found(heavier: Path, tmp_path: Path) -> None:
    run = slowed(make_run(tmp_path / "run", heavier, heavy(32, named=True)), share=0.4)
    found = shares_told(run)[-1]
    step = next(step for step in (16, 24, 32) if step >= found["from_step"])
    again = copy_run(run, tmp_path / "again")
    for checkpoint in again.checkpoints.glob("step-*"):
        if int(checkpoint.name[5:]) > step:
            shutil.rmtree(checkpoint)
    again.last.unlink()
    shutil.rmtree(again.model)
    set_plan(again, make_plan(replace(heavy(step + 3, named=True), steps=step + 3)))  # ends before ranks look at each other again
    must_train(again, again.checkpoint(step))
    later = [row for row in rows(again) if row["step"] > step]
    assert len(later) == 3 and all(row["rank_rows"] == found["rows"] for row in later if sum(row["rank_rows"]) == ROWS)
    other = copy_run(run, tmp_path / "other")
    shutil.rmtree(other.model)
    set_plan(other, make_plan(replace(heavy(35, named=True), ranks=((2, 8), (1, 1)), plan=(("global_batch_size", ROWS), ("steps_per_epoch", 2)))))
    must_train(other, other.checkpoint(32))
    assert rows(other)[32]["rank_rows"] == list(spans(ROWS, ((2, 8), (1, 1)))), "shares that memory would not hold are not taken over"


@LONG
@pytest.mark.quiet
def test_a_rank_at_half_speed_costs_less_with_unequal_shares(heavier: Path, tmp_path: Path) -> None:
    """Two ranks on two cores, alike to the plan, one with half a core: tokens per second with and without `launch.balance`."""
    speeds = {}
    for balance in ("off", "auto"):
        trial = heavy(120, f"launch.balance: {balance}", "train.save_strategy: no", "train.save_steps: 1000", named=False)
        run = slowed(make_run(tmp_path / balance, heavier, trial), share=0.5)
        whole = [row for row in rows(run) if sum(row["rank_rows"]) == ROWS]
        told = shares_told(run)
        if balance == "auto":
            assert told, logs(run)
            ratio = sum(row["rank_tokens"][0] for row in whole[-20:]) / sum(row["rank_tokens"][1] for row in whole[-20:])
            assert 1.5 < ratio < 3, ratio
        else:
            assert not told and all(row["rank_rows"] == [8, 8] for row in whole)
        speeds[balance] = statistics.median(row["tokens_per_second"] for row in rows(run)[-30:])
    assert speeds["auto"] >= 1.3 * speeds["off"], speeds
