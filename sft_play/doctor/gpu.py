"""Checks of GPUs, driver and torch's build for them. Asks NVML as every launch does, and torch in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache

from sft_play.doctor.checks import Check, Context, Finding
from sft_play.errors import HardwareError
from sft_play.plan import torch_check
from sft_play.plan.catalogue import NO_PEER_TO_PEER
from sft_play.plan.detect import all_hidden, detect, is_wsl, open_nvml, other_gpu
from sft_play.plan.hardware import COMPUTE_MODE_REMEDY, Hardware


@cache
def seen() -> Hardware | HardwareError:
    """Returns what a launch would see of this machine, or why it would refuse it."""
    try:
        return detect()
    except HardwareError as error:
        return error


def driver(_: Context) -> Iterator[Finding]:
    """A driver, a card or a slice that does not answer, and names that no GPU has."""
    hardware = seen()
    if isinstance(hardware, HardwareError):
        yield Finding(id="gpus-refused", severity="error", text=hardware.message, remedy=hardware.hint or "look at `nvidia-smi`")
    elif hardware.kind == "cpu" and not all_hidden() and (error := _nvidia_smi_error()):
        yield Finding(
            id="driver-broken",
            severity="error",
            text=f"`nvidia-smi` fails: {error.splitlines()[0]}",
            remedy="reinstall the NVIDIA driver, or reboot after its update",
        )


def _nvidia_smi_error() -> str:
    """Returns what an `nvidia-smi` says that is here and fails: to NVML a driver that is not loaded is none."""
    if not shutil.which("nvidia-smi"):
        return ""
    try:
        asked = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return ((asked.stdout + asked.stderr).strip() or f"exit code {asked.returncode}") if asked.returncode else ""


def _gpus() -> Hardware | None:
    """Returns the GPUs that a process here sees."""
    hardware = seen()
    return hardware if isinstance(hardware, Hardware) and hardware.kind == "cuda" else None


def torch_for_gpu(_: Context) -> Iterator[Finding]:
    """A compute mode that lets nobody on a card; a torch built without CUDA, for a newer driver, or without code for these GPUs."""
    hardware = _gpus()
    if not hardware:
        return
    blocked = [device for device in hardware.devices if device.blocked]
    for device in blocked:
        yield Finding(id="gpu-blocked", severity="error", text=device.cannot_be_used, remedy=COMPUTE_MODE_REMEDY)
    if not blocked:
        environment = os.environ | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        for one in torch_check.unusable(hardware, range(len(hardware.devices)), environment):
            yield Finding(id=one.id, severity="error", text=one.text, remedy=one.remedy)


def platform(_: Context) -> Iterator[Finding]:
    """WSL2, and GPUs of other makers."""
    if is_wsl():
        yield Finding(
            id="wsl2",
            severity="note",
            text="this is WSL2: workers run without `expandable_segments`, for which its driver fails at the first allocation",
            remedy="nothing to do: plans count what torch's other allocator loses",
        )
    if text := other_gpu():
        yield Finding(id="other-gpu", severity="warning", text=text, remedy="a machine with an NVIDIA GPU, or stay on the CPU")


def hidden(_: Context) -> Iterator[Finding]:
    """`CUDA_VISIBLE_DEVICES` that hides every GPU."""
    if not all_hidden():
        return
    try:
        nvml = open_nvml()
    except HardwareError:  # what is hidden may be broken
        return
    if nvml is None:
        return
    count = int(nvml.nvmlDeviceGetCount())
    nvml.nvmlShutdown()
    if count:
        value = os.environ["CUDA_VISIBLE_DEVICES"]
        yield Finding(
            id="gpus-hidden",
            severity="warning",
            text=f"CUDA_VISIBLE_DEVICES=`{value}` hides all GPUs ({count}): training would use the CPU",
            remedy="unset CUDA_VISIBLE_DEVICES",
        )


def consumer_cards(_: Context) -> Iterator[Finding]:
    """Several cards that cannot reach each other's memory, or that differ."""
    hardware = _gpus()
    if not hardware or len(hardware.devices) < 2:
        return
    names = sorted({device.name for device in hardware.devices})
    if any(NO_PEER_TO_PEER.search(name) for name in names):
        yield Finding(
            id="no-peer-to-peer",
            severity="note",
            text="GeForce RTX 40 and 50 cards have no peer-to-peer transfers: gradients go through memory",
            remedy="nothing to do: NCCL_P2P_DISABLE=1 is set for the workers; prefer LoRA, or fewer and larger steps",
        )
    if len(names) > 1:
        yield Finding(
            id="mixed-gpus",
            severity="note",
            text=f"different GPUs: {', '.join(names)}; each step waits for the slowest",
            remedy="make plan shows each rank's share; CUDA_VISIBLE_DEVICES chooses among them",
        )


CHECKS: tuple[Check, ...] = (driver, torch_for_gpu, platform, hidden, consumer_cards)
