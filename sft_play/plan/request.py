"""What a plan is asked for: configuration, machines with their devices and network, model, data; and what of it fits
into a rank's memory. Pure.

Nodes that have met (`launch/machines.py`) plan from the same list of all their devices, and all train by node 0's
plan; without it each takes the others to be like itself.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from sft_play.config.rules import check_rules
from sft_play.config.schema import Config, LaunchConfig, TrainConfig
from sft_play.errors import HardwareError, UserError
from sft_play.plan.experience import PastRun
from sft_play.plan.hardware import (
    FULL,
    GIB,
    HEADROOM,
    Device,
    Hardware,
    device_of,
    find_card,
    network_speed,
    rate_in_words,
)
from sft_play.plan.memory import rank_memory
from sft_play.plan.plan import LaunchRequest, Plan, RankPlan, Setup
from sft_play.plan.shape import ModelShape
from sft_play.runs.prepared import Prepared, PreparedSplit
from sft_play.text import plural


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """Where a run's ranks are."""

    devices: tuple[Device, ...]
    places: tuple[int, ...]
    """Index of each rank's device on its machine."""
    nodes: tuple[int, ...]
    """Ranks of each machine."""
    own: int
    """Which machine this is."""

    @property
    def local(self) -> int:
        """Ranks of this machine."""
        return self.nodes[self.own]

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """Return the ranks of a machine."""
        start = sum(self.nodes[:node])
        return tuple(range(start, start + self.nodes[node]))

    def name_of(self, node: int) -> str:
        """Return the devices of a machine in words."""
        names = [self.devices[rank].name for rank in self.ranks_of(node)]
        return (
            names[0] if len(names) == 1 else f"{len(names)} x {names[0]}" if len(set(names)) == 1 else " + ".join(names)
        )


def one_each(hardware: Hardware, launch: LaunchRequest) -> bool:
    """Whether `HARDWARE=12GB+8GB+8GB@1Gbit NUM_NODES=3` describes as many cards as machines: then each has one of them.

    Like cards too, where each is written by itself (`8GB+8GB`): `2x8GB` are two cards in each machine.
    """
    apart = hardware.described and hardware.kind == "cuda" and hardware.network_bytes_per_second is not None
    named = hardware.listed == len(hardware.devices) or len(set(hardware.devices)) > 1
    return (
        apart
        and named
        and len(hardware.devices) == launch.num_nodes
        and launch.num_gpus in (None, 1)
        and not launch.node_devices
    )


def devices_of(plan: Plan) -> tuple[tuple[Device, ...], ...]:
    """Return the devices of each node's ranks as a plan had them, with the memory that was free then.

    What is known of a card by its name is there too; processes on a CPU share its memory.
    """
    found, first = [], 0
    for count in plan.ranks_by_node:
        ranks = plan.ranks[first : first + count]
        share = count if plan.device == "cpu" else 1
        found.append(tuple(_as_planned(rank, plan, share) for rank in ranks))
        first += count
    return tuple(found)


def _as_planned(rank: RankPlan, plan: Plan, share: int) -> Device:
    free = round(rank.capacity_bytes * share / HEADROOM[plan.device])
    card = find_card(rank.device_name) if plan.device == "cuda" else None
    if card is None:
        return Device(name=rank.device_name, memory_bytes=free, free_bytes=free, bf16=plan.precision == "bf16")
    return replace(device_of(*card), name=rank.device_name, free_bytes=free)


def with_network(config: Config, hardware: Hardware, launch: LaunchRequest) -> Hardware:
    """Return the hardware with `launch.network` between several machines, unless `HARDWARE` says otherwise. Raise
    `HardwareError`.
    """
    text = config.launch.network
    if text is None or launch.num_nodes == 1 or hardware.network_bytes_per_second:
        return hardware
    return replace(hardware, network_bytes_per_second=_network_speed(text))


def _network_speed(text: str) -> float:
    return network_speed(text, "launch.network", "`launch.network` is")


