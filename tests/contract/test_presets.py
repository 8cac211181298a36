"""The shipped presets are those of contract section 8, and what their comments say of quoted batches is what the plan finds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.render_presets import CLAIMS, PAGES, rendered
from sft_play.config.call import Override
from sft_play.config.load import load_config
from sft_play.config.schema import ModelConfig
from sft_play.plan.fit import DoesNotFitError
from sft_play.plan.hardware import GIB, parse_hardware
from sft_play.plan.hardware_file import DEVICE_KEYS, KEYS
from sft_play.plan.make import make_plan
from sft_play.plan.plan import Plan
from sft_play.plan.request import LaunchRequest
from sft_play.plan.shape import shape_of
from tests.conftest import ROOT


@dataclass(frozen=True)
class Row:
    """A row of the contract's table."""

    model: str
    length: int
    mode: str
    backend: str = "bnb"
    hardware: str | None = None
    quoted: tuple[int, int] | None = None
    """Micro-batch and accumulation that people quote."""
    fits: bool = True


GEMMA, QWEN = "google/gemma-3-27b-it", "Qwen/Qwen2.5-7B-Instruct"
LAN = "12GB+8GB+8GB"
TABLE = {
    "quickstart": Row("HuggingFaceTB/SmolLM2-135M-Instruct", 256, "lora"),
    "run_cpu": Row("HuggingFaceTB/SmolLM2-135M-Instruct", 1024, "lora"),
    "run_bnb": Row(QWEN, 2048, "qlora"),
    "run_unsloth": Row(QWEN, 2048, "qlora", "unsloth"),
    "rtx4090_sli": Row("Qwen/Qwen2.5-14B-Instruct", 1536, "qlora", hardware="2x24GB", quoted=(6, 4)),
    "a100_pair": Row(GEMMA, 2048, "qlora", hardware="2xA100", quoted=(8, 4)),
    "h100_pair": Row(GEMMA, 2048, "qlora", hardware="2xH100", quoted=(8, 4)),
    "h200_pair": Row(GEMMA, 2048, "qlora", hardware="2xH200", quoted=(4, 4)),
    "h200_quad": Row("meta-llama/Llama-3.1-70B-Instruct", 4096, "qlora", hardware="4xH200", quoted=(16, 2), fits=False),
    "l40s_single": Row("HuggingFaceTB/SmolLM3-3B", 2048, "lora", hardware="L40S", quoted=(8, 1)),
    "l40s_pair": Row("HuggingFaceTB/SmolLM3-3B", 2048, "lora", hardware="2xL40S", quoted=(28, 1)),
    "home_lan": Row("meta-llama/Llama-2-7b-hf", 2048, "qlora", hardware=LAN, quoted=(1, 8)),
    "home_lan_13b": Row("meta-llama/Llama-2-13b-hf", 1024, "qlora", hardware=LAN, quoted=(1, 12)),
    "smoke": Row("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 512, "lora"),
    "from_scratch": Row("", 2048, "full"),
    # With models of this year.
    "cpu_qwen3_5": Row("Qwen/Qwen3.5-0.8B", 512, "lora"),
    "run_bnb_qwen3_5": Row("Qwen/Qwen3.5-9B", 2048, "qlora"),
    "rtx4090_sli_gemma4": Row("google/gemma-4-E4B-it", 1536, "qlora"),
    "home_lan_smollm3": Row("HuggingFaceTB/SmolLM3-3B", 2048, "qlora"),
    "h200_pair_gemma4": Row("google/gemma-4-31B-it", 2048, "qlora"),
    "h200_single_gpt_oss": Row("unsloth/gpt-oss-20b-BF16", 2048, "lora"),
}


def typed(**values: int) -> list[Override]:
    return [Override(key=f"train.{key}", text=str(value), origin=f"TRAIN_{key.upper()}={value}") for key, value in values.items()]


def planned(name: str, hardware: str, *, strategy: str | None = None, **train: int) -> Plan:
    """Returns the plan of a preset by formula."""
    overrides = typed(**train) + ([Override(key="launch.strategy", text=strategy, origin="LAUNCH_STRATEGY")] if strategy else [])
    loaded, found = load_config(ROOT / "configs" / f"{name}.yaml", overrides, {}), parse_hardware(hardware)
    request = LaunchRequest(command_strategy="auto" if len(found.devices) > 1 else "single")
    return make_plan(loaded.config, loaded.typed, found, shape_of(loaded.config.model), launch=request, prepared=None)


def test_the_presets_are_those_of_the_table() -> None:
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_model_length_and_method_are_those_of_the_table(name: str) -> None:
    row, path = TABLE[name], ROOT / "configs" / f"{name}.yaml"
    config = load_config(path, (), {}).config
    assert (config.model.name, config.model.max_seq_len) == (row.model, row.length)
    assert (config.tuning.mode, config.tuning.backend) == (row.mode, row.backend)
    assert path.read_text(encoding="utf-8").startswith("# yaml-language-server: $schema=schema.json\n# ")
    if name.startswith("l40s"):
        assert (config.train.epochs, config.train.learning_rate) == (4, 5e-5)
    if name == "home_lan":
        assert (config.tuning.lora.r, config.tuning.lora.target_modules) == (16, ["q_proj", "v_proj"])
    if name == "from_scratch":
        model = config.model
        assert (model.init, model.hidden_size, model.attention_heads, model.layers) == ("random", 1024, 16, 12)
        assert (model.vocab_size, config.train.global_batch_size) == (50_000, 32)
        assert f"{shape_of(model).parameters // 10**6} million parameters" in path.read_text(encoding="utf-8")
    if name == "smoke":
        assert (config.train.batch_size, config.train.epochs) == (1, 1)


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row.quoted])
def test_the_global_batch_is_the_quoted_one_and_fits_exactly_where_the_comment_says_so(name: str) -> None:
    row, path = TABLE[name], ROOT / "configs" / f"{name}.yaml"
    assert row.quoted and row.hardware
    micro, accumulation = row.quoted
    hardware = parse_hardware(row.hardware)
    comment = " ".join(line.lstrip("# ") for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
    loaded = load_config(path, typed(batch_size=micro, grad_accum=accumulation), {})
    rows = micro * accumulation * len(hardware.devices)
    assert load_config(path, (), {}).config.train.global_batch_size == rows
    assert loaded.config.train.global_batch_size == "auto"  # two typed numbers outrank it
    assert str(rows) in comment and ("fit" in comment or row.fits)
    if row.fits:
        planned(name, row.hardware, batch_size=micro, grad_accum=accumulation)
    else:
        with pytest.raises(DoesNotFitError, match="does not fit") as error:
            planned(name, row.hardware, batch_size=micro, grad_accum=accumulation)
        # What fits beside it makes the same step.
        plan = planned(name, row.hardware)
        assert plan.ranks[0].micro_batch < micro and error.value.micro_batch == micro and plan.global_batch_size == rows


# Every preset on every machine that it is for: by name, by the memory that its comment states, and joined as it says.
MACHINES = [
    ("run_bnb", "16GB"), ("run_bnb", "24GB"), ("run_bnb", "T4"), ("run_unsloth", "16GB"), ("run_unsloth", "24GB"), ("rtx4090_sli", "2x24GB"),
    ("rtx4090_sli", "2xRTX3090"), ("a100_pair", "2x80GB"), ("a100_pair", "2xA100"), ("h100_pair", "2x80GB"), ("h100_pair", "2xH100PCIe"),
    ("h200_pair", "2x141GB"), ("h200_pair", "2xH200NVL"), ("h200_quad", "4x141GB"), ("l40s_single", "48GB"), ("l40s_pair", "2x48GB@10Gbit"),
    ("home_lan", "RTX5070TiLaptop+RTX3070Ti+RTX4070Laptop@1Gbit"), ("home_lan_13b", "RTX5070TiLaptop+RTX3070Ti+RTX4070Laptop@1Gbit"),
    ("smoke", "8GB+8GB@1Gbit"), ("smoke", "RTX4060"), ("smoke", "cpu"), ("quickstart", "cpu"), ("quickstart", "8GB"), ("run_cpu", "cpu"),
    ("from_scratch", "8GB"), ("from_scratch", "2x24GB"), ("from_scratch", "cpu"), ("cpu_qwen3_5", "cpu"), ("run_bnb_qwen3_5", "16GB"),
    ("run_bnb_qwen3_5", "24GB"), ("rtx4090_sli_gemma4", "2x24GB"), ("home_lan_smollm3", LAN + "@1Gbit"), ("h200_pair_gemma4", "2xH200"),
    ("h200_single_gpt_oss", "H200"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "hardware"), MACHINES)
def test_presets_are_planned_on_all_hardware_that_they_claim(name: str, hardware: str) -> None:
    plan = planned(name, hardware)
    assert all(rank.peak_bytes <= rank.capacity_bytes for rank in plan.ranks) and not plan.remedies
    config = load_config(ROOT / "configs" / f"{name}.yaml", (), {}).config
    rows = 32 if config.train.global_batch_size == "auto" else config.train.global_batch_size
    assert plan.global_batch_size == rows <= sum(rank.micro_batch * rank.accumulation for rank in plan.ranks)
    assert plan.optim == "adamw_torch_fused" or config.tuning.mode == "full"


def test_full_tuning_on_the_l40s_takes_8_bit_states_as_its_comment_says() -> None:
    override = [Override(key="tuning.mode", text="full", origin="TUNING_MODE=full")]
    loaded = load_config(ROOT / "configs" / "l40s_single.yaml", override, {})
    plan = make_plan(
        loaded.config, loaded.typed, parse_hardware("L40S"), shape_of(loaded.config.model), launch=LaunchRequest(), prepared=None
    )  # fmt: skip
    assert plan.optim == "adamw_bnb_8bit" and plan.global_batch_size == 8


def test_the_13b_preset_says_why_it_shares_out_weights() -> None:
    with pytest.raises(DoesNotFitError) as error:
        planned("home_lan_13b", LAN, strategy="ddp")
    assert error.value.parts["frozen"] + error.value.parts["quant_state"] == pytest.approx(
        6.7 * GIB, rel=0.01
    )  # as its comment says
    plan = planned("home_lan_13b", LAN + "@1Gbit")
    (loud,) = [reason for reason in plan.reasons if reason.startswith("SLOW: ")]
    assert "`launch.strategy` forces fsdp2 over a network of 118 MB/s" in loud
    assert float(loud.split("micro-step waits ")[1].split(" s ")[0]) == pytest.approx(120, abs=10)  # "about two minutes"


# docs/presets.md.


@pytest.mark.parametrize("page", PAGES)
def test_the_page_shows_what_the_plan_says(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert rendered(page) == text, f"{page} is stale: run `python scripts/render_presets.py`"


def test_the_documented_file_is_one_that_is_read(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```yaml\n(.*?)^```", text, re.M | re.S)
    (tmp_path / "machines.yaml").write_text(block, encoding="utf-8")
    hardware = parse_hardware(str(tmp_path / "machines.yaml"))
    assert (len(hardware.devices), hardware.nodes, hardware.ram_known) == (3, 3, True)
    assert set(re.findall(r"^[ -]*(\w+):", block, re.M)) == {*KEYS, *DEVICE_KEYS}


def test_the_page_has_every_preset_with_its_quoted_batch() -> None:
    page = (ROOT / "docs" / "presets.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in TABLE)
    claims = {claim.preset: claim for claim in CLAIMS}
    for name, row in TABLE.items():
        if row.quoted:
            assert claims[name].quoted == row.quoted, name
    for micro, accumulation in (row.quoted for row in TABLE.values() if row.quoted):
        assert f"| {micro} x {accumulation} |" in page


def test_the_prose_of_the_page_is_arithmetic() -> None:
    """What stands between the tables: numbers of the models, not of the plan's formulas."""
    llama, gemma = (shape_of(ModelConfig(name=name)) for name in ("meta-llama/Llama-2-7b-hf", GEMMA))
    assert llama.linear_parameters / 1e9 == pytest.approx(6.48, abs=0.005)
    assert llama.adapter_parameters(16, ["q_proj", "v_proj"]) == 32 * 2 * 16 * (4096 + 4096) == 8_388_608
    assert 2 * llama.vocab_size * llama.hidden_size * 2 / 1e9 == pytest.approx(0.52, abs=0.005)
    assert gemma.vocab_size * gemma.hidden_size * 2 / 1e9 == pytest.approx(2.8, abs=0.05)
    assert gemma.vision_parameters * 2 / 1e9 == pytest.approx(0.8, abs=0.07)
    assert 4 * 2048 * gemma.vocab_size * 12 / 1e9 == pytest.approx(25.8, abs=0.05)
    assert pytest.approx(9, abs=0.2) == 34 * 4096 * 32 * 2048 / 1e9
