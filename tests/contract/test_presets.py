"""The shipped presets are those of docs/presets.md, and quoted batches and speeds are those of the plan."""

from __future__ import annotations

import pytest

from scripts.render_presets import LAN, MADE_FOR, PAGES, QUOTED, plan_of, rendered
from sft_play.config.load import load_config
from sft_play.plan.hardware import parse_hardware
from sft_play.plan.request import DoesNotFitError
from tests.conftest import ROOT, Program
from tests.documents import documented_commands

DOES_NOT_FIT = "h200_quad"


@pytest.mark.parametrize("name", QUOTED)
def test_the_global_batch_of_a_preset_is_as_quoted_and_fits_as_its_comment_says(name: str) -> None:
    path = ROOT / "configs" / f"{name}.yaml"
    described, (micro, accumulation) = MADE_FOR[name], QUOTED[name]
    devices = parse_hardware(described).devices
    comment = " ".join(
        line.lstrip("# ") for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")
    )
    config = load_config(path, (), {}).config
    rows = micro * accumulation * (1 if config.launch.strategy == "pipeline" else len(devices))
    assert config.train.global_batch_size == rows
    assert str(rows) in comment and ("fit" in comment or name != DOES_NOT_FIT)
    if name != DOES_NOT_FIT:
        # Two typed numbers outrank the file's global batch.
        assert plan_of(name, described, batch_size=micro, grad_accum=accumulation).global_batch_size == rows
    else:
        with pytest.raises(DoesNotFitError, match="does not fit") as error:
            plan_of(name, described, batch_size=micro, grad_accum=accumulation)
        # What fits in addition makes the same step.
        plan = plan_of(name, described)
        assert plan.ranks[0].micro_batch < micro and error.value.micro_batch == micro and plan.global_batch_size == rows


# Every preset on every machine that it is for: by name, by the memory that its comment states, and joined as it says.
MACHINES = [
    ("run_bnb", "16GB"), ("run_bnb", "T4"), ("run_unsloth", "16GB"), ("rtx4090_sli", "2xRTX3090"),
    ("a100_pair", "2x80GB"),
    ("h100_pair", "2xH100PCIe"), ("h200_pair", "2xH200NVL"), ("h200_quad", "4x141GB"), ("l40s_single", "48GB"),
    ("l40s_pair", "2x48GB@10Gbit"),
    ("home_lan", LAN), ("home_lan_13b", "RTX5070TiLaptop+RTX3070Ti+RTX4070Laptop@1Gbit"),
    ("smoke", "8GB+8GB@1Gbit"), ("smoke", "cpu"), ("quickstart", "cpu"), ("run_cpu", "cpu"), ("from_scratch", "8GB"),
    ("cpu_qwen3_5", "cpu"), ("run_bnb_qwen3_5", "16GB"),
    ("rtx4090_sli_gemma4", "2x24GB"),
    ("home_lan_smollm3", LAN), ("h200_pair_gemma4", "2xH200"), ("h200_single_gpt_oss", "H200"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "hardware"), MACHINES)
def test_presets_are_planned_on_all_hardware_that_they_claim(name: str, hardware: str) -> None:
    plan = plan_of(name, hardware)
    assert all(rank.peak_bytes <= rank.capacity_bytes for rank in plan.ranks)
    config = load_config(ROOT / "configs" / f"{name}.yaml", (), {}).config
    rows = 32 if config.train.global_batch_size == "auto" else config.train.global_batch_size
    assert plan.global_batch_size == rows <= sum(rank.micro_batch * rank.accumulation for rank in plan.ranks)
    assert plan.optim == "adamw_torch_fused" or config.tuning.mode == "full"


# Pages.


@pytest.mark.parametrize("page", PAGES)
def test_the_page_matches_the_plan(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert rendered(page) == text, f"{page} is stale: run `python scripts/render_presets.py`"


FORECAST = (ROOT / "docs" / "forecast.md").read_text(encoding="utf-8")
HEADING = FORECAST.index("## Speeds that people quote")
COMMANDS = [
    command.words[2:]
    for command in documented_commands()
    if command.document == "docs/forecast.md" and command.line > FORECAST.count("\n", 0, HEADING)
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words)[:60])
def test_speeds_on_the_page_are_those_of_the_plan(in_process: Program, words: list[str]) -> None:
    assert len(COMMANDS) >= 5
    plan = in_process("plan", *words, "JSON=1").json
    for speed in [row["tokens_per_second"] for row in plan.get("scale", [])] or [plan["tokens_per_second"]]:
        assert f"{speed:,.0f}" in FORECAST[HEADING:], words
