"""Machines that are not here, from `make plan` to the refusal of `make train`: what a user of each of them reads (B20)."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sft_play.bench import gpus_of
from sft_play.errors import HardwareError
from sft_play.model.use import best_device
from sft_play.plan.detect import detect
from sft_play.training.curves import Curves
from sft_play.training.world import check_world
from tests.conftest import ROOT, Program
from tests.nvml_double import A100_SPLIT, MACHINES, MISMATCH, RTX3090, RTX4090, Gpu, Machine, emulated, move_to
from tests.plans import simple_plan

KERNEL = os.uname()
DOCUMENT = (ROOT / "docs" / "launching.md").read_text(encoding="utf-8")
QLORA = ("CONFIG=configs/run_bnb.yaml", "JSON=1")


@pytest.mark.parametrize(
    ("name", "device", "strategy", "precision", "ranks"),
    [
        ("rtx4090", "NVIDIA GeForce RTX 4090", "single", "bf16", 1), ("rtx3090_pair", "NVIDIA GeForce RTX 3090", "ddp", "bf16", 2),
        ("t4", "Tesla T4", "single", "fp16", 1), ("v100", "Tesla V100-SXM2-16GB", "single", "fp16", 1),
        ("h200", "NVIDIA H200", "single", "bf16", 1), ("unlike_pair", "NVIDIA GeForce RTX 4070", "ddp", "bf16", 2),
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


@pytest.mark.parametrize(("name", "share"), [("rtx4090", 1 / 2), ("t4", 1 / 8), ("h200", 1 / 15)])
def test_fp32_is_planned_without_tensor_cores(
    in_process: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, share: float
) -> None:
    move_to(monkeypatch, MACHINES[name], tmp_path)
    words = ("plan", *QLORA, "TRAIN_BATCH_SIZE=1", "TRAIN_GRADIENT_CHECKPOINTING=true", "MODEL_ATTN_IMPLEMENTATION=sdpa")
    half, full = (
        in_process(*words, *more, env=emulated(tmp_path, name)).json["tokens_per_second"] for more in ((), ("TRAIN_BF16=false",))
    )
    assert full / half == pytest.approx(share, rel=0.15)


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
    "rights by name": (
        MACHINES["mig_without_rights"], A100_SPLIT.slices[0].uuid if A100_SPLIT.slices else "",
        "GPU 0 (NVIDIA A100-SXM4-80GB) is split by MIG, and none of its slices can be used here: Insufficient Permissions",
    ),
    "no slice": (
        Machine(cards=(replace(A100_SPLIT, slices=()),)), "",
        "GPU 0 (NVIDIA A100-SXM4-80GB) is split by MIG, and none of its slices can be used here: it has none",
    ),
    "slice that is gone": (MACHINES["mig"], "MIG-2222", "CUDA_VISIBLE_DEVICES=`MIG-2222` names MIG-2222, but no GPU here has it"),
    "index": (ONE, "0,7", "CUDA_VISIBLE_DEVICES=`0,7` names 7, but this machine has 1 GPU"),
    "UUID that is gone": (PAIR, "GPU-abcd", "CUDA_VISIBLE_DEVICES=`GPU-abcd` names GPU-abcd, but this machine has 2 GPUs"),
    "prohibited": (
        Machine(cards=(replace(RTX4090, mode=2),)), "",
        "GPU 0 (NVIDIA GeForce RTX 4090) cannot be used: its compute mode is Prohibited",
    ),
    "exclusive": (
        Machine(cards=(replace(RTX4090, mode=3, held_by=(4711,)),)), "",
        "GPU 0 (NVIDIA GeForce RTX 4090) cannot be used: its compute mode is Exclusive Process, and process 4711 has it",
    ),
    "lost": (Machine(cards=(RTX3090, replace(RTX3090, lost=True))), "", "GPU 1 of 2 does not answer: GPU is lost"),
    "updated driver": (
        Machine(cards=(RTX4090,), broken=MISMATCH), "", "the NVIDIA driver fails: RM has detected an NVML/RM version mismatch.",
    ),
}  # fmt: skip
"""What -> machine, `CUDA_VISIBLE_DEVICES`, and the message, which docs/launching.md has too."""
ASKS_TORCH = ("V100", "driver", "CPU build")


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
    assert message in DOCUMENT


def test_the_plan_says_what_torch_cannot_use(program: Program, tmp_path: Path) -> None:
    done = program("plan", *QLORA, env=emulated(tmp_path, "v100", torch=True))
    assert done.code == 0 and done.json["device"] == "cuda"
    assert "warning: torch 2.13.0+cu130 has no code for Tesla V100-SXM2-16GB (compute capability 7.0)\nhint: " in done.err
    fine = program("plan", *QLORA, env=emulated(tmp_path, "t4", torch=True))
    assert fine.code == 0 and "warning" not in fine.err


def test_one_process_takes_a_card_that_may_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_process: Program) -> None:
    machine = Machine(cards=(replace(RTX3090, mode=2), RTX3090))
    move_to(monkeypatch, machine, tmp_path)
    one = in_process("plan", *QLORA, "NUM_GPUS=1", env=machine.environment(tmp_path))
    assert one.code == 0 and one.json["ranks"][0]["device"] == "cuda:1", one.err
    both = in_process("plan", *QLORA, env=machine.environment(tmp_path))
    assert both.code == 3 and "GPU 0 (NVIDIA GeForce RTX 3090) cannot be used: its compute mode is Prohibited" in both.err


def test_a_lost_card_can_be_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_process: Program) -> None:
    machine = Machine(cards=(replace(RTX3090, lost=True), RTX3090))
    move_to(monkeypatch, machine, tmp_path)
    env = machine.environment(tmp_path)
    assert "`CUDA_VISIBLE_DEVICES=1` goes on without it" in in_process("gpu-info", env=env).err
    facts = in_process("memory-check", "CONFIG=configs/quickstart.yaml", "JSON=1", env=env | {"CUDA_VISIBLE_DEVICES": "1"}).json
    assert facts["devices"][0]["device"] == facts["need"]["ranks"][0]["device"] == "cuda:1"


def test_a_busy_card_is_named_where_a_plan_would_fit_without_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_process: Program
) -> None:
    machine = Machine(cards=(replace(RTX4090, free=4.0),))
    move_to(monkeypatch, machine, tmp_path)
    done = in_process("plan", *QLORA, env=machine.environment(tmp_path))
    said = "other programs hold 20.0 of GPU 0's 24.0 GiB (`make memory-check` names them); without them it would fit"
    assert done.code == 3 and said in done.err


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


def test_the_bench_measures_the_card_that_it_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    move_to(monkeypatch, MACHINES["unlike_pair"], tmp_path)
    hardware = detect()
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert gpus_of(hardware, [1]) == order | {"CUDA_VISIBLE_DEVICES": "1"}
    assert gpus_of(hardware, [0, 1]) == order | {"CUDA_VISIBLE_DEVICES": "0,1", "NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    ada = Gpu(
        name="NVIDIA RTX 5000 Ada Generation", gib=31.5, free=31.0, capability=(8, 9)
    )  # no GeForce: NVLink or P2P as it has
    move_to(monkeypatch, Machine(cards=(ada, ada)), tmp_path)
    assert gpus_of(detect(), [0, 1]) == order | {"CUDA_VISIBLE_DEVICES": "0,1"}


def test_a_worker_that_sees_two_cards_is_refused() -> None:
    one = SimpleNamespace(distributed_type="NO", num_processes=1)
    plan = simple_plan(device="cuda")
    check_world(plan, one, 1)
    with pytest.raises(HardwareError, match="sees 2 GPUs and would train under torch's DataParallel"):
        check_world(plan, one, 2)


class Writer:
    """What `SummaryWriter` is asked to keep."""

    def __init__(self) -> None:
        self.found: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.found.append((name, value, step))

    def flush(self) -> None: ...

    def close(self) -> None: ...


def curves_on(monkeypatch: pytest.MonkeyPatch, machine: Machine, folder: Path) -> tuple[Curves, Any]:
    move_to(monkeypatch, machine, folder)
    curves, state = Curves(folder / "tb"), SimpleNamespace(global_step=0)
    curves.on_train_begin(None, state, None)
    curves.writer.close()
    curves.writer = Writer()
    return curves, state


def test_curves_ask_the_driver_and_end_with_one_notice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curves, state = curves_on(monkeypatch, PAIR, tmp_path)
    for step in (1, 2, 3):
        if step == 2:  # fallen off the bus
            replace(PAIR, cards=(RTX3090, replace(RTX3090, lost=True))).write(tmp_path)
        state.global_step = step
        curves.on_log(None, state, None, logs={"loss": 1.0})
    names = [name for name, _, step in curves.writer.found if step == 1]
    assert names == ["train/loss", "gpu/0/memory_gib", "gpu/1/memory_gib", "gpu/0/utilisation", "gpu/1/utilisation"]
    assert [name for name, _, step in curves.writer.found if step == 3] == ["train/loss"]
    notes = capsys.readouterr().err.splitlines()
    assert len(notes) == 2 and all(note.startswith("note: no curve `gpu/") and "GPU is lost" in note for note in notes), notes


def test_a_slice_has_a_curve_of_its_memory_and_none_of_its_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curves, state = curves_on(monkeypatch, MACHINES["mig"], tmp_path)
    for state.global_step in (1, 2):
        curves.on_log(None, state, None, logs={"loss": 1.0})
    memory = [value for name, value, _ in curves.writer.found if name == "gpu/0/memory_gib"]
    assert memory == pytest.approx([0.05, 0.05])
    assert capsys.readouterr().err.count("no curve `gpu/.../utilisation`") == 1


def test_other_makers_gpus_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_process: Program) -> None:
    move_to(monkeypatch, Machine(cards=(), broken=12), tmp_path)
    monkeypatch.setattr("os.uname", lambda: os.uname_result(("Darwin", *KERNEL[1:])))
    env = Machine(cards=(), broken=12).environment(tmp_path)
    plan = in_process("plan", "CONFIG=configs/quickstart.yaml", "JSON=1", env=env)
    said = "training runs on the CPU: Apple's GPUs (MPS) are not supported"
    assert plan.code == 0 and said in plan.json["reasons"], plan.err
    assert said in in_process("gpu-info", env=env).out
    assert said in DOCUMENT
