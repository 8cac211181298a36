"""The forecast: operations, what was measured and money."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.schema import Config, ModelConfig, TuningConfig
from sft_play.errors import UserError
from sft_play.files import write_json
from sft_play.plan.architecture import shape_of
from sft_play.plan.hardware import parse_hardware
from sft_play.plan.plan import PastRun, Plan, setup_of
from sft_play.plan.show import beside_forecast, parse_price, show_plan, show_speed, with_cost
from sft_play.plan.throughput import batch_flops, past_runs, same_name
from sft_play.runs.folder import RunFolder
from sft_play.runs.progress import energy_kwh as measured_energy
from tests import plans
from tests.plans import LLAMA, SMALL

plan_of = partial(plans.plan_of, name=LLAMA, max_seq_len=512, max_steps=100, command_strategy="auto")


@pytest.mark.parametrize(
    ("mode", "recompute", "tokens", "gflops"),
    [("full", False, 2048, 46.9), ("full", True, 2048, 62.5), ("lora", False, 8192, 37.5)],
)
def test_operations_of_a_token_of_llama_3(mode: Any, recompute: bool, tokens: int, gflops: float) -> None:
    """Figures of shared facts, by counting: 2 N forward, attention 2 S h a layer."""
    config = Config(model=ModelConfig(name=LLAMA), tuning=TuningConfig(mode=mode))
    shape = shape_of(config.model)
    each = batch_flops(config, shape, tokens=1, labels=1, pairs=tokens / 2, recompute=recompute)
    assert each / 1e9 == pytest.approx(gflops, rel=0.01)


# Money.


@pytest.mark.parametrize(
    ("hardware", "nodes", "machines"), [("4xH200", 1, 1), ("8xH100@100Gbit", 2, 2), ("3xRTX4090@1Gbit", 1, 3)]
)
def test_cost_is_counted_by_machine_and_hour(hardware: str, nodes: int, machines: int) -> None:
    plan, described = plan_of(hardware, mode="qlora", num_nodes=nodes), parse_hardware(hardware)
    priced = with_cost(plan, described, 2.5)
    assert plan.total_seconds and priced.cost == pytest.approx(2.5 * machines * plan.total_seconds / 3600)
    assert "at PRICE_PER_HOUR" in "\n".join(show_speed(priced)) and with_cost(plan, described, None) is plan


@pytest.mark.parametrize("text", ["a", "-1", "inf"])
def test_a_price_must_be_a_number(text: str) -> None:
    with pytest.raises(UserError, match="PRICE_PER_HOUR"):
        parse_price(text)


# What was measured.


def test_measured_figures_are_shown_next_to_the_forecast(tmp_path: Path) -> None:
    measured = {"energy_kwh": 0.75, "tokens_per_second": 90.0, "forecast": {"tokens_per_second": 120.0}}
    write_json(RunFolder(tmp_path).training_metrics, measured)
    lines = "  speed    90 tokens/s, forecast 120 tokens/s (-25%)\n  energy   0.75 kWh\n"
    assert beside_forecast(RunFolder(tmp_path)) == lines
    write_json(RunFolder(tmp_path).training_metrics, {"training_seconds": 90.0, "resumed": True, "forecast": {"x": 1}})
    assert beside_forecast(RunFolder(tmp_path)) == "  time     90 s of steps in all, also before it was resumed\n"
    rows = [{"rank_power_watts": watts} for watts in ([100.0, 300.0], [None, 300.0], None, [200.0, 400.0])]
    assert measured_energy(rows, 3600.0) == 0.5 and measured_energy([{}], 3600.0) is None


def run_of(plan: Plan, speed: float, name: str = "before", **changes: Any) -> PastRun:
    assert plan.work
    return PastRun(name=name, work=replace(plan.work, **changes), steady_tokens_per_second=speed)


def test_a_complete_run_on_such_devices_teaches_the_forecast() -> None:
    """A run at half the expected speed halves this forecast, whatever the rows and the batch."""
    guess = plan_of("2xRTX4090", mode="qlora")
    assert (guess.speed_basis or "").startswith("a guess: ") and "0.35 x 165 TFLOP/s (RTX4090)" in show_plan(guess)
    assert guess.work and guess.work.guess == guess.tokens_per_second
    run = run_of(guess, 0.5 * guess.work.guess)
    taught = plan_of("2xRTX4090", mode="qlora", request_fields={"runs": (run,)}, max_seq_len=256)
    assert taught.work and taught.tokens_per_second == pytest.approx(0.5 * taught.work.guess)
    assert taught.speed_basis == f"by run `before`: {run.steady_tokens_per_second:,.0f} tokens/s in its median step"
    for other in ({"mode": "lora"}, {"hardware": "2xRTX3090"}, {"name": SMALL}):
        case = {"hardware": "2xRTX4090", "mode": "qlora", "request_fields": {"runs": (run,)}} | other
        assert (plan_of(case.pop("hardware"), **case).speed_basis or "").startswith("a guess: "), other
    newest = run_of(guess, 900.0, name="newest"), run, run_of(guess, 700.0, name="one", world_size=1)
    assert "`newest`" in (plan_of("2xRTX4090", mode="qlora", request_fields={"runs": newest}).speed_basis or "")


def test_speeds_that_no_data_sheet_has_are_learnt_from_runs() -> None:
    """Cards that the catalogue lacks, offloading, and a network of unknown speed for as many ranks."""
    for hardware, changes in (
        ("2x24GB", {}),
        ("RTX4090", {"num_nodes": 2}),
        ("2xRTX4090", {"command_strategy": "zero", "zero_stage": 3, "offload_parameters": True}),
    ):
        case: dict[str, Any] = {"strategy": "auto", **changes}
        plan = plan_of(hardware, **case)
        assert plan.tokens_per_second is plan.speed_basis is None, hardware
        taught = plan_of(hardware, **case, request_fields={"runs": (run_of(plan, 1234.0),)})
        assert taught.tokens_per_second == pytest.approx(1234.0), hardware
    alone = run_of(plan_of("RTX4090"), 1234.0)
    assert plan_of("RTX4090", num_nodes=2, request_fields={"runs": (alone,)}).tokens_per_second is None


def test_no_choice_depends_on_the_forecast() -> None:
    plan = plan_of("RTX4090+RTX3090", mode="qlora")
    taught = plan_of("RTX4090+RTX3090", mode="qlora", request_fields={"runs": (run_of(plan, 1.0),)})
    assert taught.tokens_per_second != plan.tokens_per_second and taught.ranks == plan.ranks
    assert setup_of(taught) == setup_of(plan)


@pytest.mark.parametrize(
    ("measured", "described"),
    [("NVIDIA H200", "H200"), ("NVIDIA GeForce RTX 4090", "RTX4090"), ("Tesla T4", "T4"), ("NVIDIA L40S", "L40S")],
)
def test_a_described_card_is_the_one_that_the_driver_names(measured: str, described: str) -> None:
    assert same_name(measured) == same_name(described) != same_name(f"{described} Laptop")


def test_only_complete_runs_teach_and_damaged_ones_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNS_DIR", str(tmp_path))
    plan = plan_of("RTX4090")
    assert plan.work
    whole = {"steps": 10, "steady_tokens_per_second": 900.0, "work": asdict(plan.work)}
    cases: dict[str, Any] = {
        "whole": whole,
        "short": whole | {"steps": 3},
        "older": {"steps": 10, "tokens_per_second": 900.0},
        "profiled": whole | {"work": None},
        "damaged": whole | {"work": asdict(plan.work) | {"guess": "many"}},
        "negative": whole | {"steady_tokens_per_second": -1.0},
    }
    for name, facts in cases.items():
        write_json(tmp_path / name / "config.json", {})
        write_json(tmp_path / name / "training_metrics.json", facts)
    (tmp_path / "whole" / "config.json").touch()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.json").write_text("{}")
    (tmp_path / "torn" / "training_metrics.json").write_text('{"steps": 10, "wor')
    assert past_runs() == (PastRun(name="whole", work=plan.work, steady_tokens_per_second=900.0),)
