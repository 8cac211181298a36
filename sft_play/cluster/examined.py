"""What machines of a cluster shall agree with, and what was found on them and between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sft_play.config.cluster import Host

SUM_MEGABYTES = 8.0
"""MiB that all machines sum, where the network is not too slow for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What the machines shall agree with."""

    port: int
    """For the meeting of the ranks, on the master."""
    backend: str = "auto"
    """`nccl`, `gloo`, or `auto`: NCCL where all machines have GPUs."""
    code: Mapping[str, str] = field(default_factory=dict)
    """File of the project -> sha256, as on this machine."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """File of the data -> sha256, as on this machine."""
    left_files: int = 0
    """Files of the data that are not compared: more than is read within the time."""
    left_bytes: int = 0
    """Their size."""
    more_left: bool = False
    """Whether there are still more: so many files that they were not even counted."""
    prepared: Mapping[str, str] = field(default_factory=dict)
    """Prepared split -> fingerprint of its rows, as on this machine."""
    shared: bool = False
    """Whether runs and cache stand on a disk that all machines see (`data.sync: shared`)."""


@dataclass(slots=True)
class Seen:
    """What is known of one host."""

    host: Host
    start: str | None = None
    """Why its Python did not start; stderr of ssh and of what it ran. `None` where it did."""
    code: int = 0
    """Exit code then."""
    without: int = 0
    """Exit code of its environment's Python, where that is missing and the machine's own `python3` answers instead."""
    lost: str | None = None
    """What was being asked when it stopped answering."""
    refused: dict[str, str] = field(default_factory=dict)
    """What it could not do -> why."""
    skew_seconds: float | None = None
    """Its clock minus ours, +- half of the shortest round trip."""
    ssh_ms: float | None = None
    """The shortest round trip over SSH."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    software: Mapping[str, Any] = field(default_factory=dict)
    code_files: Mapping[str, str | None] = field(default_factory=dict)
    sources: Mapping[str, str | None] = field(default_factory=dict)
    prepared: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def answers(self) -> bool:
        return self.start is None and self.lost is None


@dataclass(slots=True)
class Pair:
    """The way from one machine to another."""

    source: str
    target: str
    error: str | None = None
    """Why a random high port of the target cannot be reached."""
    rtt_ms: float | None = None
    mbit: float | None = None
    """`None` where it was not measured."""


@dataclass(slots=True)
class Summed:
    """A sum over all machines."""

    backend: str
    seconds: float | None = None
    errors: Mapping[str, str] = field(default_factory=dict)
    """Host name -> what it says."""
    skipped: str | None = None
    """Why it was not tried."""
    megabytes: float = SUM_MEGABYTES
    """MiB that each machine gave."""


@dataclass(slots=True)
class Examined:
    """Everything that was found."""

    hosts: dict[str, Seen]
    pairs: list[Pair] = field(default_factory=list)
    master_port: dict[str, str | None] = field(default_factory=dict)
    """Host name -> why it cannot reach the master's port; `None` where it can."""
    port_held: Mapping[str, Any] | None = None
    """The master's answer where its port could not be opened."""
    summed: Summed | None = None
    seconds: float = 0.0


def sum_seconds(size_bytes: float, machines: int, mbit: float) -> float:
    """Returns the seconds of a ring's sum, 2 (N - 1) / N * bytes / bandwidth: each machine sends and takes that much."""
    return 2 * (machines - 1) / machines * size_bytes / (mbit * 1e6 / 8)
