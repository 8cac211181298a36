"""What is measured of the machines of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sft_play.cluster.inventory import Host
from sft_play.cluster.probe import Facts
from sft_play.text import Finding

SUM_MEGABYTES, SUM_SECONDS = 8.0, 1.0
"""MiB that all machines sum, where the network is not too slow for it: where that would take longer than the second, it is less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What the machines shall agree with."""

    port: int = 0
    """At which the machines meet, on the master."""
    backend: str = "auto"
    """`nccl`, `gloo`, or `auto`: NCCL where all machines have GPUs."""
    code: Mapping[str, str] = field(default_factory=dict)
    """File of the project -> sha256, as on this machine."""
    data: Mapping[str, int] = field(default_factory=dict)
    """File of the data -> size in bytes, as on this machine."""
    prepared: Mapping[str, str] = field(default_factory=dict)
    """Prepared split -> fingerprint of its rows, as on this machine."""
    shared: bool = False
    """Whether runs and cache are on a disk that all machines see (`data.sync: shared`)."""


@dataclass(slots=True)
class Seen:
    """What is known of one host."""

    host: Host
    answers: bool = False
    trouble: Finding | None = None
    """Why it does not answer, or has no environment, so that the machine's own `python3` answers."""
    skew_seconds: float | None = None
    """Its clock minus ours, +- half of the shortest round trip."""
    ssh_ms: float | None = None
    """The shortest round trip over SSH."""
    facts: Facts | None = None
    software: Mapping[str, Any] = field(default_factory=dict)
    """`probe.software`."""

    @property
    def without(self) -> bool:
        """Whether it has no environment."""
        return self.trouble is not None and self.trouble.id == "no-environment"

    def lose(self, why: str) -> None:
        """It has stopped answering."""
        self.answers, remedy = False, "check again; a machine that swaps or sleeps does that"
        self.trouble = self.trouble or Finding("lost", "fail", f"it stopped answering ({why})", remedy)

    @property
    def route(self) -> Mapping[str, Any]:
        """Its own address, interface and MTU on the way to the master; empty where there is none."""
        return (self.facts and self.facts.route) or {}


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
    address: str = ""
    """Of the target."""
    interface: str | None = None
    """Of the source."""


@dataclass(slots=True)
class Summed:
    """A sum over all machines."""

    backend: str
    seconds: float | None = None
    errors: dict[str, str] = field(default_factory=dict)
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
    further_ways: list[Pair] = field(default_factory=list)
    """The ways over further interfaces."""
    master_port: dict[str, str | None] = field(default_factory=dict)
    """Host name -> why it cannot reach the master's port; `None` where it can."""
    port_held: Mapping[str, Any] | None = None
    """The master's answer where its port could not be opened."""
    all_reduce: Summed | None = None
    seconds: float = 0.0


def sum_seconds(size_bytes: float, machines: int, mbit: float) -> float:
    """Return the seconds of a ring's sum, 2 (N - 1) / N * bytes / bandwidth: each machine sends and takes that much."""
    return 2 * (machines - 1) / machines * size_bytes / (mbit * 1e6 / 8)


def sum_megabytes(examined: Examined) -> float:
    """Return how many MiB are summed: half as many, and so on, while that would take more than `SUM_SECONDS` on the slowest way."""
    slowest = min((pair.mbit for pair in examined.pairs if pair.mbit), default=1000.0)
    size = SUM_MEGABYTES
    while size > SUM_MEGABYTES / 128 and sum_seconds(size * 2**20, len(examined.hosts), slowest) > SUM_SECONDS:
        size /= 2
    return size
