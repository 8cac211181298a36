"""The machines of a run: whose devices its ranks are, how fast the network between them is, what it takes to leave one out. Pure.

Nodes that have met (`launch/rendezvous.py`) plan from the same list of all their devices, and all train by node 0's plan; without it each
takes the others to be like itself.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from sft_play.config.schema import Config
from sft_play.errors import HardwareError
from sft_play.plan import choices
from sft_play.plan.calibration import Calibration, same_name
from sft_play.plan.catalogue import find_card
from sft_play.plan.exchange import exchange_seconds, latency_seconds, link_of
from sft_play.plan.hardware import GIB, HEADROOM, Device, Hardware, device_of, network_speed
from sft_play.plan.memory import Setup
from sft_play.plan.plan import Plan, RankPlan
from sft_play.plan.request import LaunchRequest
from sft_play.plan.shape import ModelShape
from sft_play.plan.throughput import optimizer_seconds
from sft_play.plan.unequal import Machines
from sft_play.plan.words import rate_in_words


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
        """Returns the ranks of a machine."""
        start = sum(self.nodes[:node])
        return tuple(range(start, start + self.nodes[node]))

    def on_node_of(self, rank: int) -> int:
        """Returns how many ranks the machine of `rank` has."""
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


def met(hardware: Hardware, launch: LaunchRequest) -> LaunchRequest:
    """Returns the launch with the devices of every machine where a description names them."""
    if launch.num_nodes == 1 or not one_each(hardware, launch):
        return launch
    return replace(launch, node_devices=tuple((device,) for device in hardware.devices))


def devices_of(plan: Plan) -> tuple[tuple[Device, ...], ...]:
    """Returns the devices of each node's ranks as a plan had them, with the memory that was free then.

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
    """Returns the hardware with `launch.network` between several machines, unless `HARDWARE` says otherwise. Raises `HardwareError`."""
    text = config.launch.network
    if text is None or launch.num_nodes == 1 or hardware.network_bytes_per_second:
        return hardware
    return replace(hardware, network_bytes_per_second=network_speed(text, "launch.network", "`launch.network` is"))


def unheard_network(config: Config, typed: Callable[[str], bool], hardware: Hardware) -> list[str]:
    """Returns that a written `launch.network` does not count, where `HARDWARE` names another one."""
    text, speed = config.launch.network, hardware.network_bytes_per_second
    if text is None or speed is None or not typed("launch.network"):
        return []
    if network_speed(text, "launch.network", "`launch.network` is") == speed:
        return []
    return [f"`launch.network` {text} does not count: HARDWARE names a network of {rate_in_words(speed)}"]


def measured_on_all(launch: LaunchRequest, calibration: Calibration | None) -> Calibration | None:
    """Returns what was measured on the nodes that have met where it holds for the devices of each: measures and guesses do not compare."""
    others = {same_name(device.name) for devices in launch.node_devices for device in devices}
    if calibration is None or all(name in calibration.others or name == same_name(calibration.device) for name in others):
        return calibration
    return None


def ranks_of(hardware: Hardware, launch: LaunchRequest) -> Ranks:
    """Returns the ranks of all machines. Raises `HardwareError` for devices that are not there, or full."""
    single = launch.command_strategy == "single"
    if not launch.node_devices or single:
        places, local = choices.devices_for(hardware, launch, single)
        nodes = launch.num_nodes
        return Ranks(
            devices=local * nodes, places=places * nodes, nodes=(len(local),) * nodes, own=min(launch.node_rank, nodes - 1)
        )
    assert len(launch.node_devices) == launch.num_nodes, (len(launch.node_devices), launch.num_nodes)
    for node, devices in enumerate(launch.node_devices):
        _refuse_full(node, devices)
    places = tuple(index for devices in launch.node_devices for index in range(len(devices)))
    devices = tuple(device for devices in launch.node_devices for device in devices)
    return Ranks(devices=devices, places=places, nodes=tuple(map(len, launch.node_devices)), own=launch.node_rank)


