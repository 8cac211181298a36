"""Machines that are not here, from `make plan` to the refusal of `make train`: what a user of each of them reads (B20)."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sft_play.errors import HardwareError
from sft_play.model.use import best_device
from sft_play.plan.detect import detect
from sft_play.training.ranks import check_world
from tests.conftest import Program
from tests.nvml_double import A100_SPLIT, MACHINES, MISMATCH, RTX3090, RTX4090, Machine, emulated, move_to
from tests.plans import simple_plan

KERNEL = os.uname()
QLORA = ("CONFIG=configs/run_bnb.yaml", "JSON=1")


@pytest.mark.parametrize(
    ("name", "device", "strategy", "precision", "ranks"),
    [
        ("t4", "Tesla T4", "single", "fp16", 1), ("unlike_pair", "NVIDIA GeForce RTX 4070", "ddp", "bf16", 2),
        ("mig", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", "single", "bf16", 1),
    ],
)  # fmt: skip
def test_plans(
    in_process: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, device: str, strategy: str, precision: str, ranks: int
) -> None:  # fmt: skip
    move_to(monkeypatch, MACHINES[name], tmp_path)
    plan = in_process("plan", *QLORA, env=emulated(tmp_path, name)).json
    assert (plan["ranks"][0]["device_name"], plan["strategy"], plan["precision"]) == (device, strategy, precision)
    assert plan["world_size"] == ranks and plan["expandable_segments"]


def test_a_slice_is_planned_with_its_own_memory_and_share_of_the_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    move_to(monkeypatch, MACHINES["mig"], tmp_path)
    (largest,) = detect().devices
    assert (largest.memory_bytes, largest.free_bytes) == (int(39.25 * 2**30), int(39.2 * 2**30))
    assert largest.peak_flops == pytest.approx(312e12 * 3 / 7) and largest.bandwidth == pytest.approx(2039e9 * 39.25 / 79.2)
    move_to(monkeypatch, Machine(cards=(A100_SPLIT, RTX4090)), tmp_path)  # a process sees whole cards, or one slice
    assert [device.name for device in detect().devices] == ["NVIDIA GeForce RTX 4090"]


def test_wsl2_is_planned_without_expandable_segments(program: Program, tmp_path: Path) -> None:
    plan = program("plan", *QLORA, env=emulated(tmp_path / "wsl", "wsl2")).json
    linux = program("plan", *QLORA, env=emulated(tmp_path / "linux", "rtx4090")).json
    assert not plan["expandable_segments"] and any("WSL2's driver fails" in reason for reason in plan["reasons"])
    lost, least = (one["ranks"][0]["memory_bytes"]["fragmentation"] for one in (plan, linux))
    assert lost > least


ONE, PAIR = MACHINES["rtx4090"], MACHINES["rtx3090_pair"]
REFUSED: dict[str, tuple[Machine, str, str]] = {
    "V100": (MACHINES["v100"], "", "torch 2.13.0+cu130 has no code for Tesla V100-SXM2-16GB (compute capability 7.0); it has sm_75, sm_80"),
    "driver": (MACHINES["old_driver"], "", "torch 2.13.0+cu130 is built for CUDA 13.0, driver 550.54.14 is for 12.4"),
    "CPU build": (
        MACHINES["cpu_torch"], "", "this machine has 1 GPU, but torch 2.13.0+cpu is a build without CUDA: training would use the CPU",
    ),
    "rights": (
        MACHINES["mig_without_rights"], "",
        "GPU 0 (NVIDIA A100-SXM4-80GB) is split by MIG, and none of its slices can be used here: Insufficient Permissions",
    ),
    "slice that is gone": (MACHINES["mig"], "MIG-2222", "CUDA_VISIBLE_DEVICES=`MIG-2222` names MIG-2222, but no GPU here has it"),
    "index": (ONE, "0,7", "CUDA_VISIBLE_DEVICES=`0,7` names 7, but this machine has 1 GPU"),
    "prohibited": (Machine(cards=(replace(RTX4090, mode=2),)), "", "torch 2.13.0+cu130 cannot use GPU 0 (NVIDIA GeForce RTX 4090): "),
    "lost": (Machine(cards=(RTX3090, replace(RTX3090, lost=True))), "", "GPU 1 of 2 does not answer: GPU is lost"),
    "updated driver": (
        Machine(cards=(RTX4090,), broken=MISMATCH), "", "the NVIDIA driver fails: RM has detected an NVML/RM version mismatch.",
    ),
}  # fmt: skip
"""What -> machine, `CUDA_VISIBLE_DEVICES`, and the message."""
ASKS_TORCH = ("V100", "driver", "CPU build", "prohibited")


@pytest.mark.parametrize("what", REFUSED)
def test_training_is_refused_before_there_is_a_run(
    program: Program, in_process: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    machine, shown, message = REFUSED[what]
    asks = what in ASKS_TORCH
    if not asks:
        move_to(monkeypatch, machine, tmp_path / "machine")
    env = machine.environment(tmp_path / "machine", torch=asks) | ({"CUDA_VISIBLE_DEVICES": shown} if shown else {})
    done = (program if asks else in_process)("train", "CONFIG=configs/quickstart.yaml", "RUN_NAME=never", env=env)
    assert done.code == 3 and f"error: {message}" in done.err and "hint: " in done.err, done.err
    assert not (tmp_path / "runs").exists()


def test_the_plan_says_what_torch_cannot_use(program: Program, tmp_path: Path) -> None:
    done = program("plan", *QLORA, env=emulated(tmp_path, "v100", torch=True))
    assert done.code == 0 and done.json["device"] == "cuda"
    assert "warning: torch 2.13.0+cu130 has no code for Tesla V100-SXM2-16GB (compute capability 7.0)\nhint: " in done.err
    fine = program("plan", *QLORA, env=emulated(tmp_path, "t4", torch=True))
    assert fine.code == 0 and "warning" not in fine.err


def test_a_lost_card_can_be_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_process: Program) -> None:
    machine = Machine(cards=(replace(RTX3090, lost=True), RTX3090))
    move_to(monkeypatch, machine, tmp_path)
    env = machine.environment(tmp_path)
    assert "`CUDA_VISIBLE_DEVICES=1` continues without it" in in_process("gpu-info", env=env).err
    facts = in_process("memory-check", "CONFIG=configs/quickstart.yaml", "JSON=1", env=env | {"CUDA_VISIBLE_DEVICES": "1"}).json
    assert facts["devices"][0]["device"] == facts["need"]["ranks"][0]["device"] == "cuda:1"


def test_answers_use_one_card_or_say_why_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    if torch.version.cuda:
        pytest.skip("this torch is built with CUDA")
    move_to(monkeypatch, MACHINES["unlike_pair"], tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert best_device() == "cpu"
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"]) == ("1", "PCI_BUS_ID")
    assert "is a build without CUDA" in capsys.readouterr().err


def test_a_worker_that_sees_two_cards_is_refused() -> None:
    one = SimpleNamespace(distributed_type="NO", num_processes=1)
    plan = simple_plan(device="cuda")
    check_world(plan, one, 1)
    with pytest.raises(HardwareError, match="sees 2 GPUs and would train under torch's DataParallel"):
        check_world(plan, one, 2)


def test_other_makers_gpus_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_process: Program) -> None:
    move_to(monkeypatch, Machine(cards=(), broken=12), tmp_path)
    monkeypatch.setattr("os.uname", lambda: os.uname_result(("Darwin", *KERNEL[1:])))
    env = Machine(cards=(), broken=12).environment(tmp_path)
    plan = in_process("plan", "CONFIG=configs/quickstart.yaml", "JSON=1", env=env)
    said = "training runs on the CPU: Apple's GPUs (MPS) are not supported"
    assert plan.code == 0 and said in plan.json["reasons"], plan.err
    assert said in in_process("gpu-info", env=env).out
