"""`launch.tensor_parallel`: ranks with slices of the layers compute what one process does (contract B16)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import environment, metrics, ragged_rows, run_program
from tests.distributed.test_sequence_parallel import STEPS, held_as_planned, same, train, weights

TP2 = ("LAUNCH_TENSOR_PARALLEL=2",)
WAYS = {
    "packed": ["NUM_GPUS=2", *TP2, "TRAIN_BATCH_SIZE=2", "TRAIN_PACKING=on"],
    "flattened": ["NUM_GPUS=2", *TP2, "TRAIN_BATCH_SIZE=3"],
    "checkpointing": ["NUM_GPUS=2", *TP2, "TRAIN_BATCH_SIZE=4", "TRAIN_GRADIENT_CHECKPOINTING=true"],
    "ddp2": ["NUM_GPUS=4", *TP2, "TRAIN_BATCH_SIZE=2"],
    "fsdp2": ["NUM_GPUS=4", *TP2, "LAUNCH_STRATEGY=fsdp2", "TRAIN_BATCH_SIZE=2"],
}
SHORT = (("lora", "packed"), ("full", "fsdp2"))
PAIRS = [(mode, way) for mode in ("lora", "full") for way in WAYS]
SAVED = ["TRAIN_SAVE_STRATEGY=steps", "TRAIN_SAVE_STEPS=2", "TRAIN_LR_SCHEDULER_TYPE=constant_with_warmup"]


@pytest.fixture(scope="module")
def config(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layers")
    train, held_out = ragged_rows(folder / "train.jsonl", 21), ragged_rows(folder / "val.jsonl", 7, seed=1)
    path = folder / "layers.yaml"
    path.write_text(
        f"model: {{name: {tiny}, max_seq_len: 256}}\n"
        "tuning: {lora: {r: 4, alpha: 8}}\n"
        f"data: {{train_path: {train}, val_path: {held_out}}}\n"
        f"train: {{global_batch_size: 8, max_steps: {STEPS}, learning_rate: 5.0e-3, warmup_steps: 1, packing: 'off', save_strategy: 'no', "
        "predict_with_generate: true, generation_max_new_tokens: 4}\n",
        encoding="utf-8",
    )
    return path


def answers(run: Path) -> list[str]:
    """Returns what the model answered at the end of training."""
    path = run / "eval" / f"step-{STEPS:06}" / "predictions.jsonl"
    return [json.loads(line)["answer"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("mode", "way"), [pytest.param(*pair, marks=() if pair in SHORT else pytest.mark.long) for pair in PAIRS]
)
def test_slices_of_layers_give_the_same_updates_and_weights(
    mode: str, way: str, config: Path, cache: Path, session_runs: Path
) -> None:
    baseline = train(config, session_runs / f"layers-{mode}", cache, "train", [f"TUNING_MODE={mode}", "TRAIN_BATCH_SIZE=8"])
    run = train(config, session_runs / f"layers-{mode}-{way}", cache, "train-distributed", [f"TUNING_MODE={mode}", *WAYS[way]])
    same(run, baseline)
    held_as_planned(run)
    plan = json.loads((run / "plan.json").read_text())
    assert plan["tensor_parallel"] == 2 and plan["world_size"] == (4 if way in ("ddp2", "fsdp2") else 2)
    for mine, whole in zip(metrics(run), metrics(baseline), strict=True):
        assert sum(mine["rank_tokens"]) == 2 * sum(whole["rank_tokens"])
    assert answers(run) == answers(baseline)
    found, wanted = weights(run), weights(baseline)
    assert found.keys() == wanted.keys()
    assert all((found[name] - wanted[name]).abs().max() <= 1e-5 for name in wanted)


@pytest.mark.parametrize("mode", ["lora", pytest.param("full", marks=pytest.mark.long)])
def test_saved_in_slices_and_resumed_whole_and_the_reverse(mode: str, config: Path, cache: Path, session_runs: Path) -> None:
    words = [f"TUNING_MODE={mode}", "TRAIN_BATCH_SIZE=2", *SAVED]
    whole = train(config, session_runs / f"layers-whole-{mode}", cache, "train", words)
    sliced = ["NUM_GPUS=2", *TP2]
    shards = ["NUM_GPUS=4", *TP2, "LAUNCH_STRATEGY=fsdp2"]
    for name, command, before, after in (
        ("layers-then-whole", "train-distributed", sliced, ["NUM_GPUS=1", "LAUNCH_TENSOR_PARALLEL=1"]),
        ("whole-then-layers", "train", [], sliced),
        ("shards-then-layers", "train-distributed", shards, [*sliced, "LAUNCH_STRATEGY=auto"]),
        ("whole-then-shards", "train", [], shards),
        ("replicas-then-layers", "train-distributed", ["NUM_GPUS=2"], sliced),
    ):
        run = train(config, session_runs / f"{name}-{mode}", cache, command, [*words, *before, "TRAIN_MAX_STEPS=2"])
        done = run_program(["resume", f"RUN={run.name}", *after, f"TRAIN_MAX_STEPS={STEPS}"], environment(cache, session_runs))
        assert done.code == 0, done.err + done.out
        same(run, whole, first=2)
        assert [row["step"] for row in metrics(run)] == list(range(1, STEPS + 1))


@pytest.mark.long
def test_noise_is_the_same_on_all_ranks_after_a_resume(config: Path, cache: Path, session_runs: Path) -> None:
    """NEFTune draws for all tokens; ranks with other noise would train other inputs."""
    noisy = config.parent / "noisy.yaml"
    noisy.write_text(config.read_text().replace("train: {", "train: {neftune_noise_alpha: 5, "))
    words = ["TRAIN_BATCH_SIZE=8", *SAVED]
    whole = train(noisy, session_runs / "noisy-whole", cache, "train", words)
    run = train(noisy, session_runs / "noisy", cache, "train", [*words, "TRAIN_MAX_STEPS=2"])
    sliced = ["NUM_GPUS=2", *TP2]
    done = run_program(["resume", "RUN=noisy", *sliced, f"TRAIN_MAX_STEPS={STEPS}"], environment(cache, session_runs))
    assert done.code == 0, done.err + done.out
    same(run, whole, first=2)


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        ("train-distributed", ["NUM_GPUS=3", *TP2], "does not divide 3 processes"),
        ("train-distributed", ["NUM_GPUS=8", "LAUNCH_TENSOR_PARALLEL=8"], "attention heads with"),
        ("train-distributed", ["NUM_GPUS=2", *TP2, "TUNING_MODE=qlora"], "cannot be sliced"),
        ("train-distributed", ["NUM_GPUS=2", *TP2, "LAUNCH_SEQUENCE_PARALLEL=2"], "`launch.sequence_parallel` is 2"),
        ("train-distributed", ["NUM_GPUS=2", *TP2, "LAUNCH_LOCAL_STEPS=4"], "`launch.local_steps` is 4"),
        ("train-deepspeed", ["NUM_GPUS=2", *TP2], "zero2 shares out the weights itself"),
        ("train-fsdp", ["NUM_GPUS=6", *TP2], "cannot be divided so"),
    ],
)
def test_what_cannot_be_sliced_is_refused_before_the_launch(
    command: str, words: list[str], said: str, config: Path, cache: Path, session_runs: Path
) -> None:
    done = run_program([command, f"CONFIG={config}", "RUN_NAME=refused", *words], environment(cache, session_runs))
    assert done.code == 2 and said in done.err and not (session_runs / "refused").exists(), done.err
