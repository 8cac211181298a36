"""`make runs`, `stop`, `logs`: their output for runs in every state. Training runs are in
tests/distributed/test_stops.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sft_play.files import append_json_line, write_json
from sft_play.runs.folder import RunFolder
from sft_play.runs.progress import describe_model
from tests.conftest import ROOT, Program

HOLDER = """
import sys, time
from pathlib import Path
from sft_play.launch.process import end_by_signals
from sft_play.launch.run_folder import lock_run, record_event
from sft_play.runs.folder import RunFolder
run = RunFolder(Path(sys.argv[1]))
with lock_run(run):
    try:
        with end_by_signals():
            print("held", flush=True)
            time.sleep(60)
    finally:
        record_event(run, "stopped", code=143, signal="SIGTERM", step=4, saved="step-000004")
"""


def make_run(runs: Path, name: str, *events: str, best: str = "loss") -> RunFolder:
    run = RunFolder(runs / name)
    run.logs.mkdir(parents=True)
    write_json(run.config, {"config": {"train": {"metric_for_best_model": best}}, "origins": {}})
    write_json(run.plan, {"steps": 8})
    for number, event in enumerate(events, 1 - len(events)):
        happened = time.time() + 60 * number
        code = 3 if event == "failed" else 0
        append_json_line(run.events, {"event": event, "node": 0, "time": happened, "code": code})
    if events:
        before = {"kind": "eval", "step": 0, "eval_loss": 0.5, "eval_rougeL": 0.95}  # as of the adapter trained on
        append_json_line(run.metrics, before)
        for step in (1, 2):
            append_json_line(run.metrics, {"kind": "train", "step": step, "loss": 3.0 / step})
            append_json_line(
                run.metrics, {"kind": "eval", "step": step, "eval_loss": 2.0 + step, "eval_rougeL": 0.1 * step}
            )
    return run


def hold(run: RunFolder, **variables: str) -> subprocess.Popen[str]:
    """Start a process that holds a run's lock as a launcher does and records how it ends."""
    words = [sys.executable, "-c", HOLDER, str(run.path)]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT), **variables}
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_runs_in_every_state_are_listed(in_process: Program, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    states = {"done": ("started", "finished"), "broken": ("started", "failed"), "gone": ("started",), "none": ()}
    for name, events in states.items():
        make_run(runs, name, *events, best="rougeL" if name == "done" else "loss")
    (make_run(runs, "model").path / "eval" / "step-000000").mkdir(parents=True)
    running = make_run(runs, "now", "started")
    append_json_line(running.metrics, {"kind": "train", "step": 3, "loss": 1.0, "rank_memory_gib": [1.5, 2.25, None]})
    append_json_line(
        make_run(runs, "second").events, {"event": "finished", "node": 1, "time": 1.0}
    )  # of two machines by hand
    process = hold(running)
    try:
        listed = {row["name"]: row for row in in_process("runs", "JSON=1").json}
        text = in_process("runs").out
    finally:
        process.kill()
        process.wait()
    assert {name: row["state"] for name, row in listed.items()} == {
        "done": "finished",
        "broken": "failed",
        "gone": "killed",
        "none": "never started",
        "model": "scored",
        "now": "running",
        "second": "finished",
    }
    assert (listed["done"]["step"], listed["done"]["steps"], listed["done"]["loss"]) == (2, 8, 1.5)
    assert (listed["done"]["best"], listed["gone"]["best"]) == (0.2, 3.0)
    assert "failed (3)" in text and "0.2000 ROUGE-L" in text and "2/8" in text
    assert listed["now"]["peak_memory_bytes"] == 2.25 * 2**30 and "2.25 GiB" in text, "of a run that still trains"
    assert "on node 0; this is node 1" in text
    assert "its steps are recorded on node 0" in in_process("watch", "RUN=second").err
    assert in_process("runs", runs=tmp_path / "empty").out.startswith("no runs in")


def test_a_resumed_run_counts_its_parts_while_it_trains(in_process: Program, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", "a", "started", "finished", "resumed")
    write_json(run.training_metrics, {"steps": 2, "training_seconds": 9.0, "tokens_per_second": 50.0})
    run.metrics.unlink()
    for step in (1, 2, 3, 4):
        row = {"kind": "train", "step": step, "loss": 1.0, "step_seconds": 10.0, "tokens_per_second": 20.0}
        append_json_line(run.metrics, row)
    [row] = in_process("runs", "JSON=1").json
    assert row["tokens_per_second"] == 20.0
    assert 60 <= row["seconds"] < 70, "the part that ended, and the one that a moment ago was killed"


def test_time_and_cost_are_those_of_all_launches(in_process: Program, tmp_path: Path) -> None:
    """With loading, evaluation and saving, without the pauses between launches; restarts belong to their launch."""
    run = make_run(tmp_path / "runs", "a")
    happened = (
        ("started", 1000), ("stopped", 1100), ("resumed", 5000), ("restarted", 5060), ("resumed", 5070),
        ("finished", 5200), ("resumed", 9000), ("resumed", 9500), ("finished", 9600),
    )  # fmt: skip
    for event, at in happened:
        append_json_line(run.events, {"event": event, "node": 0, "time": at})
    write_json(run.training_metrics, {"training_seconds": 50.0})
    [row] = in_process("runs", "JSON=1", "PRICE_PER_HOUR=36").json
    assert (row["seconds"], row["cost"]) == (400.0, 4.0), "nothing is known of the launch that was killed"
    append_json_line(run.events, {"event": "resumed", "node": 0, "time": time.time() - 100})
    process = hold(run)
    try:
        [row] = in_process("runs", "JSON=1").json
    finally:
        process.kill()
        process.wait()
    assert row["state"] == "running" and 500 <= row["seconds"] < 600, "until now"


def test_the_list_has_what_runs_reached_and_cost(in_process: Program, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", "a", "started", "finished")
    config = {"model": {"name": "base"}, "tuning": {"mode": "lora"}, "data": {"train_path": "rows/sums.jsonl"}}
    write_json(run.config, {"config": config, "origins": {}})
    write_json(run.plan, {"steps": 8, "num_nodes": 2})
    ended = {"steps": 3, "tokens_per_second": 50.0, "training_seconds": 1800.0, "peak_memory_bytes": 3 * 2**30}
    write_json(run.training_metrics, ended)
    append_json_line(run.metrics, {"kind": "eval", "step": 3, "eval_loss": 1.0, "eval_rougeL": 0.9})
    append_json_line(run.metrics, {"kind": "train", "step": 3, "loss": 1.0, "rank_power_watts": [2000.0, 2000.0]})
    [row] = in_process("runs", "JSON=1", "PRICE_PER_HOUR=3").json
    assert (row["cost"], row["energy_kwh"], row["seconds"], row["eval_rougeL"]) == (3.0, 2.0, 1800.0, 0.9)
    text = in_process("runs", "PRICE_PER_HOUR=3").out
    assert "3.00 GiB" in text and "2 kWh" in text and "30.0 min" in text and "lora" in text and "sums.jsonl" in text
    write_json(
        run.config,
        {
            "config": config | {"eval": {"metrics": ["accuracy"]}, "train": {"metric_for_best_model": "eval_loss"}},
            "origins": {},
        },
    )
    scores = {"accuracy": {"mean": 0.75, "low": 0.5, "high": 1.0, "n": 8}}
    for folder, content in (("step-000000", {}), ("step-000003", scores), ("step-000003-other-0123abcd", {})):
        write_json(run.path / "eval" / folder / "scores.json", content)
    assert "1.0000 loss, 0.7500 accuracy" in in_process("runs").out, "of `make eval`"
    train = {"metric_for_best_model": "eval_due", "extra": {"greater_is_better": False}}
    write_json(run.config, {"config": config | {"train": train}, "origins": {}})
    for step, due in ((4, 0.5), (5, 0.0), (6, 0.25)):
        append_json_line(run.metrics, {"kind": "eval", "step": step, "eval_due": due})
    assert "0.0000 due" in in_process("runs").out, "of a metric of the user's, whose better values are lower"


def test_the_list_names_origins_and_the_speed_of_a_stopped_run(in_process: Program, tmp_path: Path) -> None:
    runs, cache = tmp_path / "runs", tmp_path / "cache" / "models" / "made-0123"
    for name, typed, prepared in (
        ("on-merged", "runs/tickets/merged", {"name": "runs/tickets/merged", "source": "folder"}),
        ("adapted", "Qwen/Qwen3-8B", {"name": str(cache), "source": "made"}),
    ):
        run = make_run(runs, name)
        write_json(run.config, {"config": {"model": {"name": typed}}, "origins": {}})
        write_json(run.prepared, {"model": prepared})
        write_json(run.plan, {"steps": 8})
    write_json(make_run(runs, "stopped", "started", "stopped").plan, {"strategy": "ddp", "tensor_parallel": 2})
    for step in (1, 2, 3):
        row = {"kind": "train", "step": step, "loss": 2.0 * step, "tokens_per_second": 90.0 / step, "step_seconds": 2.0}
        append_json_line(RunFolder(runs / "stopped").metrics, row)
    listed = {row["name"]: row for row in in_process("runs", "JSON=1").json}
    stopped = listed.pop("stopped")
    assert stopped["tokens_per_second"] == 37.5, "two steps after the first row"
    assert (stopped["risen"], stopped["strategy"]) == ("worse", "tensor")
    text = in_process("runs").out
    assert "(worse)" in text
    assert "tickets/merged" in text and "Qwen3-8B" in text and "made-0123" not in text


@pytest.mark.parametrize("by_script", [True, False])
def test_stop_signals_even_a_suspended_holder_of_the_lock_and_mentions_a_batch_script(
    program: Program, tmp_path: Path, by_script: bool
) -> None:
    run = make_run(tmp_path / "runs", "now", "started")
    script = (
        {"SFT_PLAY_CAUSE_FILE": str(tmp_path / "0.cause")} if by_script else {}
    )  # without it: typed inside an allocation
    process = hold(run, SLURM_JOB_ID="4711", **script)
    if not by_script:
        process.send_signal(signal.SIGSTOP)
    try:
        done = program("stop", "RUN=now")
        assert process.wait(240) == 143 and done.code == 0, done.err
    finally:
        process.kill()
    turn = "takes another turn, as often as `slurm.max_requeues` allows; `scancel 4711` ends it for good"
    assert (turn in done.out and "the batch script of Slurm job 4711" in done.out) == by_script
    assert ("make resume RUN=now continues it" in done.out) != by_script
    assert "stopped by SIGTERM after step 4; checkpoint step-000004 is complete" in done.out
    program("stop", "RUN=now").refused(2, "nothing trains `now` now")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("logs RUN=now RANK=7", "there are those of ranks 0, 1"),
        ("logs", "`make logs` needs `RUN=name-or-folder`"),
        ("logs RUN=now rank=1", "`RANK=...`"),
    ],
)
def test_invalid_calls_of_runs_stop_and_logs_are_refused(
    in_process: Program, tmp_path: Path, words: str, message: str
) -> None:
    run = make_run(tmp_path / "runs", "now", "started")
    for rank in (0, 1):
        run.rank_log(rank).write_text(f"rank {rank} speaks\n")
    in_process(*words.split()).refused(2, message)


def test_logs_of_a_rank_are_shown_and_followed(in_process: Program, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", "now", "started")
    run.rank_log(1).write_text("first\n")
    assert in_process("logs", "RUN=now", "RANK=1").out == "first\n"
    log: Any = in_process("logs", "RUN=now", "RANK=1", "JSON=1").json
    assert log["rank"] == 1 and log["text"] == "first\n"
    launcher = hold(run)
    words = [sys.executable, "-m", "sft_play", "logs", "RUN=now", "RANK=1", "FOLLOW=1"]
    env = {**os.environ, "RUNS_DIR": str(tmp_path / "runs"), "PYTHONPATH": str(ROOT)}
    follower = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT)
    try:
        assert follower.stdout is not None and follower.stdout.readline() == "first\n"
        with run.rank_log(1).open("a") as stream:
            stream.write("second\n")
        assert follower.stdout.readline() == "second\n"
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(240) == 143 and follower.wait(240) == 0
    finally:
        for process in (launcher, follower):
            process.kill()
            process.wait()
    assert json.loads(run.events.read_text().splitlines()[-1])["saved"] == "step-000004"


def test_a_model_that_training_made_worse_is_not_only_called_best(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", "a", "started", "finished")
    write_json(run.model / "stamp.json", {"step": 8})
    for loss, described in ((0.6, "best eval_loss 0.6000, but 0.5000 before training"), (0.4, "best eval_loss 0.4000")):
        write_json(run.training_metrics, {"best_step": 8, "best_metric": loss, "model_step": 8})
        assert describe_model(run) == f"step 8 ({described})"