def ranks_of(hardware: Hardware, launch: LaunchRequest) -> Ranks:
    """Return the ranks of all machines. Raise `HardwareError` for devices that are not there, or full."""
    single, nodes = launch.command_strategy == "single", launch.num_nodes
    if launch.node_devices and not single:
        assert len(launch.node_devices) == nodes, (len(launch.node_devices), nodes)
        for node, devices in enumerate(launch.node_devices):
            _refuse_full_node(node, devices)
        machines = [(tuple(range(len(devices))), devices) for devices in launch.node_devices]
    else:
        machines = [devices_for(hardware, launch, single)] * nodes
    return Ranks(
        devices=tuple(device for _, devices in machines for device in devices),
        places=tuple(place for places, _ in machines for place in places),
        nodes=tuple(len(devices) for _, devices in machines),
        own=min(launch.node_rank, nodes - 1),
    )


def _refuse_full_node(node: int, devices: tuple[Device, ...]) -> None:
    full = next(((index, device) for index, device in enumerate(devices) if device.full), None)
    if full is not None:
        index, device = full
        free = f"{device.free_bytes / GIB:.1f} of {device.memory_bytes / GIB:.1f} GiB free"
        raise HardwareError(
            f"GPU {index} of node {node} ({device.name}) is full: {free}",
            hint=(
                "`make memory-check` there says who holds it; leave it out by NUM_GPUS or CUDA_VISIBLE_DEVICES on that"
                " node"
            ),
        )


MOST_CPU_PROCESSES = 64


