"""Detection of this machine's GPUs by NVML, otherwise of its CPU, and a check in a separate process whether torch can
use the GPUs. Never imports torch.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from sft_play.errors import HardwareError, raise_all
from sft_play.plan.hardware import USABLE_CARDS, Device, Hardware, cpu_only, cpu_threads, find_card, ram_bytes
from sft_play.runs.origin import torch_version
from sft_play.text import Finding, plural

NOTHING = ("", "-1", "none", "void", "NoDevFiles")
"""Entries of `CUDA_VISIBLE_DEVICES` that hide GPUs on purpose; Slurm sets the last one for jobs without GPUs."""
WITHOUT = "`CUDA_VISIBLE_DEVICES=` continues without GPUs"


def detect() -> Hardware:
    """Return this machine's hardware without the GPUs that `CUDA_VISIBLE_DEVICES` hides.

    Raise `HardwareError` for GPUs or a driver that do not work.
    """
    if all_hidden():
        return replace(cpu_only(), unused=other_gpu())
    with nvml_session() as nvml:
        if nvml is None:
            return replace(cpu_only(), unused=other_gpu())
        devices, (driver, cuda) = [device for _, device in look_at_gpus(nvml)[0]], versions_of(nvml)
    if not devices:
        return cpu_only()
    return Hardware(
        kind="cuda",
        devices=tuple(devices),
        cpu_threads=cpu_threads(),
        ram_bytes=ram_bytes()[0],
        driver=driver,
        driver_cuda=cuda,
    )


@dataclass(frozen=True, slots=True)
class Shown:
    """A GPU or a MIG slice that a process on this machine may use."""

    number: int
    """The driver's number of the card."""
    handle: Any
    card: Any
    """Handle of the card, of which `handle` may be a slice."""
    mig_uuid: str | None = None


def open_nvml() -> Any | None:
    """Return the initialised `pynvml` module, or `None` if there is no NVIDIA driver.

    Raise `HardwareError` for a driver that fails, as after an update without a restart.
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
            f"the NVIDIA driver fails: {error}",
            hint=f"reinstall the NVIDIA driver, or reboot after its update; {WITHOUT}",
        ) from error
    return pynvml


@contextmanager
def nvml_session() -> Iterator[Any | None]:
    """Yield what `open_nvml` returns, and shut it down afterwards. Raise like `open_nvml`."""
    nvml = open_nvml()
    try:
        yield nvml
    finally:
        if nvml is not None:
            nvml.nvmlShutdown()


def versions_of(nvml: Any) -> tuple[str, str]:
    """Return the versions of the driver and of the newest CUDA that it supports."""
    cuda = int(nvml.nvmlSystemGetCudaDriverVersion())
    return nvml.nvmlSystemGetDriverVersion(), f"{cuda // 1000}.{cuda % 1000 // 10}"


def all_hidden() -> bool:
    """Return whether `CUDA_VISIBLE_DEVICES` hides every GPU."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() in NOTHING


