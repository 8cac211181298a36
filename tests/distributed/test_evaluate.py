"""`eval` of a run, other rows and plain models, and `compare`, as a user calls them on one small
trained run.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.places import Place, question_rows
from tests.tiny_models import build_tiny_llama


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Train a run `one` of two steps, and score base and model on its rows."""
    place = Place(tmp_path_factory.mktemp("others"))
    model = build_tiny_llama(place.folder / "model")
    for name, start, count in (("train", 0, 24), ("val", 100, 11), ("other", 200, 6)):
        (place.folder / f"{name}.jsonl").write_text(question_rows(start, count, longest=9))
    place.config.write_text(
        f"model: {{name: {model}, max_seq_len: 128}}\ndata: {{train_path: {place.folder / 'train.jsonl'}, val_path:"
        f" {place.folder / 'val.jsonl'}}}\ntrain: {{max_steps: 2, global_batch_size: 8, learning_rate: 0.02,"
        " generation_max_new_tokens: 8, eval_strategy: steps,\n        eval_steps: 2, predict_with_generate:"
        " true}\neval: {samples: 7, batch_size: 2, metrics: [rougeL, chrf]}\n"
    )
    place.train("one")
    place.scores("RUN=one", "CHECKPOINT=base")
    return place


def answers(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


def test_scores_are_printed_written_and_shown_again_at_once(place: Place) -> None:
    during = json.loads((place.folder_of("one", 2) / "scores.json").read_text())
    scores = place.scores("RUN=one")
    assert (scores["run"], scores["step"]) == ("one", 2)
    # The last evaluation of the training saw the same weights, rows and settings.
    assert scores["loss"] == pytest.approx(during["loss"], rel=1e-5)
    assert scores["chrf"] == pytest.approx(during["chrf"]) and scores["rougeL"]["n"] == 7
    each = [line["scores"]["rougeL"] for line in answers(place.folder_of("one", 2))]
    assert sum(each) / len(each) == pytest.approx(scores["rougeL"]["mean"], abs=1e-12)

    shown = place.call("eval", "RUN=one")
    assert "already scored" in shown.err
    for part in (f"{scores['loss']:.4f}", f"{scores['rougeL']['mean']:.4f}", "n = 7"):
        assert part in shown.out


def test_other_settings_and_weights_are_scored_again(place: Place) -> None:
    runs = place.folder / "runs"
    shutil.copytree(runs / "one", runs / "again", symlinks=True)
    few = ("RUN=again", "EVAL_SAMPLES=3", "TRAIN_GENERATION_MAX_NEW_TOKENS=4")
    fewer = place.scores(*few)
    assert fewer["rougeL"]["n"] == 3
    added = place.scores(*few, "EVAL_METRICS=[valid_json]")
    assert added["valid_json"]["n"] == 3
    assert (added["rougeL"], added["chrf"]) == (fewer["rougeL"], fewer["chrf"]), "another metric costs no score"
    last = place.scores("RUN=again", "CHECKPOINT=last", "TRAIN_PREDICT_WITH_GENERATE=false")
    assert (last["weights"], last["answers"], "rougeL" in last) == ("step-000002", 0, False)
    assert last["loss"] == pytest.approx(fewer["loss"], rel=1e-6)
    base = place.scores("RUN=again", "CHECKPOINT=base")
    assert Path(base["folder"]) == place.folder_of("again", 0)
    assert base["loss"] > last["loss"], "two steps at a high rate lower the loss"


def test_runs_without_validation_rows_or_of_another_backend_are_refused(place: Place) -> None:
    bare = place.folder / "runs" / "bare"
    shutil.copytree(bare.with_name("one"), bare, symlinks=True)
    prepared = (bare / "prepared.json").read_text()
    (bare / "prepared.json").write_text(json.dumps({**json.loads(prepared), "validation": None}))
    place.call("eval", "RUN=bare").refused(4, "no validation rows")

    (bare / "prepared.json").write_text(prepared)
    stamp = json.loads((bare / "model" / "stamp.json").read_text())
    (bare / "model" / "stamp.json").write_text(json.dumps({**stamp, "backend": "unsloth"}))
    done = place.call("eval", "RUN=bare")
    assert done.code == 5 and "`backend` was `unsloth` and is `bnb`" in done.err, done.err

    (bare / "model" / "stamp.json").write_text(json.dumps(stamp))
    base = Path(shutil.copytree(place.folder / "model", place.folder / "changed"))
    (base / "config.json").write_text((base / "config.json").read_text() + "\n")
    facts = json.loads(prepared)
    facts["model"]["path"] = str(base)
    (bare / "prepared.json").write_text(json.dumps(facts))
    for words in ((), ("CHECKPOINT=base",)):
        place.call("eval", "RUN=bare", "EVAL_SAMPLES=2", *words).refused(5, "changed", "restore")


def test_other_rows_of_a_run_and_a_plain_model_are_scored(place: Place) -> None:
    other, own = place.folder / "other.jsonl", place.folder_of("one", 2) / "scores.json"
    before = own.read_bytes()
    page = place.folder / "runs" / "one" / "report.html"
    before_page = page.stat().st_mtime_ns
    scores = place.scores("RUN=one", f"DATA={other}")
    assert page.stat().st_mtime_ns > before_page, "the report has the scores"
    assert Path(scores["folder"]).name.startswith("step-000002-other-")
    assert scores["chrf"]["n"] == 6
    assert [line["place"] for line in answers(Path(scores["folder"]))] == [f"{other}:{line}" for line in range(1, 7)]
    assert scores["settings"]["data"] == str(other)
    assert own.read_bytes() == before, "the run's own scores are left alone"
    imports = [sys.executable, "-X", "importtime", "-m", "sft_play", "eval", "RUN=one", f"DATA={other}"]
    imported = subprocess.run(imports, env=place.environment, capture_output=True, text=True, check=True).stderr
    assert "already scored" in imported and re.search(r"\| +sft_play\.", imported)
    assert not re.findall(r"\| +(?:torch|transformers|datasets)$", imported, re.M), "kept scores need nothing heavy"

    words = (
        f"MODEL={place.folder / 'model'}",
        f"DATA={other}",
        "EVAL_METRICS=[rougeL,chrf]",
        "TRAIN_GENERATION_MAX_NEW_TOKENS=8",
    )
    plain = place.scores(*words)
    assert plain["weights"] == "base"
    assert plain["loss"] > scores["loss"], "two steps at a high rate lower the loss"
    again = place.call("eval", *words)
    assert "already scored" in again.err and f"base {place.folder / 'model'} (step 0)" in again.out
    assert place.run("merge", "RUN=one").returncode == 0
    merged = place.folder / "runs" / "one" / "merged"
    of_merged = place.run("eval", f"MODEL={merged}", f"DATA={other}", "TRAIN_PREDICT_WITH_GENERATE=false").stdout
    assert f"base {merged}, tuned (step 2)" in of_merged

    comparison = place.call("compare", f"RUNS=one {plain['run']}", f"DATA={other}", "JSON=1").json
    assert comparison["losses"]["loss"] == [scores["loss"], plain["loss"]]
    assert "train.max_steps" not in comparison["settings"], "a plain model was never trained"
    assert comparison["differences"]["rougeL"][1]["n"] == 6


def test_scores_on_rows_that_were_trained_are_called_memory(place: Place) -> None:
    mixed = place.folder / "mixed.jsonl"
    rows = (place.folder / "train.jsonl").read_text().splitlines(keepends=True)[:4]
    mixed.write_text("".join(rows) + (place.folder / "other.jsonl").read_text())
    words = ("RUN=one", f"DATA={mixed}", "TRAIN_PREDICT_WITH_GENERATE=false")
    warning = "4 of these rows were trained: such scores show memory and not skill"
    assert place.scores(*words)["settings"]["rows_trained"] == 4
    assert warning in place.call("eval", *words).out
    assert "warning" not in place.call("eval", "RUN=one").out
    report = place.call("report", "RUN=one", f"OUT={place.folder / 'report.html'}")
    assert report.code == 0 and warning in (place.folder / "report.html").read_text()


def test_bad_rows_of_other_data_are_dropped_as_the_hint_says(place: Place) -> None:
    other = place.folder / "some-bad.jsonl"
    other.write_text((place.folder / "other.jsonl").read_text() + '{"prompt": "What?"}\n')
    refused = place.run("eval", "RUN=one", f"DATA={other}")
    assert refused.returncode == 4 and "DATA_BAD_ROWS=drop" in refused.stderr
    assert place.scores("RUN=one", f"DATA={other}", "DATA_BAD_ROWS=drop")["chrf"]["n"] == 6
    again = place.call("eval", "RUN=one", f"DATA={other}", "DATA_BAD_ROWS=drop").err
    assert "1 left out (bad row)" in again and "already scored" in again


def test_a_run_without_scores_is_compared_by_what_it_has(place: Place) -> None:
    unscored = place.folder / "runs" / "unscored"
    shutil.copytree(place.folder / "runs" / "one", unscored, symlinks=True)
    shutil.rmtree(unscored / "eval")
    settings = json.loads((unscored / "config.json").read_text())
    data = settings["config"]["data"]
    data |= {"train_path": None, "sources": [*data["sources"], {"path": "further.jsonl"}]}
    (unscored / "config.json").write_text(json.dumps(settings))
    result = place.call("compare", "RUNS=one unscored", "JSON=1").json
    assert result["settings"] == {"data.sources[1].path": [None, "further.jsonl"]}, "a source of one side only"
    first, second = result["losses"]["loss"]
    assert first > 0 and second == pytest.approx(first, rel=1e-5), "measured when it was trained"
    assert result["facts"]["steps"] == [2, 2] and not result["rows"]
    assert result["scores"]["chrf"][0]["n"] == 7 and result["scores"]["chrf"][1] is None
    pair, three = (
        place.call("compare", f"RUNS={runs}one@base one", "METRIC=chrf", "JSON=1").json for runs in ("", "unscored ")
    )
    assert three["scores"]["chrf"] == [None, *pair["scores"]["chrf"]]
    assert three["differences"]["chrf"] == [None, *pair["differences"]["chrf"]] and three["rows"] == pair["rows"] != []
    assert three["against"] == pair["against"] == "one@base"
    listed = place.call("compare", "RUNS=unscored one@base one").out
    assert re.search(r"paired difference +[+-]\d", listed)
    assert "Scores (95 % intervals; paired differences are from one@base)\n" in listed
    printed = place.call("compare", "RUNS=one unscored")
    assert re.search(r"chrF .*n = 7 +- *\n", printed.out), printed.out
    assert "`unscored` has no scores for step 2; score it: make eval RUN=unscored\n" in printed.err
    prepared = json.loads((unscored / "prepared.json").read_text())
    (unscored / "prepared.json").write_text(json.dumps(prepared | {"validation": None}))
    settings["config"]["train"]["predict_with_generate"] = False
    (unscored / "config.json").write_text(json.dumps(settings))
    command = "make eval RUN=unscored TRAIN_PREDICT_WITH_GENERATE=true DATA=FILE"
    assert f"score it: {command}\n" in place.call("compare", "RUNS=one unscored").err
    place.call("compare", "RUNS=one unscored", f"DATA={place.folder / 'other.jsonl'}").refused(5, "has no scores on")


def test_runs_are_compared_side_by_side(place: Place) -> None:
    comparison = place.call("compare", "RUNS=one@base one", "METRIC=chrf", "ROWS=3", "JSON=1").json
    assert comparison["settings"] == {}
    assert comparison["facts"]["weights"][1].endswith("(step 2)")
    rate = json.loads((place.folder / "runs/one/plan.json").read_text())["learning_rate"]
    assert comparison["facts"]["learning rate"] == [None, rate], "as planned, whatever was typed"
    assert comparison["facts"]["steps"] == [None, 2] and comparison["facts"]["time"][0] is None
    lines = [{line["row"]: line for line in answers(place.folder_of("one", step))} for step in (0, 2)]
    gaps = {row: lines[1][row]["scores"]["chrf"] - lines[0][row]["scores"]["chrf"] for row in lines[0]}
    difference = comparison["differences"]["chrf"][1]
    before, after = comparison["scores"]["chrf"]
    assert difference["n"] == 7 and difference["mean"] == pytest.approx(after["mean"] - before["mean"])
    assert [part["gap"] for part in comparison["rows"]] == pytest.approx(
        sorted(map(abs, gaps.values()), reverse=True)[:3]
    )
    first = comparison["rows"][0]
    assert [side_answer["answer"] for side_answer in first["answers"]] == [
        side[first["row"]]["answer"] for side in lines
    ]

    same = place.call("compare", "RUNS=one@step-000002 one", "JSON=1").json
    assert same["differences"] and same["rows"] == [], "rows with equal scores do not differ"
    shown = place.call("compare", "RUNS=one@base,one")
    assert "paired difference" in shown.out and "too few to compare, n = 7" in shown.out
    assert re.search(r"peak memory +- +\d\.\d\d GiB", shown.out) and "<|" not in shown.out
    assert f"{comparison['losses']['loss'][0]:.4g}" in shown.out


def test_groups_of_the_training_rows_do_not_forbid_other_rows(place: Place) -> None:
    config = place.folder / "grouped.yaml"
    rows = [
        {**json.loads(line), "by": f"a{i % 8}"}
        for i, line in enumerate(question_rows(0, 24, longest=6).split("\n")[:-1])
    ]
    (place.folder / "grouped.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = place.config.read_text().replace(f"val_path: {place.folder}/val.jsonl", "validation: 0.2, group_by: by")
    config.write_text(text.replace("train.jsonl", "grouped.jsonl"))
    done = place.run("train", f"CONFIG={config}", "RUN_NAME=grouped")
    assert done.returncode == 0, done.stderr
    assert place.scores("RUN=grouped", f"DATA={place.folder / 'other.jsonl'}")["rougeL"]["n"] == 6


def test_rows_of_another_kind_than_the_run_learnt_are_scored_and_compared(place: Place) -> None:
    text, chat = place.folder / "notes.txt", place.folder / "other.jsonl"
    text.write_text("A list is a sequence of values. " * 30)
    quiet = ("TRAIN_EVAL_STRATEGY=no", "TRAIN_PREDICT_WITH_GENERATE=auto")
    place.train("texts", "TUNING_TASK=cpt", f"DATA_TRAIN_PATH={text}", "DATA_VAL_PATH=", *quiet)
    assert place.scores("RUN=texts", f"DATA={chat}")["rougeL"]["n"] == 6
    place.scores("RUN=one", f"DATA={chat}")
    both = place.call("compare", "RUNS=texts one", f"DATA={chat}", "JSON=1").json
    assert both["differences"]["rougeL"][1]["n"] == 6
    assert place.scores("RUN=one", f"DATA={text}", "DATA_OVERLONG=split")["answers"] == 0
    formats = f"DATA_VALIDATION=[{{path: {chat}, format: prompt_completion}}]"
    assert "already scored" in place.call("eval", "RUN=texts", formats).err


def test_answers_to_other_rows_are_not_compared(place: Place) -> None:
    runs = place.folder / "runs"
    shutil.copytree(runs / "one", runs / "elsewhere", symlinks=True)
    folder = place.folder_of("elsewhere", 2)
    lines, file = answers(folder), folder / "predictions.jsonl"
    file.write_text("".join(json.dumps({**line, "reference": "another"}) + "\n" for line in lines))
    scores = json.loads((folder / "scores.json").read_text())
    (folder / "scores.json").write_text(json.dumps(scores | {"perplexity": 1e200}))
    apart = place.call("compare", "RUNS=one elsewhere")
    assert "1e+200" in apart.out, "of a run that diverged"
    assert apart.code == 0 and "training tokens" in apart.out and "perplexity" in apart.out, apart.out
    assert "answered no row in common" in apart.err and "make eval RUN=elsewhere DATA=FILE" in apart.err
    assert "paired difference" not in apart.out

    file.write_text(
        "".join(json.dumps({**line, "row": line["row"] + 1000 * (i < 2)}) + "\n" for i, line in enumerate(lines))
    )
    notes = place.call("compare", "RUNS=one elsewhere", "JSON=1").json["notes"]
    assert "2 of 7 answers of `elsewhere` are skipped" in " ".join(notes)
    shutil.rmtree(runs / "elsewhere" / "eval")
    prepared = json.loads((runs / "elsewhere" / "prepared.json").read_text())
    prepared["validation"]["fingerprint"] = "0" * 64
    (runs / "elsewhere" / "prepared.json").write_text(json.dumps(prepared))
    unscored = place.call("compare", "RUNS=one elsewhere").err
    assert "`elsewhere` has no scores" in unscored and "the validation rows differ: each loss" in unscored, unscored
    shutil.rmtree(runs / "elsewhere")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("eval MODEL=somewhere", 2, "`DATA` is missing"),
        ("eval RUN=one CHECKPOINT=step-000099", 5, "no checkpoint `step-000099`"),
        ("eval RUN=one MODEL_MAX_SEQ_LEN=64", 2, "`model.max_seq_len` would change how the run's own rows were made"),
        ("eval RUN=one DATA=x.jsonl DATA_VAL_PATH=y.jsonl", 2, "are both given"),
        ("eval RUN=one DATA_VALIDATION=0.5", 2, "a fraction of which data?"),
        ("compare RUNS=one", 2, "expected two or more"),
        ("compare RUNS=one,one@base DATA=unscored.jsonl", 5, "make eval RUN=one DATA=unscored.jsonl"),
    ],
)
def test_invalid_calls_of_eval_and_compare_are_refused(place: Place, words: str, code: int, message: str) -> None:
    place.call(*words.split()).refused(code, message)
