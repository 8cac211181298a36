"""Two sources with weights, packed: the trained share is near the weights, and a resume after a crash trains the same
rows.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import environment, metrics, ragged_rows, run_program

EXACT = ("step", "loss", "grad_norm", "learning_rate", "rank_tokens")


@pytest.fixture(scope="module")
def config(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixing")
    first, other = ragged_rows(folder / "one.jsonl", 160), ragged_rows(folder / "other.jsonl", 120, seed=3)
    path = folder / "mixed.yaml"
    path.write_text(
        f"model: {{name: {tiny}, max_seq_len: 256}}\ntuning: {{mode: lora, lora: {{r: 4, dropout: 0.1}}}}\ndata:\n "
        f" sources:\n    - {{path: {first}, name: one, weight: 3}}\n    - {{path: {other}, name: other, weight: 1}}\n "
        " exhausted: stop\ntrain: {global_batch_size: 40, batch_size: 1, packing: 'on', epochs: 2, learning_rate:"
        " 5.0e-3, save_steps: 3}\n",
        encoding="utf-8",
    )
    return path


WAYS = {
    "ddp": ["train-distributed"],
    "zero1": ["train-deepspeed", "LAUNCH_STRATEGY=zero1"],
    "zero2": ["train-deepspeed", "LAUNCH_STRATEGY=zero2"],
    "zero3": ["train-deepspeed", "LAUNCH_STRATEGY=zero3"],
    "fsdp2": ["train-fsdp"],
}


@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(way, marks=pytest.mark.long) for way in WAYS if way != "ddp")]
)
@pytest.mark.broad
def test_weights_are_what_is_trained_and_resume_is_exact_under_every_strategy(
    strategy: str, config: Path, cache: Path, tmp_path: Path
) -> None:
    """The runs are packed, have dropout, and are cut off in the middle."""
    import datasets

    env = environment(cache, tmp_path)
    words = [
        "NUM_GPUS=2",
        f"CONFIG={config}",
        "RUN_NAME=run",
        "TRAIN_SAVE_STEPS=2",
        "TRAIN_SAVE_TOTAL_LIMIT=20",
        "WHY=1",
    ]
    done = run_program([*WAYS[strategy], *words], env)
    assert done.code == 0, done.err + done.out
    assert (
        "mixture: one: 160 rows an epoch (1 x its 160), about 8,780 tokens, 74.8% of the tokens" in done.out + done.err
    )
    run = tmp_path / "run"
    plan, prepared = (json.loads((run / name).read_text()) for name in ("plan.json", "prepared.json"))
    assert plan["strategy"] == strategy and plan["pack_tokens"] == 256
    rows = datasets.load_from_disk(prepared["train"]["path"])
    facts = {row["row"]: (row["source"], len(row["input_ids"])) for row in rows}
    assert len(facts) == len(rows) == 280
    times = Counter(
        row
        for rank in range(2)
        for row in json.loads((run / "logs" / f"holdings-rank{rank}.json").read_text())["rows_trained"]
    )
    tokens = [
        sum(count * facts[row][1] for row, count in times.items() if facts[row][0] == source) for source in (0, 1)
    ]
    assert tokens[0] / sum(tokens) == pytest.approx(0.75, rel=0.02)
    assert all(times[row] == 2 for row, (source, _) in facts.items() if source == 0)
    assert all(times[row] <= 1 for row, (source, _) in facts.items() if source == 1)  # two epochs, other rows in each

    whole, weights = metrics(run), (run / "model" / "adapter_model.safetensors").read_bytes()
    assert len(whole) == plan["steps"] == 2 * plan["steps_per_epoch"]
    checkpoints = sorted((run / "checkpoints").glob("step-*"))
    middle = len(checkpoints) // 2
    assert 1 <= middle < len(checkpoints) - 1
    for folder in (*checkpoints[middle:], run / "model"):
        shutil.rmtree(folder)
    done = run_program(["resume", "RUN=run"], env)
    assert done.code == 0 and checkpoints[middle - 1].name in done.out + done.err, done.err + done.out
    assert [[row[key] for key in EXACT] for row in metrics(run)] == [[row[key] for key in EXACT] for row in whole]
    assert (run / "model" / "adapter_model.safetensors").read_bytes() == weights
