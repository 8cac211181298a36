"""A stand-in for NVIDIA's `pynvml` on PYTHONPATH: a driver with the cards that a test names. Only the third party is replaced."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import ROOT

SOURCE = """
import os
from types import SimpleNamespace as Row

class NVMLError(Exception):
    pass

# name, GiB, GiB free, compute capability
CARDS = {cards!r}
LINKED = {linked!r}

def nvmlInit():
    if {broken!r}:
        raise NVMLError("Driver Not Loaded")

def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return len(CARDS)
def nvmlDeviceGetHandleByIndex(index):
    if index == {lost!r}:
        raise NVMLError("GPU is lost")
    return index

def nvmlDeviceGetUUID(card): return f"GPU-{{card}}{{card}}{{card}}{{card}}"
def nvmlDeviceGetName(card): return CARDS[card][0]
def nvmlDeviceGetMemoryInfo(card):
    if {unified!r}:
        raise NVMLError("Not Supported")
    return Row(total=int(CARDS[card][1] * 2**30), free=int(CARDS[card][2] * 2**30))
def nvmlDeviceGetCudaComputeCapability(card): return CARDS[card][3]
def nvmlDeviceGetEnforcedPowerLimit(card): return 700_000
def nvmlSystemGetDriverVersion(): return "580.65.06"
def nvmlSystemGetCudaDriverVersion(): return 13000
def nvmlDeviceGetTopologyCommonAncestor(one, other): return 40
def nvmlDeviceGetPciInfo(card): return Row(busId=f"00000000:0{{card}}:00.0")

def nvmlDeviceGetNvLinkState(card, link):
    if not LINKED or link >= 4:
        raise NVMLError("Not Supported")
    return 1

def nvmlDeviceGetNvLinkRemotePciInfo(card, link): return Row(busId=f"00000000:0{{1 - card}}:00.0")
def nvmlDeviceGetComputeRunningProcesses(card):
    if {unified!r}:
        raise NVMLError("Not Supported")
    return [Row(pid=os.getpid(), usedGpuMemory=3 * 2**30)]
"""

Card = tuple[str, float, float, tuple[int, int]]


def nvml_path(
    folder: Path, *cards: Card, linked: bool = False, broken: bool = False, unified: bool = False, lost: int | None = None
) -> dict[str, str]:
    """Writes the module to `folder` and returns the environment that puts it first.

    `unified`: cards without memory of their own; `lost`: the index of one that does not answer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pynvml.py").write_text(
        SOURCE.format(cards=list(cards), linked=linked, broken=broken, unified=unified, lost=lost), encoding="utf-8"
    )
    return {"PYTHONPATH": f"{folder}:{ROOT}"}
