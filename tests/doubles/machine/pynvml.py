"""Double of NVIDIA's `pynvml`: the machine that the JSON file in `NVML_DOUBLE` describes (`tests/nvml_double.py` writes
it).

The file is read at every call, so a test can take a card away while a process runs. Only the standard library is
imported.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace as Row

NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NO_PERMISSION, NVML_ERROR_NOT_FOUND = 3, 4, 6
(
    NVML_ERROR_DRIVER_NOT_LOADED,
    NVML_ERROR_LIBRARY_NOT_FOUND,
    NVML_ERROR_GPU_IS_LOST,
    NVML_ERROR_LIB_RM_VERSION_MISMATCH,
) = (
    9,
    12,
    15,
    18,
)
WORDS = {
    3: "Not Supported",
    4: "Insufficient Permissions",
    6: "Not Found",
    9: "Driver Not Loaded",
    12: "NVML Shared Library Not Found",
    15: "GPU is lost",
    18: "RM has detected an NVML/RM version mismatch.",
}


class NVMLError(Exception):
    def __init__(self, value):
        super().__init__(value)
        self.value = value

    def __str__(self):
        return WORDS[self.value]


class Handle(tuple):
    """(card,) or (card, slice)."""

    __slots__ = ()


def _machine():
    return json.loads(Path(os.environ["NVML_DOUBLE"]).read_text(encoding="utf-8"))


def _card(handle):
    card = _machine()["cards"][handle[0]]
    if card["lost"]:
        raise NVMLError(NVML_ERROR_GPU_IS_LOST)
    return card


def _part(handle):
    card = _card(handle)
    return card["slices"][handle[1]] if len(handle) > 1 else card


def nvmlInit():
    if code := _machine()["broken"]:
        raise NVMLError(code)


def nvmlShutdown():
    pass


def nvmlDeviceGetCount():
    return len(_machine()["cards"])


def nvmlDeviceGetHandleByIndex(index):
    _card((index,))
    return Handle((index,))


def nvmlDeviceGetUUID(handle):
    return _part(handle)["uuid"]


def nvmlDeviceGetName(handle):
    return _part(handle)["name"]


def nvmlDeviceGetMemoryInfo(handle):
    card, part = _card(handle), _part(handle)
    if card["unified"]:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    if card["slices"] is not None and not card["permitted"]:
        raise NVMLError(NVML_ERROR_NO_PERMISSION)
    return Row(total=int(part["gib"] * 2**30), free=int(part["free"] * 2**30))


def nvmlDeviceGetCudaComputeCapability(handle):
    if len(handle) > 1:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return tuple(_card(handle)["capability"])


def nvmlDeviceGetUtilizationRates(handle):
    if _card(handle)["slices"] is not None:  # as the driver does, for a slice and for the card that is split
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return Row(gpu=50, memory=50)


def nvmlDeviceGetMigMode(handle):
    if (slices := _card(handle)["slices"]) is None:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return [int(slices is not None)] * 2


def nvmlDeviceGetMaxMigDeviceCount(handle):
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(handle, index):
    card = _card(handle)
    if index >= len(card["slices"]):
        raise NVMLError(NVML_ERROR_NOT_FOUND)
    if not card["permitted"]:
        raise NVMLError(NVML_ERROR_NO_PERMISSION)
    return Handle((handle[0], index))


def nvmlSystemGetDriverVersion():
    return _machine()["driver"]


def nvmlSystemGetCudaDriverVersion():
    return _machine()["cuda"]


def nvmlDeviceGetTopologyCommonAncestor(first, other):
    return 40


def nvmlDeviceGetPciInfo(handle):
    return Row(busId=f"00000000:0{handle[0]}:00.0")


def nvmlDeviceGetNvLinkState(handle, link):
    if not _machine()["linked"] or link >= 4:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return 1


def nvmlDeviceGetNvLinkRemotePciInfo(handle, link):
    return Row(busId=f"00000000:0{1 - handle[0]}:00.0")


def nvmlDeviceGetComputeRunningProcesses(handle):
    if _card(handle)["unified"]:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    holders = _card(handle)["held_by"]
    return [Row(pid=os.getpid() if pid is None else pid, usedGpuMemory=3 * 2**30) for pid in holders]
