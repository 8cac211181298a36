"""Devices of a plan: this machine's CPU, those that `HARDWARE=2x24GB` describes, and the catalogue of GPUs with its
sources.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from sft_play.errors import HardwareError
from sft_play.files import read_json
from sft_play.runs.origin import processor
from sft_play.text import figure, meant_speed

GIB = 2**30
USABLE = 0.98
"""Share of a card's nominal gigabytes (in fact GiB) that programs can use; ECC and driver keep the rest."""
HEADROOM = {"cuda": 0.94, "cpu": 0.85}
"""Share of the free memory that a plan uses."""
HOST_SHARE = 0.8
"""Share of host memory that offloading may take."""
ASSUMED_THREADS, ASSUMED_RAM = 8, 64 * GIB
"""Assumed for a machine of which only the GPUs are described."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A GPU, or the CPU of a machine."""

    name: str
    memory_bytes: int
    free_bytes: int
    bf16: bool
    """Whether bfloat16 computes at full speed."""
    fp8: bool = False
    compute_capability: tuple[int, int] | None = None
    peak_flops: float | None = None
    """Dense bf16 operations per second with fp32 accumulation; fp32 on a CPU. `None` when unknown."""
    bandwidth: float | None = None
    """Bytes per second of device memory."""
    number: int | None = None
    """The driver's number, as in `CUDA_VISIBLE_DEVICES`; `None` for a CPU and for described devices."""
    mig_uuid: str | None = None
    """UUID of a MIG slice, as in `CUDA_VISIBLE_DEVICES`."""
    expandable_segments: bool = True
    """Whether torch's allocator can grow its blocks in place; under WSL2 the first allocation would fail
    (pytorch#192330).
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """The devices and memory that a run may use on this machine."""

    kind: Literal["cpu", "cuda"]
    devices: tuple[Device, ...]
    """The GPUs, or one entry for the CPU."""
    cpu_threads: int
    ram_bytes: int
    described: bool = False
    """Whether the user described it, instead of detection on this machine."""
    network: str | None = None
    """Network between machines, or between cards without a faster link, such as `1Gbit`; `None` when not known."""
    ram_known: bool = True
    """Whether `ram_bytes` was read or stated, not assumed."""
    nodes: int = 1
    """Machines like this one in a description; `NUM_NODES` takes precedence."""
    listed: int = 0
    """Entries of a description that `+` joins, such as 2 of `12GB+8GB`; 0 without a description."""
    driver: str | None = None
    """Version of NVIDIA's driver; `None` if it was not read."""
    driver_cuda: str | None = None
    """The newest CUDA that the driver supports, such as `13.0`."""
    unused: str = ""
    """Why a GPU of this machine is not used; empty if all are."""

    @property
    def network_bytes_per_second(self) -> float | None:
        """Speed of that network."""
        return network_speed(self.network, "HARDWARE") if self.network else None


PART = re.compile(r"(?:(\d{1,4})\s*[x*]\s*)?([A-Za-z0-9 .\-]+?)(?:\s*[x*]\s*(\d{1,2}))?")
"""`2x24GB`, `4090`, `A100 x 2`."""
MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(GB|GiB|G)", re.IGNORECASE)
ANY_MEMORY = re.compile(rf"(\d+\s*[x*]\s*)?{MEMORY.pattern}(\s*[x*]\s*\d+)?", re.IGNORECASE)
"""GPUs that are described by their memory alone."""
RAM = re.compile(r"(\d+(?:\.\d+)?)\s*(GB|GiB|G|TB|TiB|T)[ -]*RAM", re.IGNORECASE)
WELL_KNOWN = ("RTX4090", "RTX5090", "L40S", "A100", "H100", "H200")
OLDER = re.compile(r"(gtx)?(9|10)[5-8]0(ti)?|[kmp]\d{2,3}|titan(v|xp?)")
"""Cards before the catalogue's first ones, which torch's CUDA has no code for (`plan.detect.OLDEST`)."""
USABLE_CARDS = "GPUs from GeForce RTX 20 and T4 on can be used; docs/hardware.md lists some"
NETWORK = re.compile(r"(\d+(?:\.\d+)?)\s*(G|M)bit(?:/s)?", re.IGNORECASE)


