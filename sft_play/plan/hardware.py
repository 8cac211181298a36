"""Devices as the plan sees them: detected, or described by the user (`HARDWARE=2x24GB`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from sft_play.errors import HardwareError
from sft_play.plan.power import BOARD_WATTS

GIB = 2**30
GB = 10**9
USABLE = 0.98
"""Share of a card's nominal gigabytes (which are GiB on cards) that programs see; ECC and driver keep the rest."""


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


@dataclass(frozen=True, slots=True)
class Card:
    """A row of the catalogue: nominal figures, for a forecast before anything is measured; laptop parts apart."""

    memory_gib: float
    """What programs see, in GiB."""
    bf16_tflops: float
    bandwidth_gb_s: float
    capability: tuple[int, int]
    source: str


SHEET = "NVIDIA data sheet, dense"
GEFORCE = (
    "NVIDIA architecture papers: bf16 with fp32 accumulation is twice the fp32 rate, 512 operations a clock and multiprocessor"
)

CATALOGUE: Mapping[str, Card] = {
    "RTX3060": Card(11.8, 25.5, 360, (8, 6), GEFORCE), "RTX3070": Card(7.8, 40.6, 448, (8, 6), GEFORCE),
    "RTX3070Ti": Card(7.8, 43.5, 608, (8, 6), GEFORCE), "RTX3080": Card(9.8, 59.5, 760, (8, 6), GEFORCE),
    "RTX3090": Card(23.6, 71.2, 936, (8, 6), GEFORCE), "RTX3090Ti": Card(23.6, 80.0, 1008, (8, 6), GEFORCE),
    "RTX4060": Card(7.8, 30.2, 272, (8, 9), GEFORCE), "RTX4060Ti": Card(7.8, 44.1, 288, (8, 9), GEFORCE),
    "RTX4060Ti-16GB": Card(15.6, 44.1, 288, (8, 9), GEFORCE), "RTX4070": Card(11.8, 58.3, 504, (8, 9), GEFORCE),
    "RTX4070Super": Card(11.8, 71.0, 504, (8, 9), GEFORCE), "RTX4070Ti": Card(11.8, 80.2, 504, (8, 9), GEFORCE),
    "RTX4070TiSuper": Card(15.6, 88.2, 672, (8, 9), GEFORCE), "RTX4080": Card(15.6, 97.5, 717, (8, 9), GEFORCE),
    "RTX4080Super": Card(15.6, 104.4, 736, (8, 9), GEFORCE), "RTX4090": Card(23.6, 165.2, 1008, (8, 9), GEFORCE),
    "RTX5070": Card(11.8, 61.7, 672, (12, 0), GEFORCE), "RTX5070Ti": Card(15.6, 87.9, 896, (12, 0), GEFORCE),
    "RTX5080": Card(15.6, 112.6, 960, (12, 0), GEFORCE), "RTX5090": Card(31.4, 209.5, 1792, (12, 0), GEFORCE),
    "RTX4070Laptop": Card(7.8, 40.0, 256, (8, 9), "2 x fp32 at 115 W; 22.7 at 35 W"),
    "RTX5070TiLaptop": Card(11.8, 62.0, 672, (12, 0), "NVIDIA AI-TOPS / 16; inferred"),
    "RTXA6000": Card(47.5, 154.8, 768, (8, 6), SHEET), "RTX6000Ada": Card(47.4, 364.2, 960, (8, 9), SHEET),
    "V100": Card(15.8, 125.0, 900, (7, 0), "NVIDIA data sheet, 16 GB SXM2 (fp16; the card has no bf16)"),
    "T4": Card(14.7, 65.0, 320, (7, 5), "NVIDIA data sheet (fp16; the card has no bf16)"),
    "L4": Card(22.2, 121.0, 300, (8, 9), SHEET), "L40": Card(44.4, 181.0, 864, (8, 9), SHEET), "L40S": Card(44.4, 362.0, 864, (8, 9), SHEET),
    "A10": Card(22.2, 125.0, 600, (8, 6), SHEET), "A10G": Card(22.2, 70.0, 600, (8, 6), SHEET), "A40": Card(44.4, 149.7, 696, (8, 6), SHEET),
    "A100-40GB": Card(39.4, 312.0, 1555, (8, 0), SHEET), "A100": Card(79.2, 312.0, 2039, (8, 0), SHEET + ", SXM"),
    "H20": Card(95.0, 148.0, 4000, (9, 0), SHEET), "H100": Card(79.1, 989.0, 3350, (9, 0), SHEET + ", SXM"),
    "H100NVL": Card(93.1, 835.0, 3900, (9, 0), SHEET), "GH200": Card(94.5, 989.0, 4000, (9, 0), SHEET + ", 96 GB"),
    "H200": Card(139.8, 989.0, 4800, (9, 0), SHEET + ", SXM"), "H200NVL": Card(139.8, 835.0, 4800, (9, 0), SHEET),
    "B200": Card(178.0, 2250.0, 8000, (10, 0), SHEET),
}  # fmt: skip

