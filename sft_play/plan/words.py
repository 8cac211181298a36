"""Numbers of a plan in words: figures without an exponent, speeds, the moment and the operation of a peak. Pure."""

from __future__ import annotations

import math

MOMENTS = {
    "forward first": "in the first layer's forward pass", "forward middle": "in the forward pass",
    "forward last": "in the last layer's forward pass", "forward head": "where the logits and the loss are computed",
    "backward head": "where the gradient of the logits is computed", "backward last": "in the last layer's backward pass, all activations held",
    "backward middle": "in the backward pass", "backward first": "at the end of the backward pass, all gradients held",
    "update": "in the optimizer's update",
}  # fmt: skip


def peak_in_words(moment: str, operation: str) -> str:
    """Returns where in the step the peak stands: the moment, and the operation of torch that reached it."""
    name = operation.removeprefix("aten.").removesuffix(".default")
    return MOMENTS.get(moment, moment) + (f" (`{name}`)" if name else "")


def figure(value: float, digits: int = 3) -> str:
    """Returns a number with so many digits that count, never with an exponent: `4,590`, `11.8`, `0.00012`."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    rounded = float(f"{value:.{digits}g}")
    places = digits - 1 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:.{places}f}".rstrip("0").rstrip(".") if places > 0 else f"{rounded:,.0f}"


def gib(size: float) -> str:
    """Returns bytes as `1.06 GiB`, of large ones `120 GiB`, of small ones `3.2 MiB`."""
    if size < 2**30 / 100:
        return f"{size / 2**20:.1f} MiB"
    return f"{size / 2**30:.2f} GiB" if size < 100 * 2**30 else f"{size / 2**30:.0f} GiB"


def rate_in_words(bytes_per_second: float) -> str:
    """Returns a speed as `118 MB/s` or `11.8 GB/s`."""
    return f"{figure(bytes_per_second / 1e9)} GB/s" if bytes_per_second >= 1e9 else f"{figure(bytes_per_second / 1e6)} MB/s"
