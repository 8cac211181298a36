"""`launch.strategy: pipeline`: ranks with other layers each compute what one process does (contract B16)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import environment, metrics, ragged_rows, run_program
from tests.distributed.test_sequence_parallel import STEPS, held_as_planned, same, train, weights
from tests.distributed.test_tensor_parallel import SAVED, answers
from tests.tiny_models import build_tiny_llama

PP = ("LAUNCH_STRATEGY=pipeline",)
WAYS = {
    "packed": ["NUM_GPUS=2", *PP, "TRAIN_BATCH_SIZE=1", "TRAIN_PACKING=on"],
    "flattened": ["NUM_GPUS=2", *PP, "TRAIN_BATCH_SIZE=3"],
    "checkpointing": ["NUM_GPUS=2", *PP, "TRAIN_BATCH_SIZE=2", "TRAIN_GRADIENT_CHECKPOINTING=true"],
    "three": ["NUM_GPUS=3", *PP, "TRAIN_BATCH_SIZE=2"],
    "ddp2": ["NUM_GPUS=4", *PP, "LAUNCH_STAGES=2", "TRAIN_BATCH_SIZE=1"],
}
SHORT = (("lora", "three"), ("full", "flattened"))
PAIRS = [(mode, way) for mode in ("lora", "full", "qlora") for way in WAYS]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    model = build_tiny_llama(folder / "model", num_hidden_layers=4)
    train, held_out = ragged_rows(folder / "train.jsonl", 21), ragged_rows(folder / "val.jsonl", 7, seed=1)
    path = folder / "stages.yaml"
    path.write_text(
        f"model: {{name: {model}, max_seq_len: 256}}\n"
        "tuning: {lora: {r: 4, alpha: 8}}\n"
        f"data: {{train_path: {train}, val_path: {held_out}}}\n"
        f"train: {{global_batch_size: 8, max_steps: {STEPS}, learning_rate: 5.0e-3, warmup_steps: 1, packing: 'off', save_strategy: 'no', "
        "predict_with_generate: true, generation_max_new_tokens: 4}\n",
        encoding="utf-8",
    )
    return path


@pytest.mark.parametrize(
    ("mode", "way"), [pytest.param(*pair, marks=() if pair in SHORT else pytest.mark.long) for pair in PAIRS]
)
def test_stages_give_the_same_updates_and_weights(mode: str, way: str, config: Path, cache: Path, session_runs: Path) -> None:
    baseline = train(config, session_runs / f"stages-{mode}", cache, "train", [f"TUNING_MODE={mode}", "TRAIN_BATCH_SIZE=8"])
    run = train(config, session_runs / f"stages-{mode}-{way}", cache, "train-distributed", [f"TUNING_MODE={mode}", *WAYS[way]])
    same(run, baseline)
    held_as_planned(run)
    plan = json.loads((run / "plan.json").read_text())
    assert answers(run) == answers(baseline)
    for phase in ("forward", "backward", "communication"):
        assert all(min(row[f"rank_{phase}_seconds"]) > 0 for row in metrics(run)), phase
    assert sum(plan["stages"]) == 4 and len(plan["stages"]) == (3 if way == "three" else 2)
    found, wanted = weights(run), weights(baseline)
    assert found.keys() == wanted.keys()
    assert all((found[name] - wanted[name]).abs().max() <= 1e-5 for name in wanted)


def test_stages_compute_in_bf16_with_adapters_in_fp32(config: Path, cache: Path, session_runs: Path, tmp_path: Path) -> None:
    untied = build_tiny_llama(tmp_path / "untied", num_hidden_layers=4, tie_word_embeddings=False)
    words = [f"MODEL_NAME={untied}", "TRAIN_BF16=true", "MODEL_DTYPE=bfloat16", "TRAIN_BATCH_SIZE=2"]
    baseline = train(config, session_runs / "stages-bf16-whole", cache, "train", words)
    run = train(config, session_runs / "stages-bf16", cache, "train-distributed", [*words, "NUM_GPUS=2", *PP])
    for mine, whole in zip(metrics(run), metrics(baseline), strict=True):
        assert mine["loss"] == pytest.approx(whole["loss"], abs=1e-3)
        assert mine["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-2)


@pytest.mark.parametrize("mode", ["lora", pytest.param("full", marks=pytest.mark.long)])
def test_saved_by_stages_and_resumed_whole_and_the_reverse(mode: str, config: Path, cache: Path, session_runs: Path) -> None:
    words = [f"TUNING_MODE={mode}", "TRAIN_BATCH_SIZE=2", *SAVED]
    whole = train(config, session_runs / f"stages-whole-{mode}", cache, "train", words)
    staged = ["NUM_GPUS=2", *PP]
    for name, command, before, after in (
        ("stages-then-whole", "train-distributed", staged, ["NUM_GPUS=1", "LAUNCH_STRATEGY=auto"]),
        ("stages-then-three", "train-distributed", staged, ["NUM_GPUS=3", *PP]),
        ("whole-then-stages", "train", [], staged),
        ("replicas-then-stages", "train-distributed", ["NUM_GPUS=2"], staged),
    ):
        run = train(config, session_runs / f"{name}-{mode}", cache, command, [*words, *before, "TRAIN_MAX_STEPS=2"])
        done = run_program(["resume", f"RUN={run.name}", *after, f"TRAIN_MAX_STEPS={STEPS}"], environment(cache, session_runs))
        assert done.code == 0, done.err + done.out
        same(run, whole, first=2)
        assert [row["step"] for row in metrics(run)] == list(range(1, STEPS + 1))


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        ("train-distributed", ["NUM_GPUS=5", *PP], "5 stages, but the model has 4 layers"),
        ("train-distributed", ["NUM_GPUS=3", *PP, "LAUNCH_STAGES=2"], "2 stages on 3 processes"),
        ("train-distributed", ["NUM_GPUS=2", *PP, "LAUNCH_TENSOR_PARALLEL=2"], "`launch.tensor_parallel` is 2"),
        (
            "train-distributed",
            ["NUM_GPUS=2", *PP, "LAUNCH_LOCAL_STEPS=4"],
            "`launch.strategy: pipeline` has its own way to exchange",
        ),
        ("train-distributed", ["NUM_GPUS=2", "LAUNCH_STAGES=2"], "LAUNCH_STRATEGY=pipeline"),
        ("train", [*PP], "make train-distributed"),
        ("train-fsdp", ["NUM_GPUS=2", *PP], "make train-distributed"),
        ("train-distributed", ["NUM_GPUS=2", *PP, "SOURCE=probe"], "`SOURCE=probe` measures whole models"),
    ],
)
def test_what_cannot_be_staged_is_refused_before_the_launch(
    command: str, words: list[str], said: str, config: Path, cache: Path, session_runs: Path
) -> None:
    done = run_program([command, f"CONFIG={config}", "RUN_NAME=refused", *words], environment(cache, session_runs))
    assert done.code == 2 and said in done.err and not (session_runs / "refused").exists(), done.err


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["NUM_GPUS=4"], id="data"),
        pytest.param(["NUM_GPUS=4", "LAUNCH_TENSOR_PARALLEL=4"], id="tensor"),
        pytest.param(["NUM_GPUS=4", *PP], id="pipeline"),
        pytest.param(["NUM_GPUS=4", *PP, "LAUNCH_STAGES=2"], id="2 x 2 stages"),
        pytest.param(["NUM_GPUS=4", "LAUNCH_TENSOR_PARALLEL=2"], id="2 x 2 slices"),
        pytest.param(["NUM_GPUS=4", "LAUNCH_TENSOR_PARALLEL=2", "LAUNCH_STRATEGY=fsdp2"], id="2 x 2 shards"),
    ],
)
@pytest.mark.long
def test_a_model_from_scratch_is_the_same_in_every_way(words: list[str], config: Path, cache: Path, session_runs: Path) -> None:
    """By four processes, as guides have it: data, layers in slices, layers one after the other, and two by two."""
    scratch = config.parent / "scratch.yaml"
    shape = "init: random, vocab_size: 1024, hidden_size: 64, attention_heads: 4, layers: 4, tokenizer"
    scratch.write_text(config.read_text().replace("{name:", f"{{{shape}:"))
    whole = train(scratch, session_runs / "scratch", cache, "train", ["TUNING_MODE=full", "TRAIN_BATCH_SIZE=8"])
    name = "scratch-" + "-".join(words).lower().replace("=", "-")
    run = train(scratch, session_runs / name, cache, "train-distributed", ["TUNING_MODE=full", "TRAIN_BATCH_SIZE=1", *words])
    same(run, whole)
    found, wanted = weights(run), weights(whole)
    assert found.keys() == wanted.keys()
    assert all((found[name] - wanted[name]).abs().max() <= 1e-5 for name in wanted)
