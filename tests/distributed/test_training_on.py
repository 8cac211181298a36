"""A second training on the first one's adapter, as a user types it: the same start, files, refusals and merges."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.conftest import ROOT, metrics
from tests.hub import FilesHandler, serve
from tests.places import Place, question_rows
from tests.tiny_models import build_tiny_llama

WAYS = {
    "single": ("train", ["TRAIN_BATCH_SIZE=4"]),
    "ddp": ("train-distributed", ["NUM_GPUS=2"]),
    "zero2": ("train-deepspeed", ["NUM_GPUS=2"]),
    "zero3": ("train-deepspeed", ["NUM_GPUS=2", "LAUNCH_STRATEGY=zero3"]),
    "fsdp2": ("train-fsdp", ["NUM_GPUS=2"]),
    "tensor": ("train-distributed", ["NUM_GPUS=2", "LAUNCH_TENSOR_PARALLEL=2"]),
    "stages": ("train-distributed", ["NUM_GPUS=2", "LAUNCH_STRATEGY=pipeline"]),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(tmp_path_factory.mktemp("training-on"))
    build_tiny_llama(place.folder / "model")
    for name, start, count in (("rows", 0, 24), ("held", 50, 6)):
        (place.folder / f"{name}.jsonl").write_text(question_rows(start, count, longest=6))
    place.config.write_text(
        f"model: {{name: {place.folder}/model, max_seq_len: 128}}\n"
        f"data: {{train_path: {place.folder}/rows.jsonl, val_path: {place.folder}/held.jsonl}}\n"
        "train: {max_steps: 4, global_batch_size: 8, learning_rate: 0.01, predict_with_generate: false}\n"
    )
    place.train("first", "TUNING_LORA_R=4")
    return place


def losses(run: Path) -> list[float]:
    return [row["eval_loss"] for row in metrics(run, "eval")]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def foreign(place: Place, folder: Path, **settings: Any) -> Path:
    """Write an adapter that is not the zero function by PEFT's own `save_pretrained`."""
    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_pretrained(place.folder / "model", dtype=torch.float32)
    adapted: Any = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **settings))
    for name, tensor in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(tensor, std=0.02)
    adapted.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def second(place: Place) -> Path:
    return place.train("second", "MODEL_ADAPTER=first")


def test_its_first_evaluation_is_the_last_of_its_parent(place: Place, second: Path) -> None:
    assert losses(second)[0] == pytest.approx(losses(place.folder / "runs/first")[-1], abs=1e-6)
    assert losses(second)[-1] < losses(second)[0]
    assert place.scores("RUN=first")["loss"] == pytest.approx(losses(second)[0], abs=1e-6)
    stamp = json.loads((second / "model/stamp.json").read_text())
    plan = place.call("plan", f"CONFIG={place.config}", "MODEL_ADAPTER=first").out
    assert "adapters of rank 4" in plan and f"they continue `{place.folder}/runs/first/model`" in plan
    assert stamp["parent"]["name"] == "first" and stamp["parent"]["use"] == "continue" and stamp["lora"]["r"] == 4


def test_rows_that_a_parent_was_trained_on_are_counted(place: Place, second: Path) -> None:
    mixed = place.folder / "mixed.jsonl"
    mixed.write_text(question_rows(20, 2, longest=6) + question_rows(50, 2, longest=6))
    trained = {
        name: place.scores(*words.split(), f"DATA={mixed}")["settings"]["rows_trained"]
        for name, words in {"first": "RUN=first", "second": "RUN=second", "base": "RUN=second CHECKPOINT=base"}.items()
    }
    assert trained == {"first": 2, "second": 2, "base": 0}
    words = (f"CONFIG={place.config}", "MODEL_ADAPTER=first", f"DATA_TRAIN_PATH={place.folder}/held.jsonl")
    done = place.run("data", *words, f"DATA_VAL_PATH={mixed}")
    assert "an earlier run of these weights was trained on: 2" in done.stderr


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=pytest.mark.long if way in ("ddp", "zero2") else []) for way in WAYS if way != "single"],
)
@pytest.mark.broad
def test_it_continues_the_same_under_every_strategy(place: Place, second: Path, way: str) -> None:
    command, words = WAYS[way]
    run = place.train(f"second-{way}", "MODEL_ADAPTER=first", *words, command=command)
    assert losses(run) == pytest.approx(losses(second), abs=2e-5)
    for name, tensor in weights(second / "model").items():
        assert torch.allclose(tensor, weights(run / "model")[name].to(tensor.dtype), atol=2e-5), name


