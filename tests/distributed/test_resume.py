"""`make resume` on another number of processes, under another strategy, and of an older version's run."""

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


def test_a_run_resumes_with_another_number_of_processes_and_another_strategy(
    config: Path, cache: Path, tmp_path: Path
) -> None:
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


def test_a_data_file_that_was_renamed_is_read_from_the_cache_or_under_its_new_name(
    config: Path, cache: Path, tmp_path: Path
) -> None:
    env, mine = environment(cache, tmp_path), tmp_path / "mine.yaml"
    files = [tmp_path / name for name in ("train.jsonl", "val.jsonl")]
    for name, path in zip(("train.jsonl", "val.jsonl"), files, strict=True):
        shutil.copy(config.parent / name, path)
    mine.write_text(config.read_text().replace(str(config.parent), str(tmp_path)))
    must_run(["train", f"CONFIG={mine}", "RUN_NAME=run", "TRAIN_MAX_STEPS=2"], env)
    renamed = [path.rename(path.with_name(f"new-{path.name}")) for path in files]
    must_run(["resume", "RUN=run", "TRAIN_MAX_STEPS=3"], env)
    saved = (tmp_path / "run" / "config.json").read_bytes()
    done = run_program(
        ["resume", "RUN=run", "TRAIN_MAX_STEPS=4", f"DATA_TRAIN_PATH={renamed[1]}", f"DATA_VAL_PATH={renamed[0]}"], env
    )
    done.refused(5, "the training rows have changed")
    assert (tmp_path / "run" / "config.json").read_bytes() == saved
    must_run(
        ["resume", "RUN=run", "TRAIN_MAX_STEPS=4", f"DATA_TRAIN_PATH={renamed[0]}", f"DATA_VAL_PATH={renamed[1]}"], env
    )
    assert len(metrics(tmp_path / "run")) == 4
    complete = ["resume", "RUN=run"]
    assert "nothing is left to train" in must_run([*complete, f"DATA_TRAIN_PATH={renamed[0]}"], env).err
    run_program([*complete, f"DATA_TRAIN_PATH={renamed[1]}"], env).refused(5, "the training rows have changed")
    run_program([*complete, "DATA_TRAIN_PATH=nosuch.jsonl"], env).refused(4, "nosuch.jsonl: there is no such file")
    empty = environment(tmp_path / "another-cache", tmp_path)
    renamed[0].rename(files[0])
    run_program(["resume", "RUN=run", "TRAIN_MAX_STEPS=5"], empty).refused(4, "there is no such file", str(renamed[0]))
