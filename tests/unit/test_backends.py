"""What backends and kernels rule out, and target modules that a model lacks, known before anything is launched."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from sft_play.config.schema import Config, ModelConfig, TrainConfig, TuningConfig
from sft_play.errors import HardwareError, UserError
from sft_play.model.lora import find_targets
from sft_play.plan.architecture import shape_of
from sft_play.plan.choices import choose_kernels
from sft_play.plan.hardware import parse_hardware
from sft_play.plan.request import Request
from sft_play.plan.strategies import conflict_for
from tests.families import tiny_model


def request(where: str, kernels: Any = "auto", **tuning: Any) -> Request:
    config = Config(
        model=ModelConfig(name="meta-llama/Meta-Llama-3-8B"),
        tuning=TuningConfig(**tuning),
        train=TrainConfig(kernels=kernels),
    )
    return Request(config=config, hardware=parse_hardware(where), shape=shape_of(config.model))


@pytest.mark.parametrize(
    ("where", "tuning", "message"),
    [
        ("cpu", {}, "need an NVIDIA GPU"),
        ("H100", {"backend": "unsloth", "mode": "qlora"}, "unsloth has its own kernels"),
        ("H100", {}, "the package `liger-kernel` is not installed"),
    ],
)
def test_kernels_that_cannot_run_are_refused_if_typed_and_else_omitted(
    where: str, tuning: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec, reasons = importlib.util.find_spec, dict[str, str]()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "liger_kernel" else find_spec(name))
    assert choose_kernels(request(where, **tuning), reasons) == "off"
    assert (message in "".join(reasons.values())) is (where != "cpu"), "nobody asked about kernels on a CPU"
    with pytest.raises(HardwareError) as caught:
        choose_kernels(request(where, "liger", **tuning), {})
    assert message in caught.value.message
    assert ("pip install" in str(caught.value.hint)) is ("installed" in message)


def test_installed_kernels_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    reasons = dict[str, str]()
    assert choose_kernels(request("H100"), reasons) == "liger" and "kernels liger" in reasons["kernels"]
    assert choose_kernels(request("H100", "off"), {}) == "off"


@pytest.mark.parametrize(
    ("backend", "mode", "quantization", "strategy", "words"),
    [
        ("bnb", "qlora", "int8", "zero3", "`CB`"),
        ("unsloth", "lora", "nf4", "fsdp2", "`ddp` with a copy on each"),
        ("unsloth", "qlora", "int8", "single", "quantises to nf4"),
    ],
)
def test_conflicts_name_the_reason_and_the_way_out(
    backend: Any, mode: Any, quantization: Any, strategy: str, words: str
) -> None:
    assert words in (conflict_for(TuningConfig(backend=backend, mode=mode, quantization=quantization), strategy) or "")


# Target modules that a model does not have.


def test_a_name_that_matches_nothing_is_refused_with_the_available_ones() -> None:
    with pytest.raises(UserError, match="names `query`") as caught:
        find_targets(tiny_model("llama", "meta"), ["q_proj", "query", "c_attn"])
    layers = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert all(f"`{name}`" in (caught.value.hint or "") for name in layers)
