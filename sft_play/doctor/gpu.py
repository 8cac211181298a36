"""Checks of GPUs, driver and torch's build for them. Asks `nvidia-smi`, and torch in a process of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from sft_play.doctor.finding import Check, Context, Finding
from sft_play.plan import torch_check
from sft_play.plan.catalogue import NO_PEER_TO_PEER
from sft_play.plan.detect import NOTHING, is_wsl, other_gpu

QUERY = ("nvidia-smi", "--query-gpu=index,uuid,name,driver_version,compute_cap,mig.mode.current", "--format=csv,noheader")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One line of `nvidia-smi`."""

    index: int
    uuid: str
    name: str
    driver: str
    capability: str
    """Compute capability, `8.9`."""
    split: bool
    """Whether MIG is on."""


@cache
def query() -> tuple[list[Gpu], str | None, str | None]:
    """Returns the GPUs, the newest CUDA that the driver supports, and the error of an `nvidia-smi` that fails."""
    if not shutil.which("nvidia-smi"):
        return [], None, None
    try:
        table = subprocess.run(QUERY, capture_output=True, text=True, timeout=30, check=False)
        overview = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], None, str(error)
    if table.returncode:
        return [], None, (table.stdout + table.stderr).strip() or f"exit code {table.returncode}"
    gpus = []
    for line in table.stdout.strip().splitlines():
        index, uuid, name, driver, capability, mig = (part.strip() for part in line.split(",", 5))
        gpus.append(Gpu(int(index), uuid, name, driver, capability, split=mig == "Enabled"))
    cuda = re.search(r"CUDA Version:\s*(\d+\.\d+)", overview.stdout)
    return gpus, cuda[1] if cuda else None, None


def shown() -> list[Gpu]:
    """Returns the GPUs that a process here sees: by `CUDA_VISIBLE_DEVICES`, and one of those that MIG splits."""
    gpus, value = query()[0], os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is not None:
        names = [name.strip() for name in value.split(",")]
        if names[0].startswith("MIG-"):
            return [gpu for gpu in gpus if gpu.split][:1]
        gpus = [g for g in gpus if str(g.index) in names or any(n.startswith("GPU-") and g.uuid.startswith(n) for n in names)]
    whole = [gpu for gpu in gpus if not gpu.split]
    return whole or gpus[:1]


def driver(_: Context) -> Iterator[Finding]:
    """A driver that does not answer."""
    error = query()[2]
    if error:
        text = f"`nvidia-smi` fails: {error.splitlines()[0]}"
        yield Finding(
            id="driver-broken", severity="error", text=text, remedy="reinstall the NVIDIA driver, or reboot after its update"
        )


def torch_for_gpu(_: Context) -> Iterator[Finding]:
    """A torch that cannot use these GPUs: built without CUDA, for a newer driver, or without their architecture."""
    gpus = shown()
    if not gpus:
        return
    known = [torch_check.Gpu(gpu.name, gpu.capability) for gpu in gpus]
    facts = torch_check.torch_facts(len(gpus), os.environ | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    for one in torch_check.problems(facts, known, gpus[0].driver, query()[1]):
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


def visible_devices(_: Context) -> Iterator[Finding]:
    """`CUDA_VISIBLE_DEVICES` that names GPUs which are not here: CUDA then hides all that follow, in silence."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = query()[0]
    if value is None or (not gpus and not value.strip()):
        return
    if gpus and value.split(",")[0].strip() in NOTHING:
        yield Finding(
            id="gpus-hidden",
            severity="warning",
            text=f"CUDA_VISIBLE_DEVICES=`{value}` hides all {len(gpus)} GPUs: training would use the CPU",
            remedy="unset CUDA_VISIBLE_DEVICES",
        )
        return
    known = {str(gpu.index) for gpu in gpus}
    names = [name.strip() for name in value.split(",")]
    absent = [n for n in names if n not in known and not any(g.uuid.startswith(n) and n.startswith("GPU-") for g in gpus)]
    absent = [name for name in absent if not name.startswith("MIG-")]
    if absent:
        yield Finding(
            id="visible-devices",
            severity="error",
            text=torch_check.VISIBLE.format(value=value, names=", ".join(absent), machine=torch_check.gpus_here(len(gpus))),
            remedy=torch_check.VISIBLE_REMEDY,
        )


def consumer_cards(_: Context) -> Iterator[Finding]:
    """Several cards that cannot reach each other's memory, or that differ."""
    gpus = query()[0]
    if len(gpus) > 1 and any(NO_PEER_TO_PEER.search(gpu.name) for gpu in gpus):
        yield Finding(
            id="no-peer-to-peer",
            severity="note",
            text="GeForce RTX 40 and 50 cards have no peer-to-peer transfers: gradients go through memory",
            remedy="nothing to do: NCCL_P2P_DISABLE=1 is set for the workers; prefer LoRA, or fewer and larger steps",
        )
    names = sorted({gpu.name for gpu in gpus})
    if len(names) > 1:
        yield Finding(
            id="mixed-gpus",
            severity="note",
            text=f"different GPUs: {', '.join(names)}; each step waits for the slowest",
            remedy="make plan shows each rank's share; CUDA_VISIBLE_DEVICES chooses among them",
        )


CHECKS: tuple[Check, ...] = (driver, torch_for_gpu, platform, visible_devices, consumer_cards)
