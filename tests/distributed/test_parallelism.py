"""Sequence parallelism, tensor parallelism and pipelines compute what one process does (contract B16)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from sft_play.files import read_json
from sft_play.plan.hardware import fast_bf16
from sft_play.plan.plan import Plan
from sft_play.runs.folder import RunFolder
from tests.conftest import call_program, environment, metrics, must_run, ragged_rows
from tests.tiny_models import build_tiny_llama
from tests.training_runs import same_curves, weights

pytestmark = pytest.mark.broad

STEPS = 4
SP2, TP2, PP = "LAUNCH_SEQUENCE_PARALLEL=2", "LAUNCH_TENSOR_PARALLEL=2", "LAUNCH_STRATEGY=pipeline"
PACKED, CHECKPOINTS = "TRAIN_PACKING=on", "TRAIN_ACTIVATION_OFFLOAD=on"
"""The second recomputes, and moves inputs."""
WAYS = {
    "sp-packed": ["NUM_GPUS=2", SP2, "TRAIN_BATCH_SIZE=2", PACKED],
    "sp-checkpointing": ["NUM_GPUS=2", SP2, "TRAIN_BATCH_SIZE=4", CHECKPOINTS],
    "sp-ddp2": ["NUM_GPUS=4", SP2, "TRAIN_BATCH_SIZE=2"],
    "sp-fsdp2": ["NUM_GPUS=4", SP2, "TRAIN_BATCH_SIZE=2", "LAUNCH_STRATEGY=fsdp2"],
    "sp-zero3": ["NUM_GPUS=4", SP2, "TRAIN_BATCH_SIZE=2", "LAUNCH_STRATEGY=zero3"],
    "sp-four": ["NUM_GPUS=4", "LAUNCH_SEQUENCE_PARALLEL=4", "TRAIN_BATCH_SIZE=4"],
    "tp-packed": ["NUM_GPUS=2", TP2, "TRAIN_BATCH_SIZE=2", PACKED],
    "tp-checkpointing": ["NUM_GPUS=2", TP2, "TRAIN_BATCH_SIZE=4", CHECKPOINTS],
    "tp-ddp2": ["NUM_GPUS=4", TP2, "TRAIN_BATCH_SIZE=2"],
    "tp-fsdp2": ["NUM_GPUS=4", TP2, "TRAIN_BATCH_SIZE=2", "LAUNCH_STRATEGY=fsdp2"],
    "pp-packed": ["NUM_GPUS=2", PP, "TRAIN_BATCH_SIZE=1", PACKED],
    "pp-flattened": ["NUM_GPUS=2", PP, "TRAIN_BATCH_SIZE=3"],
    "pp-checkpointing": ["NUM_GPUS=2", PP, "TRAIN_BATCH_SIZE=2", CHECKPOINTS],
    "pp-three": ["NUM_GPUS=3", PP, "TRAIN_BATCH_SIZE=2"],
    "pp-ddp2": ["NUM_GPUS=4", PP, "LAUNCH_STAGES=2", "TRAIN_BATCH_SIZE=1"],
}
SHORT = (
    ("lora", "sp-packed"),
    ("lora", "tp-packed"),
    ("full", "tp-fsdp2"),
    ("lora", "pp-three"),
    ("full", "pp-flattened"),
)
PAIRS = [(mode, way) for mode in ("lora", "full") for way in WAYS] + [("qlora", "pp-packed")]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    model = build_tiny_llama(folder / "model", num_hidden_layers=4)
    train = ragged_rows(folder / "train.jsonl", 21, weights=(0.3, 1, 0.05, 0.7))
    held_out = ragged_rows(folder / "val.jsonl", 7, seed=1)
    path = folder / "parts.yaml"
    path.write_text(
        f"model: {{name: {model}, max_seq_len: 256}}\ntuning: {{lora: {{r: 4, alpha: 8}}}}\ndata: {{train_path:"
        f" {train}, val_path: {held_out}}}\ntrain: {{global_batch_size: 8, max_steps: {STEPS}, learning_rate: 5.0e-3,"
        " warmup_steps: 1, packing: 'off', save_strategy: 'no', predict_with_generate: true,"
        " generation_max_new_tokens: 4}\n",
        encoding="utf-8",
    )
    return path


def train(config: Path, run: Path, cache: Path, words: Sequence[str]) -> Path:
    """Train a run unless it exists: in one process, or by `make train-distributed` with `NUM_GPUS`."""
    command = "train-distributed" if any(word.startswith("NUM_GPUS") for word in words) else "train"
    if not run.exists():
        must_run([command, f"CONFIG={config}", f"RUN_NAME={run.name}", *words], environment(cache, run.parent))
    return run


def same_weights(result: Path, expected: Path) -> None:
    mine, other = weights(RunFolder(result)), weights(RunFolder(expected))
    assert mine.keys() == other.keys() and all(
        torch.allclose(mine[name], other[name], rtol=0, atol=1e-5) for name in other
    )


def held_as_planned(run: Path) -> None:
    """Assert that each rank holds the planned weights, gradients and optimizer states within 2 %."""
    plan, folder = Plan.load(run / "plan.json"), RunFolder(run)
    for rank in plan.ranks:
        measured, parts = read_json(folder.rank_holdings(rank.rank)), rank.memory_bytes
        weights = sum(parts.get(name, 0) for name in ("frozen", "adapters", "trained"))
        assert measured["bytes"]["weights"] == pytest.approx(weights, rel=0.02), rank
        assert measured["bytes"]["optimizer"] == pytest.approx(parts["optimizer"], rel=0.02), rank
        assert 4 * measured["gradients"] == pytest.approx(parts["gradients"], rel=0.02), rank


def answers(run: Path) -> list[str]:
    """Return what the model answered at the end of training."""
    path = run / "eval" / f"step-{STEPS:06}" / "predictions.jsonl"
    return [json.loads(line)["answer"] for line in path.read_text().splitlines()]


@pytest.mark.long
def test_muon_in_a_pipeline_agrees_to_its_rounding(config: Path, cache: Path, session_runs: Path) -> None:
    words = ["TUNING_MODE=full", "TRAIN_OPTIM=muon", "TRAIN_PREDICT_WITH_GENERATE=false"]
    alone = train(config, session_runs / "parts-muon", cache, words)
    staged = train(config, session_runs / "parts-muon-staged", cache, [*words, *WAYS["pp-flattened"]])
    losses, expected = ([row["loss"] for row in metrics(run)] for run in (staged, alone))
    assert losses == pytest.approx(expected, abs=1e-4) and losses[-1] < losses[0]
    held_as_planned(staged)


@pytest.mark.parametrize(
    ("mode", "way"), [pytest.param(*pair, marks=() if pair in SHORT else pytest.mark.long) for pair in PAIRS]
)
def test_every_split_gives_the_same_updates_weights_and_answers(
    mode: str, way: str, config: Path, cache: Path, session_runs: Path
) -> None:
    baseline = train(config, session_runs / f"parts-{mode}", cache, [f"TUNING_MODE={mode}", "TRAIN_BATCH_SIZE=8"])
    run = train(config, session_runs / f"parts-{mode}-{way}", cache, [f"TUNING_MODE={mode}", *WAYS[way]])
    same_curves(run, baseline)
    same_weights(run, baseline)
    assert answers(run) == answers(baseline)
    plan = Plan.load(run / "plan.json")
    assert plan.group_size == (4 if way == "sp-four" else 3 if way == "pp-three" else 2)
    if way.startswith("sp"):
        assert plan.sequence_parallel == plan.group_size
        assert all(len(row["rank_tokens"]) == plan.world_size and all(row["rank_rows"]) for row in metrics(run))
    else:
        assert plan.tensor_parallel == plan.group_size or len(plan.stages) == plan.group_size
        held_as_planned(run)
    for mine, whole in zip(metrics(run), metrics(baseline), strict=True):
        assert all(min(mine[f"rank_{phase}_seconds"]) > 0 for phase in ("forward", "backward", "communication"))
        assert sum(mine["rank_tokens"]) == plan.copies * sum(whole["rank_tokens"])


SAVED = [
    "TRAIN_SAVE_STRATEGY=steps",
    "TRAIN_SAVE_STEPS=2",
    "TRAIN_LR_SCHEDULER_TYPE=constant_with_warmup",
    "TRAIN_BATCH_SIZE=2",
]
LINES, LAYERS, STAGES = (["NUM_GPUS=2", word] for word in (SP2, TP2, PP))
SHARDS = ["NUM_GPUS=4", TP2, "LAUNCH_STRATEGY=fsdp2"]
SPLITS = {
    "lines-then-whole": (LINES, ["NUM_GPUS=1", "LAUNCH_SEQUENCE_PARALLEL=1"]),
    "whole-then-lines": ([], LINES),
    "layers-then-whole": (LAYERS, ["NUM_GPUS=1", "LAUNCH_TENSOR_PARALLEL=1"]),
    "replicas-then-layers": (["NUM_GPUS=2"], LAYERS),
    "shards-then-layers": (SHARDS, [*LAYERS, "LAUNCH_STRATEGY=auto"]),
    "whole-then-shards": ([], SHARDS),
    "stages-then-whole": (STAGES, ["NUM_GPUS=1", "LAUNCH_STRATEGY=auto"]),
    "stages-then-three": (STAGES, ["NUM_GPUS=3", PP]),
    "replicas-then-stages": (["NUM_GPUS=2"], STAGES),
}
"""How a run is trained until step 2, and after it."""
DEFAULT = ("layers-then-whole", "shards-then-layers", "stages-then-three", "replicas-then-stages")


@pytest.mark.parametrize(
    "split", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.long) for name in SPLITS]
)
@pytest.mark.parametrize("mode", ["lora", pytest.param("full", marks=pytest.mark.long)])
def test_a_run_saved_under_one_split_resumes_under_another(
    split: str, mode: str, config: Path, cache: Path, session_runs: Path
) -> None:
    before, after = SPLITS[split]
    words = [f"TUNING_MODE={mode}", *SAVED]
    whole = train(config, session_runs / f"split-whole-{mode}", cache, words)
    run = train(config, session_runs / f"{split}-{mode}", cache, [*words, *before, "TRAIN_MAX_STEPS=2"])
    must_run(["resume", f"RUN={run.name}", *after, f"TRAIN_MAX_STEPS={STEPS}"], environment(cache, session_runs))
    same_curves(run, whole, first=2)
    assert [row["step"] for row in metrics(run)] == list(range(1, STEPS + 1))


@pytest.mark.long
def test_noise_is_the_same_on_all_ranks_after_a_resume(config: Path, cache: Path, session_runs: Path) -> None:
    """NEFTune draws for all tokens; ranks with other noise would train other inputs."""
    noisy = config.parent / "noisy.yaml"
    noisy.write_text(config.read_text().replace("train: {", "train: {neftune_noise_alpha: 5, "))
    whole = train(noisy, session_runs / "noisy-whole", cache, SAVED)
    train(noisy, session_runs / "noisy", cache, [*SAVED, "TRAIN_MAX_STEPS=2"])
    must_run(["resume", "RUN=noisy", *LAYERS, f"TRAIN_MAX_STEPS={STEPS}"], environment(cache, session_runs))
    same_curves(session_runs / "noisy", whole, first=2)


@pytest.mark.long
def test_a_row_of_32768_tokens_on_four_ranks(tmp_path: Path, cache: Path) -> None:
    model = build_tiny_llama(tmp_path / "model", max_position_embeddings=32768, num_hidden_layers=1)
    rows, config = tmp_path / "rows.jsonl", tmp_path / "long.yaml"
    rows.write_text(json.dumps({"text": "word and more words " * 20_000}) + "\n")
    config.write_text(
        f"model: {{name: {model}, max_seq_len: 32768}}\ntuning: {{mode: lora, task: cpt}}\ndata: {{train_path: {rows},"
        f" val_path: {rows}}}\ntrain: {{global_batch_size: 1, max_steps: 2, learning_rate: 1.0e-3, save_strategy:"
        " 'no'}\n"
    )
    whole = train(config, tmp_path / "runs" / "whole", cache, [])
    sliced = train(config, tmp_path / "runs" / "sliced", cache, ["NUM_GPUS=4", "LAUNCH_SEQUENCE_PARALLEL=4"])
    same_curves(sliced, whole)
    # a line is padded to equal slices
    assert all(max(row["rank_tokens"]) - min(row["rank_tokens"]) <= 4 for row in metrics(sliced))


@pytest.mark.skipif(not fast_bf16(), reason="this CPU has no bfloat16 instructions")
def test_stages_compute_in_bf16_with_adapters_in_fp32(
    config: Path, cache: Path, session_runs: Path, tmp_path: Path
) -> None:
    untied = build_tiny_llama(tmp_path / "untied", num_hidden_layers=4, tie_word_embeddings=False)
    words = [f"MODEL_NAME={untied}", "TRAIN_BF16=true", "MODEL_DTYPE=bfloat16", "TRAIN_BATCH_SIZE=2"]
    baseline = train(config, session_runs / "stages-bf16-whole", cache, words)
    run = train(config, session_runs / "stages-bf16", cache, [*words, *STAGES])
    for mine, whole in zip(metrics(run), metrics(baseline), strict=True):
        assert mine["loss"] == pytest.approx(whole["loss"], abs=1e-3)
        assert mine["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-2)


@pytest.mark.long
@pytest.mark.parametrize(
    "words", [[], ["LAUNCH_TENSOR_PARALLEL=4"], [PP], [PP, "LAUNCH_STAGES=2"], [TP2], [TP2, "LAUNCH_STRATEGY=fsdp2"]]
)
def test_a_model_from_scratch_is_the_same_in_every_way(
    words: list[str], config: Path, cache: Path, session_runs: Path
) -> None:
    """Four processes, as in guides: data parallel, tensor parallel, pipeline, and two by two."""
    scratch = config.parent / "scratch.yaml"
    shape = "init: random, vocab_size: 1024, hidden_size: 64, attention_heads: 4, layers: 4, tokenizer"
    scratch.write_text(config.read_text().replace("{name:", f"{{{shape}:"))
    whole = train(scratch, session_runs / "scratch", cache, ["TUNING_MODE=full", "TRAIN_BATCH_SIZE=8"])
    name = "-".join(["scratch", *words]).lower().replace("=", "-")
    run = train(scratch, session_runs / name, cache, ["TUNING_MODE=full", "TRAIN_BATCH_SIZE=1", "NUM_GPUS=4", *words])
    same_curves(run, whole)
    same_weights(run, whole)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["NUM_GPUS=2", SP2, "MODEL_ATTN_IMPLEMENTATION=sdpa"], "sees only a rank's slice"),
        (["NUM_GPUS=8", "LAUNCH_TENSOR_PARALLEL=8"], "attention heads with"),
        (["NUM_GPUS=2", TP2, "TUNING_MODE=qlora"], "cannot be sliced"),
        (["NUM_GPUS=2", TP2, SP2], "`launch.sequence_parallel` is 2"),
        (["NUM_GPUS=2", TP2, "LAUNCH_LOCAL_STEPS=4"], "`launch.local_steps` is 4"),
        (["NUM_GPUS=2", TP2, "LAUNCH_STRATEGY=zero2"], "ZeRO shares out the weights itself"),
        (["NUM_GPUS=5", PP], "5 stages, but the model has 4 layers"),
        (["NUM_GPUS=3", PP, "LAUNCH_STAGES=2"], "2 stages on 3 processes"),
        (["NUM_GPUS=2", "LAUNCH_STAGES=2"], "LAUNCH_STRATEGY=pipeline"),
        ([PP], "make train-distributed"),
        (["NUM_GPUS=2", PP, "SOURCE=probe"], "`SOURCE=probe` measures complete models"),
    ],
)
def test_conflicting_options_are_refused_before_the_launch(
    words: list[str], message: str, config: Path, cache: Path, session_runs: Path
) -> None:
    command = "train-distributed" if words[0].startswith("NUM_GPUS") else "train"
    done = call_program([command, f"CONFIG={config}", "RUN_NAME=refused", *words], environment(cache, session_runs))
    assert done.code == 2 and message in done.err and not (session_runs / "refused").exists(), done.err
