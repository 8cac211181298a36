"""The soak's own judgement: what it must find when a run is not what it should be."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from sft_play.errors import UserError
from sft_play.runs.folder import RunFolder
from sft_play.soak.campaign import AIMS, choose_aim
from sft_play.soak.launches import choose_target
from sft_play.soak.material import EVAL_STEPS, SAVE_STEPS, STEPS, write_material
from sft_play.soak.processes import last_rows
from sft_play.soak.report import Comparison, Kill, State, as_json, as_text, compare_runs, differing_rows, load_state

SETTINGS = {"strategy": "ddp", "seed": 1, "config": None, "overrides": []}


def row(step: int, kind: str = "train", **values: Any) -> dict[str, Any]:
    return {"kind": kind, "step": step, "loss": 1.0 / step, "tokens_per_second": random.random(), **values}


def test_rows_that_differ_in_one_bit_are_found() -> None:
    rows = [row(1), row(2), row(2, "eval", eval_loss=0.5, eval_seconds=1.0)]
    assert differing_rows(rows, [row(1), row(2), row(2, "eval", eval_loss=0.5, eval_seconds=9.0)]) == []
    changed = [row(1), row(2, loss=0.5000000000000001), row(2, "eval", eval_loss=0.5)]
    assert differing_rows(rows, changed) == ["train rows: step 2: `loss` 0.5000000000000001 instead of 0.5"]
    assert differing_rows(rows, rows[:2]) == ["eval rows: steps none instead of 2"]
    twice = [row(1), row(2), row(2), rows[2]]
    assert differing_rows(rows, twice) == ["train rows: steps 1-2, 2 instead of 1-2"]
    assert differing_rows(rows, [row(2), row(1), rows[2]]) == ["train rows: steps 2, 1 instead of 1-2"]


def write_curves(folder: Path, steps: list[int], purge: int | None = None) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder), purge_step=purge)
    for step in steps:
        writer.add_scalar("train/loss", 1.0 / step, step)
    writer.close()


def make_run(path: Path, rows: list[dict[str, Any]]) -> RunFolder:
    run = RunFolder(path)
    run.checkpoints.mkdir(parents=True)
    run.metrics.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return run


def test_curves_and_leftovers_are_looked_at(tmp_path: Path) -> None:
    from sft_play.runs.checkpoints import link
    from sft_play.runs.manifest import seal

    rows = [row(1), row(2), row(3)]
    one, two = make_run(tmp_path / "one", rows), make_run(tmp_path / "two", rows)
    for run in (one, two):
        run.checkpoint(3).mkdir()
        (run.checkpoint(3) / "weights").write_bytes(b"1")
        seal(run.checkpoint(3), ranks=())
        link(run.last, run.checkpoint(3))
    write_curves(one.tensorboard, [1, 2, 3])
    write_curves(two.tensorboard, [1, 2], purge=0)
    write_curves(two.tensorboard, [2, 3], purge=2)
    assert compare_runs(one, two) == (3, [])
    write_curves(two.tensorboard, [3])
    (two.checkpoints / ".step-000005.partial").mkdir()
    (two.checkpoint(3) / "weights").write_bytes(b"2")
    _, problems = compare_runs(one, two)
    said = "\n".join(problems)
    assert "curve train/loss: steps 1-3, 3 instead of 1-3" in said
    assert "left over: checkpoints/.step-000005.partial" in said
    assert "step-000003: `weights` has another checksum" in said
    assert "`last` is step-000003, the newest valid checkpoint none" in said


def kill(number: int, phase: str, target: str, **values: Any) -> Kill:
    facts = {"run": 1, "aim": "time", "seconds": 1.0, "step": 7, "checkpoint": 5, "code": 75, "over_seconds": 1.0, **values}
    return Kill(number=number, phase=phase, target=target, **facts)


def test_a_soak_goes_on_where_it_was_and_shows_all_of_it(tmp_path: Path) -> None:
    state = load_state(tmp_path / "state.json", SETTINGS)
    state.kills += [kill(1, "save", "rank 1"), kill(2, "loading", "launcher", code=None, checkpoint=7)]
    state.comparisons.append(Comparison(run=1, kills=2, rows=60, problems=("curve x",)))
    state.problems.append("kill 1: something")
    state.marks["training"] = 3.5
    state.save()
    again = load_state(tmp_path / "state.json", SETTINGS)
    assert again == state
    found = as_json(again)
    assert found["kills"] == 2 and found["inside_a_save"] == 1 and found["equal"] == 0 and len(found["unequal"]) == 1
    assert found["steps_lost"] == {"mean": 1.0, "max": 2}
    table = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in as_text(again).splitlines() if line.startswith("| ")
    ]
    assert table[0] == ["phase", "rank 1", "agent", "launcher", "preparation", "everything", "all", "steps lost, mean (max)"]
    assert table[1] == ["loading", "0", "0", "1", "0", "0", "1", "0.0 (0)"]
    assert table[-1] == ["all", "1", "0", "1", "0", "0", "2", "1.0 (2)"]
    assert "0 of 1 disturbed runs equal" in as_text(again) and "- run 1: curve x" in as_text(again)
    with pytest.raises(UserError, match="`strategy` was `ddp` and is `zero2`"):
        load_state(tmp_path / "state.json", {**SETTINGS, "strategy": "zero2"})
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        load_state(tmp_path / "state.json", SETTINGS)


def test_kills_are_spread_over_moments_and_processes(tmp_path: Path) -> None:
    state, chance = (
        State(path=tmp_path, settings=SETTINGS, marks={"training": 8.0, "end": 14.0, "save lasts": 0.2}),
        random.Random(1),
    )
    aims = [choose_aim(state, chance) for _ in range(1000)]
    assert {aim.kind for aim in aims} == set(AIMS)
    times = [aim.seconds for aim in aims if aim.kind == "time"]
    assert 250 < len(times) < 450 and min(times) < 0.5 and max(times) > 13
    steps = [aim.seconds for aim in aims if aim.kind == "training"]
    assert 150 < len(steps) < 300 and min(steps) < 0.1 and 4 < max(steps) <= 6, "anywhere in the steps, which take 6 s"
    saves = [aim.seconds for aim in aims if aim.kind == "save"]
    assert len(saves) > 150 and max(saves) <= 0.2
    roles = ["launcher", "agent", "rank 0", "rank 1", "helper"]
    targets = [choose_target(roles, chance) for _ in range(1000)]
    assert {*roles[:4], "everything"} == set(targets)
    assert 100 < targets.count("agent") < 200 and targets.count("rank 0") > 150
    assert {choose_target(["launcher", "preparation"], chance) for _ in range(100)} == {"launcher", "preparation", "everything"}
    assert {choose_target(["launcher"], chance) for _ in range(20)} == {"launcher"}
    assert choose_target(["rank 0"], chance) is None, "the launcher has ended already"


def test_the_last_rows_of_a_torn_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_rows(path) == (0, 0)
    path.write_text("".join(json.dumps(one) + "\n" for one in [row(1), row(8), row(8, "eval"), row(9)]) + '{"kind": "tra')
    assert last_rows(path) == (9, 8)


def test_the_material_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    from sft_play.config.load import load_config

    paths = [write_material(tmp_path / name, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    rows = [(path.parent / "train.jsonl").read_text() for path in paths]
    assert rows[0] == rows[1] != rows[2]
    config = load_config(paths[0]).config
    assert config.train.save_steps == SAVE_STEPS >= 5 and config.train.eval_steps == EVAL_STEPS
    assert STEPS % SAVE_STEPS == 0 and config.train.predict_with_generate is True