def parse_hardware(text: str) -> Hardware:
    """Return the hardware of a description such as `2x24GB`, `12GB+8GB@1Gbit`, `2x8xH100` (machines first), `cpu` or
    `RTX4090+64GB-RAM` (with a machine's memory).

    Raise `HardwareError`.
    """
    body, at, network = text.partition("@")
    network, plus, memory_after = network.partition("+")  # `8xH100@10Gbit+512GB-RAM`
    body += plus + memory_after
    if at:
        network_speed(network, f"HARDWARE={text}")
    if body.strip().lower() == "cpu":
        return replace(cpu_only(), network=network or None)
    machines = re.match(r"\s*(\d{1,4})\s*x\s*(?=\d+\s*x)", body)  # `2x8xH100`
    parts = [part.strip() for part in re.split("[+,]", body[machines.end() if machines else 0 :])]
    memory = next((match for match in map(RAM.fullmatch, parts) if match), None)
    cards = [part for part in parts if not (memory and part == memory[0])]
    if not cards:
        raise _nonsense(body, text)
    if (size := next(filter(MEMORY.fullmatch, cards), None)) and not all(map(ANY_MEMORY.fullmatch, cards)):
        raise HardwareError(
            f"`{size}` may be a GPU or the machine's memory",
            place=f"HARDWARE={text}",
            hint=f"type {size}-RAM for the machine's memory, or 1x{size} for a GPU",
        )
    devices = [device for part in cards for device in _devices(part, text)]
    return Hardware(
        kind="cuda",
        devices=tuple(devices),
        cpu_threads=ASSUMED_THREADS,
        ram_bytes=int(float(memory[1]) * GIB * (1024 if memory[2][0] in "tT" else 1)) if memory else ASSUMED_RAM,
        described=True,
        network=network or None,
        ram_known=memory is not None,
        listed=len(cards),
        nodes=int(machines.group(1)) if machines else 1,
    )


def network_speed(text: str, place: str, named: str = "`HARDWARE` names the network") -> float:
    """Return the bytes per second that a network such as `1Gbit` carries. Raise `HardwareError`."""
    match = NETWORK.fullmatch(text.strip())
    if not match or float(match.group(1)) <= 0:
        raise HardwareError(f"{named} `{text}`; expected a speed such as `1Gbit`", place=place, hint=meant_speed(text))
    # Ethernet and TCP headers leave 94 % of the line rate.
    return float(match.group(1)) * (1e9 if match.group(2).upper() == "G" else 1e6) / 8 * 0.94


def _devices(part: str, text: str) -> list[Device]:
    # `2 RTX 3090` becomes `2xRTX 3090`, but neither `2 x A100` nor `24 GB` changes.
    match = PART.fullmatch(re.sub(r"^(\d{1,2}) +(?=[A-WYZa-wyz])(?!Gi?B?$)", r"\1x", part))
    count = int(match.group(1) or match.group(3) or 1) if match and not (match.group(1) and match.group(3)) else 0
    name = re.sub(r"([- ]\d+)G$", r"\1GB", match.group(2).strip()) if match else ""
    if not 1 <= count <= 4096:
        raise _nonsense(part, text)
    if memory := MEMORY.fullmatch(name):
        size = int(float(memory.group(1)) * GIB * USABLE)
        if size < GIB:
            raise _nonsense(part, text)
        return [Device(name=f"{memory.group(1)} GB GPU", memory_bytes=size, free_bytes=size, bf16=True)] * count
    device = find_card(name)
    if device is None:
        raise _nonsense(part, text)
    if written := re.search(r"(\d+)\s*Gi?B$", name, re.IGNORECASE):
        size = int(int(written.group(1)) * GIB * USABLE)
        # Another version of the card: `3080 12GB`, `4090 48GB`.
        if abs(size - device.memory_bytes) > 0.1 * device.memory_bytes:
            device = replace(device, name=f"{device.name} {written.group(1)}GB", memory_bytes=size, free_bytes=size)
    return [device] * count


def _nonsense(part: str, text: str) -> HardwareError:
    if OLDER.fullmatch(re.sub(r"^\d+[x*]", "", _plain(part))):
        return HardwareError(f"torch has no code for `{part}` any more", place=f"HARDWARE={text}", hint=USABLE_CARDS)
    names = {_plain(key): key for key in CATALOGUE}
    from sft_play.config.reader import closest_word  # `make doctor` works without packages

    near = closest_word(re.sub(r"^\d+x", "", _plain(part)), list(names))
    return HardwareError(
        f"`{part}` is not known hardware",
        place=f"HARDWARE={text}",
        hint=(f"did you mean `{names[near]}`? " if near else "")
        + "write 2x24GB, 12GB+8GB@1Gbit, 2x8xH100, RTX4090+64GB-RAM, cpu, or a count and a name of docs/hardware.md,"
        f" such as {', '.join(WELL_KNOWN)}",
    )


