"""Calibration: lines through measured steps, kept per device, and used for that device alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sft_play.plan.calibration import Calibration, Link, StepFit, calibration_path, load_calibration
from sft_play.plan.hardware import GIB, Device, Hardware, parse_hardware

WORK = {
    "mode": "lora",
    "precision": "fp32",
    "gradient_checkpointing": False,
    "layout": "flattened",
    "attention": "sdpa",
    "layers": 30,
}


def fit(**changes: Any) -> StepFit:
    values: dict[str, Any] = {
        "work": WORK, "model": "small", "seconds_per_micro_step": 0.05, "flops_per_second": 1e11, "threads": 2.0, "layers": 30,
        "flops_per_token": 5e8, "points": 10, "spread": 0.02, "measured": "2026-11-21",
    }  # fmt: skip
    return StepFit(**(values | changes))


def calibration(device: str = "a CPU", kind: str = "cpu", **changes: Any) -> Calibration:
    values: dict[str, Any] = {
        "threads": 2, "measured": "2026-11-21", "versions": {"torch": "2.13.0"}, "matmul_flops": {"512": 1e11, "2048": 1.2e11},
        "bandwidth": 9e9, "links": {"gloo": Link(ranks=2, latency_seconds=1e-4, bytes_per_second=2e9)}, "steps": (fit(),),
    }  # fmt: skip
    return Calibration(device=device, kind=kind, **(values | changes))


def cpu(name: str = "a CPU") -> Hardware:
    device = Device(name=name, memory_bytes=8 * GIB, free_bytes=8 * GIB, bf16=False)
    return Hardware(kind="cpu", devices=(device,), cpu_threads=2, ram_bytes=8 * GIB)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))


def test_it_is_kept_and_found_again(tmp_path: Path) -> None:
    path = calibration().save()
    assert path == tmp_path / "cache" / "calibration" / "a-cpu.json" == calibration_path("a CPU")
    assert load_calibration(cpu()) == calibration()
    assert load_calibration(cpu("another CPU")) is None


@pytest.mark.parametrize(
    ("measured", "described", "same"),
    [
        ("NVIDIA H200", "H200", True),
        ("NVIDIA GeForce RTX 4090", "2xRTX4090", True),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", "RTX4070", False),
        ("NVIDIA H100 80GB HBM3", "H100NVL", False),
        ("NVIDIA H200", "H200+H100", False),
        ("NVIDIA H200", "141GB", False),
    ],
)
def test_described_hardware_gets_it_only_by_the_same_name(measured: str, described: str, same: bool) -> None:
    calibration(measured, "cuda").save()
    assert (load_calibration(parse_hardware(described)) is not None) == same


@pytest.mark.parametrize(
    "damage", ["{", "[]", "null", '{"format": 1}', '{"format": 0}', '{"format": 1, "links": {}, "steps": [{}]}']
)
def test_a_file_that_makes_no_sense_counts_as_none(damage: str) -> None:
    path = calibration().save()
    path.write_text(damage, encoding="utf-8")
    assert load_calibration(cpu()) is None
    calibration().save()
    assert load_calibration(cpu()) is not None
