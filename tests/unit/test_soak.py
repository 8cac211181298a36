"""The soak's own judgement: what it must find when a run is not what it should be."""

from __future__ import annotations

from typing import Any

from sft_play.soak import differing_rows


def row(step: int, kind: str = "train", **values: Any) -> dict[str, Any]:
    return {"kind": kind, "step": step, "loss": 1.0 / step, **values}


def test_rows_that_differ_in_one_bit_are_found() -> None:
    rows = [row(1, tokens_per_second=5.0), row(2), row(2, "eval", eval_loss=0.5, eval_seconds=1.0)]
    first, second, scored = row(1, tokens_per_second=7.0), row(2), row(2, "eval", eval_loss=0.5, eval_seconds=9.0)
    assert differing_rows(rows, [first, second, scored]) == []
    changed = [first, row(2, loss=0.5000000000000001), scored]
    assert differing_rows(rows, changed) == ["train rows: step 2: `loss` 0.5000000000000001 instead of 0.5"]
    assert differing_rows(rows, [first, second]) == ["eval rows: steps [] instead of [2]"]
    assert differing_rows(rows, [second, first, second, scored]) == ["train rows: steps [2, 1, 2] instead of [1, 2]"]
