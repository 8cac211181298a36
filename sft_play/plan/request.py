"""The input of a plan (configuration, machines with devices and network, model, data), and what of it fits into a
rank's memory. Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from sft_play.config.schema import Config, TrainConfig
from sft_play.errors import HardwareError
from sft_play.plan.hardware import GIB, HEADROOM, HOST_SHARE, Device, Hardware, network_speed, rate_in_words
from sft_play.plan.memory import LABELS, rank_memory
from sft_play.plan.plan import LaunchRequest, PastRun, Setup
from sft_play.plan.ranks import RankLayout, group_size, one_each, ranks_of, stages
from sft_play.plan.shape import ModelShape
from sft_play.runs.prepared import Prepared, PreparedSplit
from sft_play.text import plural

Memory = Callable[[Config, ModelShape, Setup, int], dict[str, int]]
"""(configuration, shape, setup, micro-batch) -> bytes of every part of a rank at its peak."""
DEFAULT_GLOBAL_BATCH = 32
SHORTEST_ROW = 8
MOST_ROWS = 2**20
"""Where the search for the largest micro-batch ends."""
SWITCHED_CHIPS, SWITCHED_RANKS, SWITCHED_BYTES = {(9, 0), (10, 0)}, 4, GIB
"""Compute capabilities whose NVLink switch reduces for NCCL (H100, H200 and B200), ranks on a board from which it does,
and the additional bytes that this takes on each card (0.9 to 1.5 GiB in all on eight H100 were seen elsewhere;
unverified here).
"""


def global_rows(train: TrainConfig, world: int) -> int:
    """Return the rows of an optimizer step."""
    if train.batch_size != "auto" and train.grad_accum != "auto":
        return train.batch_size * train.grad_accum * world
    if train.global_batch_size != "auto":
        return train.global_batch_size
    return DEFAULT_GLOBAL_BATCH if train.batch_size == "auto" else max(DEFAULT_GLOBAL_BATCH, train.batch_size * world)


@dataclass(frozen=True, kw_only=True)
class Request:
    """All arguments of the function that makes a plan."""

    config: Config
    hardware: Hardware
    shape: ModelShape
    launch: LaunchRequest = field(default_factory=LaunchRequest)
    typed: Callable[[str], bool] = frozenset[str]().__contains__
    """Whether a key was given on the command line."""
    prepared: Prepared | None = None
    runs: tuple[PastRun, ...] = ()
    """Complete runs that teach the forecast, the newest first."""
    memory: Memory = rank_memory
    """The closed formulas, or formulas corrected by a trace or a probe."""

    @cached_property
    def ranks(self) -> RankLayout:
        """Where the ranks are. Raise `HardwareError` for devices that are absent."""
        return ranks_of(self.hardware, self.launch)

    @property
    def group_size(self) -> int:
        """Neighbouring ranks that train slices of the same rows; rows are divided among such groups."""
        return group_size(self.config.launch, len(self.ranks.devices))

    @property
    def stages(self) -> int:
        """Ranks per pipeline; 1 without a pipeline."""
        return stages(self.config.launch, len(self.ranks.devices))

    @property
    def data_devices(self) -> tuple[Device, ...]:
        """One device of each group, since the devices of a group are alike (`plan.network.check_slices`)."""
        return self.ranks.devices[:: self.group_size]

    @cached_property
    def room(self) -> tuple[int, ...]:
        """Bytes that every rank of a group may use, for each group."""
        return self._least_of_groups(self.rank_room)

    def _least_of_groups(self, of_ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(
            min(of_ranks[start : start + self.group_size]) for start in range(0, len(of_ranks), self.group_size)
        )

    @cached_property
    def rank_room(self) -> tuple[int, ...]:
        """Bytes that each rank may use; processes on a CPU share its memory."""
        share, room = HEADROOM[self.hardware.kind], list[int]()
        together = [count for count in self.ranks.nodes for _ in range(count)]
        for device, near in zip(self.ranks.devices, together, strict=True):
            switched = near >= SWITCHED_RANKS and device.compute_capability in SWITCHED_CHIPS
            sharing = near if self.hardware.kind == "cpu" else 1
            room.append(int(device.free_bytes * share / sharing) - (SWITCHED_BYTES if switched else 0))
        return tuple(room)

    @property
    def train_split(self) -> PreparedSplit | None:
        return self.prepared.train if self.prepared else None

    @property
    def unit(self) -> str:
        """Name of what trains separate rows: `group`, `device` or `process`."""
        if self.group_size > 1:
            return "group"
        return "device" if self.hardware.kind == "cuda" else "process"

    @property
    def divides(self) -> bool:
        """Whether the plan chooses both micro-batch and accumulation."""
        return self.config.train.batch_size == "auto" and self.config.train.grad_accum == "auto"

    @property
    def global_batch(self) -> int:
        """Rows of an optimizer step."""
        return global_rows(self.config.train, len(self.data_devices))

    @property
    def required_rows(self) -> int:
        """Rows per rank that must fit: the typed micro-batch, or what a typed accumulation requires; otherwise 1."""
        train = self.config.train
        if train.batch_size != "auto":
            return train.batch_size
        # Under packing, packs must fit, and these are not known yet.
        if train.grad_accum == "auto" or train.packing == "on":
            return 1
        return math.ceil(self.global_batch / (train.grad_accum * len(self.data_devices)))

    def with_keys(self, keys: Mapping[str, Any]) -> Request:
        """Return the request as if these keys, such as `train.batch_size`, had been typed."""
        config = self.config
        for key, value in keys.items():
            section, name = key.split(".")
            config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
        prepared = None if "model.max_seq_len" in keys else self.prepared  # rows of another length
        return replace(self, config=config, prepared=prepared, typed=lambda key: key in keys or self.typed(key))

    def parts(self, setup: Setup, micro_batch: int) -> dict[str, int]:
        """Return the bytes of every part of a rank at its peak."""
        return self.memory(self.config, self.shape, setup, micro_batch)

    def need(self, setup: Setup, micro_batch: int) -> int:
        """Return the bytes of all parts together."""
        return sum(self.parts(setup, micro_batch).values())

    def fits(self, setup: Setup, micro_batches: tuple[int, ...]) -> bool:
        """Return whether each of these micro-batches fits its rank."""
        return all(rows <= most for rows, most in zip(micro_batches, self.largest(setup), strict=True))

    def largest(self, setup: Setup) -> tuple[int, ...]:
        """Return the most rows that fit each rank, or all stages of each pipeline; 0 if not even one row fits."""
        if setup.stages:
            each = [self.largest_in(setup.on(rank), room) for rank, room in enumerate(self.rank_room)]
            return self._least_of_groups(each)
        rows_by_room = {room: self.largest_in(setup, room) for room in set(self.room)}
        return tuple(rows_by_room[room] for room in self.room)

    def largest_in(self, setup: Setup, capacity: int) -> int:
        """Return the most rows that fit, exactly, by bisection: memory need only grow with the rows."""
        beyond = 1
        while beyond < MOST_ROWS and self.need(setup, beyond) <= capacity:
            beyond *= 2
        return bisect_right(range(1, beyond + 1), capacity, key=lambda rows: self.need(setup, rows))

    def longest(self, setup: Setup, micro_batch: int, capacity: int, most: int) -> int:
        """Return the tokens, at most `most`, of the longest rows of which `micro_batch` fit; 0 if none do."""
        return bisect_right(
            range(1, most + 1), capacity, key=lambda tokens: self.need(replace(setup, row_tokens=tokens), micro_batch)
        )

    def require(self, setup: Setup, fitting: tuple[int, ...]) -> None:
        """Raise `DoesNotFitError` with the parts when the required rows do not fit.

        Before the data are known, a row counts as the shortest possible one: its length is not known yet.
        """
        group, rows, train = fitting.index(min(fitting)), self.required_rows, self.config.train
        if self.launch.early:
            rows, setup = 1, replace(setup, row_tokens=min(SHORTEST_ROW, setup.row_tokens))
        members = range(group * self.group_size, (group + 1) * self.group_size)
        spare = {rank: self.rank_room[rank] - self.need(setup.on(rank), rows) for rank in members}
        rank = min(members, key=lambda rank: spare[rank])
        if spare[rank] >= 0:
            return
        room, parts = self.rank_room[rank], self.parts(setup.on(rank), rows)
        largest = sorted(((n, size) for n, size in parts.items() if size > GIB / 20), key=lambda part: -part[1])
        listed = ", ".join(f"{LABELS.get(n, n)} {size / GIB:.1f}" for n, size in largest[:3])
        listed += ", ..." if len(largest) > 3 else ""
        what = f"not even one row of {setup.row_tokens} tokens fits"
        if rows > 1:
            what = f"a micro-batch of {rows} rows of {setup.row_tokens} tokens does not fit"
            if train.batch_size == "auto" and train.grad_accum != "auto":
                what += f" (`train.grad_accum` {train.grad_accum} needs it: {self.global_batch} global / "
                what += f"({train.grad_accum} x {plural(len(fitting), 'rank' if self.group_size == 1 else 'group')}))"
        needs = (
            f"rank {rank} ({self.ranks.devices[rank].name}) needs {sum(parts.values()) / GIB:.1f} GiB of"
            f" {room / GIB:.1f} GiB ({listed})"
        )
        raise DoesNotFitError(f"{what}: {needs}", setup=setup, micro_batch=rows, parts=parts, capacity_bytes=room)


def with_machines(request: Request) -> Request:
    """Return the request with the network and the devices of all machines, as far as they are known.

    `HARDWARE` outranks `launch.network`. Raise `HardwareError`.
    """
    hardware, launch, network = request.hardware, request.launch, request.config.launch.network
    if network and launch.num_nodes > 1 and not hardware.network:
        hardware = replace(hardware, network=network)
    count = len(hardware.devices)
    apart = hardware.described and request.hardware.network and 1 < hardware.listed == count
    if apart and launch.num_nodes not in (1, count) and not launch.node_devices and launch.num_gpus in (None, 1):
        raise HardwareError(
            f"`HARDWARE` lists {count} cards joined by a network, one in each machine, and NUM_NODES is"
            f" {launch.num_nodes}",
            hint=f"NUM_NODES={count}; for machines that have all of these, LAUNCH_NETWORK= instead of `@`",
        )
    if launch.num_nodes > 1 and one_each(hardware, launch):
        launch = replace(launch, node_devices=tuple((device,) for device in hardware.devices))
    return replace(request, hardware=hardware, launch=launch)


def describe_machines(request: Request) -> dict[str, str]:
    """Return notes on this machine and the others, and on settings that do not count."""
    hardware, launch, ranks, text = request.hardware, request.launch, request.ranks, request.config.launch.network
    notes = {"described": "for hardware as described, not for this machine"} if hardware.described else {}
    notes |= {"unused": hardware.unused} if hardware.unused else {}
    nodes, speed = launch.num_nodes, hardware.network_bytes_per_second
    if nodes > 1 and launch.node_devices:
        named = ", ".join(f"{node}: {ranks.name_of(node)}" for node in range(min(nodes, 8)))
        rest = ", ..." if nodes > 8 else ""
        notes["nodes"] = f"{nodes} nodes with {len(ranks.devices)} ranks in all ({named}{rest})"
    elif nodes > 1:
        notes["nodes"] = (
            f"{nodes} nodes, each with {'these devices' if hardware.described else 'the devices of this one'}"
        )
    if text and speed and request.typed("launch.network") and network_speed(text, "") != speed:
        notes["launch.network"] = (
            f"`launch.network` {text} does not count: HARDWARE names a network of {rate_in_words(speed)}"
        )
    return notes


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """One way to need less memory."""

    command: str
    """Command to type instead; empty if the same one will do."""
    variables: str
    """What to add to the command."""
    need_bytes: int
    saving_bytes: int
    fits: bool
    host_bytes: int = 0
    """Host memory for what is offloaded."""
    ram_bytes: int = 0
    """Memory of the machine; 0 if a description does not state it."""
    recomputes: bool = False
    """Whether it fits by recomputation, which its variables do not name."""

    @property
    def overfills(self) -> bool:
        """Whether it needs more host memory than offloading may take."""
        return 0 < HOST_SHARE * self.ram_bytes < self.host_bytes

    def __str__(self) -> str:
        host = f" and {self.host_bytes / GIB:.1f} GiB of the machine's memory" if self.host_bytes else ""
        if self.overfills:
            host += f" ({HOST_SHARE * self.ram_bytes / GIB:.1f} of {self.ram_bytes / GIB:.0f} may be used)"
        elif self.fits and self.host_bytes and not self.ram_bytes:
            host += f" (enough: HARDWARE=...+{math.ceil(self.host_bytes / HOST_SHARE / GIB)}GB-RAM)"
        typed = f"{self.command} CONFIG=... {self.variables}".strip() if self.command else self.variables
        host += " with recomputation" if self.recomputes else ""
        host += ", weights without an fp32 copy" if "MODEL_DTYPE=" in self.variables else ""
        return f"{typed}: {self.need_bytes / GIB:.1f} GiB{host} ({self.saving_bytes / GIB:.1f} less)" + (
            "" if self.fits else ", still too much"
        )


SMALLER = "use a smaller model, or more memory"


class DoesNotFitError(HardwareError):
    """The required rows do not fit; carries what `make plan` shows."""

    def __init__(
        self, message: str, *, setup: Setup, micro_batch: int, parts: dict[str, int], capacity_bytes: int
    ) -> None:
        super().__init__(message, hint=SMALLER)
        self.setup, self.micro_batch, self.parts, self.capacity_bytes = setup, micro_batch, parts, capacity_bytes
        self.remedies: tuple[Remedy, ...] = ()
        self.notes: tuple[str, ...] = ()

    @property
    def need_bytes(self) -> int:
        return sum(self.parts.values())

    def add(
        self, remedies: tuple[Remedy, ...] = (), *, notes: tuple[str, ...] = (), after: str = ""
    ) -> DoesNotFitError:
        """Return this error with remedies and notes added, and `after` appended to its message."""
        self.message += after
        self.args = (self.message,)
        self.remedies += remedies
        self.notes += notes
        self.hint = "\n      ".join([*(map(str, self.remedies[:5]) if self.remedies else [SMALLER]), *self.notes])
        return self

    def without_remedies(self) -> DoesNotFitError:
        """Return this error for output in which the remedies stand already."""
        self.hint = "\n      ".join(self.notes) if self.remedies else self.hint
        return self