def shown_gpus(nvml: Any) -> tuple[list[Shown], int]:
    """Return the GPUs that `CUDA_VISIBLE_DEVICES` shows, in its order, and the number of GPUs in the machine.

    A process sees complete GPUs or a single MIG slice: the first one named, otherwise the largest of the first card.
    Raise `HardwareError` for a GPU that does not answer (fallen off the bus, or removed), for slices that may not be
    used, and for names of no GPU.
    """
    count = int(nvml.nvmlDeviceGetCount())
    cards, uuids, lost = dict[int, Shown](), dict[int, str](), dict[int, Exception]()
    for index in range(count):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuids[index] = nvml.nvmlDeviceGetUUID(handle)
            cards[index] = Shown(index, handle, handle)
        except nvml.NVMLError as error:  # an error only if this GPU is selected
            lost[index] = error
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(index) for index in range(count)] if text is None else [name.strip() for name in text.split(",")]
    shown: dict[tuple[int, str | None], Shown] = {}
    for name in names:
        if name in NOTHING:  # as in CUDA, later entries are hidden too
            break
        if name.startswith("MIG-"):
            slices = [gpu for card in cards.values() if _is_split(nvml, card) for gpu in _slices(nvml, card)]
            matches = [gpu for gpu in slices if str(gpu.mig_uuid).startswith(name)]
        else:
            by_uuid = [index for index, uuid in uuids.items() if name.startswith("GPU-") and uuid.startswith(name)]
            numbers = [index for index in range(count) if name == str(index)] + by_uuid
            if numbers and numbers[0] in lost:
                raise _no_answer(numbers[0], count, lost[numbers[0]])
            matches = [cards[index] for index in numbers]
        if not matches:
            machine = "no GPU here has it" if name.startswith("MIG-") else f"this machine has {plural(count, 'GPU')}"
            raise HardwareError(
                f"CUDA_VISIBLE_DEVICES=`{text}` names {name}, but {machine}",
                hint="unset CUDA_VISIBLE_DEVICES, or name GPUs of `nvidia-smi -L`",
            )
        shown.setdefault((matches[0].number, matches[0].mig_uuid), matches[0])
    return _visible_at_once(nvml, list(shown.values())), count


def _visible_at_once(nvml: Any, shown: list[Shown]) -> list[Shown]:
    """Return those that a process sees at once: complete GPUs, the first named slice, or the first card's largest."""
    whole = [gpu for gpu in shown if not gpu.mig_uuid and not _is_split(nvml, gpu)]
    named = [gpu for gpu in shown if gpu.mig_uuid]
    if whole or named or not shown:
        return whole or named[:1]
    return [max(_slices(nvml, shown[0]), key=lambda mig: gpu_memory(nvml, mig)[0])]


def _is_split(nvml: Any, card: Shown) -> bool:
    """Return whether MIG is enabled."""
    try:
        return bool(nvml.nvmlDeviceGetMigMode(card.handle)[0])
    except nvml.NVMLError:  # cards and drivers that do not know MIG
        return False


def _slices(nvml: Any, card: Shown) -> list[Shown]:
    """Return the MIG slices of a card. Raise `HardwareError` if this user may use none."""
    slices: list[Shown] = []
    reason = "it has none"
    for place in range(int(nvml.nvmlDeviceGetMaxMigDeviceCount(card.handle))):
        try:
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(card.handle, place)
            slices.append(Shown(card.number, handle, card.handle, nvml.nvmlDeviceGetUUID(handle)))
        except nvml.NVMLError as error:
            reason = reason if error.value == nvml.NVML_ERROR_NOT_FOUND else str(error)
    if not slices:
        raise HardwareError(
            f"GPU {card.number} ({nvml.nvmlDeviceGetName(card.handle)}) is split by MIG, and none of its slices can be"
            f" used here: {reason}",
            hint=(
                "`nvidia-smi -L` lists slices; a container needs one by its name (`--gpus '\"device=MIG-...\"'`), and"
                f" `nvidia-smi mig -cgi` makes them; {WITHOUT}"
            ),
        )
    return slices


def gpu_memory(nvml: Any, gpu: Shown) -> tuple[int, int]:
    """Return (total, free) memory of a GPU, or of the machine where the GPU has no separate memory (GB10, Jetson).

    Raise `HardwareError`.
    """
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


def look_at_gpus(nvml: Any) -> tuple[list[tuple[Shown, Device]], int]:
    """Return the result of `shown_gpus`, with a plan's device for each GPU. Raise like `shown_gpus`."""
    shown, count = shown_gpus(nvml)
    gpus = []
    for gpu in shown:
        try:
            gpus.append((gpu, _device(nvml, gpu)))
        except nvml.NVMLError as error:
            raise _no_answer(gpu.number, count, error) from error
    return gpus, count


