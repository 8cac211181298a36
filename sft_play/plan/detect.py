"""Looks at this machine (acts): GPUs by NVML, else the CPU. Never imports torch."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sft_play.errors import HardwareError
from sft_play.plan.catalogue import find_card
from sft_play.plan.hardware import GIB, Device, Hardware
from sft_play.plan.torch_check import VISIBLE, VISIBLE_REMEDY, gpus_here

NOTHING = ("", "-1", "none", "void", "NoDevFiles")
"""Entries of `CUDA_VISIBLE_DEVICES` that hide GPUs on purpose; the last is Slurm's, for jobs without GPUs."""
WITHOUT = "`CUDA_VISIBLE_DEVICES=` goes on without GPUs"


def detect() -> Hardware:
    """Returns this machine's hardware; GPUs that `CUDA_VISIBLE_DEVICES` hides are left out. Raises `HardwareError` for broken ones."""
    nvml = None if all_hidden() else open_nvml()
    if nvml is None:
        return replace(cpu_only(), unused=other_gpu())
    try:
        devices = _gpus(nvml)
        if not devices:
            return cpu_only()
        cuda = int(nvml.nvmlSystemGetCudaDriverVersion())
        driver, version = _text(nvml.nvmlSystemGetDriverVersion()), f"{cuda // 1000}.{cuda % 1000 // 10}"
    finally:
        nvml.nvmlShutdown()
    return Hardware(
        kind="cuda",
        devices=tuple(devices),
        cpu_threads=cpu_threads(),
        ram_bytes=ram_bytes()[0],
        driver=driver,
        driver_cuda=version,
    )


def cpu_only() -> Hardware:
    """Returns this machine as if it had no GPU."""
    total, free = ram_bytes()
    device = Device(name=cpu_name(), memory_bytes=total, free_bytes=free, bf16=fast_bf16(), peak_flops=None)
    return Hardware(kind="cpu", devices=(device,), cpu_threads=cpu_threads(), ram_bytes=total)


