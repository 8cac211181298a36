"""GPUs by name: bf16 speed, memory, bandwidth and power, each with its source. Pure data and its look-up."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sft_play.plan.hardware import Device


FLOP_PER_CLOCK = 512
"""bf16 operations a clock and multiprocessor of a GeForce card, with fp32 accumulation."""


@dataclass(frozen=True, slots=True)
class Card:
    """A row of the catalogue: nominal figures, for a forecast before anything is measured; laptop parts apart."""

    memory_gib: float
    """What programs see, in GiB."""
    bf16_tflops: float
    bandwidth_gb_s: float
    capability: tuple[int, int]
    source: str
    confirmed: bool = True
    """Whether a published page was found that agrees; `False`: unconfirmed, written from memory or inferred."""


def _geforce(
    memory_gib: float, multiprocessors: int, boost_ghz: float, bandwidth: float, capability: tuple[int, int], confirmed: bool = True
) -> Card:  # fmt: skip
    """Returns a card whose speed follows from the rule of its family."""
    return Card(
        memory_gib, round(multiprocessors * boost_ghz * FLOP_PER_CLOCK / 1000, 1), bandwidth, capability,
        f"{multiprocessors} SMs x {boost_ghz:g} GHz x {FLOP_PER_CLOCK}", confirmed,
    )  # fmt: skip


SHEET = "NVIDIA data sheet, dense"
AMPERE, ADA, BLACKWELL = (8, 6), (8, 9), (12, 0)

FP32_SHARES = {(7, 0): 1 / 8, (7, 5): 1 / 8, (8, 0): 1 / 16, (9, 0): 1 / 15, (9, 4): 1 / 8, (10, 0): 1 / 28}
"""Compute capability -> fp32 speed outside of tensor cores as a share of bf16's (fp16's), by NVIDIA's data sheets: T4 8.1 of 65, V100
15.7 of 125, A100 19.5 of 312, H100 67 of 989, MI300X 163 of
1307, B200 80 of 2250. Others: half on GeForce cards, a quarter on L4, L40S, A10 and RTX A6000."""


def fp32_share(name: str, capability: tuple[int, int] | None) -> float:
    """Returns the speed of fp32 matrix products as a share of bf16's. TF32, which torch leaves off, would be faster."""
    return FP32_SHARES.get(capability or (0, 0)) or (
        1 / 4 if re.search(r"\b(L4\b|L40S|A10|A40|RTX ?A6000|RTX ?6000)", name) else 1 / 2
    )


NO_PEER_TO_PEER = re.compile(r"GeForce RTX (40|50)\d\d")
"""Consumer cards without peer-to-peer transfers; accelerate knows only the 40 series, and a 50 series pair may hang. `RTX 4000` is none."""

CATALOGUE: Mapping[str, Card] = {
    # GeForce, desktop.
    "RTX3060": _geforce(11.8, 28, 1.777, 360, AMPERE, False), "RTX3070": _geforce(7.8, 46, 1.725, 448, AMPERE, False),
    "RTX3070Ti": _geforce(7.8, 48, 1.77, 608, AMPERE), "RTX3080": _geforce(9.8, 68, 1.71, 760, AMPERE, False),
    "RTX3080Ti": _geforce(11.8, 80, 1.665, 912, AMPERE, False), "RTX3090": _geforce(23.6, 82, 1.695, 936, AMPERE),
    "RTX3090Ti": _geforce(23.6, 84, 1.86, 1008, AMPERE, False),
    "RTX4060": _geforce(7.8, 24, 2.46, 272, ADA), "RTX4060Ti": _geforce(7.8, 34, 2.535, 288, ADA),
    "RTX4060Ti-16GB": _geforce(15.6, 34, 2.535, 288, ADA), "RTX4070": _geforce(11.8, 46, 2.475, 504, ADA),
    "RTX4070Super": _geforce(11.8, 56, 2.475, 504, ADA, False), "RTX4070Ti": _geforce(11.8, 60, 2.61, 504, ADA),
    "RTX4070TiSuper": _geforce(15.6, 66, 2.61, 672, ADA, False), "RTX4080": _geforce(15.6, 76, 2.505, 717, ADA),
    "RTX4080Super": _geforce(15.6, 80, 2.55, 736, ADA, False), "RTX4090": _geforce(23.6, 128, 2.52, 1008, ADA),
    "RTX5070": _geforce(11.8, 48, 2.51, 672, BLACKWELL), "RTX5070Ti": _geforce(15.6, 70, 2.452, 896, BLACKWELL),
    "RTX5080": _geforce(15.6, 84, 2.617, 960, BLACKWELL), "RTX5090": _geforce(31.4, 170, 2.407, 1792, BLACKWELL),
    # GeForce, laptops: at the highest power that a maker may set; the RTX 4070 reaches 22.7 TFLOP/s at 35 W.
    "RTX4060Laptop": _geforce(7.8, 24, 2.37, 256, ADA), "RTX4070Laptop": _geforce(7.8, 36, 2.175, 256, ADA),
    "RTX4080Laptop": _geforce(11.8, 58, 2.28, 432, ADA), "RTX4090Laptop": _geforce(15.6, 76, 2.04, 576, ADA, False),
    "RTX5070TiLaptop": Card(
        11.8, 62.0, 672, BLACKWELL, "NVIDIA's 992 AI TOPS / 16, a rule that desktop cards obey; a boost clock near 2.2 GHz gives 52", False
    ),
    # Workstations and servers.
    "RTXA6000": Card(47.5, 154.8, 768, AMPERE, SHEET), "RTX6000Ada": Card(47.4, 364.2, 960, ADA, SHEET, False),
    "V100": Card(15.8, 125.0, 900, (7, 0), "NVIDIA data sheet, 16 GB SXM2 (fp16; the card has no bf16)"),
    "T4": Card(14.7, 65.0, 320, (7, 5), "NVIDIA data sheet (fp16; the card has no bf16)"),
    "L4": Card(22.2, 121.0, 300, ADA, SHEET), "L40": Card(44.4, 181.0, 864, ADA, SHEET, False), "L40S": Card(44.4, 362.0, 864, ADA, SHEET),
    "A10": Card(22.2, 125.0, 600, AMPERE, SHEET), "A10G": Card(22.2, 70.0, 600, AMPERE, SHEET, False), "A40": Card(44.4, 149.7, 696, AMPERE, SHEET),
    "A100-40GB": Card(39.4, 312.0, 1555, (8, 0), SHEET), "A100": Card(79.2, 312.0, 2039, (8, 0), SHEET + ", SXM 80 GB"),
    "H20": Card(95.0, 148.0, 4000, (9, 0), SHEET), "H100": Card(79.1, 989.0, 3350, (9, 0), SHEET + ", SXM"),
    "H100PCIe": Card(79.1, 756.0, 2000, (9, 0), SHEET + ", PCIe"), "H100NVL": Card(93.1, 835.0, 3900, (9, 0), SHEET),
    "GH200": Card(94.5, 989.0, 4000, (9, 0), SHEET + ", 96 GB", False),
    "H200": Card(139.8, 989.0, 4800, (9, 0), SHEET + ", SXM"), "H200NVL": Card(139.8, 835.0, 4800, (9, 0), SHEET),
    "B200": Card(178.0, 2250.0, 8000, (10, 0), SHEET + ", 180 GB"),
    "MI300X": Card(191.5, 1307.0, 5300, (9, 4), "AMD data sheet, dense, as Bekman's ml-engineering quotes it; reached by matmuls: 668", False),
}  # fmt: skip

