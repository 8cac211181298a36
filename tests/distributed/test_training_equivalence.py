"""One YAML, every way to run it: the same losses, gradient norms and held-out loss to 1e-5 (contract B5, B18)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sft_play.runs.folder import RunFolder
from tests.conftest import environment, metrics, must_run, ragged_rows
from tests.training_runs import holdings, same_curves

STEPS = 5
WAYS = {
    "b4a2": ("train", ["TRAIN_BATCH_SIZE=4", "TRAIN_GRAD_ACCUM=2"]),
    "b1a8": ("train", ["TRAIN_BATCH_SIZE=1", "TRAIN_GRAD_ACCUM=8"]),
    "b3": ("train", ["TRAIN_BATCH_SIZE=3"]),
    "ddp2": ("train-distributed", ["NUM_GPUS=2", "TRAIN_BATCH_SIZE=2"]),
    "ddp3": ("train-distributed", ["NUM_GPUS=3", "TRAIN_BATCH_SIZE=2"]),
    "zero1": ("train-deepspeed", ["NUM_GPUS=2", "LAUNCH_STRATEGY=zero1", "TRAIN_BATCH_SIZE=4"]),
    "zero2": ("train-deepspeed", ["NUM_GPUS=2", "TRAIN_BATCH_SIZE=2"]),
    "zero3": ("train-deepspeed", ["NUM_GPUS=2", "LAUNCH_STRATEGY=zero3", "TRAIN_BATCH_SIZE=2"]),
    "fsdp2": ("train-fsdp", ["NUM_GPUS=2", "TRAIN_BATCH_SIZE=2"]),
    "packed": ("train", ["TRAIN_BATCH_SIZE=1", "TRAIN_PACKING=on"]),
    "packed-ddp2": ("train-distributed", ["NUM_GPUS=2", "TRAIN_BATCH_SIZE=1", "TRAIN_PACKING=auto"]),
    "packed-zero2": ("train-deepspeed", ["NUM_GPUS=2", "TRAIN_BATCH_SIZE=1", "TRAIN_PACKING=on"]),
    "packed-zero3": (
        "train-deepspeed",
        ["NUM_GPUS=2", "LAUNCH_STRATEGY=zero3", "TRAIN_BATCH_SIZE=1", "TRAIN_PACKING=on"],
    ),
    "packed-fsdp2": ("train-fsdp", ["NUM_GPUS=2", "TRAIN_BATCH_SIZE=1", "TRAIN_PACKING=on"]),
}
ADAPTERS = ("b1a8", "ddp2", "zero2", "zero3", "fsdp2")
"""Splits are proven with full tuning, adapters where the strategy treats them differently."""
SHORT = [("full", way) for way in ("b1a8", "ddp2", "zero3", "fsdp2", "packed-ddp2")] + [
    ("lora", "zero2"),
    ("lora", "fsdp2"),
]
"""One of each kind; the others repeat the proof for another split or stage."""
PAIRS = [("full", way) for way in WAYS] + [("lora", way) for way in ADAPTERS]
WEIGHTS = {"full": (0.3, 1, 0.05, 0.7), "lora": ()}
"""Of the rows, by mode."""
SHARDS = {
    "ddp2": (),
    "zero1": ("optimizer",),
    "zero2": ("optimizer", "gradients"),
    "zero3": ("optimizer", "gradients", "trainable"),
    "fsdp2": ("optimizer", "gradients", "trainable"),
}
"""What each strategy must split over two ranks."""


@pytest.fixture(scope="module")
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def config(mode: str, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(f"equivalence-{mode}")
    train = ragged_rows(folder / "train.jsonl", 21, weights=WEIGHTS[mode])
    held_out = ragged_rows(folder / "val.jsonl", 7, seed=1)
    path, lora = folder / "same.yaml", "" if mode == "full" else ", lora: {r: 4, alpha: 8}"
    path.write_text(
        f"model: {{name: {tiny}, max_seq_len: 256}}\ntuning: {{mode: {mode}{lora}}}\ndata:"
        f" {{train_path: {train}, val_path: {held_out}}}\ntrain: {{global_batch_size: 8, max_steps: {STEPS},"
        " learning_rate: 5.0e-3, save_strategy: 'no', warmup_steps: 1, packing: 'off'}\n",
        encoding="utf-8",
    )
    return path


@pytest.fixture(scope="module")
def baseline(mode: str, config: Path, cache: Path, session_runs: Path) -> Path:
    run = session_runs / f"{mode}-baseline"
    if not run.exists():  # pytest goes to and fro between the modes
        words = ["train", f"CONFIG={config}", f"RUN_NAME={run.name}", "TRAIN_BATCH_SIZE=8"]
        must_run(words, environment(cache, session_runs))
    return run


@pytest.mark.parametrize(
    ("mode", "way"),
    [pytest.param(*pair, marks=() if pair in SHORT else pytest.mark.long) for pair in PAIRS],
    indirect=["mode"],
    scope="module",
)
def test_every_split_and_strategy_gives_the_same_updates(
    way: str, mode: str, config: Path, baseline: Path, cache: Path, session_runs: Path
) -> None:
    command, words = WAYS[way]
    run = session_runs / f"{mode}-{way}"
    must_run([command, f"CONFIG={config}", f"RUN_NAME={run.name}", *words], environment(cache, session_runs))
    same_curves(run, baseline)
    rows = metrics(run)
    assert len(rows) == STEPS
    for row in rows:  # the ranks' own figures add up to the whole
        tokens = row["rank_tokens"]
        whole = sum(loss * count for loss, count in zip(row["rank_loss"], tokens, strict=True)) / sum(tokens)
        assert mode == "full" or whole == pytest.approx(row["loss"], abs=1e-5)
    plan = json.loads((run / "plan.json").read_text())
    assert plan["global_batch_size"] == 8 and len(rows[0]["rank_tokens"]) == plan["world_size"]
    assert (plan["pack_tokens"] == 256) == way.startswith("packed")
    check_holdings(run, baseline, way)


def check_holdings(run: Path, baseline: Path, way: str) -> None:
    """Assert that shards sum to the whole, none exceeds 0.6, and ranks trained and scored disjoint rows."""
    (whole,), ranks = holdings(RunFolder(baseline)), holdings(RunFolder(run))
    for part in ("rows_trained", "rows_scored"):
        assert sorted(row for rank in ranks for row in rank[part]) == whole[part]
    assert sorted(whole["rows_scored"]) == list(range(7))
    for part in SHARDS.get(way, ()):
        counts = [rank["parameters"][part] if part == "trainable" else rank[part] for rank in ranks]
        total = whole["parameters"][part] if part == "trainable" else whole[part]
        assert total <= sum(counts) <= total * 1.01 + 64, (part, counts, total)  # shards are padded to equal sizes
        assert max(counts) <= 0.6 * total, (part, counts, total)
    for rank, planned in zip(ranks, json.loads((run / "plan.json").read_text())["ranks"], strict=True):
        parts, measured = planned["memory_bytes"], rank["bytes"]
        states = sum(parts.get(name, 0) for name in ("frozen", "trained", "adapters", "gradients", "optimizer"))
        # ZeRO-1 holds whole gradients until they are reduced: as many as weights train. At the update only this rank's
        # share is left.
        gradients = 4 * (rank["parameters"]["trainable"] if way == "zero1" else rank["gradients"])
        needed = measured["weights"] + measured["optimizer"] + gradients
        assert needed == pytest.approx(states, rel=0.02), (measured, parts)
    if way == "fsdp2":  # no rank holds the whole gradient from one micro-step to the next
        assert all(rank["gradients_between"] == rank["gradients"] for rank in ranks)
    if way == "ddp2":
        assert all(rank["optimizer"] == whole["optimizer"] for rank in ranks)
