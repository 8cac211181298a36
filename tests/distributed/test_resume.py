"""`make resume`: to the bit what the uninterrupted run would have been, and refused when something else would be trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import environment, metrics, ragged_rows, run_program

WAYS = {
    "single": ("train", []),
    "ddp": ("train-distributed", ["NUM_GPUS=2"]),
    "zero2": ("train-deepspeed", ["NUM_GPUS=2"]),
    "fsdp2": ("train-fsdp", ["NUM_GPUS=2"]),
}
EXACT = ("step", "loss", "grad_norm", "learning_rate", "rank_loss", "rank_tokens")


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


@pytest.mark.parametrize("way", ["single", *(pytest.param(way, marks=pytest.mark.long) for way in ("ddp", "zero2", "fsdp2"))])
def test_a_run_that_lost_its_end_is_made_again_to_the_bit(way: str, config: Path, cache: Path, tmp_path: Path) -> None:
    command, words = WAYS[way]
    env = environment(cache, tmp_path)
    done = run_program([command, f"CONFIG={config}", "RUN_NAME=run", *words], env)
    assert done.code == 0, done.err + done.out
    run = tmp_path / "run"
    whole = metrics(run)
    weights = (run / "model" / "adapter_model.safetensors").read_bytes()
    # As after a crash in step 5: the later checkpoints are gone, the newest of them half-written, the model not there.
    shutil.rmtree(run / "checkpoints" / "step-000007")
    newest = run / "checkpoints" / "step-000006" / "adapter_model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    shutil.rmtree(run / "model")
    done = run_program(["resume", "RUN=run"], env)
    assert done.code == 0, done.err + done.out
    assert "step-000006" in done.out + done.err and "step-000004" in done.out + done.err
    again = metrics(run)
    assert [[row[key] for key in EXACT] for row in again] == [[row[key] for key in EXACT] for row in whole]
    assert (run / "model" / "adapter_model.safetensors").read_bytes() == weights
    assert (run / "checkpoints" / "last").resolve().name == "step-000007"
    assert not list((run / "checkpoints").glob(".*"))


def test_two_processes_become_three_and_another_strategy_one(config: Path, cache: Path, tmp_path: Path) -> None:
    env = environment(cache, tmp_path)
    words = [f"CONFIG={config}", "RUN_NAME=run", "NUM_GPUS=2", "TUNING_LORA_DROPOUT=0.0"]
    done = run_program(["train-distributed", *words], env)
    assert done.code == 0, done.err + done.out
    run = tmp_path / "run"
    whole, steps = metrics(run), sorted((run / "checkpoints").glob("step-*"))
    for checkpoint in steps[1:]:
        shutil.rmtree(checkpoint)
    shutil.rmtree(run / "model")
    done = run_program(["resume", "RUN=run", "NUM_GPUS=3"], env)
    assert done.code == 0, done.err + done.out
    assert (done.err + done.out).count("`world_size` was `2` and is `3`") == 1, (
        "the launcher says it, the worker in its log alone"
    )
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["world_size"], plan["strategy"], plan["global_batch_size"]) == (3, "ddp", 8)
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in metrics(run)] == pytest.approx([row[name] for row in whole], rel=1e-5)
    done = run_program(["resume", "RUN=run", "NUM_GPUS=1", "LAUNCH_STRATEGY=zero2", "TRAIN_MAX_STEPS=8"], env)
    assert done.code == 0, done.err + done.out
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["world_size"], plan["strategy"]) == (1, "zero2")
    assert "`strategy` was `ddp` and is `zero2`" in done.err + done.out
    assert len(metrics(run)) == 8


@pytest.fixture(scope="module")
def finished(config: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, to be copied and spoilt."""
    runs = tmp_path_factory.mktemp("finished")
    done = run_program(["train", f"CONFIG={config}", "RUN_NAME=run", "TRAIN_MAX_STEPS=4"], environment(cache, runs))
    assert done.code == 0, done.err + done.out
    shutil.rmtree(runs / "run" / "model")
    shutil.rmtree(runs / "run" / "checkpoints" / "step-000004")
    return runs / "run"


@pytest.mark.parametrize(("field", "value"), [("backend", "unsloth"), ("base_fingerprint", "0" * 64), ("train_data", "1" * 64)])
def test_resume_refuses_what_was_made_by_something_else(
    field: str, value: str, finished: Path, cache: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run, symlinks=True)
    checkpoint = run / "checkpoints" / "step-000002"
    stamp = json.loads((checkpoint / "stamp.json").read_text())
    (checkpoint / "stamp.json").write_text(json.dumps(stamp | {field: value}))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    from sft_play.files import file_sha256

    facts = {"bytes": (checkpoint / "stamp.json").stat().st_size, "sha256": file_sha256(checkpoint / "stamp.json")}
    manifest["files"]["stamp.json"] = facts
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    before = contents(run)
    done = run_program(["resume", "RUN=run"], environment(cache, tmp_path))
    assert done.code == 5
    assert f"`{field}`" in done.err and "hint:" in done.err and "Traceback" not in done.err
    assert contents(run) == before


def test_a_checkpoint_with_pickles_is_refused_before_anything_starts(finished: Path, cache: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run, symlinks=True)
    checkpoint = run / "checkpoints" / "step-000002"
    (checkpoint / "states.json").rename(checkpoint / "optimizer.pt")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["optimizer.pt"] = manifest["files"].pop("states.json")
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    done = run_program(["resume", "RUN=run"], environment(cache, tmp_path))
    assert done.code == 5
    assert "an older version wrote it" in done.err and "hint:" in done.err and "Traceback" not in done.err


def contents(run: Path) -> dict[str, bytes]:
    """Returns every file of a run's checkpoints."""
    return {str(path): path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()}


def test_resume_of_an_unknown_run_lists_those_that_exist(finished: Path, cache: Path) -> None:
    done = run_program(["resume", "RUN=nothing"], environment(cache, finished.parent))
    assert done.code == 5
    assert "`nothing`" in done.err and "run" in done.err.split("hint:")[1]