def devices_for(
    hardware: Hardware, request: LaunchRequest, wants_one: bool
) -> tuple[tuple[int, ...], tuple[Device, ...]]:
    """Return the index and the device of each of this machine's ranks.

    Raise `HardwareError` when there are not enough, or when other programs fill one that would be used.
    """
    asked = request.num_gpus
    if wants_one and (asked or 1) > 1:
        raise UserError(f"`NUM_GPUS` is {asked}, but `make train` runs one process", hint="use make train-distributed")
    if hardware.kind == "cpu":
        count = 1 if wants_one else asked or min(2, hardware.cpu_threads)
        if count > MOST_CPU_PROCESSES:
            raise HardwareError(
                f"`NUM_GPUS` is {count}, but there is no GPU, and {MOST_CPU_PROCESSES} processes on a CPU are the most",
                hint=f"this machine has {hardware.cpu_threads} CPU threads: NUM_GPUS={min(2, hardware.cpu_threads)}",
            )
        return (0,) * count, hardware.devices * count
    if asked and asked > len(hardware.devices):
        names = ", ".join(device.name for device in hardware.devices)
        raise HardwareError(
            f"`NUM_GPUS` is {asked}, but there {'is' if len(hardware.devices) == 1 else 'are'} {len(hardware.devices)}"
            f" ({names})",
            hint=f"NUM_GPUS={len(hardware.devices)}, or look at `make gpu-info` and CUDA_VISIBLE_DEVICES",
        )
    if wants_one:
        # The one with the most free memory, in steps of a GiB; among equals, the fastest.
        best = max(hardware.devices, key=lambda device: (device.free_bytes // GIB, device.peak_flops or 0.0))
        _refuse_full(hardware, (best,))
        return (hardware.devices.index(best),), (best,)
    chosen = hardware.devices[: asked or len(hardware.devices)]
    _refuse_full(hardware, chosen)
    return tuple(range(len(chosen))), chosen


def _refuse_full(hardware: Hardware, chosen: tuple[Device, ...]) -> None:
    """Raise `HardwareError` for a GPU that other programs fill, with the way to leave it out."""
    full = [index for index, device in enumerate(chosen) if device.full]
    if not full:
        return
    first = chosen[full[0]]
    share = first.free_bytes / max(1, first.memory_bytes)
    usable = [(index, device) for index, device in enumerate(hardware.devices) if not device.full]
    if not usable:
        hint = "`make memory-check` says who holds them; wait, or end those programs"
    else:
        free = sum(device.free_bytes for _, device in usable) / GIB
        hint = f"{visible_variable(hardware, [index for index, _ in usable])} skips full GPUs: {free:.1f} GiB free on "
        hint += f"{len(usable)} of {len(hardware.devices)} GPUs; `make memory-check` says who holds the rest"
    raise HardwareError(
        f"GPU {hardware.devices.index(first)} ({first.name}) is full: {first.free_bytes / GIB:.1f} of"
        f" {first.memory_bytes / GIB:.1f} GiB free = {share:.1%}, less than the {FULL:.0%} that CUDA and the first"
        " layers take",
        hint=hint,
    )


def visible_variable(hardware: Hardware, indices: list[int]) -> str:
    """Return the `CUDA_VISIBLE_DEVICES` that shows these of the devices, by the driver's numbers."""
    return "CUDA_VISIBLE_DEVICES=" + ",".join(visible_names(hardware.devices, indices))


def visible_names(devices: Sequence[Device], indices: Sequence[int]) -> list[str]:
    """Return how `CUDA_VISIBLE_DEVICES` names these of the devices: slices by UUID, cards by number, unknown ones by
    place.
    """
    chosen = [(index, devices[index]) for index in indices]
    return [device.mig_uuid or str(index if device.number is None else device.number) for index, device in chosen]


Memory = Callable[[Config, ModelShape, Setup, int], dict[str, int]]
"""(configuration, shape, setup, micro-batch) -> bytes of every part of a rank at its worst moment."""
DEFAULT_GLOBAL_BATCH = 32
SHORTEST_ROW = 8
MOST_ROWS = 2**20
"""Where the search for the largest micro-batch ends."""
SWITCHED_CHIPS, SWITCHED_RANKS, SWITCHED_BYTES = {(9, 0), (10, 0)}, 4, GIB
"""Where NCCL reduces inside NVLink's switch (H100, H200 and B200, so many or more on a board) it takes about so much
more of each card (0.9 to 1.5 GiB in all on eight H100 were seen elsewhere; unverified here).
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
    """Everything that a plan is a function of."""

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
    """The closed formulas, or those corrected by a trace or a probe."""

    @cached_property
    def ranks(self) -> Ranks:
        """Where the ranks are. Raise `HardwareError` for devices that are not there, or full."""
        return ranks_of(self.hardware, self.launch)

    @property
    def group_size(self) -> int:
        """Neighbouring ranks that train the same rows, in slices: rows are divided among such groups."""
        return group_size(self.config.launch, len(self.ranks.devices))

    @property
    def stages(self) -> int:
        """Ranks of one pipeline; 1 without one."""
        return stages(self.config.launch, len(self.ranks.devices))

    @property
    def data_devices(self) -> tuple[Device, ...]:
        """One device of each group; those of a group are alike (`plan.sequence_parallel`)."""
        return self.ranks.devices[:: self.group_size]

    @cached_property
    def room(self) -> tuple[int, ...]:
        """Bytes that each rank of a group may use, for each group."""
        return self._least_of_groups(self.rank_room)

    def _least_of_groups(self, of_ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(
            min(of_ranks[start : start + self.group_size]) for start in range(0, len(of_ranks), self.group_size)
        )

    @cached_property
    def rank_room(self) -> tuple[int, ...]:
        """Bytes that each rank may use; processes on a CPU share its memory."""
        share, found = HEADROOM[self.hardware.kind], list[int]()
        together = [count for count in self.ranks.nodes for _ in range(count)]
        for device, near in zip(self.ranks.devices, together, strict=True):
            switched = near >= SWITCHED_RANKS and device.compute_capability in SWITCHED_CHIPS
            sharing = near if self.hardware.kind == "cpu" else 1
            found.append(int(device.free_bytes * share / sharing) - (SWITCHED_BYTES if switched else 0))
        return tuple(found)

    @property
    def train_split(self) -> PreparedSplit | None:
        return self.prepared.train if self.prepared else None

    @property
    def unit(self) -> str:
        """What has rows of its own."""
        if self.group_size > 1:
            return "group"
        return "device" if self.hardware.kind == "cuda" else "process"

    @property
    def divides(self) -> bool:
        """Whether micro-batch and accumulation are both for the plan to choose."""
        return self.config.train.batch_size == "auto" and self.config.train.grad_accum == "auto"

    @property
    def wanted_rows(self) -> int:
        """Rows per rank that must fit: the micro-batch that was typed, or that a typed accumulation needs; else one."""
        train, world = self.config.train, len(self.data_devices)
        if train.batch_size != "auto":
            return train.batch_size
        if train.grad_accum == "auto" or train.packing == "on":  # what fits there are packs, not known yet
            return 1
        return math.ceil(global_rows(train, world) / (train.grad_accum * world))

    def with_keys(self, keys: Mapping[str, Any]) -> Request:
        """Return the request as if these keys, such as `train.batch_size`, had been typed."""
        original, typed, memory, config = self.config, self.typed, self.memory, self.config
        for key, value in keys.items():
            section, name = key.split(".")
            config = replace(config, **{section: replace(getattr(config, section), **{name: value})})

        def memory_of(config: Config, shape: ModelShape, setup: Setup, micro_batch: int) -> dict[str, int]:
            # What was traced is known of the configuration as it stood; beside the setup, memory depends on its tuning
            # alone.
            return memory(original if config.tuning == original.tuning else config, shape, setup, micro_batch)

        prepared = None if "model.max_seq_len" in keys else self.prepared  # rows of another length
        return replace(
            self, config=config, memory=memory_of, prepared=prepared, typed=lambda key: typed(key) or key in keys
        )

    def on(self, setup: Setup, rank: int) -> Setup:
        """Return the setup of a rank: of a pipeline its stage."""
        return replace(setup, stage=rank % len(setup.stages)) if setup.stages else setup

    def parts(self, setup: Setup, micro_batch: int) -> dict[str, int]:
        """Return the bytes of every part of a rank at its worst moment."""
        return self.memory(self.config, self.shape, setup, micro_batch)

    def need(self, setup: Setup, micro_batch: int) -> int:
        """Return the bytes of all parts."""
        return sum(self.parts(setup, micro_batch).values())

    def fits(self, setup: Setup, micro_batches: tuple[int, ...]) -> bool:
        """Whether these micro-batches fit, each on its rank."""
        return all(rows <= most for rows, most in zip(micro_batches, self.largest(setup), strict=True))

    def largest(self, setup: Setup) -> tuple[int, ...]:
        """Return the most rows that fit each rank, or all stages of each pipeline; 0 where not even one does."""
        if setup.stages:
            each = [self.largest_in(self.on(setup, rank), room) for rank, room in enumerate(self.rank_room)]
            return self._least_of_groups(each)
        known = {room: self.largest_in(setup, room) for room in set(self.room)}
        return tuple(known[room] for room in self.room)

    def largest_in(self, setup: Setup, capacity: int) -> int:
        """Return the most rows that fit: exactly, by bisection, for memory that grows with them in any way."""
        beyond = 1
        while beyond < MOST_ROWS and self.need(setup, beyond) <= capacity:
            beyond *= 2
        return bisect_right(range(1, beyond + 1), capacity, key=lambda rows: self.need(setup, rows))

    def longest(self, setup: Setup, micro_batch: int, capacity: int, most: int) -> int:
        """Return the tokens, at most `most`, of the longest rows of which `micro_batch` fit; 0 when none do."""
        return bisect_right(
            range(1, most + 1), capacity, key=lambda tokens: self.need(replace(setup, row_tokens=tokens), micro_batch)
        )

    def require(self, setup: Setup, fitting: tuple[int, ...]) -> None:
        """Raise `DoesNotFitError` with the parts when what was asked for, or not even one row, fits.

        Before the data are known, one row counts as the shortest there can be: its length is not known yet.
        """
        rank, wanted, train = fitting.index(min(fitting)), self.wanted_rows, self.config.train
        room, name = self.room[rank], self.data_devices[rank].name
        if self.launch.early:
            wanted, setup = 1, replace(setup, row_tokens=min(SHORTEST_ROW, setup.row_tokens))
        if (self.largest_in(setup, room) if self.launch.early else fitting[rank]) >= wanted:
            return
        parts = self.parts(setup, wanted)
        listed = ", ".join(
            f"{n} {size / GIB:.1f}" for n, size in sorted(parts.items(), key=lambda p: -p[1]) if size > GIB / 20
        )
        what = f"not even one row of {setup.row_tokens} tokens fits"
        if wanted > 1:
            what = f"a micro-batch of {wanted} rows of {setup.row_tokens} tokens does not fit"
            if train.batch_size == "auto" and train.grad_accum != "auto":
                world = len(fitting)
                what += f" (`train.grad_accum` {train.grad_accum} needs it: {global_rows(train, world)} global / "
                what += f"({train.grad_accum} x {plural(world, 'rank' if self.group_size == 1 else 'group')}))"
        needs = (
            f"rank {rank * self.group_size} ({name}) needs {sum(parts.values()) / GIB:.1f} GiB of {room / GIB:.1f} GiB"
            f" ({listed} GiB)"
        )
        raise DoesNotFitError(f"{what}: {needs}", setup=setup, micro_batch=wanted, parts=parts, capacity_bytes=room)


def with_machines(request: Request) -> Request:
    """Return the request with the network and the devices of all machines as far as they are known. Raise
    `HardwareError`.
    """
    launch = request.launch
    hardware = with_network(request.config, request.hardware, launch)
    if launch.num_nodes > 1 and one_each(hardware, launch):
        launch = replace(launch, node_devices=tuple((device,) for device in hardware.devices))
    return replace(request, hardware=hardware, launch=launch)


def describe_machines(request: Request) -> dict[str, str]:
    """Return what is known of this machine and the others, and what of it does not count."""
    hardware, launch, ranks, text = request.hardware, request.launch, request.ranks, request.config.launch.network
    found = {"described": "for hardware as described, not for this machine"} if hardware.described else {}
    found |= {"unused": hardware.unused} if hardware.unused else {}
    nodes, speed = launch.num_nodes, hardware.network_bytes_per_second
    if nodes > 1 and launch.node_devices:
        named = ", ".join(f"{node}: {ranks.name_of(node)}" for node in range(min(nodes, 8)))
        more = ", ..." if nodes > 8 else ""
        found["nodes"] = f"{nodes} nodes with {len(ranks.devices)} ranks in all ({named}{more})"
    elif nodes > 1:
        found["nodes"] = f"{nodes} nodes, each with the devices of this one"
    if text and speed and request.typed("launch.network") and _network_speed(text) != speed:
        found["launch.network"] = (
            f"`launch.network` {text} does not count: HARDWARE names a network of {rate_in_words(speed)}"
        )
    return found


Decide = Callable[[Request], Plan]


def try_plan(request: Request, changed: Request, decide: Decide) -> Plan | DoesNotFitError | None:
    """Return the changed plan, or how far it is from fitting; `None` where it is refused when it is typed."""
    if {one.message for one in check_rules(changed.config, {})} - {
        one.message for one in check_rules(request.config, {})
    }:
        return None
    try:
        return decide(changed)
    except DoesNotFitError as error:
        return error
    except UserError:
        return None


def group_size(launch: LaunchConfig, world: int) -> int:
    """Return how many of `world` ranks train the same rows."""
    return launch.sequence_parallel * launch.tensor_parallel * stages(launch, world)


def stages(launch: LaunchConfig, world: int) -> int:
    """Return how many of `world` ranks make one pipeline; 1 without one."""
    if launch.strategy != "pipeline":
        return 1
    return world if launch.stages == "auto" else launch.stages


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """One way to need less memory."""

    override: str
    """What to type."""
    need_bytes: int
    saving_bytes: int
    fits: bool
    slower: float | None
    """Time of a token over what it takes without the remedy, by arithmetic; `None` where that says nothing."""
    host_bytes: int = 0
    """Of the machine's own memory, for what is offloaded there."""

    def __str__(self) -> str:
        notes = f"{self.saving_bytes / GIB:.1f} less"
        if self.slower is not None and abs(self.slower - 1) >= 0.01:
            notes += f", {self.slower - 1:.0%} slower" if self.slower > 1 else f", {1 - self.slower:.0%} faster"
        host = f" and {self.host_bytes / GIB:.1f} GiB of the machine's memory" if self.host_bytes else ""
        return f"{self.override}: {self.need_bytes / GIB:.1f} GiB{host} ({notes})" + (
            "" if self.fits else ", still too much"
        )


SMALLER = "use a smaller model, or more memory"


class DoesNotFitError(HardwareError):
    """Not even what was asked for, or one row, fits; carries what `make plan` shows."""

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
        """Return this error with ways to need less and notes added, and `after` at the end of its message."""
        self.message += after
        self.args = (self.message,)
        self.remedies += remedies
        self.notes += notes
        self.hint = "; ".join([*(map(str, self.remedies[:5]) if self.remedies else [SMALLER]), *self.notes])
        return self