OTHER_MODEL = re.compile(r"ti|super|\d(?!\d*gb)")
"""What makes a longer name another card: L40 is no L4, but `H100 80GB` is an H100."""


def find_card(name: str) -> tuple[str, Card] | None:
    """Returns the catalogue row of a GPU's name as people or drivers write it, or `None`.

    Only speed is looked up by name: memory comes from the driver wherever there is one.
    """
    full = re.sub(r"nvidia|amd|instinct|geforce|graphics|gpu|device|tesla|sxm\d?|hbm\d?e?", "", _plain(name))
    if re.match(r"\d|a6000", full):  # `4090`, `3090 Ti`
        full = f"rtx{full}"
    shorter = full.replace("pcie", "")
    keys = sorted(CATALOGUE, key=len, reverse=True)
    for plain in (full, shorter):
        for key in keys:
            if plain == _plain(key):
                return key, CATALOGUE[key]
    laptop = "laptop" in full
    for key in keys:
        short = _plain(key)
        if shorter.startswith(short) and ("laptop" in short) == laptop and not OTHER_MODEL.match(shorter[len(short) :]):
            return key, CATALOGUE[key]
    return None


def did_you_mean(name: str) -> str | None:
    """Returns the name that is most alike, or `None` when none is."""
    known = {_plain(key): key for key in CATALOGUE}
    near = difflib.get_close_matches(_plain(name), known, n=1, cutoff=0.6)
    return known[near[0]] if near else None


def _plain(name: str) -> str:
    return re.sub(r"[\s\-_]", "", name.lower())


# Power limits of cards, and the energy of a run at them. Pure.


BOARD_WATTS: Mapping[str, float] = {
    # NVIDIA's data sheets: thermal design power, or "max power consumption", of the part that the catalogue names.
    "T4": 70, "V100": 300, "L4": 72, "L40": 300, "L40S": 350, "A10": 150, "A40": 300, "RTXA6000": 300, "RTX6000Ada": 300,
    "A100-40GB": 400, "A100": 400, "H100": 700, "H200": 700, "B200": 1000,
    # NVIDIA's product pages: total graphics power of the founders' edition or reference card.
    "RTX3060": 170, "RTX3070": 220, "RTX3070Ti": 290, "RTX3080": 320, "RTX3090": 350, "RTX3090Ti": 450,
    "RTX4060": 115, "RTX4060Ti": 160, "RTX4060Ti-16GB": 165, "RTX4070": 200, "RTX4070Super": 220, "RTX4070Ti": 285,
    "RTX4070TiSuper": 285, "RTX4080": 320, "RTX4080Super": 320, "RTX4090": 450, "RTX5070": 250, "RTX5070Ti": 300, "RTX5080": 360,
    "RTX5090": 575,
}  # fmt: skip
"""Card of the catalogue -> watts. Parts with a range of limits (laptops, NVL and GH parts) are left out."""


def energy_kwh(devices: tuple[Device, ...], seconds: float | None) -> float | None:
    """Returns what GPUs draw in `seconds` at their limits: an upper bound, the machine around them left out.

    `None` when the time, or the limit of any device, is not known.
    """
    watts = [device.power_watts for device in devices]
    if seconds is None or any(limit is None for limit in watts):
        return None
    return sum(limit for limit in watts if limit) * seconds / 3.6e6
