"""What backends and quantisations rule out, known before anything is launched."""

from __future__ import annotations

import importlib.util

import pytest

from sft_play.plan.backends import conflict_for, layout_for, missing_for
from sft_play.plan.hardware import parse_hardware


def test_unsloth_without_its_package_or_a_gpu_names_what_is_missing() -> None:
    without_gpu = missing_for("unsloth", parse_hardware("cpu"))
    assert without_gpu is not None
    assert "an NVIDIA GPU" in without_gpu
    with_gpu = missing_for("unsloth", parse_hardware("1x24GB"))
    if importlib.util.find_spec("unsloth") is None:
        assert "`pip install unsloth`" in without_gpu
        assert with_gpu is not None
        assert "an NVIDIA GPU" not in with_gpu
    else:
        assert with_gpu is None


def test_bnb_runs_everywhere() -> None:
    assert missing_for("bnb", parse_hardware("cpu")) is None


@pytest.mark.parametrize(
    ("backend", "mode", "quantization", "strategy", "words"),
    [
        ("bnb", "qlora", "nf4", "zero3", "bitsandbytes#1249"),
        ("bnb", "qlora", "int8", "fsdp2", "CB"),
        ("unsloth", "lora", "nf4", "fsdp2", "`ddp` with a whole copy"),
        ("unsloth", "qlora", "int8", "single", "quantises to nf4"),
    ],
)
def test_conflicts_name_the_reason_and_the_way_out(backend: str, mode: str, quantization: str, strategy: str, words: str) -> None:
    assert words in (conflict_for(backend, mode, quantization, strategy) or "")


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero1", "zero2", "fsdp2"])
def test_nf4_goes_with_everything_but_zero3(strategy: str) -> None:
    assert conflict_for("bnb", "qlora", "nf4", strategy) is None


def test_unsloth_wants_padded_rows() -> None:
    assert layout_for("unsloth") == "padded"
    assert layout_for("bnb") is None
