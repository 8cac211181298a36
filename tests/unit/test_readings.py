"""What ranks and machines use, as it is logged."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from sft_play.training.readings import NODE, OWN, Readings, Sampler, as_logs


def test_machines_are_counted_by_their_first_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    first = Readings().read()
    monkeypatch.setenv("LOCAL_RANK", "1")
    second = Readings().read()
    assert first[0] > 0 and all(math.isnan(value) for value in second[len(OWN) :])
    logs = as_logs([first, second, [0.5] + [math.nan] * (len(OWN) - 1) + [10.0, 2.0, 3.5]])
    assert logs["rank_memory_gib"] == pytest.approx([first[0], second[0], 0.5], rel=1e-3)
    assert [logs[f"node_{name}"][1] for name in NODE] == [10.0, 2.0, 3.5]
    assert "rank_power_watts" not in logs, "nothing is said of what no rank knows"


def test_a_card_is_sampled_and_what_fails_is_asked_once(capsys: pytest.CaptureFixture[str]) -> None:
    class Nvml(SimpleNamespace):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"no {name}")

    card, reasons = SimpleNamespace(number=1, handle=0, card=0), iter([0x4, 0x40])
    nvml = Nvml(
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=50),
        nvmlDeviceGetPowerUsage=lambda _: 250_000,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: next(reasons),
    )
    sampler = Sampler(1)
    for _ in range(2):
        sampler.look(nvml, card)
    assert sampler.take() == {"utilisation": 50.0, "power_watts": 250.0, "throttled": 50.0}, "a power cap is no fault"
    assert sampler.take() == {}
    assert capsys.readouterr().err.count("is read no more") == 2
