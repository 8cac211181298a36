"""What `make bench` measured on a device: kept in the cache per device, read by the forecast. Pure but for load and
save.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from sft_play.config.reader import Positive, Range, record_of
from sft_play.files import read_json, write_json
from sft_play.plan.hardware import Hardware
from sft_play.runs.folder import cache_folder

FORMAT = 1
"""Raised when the meaning of a field changes; a file of another format is as good as none."""
Speed = Annotated[float, Range(above=0, maximum=1e30)]
"""What is divided by, or is a share of the time: never zero."""
Seconds = Annotated[float, Range(minimum=0, maximum=1e30)]
SAME_WORK = ("mode", "precision", "gradient_checkpointing", "layout", "attention")
"""Parts of a step's description that a fit of another model must share to be of any use here, the most telling first.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """An all-reduce as a straight line: `latency + 2 (N-1)/N * bytes / bandwidth`."""

    ranks: Positive
    latency_seconds: Seconds
    bytes_per_second: Speed
    """Bus bandwidth: what each rank sends in a ring, whatever their number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFit:
    """Real optimizer steps of one model as a straight line: `micro-steps * seconds_per_micro_step + FLOPs /
    flops_per_second`.
    """

    work: dict[str, Any]
    """What was trained and how (`throughput.describe_work`): the fit holds for the same work only, and is a guess for
    other.
    """
    model: str
    seconds_per_micro_step: Seconds
    """What a micro-step costs however few tokens it has: the launch of every operation, reading every weight."""
    flops_per_second: Speed
    """Of one rank."""
    threads: Speed
    """Processor threads of one rank (1 on a GPU)."""
    layers: Positive
    flops_per_token: Speed
    points: Positive
    """Steps that the line was fitted to."""
    spread: Seconds
    """Median of their relative distances from the line."""
    measured: str
    """Day, as 2026-11-21."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Everything that was measured on one kind of device."""

    device: str
    kind: Literal["cpu", "cuda"]
    threads: Positive
    """Processor threads of the machine."""
    measured: str
    """Day of the last measurement."""
    versions: Mapping[str, str] = field(default_factory=dict)
    matmul_flops: Mapping[str, Speed] = field(default_factory=dict)
    """Width of square matrices (as text) -> operations per second, fp32 on a CPU and bf16 on a GPU."""
    bandwidth: Speed | None = None
    """Bytes per second read and written by a copy."""
    links: Mapping[str, Link] = field(default_factory=dict)
    """`gloo` or `nccl` -> the all-reduce between processes of this machine."""
    steps: tuple[StepFit, ...] = ()
    others: Mapping[str, Calibration] = field(default_factory=dict)
    """Where devices of several names are planned for: `same_name` of each -> what was measured on it. Never kept in a
    file.
    """

    def of(self, device: str) -> Calibration:
        """Return what was measured on the device of this name."""
        return self.others.get(same_name(device), self)

    @property
    def peak_flops(self) -> float | None:
        """The fastest product that was measured: what MFU is a share of where no data sheet tells the peak."""
        return max(self.matmul_flops.values(), default=None)

    def fit_for(self, work: Mapping[str, Any], flops_per_token: float, threads: float) -> tuple[StepFit | None, bool]:
        """Return the fit for `work`, else the nearest one, `None` without any; and whether it is of the very same work.

        Among fits of other work the one wins that shares most of `SAME_WORK` and then is nearest in size and threads.
        """
        same = [fit for fit in self.steps if fit.work == work]
        if same:
            return min(same, key=lambda fit: abs(math.log(fit.threads / threads))), True

        def distance(fit: StepFit) -> tuple[int, float]:
            different = sum(fit.work.get(name) != work.get(name) for name in SAME_WORK)
            return different, abs(math.log(fit.flops_per_token / flops_per_token)) + abs(
                math.log(fit.threads / threads)
            )

        return min(self.steps, key=distance, default=None), False

    def merge(self, newer: Calibration) -> Calibration:
        """Return `newer` with what only this one has measured."""
        again = [(fit.work, fit.threads) for fit in newer.steps]
        return replace(
            newer,
            matmul_flops={**self.matmul_flops, **newer.matmul_flops},
            bandwidth=newer.bandwidth or self.bandwidth,
            links={**self.links, **newer.links},
            steps=(*[fit for fit in self.steps if (fit.work, fit.threads) not in again], *newer.steps),
        )

    def save(self) -> Path:
        """Write the file of this device and returns its path. Raise `OSError`."""
        path = calibration_path(self.device)
        kept = {name: value for name, value in asdict(self).items() if name != "others"}
        write_json(path, {"format": FORMAT, **kept})
        return path


