"""Looks at this machine (acts): GPUs by NVML, else the CPU. Never imports torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sft_play.errors import HardwareError
from sft_play.plan.catalogue import find_card
from sft_play.plan.hardware import Device, Hardware


def detect() -> Hardware:
    """Returns this machine's hardware; GPUs that `CUDA_VISIBLE_DEVICES` hides are left out."""
    devices = _gpus()
    if devices:
        return Hardware(kind="cuda", devices=tuple(devices), cpu_threads=cpu_threads(), ram_bytes=ram_bytes()[0])
    return cpu_only()


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
    import platform

    return platform.processor() or platform.machine() or "CPU"


def fast_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices faster than fp32 ones (AMX, or AVX-512 with bf16)."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
        return "amx_bf16" in flags or "avx512_bf16" in flags
    except OSError:
        return False


def visible(indices: range, uuids: list[str]) -> list[int]:
    """Returns the GPUs that `CUDA_VISIBLE_DEVICES` shows, in its order; as CUDA does, what follows an unknown entry is hidden."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return list(indices)
    shown: list[int] = []
    for part in (p.strip() for p in text.split(",")):
        if part.isdigit() and int(part) in indices:
            shown.append(int(part))
        elif match := [i for i, uuid in enumerate(uuids) if part and uuid.startswith(part)]:
            shown.append(match[0])
        else:
            break
    return list(dict.fromkeys(shown))


def open_nvml() -> Any | None:
    """Returns the initialised `pynvml` module, or `None` where there is no NVIDIA driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        return None
    except pynvml.NVMLError:
        return None
    return pynvml


def _gpus() -> list[Device]:
    nvml = None if all_hidden() else open_nvml()
    if nvml is None:
        return []
    try:
        return [_device(nvml, handle, number) for number, handle in shown_handles(nvml)[0]]
    finally:
        nvml.nvmlShutdown()


def all_hidden() -> bool:
    """Whether `CUDA_VISIBLE_DEVICES` hides every GPU, however many there are."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")


def shown_handles(nvml: Any) -> tuple[list[tuple[int, Any]], int]:
    """Returns (index, handle) of each GPU that `CUDA_VISIBLE_DEVICES` shows, and how many there are.

    Raises `HardwareError` where the driver knows a GPU that does not answer (fallen off the bus, or taken away).
    """
    count = int(nvml.nvmlDeviceGetCount())
    handles, uuids = [], []
    for index in range(count):
        try:
            handles.append(nvml.nvmlDeviceGetHandleByIndex(index))
            uuids.append(_text(nvml.nvmlDeviceGetUUID(handles[-1])))
        except nvml.NVMLError as error:
            raise HardwareError(
                f"GPU {index} of {count} does not answer: {error}",
                hint="look at `nvidia-smi`; a restart often brings it back; `CUDA_VISIBLE_DEVICES=` goes on without GPUs",
            ) from error
    return [(index, handles[index]) for index in visible(range(count), uuids)], count


def gpu_memory(nvml: Any, handle: Any) -> tuple[int, int]:
    """Returns (memory, free memory) of a GPU; the machine's where a GPU has none of its own (GB10, Jetson)."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError:
        return ram_bytes()
    return int(memory.total), int(memory.free)


def _device(nvml: Any, handle: Any, number: int) -> Device:
    name = _text(nvml.nvmlDeviceGetName(handle))
    total, free = gpu_memory(nvml, handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    found = find_card(name)
    return Device(
        name=name,
        memory_bytes=total,
        free_bytes=free,
        bf16=(major, minor) >= (8, 0),
        fp8=(major, minor) >= (8, 9),
        compute_capability=(int(major), int(minor)),
        peak_flops=found[1].bf16_tflops * 1e12 if found else None,
        bandwidth=found[1].bandwidth_gb_s * 1e9 if found else None,
        power_watts=_power_limit(nvml, handle),
        number=number,
    )


def _power_limit(nvml: Any, handle: Any) -> float | None:
    """Returns the watts that the driver lets a GPU draw; `None` where it does not tell (many laptops, Jetson)."""
    try:
        return float(nvml.nvmlDeviceGetEnforcedPowerLimit(handle)) / 1000
    except nvml.NVMLError:
        return None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
