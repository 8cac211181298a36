"""`make gpu-info` and `make memory-check`, with cards, without, and with a driver that does not answer (C5, C6)."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import Program
from tests.nvml_double import NOT_LOADED, Gpu, Machine

H200 = Gpu("NVIDIA H200", 139.8, 130.0, (9, 0))
T4 = Gpu("Tesla T4", 14.7, 14.0, (7, 5))


def test_without_a_driver_the_cpu_is_reported(program: Program, tmp_path: Path) -> None:
    env = Machine(cards=(), broken=NOT_LOADED).environment(tmp_path / "nvml")
    done = program("gpu-info", env=env)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0] == "Number of GPUs: 0"
    assert lines[1] == "  no NVIDIA driver answers on this machine"
    assert lines[-1].startswith("CPU: ") and "threads" in lines[-1]


def test_two_different_cards_are_listed_with_their_memory(program: Program, tmp_path: Path) -> None:
    env = Machine(cards=(H200, T4)).environment(tmp_path / "nvml")
    lines = program("gpu-info", env=env).out.splitlines()
    assert lines[:2] == ["Number of GPUs: 2", "  driver 580.65.06, CUDA 13.0"]
    assert lines[2] == "  0: NVIDIA H200, 139.8 GiB (130.0 free), compute capability 9.0, bf16 yes, fp8 yes"
    assert lines[3] == "  1: Tesla T4, 14.7 GiB (14.0 free), compute capability 7.5, bf16 no, fp8 no"
    assert lines[4] == "  0 - 1: one PCIe host bridge"
    facts = program(
        "gpu-info", "JSON=1", env=Machine(cards=(H200, H200), linked=True).environment(tmp_path / "nvml")
    ).json
    assert facts["links"] == [{"from": 0, "to": 1, "link": "NVLink x 4"}]


def test_hidden_cards_are_not_counted(program: Program, tmp_path: Path) -> None:
    env = Machine(cards=(H200, T4)).environment(tmp_path / "nvml")
    shown = program("gpu-info", env=env | {"CUDA_VISIBLE_DEVICES": "1"}).out
    assert (
        shown.startswith("Number of GPUs: 1\n")
        and "CUDA_VISIBLE_DEVICES=1" in shown
        and "Tesla T4" in shown
        and "H200" not in shown
    )
    none = program("gpu-info", env=env | {"CUDA_VISIBLE_DEVICES": ""}).out.splitlines()
    assert none[:2] == ["Number of GPUs: 0", "  CUDA_VISIBLE_DEVICES= hides all 2"]


def test_memory_check_compares_cards_with_a_configuration(program: Program, tmp_path: Path) -> None:
    env = Machine(cards=(H200, T4)).environment(tmp_path / "nvml")
    done = program("memory-check", "CONFIG=configs/run_bnb.yaml", env=env | {"CUDA_VISIBLE_DEVICES": "0"})
    assert done.code == 0, done.err
    assert "cuda:0  NVIDIA H200: 9.80 GiB of 140 GiB used, 130 GiB free" in done.out
    assert "3.00 GiB  " in done.out and "(pid " in done.out
    assert "rank 0: NVIDIA H200, micro-batch " in done.out and "  frozen " in done.out
    facts = program("memory-check", "JSON=1", env=env).json
    assert [device["name"] for device in facts["devices"]] == ["NVIDIA H200", "Tesla T4"] and facts["need"] is None


def test_a_model_that_does_not_fit_is_an_error(program: Program, tmp_path: Path) -> None:
    small = Gpu("NVIDIA GeForce RTX 3070 Ti", 7.8, 3.0, (8, 6))
    env = Machine(cards=(small,)).environment(tmp_path / "nvml")
    full = program("memory-check", "CONFIG=configs/run_bnb.yaml", "JSON=1", "SOURCE=formula", "NUM_GPUS=1", env=env)
    assert full.code == 3 and full.json["devices"][0]["free_bytes"] and not full.json["need"]["fits"]
    assert full.json["need"]["memory_bytes"]["frozen"] > 0 and full.json["need"]["remedies"]
    assert "not even one row" in full.err and "hint: " in full.err


def test_a_chip_without_separate_memory_is_listed_with_the_machines(program: Program, tmp_path: Path) -> None:
    """GB10 and Jetson: the driver knows no memory of the GPU, nor who holds it."""
    env = Machine(cards=(Gpu("NVIDIA GB10", 0, 0, (12, 1), unified=True),)).environment(tmp_path / "nvml")
    facts = program("gpu-info", "JSON=1", env=env).json
    assert facts["gpus"][0]["memory_bytes"] == facts["cpu"]["memory_bytes"]
    (device,) = program("memory-check", "JSON=1", env=env).json["devices"]
    assert device["device"] == "cuda:0" and device["processes"] == [] and device["free_bytes"] > 0
    plan = program("plan", "CONFIG=configs/quickstart.yaml", "JSON=1", env=env).json
    assert plan["device"] == "cuda" and 0 < plan["ranks"][0]["capacity_bytes"] < facts["cpu"]["memory_bytes"]
