"""A checkpoint's stamp is compared field by field before use; the table in the docs is that of the code."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.schema import Config, LoraSettings, ModelConfig, TrainConfig, TuningConfig
from sft_play.errors import CheckpointError
from sft_play.plan.plan import make_stamp
from sft_play.runs.origin import git_state
from sft_play.runs.prepared import SourceFacts
from sft_play.runs.stamp import RULES, Purpose, Stamp, compare, refuse
from tests.documents import ROOT, on_page
from tests.plans import prepared_rows, rank_plan, simple_plan

PURPOSES: tuple[Purpose, ...] = ("resume", "merge", "infer", "eval")


SOURCE = SourceFacts(name="rows.jsonl", rows=4, tokens=40, label_tokens=20, content="c" * 64)
PREPARED = prepared_rows(4, sources=(SOURCE,), template="e" * 64)


def stamp(backend: Any = "bnb", **plan: Any) -> Stamp:
    tuning = TuningConfig(backend=backend, mode="qlora", lora=LoraSettings(r=8))
    return make_stamp(Config(model=ModelConfig(name="m"), tuning=tuning), simple_plan(**plan), PREPARED)


def test_a_stamp_holds_what_a_reproduction_needs() -> None:
    ranks = tuple(rank_plan(rank, device_name="a card", micro_batch=4, accumulation=2) for rank in range(2))
    written = stamp(ranks=ranks, optim="adamw_torch_fused", loss_chunk=7)
    assert written.optimizer == "adamw_torch", "fused kernels keep the same states"
    assert written.template == "e" * 64
    assert written.data_files == {"train:rows.jsonl": "c" * 64}
    assert (
        written.plan["batches"] == ["2 x 4 x 2"]
        and written.plan["loss_chunk"] == 7
        and written.plan["optim"] == "adamw_torch_fused"
    )
    assert written.code is not None and re.fullmatch("[0-9a-f]{64}", written.code)


def test_another_number_of_the_same_devices_is_another_world_size_and_no_other_machine() -> None:
    alone, pair, unlike = (
        stamp(ranks=tuple(rank_plan(rank, device_name=name) for rank, name in enumerate(names)), world_size=len(names))
        for names in (("a card",), ("a card", "a card"), ("a card", "another"))
    )
    assert [difference.field for difference in compare(alone, pair, "resume")] == ["world_size"]
    assert [difference.field for difference in compare(pair, unlike, "resume")] == ["machine"]
    assert not compare(pair, replace(pair, machine={}), "resume")
    local = replace(alone, settings={**alone.settings, "launch.local_steps": 3})
    (difference,) = compare(replace(pair, settings=local.settings), local, "resume")
    assert "each number of processes trains otherwise" in difference.advice and difference.verdict == "warn"


def test_other_rows_of_the_hub_are_refused_with_the_commit_to_pin() -> None:
    old = replace(stamp(), data_files={"train:nobody/small": "hub:" + "1" * 40, "train:x.jsonl": "c" * 64})
    new = replace(old, train_data="f" * 64, data_files={**old.data_files, "train:nobody/small": "hub:" + "2" * 40})
    with pytest.raises(CheckpointError) as error:
        refuse(compare(old, new, "resume"), "the run")
    message = (
        f"`nobody/small` was read from the hub at the commit `{'1' * 40}`: set the `revision` of that source to it"
    )
    assert message in str(error.value) and "x.jsonl" not in str(error.value)
    assert not compare(old, replace(new, train_data=old.train_data), "resume"), (
        "the same rows at another commit are the same"
    )


def run_git(folder: Path, *words: str) -> str:
    names = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *names, *words], cwd=folder, capture_output=True, text=True, timeout=240, check=True
    ).stdout


def test_the_git_state_is_the_commit_and_a_hash_of_what_differs_and_a_repository_cannot_start_a_program(
    tmp_path: Path,
) -> None:
    run_git(tmp_path, "init", "-q")
    assert git_state(tmp_path) is None, "there is no commit yet"
    (tmp_path / "a").write_text("one")
    run_git(tmp_path, "add", ".")
    run_git(tmp_path, "commit", "-qm", "first")
    commit = run_git(tmp_path, "rev-parse", "HEAD").strip()
    assert git_state(tmp_path) == {"commit": commit, "dirty": False}
    (tmp_path / "a").write_text("two")
    program = tmp_path / "program.sh"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    for key in ("core.fsmonitor", "diff.external", "diff.mine.textconv", "diff.mine.command"):
        run_git(tmp_path, "config", key, str(program))
    (tmp_path / ".git" / "info").mkdir(exist_ok=True)
    (tmp_path / ".git" / "info" / "attributes").write_text("* diff=mine\n")
    changed = git_state(tmp_path)
    assert changed is not None and changed["commit"] == commit and changed["dirty"] and changed["diff_sha256"]
    assert not (tmp_path / "ran").exists()


def stamp_of(**train: Any) -> Stamp:
    config = Config(model=ModelConfig(name="m"), train=TrainConfig(**({"extra": {"adam_beta1": 0.8}} | train)))
    return make_stamp(config, simple_plan(), PREPARED)


def test_an_altered_configuration_is_refused_with_the_keys_to_restore() -> None:
    altered = stamp_of(max_grad_norm=0.5, learning_rate=0.1, extra={"adam_beta1": 0.8, "adam_beta2": 0.5})
    with pytest.raises(CheckpointError, match="restore these keys") as caught:
        refuse(compare(stamp_of(), altered, "resume"), "it")
    text = caught.value.message
    with pytest.raises(CheckpointError, match=r"was `train\.loss nll` and is `train\.loss dft`"):
        refuse(compare(stamp_of(), stamp_of(loss="dft"), "resume"), "it")
    assert "train.max_grad_norm 0.5" in text and "'adam_beta2': 0.5" in text and "weight_decay" not in text
    # What a resume, a recovery or a repeated run writes itself
    same = stamp_of(
        batch_size=2, grad_accum=3, global_batch_size=6, gradient_checkpointing=True, max_steps=9, packing="off"
    )
    assert compare(stamp_of(), same, "resume") == []


def test_bnb_and_unsloth_never_read_each_others_checkpoints() -> None:
    with pytest.raises(CheckpointError) as caught:
        refuse(compare(stamp("bnb"), stamp("unsloth"), "resume"), "checkpoint `step-000004`")
    text = caught.value.render()
    assert caught.value.exit_code == 5 and "`backend` was `bnb` and is `unsloth`" in text and "step-000004" in text
    assert "start a new run" in text and on_page("checkpoint-of-another-backend", text)


def test_an_upgrade_of_this_program_alone_is_no_difference() -> None:
    old = stamp()
    assert "sft_play" in old.versions
    assert not compare(replace(old, versions={**old.versions, "sft_play": "0.0.1"}), stamp(), "resume")


def changed(field: str) -> tuple[Stamp, Stamp]:
    """Return two stamps that differ in one field only."""
    old = stamp()
    value = getattr(old, field)
    if isinstance(value, dict):
        other: Any = value | {"versions": {"torch": "1.0"}, "settings": {"train.max_grad_norm": 9.0}}.get(
            field, {"r": 99}
        )
    else:
        other = value + 1 if isinstance(value, int) else "something else"
    return old, replace(old, **{field: other})


@pytest.mark.parametrize("purpose", PURPOSES)
@pytest.mark.parametrize("field", sorted(RULES))
def test_every_rule_of_the_table_holds(field: str, purpose: Any) -> None:
    differences = compare(*changed(field), purpose)
    verdict = getattr(RULES[field], purpose)
    assert [(d.field, d.verdict) for d in differences] == ([] if verdict == "allow" else [(field, verdict)])
    if verdict == "refuse":
        with pytest.raises(CheckpointError, match=f"`{field}`"):
            refuse(differences, "it")
    else:
        assert [f"`{field}`" in note for note in refuse(differences, "it")] == [True] * len(differences)


def test_the_table_in_the_docs_is_the_table_in_the_code() -> None:
    text = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| (\w+) \| (\w+) \| (\w+) \| (`.*`) \|$", text, re.M)
    shown = {name: tuple(row[:4]) for row in rows for name in re.findall(r"`(\w+)`", row[4])}
    assert shown == {name: (rule.resume, rule.merge, rule.infer, rule.eval) for name, rule in RULES.items()}
