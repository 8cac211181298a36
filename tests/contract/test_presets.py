"""The shipped presets are those of contract section 8, and what their comments say of quoted batches is what the plan finds."""

from __future__ import annotations

import pytest

from scripts.render_presets import PAGES, rendered
from sft_play.config.layers import Override
from sft_play.config.load import load_config
from sft_play.plan.hardware import parse_hardware
from sft_play.plan.plan import LaunchRequest, Plan
from sft_play.plan.request import DoesNotFitError
from tests import plans
from tests.conftest import ROOT

LAN = "12GB+8GB+8GB"
QUOTED = {
    "rtx4090_sli": ("2x24GB", 6, 4), "a100_pair": ("2xA100", 8, 4), "h100_pair": ("2xH100", 8, 4), "h200_pair": ("2xH200", 4, 4),
    "h200_quad": ("4xH200", 16, 2), "l40s_single": ("L40S", 8, 1), "l40s_pair": ("2xL40S", 28, 1), "home_lan": (LAN, 1, 8),
    "home_lan_13b": (LAN, 1, 36),
}  # fmt: skip
"""Hardware, micro-batch and accumulation that people quote of a preset."""
DOES_NOT_FIT = "h200_quad"


def typed(**values: int) -> list[Override]:
    return [Override(key=f"train.{key}", text=str(value), origin=f"TRAIN_{key.upper()}={value}") for key, value in values.items()]


def planned(name: str, hardware: str, *, strategy: str | None = None, **train: int) -> Plan:
    """Returns the plan of a preset by formula."""
    overrides = typed(**train) + ([Override(key="launch.strategy", text=strategy, origin="LAUNCH_STRATEGY")] if strategy else [])
    loaded, found = load_config(ROOT / "configs" / f"{name}.yaml", overrides, {}), parse_hardware(hardware)
    request = LaunchRequest(command_strategy="auto" if len(found.devices) > 1 else "single")
    return plans.planned(loaded, found, request)


@pytest.mark.parametrize("name", QUOTED)
def test_the_global_batch_is_the_quoted_one_and_fits_exactly_where_the_comment_says_so(name: str) -> None:
    path = ROOT / "configs" / f"{name}.yaml"
    described, micro, accumulation = QUOTED[name]
    hardware = parse_hardware(described)
    comment = " ".join(line.lstrip("# ") for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
    loaded = load_config(path, typed(batch_size=micro, grad_accum=accumulation), {})
    groups = 1 if loaded.config.launch.strategy == "pipeline" else len(hardware.devices)
    rows = micro * accumulation * groups
    assert load_config(path, (), {}).config.train.global_batch_size == rows
    assert loaded.config.train.global_batch_size == "auto"  # two typed numbers outrank it
    assert str(rows) in comment and ("fit" in comment or name != DOES_NOT_FIT)
    if name != DOES_NOT_FIT:
        planned(name, described, batch_size=micro, grad_accum=accumulation)
    else:
        with pytest.raises(DoesNotFitError, match="does not fit") as error:
            planned(name, described, batch_size=micro, grad_accum=accumulation)
        # What fits beside it makes the same step.
        plan = planned(name, described)
        assert plan.ranks[0].micro_batch < micro and error.value.micro_batch == micro and plan.global_batch_size == rows


# Every preset on every machine that it is for: by name, by the memory that its comment states, and joined as it says.
MACHINES = [
    ("run_bnb", "16GB"), ("run_bnb", "T4"), ("run_unsloth", "16GB"), ("rtx4090_sli", "2xRTX3090"), ("a100_pair", "2x80GB"),
    ("h100_pair", "2xH100PCIe"), ("h200_pair", "2xH200NVL"), ("h200_quad", "4x141GB"), ("l40s_single", "48GB"), ("l40s_pair", "2x48GB@10Gbit"),
    ("home_lan", LAN + "@1Gbit"), ("home_lan_13b", "RTX5070TiLaptop+RTX3070Ti+RTX4070Laptop@1Gbit"),
    ("smoke", "8GB+8GB@1Gbit"), ("smoke", "cpu"), ("quickstart", "cpu"),
    ("run_cpu", "cpu"), ("from_scratch", "8GB"), ("cpu_qwen3_5", "cpu"), ("run_bnb_qwen3_5", "16GB"), ("rtx4090_sli_gemma4", "2x24GB"),
    ("home_lan_smollm3", LAN + "@1Gbit"), ("h200_pair_gemma4", "2xH200"), ("h200_single_gpt_oss", "H200"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "hardware"), MACHINES)
def test_presets_are_planned_on_all_hardware_that_they_claim(name: str, hardware: str) -> None:
    plan = planned(name, hardware)
    assert all(rank.peak_bytes <= rank.capacity_bytes for rank in plan.ranks) and not plan.remedies
    config = load_config(ROOT / "configs" / f"{name}.yaml", (), {}).config
    rows = 32 if config.train.global_batch_size == "auto" else config.train.global_batch_size
    assert plan.global_batch_size == rows <= sum(rank.micro_batch * rank.accumulation for rank in plan.ranks)
    assert plan.optim == "adamw_torch_fused" or config.tuning.mode == "full"


# docs/presets.md.


@pytest.mark.parametrize("page", PAGES)
def test_the_page_shows_what_the_plan_says(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert rendered(page) == text, f"{page} is stale: run `python scripts/render_presets.py`"
