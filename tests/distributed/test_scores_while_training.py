"""Scores while training, as a user asks for them: loss per source, every metric, early stopping; the same on one rank
and on three.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.carried_bases import change_config
from tests.conftest import metrics
from tests.library_metric import library_metric
from tests.places import WORDS, Place, question_rows
from tests.tiny_models import build_tiny_llama

# Words that an answer shares with its reference: no number of ours.
SHARE = (
    '{"share": sum(len(set(p.split()) & set(r.split())) for p, r in zip(predictions, references)) / len(predictions)}'
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Train one process that stops early, since nothing improves by 100."""
    place = Place(tmp_path_factory.mktemp("scores"))
    model = build_tiny_llama(place.folder / "model")
    for name, start, count in (("chat", 0, 20), ("chat-held", 100, 13), ("docs", 30, 12), ("docs-held", 5, 5)):
        texts = (
            f"The {WORDS[i % 12]} is a {WORDS[i % 7]} number {i}. " * (1 + i % 3) for i in range(start, start + count)
        )
        documents = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        content = documents if name.startswith("docs") else question_rows(start, count, longest=9)
        (place.folder / f"{name}.jsonl").write_text(content)
    share = library_metric(place.folder, "share", SHARE)
    settings: dict[str, Any] = {
        "model": {"name": str(model), "max_seq_len": 128},
        "tuning": {"mode": "lora", "task": "mixed"},
        "data": {
            "sources": [{"path": str(place.folder / f"{name}.jsonl"), "name": name} for name in ("chat", "docs")],
            "validation": [
                {"path": str(place.folder / f"{name}-held.jsonl"), "name": name} for name in ("chat", "docs")
            ],
        },
        "train": {
            "max_steps": 9,
            "global_batch_size": 6,
            "learning_rate": 0.02,
            "generation_max_new_tokens": 8,
            "predict_with_generate": True,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_steps": 100,
            "load_best_model_at_end": True,
            "metric_for_best_model": "loss/docs",
            "early_stopping_patience": 1,
            "early_stopping_threshold": 100,
        },
        "eval": {"samples": 9, "batch_size": 2, "metrics": ["rougeL", "bleu", "chrf", "f1", share]},
    }
    place.config.write_text(json.dumps(settings))
    done = place.run("train", f"CONFIG={place.config}", "RUN_NAME=one")
    assert done.returncode == 0, done.stderr
    for message in (
        "9 answers, greedy",
        "5 of 18 validation rows have no reference and count only for the loss",
    ):
        assert message in done.stdout + done.stderr
    return place


def test_training_ends_early_and_says_why(place: Place) -> None:
    run = place.folder / "runs" / "one"
    measured = json.loads((run / "training_metrics.json").read_text())
    assert measured["steps"] == 4
    reason = "stopped early at step 4 of 9: 1 evaluation without a better `loss/docs` by more than 100"
    assert measured["stopped_early"].startswith(reason)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["started", "stopped_early", "finished"]
    assert (run / "checkpoints" / "last").resolve().name == "step-000004"
    assert measured["best_metric"] == min(row["eval_loss/docs"] for row in metrics(run, "eval"))
    assert (run / "checkpoints" / "best").resolve().name == f"step-{measured['best_step']:06d}"
    assert json.loads((run / "model" / "stamp.json").read_text())["step"] == measured["best_step"]
    longer = place.call("resume", "RUN=one", "TRAIN_MAX_STEPS=12")
    longer.refused(2, "`one` stopped early at step 4 of 9", "more steps would train nothing", "=one trains a new run")


def test_loss_and_perplexity_of_each_source_add_up(place: Place) -> None:
    run = place.folder / "runs" / "one"
    scores = json.loads((run / "eval" / "step-000004" / "scores.json").read_text())
    parts = scores["sources"]
    assert set(parts) == {"chat", "docs"}
    tokens = sum(part["label_tokens"] for part in parts.values())
    assert tokens == scores["label_tokens"]
    assert sum(part["loss"] * part["label_tokens"] for part in parts.values()) / tokens == pytest.approx(scores["loss"])
    row = metrics(run, "eval")[-1]
    assert row["eval_perplexity/docs"] == parts["docs"]["perplexity"]
    assert row["eval_loss_rows_per_second"] > row["eval_answers_per_second"] > 0
    assert row["eval_bleu"] == scores["bleu"]["mean"]
    assert (scores["answers"], scores["answers_asked"], scores["complete"]) == (9, 9, True)
    assert {"rougeL", "bleu", "chrf", "f1", "share"} < scores.keys()


