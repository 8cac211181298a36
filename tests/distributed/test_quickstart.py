"""`make quickstart`, short: the same prompts before and after, the same launcher as `train`, and nothing gained at rate
0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sft_play.runs.folder import RunFolder
from tests.conftest import Program


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.long
def test_learning_rate_0_gains_nothing(program: Program, tmp_path: Path) -> None:
    done = program(
        "quickstart",
        "RUN_NAME=q",
        "TRAIN_LEARNING_RATE=0",
        "TRAIN_MAX_STEPS=2",
        "TRAIN_GLOBAL_BATCH_SIZE=2",
        "EVAL_SAMPLES=6",
        "TRAIN_GENERATION_MAX_NEW_TOKENS=12",
        timeout=580,
    )
    assert done.code == 0, done.out[-3000:] + done.err[-3000:]
    run = RunFolder(tmp_path / "runs" / "q")
    before, after = run.evaluation(0), run.evaluation(2)
    old, new = (json.loads((folder / "scores.json").read_text()) for folder in (before, after))
    assert new["loss"] == pytest.approx(old["loss"], abs=1e-6) and new["rougeL"] == old["rougeL"]
    asked, answered = (lines(folder / "predictions.jsonl") for folder in (before, after))
    assert len(asked) == 6
    assert [(line["prompt"], line["answer"]) for line in asked] == [
        (line["prompt"], line["answer"]) for line in answered
    ]
    adapter = json.loads((run.model / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct", "no path of a cache"
    for part in ("dequantised Q4_1", "q@base", "loss", "ROUGE-L", "n = 6"):
        assert part in done.out + done.err, part
    assert "make infer RUN=q" in done.out and "apart" not in done.out, "equal answers are not shown"
    again = program("quickstart", "RUN_NAME=q", timeout=240)
    assert again.code == 2 and "the run `q` exists already" in again.err


def test_quickstart_needs_validation_rows(program: Program, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "What is a list?", "completion": "A sequence."}) + "\n")
    config = tmp_path / "own.yaml"
    config.write_text(f"model: {{name: HuggingFaceTB/SmolLM2-135M-Instruct}}\ndata: {{train_path: {rows}}}\n")
    done = program("quickstart", f"CONFIG={config}", "RUN_NAME=bare")
    assert done.code == 2 and "scores held-out rows, and this configuration has none" in done.err, done.err
    assert not (tmp_path / "runs" / "bare").exists(), "a refused run leaves nothing"


@pytest.mark.long
def test_the_whole_quickstart_teaches_something(program: Program) -> None:
    done = program("quickstart", "RUN_NAME=whole", "JSON=1", timeout=580)
    assert done.code == 0, done.err[-3000:]
    result = done.json
    before, after = result["scores"]["rougeL"]
    assert result["losses"]["loss"][1] < result["losses"]["loss"][0] and after["low"] > before["high"]
    assert result["rows"] and result["seconds"] < 600
