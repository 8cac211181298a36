"""Steps whose gradient norm jumps, in training: reported, left out, alike on a resumed run; and rows whose loss is no number."""

from __future__ import annotations

from pathlib import Path

import pytest

from sft_play.errors import UserError
from sft_play.training.stopping import SpikeGuard
from tests.contexts import context_of
from tests.unit.test_plan_make import plan_of


def test_a_new_level_is_one_after_a_while(tmp_path: Path) -> None:
    one = SpikeGuard(context_of(tmp_path, train={"spike_guard": "skip", "spike_factor": 5.0}))
    for step in range(50):
        one.jumps(1.0, step=step, rows=[])
    skipped = [one.jumps(100.0, step=50 + step, rows=[]) for step in range(40)]
    assert skipped == [True] * 25 + [False] * 15
    assert len(one.norms) == 50


def test_skipping_is_refused_where_the_update_comes_first() -> None:
    with pytest.raises(UserError, match="under zero2 DeepSpeed makes the update before its gradient norm is known"):
        plan_of(command_strategy="zero", spike_guard="skip")
