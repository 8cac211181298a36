"""What users of other machines read, from `make plan` to the refusal of `make train` (B20)."""

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
from tests.conftest import Program, on_machine
from tests.nvml_double import A100_SPLIT, MACHINES, MISMATCH, NOT_LOADED, RTX3090, RTX4090, Machine, emulated
from tests.plans import simple_plan

QLORA = ("CONFIG=configs/run_bnb.yaml", "JSON=1")


def test_two_unlike_cards_are_planned_together(in_process: Program, tmp_path: Path) -> None:
    plan = in_process("plan", *QLORA, env=emulated(tmp_path, "unlike_pair")).json
    names = [rank["device_name"] for rank in plan["ranks"]]
    assert (names, plan["strategy"]) == (["NVIDIA GeForce RTX 4070", "NVIDIA GeForce RTX 4080"], "ddp")


def test_a_slice_is_planned_with_its_own_memory(tmp_path: Path) -> None:
    with on_machine(emulated(tmp_path, "mig")):
        (largest,) = detect().devices
    assert (largest.memory_bytes, largest.free_bytes) == (int(39.25 * 2**30), int(39.2 * 2**30))
    assert largest.peak_flops is largest.bandwidth is None
    with on_machine(
        Machine(cards=(A100_SPLIT, RTX4090)).environment(tmp_path)
    ):  # a process sees whole cards, or one slice
        assert [device.name for device in detect().devices] == ["NVIDIA GeForce RTX 4090"]


def test_wsl2_is_planned_without_expandable_segments(in_process: Program, tmp_path: Path) -> None:
    plan, linux = (in_process("plan", *QLORA, env=emulated(tmp_path, name)).json for name in ("wsl2", "rtx4090"))
    assert not plan["expandable_segments"] and any(
        "WSL2's driver fails" in reason for reason in plan["reasons"].values()
    )
    lost, least = (plan_json["ranks"][0]["memory_bytes"]["fragmentation"] for plan_json in (plan, linux))
    assert lost > least


@pytest.mark.parametrize("line", ["use_cpu: true\ndistributed_type: MULTI_GPU", "distributed_type: MULTI_CPU"])
def test_an_accelerate_file_that_asks_for_the_cpu_leaves_gpus_alone(
    in_process: Program, tmp_path: Path, line: str
) -> None:
    file = tmp_path / "acc.yaml"
    file.write_text(f"{line}\nnum_processes: 2\n")
    env, words = emulated(tmp_path / "machine", "unlike_pair"), ("CONFIG=configs/quickstart.yaml", "JSON=1")
    done = in_process("plan", *words, f"ACCELERATE_CONFIG={file}", env=env)
    assert (done.json["device"], done.json["world_size"]) == ("cpu", 2) and "GPUs are left alone" in done.err, done.err
    assert in_process("plan", *words, env=env).json["device"] == "cuda"
    in_process("plan", *words, f"ACCELERATE_CONFIG={file}", "HARDWARE=2xA100").refused(
        2, "asks for the CPU", "HARDWARE=cpu"
    )


REFUSED: dict[str, tuple[Machine, str, str]] = {
    "V100": (
        MACHINES["v100"], "",
        "torch 2.13.0+cu130 has no code for Tesla V100-SXM2-16GB (compute capability 7.0); it has sm_75, sm_80"
    ),
    "driver": (MACHINES["old_driver"], "", "torch 2.13.0+cu130 is built for CUDA 13.0, driver 550.54.14 is for 12.4"),
    "CPU build": (
        MACHINES["cpu_torch"], "",
        "this machine has 1 GPU, but torch 2.13.0+cpu is a build without CUDA: training would use the CPU",
    ),
    "rights": (
        MACHINES["mig_without_rights"], "",
        "GPU 0 (NVIDIA A100-SXM4-80GB) is split by MIG, and none of its slices can be used here: Insufficient "
        "Permissions",
    ),
    "slice that is gone": (
        MACHINES["mig"], "MIG-2222", "CUDA_VISIBLE_DEVICES=`MIG-2222` names MIG-2222, but no GPU here has it"
    ),
    "index": (MACHINES["rtx4090"], "0,7", "CUDA_VISIBLE_DEVICES=`0,7` names 7, but this machine has 1 GPU"),
    "prohibited": (
        Machine(cards=(replace(RTX4090, mode=2),)), "",
        "torch 2.13.0+cu130 cannot use GPU 0 (NVIDIA GeForce RTX 4090): "
    ),
    "lost": (Machine(cards=(RTX3090, replace(RTX3090, lost=True))), "", "GPU 1 of 2 does not answer: GPU is lost"),
    "updated driver": (
        Machine(cards=(RTX4090,), broken=MISMATCH), "",
        "the NVIDIA driver fails: RM has detected an NVML/RM version mismatch.",
    ),
}  # fmt: skip
"""What -> machine, `CUDA_VISIBLE_DEVICES`, and the message."""


