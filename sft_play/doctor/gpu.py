"""Checks of GPUs, driver and torch's build for them. Asks `nvidia-smi`, and torch in a process of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from sft_play.doctor.finding import Check, Context, Finding
from sft_play.plan.compiled_for import LACKING_REMEDY, lacking, number, supports

QUERY = ("nvidia-smi", "--query-gpu=index,uuid,name,driver_version,compute_cap", "--format=csv,noheader")
TORCH_FACTS = """
import json, torch
flags = torch._C._cuda_getArchFlags() if torch.version.cuda else None
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "architectures": (flags or "").split(),
                  "available": torch.cuda.is_available()}))
"""
NO_PEER_TO_PEER = re.compile(r"RTX (40|50)\d\d")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One line of `nvidia-smi`."""

    index: int
    uuid: str
    name: str
    driver: str
    capability: str
    """Compute capability, `8.9`."""


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
        index, uuid, name, driver, capability = (part.strip() for part in line.split(",", 4))
        gpus.append(Gpu(int(index), uuid, name, driver, capability))
    cuda = re.search(r"CUDA Version:\s*(\d+\.\d+)", overview.stdout)
    return gpus, cuda[1] if cuda else None, None


@cache
def torch_facts() -> dict[str, Any] | str:
    """Returns version, CUDA and architectures of the installed torch, or the error of importing it."""
    process = subprocess.run([sys.executable, "-c", TORCH_FACTS], capture_output=True, text=True, timeout=120, check=False)
    if process.returncode:
        return process.stderr.strip().splitlines()[-1] if process.stderr.strip() else f"exit code {process.returncode}"
    facts: dict[str, Any] = json.loads(process.stdout.strip().splitlines()[-1])
    return facts


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
    gpus, driver_cuda, _error = query()
    if not gpus:
        return
    facts = torch_facts()
    if isinstance(facts, str):
        yield Finding(id="torch-broken", severity="error", text=f"torch cannot be imported: {facts}", remedy="make install")
        return
    if facts["cuda"] is None:
        yield Finding(
            id="torch-without-cuda",
            severity="error",
            text=f"{len(gpus)} GPUs here, but torch {facts['version']} is a build without CUDA: training would use the CPU",
            remedy="install torch's CUDA build: remove .venv, unset a CPU-only index in pip's settings, make install",
        )
        return
    if driver_cuda and number(facts["cuda"]) > number(driver_cuda) and not same_major(facts["cuda"], driver_cuda):
        yield Finding(
            id="driver-too-old",
            severity="error",
            text=f"torch {facts['version']} is built for CUDA {facts['cuda']}, driver {gpus[0].driver} is for {driver_cuda}",
            remedy="update the NVIDIA driver, or install a torch built for an older CUDA",
        )
    for capability in sorted({gpu.capability for gpu in gpus}):
        if facts["architectures"] and not supports(facts["architectures"], capability):
            names = ", ".join(sorted({gpu.name for gpu in gpus if gpu.capability == capability}))
            yield Finding(
                id="torch-lacks-architecture",
                severity="error",
                text=lacking(facts["version"], facts["architectures"], names, capability),
                remedy=LACKING_REMEDY,
            )


def same_major(one: str, other: str) -> bool:
    """CUDA's minor versions are compatible within a major one."""
    return number(one)[0] == number(other)[0]


def visible_devices(_: Context) -> Iterator[Finding]:
    """`CUDA_VISIBLE_DEVICES` that names GPUs which are not here: CUDA then hides all that follow, in silence."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = query()[0]
    if value is None or (not gpus and not value.strip()):
        return
    if gpus and value.strip() in {"", "-1"}:
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
            text=f"CUDA_VISIBLE_DEVICES=`{value}` names {', '.join(absent)}, but this machine has {len(gpus)} GPUs",
            remedy="unset CUDA_VISIBLE_DEVICES, or name GPUs of `nvidia-smi -L`",
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


CHECKS: tuple[Check, ...] = (driver, torch_for_gpu, visible_devices, consumer_cards)