def cpu_threads() -> int:
    """Returns the processors that this process may use, cgroup quotas respected."""
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            threads = min(threads, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return threads


def ram_bytes() -> tuple[int, int]:
    """Returns (memory, memory that is available now), a cgroup's limit respected."""
    facts = {}
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            facts[name] = int(rest.split()[0]) * 1024
        total, free = facts["MemTotal"], facts["MemAvailable"]
    except (OSError, ValueError, KeyError, IndexError):  # not Linux
        import psutil

        memory = psutil.virtual_memory()
        total, free = int(memory.total), int(memory.available)
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        total, free = min(total, limit), min(free, max(0, limit - used))
    except (OSError, ValueError):
        pass
    return total, free


def cpu_name() -> str:
    """Returns the processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass

    return platform.processor() or platform.machine() or "CPU"


def fast_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices faster than fp32 ones (AMX, or AVX-512 with bf16)."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
        return "amx_bf16" in flags or "avx512_bf16" in flags
    except OSError:
        return False


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
    """Returns the initialised `pynvml` module, or `None` where there is no NVIDIA driver.

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


def all_hidden() -> bool:
    """Whether `CUDA_VISIBLE_DEVICES` hides every GPU, however many there are."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() in NOTHING


def shown_gpus(nvml: Any) -> tuple[list[Shown], int]:
    """Returns what `CUDA_VISIBLE_DEVICES` shows, in its order, and how many GPUs there are.

    A process sees whole GPUs, or one MIG slice: the first that is named, else the largest of the first card. Raises `HardwareError`
    where a GPU does not answer (fallen off the bus, or taken away), where its slices may not be used, and for names that nothing has.
    """
    count = int(nvml.nvmlDeviceGetCount())
    cards, uuids, lost = [], [], {}
    for index in range(count):
        handle, uuid = None, ""
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(nvml.nvmlDeviceGetUUID(handle))
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
            found = [c for c, uuid in zip(cards, uuids, strict=True) if name == str(c.number) or _begins(uuid, name)]
        if not found:
            machine = "no GPU here has it" if name.startswith("MIG-") else gpus_here(count)
            raise HardwareError(VISIBLE.format(value=text, names=name, machine=machine), hint=VISIBLE_REMEDY)
        if found[0].number in lost:
            raise _no_answer(found[0].number, count, lost[found[0].number])
        shown.setdefault((found[0].number, found[0].mig_uuid), found[0])
    return _together(nvml, list(shown.values())), count


def _begins(uuid: str, name: str) -> bool:
    return name.startswith("GPU-") and uuid.startswith(name)


def _together(nvml: Any, shown: list[Shown]) -> list[Shown]:
    """Returns what of these a process sees at once: whole GPUs, or the first slice that is named, or the largest of the first card."""
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
    """Returns the MIG slices of a card. Raises `HardwareError` where there are none that this user may use."""
    found: list[Shown] = []
    reason = "it has none"
    for place in range(int(nvml.nvmlDeviceGetMaxMigDeviceCount(card.handle))):
        try:
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(card.handle, place)
            found.append(Shown(card.number, handle, card.handle, _text(nvml.nvmlDeviceGetUUID(handle))))
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
    """Returns (memory, free memory) of a GPU; the machine's where a GPU has none of its own (GB10, Jetson). Raises `HardwareError`."""
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
    """Returns a GPU's compute capability."""
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(gpu.card)
    return int(major), int(minor)


def name_of(nvml: Any, gpu: Shown) -> str:
    """Returns the name of a GPU or a slice."""
    return _text(nvml.nvmlDeviceGetName(gpu.handle))


def _gpus(nvml: Any) -> list[Device]:
    shown, count = shown_gpus(nvml)
    found = []
    for gpu in shown:
        with _answering(nvml, gpu.number, count):
            found.append(_device(nvml, gpu))
    return found


def _device(nvml: Any, gpu: Shown) -> Device:
    name, (total, free) = name_of(nvml, gpu), gpu_memory(nvml, gpu)
    capability = capability_of(nvml, gpu)
    found = find_card(name.partition(" MIG ")[0])
    flops, bandwidth = (found[1].bf16_tflops * 1e12, found[1].bandwidth_gb_s * 1e9) if found else (None, None)
    if found and (profile := re.search(r" MIG (?:\dc\.)?(\d)g\.", name)):
        flops, bandwidth = (
            found[1].bf16_tflops * 1e12 * int(profile[1]) / 7,
            found[1].bandwidth_gb_s * 1e9 * total / (found[1].memory_gib * GIB),
        )
    return Device(
        name=name,
        memory_bytes=total,
        free_bytes=free,
        bf16=capability >= (8, 0),
        fp8=capability >= (8, 9),
        compute_capability=capability,
        peak_flops=flops,
        bandwidth=bandwidth,
        power_watts=_power_limit(nvml, gpu.handle),
        number=gpu.number,
        mig_uuid=gpu.mig_uuid,
        blocked=_blocked(nvml, gpu.card),
        expandable_segments=not is_wsl(),
    )


def _blocked(nvml: Any, card: Any) -> str:
    """Returns why the compute mode of a card lets no program of ours on it, or nothing."""
    try:
        mode = nvml.nvmlDeviceGetComputeMode(card)
        if mode == nvml.NVML_COMPUTEMODE_PROHIBITED:
            return "its compute mode is Prohibited"
        holders = [int(one.pid) for one in nvml.nvmlDeviceGetComputeRunningProcesses(card)] if mode else []
    except nvml.NVMLError:  # chips without compute modes, drivers that do not tell who computes: CUDA will
        return ""
    return f"its compute mode is Exclusive Process, and process {holders[0]} has it" if holders else ""


@contextmanager
def _answering(nvml: Any, index: int, count: int) -> Iterator[None]:
    """Raises `HardwareError` for a GPU that the driver knows and that does not answer."""
    try:
        yield
    except nvml.NVMLError as error:
        raise _no_answer(index, count, error) from error


def _no_answer(index: int, count: int, error: Exception) -> HardwareError:
    others = ",".join(str(other) for other in range(count) if other != index)
    without = f"`CUDA_VISIBLE_DEVICES={others}` goes on without it" if others else WITHOUT
    hint = f"look at `nvidia-smi`; a restart often brings it back; {without}"
    return HardwareError(f"GPU {index} of {count} does not answer: {error}", hint=hint)


def is_wsl() -> bool:
    """Whether this is Linux under Windows (WSL2), by the kernel's name."""
    return "microsoft" in os.uname().release.lower()


def other_gpu() -> str:
    """Returns why a GPU that is not NVIDIA's does nothing here; empty where none is known to be."""
    if Path("/dev/kfd").exists():
        return "an AMD GPU is here (`/dev/kfd`), and training runs on the CPU: ROCm is not supported"
    if os.uname().sysname == "Darwin":
        return "training runs on the CPU: Apple's GPUs (MPS) are not supported"
    return ""


def _power_limit(nvml: Any, handle: Any) -> float | None:
    """Returns the watts that the driver lets a GPU draw; `None` where it does not tell (many laptops, Jetson)."""
    try:
        return float(nvml.nvmlDeviceGetEnforcedPowerLimit(handle)) / 1000
    except nvml.NVMLError:
        return None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
