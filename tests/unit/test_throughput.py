"""The forecast: operations, paces, what a network costs, money, and the table of `SCALE`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sft_play.config.schema import Config, DataConfig, LaunchConfig, ModelConfig, TrainConfig, TuningConfig
from sft_play.errors import UserError
from sft_play.plan.architecture import shape_of
from sft_play.plan.batch import rank_rows
from sft_play.plan.calibration import Calibration, Link, StepFit
from sft_play.plan.hardware import BOARD_WATTS, GIB, Device, Hardware, energy_kwh, parse_hardware
from sft_play.plan.make import make_plan
from sft_play.plan.mixture import Data
from sft_play.plan.plan import LaunchRequest, Plan, Setup
from sft_play.plan.request import Request
from sft_play.plan.scaling import parse_price, parse_scale, scale_table, show_scale, with_cost
from sft_play.plan.show import show_speed
from sft_play.plan.throughput import attended_pairs, describe_work, flops_per_token, step_flops
from sft_play.runs.prepared import Prepared, PreparedSplit, ResolvedModel

SMALL, LLAMA2, LLAMA3 = "HuggingFaceTB/SmolLM2-135M-Instruct", "meta-llama/Llama-2-7b-hf", "meta-llama/Meta-Llama-3-8B"
SETUP = Setup(
    device="cpu", strategy="single", world_size=1, precision="fp32", weights_dtype="float32", optim="adamw_torch_fused",
    gradient_checkpointing=False, layout="flattened", attention="sdpa", label_share=1.0, row_tokens=256,
)  # fmt: skip
CPU = Hardware(
    kind="cpu", devices=(Device(name="a CPU", memory_bytes=32 * GIB, free_bytes=24 * GIB, bf16=False),), cpu_threads=4, ram_bytes=32 * GIB
)  # fmt: skip


def config_of(name: str = SMALL, mode: Any = "lora", seq: int = 256, **train: Any) -> Config:
    return Config(
        model=ModelConfig(name=name, max_seq_len=seq), tuning=TuningConfig(mode=mode), data=DataConfig(), train=TrainConfig(**train),
        launch=LaunchConfig(),
    )  # fmt: skip


def data_of(rows: int = 320, tokens: int = 100, labels: int = 20, longest: int = 150) -> Prepared:
    split = PreparedSplit(
        path="train", rows=rows, dropped=0, tokens=rows * tokens, label_tokens=rows * labels, longest=longest, median=tokens, fingerprint="f"
    )  # fmt: skip
    model = ResolvedModel(name="m", path="m", source="folder", revision=None, fingerprint="f", tokenizer_fingerprint="t")
    return Prepared(model=model, train=split, validation=None)


def plan_of(
    hardware: Hardware | str, config: Config | None = None, prepared: Prepared | None = None, calibration: Calibration | None = None, **launch: Any
) -> Plan:  # fmt: skip
    hardware = parse_hardware(hardware) if isinstance(hardware, str) else hardware
    config = config or config_of()
    request = LaunchRequest(**({"command_strategy": "auto"} | launch))
    return make_plan(
        Request(
            config=config,
            hardware=hardware,
            shape=shape_of(config.model),
            launch=request,
            prepared=prepared,
            calibration=calibration,
        )
    )


# Operations.


@pytest.mark.parametrize(
    ("mode", "recompute", "tokens", "gflops"),
    [("full", False, 2048, 46.9), ("full", True, 2048, 62.5), ("lora", False, 2048, 31.9), ("lora", True, 2048, 47.4),
     ("full", False, 8192, 52.5), ("lora", False, 8192, 37.5)],
)  # fmt: skip
def test_operations_of_a_token_of_llama_3(mode: str, recompute: bool, tokens: int, gflops: float) -> None:
    """Figures of shared facts, by counting: 2 N forward, attention 2 S h a layer."""
    config = config_of(LLAMA3, mode)
    assert flops_per_token(config, shape_of(config.model), tokens, recompute=recompute) / 1e9 == pytest.approx(gflops, rel=0.01)


def test_the_head_costs_only_where_there_are_labels() -> None:
    config = config_of()
    shape = shape_of(config.model)
    whole, eighth = (flops_per_token(config, shape, 128, recompute=False, label_share=share) for share in (1.0, 0.125))
    assert whole - eighth == pytest.approx(4 * 0.875 * shape.vocab_size * shape.hidden_size)


def test_pairs_are_those_that_kernels_compute() -> None:
    assert attended_pairs(SETUP, [100.0]) == 5000
    assert attended_pairs(SETUP, [100.0, 50.0]) == 150**2, "one line under a mask"
    padded = replace(SETUP, layout="padded")
    assert attended_pairs(padded, [100.0, 50.0]) == 2 * 100**2 == attended_pairs(padded, [100.0, 100.0], ragged=True)
    assert attended_pairs(padded, [100.0, 100.0]) == 100**2, "no mask is needed"
    assert attended_pairs(replace(SETUP, layout="unmasked"), [100.0, 100.0], ragged=True) == 100**2
    assert attended_pairs(replace(SETUP, layout="unmasked", attention="eager"), [100.0, 100.0]) == 2 * 100**2
    for attention in ("flash_attention_2", "varlen"):
        assert attended_pairs(replace(SETUP, attention=attention), [100.0, 50.0]) == (100**2 + 50**2) / 2
        assert attended_pairs(replace(SETUP, attention=attention, packed=True), [100.0], inside=30.0) == 100 * 15
    assert attended_pairs(replace(SETUP, attention="eager"), [100.0]) == 100**2
    assert attended_pairs(SETUP, []) == 0


def test_padding_is_work_too() -> None:
    config = config_of()
    shape, data = shape_of(config.model), Data(row_tokens=100, longest=180, label_share=0.2)
    flat, padded = (step_flops(config, shape, replace(SETUP, layout=layout), 8, 2, data) for layout in ("flattened", "padded"))
    assert 1.2 < padded / flat < 1.8
    even = Data(row_tokens=100, longest=100, label_share=0.2)
    assert step_flops(config, shape, replace(SETUP, layout="padded"), 8, 8, even) == pytest.approx(
        step_flops(config, shape, SETUP, 8, 8, even)
    )


def test_the_rank_with_most_rows_sets_the_pace() -> None:
    assert (
        rank_rows(24, (3, 3, 3)) == [8, 8, 8] and rank_rows(8, (1, 1, 1)) == [3, 3, 3] and rank_rows(24, (4, 1, 1)) == [16, 4, 4]
    )
    three, four = (plan_of(f"{n}xH200", config_of(LLAMA3, seq=1024, global_batch_size=24)) for n in (3, 5))
    assert three.tokens_per_second and four.tokens_per_second
    # 24 rows on 5 cards: one of them has 5, as if there were 24 / 5 cards.
    assert four.tokens_per_second / three.tokens_per_second == pytest.approx(8 / 5, rel=0.02)


# Paces and calibration.


def fit_of(config: Config, **changes: Any) -> StepFit:
    values: dict[str, Any] = {
        "work": describe_work(config, shape_of(config.model), replace(SETUP, attention="varlen")),
        "model": config.model.name, "seconds_per_micro_step": 0.5,
        "flops_per_second": 2e11, "threads": 4.0, "layers": 30, "flops_per_token": 5e8, "points": 8, "spread": 0.01,
        "measured": "2026-11-21",
    }  # fmt: skip
    return StepFit(**(values | changes))


def measured(*fits: StepFit, **changes: Any) -> Calibration:
    values: dict[str, Any] = {"matmul_flops": {"1024": 4e11}, "bandwidth": 1e10, "steps": fits}
    return Calibration(device="a CPU", kind="cpu", threads=4, measured="2026-11-21", **(values | changes))


def test_a_calibrated_step_is_its_line() -> None:
    config, data = config_of(global_batch_size=8), data_of()
    plan = plan_of(CPU, config, data, measured(fit_of(config)), command_strategy="single")
    shape = shape_of(config.model)
    setup = replace(SETUP, attention="varlen")
    flops = step_flops(config, shape, setup, 8, 2, Data(row_tokens=100, longest=150, label_share=0.2))
    update = 40 * shape.adapter_parameters(config.tuning.lora.r, "auto") / 1e10
    assert plan.seconds_per_step == pytest.approx(2 * 0.5 + flops / 2e11 + update)
    assert plan.tokens_per_second == pytest.approx(800 / plan.seconds_per_step)
    assert plan.total_seconds == pytest.approx(plan.seconds_per_step * (plan.steps or 0))
    assert plan.epoch_seconds == pytest.approx(plan.seconds_per_step * 40)
    assert plan.speed_basis == "calibrated by `make bench` on 2026-11-21" and plan.communication_seconds == 0
    assert plan.mfu and 0 < plan.mfu < 1
    text = "\n".join(show_speed(plan))
    assert "(calibrated by `make bench` on 2026-11-21)" in text and "an epoch" in text and "MFU" in text


def test_other_work_says_that_it_is_a_guess() -> None:
    config = config_of(global_batch_size=8)
    full = config_of(mode="full", global_batch_size=8)
    plan = plan_of(CPU, full, data_of(), measured(fit_of(config)), command_strategy="single")
    assert plan.speed_basis == f"by `make bench` with {SMALL} on 2026-11-21, other work than this"
    none = plan_of(CPU, config, data_of(), command_strategy="single")
    assert none.speed_basis == "a prior, not measured here" and none.mfu is None


def test_processes_share_threads() -> None:
    config = config_of(global_batch_size=8)
    calibration = measured(
        fit_of(config, seconds_per_micro_step=0.0), links={"gloo": Link(ranks=2, latency_seconds=0.25, bytes_per_second=1e9)}
    )
    one, two = (plan_of(CPU, config, data_of(), calibration, num_gpus=n) for n in (1, 2))
    assert two.seconds_per_step and one.seconds_per_step and two.communication_seconds
    assert two.communication_seconds == pytest.approx(0.25 + 4 * shape_of(config.model).adapter_parameters(16, "auto") / 1e9)
    assert two.seconds_per_step - two.communication_seconds == pytest.approx(one.seconds_per_step, rel=0.1)


def test_small_micro_steps_are_launches_and_quantised_weights_are_written_out() -> None:
    small = plan_of("H200", config_of(seq=64, global_batch_size=1))
    assert small.seconds_per_step and small.seconds_per_step > 30 * 6e-4, "30 layers"
    plain, quantised = (plan_of("RTX4090", config_of(LLAMA2, "qlora", seq=1024, global_batch_size=n)) for n in (1, 1))
    assert plain.seconds_per_step == quantised.seconds_per_step
    shape = shape_of(config_of(LLAMA2).model)
    per_pass = shape.linear_parameters * 2.516 / 1.008e12
    assert per_pass == pytest.approx(16.2e-3, rel=0.02), "shared facts: 16 ms a pass on a 4090"


# Energy and money.


def test_energy_is_the_cards_limits() -> None:
    plan = plan_of("2xH200", config_of(LLAMA3, seq=1024, max_steps=100))
    assert plan.total_seconds and plan.energy_kwh == pytest.approx(2 * 700 * plan.total_seconds / 3.6e6)
    assert plan_of("2x80GB", config_of(LLAMA3, seq=1024, max_steps=100)).energy_kwh is None
    assert plan_of(CPU, config_of(max_steps=10)).energy_kwh is None
    assert energy_kwh((), 0.0) == 0 and all(50 <= watts <= 1000 for watts in BOARD_WATTS.values())
    assert f"at most {plan.energy_kwh:.3g} kWh" in "\n".join(show_speed(plan))


@pytest.mark.parametrize(
    ("hardware", "nodes", "machines"), [("4xH200", 1, 1), ("8xH100@100Gbit", 2, 2), ("3xRTX4090@1Gbit", 1, 3)]
)
def test_money_is_by_machine_and_hour(hardware: str, nodes: int, machines: int) -> None:
    described = parse_hardware(hardware)
    plan = plan_of(described, config_of(LLAMA3, "qlora", seq=512, max_steps=100), num_nodes=nodes)
    priced = with_cost(plan, described, 2.5)
    assert plan.total_seconds and priced.cost == pytest.approx(2.5 * machines * plan.total_seconds / 3600)
    assert "at PRICE_PER_HOUR" in "\n".join(show_speed(priced)) and with_cost(plan, described, None) is plan


@pytest.mark.parametrize("text", ["", "a", "-1", "nan", "inf", "1e999", "2,5"])
def test_a_price_is_a_number(text: str) -> None:
    with pytest.raises(UserError, match="PRICE_PER_HOUR"):
        parse_price(text)


# The table.


def test_scale_is_read() -> None:
    assert parse_scale("1..10") == tuple(range(1, 11)) and parse_scale("1,2,4, 8") == (1, 2, 4, 8)
    assert parse_scale("8,1..3,2") == (1, 2, 3, 8) and parse_scale("5") == (5,)


@pytest.mark.parametrize(
    "text", ["", "0", "0..3", "5..2", "a", "1..", "1...3", "-1..2", "1..200", "9999", "1,,2", "1.5", "99999999999"]
)
def test_nonsense_is_one_clear_error(text: str) -> None:
    with pytest.raises(UserError, match="`SCALE` is"):
        parse_scale(text)


def table(hardware: str, counts: tuple[int, ...], config: Config, **launch: Any) -> Any:
    described, request = parse_hardware(hardware), LaunchRequest(**({"command_strategy": "single"} | launch))

    def plan_with(case: Hardware, asked: LaunchRequest) -> Plan:
        return make_plan(Request(config=config, hardware=case, shape=shape_of(config.model), launch=asked))

    rows = scale_table(plan_with, described, request, counts, 2.0)
    return rows, show_scale(rows, described, request, "a prior")


def test_each_row_is_a_plan_of_its_own() -> None:
    config = config_of(LLAMA3, seq=512, global_batch_size=64, max_steps=100)
    rows, text = table("RTX4090@1Gbit", (1, 2, 4, 8), replace(config, tuning=TuningConfig(mode="qlora")))
    assert [row.count for row in rows] == [1, 2, 4, 8] and rows[0].efficiency == 1.0 and rows[0].communication_share == 0
    shares, efficiencies = [row.communication_share for row in rows], [row.efficiency for row in rows]
    assert shares == sorted(shares) and efficiencies == sorted(efficiencies, reverse=True)
    assert rows[3].cost == pytest.approx(2.0 * 8 * rows[3].total_seconds / 3600) and rows[3].strategy == "ddp"
    own = plan_of("4xRTX4090@1Gbit", replace(config, tuning=TuningConfig(mode="qlora")))
    assert rows[2].tokens_per_second == pytest.approx(own.tokens_per_second)
    assert "GPUs" in text and "efficiency" in text and "cost" in text and text.count("\n") == 5


def test_a_number_that_does_not_work_says_why() -> None:
    rows, text = table("24GB", (1, 2), config_of(LLAMA3, "full", seq=2048))
    assert all(row.problem for row in rows) and "does not work: not even one row" in text