PART = re.compile(r"(?:(\d{1,4})\s*[x*]\s*)?([A-Za-z0-9 .\-]+)")
MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(GB|GiB|G)", re.IGNORECASE)
OTHER_MODEL = re.compile(r"ti|super|\d(?!\d*gb)")
"""What makes a longer name another card: L40 is no L4, but `H100 80GB` is an H100."""
NETWORK = re.compile(r"(\d+(?:\.\d+)?)\s*(G|M)bit(?:/s)?", re.IGNORECASE)


def parse_hardware(text: str) -> Hardware:
    """Returns described hardware: `2x24GB`, `12GB+8GB+8GB@1Gbit`, `4xH200`, `cpu`. Raises `HardwareError`."""
    body, _, network = text.partition("@")
    speed = None
    if network:
        match = NETWORK.fullmatch(network.strip())
        if not match or float(match.group(1)) <= 0:
            raise HardwareError(f"`HARDWARE` names the network `{network}`; expected such as `1Gbit`", place=f"HARDWARE={text}")
        # Ethernet and TCP headers leave 94 % of the line rate.
        speed = float(match.group(1)) * (1e9 if match.group(2).upper() == "G" else 1e6) / 8 * 0.94
    if body.strip().lower() == "cpu":
        from sft_play.plan.detect import cpu_only

        return replace(cpu_only(), network_bytes_per_second=speed)
    devices = [device for part in body.split("+") for device in _devices(part.strip(), text)]
    return Hardware(
        kind="cuda", devices=tuple(devices), cpu_threads=8, ram_bytes=64 * GIB, described=True, network_bytes_per_second=speed
    )


def _devices(part: str, text: str) -> list[Device]:
    match = PART.fullmatch(part)
    count = int(match.group(1) or 1) if match else 0
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
    label, card = found
    return [device_of(label, card)] * count


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


def find_card(name: str) -> tuple[str, Card] | None:
    """Returns the catalogue row of a GPU's name as people or drivers write it, or `None`.

    Only speed is looked up by name: memory comes from the driver wherever there is one.
    """
    plain = re.sub(r"nvidia|geforce|graphics|gpu|device|tesla|sxm\d?|pcie|hbm\d?e?|[\s\-_]", "", name.lower())
    keys = sorted(CATALOGUE, key=len, reverse=True)
    for key in keys:
        if plain == re.sub(r"[\s\-_]", "", key.lower()):
            return key, CATALOGUE[key]
    laptop = "laptop" in plain
    for key in keys:
        short = re.sub(r"[\s\-_]", "", key.lower())
        if plain.startswith(short) and ("laptop" in short) == laptop and not OTHER_MODEL.match(plain[len(short) :]):
            return key, CATALOGUE[key]
    return None


def _nonsense(part: str, text: str) -> HardwareError:
    return HardwareError(
        f"`{part}` is not hardware that is known",
        place=f"HARDWARE={text}",
        hint=f"write 2x24GB, 12GB+8GB@1Gbit, cpu, or a count and a name of {', '.join(CATALOGUE)}",
    )