FOREIGN = {
    "rank-pattern": {
        "r": 4,
        "target_modules": ["q_proj", "down_proj"],
        "rank_pattern": {"down_proj": 2},
        "use_rslora": True,
    },
    "expression": {"r": 2, "lora_alpha": 3, "target_modules": r".*layers\.0\.(self_attn|mlp)\.(v|up)_proj"},
}


@pytest.mark.broad
def test_an_adapter_of_the_hub_is_fetched_once(place: Place, second: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {path.name: path.read_bytes() for path in (place.folder / "runs/first/model").iterdir() if path.is_file()}
    cache = str(place.folder / "hub")
    monkeypatch.setattr(place, "environment", place.environment | {"HF_HOME": cache, "HF_HUB_DISABLE_XET": "1"})
    with serve(FilesHandler, kind="models", name="someone/adapter", files=files) as hub:
        online = {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
        monkeypatch.setattr(place, "environment", place.environment | online)
        run = place.train("from-hub", "MODEL_ADAPTER=someone/adapter")
    assert losses(run) == losses(second)
    monkeypatch.setattr(place, "environment", place.environment | {"HF_HUB_OFFLINE": "1"})
    assert losses(place.train("from-cache", "MODEL_ADAPTER=someone/adapter")) == losses(second)
    assert place.scores("RUN=from-cache")["loss"] == pytest.approx(losses(second)[-1], abs=1e-6)
    merged = place.train("from-cache-merged", "MODEL_ADAPTER=someone/adapter", "TUNING_ADAPTER=merge")
    assert losses(merged)[0] == pytest.approx(losses(second)[0], abs=1e-5)
    for run in ("from-cache", "from-cache-merged"):
        assert place.run("merge", f"RUN={run}").returncode == 0
    refused = place.run("train", f"CONFIG={place.config}", "MODEL_ADAPTER=someone/other", "RUN_NAME=other")
    assert refused.returncode == 2 and "`someone/other`" in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.parametrize("way", ["ddp", pytest.param("zero3", marks=pytest.mark.long), "fsdp2"])
@pytest.mark.broad_but("fsdp2")
def test_an_adapter_of_a_quantised_base_continues_the_same_under_every_strategy(place: Place, way: str) -> None:
    quantised = ["TUNING_MODE=qlora", "TUNING_LORA_R=4"]
    first, second = place.folder / "runs/quantised", place.folder / "runs/quantised-on"
    if not second.exists():
        place.train(first.name, *quantised, "TRAIN_BATCH_SIZE=4")
        place.train(second.name, quantised[0], "TRAIN_BATCH_SIZE=4", f"MODEL_ADAPTER={first.name}")
        assert losses(second)[0] == pytest.approx(losses(first)[-1], abs=1e-6)
    command, words = WAYS[way]
    run = place.train(f"quantised-{way}", quantised[0], f"MODEL_ADAPTER={first.name}", *words, command=command)
    assert losses(run) == pytest.approx(losses(second), abs=2e-5)


def test_a_run_of_all_weights_and_a_merged_model_are_bases(place: Place) -> None:
    whole = place.train("whole", "TUNING_MODE=full")
    for name, mode in (("whole-on", "full"), ("whole-adapted", "lora")):
        run = place.train(name, "MODEL_NAME=whole", f"TUNING_MODE={mode}")
        assert losses(run)[-1] < losses(whole)[-1]
        assert place.scores(f"RUN={name}", "CHECKPOINT=base")["loss"] == pytest.approx(losses(whole)[-1], abs=1e-6)
    place.call("merge", "RUN=first")
    whole_base = place.folder / "runs/first/merged"
    merged = place.train("merged-on", f"MODEL_NAME={os.path.relpath(whole_base)}", "TUNING_LORA_R=2")
    settings = json.loads((merged / "model/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(whole_base), "PEFT finds it from any folder"
    base = place.scores(f"RUN={merged.name}", "CHECKPOINT=base")["loss"]
    assert base == pytest.approx(losses(place.folder / "runs/first")[-1], abs=1e-5)


def test_runs_that_were_moved_together_find_their_bases(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    base = place.train("base", "TUNING_MODE=full")
    over = place.train("over", "MODEL_NAME=base", "TUNING_LORA_R=2")
    (place.folder / "disk").mkdir()
    for run in (base, over):
        run.rename(place.folder / "disk" / run.name)
    monkeypatch.setattr(place, "environment", place.environment | {"RUNS_DIR": str(place.folder / "disk")})
    over = place.folder / "disk" / "over"
    assert place.scores("RUN=over")["loss"] == pytest.approx(losses(over)[-1], abs=1e-6)
    place.call("merge", "RUN=over")
    assert (over / "merged" / "model.safetensors").is_file()
    done = place.run("resume", "RUN=over", "TRAIN_MAX_STEPS=6")
    assert done.returncode == 0 and metrics(over, "train")[-1]["step"] == 6, done.stderr
    assert "over/model: step 6 (best eval_loss " in done.stdout
    for words in (["MODEL_ADAPTER=over"], [f"MODEL_ADAPTER={place.folder}/runs/over/model"]):
        done = place.run("train", f"CONFIG={place.config}", f"MODEL_NAME={base}/model", *words, "RUN_NAME=on")
        assert done.returncode == 0 and losses(place.folder / "disk/on")[0] == losses(over)[-1], done.stderr
        shutil.rmtree(place.folder / "disk/on")


@pytest.mark.parametrize("settings", FOREIGN.values(), ids=FOREIGN)
def test_one_step_equals_that_of_peft(place: Place, settings: dict[str, Any], tmp_path: Path) -> None:
    """Compare an adapter with foreign settings to `PeftModel.from_pretrained(..., is_trainable=True)`."""
    folder = foreign(place, tmp_path / "adapter", **settings)
    words = [
        f"MODEL_ADAPTER={folder}",
        "TRAIN_MAX_STEPS=1",
        "TRAIN_OPTIM=sgd",
        "TRAIN_MAX_GRAD_NORM=0",
        "TRAIN_WARMUP_STEPS=0",
    ]
    run = place.train(f"foreign-{tmp_path.name}", *words, "TRAIN_GLOBAL_BATCH_SIZE=24", "TRAIN_BATCH_SIZE=8")
    prepared = json.loads((run / "prepared.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(place.folder / "model", dtype=torch.float32)
    model: Any = PeftModel.from_pretrained(base, folder, is_trainable=True)
    rows = load_rows(prepared["train"]["path"])
    tokens = sum(sum(label != -100 for label in row["labels"][1:]) for row in rows)
    for row in rows:
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(row["labels"][1:]), reduction="sum")
        (loss / tokens).backward()
    moved = weights(run / "model")
    trained = {
        name.replace(".default", ""): weight for name, weight in model.named_parameters() if weight.requires_grad
    }
    assert moved.keys() == trained.keys()
    for name, weight in trained.items():
        assert torch.allclose(moved[name], weight - 0.01 * weight.grad, atol=1e-6), name
        assert weight.grad.abs().max() > 1e-4, name


def load_rows(folder: str) -> list[dict[str, Any]]:
    from sft_play.data.rows import Rows

    rows = Rows(folder, ("input_ids", "labels", "row"))
    return [
        {name: [int(token) for token in rows[i][name]] for name in ("input_ids", "labels")} for i in range(len(rows))
    ]


def test_a_merged_base_answers_like_the_adapter_and_stays_with_its_run(place: Place, second: Path) -> None:
    run = place.train("merged", "MODEL_ADAPTER=first", "TUNING_ADAPTER=merge", "TUNING_LORA_R=2")
    assert losses(run)[0] == pytest.approx(losses(second)[0], abs=1e-5)
    assert next(iter(weights(run / "model").values())).shape[0] == 2
    scores = place.scores("RUN=merged")["loss"]
    assert scores == pytest.approx(losses(run)[-1], abs=1e-6)
    done = place.run("merge", "RUN=merged")
    assert done.returncode == 0, done.stderr
    assert place.scores(f"MODEL={run}/merged", f"DATA={place.folder}/held.jsonl")["loss"] == pytest.approx(
        scores, abs=1e-5
    )
    place.call("push", "RUN=merged", "REPO=me/x").refused(2, "make merge RUN=merged")
    full = place.train("full", "MODEL_NAME=merged", "TUNING_MODE=full", "TRAIN_LEARNING_RATE=1e-4")
    again = place.train(
        "again",
        "MODEL_NAME=full",
        "TUNING_MODE=full",
        "TRAIN_MAX_STEPS=1",
        "TRAIN_LEARNING_RATE=0",
        "TRAIN_EVAL_ON_START=true",
    )
    assert losses(again)[0] == pytest.approx(losses(full)[-1], abs=1e-6)
    halted = shutil.copytree(full, full.parent / "halted", symlinks=True)
    shutil.rmtree(halted / "model")
    words = ("plan", f"CONFIG={place.config}", "MODEL_NAME=halted", "TUNING_MODE=full")
    place.call(*words).refused(2, "was stopped before it had a model", "make merge RUN=halted")
    assert place.run("merge", "RUN=halted").returncode == 0 and place.call(*words).code == 0
    for folder in ("merged", "checkpoints"):
        shutil.rmtree(halted / folder)
    place.call(*words).refused(2, "has neither a model nor a checkpoint yet", "make resume RUN=halted")


def test_a_third_training_is_on_a_base_with_a_merged_adapter(place: Place) -> None:
    parent = place.train("merged-once", "MODEL_ADAPTER=first", "TUNING_ADAPTER=merge")
    words = (f"CONFIG={place.folder}/demo.yaml", "RUN_NAME=third", "MODEL_ADAPTER=merged-once", "MODEL_NAME=")
    done = place.run("train", *words)
    assert done.returncode == 0, done.stderr
    third = place.folder / "runs/third"
    assert losses(third)[0] == pytest.approx(losses(parent)[-1], abs=1e-6) and losses(third)[-1] < losses(third)[0]
    assert place.run("merge", "RUN=third").returncode == 0
    place.call("resume", "RUN=third", "MODEL_ADAPTER=first").refused(2, "`model.adapter` cannot change")


def test_an_adapter_of_a_deeper_model_is_refused(place: Place, tmp_path: Path) -> None:
    deep = build_tiny_llama(tmp_path / "deep", num_hidden_layers=3)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(deep), LoraConfig(task_type="CAUSAL_LM", r=2))
    adapted.save_pretrained(tmp_path / "adapter")
    done = place.run("train", f"CONFIG={place.config}", "RUN_NAME=deep", f"MODEL_ADAPTER={tmp_path}/adapter")
    assert done.returncode == 5 and "of its weights are of modules that the model lacks" in done.stderr


def test_a_run_wins_over_a_folder_of_its_name_without_a_model(place: Place) -> None:
    assert (ROOT / "docs").is_dir(), "in the folder in which the command is typed"
    run = shutil.copytree(place.folder / "runs/first", place.folder / "runs/docs", symlinks=True)
    shutil.rmtree(run / "merged", ignore_errors=True)  # of another test
    place.call("plan", f"CONFIG={place.config}", "MODEL_NAME=docs").refused(2, "has an adapter, not a complete model")
    assert f"{run}/model" in place.call("plan", f"CONFIG={place.config}", "MODEL_ADAPTER=docs").out


def test_another_chat_template_goes_after_plain_text_or_a_merge(place: Place) -> None:
    (place.folder / "text.jsonl").write_text("".join(json.dumps({"text": f"A line {i}."}) + "\n" for i in range(24)))
    text = [f"DATA_{name}={place.folder}/text.jsonl" for name in ("TRAIN_PATH", "VAL_PATH")]
    place.train("plain", "TUNING_TASK=cpt", "DATA_DUPLICATES=keep", *text)
    place.train("talks", "MODEL_ADAPTER=plain", "DATA_CHAT_TEMPLATE=chatml", "TRAIN_MAX_STEPS=1")
    place.train("short", "MODEL_ADAPTER=first", "DATA_SYSTEM=Be short.", "TUNING_ADAPTER=merge", "TRAIN_MAX_STEPS=1")
    for run in ("talks", "short"):
        assert place.scores(f"RUN={run}")["loss"] > 0 and place.run("merge", f"RUN={run}").returncode == 0


def test_the_system_turn_of_a_run_is_that_of_the_next(place: Place) -> None:
    place.train("brief", "DATA_SYSTEM=Be short.", "TRAIN_MAX_STEPS=1")
    run = place.train("briefer", "MODEL_ADAPTER=brief", "TRAIN_MAX_STEPS=1")
    config = json.loads((run / "config.json").read_text())
    assert config["config"]["data"]["system"] == "Be short." and "adapter brief" in json.dumps(config)
    assert place.scores("RUN=briefer")["loss"] > 0


def test_what_peft_cannot_merge_is_one_error(place: Place, tmp_path: Path) -> None:
    folder = foreign(place, tmp_path / "biased", target_modules=["q_proj"], lora_bias=True)
    place.train("biased", f"MODEL_ADAPTER={folder}", "TRAIN_MAX_STEPS=1")
    place.call("merge", "RUN=biased").refused(5, "PEFT cannot merge", "base layer has no bias")


def test_a_checkpoint_of_a_run_is_trained_on(place: Place) -> None:
    parent = place.train("saved", "TRAIN_SAVE_STEPS=2", "TRAIN_EVAL_STRATEGY=steps", "TRAIN_EVAL_STEPS=2")
    run = place.train("from-checkpoint", "MODEL_ADAPTER=saved@step-000002")
    assert losses(run)[0] == pytest.approx(losses(parent)[0], abs=1e-6)
    assert json.loads((run / "stamp.json").read_text())["parent"]["name"] == "saved@step-000002"
    place.call("plan", f"CONFIG={place.config}", "MODEL_ADAPTER=saved@step-000009").refused(
        5, "no checkpoint `step-000009`"
    )


def test_a_second_training_resumes_bit_for_bit(place: Place, second: Path) -> None:
    words = ("MODEL_ADAPTER=first", "TRAIN_SAVE_STEPS=2")
    run = place.train("stopped", *words)
    for gone in (run / "model", run / "checkpoints/step-000004"):
        shutil.rmtree(gone)
    done = place.run("resume", "RUN=stopped")
    assert done.returncode == 0, done.stderr
    for name, tensor in weights(second / "model").items():
        assert torch.equal(tensor, weights(run / "model")[name]), name


def test_mismatched_adapters_are_refused_before_anything_starts(place: Place, second: Path, tmp_path: Path) -> None:
    def refused(code: int, *parts: str, words: list[str]) -> None:
        place.call("train", f"CONFIG={place.config}", "RUN_NAME=none", *words).refused(code, *parts)
        assert not (place.folder / "runs/none").exists()

    def copy(name: str) -> Path:
        return Path(shutil.copytree(place.folder / "runs/first/model", tmp_path / name))

    refused(2, "`tuning.lora.r` is `8`", "has `4`", "merge", words=["MODEL_ADAPTER=first", "TUNING_LORA_R=8"])
    refused(2, "`tuning.mode` is `full`", "train on", words=["MODEL_ADAPTER=first", "TUNING_MODE=full"])
    refused(2, "neither a run nor a folder", "did you mean the run `first`?", words=["MODEL_ADAPTER=frist"])
    refused(2, "has an adapter", "MODEL_ADAPTER=second", words=["MODEL_NAME=second"])
    refused(2, "a complete model", words=[f"MODEL_ADAPTER={place.folder}/model"])
    refused(
        2, "`tuning.lora.embeddings` is `all`", "`none`", words=["MODEL_ADAPTER=first", "TUNING_LORA_EMBEDDINGS=all"]
    )
    saved = "TUNING_LORA_MODULES_TO_SAVE=[embed_tokens]"
    refused(2, "`tuning.lora.modules_to_save`", "`none`", words=["MODEL_ADAPTER=first", saved])
    refused(2, "`first` trains none", "merge", words=["MODEL_ADAPTER=first", "DATA_NEW_TOKENS=[<tool>]"])
    other_chat = ["MODEL_ADAPTER=first", "DATA_SYSTEM=Be short."]
    refused(5, "`data.system` is not that of the adapter's run", "TUNING_ADAPTER=merge", words=other_chat)
    place.call("plan", f"CONFIG={place.config}", *other_chat).refused(5, "`data.system` is not that")
    config, moved = place.folder / "unnamed.yaml", foreign(place, tmp_path / "moved", target_modules=["q_proj"])
    config.write_text(place.config.read_text().replace(f"name: {place.folder}/model, ", ""))
    for base, message in (("/elsewhere/model", "no such folder"), (None, "names no base")):
        settings = json.loads((moved / "adapter_config.json").read_text())
        (moved / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": base}))
        place.call("plan", f"CONFIG={config}", f"MODEL_ADAPTER={moved}").refused(5, message, "MODEL_NAME=")
    rows = foreign(place, tmp_path / "rows", target_modules=["q_proj"], trainable_token_indices=[5])
    staged = ["LAUNCH_STRATEGY=pipeline", "NUM_GPUS=2"]
    for words in ([f"MODEL_ADAPTER={rows}"], ["TUNING_LORA_EMBEDDINGS=all"], [saved], ["TUNING_LORA_INIT=pissa"]):
        place.call("plan", f"CONFIG={place.config}", *words, *staged).refused(2, "`pipeline`")
    missing, pickled = copy("missing"), copy("pickled")
    (missing / "adapter_model.safetensors").unlink()
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    refused(2, "lacks `adapter_model.safetensors`", words=[f"MODEL_ADAPTER={missing}"])
    refused(2, "`adapter_model.bin` is not read, only safetensors", words=[f"MODEL_ADAPTER={pickled}"])
    int8 = ["TUNING_MODE=qlora", "TUNING_QUANTIZATION=int8", "TUNING_LORA_VARIANT=dora"]
    refused(2, "over int8 trains on a GPU only", words=int8)
    other = build_tiny_llama(tmp_path / "other", seed=5)
    refused(5, "was trained over", words=["MODEL_ADAPTER=first", f"MODEL_NAME={other}"])


SHAPED = {
    "dora": ["TUNING_LORA_VARIANT=dora"],
    "pissa": ["TUNING_LORA_INIT=pissa"],
    "embedding": ["TUNING_LORA_MODULES_TO_SAVE=[embed_tokens]"],
    "plus": ["TUNING_LORA_PLUS_RATIO=4"],
}
SPREAD = [("dora", "fsdp2"), ("pissa", "fsdp2"), ("embedding", "zero3"), ("plus", "zero2")]
SPREAD_TOO = [
    ("dora", "zero3"),
    ("dora", "zero2"),
    ("pissa", "zero2"),
    ("embedding", "fsdp2"),
    ("plus", "zero3"),
    ("plus", "fsdp2"),
    ("pissa", "tensor"),
]


@pytest.fixture(scope="module")
def shaped(place: Place) -> dict[str, Path]:
    return {name: place.train(name, *words) for name, words in SHAPED.items()}


@pytest.mark.parametrize(
    ("shape", "way"), [*SPREAD, *(pytest.param(*pair, marks=pytest.mark.long) for pair in SPREAD_TOO)]
)
@pytest.mark.broad
def test_a_shape_trains_the_same_under_every_strategy(
    place: Place, shaped: dict[str, Path], shape: str, way: str
) -> None:
    command, words = WAYS[way]
    run = place.train(f"{shape}-{way}", *SHAPED[shape], *words, command=command)
    assert losses(run) == pytest.approx(losses(shaped[shape]), abs=5e-5)


@pytest.mark.parametrize("shape", SHAPED)
@pytest.mark.broad
def test_a_shape_is_resumed_merged_and_trained_on(place: Place, shaped: dict[str, Path], shape: str) -> None:
    run, name = shaped[shape], f"{shape}-copy"
    scores = place.scores(f"RUN={shape}")["loss"]
    assert scores == pytest.approx(losses(run)[-1], abs=2e-6)
    copy = place.train(name, *SHAPED[shape], "TRAIN_SAVE_STEPS=2")
    for gone in (copy / "model", copy / "checkpoints/step-000004"):
        shutil.rmtree(gone)
    done = place.run("resume", f"RUN={name}")
    assert done.returncode == 0, done.stderr
    assert all(torch.equal(tensor, weights(copy / "model")[name]) for name, tensor in weights(run / "model").items())
    done = place.run("merge", f"RUN={shape}")
    assert done.returncode == 0, done.stderr
    assert losses(place.train(f"{shape}-on", f"MODEL_ADAPTER={shape}", "TRAIN_MAX_STEPS=1"))[0] == pytest.approx(
        scores, abs=2e-6
    )
