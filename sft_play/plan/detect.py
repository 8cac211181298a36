"""Looks at this machine (acts): GPUs by NVML, else the CPU. Never imports torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sft_play.errors import HardwareError
from sft_play.plan.hardware import GIB, Device, Hardware, cpu_only, cpu_threads, device_of, find_card, ram_bytes
from sft_play.plan.torch_check import VISIBLE, VISIBLE_REMEDY, gpus_here

NOTHING = ("", "-1", "none", "void", "NoDevFiles")
"""Entries of `CUDA_VISIBLE_DEVICES` that hide GPUs on purpose; the last is Slurm's, for jobs without GPUs."""
WITHOUT = "`CUDA_VISIBLE_DEVICES=` continues without GPUs"


def detect() -> Hardware:
    """Return this machine's hardware; GPUs that `CUDA_VISIBLE_DEVICES` hides are left out. Raise `HardwareError` for broken ones."""
    if all_hidden():
        return replace(cpu_only(), unused=other_gpu())
    with nvml_session() as nvml:
        if nvml is None:
            return replace(cpu_only(), unused=other_gpu())
        devices, (driver, cuda) = _gpus(nvml), versions_of(nvml)
    if not devices:
        return cpu_only()
    return Hardware(
        kind="cuda", devices=tuple(devices), cpu_threads=cpu_threads(), ram_bytes=ram_bytes()[0], driver=driver, driver_cuda=cuda
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shown:
    """A GPU or a MIG slice that a process here may use."""

    number: int
    """The driver's number of the card."""
    handle: Any
    card: Any
    """Handle of the card, where `handle` is a slice of it."""
    mig_uuid: str | None = None


def open_nvml() -> Any | None:
    """Return the initialised `pynvml` module, or `None` where there is no NVIDIA driver.

    Raises `HardwareError` for a driver that is there and fails, as after an update without a restart.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
            return None
        raise HardwareError(
            f"the NVIDIA driver fails: {error}", hint=f"reinstall the NVIDIA driver, or reboot after its update; {WITHOUT}"
        ) from error
    return pynvml


@contextmanager
def nvml_session() -> Iterator[Any | None]:
    """Yield what `open_nvml` returns, and shut it down. Raises as it does."""
    nvml = open_nvml()
    try:
        yield nvml
    finally:
        if nvml is not None:
            nvml.nvmlShutdown()


def versions_of(nvml: Any) -> tuple[str, str]:
    """Return the versions of the driver and of the newest CUDA that it supports."""
    cuda = int(nvml.nvmlSystemGetCudaDriverVersion())
    return text_of(nvml.nvmlSystemGetDriverVersion()), f"{cuda // 1000}.{cuda % 1000 // 10}"


def all_hidden() -> bool:
    """Whether `CUDA_VISIBLE_DEVICES` hides every GPU, however many there are."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() in NOTHING


def shown_gpus(nvml: Any) -> tuple[list[Shown], int]:
    """Return what `CUDA_VISIBLE_DEVICES` shows, in its order, and how many GPUs there are.

    A process sees whole GPUs, or one MIG slice: the first that is named, else the largest of the first card. Raise `HardwareError`
    where a GPU does not answer (fallen off the bus, or taken away), where its slices may not be used, and for names that nothing has.
    """
    count = int(nvml.nvmlDeviceGetCount())
    cards, uuids, lost = [], [], {}
    for index in range(count):
        handle, uuid = None, ""
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = text_of(nvml.nvmlDeviceGetUUID(handle))
        except nvml.NVMLError as error:  # does not matter where another is chosen
            lost[index] = error
        cards.append(Shown(index, handle, handle))
        uuids.append(uuid)
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(index) for index in range(count)] if text is None else [name.strip() for name in text.split(",")]
    shown: dict[tuple[int, str | None], Shown] = {}
    for name in names:
        if name in NOTHING:  # as for CUDA, what follows is hidden too
            break
        if name.startswith("MIG-"):
            split = [card for card in cards if card.number not in lost and _is_split(nvml, card)]
            found = [one for card in split for one in _slices(nvml, card) if str(one.mig_uuid).startswith(name)]
        else:
            found = [
                c
                for c, uuid in zip(cards, uuids, strict=True)
                if name == str(c.number) or (name.startswith("GPU-") and uuid.startswith(name))
            ]
        if not found:
            machine = "no GPU here has it" if name.startswith("MIG-") else gpus_here(count)
            raise HardwareError(VISIBLE.format(value=text, names=name, machine=machine), hint=VISIBLE_REMEDY)
        if found[0].number in lost:
            raise _no_answer(found[0].number, count, lost[found[0].number])
        shown.setdefault((found[0].number, found[0].mig_uuid), found[0])
    return _together(nvml, list(shown.values())), count


def _together(nvml: Any, shown: list[Shown]) -> list[Shown]:
    """Return what of these a process sees at once: whole GPUs, or the first slice that is named, or the largest of the first card."""
    whole = [gpu for gpu in shown if not gpu.mig_uuid and not _is_split(nvml, gpu)]
    named = [gpu for gpu in shown if gpu.mig_uuid]
    if whole or named or not shown:
        return whole or named[:1]
    return [max(_slices(nvml, shown[0]), key=lambda one: gpu_memory(nvml, one)[0])]


def _is_split(nvml: Any, card: Shown) -> bool:
    """Whether MIG is on."""
    try:
        return bool(nvml.nvmlDeviceGetMigMode(card.handle)[0])
    except nvml.NVMLError:  # cards and drivers that do not know MIG
        return False


