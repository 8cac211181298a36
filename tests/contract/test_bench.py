"""`make bench` as a user types it (C21): some steps, speed and memory next to the plan, and how they correct it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import Done, Program, ragged_rows


@pytest.fixture
def tiny_config(tmp_path: Path, tiny: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    rows = ragged_rows(tmp_path / "rows.jsonl", 24)
    path.write_text(f"model:\n  name: {tiny}\n  max_seq_len: 128\ndata:\n  train_path: {rows}\n", encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.broad
def test_bench_shows_its_steps_next_to_the_plan_and_corrects_it(
    program: Program, tiny_config: Path, tmp_path: Path
) -> None:
    own = {"SFT_PLAY_CACHE": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""}

    def call(*words: str) -> Done:
        done = program(*words, f"CONFIG={tiny_config}", env=own, timeout=200)
        assert done.code == 0, done.err
        return done

    before = call("plan", "JSON=1").json
    assert before["speed_basis"].startswith("a guess: ") and "a guess: " in call("plan").out
    report = call("bench", "JSON=1", "TRAIN_MAX_STEPS=6").json
    measured, run = report["measured"], Path(report["run"])
    assert re.fullmatch(r"tiny-bench-\d{8}-\d{6}", run.name), "`make runs` shows what it is"
    assert all(value > 0 for value in measured.values()) and len(measured) == 4
    assert report["plan"]["basis"].startswith("a guess: ") and report["plan"]["peak_memory_bytes"] > 0
    assert (tmp_path / run / "training_metrics.json").is_file() and not (tmp_path / run / "checkpoints").exists()
    after = call("plan", "JSON=1").json
    assert (
        after["speed_basis"]
        == f"by run `{run.name}`: {measured['steady_tokens_per_second']:,.0f} tokens/s in its median step"
    )
    assert after["tokens_per_second"] == pytest.approx(measured["steady_tokens_per_second"], rel=0.35)
    assert [rank["micro_batch"] for rank in after["ranks"]] == [rank["micro_batch"] for rank in before["ranks"]]
    assert "a guess: " in call("plan", "TUNING_MODE=full").out
    text = call("bench", "NUM_GPUS=2").out
    assert "tokens/s, forecast " in text and "GiB, forecast " in text and "use this run from now on" in text


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["MODEL_NAME=./not/there"], 4, "there is no such model folder"),
        (["RUN_NAME=mine"], 2, "takes no `RUN_NAME`"),
        (["RUN=one"], 2, "takes no `RUN`\n\nhint: it is for `config`, `plan`, `data`, `memory-check` and "),
    ],
)
def test_mistakes_are_reported_before_training(
    in_process: Program, tmp_path: Path, words: list[str], code: int, message: str
) -> None:
    done = in_process("bench", *words, env={"SFT_PLAY_CACHE": str(tmp_path / "cache")})
    assert done.code == code and message in done.err, done.out + done.err
    assert not done.out and "Traceback" not in done.err and not (tmp_path / "runs").exists()