@pytest.mark.parametrize("what", REFUSED)
def test_training_is_refused_before_a_run_exists(in_process: Program, tmp_path: Path, what: str) -> None:
    machine, shown, message = REFUSED[what]
    env = machine.environment(tmp_path / "machine", torch=True) | ({"CUDA_VISIBLE_DEVICES": shown} if shown else {})
    done = in_process("train", "CONFIG=configs/quickstart.yaml", "RUN_NAME=never", env=env)
    done.refused(3, f"error: {message}", "hint: ")
    assert not (tmp_path / "runs").exists()


def test_the_plan_says_what_torch_cannot_use(program: Program, tmp_path: Path) -> None:
    done = program("plan", *QLORA, env=emulated(tmp_path, "v100", torch=True))
    assert done.code == 0 and done.json["device"] == "cuda"
    warning = "warning: torch 2.13.0+cu130 has no code for Tesla V100-SXM2-16GB (compute capability 7.0)\nhint: "
    assert warning in done.err
    job = program("slurm", QLORA[0], f"OUT={tmp_path / 'job.sh'}", env=emulated(tmp_path, "v100", torch=True))
    assert job.code == 0 and warning in job.err, job.err
    fine = program("plan", *QLORA, env=emulated(tmp_path, "t4", torch=True))
    assert fine.code == 0 and "warning" not in fine.err


def test_a_lost_card_can_be_excluded(tmp_path: Path, in_process: Program) -> None:
    env = Machine(cards=(replace(RTX3090, lost=True), RTX3090)).environment(tmp_path)
    assert "`CUDA_VISIBLE_DEVICES=1` continues without it" in in_process("gpu-info", env=env).err
    facts = in_process(
        "memory-check", "CONFIG=configs/quickstart.yaml", "JSON=1", env=env | {"CUDA_VISIBLE_DEVICES": "1"}
    ).json
    assert facts["devices"][0]["device"] == "cuda:1" and len(facts["need"]["ranks"]) == 1


def test_answers_use_one_card_or_say_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.version.cuda:
        pytest.skip("this torch is built with CUDA")
    with on_machine(
        emulated(tmp_path, "unlike_pair") | {"CUDA_VISIBLE_DEVICES": "0,1", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    ):
        assert best_device() == "cpu"
        assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"]) == ("1", "PCI_BUS_ID")
    assert "is a build without CUDA" in capsys.readouterr().err


def test_a_worker_that_sees_two_cards_is_refused() -> None:
    state = SimpleNamespace(distributed_type="NO", num_processes=1)
    plan = simple_plan(device="cuda")
    check_world(plan, state, 1)
    with pytest.raises(HardwareError, match="sees 2 GPUs and would train under torch's DataParallel"):
        check_world(plan, state, 2)


def test_other_makers_gpus_are_named(tmp_path: Path, in_process: Program) -> None:
    env = Machine(cards=(), broken=NOT_LOADED, system="Darwin").environment(tmp_path)
    plan = in_process("plan", "CONFIG=configs/quickstart.yaml", "JSON=1", env=env)
    notice = "training runs on the CPU: Apple's GPUs (MPS) are not supported"
    assert plan.code == 0 and notice in plan.json["reasons"].values(), plan.err
    assert notice in in_process("gpu-info", env=env).out