def calibration_path(device: str) -> Path:
    """Return where the calibration of a device is kept."""
    return cache_folder() / "calibration" / f"{same_name(device)}.json"


def same_name(device: str) -> str:
    """Return what is alike in the names of one device: `NVIDIA H200` by its driver, `H200` in the catalogue."""
    plain = re.sub(r"nvidia|geforce|\((r|tm)\)", "", device.lower())
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-").replace("rtx-", "rtx") or "device"


def load_calibration(hardware: Hardware) -> Calibration | None:
    """Return what was measured on the devices of `hardware`, `None` when something was not: priors and measurements do
    not compare.

    Described hardware gets it only where its devices have the very name of those that were measured.
    """
    found = {same_name(device.name): read_calibration(device.name) for device in hardware.devices}
    known = {name: one for name, one in found.items() if one is not None and one.kind == hardware.kind}
    return _of_several(known) if len(known) == len(found) else None


def of_all_nodes(here: Calibration | None, nodes: Sequence[Sequence[Calibration]]) -> Calibration | None:
    """Return what was measured on the devices of all nodes: each device by its own node's measure, `here` first.

    Where several nodes measured a device of one name, the first of them counts. The links between processes of a
    machine are `here`'s.
    """
    known: dict[str, Calibration] = {} if here is None else dict(here.others) or {same_name(here.device): here}
    for one in (one for node in nodes for one in node):
        known.setdefault(same_name(one.device), one)
    return _of_several(known)


def _of_several(known: Mapping[str, Calibration]) -> Calibration | None:
    """Return what was measured on devices of several names, by `same_name`."""
    measures = list(known.values())
    if len(measures) < 2:
        return measures[0] if measures else None
    return Calibration(
        device=" + ".join(one.device for one in measures),
        kind=measures[0].kind,
        threads=measures[0].threads,
        measured=min(one.measured for one in measures),
        others=known,
    )


def read_calibration(device: str) -> Calibration | None:
    """Return the calibration of a device's name, or `None`; a file that cannot be understood counts as none."""
    try:
        value = read_json(calibration_path(device))
        if value.pop("format") != FORMAT:
            return None
        found = record_of(value, Calibration)
    except (OSError, AttributeError, KeyError, TypeError, ValueError):  # never measured, or by another version
        return None
    return found if same_name(found.device) == same_name(device) else None


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (seconds at no work, work per second) of points (work, seconds).

    The slope is the median over all pairs (Theil and Sen), so that a step that something else slowed down does not
    count. A line that would start below zero, or not rise, is one through the origin.
    """
    assert points, "a line needs points"
    through_origin = 0.0, median(work / seconds for work, seconds in points)
    slopes = [
        (late[1] - early[1]) / (late[0] - early[0])
        for index, early in enumerate(points)
        for late in points[index + 1 :]
        if abs(late[0] - early[0]) > 0.1 * max(late[0], early[0])
    ]
    slope = median(slopes) if slopes else 0.0
    if slope <= 0:
        return through_origin
    start = median(seconds - work * slope for work, seconds in points)
    return (start, 1 / slope) if start > 0 else through_origin


def spread(points: Sequence[tuple[float, float]], line: tuple[float, float]) -> float:
    """Return the median relative distance of `points` from `line` (as `fit_line` returns it)."""
    return median(abs(line[0] + work / line[1] - seconds) / seconds for work, seconds in points)
