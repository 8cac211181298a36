"""Documents and conversations in one run, and models from scratch, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import ROOT, Program, metrics, ragged_rows
from tests.sample_documents import PAGE, write_docx, write_pdf

SMALL = [
    "MODEL_LAYERS=2",
    "MODEL_HIDDEN_SIZE=64",
    "MODEL_ATTENTION_HEADS=4",
    "MODEL_VOCAB_SIZE=400",
    "MODEL_MAX_SEQ_LEN=64",
]
FEW = ["TRAIN_GLOBAL_BATCH_SIZE=8", "TRAIN_MAX_STEPS=3"]
TEXT = str(ROOT / "examples" / "07_continued_pretraining" / "corpus")


def corpus(folder: Path) -> Path:
    """Write a document of each kind, and a scanned one."""
    folder.mkdir()
    (folder / "a.txt").write_text("A pump moves water through the house. " * 40, encoding="utf-8")
    (folder / "b.html").write_text(PAGE, encoding="utf-8")
    write_docx(folder / "c.docx")
    write_pdf(folder / "d.pdf", [["A docu-", "ment of one page."]])
    write_pdf(folder / "scan.pdf", [[]], picture=True)
    return folder


@pytest.mark.slow
@pytest.mark.broad
def test_documents_and_conversations_in_one_run(tiny: Path, program: Program, tmp_path: Path) -> None:
    chat = ragged_rows(tmp_path / "chat.jsonl", 40)
    config = tmp_path / "mixed.yaml"
    config.write_text(
        json.dumps(
            {
                "model": {"name": str(tiny), "max_seq_len": 64},
                "tuning": {"task": "mixed", "mode": "full"},
                "data": {
                    "sources": [
                        {"path": str(corpus(tmp_path / "corpus")), "name": "documents", "weight": 8},
                        {"path": str(chat), "name": "chat", "weight": 2},
                    ],
                    "validation": [{"path": str(tmp_path / "corpus" / "a.txt"), "name": "documents"}],
                    "overlong": "split",
                },
                "train": {"global_batch_size": 8, "max_steps": 3, "eval_strategy": "steps", "eval_steps": 3},
            }
        ),
        encoding="utf-8",
    )
    done = program("train", f"CONFIG={config}", "RUN_NAME=mixed")
    assert done.code == 0, done.err
    run = tmp_path / "runs" / "mixed"
    sources = {source["name"]: source for source in json.loads((run / "prepared.json").read_text())["train"]["sources"]}
    assert set(sources) == {"documents", "chat"} and sources["documents"]["weight"] == 8
    # Every token of a document is a target but the first one of each row; of a conversation only the answer is.
    documents, chats = sources["documents"], sources["chat"]
    assert documents["label_tokens"] == documents["tokens"] - documents["rows"] and documents["rows"] > 5
    assert chats["label_tokens"] < chats["tokens"] - chats["rows"]
    assert "pictures without text" in done.err
    assert len(metrics(run)) == 3 and metrics(run, "eval")[-1]["eval_loss"] > 0


@pytest.mark.slow
def test_the_preset_runs_small_and_its_model_is_an_ordinary_folder(program: Program, tmp_path: Path) -> None:
    small = [*SMALL, *FEW, f"DATA_SOURCES=[{{path: {TEXT}}}]", "DATA_VALIDATION=null"]
    done = program("train", "CONFIG=configs/from_scratch.yaml", *small, "RUN_NAME=scratch")
    assert done.code == 0, done.err
    assert "random weights from train.seed 42" in done.err
    run = tmp_path / "runs" / "scratch"
    losses = [row["loss"] for row in metrics(run)]
    assert losses[0] == pytest.approx(6.0, abs=0.15) and losses[-1] < losses[0]  # ln 400: it knows nothing
    stamp = json.loads((run / "model" / "stamp.json").read_text())
    assert stamp["base_model"] == "from scratch (2 x 64, 4 heads, 400 tokens)" and stamp["mode"] == "full"
    answered = program("infer", "RUN=scratch", "PROMPT=A pump", "JSON=1", "TRAIN_GENERATION_MAX_NEW_TOKENS=8")
    assert answered.code == 0 and "texts are continued as they are" in answered.err
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run / "model")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    text = tokenizer("A pump", return_tensors="pt", add_special_tokens=False)
    generated = model.generate(**text, max_new_tokens=8, do_sample=False)[0, text["input_ids"].shape[1] :]
    assert answered.json["answer"] == tokenizer.decode(generated, skip_special_tokens=True).strip()
    merged = program("merge", "RUN=scratch", f"OUT={tmp_path / 'merged'}")
    assert merged.code == 0 and (tmp_path / "merged" / "model.safetensors").is_file(), merged.err


@pytest.mark.slow
@pytest.mark.long
def test_a_run_from_scratch_is_scored_with_its_own_tokenizer(program: Program, tmp_path: Path) -> None:
    """Use its full weights, its last checkpoint and its random start, on its rows and on others."""
    chat, other = ragged_rows(tmp_path / "chat.jsonl", 60), ragged_rows(tmp_path / "other.jsonl", 6, seed=1)
    own = [
        f"DATA_SOURCES=[{{path: {chat}}}]",
        "DATA_VALIDATION=0.2",
        "TUNING_TASK=sft",
        "MODEL_MAX_SEQ_LEN=256",
        "TRAIN_LEARNING_RATE=0.01",
    ]
    small = [word for word in SMALL if "MAX_SEQ_LEN" not in word]
    done = program("train", "CONFIG=configs/from_scratch.yaml", *small, *FEW, *own, "RUN_NAME=scored")
    assert done.code == 0, done.err
    few = ["JSON=1", "EVAL_SAMPLES=3", "TRAIN_GENERATION_MAX_NEW_TOKENS=4", "EVAL_METRICS=[rougeL]"]
    trained, base = (program("eval", "RUN=scored", *few, *words) for words in ([], ["CHECKPOINT=base"]))
    assert trained.code == base.code == 0, trained.err + base.err
    assert base.json["loss"] == pytest.approx(6.0, abs=0.15), "it knows nothing"
    assert trained.json["loss"] < base.json["loss"] - 0.2 and trained.json["rougeL"]["n"] == 3
    predictions = (Path(trained.json["folder"]) / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    assert all("<|im_start|>user" in json.loads(line)["prompt"] for line in predictions), (
        "the tokenizer that was trained here, with ChatML"
    )
    scored = program("eval", "RUN=scored", "CHECKPOINT=last", f"DATA={other}", *few)
    assert scored.code == 0 and scored.json["rougeL"]["n"] == 3 and scored.json["settings"]["data"] == str(other), (
        scored.err
    )