def _refuse_full(node: int, devices: tuple[Device, ...]) -> None:
    full = next(((index, device) for index, device in enumerate(devices) if device.full), None)
    if full is not None:
        index, device = full
        free = f"{device.free_bytes / GIB:.1f} of {device.memory_bytes / GIB:.1f} GiB free"
        raise HardwareError(
            f"GPU {index} of node {node} ({device.name}) is full: {free}",
            hint="`make memory-check` there says who holds it; leave it out by NUM_GPUS or CUDA_VISIBLE_DEVICES on that node",
        )


def in_words(hardware: Hardware, launch: LaunchRequest, ranks: Ranks) -> list[str]:
    """Returns what is known of the other machines, and where several cards that a description lists are those of each of them."""
    if launch.num_nodes == 1:
        return []
    if not launch.node_devices:
        return [f"{launch.num_nodes} nodes, each with the devices of this one", *_multiplied(hardware, launch, ranks)]
    found = ", ".join(f"{node}: {_named(ranks, node)}" for node in range(min(launch.num_nodes, 8)))
    return [f"{launch.num_nodes} nodes with {len(ranks.devices)} ranks in all ({found}{', ...' if launch.num_nodes > 8 else ''})"]


def _multiplied(hardware: Hardware, launch: LaunchRequest, ranks: Ranks) -> list[str]:
    """Says that each node has all of `12GB+8GB+8GB@1Gbit`, which may as well have been meant as one card of each machine."""
    cards = len(hardware.devices)
    if hardware.listed < 2 or hardware.network_bytes_per_second is None or cards == launch.num_nodes:
        return []
    each = (
        ("both cards" if cards == 2 else f"all {cards} cards") if ranks.local == cards else f"{ranks.local} of the {cards} cards"
    )
    return [f"each of the {launch.num_nodes} nodes has {each}; with NUM_NODES={cards} each would have one of them"]


def _named(ranks: Ranks, node: int) -> str:
    names = [ranks.devices[rank].name for rank in ranks.ranks_of(node)]
    return names[0] if len(names) == 1 else f"{len(names)} x {names[0]}" if len(set(names)) == 1 else " + ".join(names)


def machines_of(hardware: Hardware, ranks: Ranks) -> Machines | None:
    """Returns what could be left out of a run; `None` for one machine with like devices, where nothing could gain."""
    if len(ranks.nodes) > 1:
        nodes = range(len(ranks.nodes))
        return Machines(
            ranks=tuple(map(ranks.ranks_of, nodes)), names=tuple(f"node {node} ({_named(ranks, node)})" for node in nodes)
        )
    if hardware.network_bytes_per_second is None and len(set(ranks.devices)) == 1:
        return None
    names = tuple(f"rank {rank} ({device.name})" for rank, device in enumerate(ranks.devices))
    return Machines(ranks=tuple((rank,) for rank in range(len(ranks.devices))), names=names)


def beside_computing(
    config: Config, shape: ModelShape, setup: Setup, hardware: Hardware, ranks: Ranks, accumulation: int, calibration: Calibration | None
) -> Callable[[tuple[int, ...]], float] | None:  # fmt: skip
    """Returns the seconds of a step's exchange and update as a function of which ranks take part; `None` for an unknown network."""
    if link_of(hardware, ranks.devices, len(ranks.nodes), calibration) is None:
        return None

    node_of = [node for node, count in enumerate(ranks.nodes) for _ in range(count)]

    def seconds(taking_part: tuple[int, ...]) -> float:
        devices = tuple(ranks.devices[rank] for rank in taking_part)
        nodes = len({node_of[rank] for rank in taking_part})
        alone = nodes == 1 and len(ranks.nodes) > 1
        around = replace(hardware, network_bytes_per_second=None) if alone else hardware
        link = link_of(around, devices, nodes, calibration)
        assert link is not None, "a link that several machines have"
        case = replace(setup, world_size=len(devices))
        found = exchange_seconds(config, shape, case, len(devices), accumulation, link.bytes_per_second)
        found += latency_seconds(config, shape, case, link, len(devices), accumulation)
        return found + optimizer_seconds(config, shape, case, around, devices, calibration)

    return seconds
