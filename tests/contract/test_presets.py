"""The shipped presets are those of contract section 8, and what their comments say of quoted batches is what the plan finds."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from sft_play.config.call import Override
from sft_play.config.load import load_config
from sft_play.errors import UserError
from sft_play.plan.hardware import parse_hardware
from sft_play.plan.make import make_plan
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
    "run_bnb": Row(QWEN, 2048, "qlora"),
    "run_unsloth": Row(QWEN, 2048, "qlora", "unsloth"),
    "rtx4090_sli": Row("Qwen/Qwen2.5-14B-Instruct", 1536, "qlora", hardware="2x24GB", quoted=(6, 4), fits=False),
    "a100_pair": Row(GEMMA, 2048, "qlora", hardware="2xA100", quoted=(8, 4), fits=False),
    "h100_pair": Row(GEMMA, 2048, "qlora", hardware="2xH100", quoted=(8, 4), fits=False),
    "h200_pair": Row(GEMMA, 2048, "qlora", hardware="2xH200", quoted=(4, 4)),
    "h200_quad": Row("meta-llama/Llama-3.1-70B-Instruct", 4096, "qlora", hardware="4xH200", quoted=(16, 2), fits=False),
    "l40s_single": Row("HuggingFaceTB/SmolLM3-3B", 2048, "lora", hardware="L40S", quoted=(8, 1)),
    "l40s_pair": Row("HuggingFaceTB/SmolLM3-3B", 2048, "lora", hardware="2xL40S", quoted=(28, 1), fits=False),
    "home_lan": Row("meta-llama/Llama-2-7b-hf", 2048, "qlora", hardware=LAN, quoted=(1, 8)),
    "home_lan_13b": Row("meta-llama/Llama-2-13b-hf", 1024, "qlora", hardware=LAN, quoted=(1, 12)),
    "smoke": Row("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 512, "lora"),
}


def typed(**values: int) -> list[Override]:
    return [Override(key=f"train.{key}", text=str(value), origin=f"TRAIN_{key.upper()}={value}") for key, value in values.items()]


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
    assert loaded.config.train.global_batch_size == rows
    assert str(rows) in comment and ("fit" in comment or row.fits)

    def plan() -> object:
        request = LaunchRequest(command_strategy="auto" if len(hardware.devices) > 1 else "single")
        return make_plan(loaded.config, loaded.typed, hardware, shape_of(loaded.config.model), launch=request, prepared=None)

    if row.fits:
        plan()
    else:
        with pytest.raises(UserError, match="does not fit"):
            plan()