NO_PEER_TO_PEER = re.compile(r"GeForce RTX (40|50)\d\d")
"""Consumer cards without peer-to-peer transfers; accelerate knows only the 40 series, and a pair of the 50 series may
hang. `RTX 4000` is not a consumer card.
"""


def _card(name: str, memory_gib: float, bf16_tflops: float, bandwidth_gb_s: float, capability: list[int]) -> Device:
    """Return the GPU of a row of the catalogue; `memory_gib` is what programs can use."""
    major, minor = capability
    return Device(
        name=name,
        memory_bytes=int(memory_gib * GIB),
        free_bytes=int(memory_gib * GIB),
        bf16=(major, minor) >= (8, 0),
        fp8=(major, minor) >= (8, 9),
        compute_capability=(major, minor),
        peak_flops=bf16_tflops * 1e12,
        bandwidth=bandwidth_gb_s * 1e9,
    )


CATALOGUE: Mapping[str, Device] = {
    name: _card(name, *figures)
    for source in read_json(Path(__file__).with_name("cards.json")).values()
    for name, figures in source.items()
}
"""Nominal figures for a forecast before anything is measured, by their sources; laptop parts are separate."""
OTHER_MODEL = re.compile(r"ti|super|\d(?!\d*gi?b)")
"""Suffixes that make a longer name another card: L40 is not an L4, but `H100 80GB` is an H100."""


def find_card(name: str) -> Device | None:
    """Return the catalogue's GPU of a name as people or drivers write it, or `None`."""
    full = re.sub(r"nvidia|geforce|graphics|gpu|device|tesla|sxm\d?|hbm\d?e?", "", _plain(name))
    if re.match(r"\d|a6000", full):  # `4090`, `3090 Ti`
        full = f"rtx{full}"
    shorter = full.replace("pcie", "")
    keys = sorted(CATALOGUE, key=len, reverse=True)
    for plain in (full, shorter):
        for key in keys:
            if plain == _plain(key):
                return CATALOGUE[key]
    laptop = "laptop" in full
    for key in keys:
        short = _plain(key)
        if shorter.startswith(short) and ("laptop" in short) == laptop and not OTHER_MODEL.match(shorter[len(short) :]):
            return CATALOGUE[key]
    return None


def _plain(name: str) -> str:
    return re.sub(r"[\s\-_]", "", name.lower())


def cpu_only() -> Hardware:
    """Return this machine without its GPUs."""
    total, free = ram_bytes()
    device = Device(name=processor(), memory_bytes=total, free_bytes=free, bf16=fast_bf16(), peak_flops=None)
    return Hardware(kind="cpu", devices=(device,), cpu_threads=cpu_threads(), ram_bytes=total)


def cpu_threads() -> int:
    """Return the processors that this process may use, within cgroup quotas."""
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            threads = min(threads, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return threads


def ram_bytes() -> tuple[int, int]:
    """Return (total, available) memory within the limits of this process's cgroups (v2)."""
    try:  # without psutil: `make doctor` runs where no package is installed
        lines = Path("/proc/meminfo").read_text().splitlines()
        facts = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        total, free = facts["MemTotal"], facts["MemAvailable"]
    except OSError:  # not Linux
        import psutil

        memory = psutil.virtual_memory()
        total, free = int(memory.total), int(memory.available)
    for group in _cgroups():
        with contextlib.suppress(OSError, ValueError):  # `max` means no limit
            limit = int((group / "memory.max").read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            # The kernel drops pages of files before it runs out.
            used = int((group / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
            total, free = min(total, limit), min(free, max(0, limit - used))
    return total, free


def _cgroups() -> list[Path]:
    root = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                own = root / line[3:].strip().lstrip("/")
                return [path for path in (own, *own.parents) if path.is_relative_to(root)]
    return [root]


def fast_bf16() -> bool:
    """Return whether this CPU multiplies bfloat16 matrices faster than fp32 ones (AMX, or AVX-512 with bf16)."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
        return "amx_bf16" in flags or "avx512_bf16" in flags
    except OSError:
        return False


def rate_in_words(bytes_per_second: float) -> str:
    """Return a speed as `118 MB/s` or `11.8 GB/s`."""
    if bytes_per_second >= 1e9:
        return f"{figure(bytes_per_second / 1e9)} GB/s"
    return f"{figure(bytes_per_second / 1e6)} MB/s"
