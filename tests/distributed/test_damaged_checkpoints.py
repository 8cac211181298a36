"""After damage to any file of a checkpoint a run resumes from the one before, and names the file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from sft_play.files import read_json
from sft_play.runs.checkpoints import newest_valid
from sft_play.runs.folder import RunFolder
from tests.conftest import environment, must_run, ragged_rows, run_program
from tests.training_runs import Trial, copy_run, make_run, must_train, same_to_the_bit

TWO_RANKS = ((2, 2), (2, 2))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    """Flip one bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture(
    scope="module",
    params=["ddp", *(pytest.param(strategy, marks=pytest.mark.long) for strategy in ("zero2", "zero3", "fsdp2"))],
)
def run(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Train a run of two ranks with checkpoints of steps 2 and 4, by full tuning so that optimizer states are large
    enough.
    """
    folder = tmp_path_factory.mktemp(f"damaged-{request.param}")
    trial = Trial(strategy=request.param, ranks=TWO_RANKS, settings=("train.save_steps: 2",), steps=4)
    return must_train(make_run(folder / "run", tiny, trial))


def test_damage_to_any_file_means_the_previous_checkpoint(run: RunFolder) -> None:
    newest, before = run.checkpoint(4), run.checkpoint(2)
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    names = {path.relative_to(newest).as_posix() for path in files}
    assert set(read_json(newest / "manifest.json")["files"]) == names - {"manifest.json"}, "everything is listed"
    assert len([name for name in names if "optimizer" in name or "rng" in name]) >= 3, (
        "states of both ranks are among them"
    )
    assert newest_valid(run) == (newest, [])
    for path in files:
        name = path.relative_to(newest).as_posix()
        content = path.read_bytes()
        for way in (Path.unlink, truncate, flip):
            way(path)
            checkpoint, skipped = newest_valid(run)
            assert checkpoint == before, (name, way.__name__)
            assert len(skipped) == 1 and skipped[0].startswith("step-000004: "), skipped
            assert ("manifest" if name == "manifest.json" else f"`{name}`") in skipped[0], (way.__name__, skipped)
            path.write_bytes(content)
    assert newest_valid(run) == (newest, [])


def test_resume_names_the_damaged_file_and_uses_the_previous_checkpoint(
    tiny: Path, cache: Path, tmp_path: Path
) -> None:
    """With two of three checkpoints damaged in different ways the run still ends with the same bits."""
    rows = ragged_rows(tmp_path / "train.jsonl", 12)
    config = tmp_path / "demo.yaml"
    config.write_text(
        f"model: {{name: {tiny}, max_seq_len: 256}}\ntuning: {{mode: lora, lora: {{r: 4, dropout: 0.1}}}}\ndata:"
        f" {{train_path: {rows}}}\ntrain: {{global_batch_size: 4, batch_size: 2, max_steps: 6, save_steps: 2,"
        " learning_rate: 5.0e-3}\n"
    )
    env = environment(cache, tmp_path / "runs")
    must_run(["train", f"CONFIG={config}", "RUN_NAME=run"], env)
    run = RunFolder(tmp_path / "runs" / "run")
    whole = copy_run(run, tmp_path / "whole")
    flip(run.checkpoint(6) / "adapter_model.safetensors")
    optimizer = next(path for path in sorted(run.checkpoint(4).iterdir()) if path.name.startswith("optimizer"))
    optimizer.unlink()
    shutil.rmtree(run.model)
    done = must_run(["resume", "RUN=run"], env)
    assert "skipped: step-000006: `adapter_model.safetensors` has another checksum than the manifest says" in done.err
    assert f"skipped: step-000004: `{optimizer.name}` is missing" in done.err
    assert "from step-000002" in done.err
    same_to_the_bit(run, whole)
    assert newest_valid(run) == (run.checkpoint(6), []) and run.last.resolve() == run.checkpoint(6)
    assert not list(run.checkpoints.glob(".*"))

    for step in (2, 4, 6):
        truncate(run.checkpoint(step) / "stamp.json")
    shutil.rmtree(run.model)
    done = run_program(["resume", "RUN=run"], env)
    done.refused(5, "no valid checkpoint", "hint:")
    assert done.err.count("`stamp.json`") == 3
