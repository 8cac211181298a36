"""The forecast: operations, what was measured and money."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.schema import Config, ModelConfig, TuningConfig
from sft_play.errors import UserError
from sft_play.files import write_json
from sft_play.plan.architecture import shape_of
from sft_play.plan.calibration import Calibration, load_calibration
from sft_play.plan.hardware import parse_hardware
from sft_play.plan.show import beside_forecast, parse_price, show_speed, with_cost
from sft_play.plan.throughput import flops_per_token
from sft_play.runs.folder import RunFolder
from sft_play.runs.progress import energy_kwh as measured_energy
from tests import plans
from tests.plans import LLAMA

plan_of = partial(plans.plan_of, name=LLAMA, max_seq_len=512, max_steps=100, command_strategy="auto")


@pytest.mark.parametrize(
    ("mode", "recompute", "tokens", "gflops"),
    [("full", False, 2048, 46.9), ("full", True, 2048, 62.5), ("lora", False, 8192, 37.5)],
)
def test_operations_of_a_token_of_llama_3(mode: Any, recompute: bool, tokens: int, gflops: float) -> None:
    """Figures of shared facts, by counting: 2 N forward, attention 2 S h a layer."""
    config = Config(model=ModelConfig(name=LLAMA), tuning=TuningConfig(mode=mode))
    assert flops_per_token(config, shape_of(config.model), tokens, recompute=recompute) / 1e9 == pytest.approx(
        gflops, rel=0.01
    )


# Energy and money.


def test_energy_is_the_cards_limits() -> None:
    plan = plan_of("2xH200")
    assert plan.total_seconds and plan.energy_kwh == pytest.approx(2 * 700 * plan.total_seconds / 3.6e6)
    assert plan_of("2x80GB").energy_kwh is None
    assert f"at most {plan.energy_kwh:.3g} kWh" in "\n".join(show_speed(plan))


@pytest.mark.parametrize(
    ("hardware", "nodes", "machines"), [("4xH200", 1, 1), ("8xH100@100Gbit", 2, 2), ("3xRTX4090@1Gbit", 1, 3)]
)
def test_money_is_by_machine_and_hour(hardware: str, nodes: int, machines: int) -> None:
    plan, described = plan_of(hardware, mode="qlora", num_nodes=nodes), parse_hardware(hardware)
    priced = with_cost(plan, described, 2.5)
    assert plan.total_seconds and priced.cost == pytest.approx(2.5 * machines * plan.total_seconds / 3600)
    assert "at PRICE_PER_HOUR" in "\n".join(show_speed(priced)) and with_cost(plan, described, None) is plan


@pytest.mark.parametrize("text", ["a", "-1", "inf"])
def test_a_price_is_a_number(text: str) -> None:
    with pytest.raises(UserError, match="PRICE_PER_HOUR"):
        parse_price(text)


# What was measured.


def test_measured_energy_is_beside_its_bound(tmp_path: Path) -> None:
    write_json(RunFolder(tmp_path).training_metrics, {"energy_kwh": 0.75, "forecast": {"energy_kwh": 1.0}})
    assert beside_forecast(RunFolder(tmp_path)) == "  energy   0.75 kWh, forecast 1 kWh (-25%)\n"
    rows = [{"rank_power_watts": watts} for watts in ([100.0, 300.0], [None, 300.0], None, [200.0, 400.0])]
    assert measured_energy(rows, 3600.0) == 0.5 and measured_energy([{}], 3600.0) is None


@pytest.mark.parametrize(
    ("measured", "described", "same"),
    [
        ("NVIDIA H200", "H200", True),
        ("NVIDIA GeForce RTX 4090", "2xRTX4090", True),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", "RTX4070", False),
        ("NVIDIA H200", "H200+H100", False),
    ],
)
def test_a_calibration_counts_for_the_same_name_and_a_damaged_one_not(
    measured: str, described: str, same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path))
    path = Calibration(device=measured, kind="cuda", threads=2, measured="2026-11-21").save()
    assert (load_calibration(parse_hardware(described)) is not None) == same
    kept = path.read_text(encoding="utf-8")
    for damaged in ("", kept[:-9], kept.replace('"threads": 2', '"threads": "two"')):
        assert damaged != kept
        path.write_text(damaged, encoding="utf-8")
        assert load_calibration(parse_hardware(described)) is None  # speeds are then priors, as the plan says
