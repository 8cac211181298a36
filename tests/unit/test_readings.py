"""What ranks and machines use, as it is logged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sft_play.training.readings import Sampler


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