def _slices(nvml: Any, card: Shown) -> list[Shown]:
    """Return the MIG slices of a card. Raise `HardwareError` where there are none that this user may use."""
    found: list[Shown] = []
    reason = "it has none"
    for place in range(int(nvml.nvmlDeviceGetMaxMigDeviceCount(card.handle))):
        try:
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(card.handle, place)
            found.append(Shown(card.number, handle, card.handle, text_of(nvml.nvmlDeviceGetUUID(handle))))
        except nvml.NVMLError as error:
            reason = reason if error.value == nvml.NVML_ERROR_NOT_FOUND else str(error)
    if not found:
        raise HardwareError(
            f"GPU {card.number} ({name_of(nvml, card)}) is split by MIG, and none of its slices can be used here: {reason}",
            hint="`nvidia-smi -L` lists slices; a container needs one by its name (`--gpus '\"device=MIG-...\"'`), and `nvidia-smi mig -cgi` "
            f"makes them; {WITHOUT}",
        )
    return found


def gpu_memory(nvml: Any, gpu: Shown) -> tuple[int, int]:
    """Return (memory, free memory) of a GPU; the machine's where a GPU has none of its own (GB10, Jetson). Raise `HardwareError`."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(gpu.handle)
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_NOT_SUPPORTED:
            return ram_bytes()
        raise HardwareError(
            f"the memory of {gpu.mig_uuid or f'GPU {gpu.number}'} cannot be read: {error}",
            hint=f"look at `nvidia-smi`; in a container the slice must be given to it; {WITHOUT}",
        ) from error
    return int(memory.total), int(memory.free)


def capability_of(nvml: Any, gpu: Shown) -> tuple[int, int]:
    """Return a GPU's compute capability."""
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(gpu.card)
    return int(major), int(minor)


def name_of(nvml: Any, gpu: Shown) -> str:
    """Return the name of a GPU or a slice."""
    return text_of(nvml.nvmlDeviceGetName(gpu.handle))


def _gpus(nvml: Any) -> list[Device]:
    shown, count = shown_gpus(nvml)
    found = []
    for gpu in shown:
        try:
            found.append(_device(nvml, gpu))
        except nvml.NVMLError as error:
            raise _no_answer(gpu.number, count, error) from error
    return found


def _device(nvml: Any, gpu: Shown) -> Device:
    name, (total, free), capability = name_of(nvml, gpu), gpu_memory(nvml, gpu), capability_of(nvml, gpu)
    flops = bandwidth = None
    if found := find_card(name.partition(" MIG ")[0]):
        card = device_of(*found)
        flops, bandwidth = card.peak_flops, card.bandwidth
        if profile := re.search(r" MIG (?:\dc\.)?(\d)g\.", name):  # a slice has so many sevenths, and its share of the memory
            flops, bandwidth = (
                found[1].bf16_tflops * 1e12 * int(profile[1]) / 7,
                found[1].bandwidth_gb_s * 1e9 * total / (found[1].memory_gib * GIB),
            )
    return Device(
        name=name, memory_bytes=total, free_bytes=free, bf16=capability >= (8, 0), fp8=capability >= (8, 9), compute_capability=capability,
        peak_flops=flops, bandwidth=bandwidth, power_watts=_power_limit(nvml, gpu.handle), number=gpu.number, mig_uuid=gpu.mig_uuid,
        blocked=_blocked(nvml, gpu.card), expandable_segments=not is_wsl(),
    )  # fmt: skip


def _blocked(nvml: Any, card: Any) -> str:
    """Return why the compute mode of a card lets no program of ours on it, or nothing."""
    try:
        mode = nvml.nvmlDeviceGetComputeMode(card)
        if mode == nvml.NVML_COMPUTEMODE_PROHIBITED:
            return "its compute mode is Prohibited"
        holders = [int(one.pid) for one in nvml.nvmlDeviceGetComputeRunningProcesses(card)] if mode else []
    except nvml.NVMLError:  # chips without compute modes, drivers that do not tell who computes: CUDA will
        return ""
    return f"its compute mode is Exclusive Process, and process {holders[0]} has it" if holders else ""


def _no_answer(index: int, count: int, error: Exception) -> HardwareError:
    others = ",".join(str(other) for other in range(count) if other != index)
    without = f"`CUDA_VISIBLE_DEVICES={others}` continues without it" if others else WITHOUT
    hint = f"look at `nvidia-smi`; a restart often brings it back; {without}"
    return HardwareError(f"GPU {index} of {count} does not answer: {error}", hint=hint)


def is_wsl() -> bool:
    """Whether this is Linux under Windows (WSL2), by the kernel's name."""
    return "microsoft" in os.uname().release.lower()


def other_gpu() -> str:
    """Return why a GPU that is not NVIDIA's does nothing here; empty where none is known to be."""
    if Path("/dev/kfd").exists():
        return "an AMD GPU is here (`/dev/kfd`), and training runs on the CPU: ROCm is not supported"
    if os.uname().sysname == "Darwin":
        return "training runs on the CPU: Apple's GPUs (MPS) are not supported"
    return ""


def _power_limit(nvml: Any, handle: Any) -> float | None:
    """Return the watts that the driver lets a GPU draw; `None` where it does not tell (many laptops, Jetson)."""
    try:
        return float(nvml.nvmlDeviceGetEnforcedPowerLimit(handle)) / 1000
    except nvml.NVMLError:
        return None


def text_of(value: Any) -> str:
    """Return what NVML calls something; older bindings answer in bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)
