"""After a run of the same configuration the forecast is within 15 % of real runs on this CPU, and each run shows it
next to the measured figures.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from benchmarks.memory import CASES, compare, measure
from tests.conftest import Program, ragged_rows
from tests.tiny_models import build_tiny_llama

BOUND = 0.15
RUNS = 3


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a random Llama of 31 M parameters, large enough that matrix products, not Python, take the time."""
    return build_tiny_llama(
        tmp_path_factory.mktemp("models") / "small",
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
    )


@pytest.mark.quiet
@pytest.mark.long
def test_the_forecast_is_near_real_runs(program: Program, small: Path, tmp_path: Path) -> None:
    rows = ragged_rows(tmp_path / "rows.jsonl", 200)
    config = tmp_path / "small.yaml"
    config.write_text(
        f"model: {{name: {small}, max_seq_len: 256}}\ndata: {{train_path: {rows}}}\n"
        "train: {global_batch_size: 8, max_steps: 16, save_strategy: 'no', report_to: none}\n"
    )
    # One thread: several that wait for a core which another program has would measure that program.
    env = {"SFT_PLAY_CACHE": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    bench = program("bench", f"CONFIG={config}", "JSON=1", env=env)
    assert bench.code == 0, bench.err
    speeds, forecast = [], 0.0
    for number in range(RUNS):
        done = program("train", f"CONFIG={config}", f"RUN_NAME=run-{number}", env=env)
        assert done.code == 0, done.err
        assert "tokens/s, forecast " in done.out and "GiB, forecast " in done.out
        metrics = json.loads((tmp_path / "runs" / f"run-{number}" / "training_metrics.json").read_text())
        assert metrics["forecast"]["basis"].startswith("by run `")
        speeds.append(metrics["tokens_per_second"])
        forecast = metrics["forecast"]["tokens_per_second"]
    assert forecast == pytest.approx(median(speeds), rel=BOUND), (speeds, bench.json)


@pytest.mark.long
@pytest.mark.parametrize("name", ["LoRA, 1 row", "LoRA, 4 rows", "LoRA, 8 rows"])
def test_three_batch_sizes_grow_as_planned(name: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SFT_PLAY_CACHE", str(cache))
    cells, within = compare(measure(CASES[name]), on_gpu=False)
    assert within, cells
