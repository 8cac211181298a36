"""Devices as the plan sees them: detected, or described by the user (`HARDWARE=2x24GB`)."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from sft_play.errors import HardwareError
from sft_play.plan.catalogue import BOARD_WATTS, Card, did_you_mean, find_card

GIB = 2**30
GB = 10**9
USABLE = 0.98
"""Share of a card's nominal gigabytes (which are GiB on cards) that programs see; ECC and driver keep the rest."""
HEADROOM = {"cuda": 0.94, "cpu": 0.85}
"""Share of the free memory that is planned for."""
FULL = 0.05
"""A GPU with a smaller share of its memory free is full: CUDA and a model's first layer already need more."""
COMPUTE_MODE_REMEDY = "`sudo nvidia-smi -c 0` lets every process compute on it; CUDA_VISIBLE_DEVICES chooses another"
ASSUMED_THREADS, ASSUMED_RAM = 8, 64 * GIB
"""Of a machine whose GPUs alone are described."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One GPU, or the CPU of a machine."""

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
    power_watts: float | None = None
    """The limit that the driver enforces, or the card's by its data sheet; `None` when unknown (always so for a CPU)."""
    number: int | None = None
    """The driver's number, as `CUDA_VISIBLE_DEVICES` takes it; `None` for the CPU and for what is described."""
    mig_uuid: str | None = None
    """Of a MIG slice, as `CUDA_VISIBLE_DEVICES` takes it."""
    blocked: str = ""
    """Why no program of ours may compute on it (its compute mode); empty where one may."""
    expandable_segments: bool = True
    """Whether torch's allocator can grow its blocks in place there. Under WSL2 the first allocation would fail (pytorch#192330)."""

    @property
    def full(self) -> bool:
        """Whether other programs hold nearly all of its memory."""
        return self.free_bytes < FULL * self.memory_bytes

    @property
    def cannot_be_used(self) -> str:
        """The refusal of a `blocked` GPU, with the driver's number, which `nvidia-smi` shows too."""
        return f"GPU {self.number} ({self.name}) cannot be used: {self.blocked}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """What a run may use on this machine."""

    kind: Literal["cpu", "cuda"]
    devices: tuple[Device, ...]
    """The GPUs, or one entry for the CPU."""
    cpu_threads: int
    ram_bytes: int
    described: bool = False
    """Whether the user described it, rather than this machine being looked at."""
    network_bytes_per_second: float | None = None
    """Between machines, or between cards without a faster link; `None` when nothing is known."""
    ram_known: bool = True
    """Whether `ram_bytes` was looked up or stated, rather than assumed."""
    nodes: int = 1
    """Machines like this one that a description names; `NUM_NODES` wins."""
    listed: int = 0
    """Entries of a description that `+` joins, such as 2 of `12GB+8GB`; 0 where nothing was written so."""
    driver: str | None = None
    """Version of NVIDIA's driver; `None` where none was looked at."""
    driver_cuda: str | None = None
    """The newest CUDA that it supports, such as `13.0`."""
    unused: str = ""
    """Why a GPU of this machine does nothing."""


PART = re.compile(r"(?:(\d{1,4})\s*[x*]\s*)?([A-Za-z0-9 .\-]+?)(?:\s*[x*]\s*(\d{1,2}))?")
"""`2x24GB`, `4090`, `A100 x 2`."""
MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(GB|GiB|G)", re.IGNORECASE)
WELL_KNOWN = ("RTX4090", "RTX5090", "L40S", "A100", "H100", "H200")
NETWORK = re.compile(r"(\d+(?:\.\d+)?)\s*(G|M)bit(?:/s)?", re.IGNORECASE)


