"""`launch.sequence_parallel`: ranks with slices of a line compute what one process does (contract B16)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sft_play.files import read_json
from sft_play.plan.plan import Plan
from sft_play.runs.folder import RunFolder
from tests.conftest import environment, metrics, ragged_rows, run_program
from tests.tiny_models import build_tiny_llama

STEPS = 4
TOLERANCE = 1e-5
SP2 = ("LAUNCH_SEQUENCE_PARALLEL=2",)
WAYS = {
    "packed": ("train-distributed", ["NUM_GPUS=2", "TRAIN_BATCH_SIZE=2", "TRAIN_PACKING=on"]),
    "flattened": ("train-distributed", ["NUM_GPUS=2", "TRAIN_BATCH_SIZE=3"]),
    "checkpointing": ("train-distributed", ["NUM_GPUS=2", "TRAIN_BATCH_SIZE=4", "TRAIN_GRADIENT_CHECKPOINTING=true"]),
    "ddp2": ("train-distributed", ["NUM_GPUS=4", "TRAIN_BATCH_SIZE=2"]),
    "fsdp2": ("train-fsdp", ["NUM_GPUS=4", "TRAIN_BATCH_SIZE=2"]),
    "zero2": ("train-deepspeed", ["NUM_GPUS=2", "TRAIN_BATCH_SIZE=4"]),
    "zero3": ("train-deepspeed", ["NUM_GPUS=4", "LAUNCH_STRATEGY=zero3", "TRAIN_BATCH_SIZE=2"]),
    "sp4": ("train-distributed", ["NUM_GPUS=4", "TRAIN_BATCH_SIZE=4", "LAUNCH_SEQUENCE_PARALLEL=4"]),
}
SHORT = (("lora", "packed"),)
PAIRS = [(mode, way) for mode in ("lora", "full") for way in WAYS]


@pytest.fixture(scope="module")
def config(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slices")
    train, held_out = ragged_rows(folder / "train.jsonl", 21), ragged_rows(folder / "val.jsonl", 7, seed=1)
    path = folder / "slices.yaml"
    path.write_text(
        f"model: {{name: {tiny}, max_seq_len: 256}}\n"
        "tuning: {lora: {r: 4, alpha: 8}}\n"
        f"data: {{train_path: {train}, val_path: {held_out}}}\n"
        f"train: {{global_batch_size: 8, max_steps: {STEPS}, learning_rate: 5.0e-3, warmup_steps: 1, packing: 'off', save_strategy: 'no'}}\n",
        encoding="utf-8",
    )
    return path


def held_as_planned(run: Path) -> None:
    """Each rank holds the weights, gradients and states of the optimizer that the plan says, within 2 %."""
    plan, folder = Plan.load(run / "plan.json"), RunFolder(run)
    for rank in plan.ranks:
        held, parts = read_json(folder.rank_holdings(rank.rank)), rank.memory_bytes
        weights = sum(parts.get(name, 0) for name in ("frozen", "adapters", "trained"))
        assert held["bytes"]["weights"] == pytest.approx(weights, rel=0.02), rank
        assert held["bytes"]["optimizer"] == pytest.approx(parts["optimizer"], rel=0.02), rank
        assert 4 * held["gradients"] == pytest.approx(parts["gradients"], rel=0.02), rank


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Returns what a run trained."""
    return {name: tensor for path in (run / "model").glob("*.safetensors") for name, tensor in load_file(path).items()}


def train(config: Path, run: Path, cache: Path, command: str, words: Sequence[str]) -> Path:
    """Trains a run unless that is done."""
    if not run.exists():
        done = run_program([command, f"CONFIG={config}", f"RUN_NAME={run.name}", *words], environment(cache, run.parent))
        assert done.code == 0, done.err + done.out
    return run


def same(found: Path, wanted: Path, first: int = 0) -> None:
    for kind, keys in (("train", ("loss", "grad_norm", "learning_rate")), ("eval", ("eval_loss",))):
        mine, other = ([row for row in metrics(run, kind) if row["step"] > first] for run in (found, wanted))
        for key in keys:
            gaps = [abs(a[key] - b[key]) / max(1.0, abs(b[key])) for a, b in zip(mine, other, strict=True)]
            assert max(gaps) <= TOLERANCE and statistics.fmean(gaps) <= TOLERANCE / 2, (kind, key, gaps)


