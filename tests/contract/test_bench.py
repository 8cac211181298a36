"""`make bench` as a user types it (C21): a table, a calibration that `make plan` uses, and nothing left behind."""

from __future__ import annotations

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
def test_it_measures_keeps_and_is_used(program: Program, tiny_config: Path, tmp_path: Path) -> None:
    own = {"SFT_PLAY_CACHE": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""}

    def call(*words: str) -> Done:
        done = program(*words, f"CONFIG={tiny_config}", env=own, timeout=200)
        assert done.code == 0, done.err
        return done

    assert "(a prior, not measured here)" in call("plan").out
    found = call("bench", "JSON=1").json
    rows = {row["what"]: row for row in found["rows"]}
    assert {
        "all-reduce 1 MB, gloo, 2 ranks",
        "all-reduce 16 MB, gloo, 2 ranks",
        "all-reduce 64 MB, gloo, 2 ranks",
        "memory, copy",
        "matmul 2048, float32",
        "its memory, rank 0",
        "training, single, micro-batch 4",
        "the same by this calibration",
    } == {name for name in rows if not name.startswith("matmul") or "2048" in name}
    assert all(row["measured"] > 0 for row in found["rows"])
    assert all(
        row["ratio"] == pytest.approx(row["measured"] / row["expected"]) for row in found["rows"] if row["expected"]
    )
    assert found["fit"]["points"] >= 6 and found["fit"]["flops_per_second"] > 0
    kept = Path(found["calibration"])
    assert kept.is_file() and kept.parent == tmp_path / "cache" / "calibration"
    assert not (tmp_path / "runs").exists(), "bench leaves no run"
    plan = call("plan", "JSON=1").json
    assert plan["speed_basis"].startswith("calibrated by `make bench` on 20") and plan["mfu"] > 0
    assert "other work than this" in call("plan", "TUNING_MODE=full").out
    text = call("bench", "NUM_GPUS=2").out
    assert "training, ddp, micro-batch 4" in text and f"kept in {kept}" in text
    assert "calibrated" in call("plan", "NUM_GPUS=2", "HARDWARE=cpu").out


@pytest.mark.parametrize(
    ("words", "code", "parts"),
    [
        (["TRAIN_MAX_STEPS=3"], 2, ["`TRAIN_MAX_STEPS=3`", "`make bench` sets this itself"]),
        (["MODEL_NAME=./not/there"], 4, ["there is no such model folder"]),
        (["RUN_NAME=mine"], 2, ["takes no `RUN_NAME`"]),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(
    in_process: Program, tmp_path: Path, words: list[str], code: int, parts: list[str]
) -> None:
    done = in_process("bench", *words, env={"SFT_PLAY_CACHE": str(tmp_path / "cache")})
    assert done.code == code, done.out + done.err
    assert not done.out and "Traceback" not in done.err and "measuring" not in done.err
    for part in parts:
        assert part in done.err
    assert not (tmp_path / "cache" / "calibration").exists()
