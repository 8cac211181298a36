"""Power limits of cards, and the energy of a run at them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sft_play.plan.hardware import Device

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
