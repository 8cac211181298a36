"""What ranks and machines use, as it is logged."""

from __future__ import annotations

import math

import pytest

from sft_play.training.curves import NODE, Readings, as_logs


def test_machines_are_counted_by_their_first_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    first = Readings().read()
    monkeypatch.setenv("LOCAL_RANK", "1")
    second = Readings().read()
    assert first[0] > 0 and all(value >= 0 for value in first) and all(math.isnan(value) for value in second[1:])
    logs = as_logs([first, second, [0.5, 10.0, 2.0, 3.5]])
    assert logs["rank_memory_gib"] == [first[0], second[0], 0.5]
    assert [logs[f"node_{name}"] for name in NODE] == [[first[1], 10.0], [first[2], 2.0], [first[3], 3.5]]