@pytest.mark.parametrize(
    ("mode", "way"), [pytest.param(*pair, marks=() if pair in SHORT else pytest.mark.long) for pair in PAIRS]
)
def test_slices_give_the_same_updates(mode: str, way: str, config: Path, cache: Path, session_runs: Path) -> None:
    baseline = train(config, session_runs / f"slices-{mode}", cache, "train", [f"TUNING_MODE={mode}", "TRAIN_BATCH_SIZE=8"])
    command, words = WAYS[way]
    run = train(
        config,
        session_runs / f"slices-{mode}-{way}",
        cache,
        command,
        [f"TUNING_MODE={mode}", *(() if way == "sp4" else SP2), *words],
    )
    same(run, baseline)
    plan = json.loads((run / "plan.json").read_text())
    groups = plan["world_size"] // plan["sequence_parallel"]
    assert plan["sequence_parallel"] == (4 if way == "sp4" else 2) and groups * plan["sequence_parallel"] == plan["world_size"]
    found, wanted = weights(run), weights(baseline)
    assert found.keys() == wanted.keys() and all((found[name] - wanted[name]).abs().max() <= 1e-5 for name in wanted)
    for mine, whole in zip(metrics(run), metrics(baseline), strict=True):
        assert sum(mine["rank_tokens"]) == sum(whole["rank_tokens"])
        assert len(mine["rank_tokens"]) == plan["world_size"] and all(mine["rank_rows"])


@pytest.mark.long
def test_a_row_of_32768_tokens_on_four_ranks(tmp_path: Path, cache: Path) -> None:
    model = build_tiny_llama(tmp_path / "model", max_position_embeddings=32768, num_hidden_layers=1)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": "word and more words " * 20_000}) + "\n" for _ in range(1)))
    config = tmp_path / "long.yaml"
    config.write_text(
        f"model: {{name: {model}, max_seq_len: 32768}}\ntuning: {{mode: lora, task: cpt}}\ndata: {{train_path: {rows}, val_path: {rows}}}\n"
        "train: {global_batch_size: 1, max_steps: 2, learning_rate: 1.0e-3, save_strategy: 'no'}\n"
    )
    runs = tmp_path / "runs"
    whole = train(config, runs / "whole", cache, "train", [])
    sliced = train(config, runs / "sliced", cache, "train-distributed", ["NUM_GPUS=4", "LAUNCH_SEQUENCE_PARALLEL=4"])
    same(sliced, whole)
    assert all(max(row["rank_tokens"]) - min(row["rank_tokens"]) <= 1 for row in metrics(sliced))


@pytest.mark.long
def test_saved_in_slices_and_resumed_whole_and_the_reverse(config: Path, cache: Path, session_runs: Path) -> None:
    words = [
        "TRAIN_BATCH_SIZE=2",
        "TRAIN_LR_SCHEDULER_TYPE=constant_with_warmup",
        "TRAIN_SAVE_STRATEGY=steps",
        "TRAIN_SAVE_STEPS=2",
    ]
    whole = train(config, session_runs / "slices-whole", cache, "train", words)
    sliced = ["NUM_GPUS=2", *SP2]
    for name, command, before, after in (
        ("slices-then-whole", "train-distributed", sliced, ["NUM_GPUS=1", "LAUNCH_SEQUENCE_PARALLEL=1"]),
        ("whole-then-slices", "train", [], sliced),
    ):
        run = train(config, session_runs / name, cache, command, [*words, *before, "TRAIN_MAX_STEPS=2"])
        done = run_program(["resume", f"RUN={name}", *after, f"TRAIN_MAX_STEPS={STEPS}"], environment(cache, session_runs))
        assert done.code == 0, done.err + done.out
        same(run, whole, first=2)
        assert [row["step"] for row in metrics(run)] == list(range(1, STEPS + 1))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["NUM_GPUS=3", "LAUNCH_SEQUENCE_PARALLEL=2"], "does not divide 3 processes"),
        (["NUM_GPUS=8", "LAUNCH_SEQUENCE_PARALLEL=8"], "attention heads cannot be shared out evenly"),
        (["NUM_GPUS=2", *SP2, "MODEL_ATTN_IMPLEMENTATION=sdpa"], "sees only a rank's slice"),
        (["NUM_GPUS=2", *SP2, "LAUNCH_LOCAL_STEPS=4"], "`launch.local_steps` is 4"),
        (["NUM_GPUS=2", *SP2, "TUNING_BACKEND=unsloth"], "unsloth has its own attention"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_the_launch(
    words: list[str], said: str, config: Path, cache: Path, session_runs: Path
) -> None:
    done = run_program(["train-distributed", f"CONFIG={config}", "RUN_NAME=refused", *words], environment(cache, session_runs))
    assert done.code == 2 and said in done.err and not (session_runs / "refused").exists(), done.err