def parse_hardware(text: str) -> Hardware:
    """Returns described hardware: `2x24GB`, `12GB+8GB@1Gbit`, `2x8xH100` (machines first), `cpu`, or a YAML file. Raises `UserError`."""
    if re.search(r"\.ya?ml$", text.strip(), re.IGNORECASE):
        from sft_play.plan.hardware_file import read_hardware

        return read_hardware(Path(text.strip()))
    body, at, network = text.partition("@")
    speed = network_speed(network, f"HARDWARE={text}") if at else None
    if body.strip().lower() == "cpu":
        from sft_play.plan.detect import cpu_only

        return replace(cpu_only(), network_bytes_per_second=speed)
    machines = re.match(r"\s*(\d{1,4})\s*x\s*(?=\d+\s*x)", body)  # `2x8xH100`
    parts = re.split("[+,]", body[machines.end() if machines else 0 :])
    devices = [device for part in parts for device in _devices(part.strip(), text)]
    return Hardware(
        kind="cuda", devices=tuple(devices), cpu_threads=ASSUMED_THREADS, ram_bytes=ASSUMED_RAM, described=True,
        network_bytes_per_second=speed, ram_known=False, listed=len(parts), nodes=int(machines.group(1)) if machines else 1,
    )  # fmt: skip


def network_speed(text: str, place: str, named: str = "`HARDWARE` names the network") -> float:
    """Returns the bytes per second that a network such as `1Gbit` carries. Raises `HardwareError`."""
    match = NETWORK.fullmatch(text.strip())
    if not match or float(match.group(1)) <= 0:
        raise HardwareError(f"{named} `{text}`; expected such as `1Gbit`", place=place)
    # Ethernet and TCP headers leave 94 % of the line rate.
    return float(match.group(1)) * (1e9 if match.group(2).upper() == "G" else 1e6) / 8 * 0.94


def _devices(part: str, text: str) -> list[Device]:
    match = PART.fullmatch(
        re.sub(r"^(\d{1,2}) +(?=[A-WYZa-wyz])(?!Gi?B?$)", r"\1x", part)
    )  # `2 RTX 3090`, but neither `2 x A100` nor `24 GB`
    count = int(match.group(1) or match.group(3) or 1) if match and not (match.group(1) and match.group(3)) else 0
    name = match.group(2).strip() if match else ""
    if not 1 <= count <= 4096:
        raise _nonsense(part, text)
    if memory := MEMORY.fullmatch(name):
        size = int(float(memory.group(1)) * GIB * USABLE)
        if size < GIB:
            raise _nonsense(part, text)
        return [Device(name=f"{memory.group(1)} GB GPU", memory_bytes=size, free_bytes=size, bf16=True)] * count
    found = find_card(name)
    if found is None:
        raise _nonsense(part, text)
    device = device_of(*found)
    if written := re.search(r"(\d+)\s*Gi?B$", name, re.IGNORECASE):
        size = int(int(written.group(1)) * GIB * USABLE)
        if abs(size - device.memory_bytes) > 0.1 * device.memory_bytes:  # another version of the card: `3080 12GB`, `4090 48GB`
            device = replace(device, name=f"{device.name} {written.group(1)}GB", memory_bytes=size, free_bytes=size)
    return [device] * count


def device_of(label: str, card: Card) -> Device:
    """Returns the device that a catalogue row describes."""
    size = int(card.memory_gib * GIB)
    return Device(
        name=label,
        memory_bytes=size,
        free_bytes=size,
        bf16=card.capability >= (8, 0),
        fp8=card.capability >= (8, 9),
        compute_capability=card.capability,
        peak_flops=card.bf16_tflops * 1e12,
        bandwidth=card.bandwidth_gb_s * GB,
        power_watts=BOARD_WATTS.get(label),
    )


def _nonsense(part: str, text: str) -> HardwareError:
    meant = did_you_mean(part.split("x", 1)[-1] if re.match(r"\d+\s*x", part) else part)
    return HardwareError(
        f"`{part}` is not hardware that is known",
        place=f"HARDWARE={text}",
        hint=(f"did you mean `{meant}`? " if meant else "")
        + f"write 2x24GB, 12GB+8GB@1Gbit, 2x8xH100, cpu, a YAML file, or a count and a name of docs/hardware.md, such as {', '.join(WELL_KNOWN)}",
    )