def _device(nvml: Any, gpu: Shown) -> Device:
    name, (total, free) = str(nvml.nvmlDeviceGetName(gpu.handle)), gpu_memory(nvml, gpu)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(gpu.card)
    capability, card = (int(major), int(minor)), None if gpu.mig_uuid else find_card(name)
    return Device(
        name=name,
        memory_bytes=total,
        free_bytes=free,
        bf16=capability >= (8, 0),
        fp8=capability >= (8, 9),
        compute_capability=capability,
        peak_flops=card.peak_flops if card else None,
        bandwidth=card.bandwidth if card else None,
        number=gpu.number,
        mig_uuid=gpu.mig_uuid,
        expandable_segments="microsoft" not in os.uname().release.lower(),  # WSL2
    )


def _no_answer(index: int, count: int, error: Exception) -> HardwareError:
    others = ",".join(str(other) for other in range(count) if other != index)
    without = f"`CUDA_VISIBLE_DEVICES={others}` continues without it" if others else WITHOUT
    hint = f"look at `nvidia-smi`; a restart often brings it back; {without}"
    return HardwareError(f"GPU {index} of {count} does not answer: {error}", hint=hint)


def other_gpu() -> str:
    """Return why another manufacturer's GPU is not used; empty if none is known."""
    if Path("/dev/kfd").exists():
        return "an AMD GPU is here (`/dev/kfd`), and training runs on the CPU: ROCm is not supported"
    if os.uname().sysname == "Darwin":
        return "training runs on the CPU: Apple's GPUs (MPS) are not supported"
    return ""


TORCH_FACTS = """
import json, sys, torch
facts = {"version": torch.__version__, "cuda": torch.version.cuda, "architectures": [], "failures": {}}
if torch.version.cuda:
    facts["architectures"] = (torch._C._cuda_getArchFlags() or "").split()
    for index in range(int(sys.argv[1])):
        try:
            torch.ones(1, device=f"cuda:{index}").item()
        except Exception as error:
            facts["failures"][index] = str(error).strip().splitlines()[0]
print(json.dumps(facts))
"""
"""Program that computes a number on each GPU, which takes a context, an allocation and a kernel, and so also detects
faults that versions do not show.
"""
ASKING_SECONDS = 180
OLDEST = {13: "75"}
"""CUDA's major version -> the oldest compute capability that its compiler supports."""
USUAL_CUDA = "13"
"""CUDA of the GPU machines whose plan is made with a torch without CUDA."""
LACKING_REMEDY = (
    "install a torch build for this GPU: a newer one for new cards, an older one for cards that were dropped"
)


def problems(
    facts: Mapping[str, Any] | str, devices: Sequence[Device], driver: str | None, driver_cuda: str | None
) -> list[Finding]:
    """Return why torch cannot use some of `devices`; `facts` is the output of `TORCH_FACTS` or torch's import error.

    Without `failures`, only versions are compared.
    """
    if isinstance(facts, str):
        return [Finding("torch-broken", "error", f"torch cannot be imported: {facts}", "make install")]
    version, cuda, failures = facts["version"], facts["cuda"], facts.get("failures")
    if cuda is None:
        text = (
            f"this machine has {plural(len(devices), 'GPU')}, but torch {version} is a build without CUDA: training"
            " would use the CPU"
        )
        remedy = "install torch's CUDA build: remove .venv, unset a CPU-only index in pip's settings, make install"
        return [Finding("torch-without-cuda", "error", text, remedy)]
    if failures == {}:
        return []
    # Minor versions of CUDA are compatible within a major one.
    if driver_cuda and number(cuda)[0] > number(driver_cuda)[0]:
        text = f"torch {version} is built for CUDA {cuda}, driver {driver} is for {driver_cuda}"
        return [
            Finding(
                "driver-too-old", "error", text, "update the NVIDIA driver, or install a torch built for an older CUDA"
            )
        ]
    capabilities = [".".join(map(str, device.compute_capability or ())) for device in devices]
    has = f"; it has {', '.join(facts['architectures'])}" if facts["architectures"] else ""
    built = facts["architectures"] or _oldest(cuda)
    without = {capability for capability in capabilities if not supports(built, capability)}
    kinds = dict.fromkeys((device.name, own) for device, own in zip(devices, capabilities, strict=True))
    faults = [
        Finding(
            "torch-lacks-architecture",
            "error",
            f"torch {version} has no code for {name} (compute capability {capability}){has}",
            LACKING_REMEDY,
        )
        for name, capability in kinds
        if capability in without
    ]
    look = "look at `nvidia-smi`: its processes, compute mode and errors; then restart the machine"
    faults += [
        Finding(
            "gpu-unusable",
            "error",
            f"torch {version} cannot use GPU {index} ({devices[int(index)].name}): {error}",
            look,
        )
        for index, error in (failures or {}).items()
        if capabilities[int(index)] not in without
    ]
    return faults


