"""`eval` as a user calls it, and answers scored during training: the same on one process, under DDP, ZeRO-3 and FSDP2."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from rouge_score.rouge_scorer import RougeScorer

from tests.places import Place, question_rows
from tests.processor_time import importing, seconds_of
from tests.tiny_models import build_tiny_llama


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(tmp_path_factory.mktemp("evaluate"))
    model = build_tiny_llama(place.folder / "model")
    for name, start, count in (("train", 0, 24), ("val", 100, 11)):
        (place.folder / f"{name}.jsonl").write_text(question_rows(start, count, longest=9))
    place.config.write_text(
        f"model: {{name: {model}, max_seq_len: 128}}\ntuning: {{mode: lora}}\n"
        f"data: {{train_path: {place.folder / 'train.jsonl'}, val_path: {place.folder / 'val.jsonl'}}}\n"
        "train: {max_steps: 2, global_batch_size: 8, learning_rate: 0.02, generation_max_new_tokens: 12, eval_strategy: steps,\n"
        "        eval_steps: 2, predict_with_generate: true}\neval: {samples: 7, batch_size: 2}\n"
    )
    done = place.run("train", f"CONFIG={place.config}", "RUN_NAME=one")
    assert done.returncode == 0, done.stderr
    return place


def test_scores_are_printed_written_and_shown_again_at_once(place: Place) -> None:
    during = json.loads((place.folder_of("one", 2) / "scores.json").read_text())
    found = place.scores("RUN=one")
    assert found["run"] == "one"
    assert found["step"] == 2
    # The last evaluation of the training saw the same weights, rows and settings.
    assert found["loss"] == pytest.approx(during["loss"], rel=1e-5)
    for metric in ("rouge1", "rouge2", "rougeL"):
        assert found[metric] == pytest.approx(during[metric])
    assert found["rougeL"]["n"] == 7
    lines = [json.loads(line) for line in (place.folder_of("one", 2) / "predictions.jsonl").read_text().splitlines()]
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    again = [scorer.score(line["reference"], line["answer"])["rougeL"].fmeasure for line in lines]
    assert sum(again) / len(again) == pytest.approx(found["rougeL"]["mean"], abs=1e-12)

    seconds, shown = seconds_of(lambda: place.run("eval", "RUN=one"))
    assert seconds < importing("torch"), "kept scores need no torch"
    assert shown.returncode == 0, shown.stderr
    assert "scored before" in shown.stderr
    assert f"{found['loss']:.4f}" in shown.stdout
    assert f"{found['rougeL']['mean']:.4f}" in shown.stdout
    assert "n = 7" in shown.stdout


def test_other_settings_and_weights_are_scored_anew(place: Place) -> None:
    fewer = place.scores("RUN=one", "EVAL_SAMPLES=3", "TRAIN_GENERATION_MAX_NEW_TOKENS=4")
    assert fewer["rougeL"]["n"] == 3
    last = place.scores("RUN=one", "CHECKPOINT=last", "TRAIN_PREDICT_WITH_GENERATE=false")
    assert last["weights"] == "step-000002"
    assert last["answers"] == 0
    assert "rougeL" not in last
    assert last["loss"] == pytest.approx(fewer["loss"], rel=1e-6)
    base = place.scores("RUN=one", "CHECKPOINT=base")
    assert Path(base["folder"]) == place.folder_of("one", 0)
    assert base["loss"] > last["loss"], "two steps at a high rate lower the loss"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("RUN=none",), 5, "there is no run `none`"),
        ((), 2, "`RUN` is missing"),
        (("RUN=one", "CHECKPOINT=step-000099"), 5, "no checkpoint `step-000099`"),
        (("RUN=one", "MODEL_MAX_SEQ_LEN=64"), 2, "`model.max_seq_len` would change how the run's own rows were made"),
    ],
)
def test_wrong_calls(place: Place, words: tuple[str, ...], code: int, message: str) -> None:
    done = place.call("eval", *words)
    assert done.code == code, done.err
    assert message in done.err
    assert not done.out


def test_run_without_validation_rows_and_weights_of_another_backend_are_refused(place: Place) -> None:
    runs = place.folder / "runs"
    shutil.copytree(runs / "one", runs / "bare", symlinks=True)
    prepared = json.loads((runs / "bare" / "prepared.json").read_text())
    (runs / "bare" / "prepared.json").write_text(json.dumps({**prepared, "validation": None}))
    done = place.run("eval", "RUN=bare")
    assert done.returncode == 4, done.stderr
    assert "no validation rows" in done.stderr

    shutil.copytree(runs / "one", runs / "other", symlinks=True)
    stamp = json.loads((runs / "other" / "model" / "stamp.json").read_text())
    (runs / "other" / "model" / "stamp.json").write_text(json.dumps({**stamp, "backend": "unsloth"}))
    done = place.run("eval", "RUN=other")
    assert done.returncode == 5, done.stderr
    assert "`backend` was `unsloth` and is `bnb`" in done.stderr
