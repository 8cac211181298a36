"""Micro-batch and layout by the plan's own forecast: the largest micro-batch that no smaller one beats, rows padded or in one line. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from sft_play.config.schema import TrainConfig
from sft_play.plan import choices
from sft_play.plan.batch import Batch, choose_batch
from sft_play.plan.fit import Fit
from sft_play.plan.hardware import Device, Hardware
from sft_play.plan.layouts import BY_LENGTHS
from sft_play.plan.memory import Setup
from sft_play.plan.words import figure

GAIN = 1.02
"""What is not faster than this is as fast: then the larger micro-batch is taken, and rows in one line."""
TYPICAL_FLOPS, TYPICAL_BANDWIDTH, TYPICAL_NETWORK = 1e14, 1e12, 1e9
"""Of cards and networks whose speed is not known: enough to compare, never shown."""

Seconds = Callable[[Setup, Batch], float]
"""Forecast of a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """What divides the rows of a step: room in bytes and in rows for each rank, and the most rows that are tried."""

    train: TrainConfig
    room: list[int]
    fitting: tuple[int, ...]
    most: int
    unit: str
    known: bool
    """Whether the speeds are those of the very devices."""


def comparable(hardware: Hardware, devices: tuple[Device, ...], nodes: int) -> tuple[Hardware, tuple[Device, ...]]:
    """Returns hardware and devices with the speeds of typical ones where they are not known, so that choices can be compared.

    Of unlike ones those with more memory are taken for the faster, in proportion: 12 and 8 GB cards of one time differ by about that.
    """
    if nodes > 1 and not hardware.network_bytes_per_second:
        hardware = replace(hardware, network_bytes_per_second=TYPICAL_NETWORK)
    if hardware.kind == "cpu":
        return hardware, devices
    unknown = [device for device in devices if not device.peak_flops]
    mean = sum(device.memory_bytes for device in unknown) / max(1, len(unknown))

    def typical(device: Device) -> Device:
        times = device.memory_bytes / mean
        return replace(device, peak_flops=times * TYPICAL_FLOPS, bandwidth=device.bandwidth or times * TYPICAL_BANDWIDTH)

    known = {device: device if device.peak_flops else typical(device) for device in set(devices)}
    return hardware, tuple(known[device] for device in devices)


def choose_rows(fit: Fit, setup: Setup, rows: Rows, seconds: Seconds) -> Batch:
    """Returns the batch: the largest micro-batch than which no smaller one is faster, unless something else was typed."""
    train = rows.train
    whole = choose_batch(train, rows.fitting, rows.most, rows.unit)
    largest = max(whole.micro_batches)
    if train.batch_size != "auto" or train.grad_accum != "auto" or train.packing == "on" or largest == 1:
        return whole
    if not rows.known and len(set(rows.fitting)) > 1:
        return whole  # the larger of unequal cards are mostly the faster ones
    tried = {whole.micro_batches: whole}
    most = 1
    while most < largest:
        batch = choose_batch(train, rows.fitting, most, rows.unit)
        tried.setdefault(batch.micro_batches, batch)
        most *= 2
    times = {micros: _best(fit, setup, batch, rows.room, seconds) for micros, batch in tried.items()}
    least = min(times.values())
    chosen = max((micros for micros in tried if times[micros] <= GAIN * least), key=sum)
    batch = tried[chosen]
    if batch is whole:
        return whole
    reason = (
        f"micro-batch {max(chosen)}, not {largest}: by forecast a step then takes {figure(times[chosen])} s instead of "
        f"{figure(times[whole.micro_batches])} s; the time goes into padding, or a mask over all rows"
    )
    return replace(batch, reasons=(*batch.reasons, reason))


def _best(fit: Fit, setup: Setup, batch: Batch, room: list[int], seconds: Seconds) -> float:
    return seconds(with_layout(fit, setup, batch, room, seconds, []), batch)


def with_layout(fit: Fit, setup: Setup, batch: Batch, room: list[int], seconds: Seconds, reasons: list[str]) -> Setup:
    """Returns the setup with the layout of its rows: in one line where that is exact, fits, and is not slower than padding."""
    if setup.packed:
        return setup
    padded, rows = replace(setup, layout="unmasked"), max(batch.micro_batches)
    layout = choices.choose_layout(fit.config, fit.shape, setup.device, setup.attention, rows, setup.row_tokens, reasons)
    flattened = replace(setup, layout=layout)

    def fits(case: Setup) -> bool:
        kinds = set(zip(batch.micro_batches, room, strict=True))
        return all(fit.need(case, micro) <= capacity for micro, capacity in kinds)

    if layout != "flattened" or rows == 1 or setup.attention in BY_LENGTHS:
        return flattened
    if not fits(flattened) and fits(padded):
        reasons[-1] = f"rows padded: the mask of {rows * setup.row_tokens} flattened tokens would not fit"
        return padded
    before, after = seconds(flattened, batch), seconds(padded, batch)
    if before > GAIN * after:
        slower = before / after - 1
        reasons[-1] = (
            f"rows padded: in one line, under a mask over all of them, a step would take {slower:.0%} longer by forecast"
        )
        return padded
    return flattened
