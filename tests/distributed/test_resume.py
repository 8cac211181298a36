"""`make resume` of a run on another number of processes and under another strategy, and of what an older version wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import environment, metrics, must_run, ragged_rows, run_program


@pytest.fixture(scope="module")
def config(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    train, held_out = ragged_rows(folder / "train.jsonl", 21), ragged_rows(folder / "val.jsonl", 5, seed=1)
    path = folder / "resume.yaml"
    path.write_text(
        f"model: {{name: {tiny}, max_seq_len: 256}}\n"
        "tuning: {mode: lora, lora: {r: 4, dropout: 0.1}}\n"
        f"data: {{train_path: {train}, val_path: {held_out}}}\n"
        "train: {global_batch_size: 8, batch_size: 2, max_steps: 7, learning_rate: 5.0e-3, save_steps: 2}\n",
        encoding="utf-8",
    )
    return path


def test_two_processes_become_three_and_another_strategy_one(config: Path, cache: Path, tmp_path: Path) -> None:
    env = environment(cache, tmp_path)
    words = [f"CONFIG={config}", "RUN_NAME=run", "NUM_GPUS=2", "TUNING_LORA_DROPOUT=0.0"]
    must_run(["train-distributed", *words], env)
    run = tmp_path / "run"
    whole, steps = metrics(run), sorted((run / "checkpoints").glob("step-*"))
    for checkpoint in steps[1:]:
        shutil.rmtree(checkpoint)
    shutil.rmtree(run / "model")
    done = must_run(["resume", "RUN=run", "NUM_GPUS=3"], env)
    assert (done.err + done.out).count("`world_size` was `2` and is `3`") == 1, (
        "the launcher says it, the worker in its log alone"
    )
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["world_size"], plan["strategy"], plan["global_batch_size"]) == (3, "ddp", 8)
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in metrics(run)] == pytest.approx([row[name] for row in whole], rel=1e-5)
    done = must_run(["resume", "RUN=run", "NUM_GPUS=1", "LAUNCH_STRATEGY=zero2", "TRAIN_MAX_STEPS=8"], env)
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["world_size"], plan["strategy"]) == (1, "zero2")
    assert "`strategy` was `ddp` and is `zero2`" in done.err + done.out
    assert len(metrics(run)) == 8


def test_a_checkpoint_with_pickles_is_refused_before_anything_starts(config: Path, cache: Path, tmp_path: Path) -> None:
    must_run(["train", f"CONFIG={config}", "RUN_NAME=run", "TRAIN_MAX_STEPS=2"], environment(cache, tmp_path))
    run = tmp_path / "run"
    shutil.rmtree(run / "model")
    checkpoint = run / "checkpoints" / "step-000002"
    (checkpoint / "states.json").rename(checkpoint / "optimizer.pt")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["optimizer.pt"] = manifest["files"].pop("states.json")
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    done = run_program(["resume", "RUN=run"], environment(cache, tmp_path))
    done.refused(5, "an older version wrote it", "hint:")
