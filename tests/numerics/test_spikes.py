"""Steps whose gradient norm jumps: when a new level is one."""

from __future__ import annotations

from pathlib import Path

from sft_play.training.stopping import SpikeGuard
from tests.contexts import context_of


def test_a_new_level_of_loss_is_accepted_after_a_while(tmp_path: Path) -> None:
    guard = SpikeGuard(context_of(tmp_path, train={"spike_guard": "skip", "spike_factor": 5.0}))
    for step in range(50):
        guard.jumps(1.0, step=step, rows=[])
    skipped = [guard.jumps(100.0, step=50 + step, rows=[]) for step in range(40)]
    assert skipped == [True] * 25 + [False] * 15
    assert len(guard.norms) == 50
