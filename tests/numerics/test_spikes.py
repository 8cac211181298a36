"""Steps whose gradient norm jumps, in training: reported, left out, alike on a resumed run; and rows whose loss is no number."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from sft_play.errors import UserError
from sft_play.training.guards import SpikeGuard
from tests.contexts import context_of
from tests.unit.test_plan_make import plan_of


def guard(path: Path, mode: str = "skip", factor: float = 5.0) -> SpikeGuard:
    return SpikeGuard(context_of(path, train={"spike_guard": mode, "spike_factor": factor}))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "logs" / "spikes.jsonl").read_text().splitlines()]


def test_a_jump_is_written_down_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = guard(tmp_path)
    assert not any(one.jumps(1.0 if step > 1 else 99.0, step=step, rows=[step]) for step in range(1, 12)), "too early to judge"
    assert one.jumps(5.1, step=12, rows=[7, 3])
    assert not one.jumps(5.0, step=13, rows=[8]), "five times is allowed"
    assert not one.jumps(math.nan, step=14, rows=[9])
    (line,) = lines(tmp_path)
    assert (line["step"], line["norm"], line["median"], line["rows"], line["skipped"]) == (12, 5.1, 1.0, [7, 3], True)
    said = capsys.readouterr().out
    assert "step 12: the gradient norm jumps to 5.1, 5.1 times the median 1" in said
    assert "its update is skipped" in said
    assert one.found == [12]


def test_report_makes_the_update(tmp_path: Path) -> None:
    one = guard(tmp_path, "report")
    assert not any(one.jumps(1.0, step=step, rows=[]) for step in range(10))
    assert not one.jumps(50.0, step=10, rows=[1])
    assert not lines(tmp_path)[0]["skipped"]


def test_a_new_level_is_one_after_a_while(tmp_path: Path) -> None:
    one = guard(tmp_path)
    for step in range(50):
        one.jumps(1.0, step=step, rows=[])
    skipped = [one.jumps(100.0, step=50 + step, rows=[]) for step in range(40)]
    assert skipped == [True] * 25 + [False] * 15
    assert len(one.norms) == 50


def test_skipping_is_refused_where_the_update_comes_first() -> None:
    with pytest.raises(UserError, match="under zero2 DeepSpeed makes the update before its gradient norm is known"):
        plan_of(command_strategy="zero", spike_guard="skip")
