"""`data.new_tokens` as a user types it: their first rows, training, files read again, merges, refusals."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import metrics
from tests.places import Place
from tests.tiny_models import build_tiny_llama

pytestmark = pytest.mark.broad


@pytest.fixture(scope="module", params=["tied", "untied"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(tmp_path_factory.mktemp("tokens"))
    build_tiny_llama(place.folder / "model", tie_word_embeddings=request.param == "tied")
    rows = [{"prompt": f"What is {i}?", "completion": f"<tool>number {i}</tool>"} for i in range(24)]
    (place.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    place.config.write_text(
        f"model: {{name: {place.folder}/model, max_seq_len: 128}}\n"
        f"data: {{train_path: {place.folder}/rows.jsonl, val_path: {place.folder}/rows.jsonl, "
        f"new_tokens: [<tool>, </tool>, <never>]}}\n"
        "train: {max_steps: 4, global_batch_size: 8, learning_rate: 0.01, predict_with_generate: false}\n"
    )
    return place


def read(folder: str | Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    "words",
    [[], ["TUNING_LORA_EMBEDDINGS=all"], ["TUNING_MODE=full", "TRAIN_LEARNING_RATE=1e-3"]],
    ids=["new", "all", "full"],
)
def test_new_rows_start_at_the_mean_and_are_trained_saved_and_merged(
    place: Place, words: list[str], tmp_path: Path
) -> None:
    done = place.run("train", f"CONFIG={place.config}", "RUN_NAME=run", *words)
    run = place.folder / "runs/run"
    assert done.returncode == 0, done.stderr
    assert "new token `<tool>`: 24 uses" in done.stderr and "`<never>` is in no training row" in done.stderr
    base, old = read(json.loads((run / "prepared.json").read_text())["model"]["path"]), read(place.folder / "model")
    tokenizer, before = (
        AutoTokenizer.from_pretrained(run / "model"),
        AutoTokenizer.from_pretrained(place.folder / "model"),
    )
    table, former = base.get_input_embeddings().weight, old.get_input_embeddings().weight
    assert table.shape[0] == 1152 and former.shape[0] == 1024, "a vocabulary padded to 128 stays so"
    [number] = tokenizer("<tool>", add_special_tokens=False)["input_ids"]
    assert torch.allclose(table[number], former[before("<tool>", add_special_tokens=False)["input_ids"]].mean(0))
    assert torch.equal(table[:1024], former)
    full = "TUNING_MODE=full" in words
    model = read(run / "model") if full else PeftModel.from_pretrained(base, run / "model").eval()
    ids = tokenizer("<tool>number 5</tool>", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        answers = model(input_ids=ids).logits
    untouched = (
        base.get_base_model()
        if hasattr(base, "get_base_model")
        else read(json.loads((run / "prepared.json").read_text())["model"]["path"])
    )
    with torch.no_grad():
        assert (answers - untouched(input_ids=ids).logits).abs().max() > 1e-3
    if not full:
        moved = model.get_input_embeddings().weight[number] - untouched.get_input_embeddings().weight[number]
        assert moved.abs().max() > 1e-3, "the new row was trained"
    done = place.run("merge", "RUN=run")
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        assert (read(run / "merged")(input_ids=ids).logits - answers).abs().max() < 1e-6
    rows = metrics(run, "eval")
    assert place.scores("RUN=run")["loss"] == pytest.approx(rows[-1]["eval_loss"], abs=2e-6)
    assert place.run("infer", "RUN=run", "PROMPT=What is 5?").returncode == 0
    shutil.rmtree(run)


def test_a_training_with_new_tokens_is_resumed_and_trained_on(place: Place) -> None:
    def losses(run: str, command: str, *words: str) -> list[float]:
        done = place.run(command, *words)
        assert done.returncode == 0, done.stderr
        return [row["eval_loss"] for row in metrics(place.folder / "runs" / run, "eval")]

    parent = losses("parent", "train", f"CONFIG={place.config}", "RUN_NAME=parent")
    resumed = losses("parent", "resume", "RUN=parent", "TRAIN_MAX_STEPS=6")
    assert resumed[: len(parent)] == parent and resumed[-1] < parent[-1]
    place.call("resume", "RUN=parent", "DATA_NEW_TOKENS=[<other>]").refused(2, "`data.new_tokens` cannot change")
    elsewhere = Place(place.folder)
    elsewhere.environment["SFT_PLAY_CACHE"] = str(place.folder / "another cache")
    done = elsewhere.run("resume", "RUN=parent", "TRAIN_MAX_STEPS=7")
    assert done.returncode == 0, done.stderr
    resumed = [row["eval_loss"] for row in metrics(place.folder / "runs/parent", "eval")]
    shutil.rmtree(place.folder / "another cache/models")
    assert place.run("infer", "RUN=parent", "PROMPT=What is 5?").returncode == 0
    shutil.rmtree(place.folder / "cache/models")
    place.call("infer", "RUN=parent", "PROMPT=hi").refused(5, "is not in the cache", "`make data` with RUN=")
    assert place.run("data", "RUN=parent").returncode == 0
    assert place.run("infer", "RUN=parent", "PROMPT=What is 5?").returncode == 0
    once = place.folder / "once.yaml"
    text = place.config.read_text().replace(f"name: {place.folder}/model, ", "")
    once.write_text(text.replace(", new_tokens: [<tool>, </tool>, <never>]", ""))
    for name, config in (("same", place.config), ("adapters", once)):
        second = losses(name, "train", f"CONFIG={config}", f"RUN_NAME={name}", "MODEL_ADAPTER=parent")
        assert second[0] == pytest.approx(resumed[-1], abs=1e-6) and second[-1] != second[0]
        assert place.run("merge", f"RUN={name}").returncode == 0
        place.call("push", f"RUN={name}", "REPO=me/x").refused(2, f"make merge RUN={name}")


def test_uses_are_counted_when_rows_are_prepared(place: Place) -> None:
    done = place.run("inspect", f"CONFIG={place.config}", "JSON=1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["manifest"]["new_tokens"] == {"<tool>": 24, "</tool>": 24, "<never>": 0}
    code = "import sys; from sft_play.__main__ import main; main(sys.argv[1:]); print('transformers' in sys.modules)"
    again = subprocess.run(
        [sys.executable, "-c", code, "data", f"CONFIG={place.config}"],
        env=place.environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert again.stdout.endswith("False\n") and "new token `<tool>`: 24 uses" in again.stderr, again.stderr


def test_invalid_new_tokens_are_refused(place: Place) -> None:
    def refused(code: int, *parts: str, tokens: str, words: tuple[str, ...] = ()) -> None:
        place.call("data", f"CONFIG={place.config}", f"DATA_NEW_TOKENS={tokens}", *words).refused(code, *parts)

    refused(4, "`<|im_end|>`, which the vocabulary of", tokens='["<|im_end|>"]')
    refused(4, "`<b>`, which the chat template or the tokenizer splits", tokens=r'["\n<b>", "<b>"]')
    refused(2, "appears twice", tokens='["<a>", "<a>"]')
    refused(2, "or is blank", tokens='[""]')
    refused(2, "no `data.new_tokens`", tokens="[]", words=("TUNING_LORA_EMBEDDINGS=new",))
