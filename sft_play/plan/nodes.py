"""The machines of a run: whose devices its ranks are, and what is known of the network between them. Pure.

Nodes that have met (`launch/rendezvous.py`) plan from the same list of all their devices, and all train by node 0's plan; without it each
takes the others to be like itself.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sft_play.config.schema import Config
from sft_play.errors import HardwareError, UserError
from sft_play.plan.calibration import Calibration, same_name
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
from sft_play.plan.plan import LaunchRequest, Plan, RankPlan


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

    @property
    def unequal_nodes(self) -> tuple[int, ...]:
        """Ranks of each machine where they are not as many on all, else empty."""
        return self.nodes if len(set(self.nodes)) > 1 else ()

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """Return the ranks of a machine."""
        start = sum(self.nodes[:node])
        return tuple(range(start, start + self.nodes[node]))

    def name_of(self, node: int) -> str:
        """Return the devices of a machine in words."""
        names = [self.devices[rank].name for rank in self.ranks_of(node)]
        return names[0] if len(names) == 1 else f"{len(names)} x {names[0]}" if len(set(names)) == 1 else " + ".join(names)

    def on_node_of(self, rank: int) -> int:
        """Return how many ranks the machine of `rank` has."""
        return self.nodes[bisect.bisect_right(list(itertools.accumulate(self.nodes)), rank)]


def one_each(hardware: Hardware, launch: LaunchRequest) -> bool:
    """Whether `HARDWARE=12GB+8GB+8GB@1Gbit NUM_NODES=3` describes as many cards as machines: then each has one of them.

    Like cards too, where each is written by itself (`8GB+8GB`): `2x8GB` are two cards in each machine.
    """
    apart = hardware.described and hardware.kind == "cuda" and hardware.network_bytes_per_second is not None
    named = hardware.listed == len(hardware.devices) or len(set(hardware.devices)) > 1
    return (
        apart and named and len(hardware.devices) == launch.num_nodes and launch.num_gpus in (None, 1) and not launch.node_devices
    )


def with_nodes(hardware: Hardware, launch: LaunchRequest) -> LaunchRequest:
    """Return the launch with the devices of every machine where a description names them."""
    if launch.num_nodes == 1 or not one_each(hardware, launch):
        return launch
    return replace(launch, node_devices=tuple((device,) for device in hardware.devices))


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
    """Return the hardware with `launch.network` between several machines, unless `HARDWARE` says otherwise. Raise `HardwareError`."""
    text = config.launch.network
    if text is None or launch.num_nodes == 1 or hardware.network_bytes_per_second:
        return hardware
    return replace(hardware, network_bytes_per_second=network_speed(text, "launch.network", "`launch.network` is"))


def describe_unused_network(config: Config, typed: Callable[[str], bool], hardware: Hardware) -> list[str]:
    """Return that a written `launch.network` does not count, where `HARDWARE` names another one."""
    text, speed = config.launch.network, hardware.network_bytes_per_second
    if text is None or speed is None or not typed("launch.network"):
        return []
    if network_speed(text, "launch.network", "`launch.network` is") == speed:
        return []
    return [f"`launch.network` {text} does not count: HARDWARE names a network of {rate_in_words(speed)}"]


def calibration_of_all(launch: LaunchRequest, calibration: Calibration | None) -> Calibration | None:
    """Return what was measured on the nodes that have met where it holds for the devices of each: measures and guesses do not compare."""
    others = {same_name(device.name) for devices in launch.node_devices for device in devices}
    if calibration is None or all(name in calibration.others or name == same_name(calibration.device) for name in others):
        return calibration
    return None


def ranks_of(hardware: Hardware, launch: LaunchRequest) -> Ranks:
    """Return the ranks of all machines. Raise `HardwareError` for devices that are not there, or full."""
    single = launch.command_strategy == "single"
    if not launch.node_devices or single:
        places, local = devices_for(hardware, launch, single)
        nodes = launch.num_nodes
        return Ranks(
            devices=local * nodes, places=places * nodes, nodes=(len(local),) * nodes, own=min(launch.node_rank, nodes - 1)
        )
    assert len(launch.node_devices) == launch.num_nodes, (len(launch.node_devices), launch.num_nodes)
    for node, devices in enumerate(launch.node_devices):
        _refuse_full_node(node, devices)
    places = tuple(index for devices in launch.node_devices for index in range(len(devices)))
    devices = tuple(device for devices in launch.node_devices for device in devices)
    return Ranks(devices=devices, places=places, nodes=tuple(map(len, launch.node_devices)), own=launch.node_rank)


def _refuse_full_node(node: int, devices: tuple[Device, ...]) -> None:
    full = next(((index, device) for index, device in enumerate(devices) if device.full), None)
    if full is not None:
        index, device = full
        free = f"{device.free_bytes / GIB:.1f} of {device.memory_bytes / GIB:.1f} GiB free"
        raise HardwareError(
            f"GPU {index} of node {node} ({device.name}) is full: {free}",
            hint="`make memory-check` there says who holds it; leave it out by NUM_GPUS or CUDA_VISIBLE_DEVICES on that node",
        )


def describe_nodes(launch: LaunchRequest, ranks: Ranks) -> list[str]:
    """Return what is known of the other machines."""
    if launch.num_nodes == 1:
        return []
    if not launch.node_devices:
        return [f"{launch.num_nodes} nodes, each with the devices of this one"]
    found = ", ".join(f"{node}: {ranks.name_of(node)}" for node in range(min(launch.num_nodes, 8)))
    return [f"{launch.num_nodes} nodes with {len(ranks.devices)} ranks in all ({found}{', ...' if launch.num_nodes > 8 else ''})"]


MOST_CPU_PROCESSES = 64


def devices_for(hardware: Hardware, request: LaunchRequest, wants_one: bool) -> tuple[tuple[int, ...], tuple[Device, ...]]:
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
            f"`NUM_GPUS` is {asked}, but there {'is' if len(hardware.devices) == 1 else 'are'} {len(hardware.devices)} ({names})",
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
        f"GPU {hardware.devices.index(first)} ({first.name}) is full: {first.free_bytes / GIB:.1f} of {first.memory_bytes / GIB:.1f} GiB free "
        f"= {share:.1%}, less than the {FULL:.0%} that CUDA and the first layers take",
        hint=hint,
    )


def visible_variable(hardware: Hardware, indices: list[int]) -> str:
    """Return the `CUDA_VISIBLE_DEVICES` that shows these of the devices, by the driver's numbers."""
    return "CUDA_VISIBLE_DEVICES=" + ",".join(visible_names(hardware.devices, indices))


def visible_names(devices: Sequence[Device], indices: Sequence[int]) -> list[str]:
    """Return how `CUDA_VISIBLE_DEVICES` names these of the devices: slices by UUID, cards by number, unknown ones by place."""
    chosen = [(index, devices[index]) for index in indices]
    return [device.mig_uuid or str(index if device.number is None else device.number) for index, device in chosen]
