"""`make stamp` as a user calls it: one stamp, two stamps, and what is missing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from sft_play.runs.stamp import RULES, Stamp, compare, refuse
from tests.conftest import Done, call_program
from tests.conftest import environment as variables
from tests.plans import rank_plan, simple_plan
from tests.unit.test_stamp import stamp


def make_run(runs: Path, name: str, stamp: Stamp, launch: dict[str, Any] | None = None, **plan: Any) -> None:
    """Write the files of a run that the command reads."""
    run = runs / name
    stamp.save(run)
    dataclasses.replace(stamp, step=40).save(run / "checkpoints" / "step-000040")
    (run / "checkpoints" / "last").symlink_to("step-000040")
    dataclasses.replace(stamp, step=80).save(run / "model")
    config = {"train": {"batch_size": "auto", "gradient_checkpointing": "auto"}}
    (run / "config.json").write_text(json.dumps({"config": config, "origins": {}}))
    simple_plan(**plan).save(run / "plan.json")
    facts = {"command": "single", "num_gpus": None, "num_nodes": 1, "deepspeed": None, "fsdp": {}} | (launch or {})
    (run / "events.jsonl").write_text(json.dumps({"event": "started", "launch": facts}) + "\n")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stamps") / "runs"
    make_run(folder, "one", stamp(), ranks=(rank_plan(micro_batch=4, accumulation=2),))
    make_run(
        folder, "other", dataclasses.replace(stamp("unsloth"), seed=7, versions={**stamp().versions, "torch": "1.0"})
    )
    return folder


def ask(runs: Path, *words: str) -> Done:
    return call_program(["stamp", *words], variables(runs.parent / "cache", runs))


def test_one_stamp_with_what_each_difference_means(runs: Path) -> None:
    shown = ask(runs, "RUN=one")
    assert shown.code == 0, shown.err
    lines = shown.out.splitlines()
    for field, rule in RULES.items():
        first, *_ = [line for line in lines if line.startswith((f"{field} ", f"{field}."))]
        assert first.split()[-4:] == [rule.resume, rule.merge, rule.infer, rule.eval], first
    as_json = ask(runs, "RUN=one", "JSON=1").json
    assert as_json["stamp"]["backend"] == "bnb" and as_json["rules"]["backend"]["resume"] == "refuse"


def test_a_strangers_stamp_does_not_steer_the_terminal(tmp_path: Path) -> None:
    good = stamp()
    evil = dataclasses.replace(
        good, base_model="\x1b[2J\x1b]0;x\x07evil\nA second line", versions={**good.versions, "\x1b[31m": "\u202e"}
    )
    make_run(tmp_path, "evil", evil)
    make_run(tmp_path, "good", good)
    for words in (["RUN=evil"], ["A=evil", "B=good"]):
        shown = ask(tmp_path, *words)
        assert shown.code == 0 and "\\x1b[2J" in shown.out and "evil\\nA second line" in shown.out
        assert all(line.isprintable() for line in shown.out.split("\n"))
    [note, *_] = refuse(compare(good, evil, "infer"), "x")
    assert note.replace("\n", "").isprintable() and "\\x1b[2J" in note


@pytest.mark.parametrize(
    ("words", "folder", "step"),
    [
        (["RUN=one"], "one", 0),
        (["RUN=one", "CHECKPOINT=last"], "one/checkpoints/step-000040", 40),
        (["RUN=one@model"], "one/model", 80),
        (["RUN={runs}/one/checkpoints/last"], "one/checkpoints/last", 40),
    ],
    ids=str,
)
def test_stamps_are_found_by_names_and_folders(runs: Path, words: list[str], folder: str, step: int) -> None:
    answer = ask(runs, *(word.format(runs=runs) for word in words), "JSON=1")
    assert answer.code == 0, answer.err
    assert (Path(answer.json["folder"]), answer.json["stamp"]["step"]) == (runs / folder, step)


def test_two_stamps_are_compared_field_by_field(runs: Path) -> None:
    answer = ask(runs, "A=one", "B=other@model", "JSON=1").json
    by_field = {row["field"]: row for row in answer["differences"]}
    assert set(by_field) == {"backend", "seed", "versions"}
    assert (by_field["backend"]["a"], by_field["backend"]["b"], by_field["backend"]["eval"]) == (
        "bnb",
        "unsloth",
        "refuse",
    )
    assert by_field["seed"]["resume"] == "refuse" and by_field["seed"]["infer"] == "allow"
    assert answer["steps"] == [0, 80]
    shown = ask(runs, "A=one", "B=other").out
    assert "versions.torch" in shown and "transformers" not in shown and "steps" not in shown
    assert "use the `tuning.backend` that made it" in shown
    assert "the same in every field" in ask(runs, "A=one", "B=one@last").out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "`RUN` is missing"),
        (["A=one"], 2, "`B` is missing"),
        (["B=one"], 2, "`A` is missing"),
        (["RUN=one", "A=other"], 2, "`RUN` shows one stamp, and `A` and `B` compare two"),
        (["RUN=gone"], 5, "there is no run `gone`"),
        (["RUN=one@step-000041"], 5, "it has last, step-000040, model"),
        (["A=one", "B=other", "CHECKPOINT=last"], 2, "`CHECKPOINT` goes with `RUN`"),
    ],
    ids=str,
)
def test_missing_stamps_are_one_clear_error(runs: Path, words: list[str], code: int, message: str) -> None:
    done = ask(runs, *words)
    done.refused(code, "error: ", message)
    assert not done.out


def test_the_printed_command_repeats_a_run(tmp_path: Path) -> None:
    launch = {"command": "zero", "deepspeed": {"zero_optimization": {"stage": 2}}}
    make_run(tmp_path / "runs", "a $(touch x) run", stamp(), launch, world_size=2)
    again = ask(tmp_path / "runs", "RUN=a $(touch x) run", "JSON=1").json["again"]
    assert again.startswith("make train-deepspeed ") and "NUM_GPUS=2" in again and "DEEPSPEED_CONFIG=" in again
    assert "$$(touch x)" in again and "'" in again, "as a shell and make take it verbatim"
