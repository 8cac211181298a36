"""`make sweep`: planned first, stopped and continued, ranked at the end; each run an ordinary one."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest

from sft_play.files import append_json_line
from sft_play.runs.folder import RunFolder
from tests.conftest import Program
from tests.launcher import Launcher
from tests.tiny_models import build_tiny_llama


@pytest.mark.broad
def test_a_sweep_of_four_is_stopped_and_continued(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, build_tiny_llama(tmp_path / "model"))
    (tmp_path / "rates.yaml").write_text(
        "metric: loss\nkeys:\n  train.learning_rate: [1e-5, 0.05]\n  tuning.lora.r: [2, 4]\n"
    )
    words = (
        "sweep",
        f"CONFIG={launcher.config}",
        "SWEEP=rates.yaml",
        "TRAIN_MAX_STEPS=30",
        "PRICE_PER_HOUR=2",
        "DATA_VAL_PATH=rows.jsonl",
        "TRAIN_EVAL_STRATEGY=steps",
        "TRAIN_EVAL_STEPS=30",
        "TRAIN_PREDICT_WITH_GENERATE=true",
        "TRAIN_GENERATION_MAX_NEW_TOKENS=2",
    )
    sweep = launcher.start(*words)
    sweep.run = launcher.runs / "demo-rates-02"
    sweep.wait_for_step(2)
    sweep.process.send_signal(signal.SIGTERM)
    code, output = sweep.end(within=240)
    assert code == 143 and "the same command continues the sweep" in output, output
    assert (
        "sweep of 4 runs\n" in output
        and "demo-rates-04  0.05" in output
        and not (launcher.runs / "demo-rates-03").exists()
    )

    done = launcher(*words, "JSON=1")
    assert done.code == 0, done.err
    assert [event["event"] for event in launcher.events("demo-rates-01")] == [
        "started",
        "finished",
    ], "a finished run is left as it is"
    assert [event["event"] for event in launcher.events("demo-rates-02")] == [
        "started",
        "stopped",
        "resumed",
        "finished",
    ]
    assert "about " in done.err and "cost about " in done.err
    results = json.loads(done.out)
    assert {event["run"]: event["values"] for event in results} == {
        f"demo-rates-0{2 * i + j + 1}": {"train.learning_rate": rate, "tuning.lora.r": rank}
        for i, rate in enumerate(("1e-5", "0.05"))
        for j, rank in enumerate(("2", "4"))
    }
    losses = [event["loss"] for event in results]
    assert losses == sorted(losses) and results[0]["values"]["train.learning_rate"] == "0.05"
    config = json.loads((launcher.runs / "demo-rates-03" / "config.json").read_text())["config"]
    assert config["train"]["learning_rate"] == 0.05 and config["tuning"]["lora"]["r"] == 2

    assert "note: `tuning.lora.alpha` stays 32, so each rank has another scale, alpha / r\n" in done.err
    assert re.search(r"^demo-rates-04 .* r=4, learning_rate=0.05 ", launcher("runs").out, re.M)

    listing = launcher(*words).out
    assert "all are finished\n" in listing and "in all" not in listing
    assert re.search(r"^run +train\.learning_rate +tuning\.lora\.r +loss +eval_loss +state", listing, re.M), listing
    assert (
        "ROUGE-L, paired difference" in listing
        and f'make compare RUNS="{results[0]["run"]} {results[1]["run"]}"' in listing
    )

    best = results[0]["run"]
    assert f"to use the best: make infer RUN={best}\n" in listing and "keeps the best" not in listing
    assert f"to train the best on: make resume RUN={best} TRAIN_MAX_STEPS=MORE" in listing
    assert launcher("resume", f"RUN={best}", "TRAIN_MAX_STEPS=34").code == 0
    append_json_line(RunFolder(launcher.runs / best).events, {"event": "stopped", "node": 0, "time": time.time()})
    again = json.loads(launcher(*words, "JSON=1").out)
    assert again[0]["run"] == best and again[0]["loss"] is not None, "also one that was trained on and stopped"
    on = launcher(*(word.replace("STEPS=30", "STEPS=32") for word in words))
    assert on.code == 0 and f"left as they are, since they were trained on: {best} (34 steps)\n" in on.out, on.err
    assert re.search(r"^trained on from where they finished: .*demo-rates-0\d \(30 steps\)$", on.out, re.M)
    assert re.search(r"^about .+ for 3 with steps left", on.out, re.M) and [
        launcher.events(event["run"])[-1]["event"] for event in results
    ] == ["stopped", *["finished"] * 3]

    (tmp_path / "rates.yaml").write_text(
        "metric: loss\nkeys:\n  train.learning_rate: [1e-5, 0.05]\n  tuning.lora.r: [8, 4]\n"
    )
    edited = launcher(*words)
    assert edited.code == 2 and "rates.yaml:4: `tuning.lora.r` is 8 for the run `demo-rates-01`" in edited.err, (
        edited.err
    )
    assert "started with 2" in edited.err and "sweep of" not in edited.out


@pytest.mark.broad
def test_a_stop_that_comes_as_a_run_ends_also_ends_the_sweep(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, build_tiny_llama(tmp_path / "model"))
    (tmp_path / "seeds.yaml").write_text("metric: loss\nkeys:\n  train.seed: [1, 2]\n")
    scored = ("DATA_VAL_PATH=rows.jsonl", "TRAIN_EVAL_STRATEGY=steps", "TRAIN_EVAL_STEPS=3")
    words = (f"CONFIG={launcher.config}", "SWEEP=seeds.yaml", "TRAIN_MAX_STEPS=3", "TRAIN_SAVE_STRATEGY=no", *scored)
    sweep = launcher.start("sweep", *words, "TRAIN_PREDICT_WITH_GENERATE=true")
    sweep.run = launcher.runs / "demo-seeds-01"
    sweep.wait_for_step(3)
    sweep.process.send_signal(signal.SIGTERM)
    code, output = sweep.end(within=240)
    assert code == 143 and "the same command continues the sweep" in output, output
    assert [event["event"] for event in launcher.events("demo-seeds-01")] == ["started", "finished"]
    assert not (launcher.runs / "demo-seeds-02").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keys: {learning_rate: [1]}", "did you mean `train.learning_rate`?"),
        ("keys: {tuning.lora.rank: [8]}", "did you mean `tuning.lora.r`?"),
        ("keys: {train.per_device_train_batch_size: [8]}", "did you mean `train.batch_size`?"),
        ("keys: {train.max_samples: [8]}", "`rows` of an entry of `data.sources` limits what is trained"),
        ("keys: {train: {seed: [1]}}", "docs/configuration.md lists keys such as"),
        ("keys:\n  train.seed: 3", "sweep.yaml:2: `train.seed` is `3`; expected a list of values"),
        ("keys: {}", "sweep.yaml:1: `keys` is empty"),
        ("method: halving\nkeys: {train.seed: [1]}", "sweep.yaml:1: `method` is `halving`; expected `grid`"),
        ("keys:\n  train.seed: {min: 1, max: 3}", "expected a list of values"),
        ("keys: {train.seed: [1, 2, 1]}", "sweep.yaml:1: `train.seed` has a value twice"),
        ("keys:\n  train.seed: [1, two]", "`train.seed` is `two`; expected an integer"),
    ],
)
def test_a_mistake_is_found_before_anything_starts(
    in_process: Program, tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(text + "\n")
    in_process("sweep", "CONFIG=quickstart", f"SWEEP={path}").refused(2, message)


@pytest.mark.broad
def test_a_run_that_fails_does_not_end_the_sweep_and_is_tried_again(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, build_tiny_llama(tmp_path / "model"))
    (tmp_path / "lengths.yaml").write_text("keys:\n  model.max_seq_len: [8, 64]\n")
    words = ("sweep", f"CONFIG={launcher.config}", "SWEEP=lengths.yaml", "DATA_OVERLONG=error", "TRAIN_EVAL_STEPS=1")
    words = (*words, "DATA_VAL_PATH=rows.jsonl", "TRAIN_EVAL_STRATEGY=steps")
    for _ in range(2):
        done = launcher(*words)
        assert done.code == 4 and "8 of 8 rows are longer than `model.max_seq_len` 8" in done.err, done.err
        assert "run 1 of 2, demo-lengths-01: model.max_seq_len=8\n" in done.err
        assert "demo-lengths-01 failed with code 4; the same command tries it again" in done.err
        assert re.search(r"^demo-lengths-02 .* finished ", done.out, re.M), done.out
        assert re.search(r"^demo-lengths-01 .* failed \(4\) ", done.out, re.M), done.out

    run = RunFolder(launcher.runs / "demo-lengths-02")
    append_json_line(run.metrics, {"kind": "eval", "step": 2, "eval_loss": 60.2})
    listing = launcher(*words).out
    assert "but model/ is that of the last step: demo-lengths-02 (60.2);" in listing and "(worse)" in listing, listing


def test_a_sweep_counts_processes_as_its_runs_and_names_the_run_that_cannot_be(
    in_process: Program, tmp_path: Path
) -> None:
    path = tmp_path / "rows.yaml"
    path.write_text("keys: {train.batch_size: [8, 16]}\n")
    done = in_process("sweep", "CONFIG=quickstart", f"SWEEP={path}", "TRAIN_GLOBAL_BATCH_SIZE=8")
    done.refused(2, "nothing starts, because of quickstart-rows-02: train.batch_size=16\n", "16 rows")


def test_the_array_of_a_sweep_takes_a_throttle(in_process: Program, tmp_path: Path) -> None:
    path = tmp_path / "seeds.yaml"
    path.write_text("keys: {train.seed: [1, 2, 3]}\n")
    words = ("CONFIG=quickstart", "HARDWARE=1xH100", "SLURM_ARRAY=%2")
    done = in_process("sweep", *words, f"SWEEP={path}", "SLURM=1")
    script = tmp_path / "runs" / "quickstart-seeds" / "slurm" / "job.sbatch"
    assert done.code == 0 and "#SBATCH --array=1,2,3%2\n" in script.read_text(), done.err
    in_process("slurm", *words).refused(2, "SLURM_ARRAY=%2: `slurm.array` is `%2`, without indices", "0-3%2")


def test_conflicting_options_of_a_sweep_are_refused(in_process: Program, tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text("metric: rougeL\nkeys: {train.seed: [1, 2]}\n")
    (mixed := tmp_path / "mixed.yaml").write_text("metric: loss\nkeys: {launch.strategy: [ddp, zero2]}\n")
    for words, message in (
        (f"SWEEP={path} TRAIN_SEED=3", "was typed, but it is also a key of the sweep"),
        ("", "needs `SWEEP`"),
        (f"SWEEP={path} HARDWARE=4xH100", "`HARDWARE` is for a sweep by Slurm"),
        (f"SWEEP={mixed} SLURM=1 HARDWARE=2xH100", "train-deepspeed and train-distributed"),
        (f"SWEEP={path} SLURM=1 SLURM_ARRAY=1-2", "hint: SLURM_ARRAY=%2 trains two runs at a time"),
        (f"SWEEP={path} TRAIN_EVAL_STRATEGY=epoch", "by `eval_rougeL`, but no answers are generated while"),
        (f"SWEEP={path} TRAIN_EVAL_STRATEGY=no", "ranked by `eval_rougeL`, and `train.eval_strategy` is `no`"),
    ):
        in_process("sweep", "CONFIG=quickstart", *words.split()).refused(2, message)
