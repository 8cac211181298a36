"""The soak's own judgement: what it must find when a run is not what it should be."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from sft_play.errors import UserError
from sft_play.soak.report import Comparison, Kill, as_json, as_text, differing_rows, load_state

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


def kill(number: int, phase: str, target: str, **values: Any) -> Kill:
    facts = {"run": 1, "aim": "time", "seconds": 1.0, "step": 7, "checkpoint": 5, "code": 75, "over_seconds": 1.0, **values}
    return Kill(number=number, phase=phase, target=target, **facts)


def test_a_soak_goes_on_where_it_was_and_shows_all_of_it(tmp_path: Path) -> None:
    state = load_state(tmp_path / "state.json", SETTINGS)
    state.kills += [kill(1, "saving", "rank 1"), kill(2, "loading", "launcher", code=None, checkpoint=7)]
    state.comparisons.append(Comparison(run=1, kills=2, rows=60, problems=("curve x",)))
    state.problems.append("kill 1: something")
    state.marks["training"] = 3.5
    state.save(tmp_path / "state.json")
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
