"""The soak's own judgement: what it must find when a run is not what it should be."""

from __future__ import annotations

import random
from typing import Any

from sft_play.soak.report import differing_rows


def row(step: int, kind: str = "train", **values: Any) -> dict[str, Any]:
    return {"kind": kind, "step": step, "loss": 1.0 / step, "tokens_per_second": random.random(), **values}


def test_rows_that_differ_in_one_bit_are_found() -> None:
    rows = [row(1), row(2), row(2, "eval", eval_loss=0.5, eval_seconds=1.0)]
    assert differing_rows(rows, [row(1), row(2), row(2, "eval", eval_loss=0.5, eval_seconds=9.0)]) == []
    changed = [row(1), row(2, loss=0.5000000000000001), row(2, "eval", eval_loss=0.5)]
    assert differing_rows(rows, changed) == ["train rows: step 2: `loss` 0.5000000000000001 instead of 0.5"]
    assert differing_rows(rows, rows[:2]) == ["eval rows: steps [] instead of [2]"]
    twice = [row(1), row(2), row(2), rows[2]]
    assert differing_rows(rows, twice) == ["train rows: steps [1, 2, 2] instead of [1, 2]"]
    assert differing_rows(rows, [row(2), row(1), rows[2]]) == ["train rows: steps [2, 1] instead of [1, 2]"]