@cache
def _torch_facts(count: int, environment: tuple[tuple[str, str], ...]) -> dict[str, Any] | str:
    """Return the output of `TORCH_FACTS` for the first `count` GPUs, or the error of importing torch."""
    try:
        process = subprocess.run(
            [sys.executable, "-c", TORCH_FACTS, str(count)],
            capture_output=True,
            text=True,
            timeout=ASKING_SECONDS,
            check=False,
            env=dict(environment),
        )
    except subprocess.TimeoutExpired:
        return f"it does not answer within {ASKING_SECONDS} s"
    if process.returncode:
        return process.stderr.strip().splitlines()[-1] if process.stderr.strip() else f"exit code {process.returncode}"
    facts: dict[str, Any] = json.loads(process.stdout.strip().splitlines()[-1])
    return facts


def compare_versions(hardware: Hardware) -> list[Finding]:
    """Return the findings from the installed versions and the driver alone, without starting a process."""
    installed = torch_version()
    if installed is None or hardware.driver is None:
        return []
    facts: dict[str, Any] = {"version": installed[0], "cuda": installed[1], "architectures": []}
    return problems(facts, hardware.devices, hardware.driver, hardware.driver_cuda)


def ask_torch(hardware: Hardware, indices: Sequence[int], environment: Mapping[str, str]) -> list[Finding]:
    """Return everything that keeps torch from using these GPUs in the workers' environment."""
    facts = _torch_facts(len(indices), tuple(sorted(environment.items())))
    return problems(facts, [hardware.devices[index] for index in indices], hardware.driver, hardware.driver_cuda)


def require_usable(hardware: Hardware, indices: Sequence[int], environment: Mapping[str, str]) -> None:
    """Raise `HardwareError` with every fault of the GPUs that a plan uses."""
    raise_all(
        [HardwareError(finding.text, hint=finding.remedy) for finding in ask_torch(hardware, indices, environment)]
    )


def require_kernels(hardware: Hardware, place: str) -> Hardware:
    """Return described hardware. Raise `HardwareError` for a card that torch's CUDA has no kernels for."""
    cuda = (torch_version() or ("", None))[1] or USUAL_CUDA
    for device in hardware.devices:
        capability = ".".join(map(str, device.compute_capability or ()))
        if capability and not supports(_oldest(cuda), capability):
            raise HardwareError(
                f"`{device.name}` has compute capability {capability}, and torch for CUDA {cuda} has no code for it",
                place=place,
                hint=USABLE_CARDS,
            )
    return hardware


def _oldest(cuda: str) -> list[str]:
    """Return what a torch build is for whose architectures are not known: all cards that its CUDA supports."""
    return [f"compute_{OLDEST.get(number(cuda)[0], '00')}"]


def number(version: str) -> tuple[int, ...]:
    """Return a version as comparable numbers."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def supports(architectures: Sequence[str], capability: str) -> bool:
    """Return whether a torch build runs on a card: `sm_XY` of its major and no newer minor version, or no newer PTX."""
    card = number(capability)
    for architecture in architectures:
        kind, _, digits = architecture.partition("_")
        digits = re.sub(r"\D.*", "", digits)
        built = (int(digits[:-1]), int(digits[-1]))
        if kind == "sm" and built[0] == card[0] and built[1] <= card[1]:
            return True
        if kind == "compute" and built <= card:
            return True
    return False