THREE = [
    pytest.param("train-distributed", ("NUM_GPUS=3",), id="ddp-3"),
    pytest.param("train-deepspeed", ("NUM_GPUS=2", "LAUNCH_STRATEGY=zero3"), id="zero3-2"),
    pytest.param("train-fsdp", ("NUM_GPUS=3",), id="fsdp2-3", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("command", "words"), THREE)
@pytest.mark.broad
def test_ranks_do_not_change_a_digit_of_the_scores(place: Place, command: str, words: tuple[str, ...]) -> None:
    """13 rows of chat and 5 documents in batches of 2: the last round has fewer batches than ranks."""
    name = f"{command}-again"
    done = place.run(
        command, f"CONFIG={place.config}", f"RUN_NAME={name}", "TRAIN_LEARNING_RATE=0", *words, timeout=500
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    share = f"evaluate:{place.folder / 'share'}"  # a run's own words are no consent to run its code
    base = place.scores("RUN=one", "CHECKPOINT=base", f"EVAL_METRICS=[rougeL,bleu,chrf,f1,{share}]")
    folder = place.folder_of(name, 4)
    scores = json.loads((folder / "scores.json").read_text())
    for metric in ("rougeL", "bleu", "chrf", "f1", "share"):
        assert scores[metric] == base[metric], metric
    assert scores["label_tokens"] == base["label_tokens"]
    for source in ("chat", "docs"):
        assert scores["sources"][source] == pytest.approx(base["sources"][source], rel=1e-5)
    assert (folder / "predictions.jsonl").read_text() == (place.folder_of("one", 0) / "predictions.jsonl").read_text()
    logs = place.folder / "runs" / name / "logs"
    parts = [json.loads(path.read_text())["rows_scored"] for path in logs.glob("holdings-rank*.json")]
    assert len(parts) == int(words[0][-1]) and all(parts)
    assert sum(map(len, parts)) == 18, "no row is scored twice, none is left out"


def test_a_metric_that_cannot_score_does_not_end_the_run(place: Place) -> None:
    """It scores right answers, not those of a random model."""
    flaky = library_metric(place.folder, "flaky", '{"flaky": 1 / sum(p in references for p in predictions)}')
    best = ("TRAIN_METRIC_FOR_BEST_MODEL=flaky", "TRAIN_GREATER_IS_BETTER=true", "TRAIN_EARLY_STOPPING_THRESHOLD=0")
    words = (f"EVAL_METRICS=[rougeL, '{flaky}']", "TRAIN_MAX_STEPS=4", "TRAIN_SAVE_STEPS=2", *best)
    done = place.run("train", f"CONFIG={place.config}", "RUN_NAME=flaky", *words)
    assert done.returncode == 0 and "`flaky` is skipped: the metric" in done.stdout + done.stderr, done.stderr
    run = place.folder / "runs" / "flaky"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows if row["kind"] != "train"] == ["save", "eval"] * 2
    assert all("eval_rougeL" in row and "eval_flaky" not in row for row in rows if row["kind"] == "eval")
    assert (run / "model" / "stamp.json").is_file() and not (run / "checkpoints" / "best").exists()
    assert f"'EVAL_METRICS=[rougeL,{flaky}]'" in place.call("stamp", "RUN=flaky").out
    longer = ("resume", "RUN=flaky", "TRAIN_MAX_STEPS=6")
    refused = place.run(*longer)
    assert refused.returncode == 4 and f"type 'EVAL_METRICS=[rougeL,{flaky}]'" in refused.stderr, refused.stderr
    place.call(*longer, f"EVAL_METRICS=[chrf, '{flaky}']").refused(5, "`settings`", "eval.metrics")
    done = place.run(*longer, words[0])
    assert done.returncode == 0 and metrics(run, "eval")[-1]["step"] == 6, done.stderr


FAILING = """
import os

from transformers import LlamaConfig, LlamaForCausalLM


class MyConfig(LlamaConfig):
    model_type = "mine"


class MyModel(LlamaForCausalLM):
    config_class = MyConfig

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **others):
        if os.environ.get("RANK") == "1":
            raise ValueError("this machine lacks a kernel")
        return super().prepare_inputs_for_generation(input_ids, attention_mask=attention_mask, **others)
"""


def test_answers_that_fail_on_one_of_two_ranks_do_not_end_the_run(place: Place) -> None:
    """The model's code fails on rank 1; the other rank answers all its prompts without waiting."""
    model = build_tiny_llama(place.folder / "mine")
    (model / "code_of_mine.py").write_text(FAILING)
    classes = {"AutoConfig": "code_of_mine.MyConfig", "AutoModelForCausalLM": "code_of_mine.MyModel"}
    change_config(model, model_type="mine", auto_map=classes)
    words = (f"MODEL_NAME={model}", "MODEL_TRUST_REMOTE_CODE=true", "TRAIN_MAX_STEPS=4", "TRAIN_SAVE_STEPS=2")
    name, quiet = "fails-on-one", ("TRAIN_EARLY_STOPPING_THRESHOLD=0", "NUM_GPUS=2")
    done = place.run("train-distributed", f"CONFIG={place.config}", f"RUN_NAME={name}", *words, *quiet, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    output = done.stdout + done.stderr
    assert (
        "evaluation: none of 9 answers after step 4 is scored: rank 1: ValueError: this machine lacks a kernel"
        in output
    )
    run = place.folder / "runs" / name
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows if row["kind"] != "train"] == ["save", "eval"] * 2
    assert all("eval_loss" in row and "eval_rougeL" not in row for row in rows if row["kind"] == "eval")
