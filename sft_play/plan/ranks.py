"""How many ranks there are, on which devices of which machine. Pure.

Nodes that have met (`launch/machines.py`) plan from the same list of all devices, and all train by node 0's plan;
before that, each assumes the others to be like itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sft_play.config.schema import LaunchConfig
from sft_play.errors import HardwareError, UserError
from sft_play.plan.hardware import GIB, Device, Hardware
from sft_play.plan.plan import LaunchRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLayout:
    """The devices and machines of a run's ranks."""

    devices: tuple[Device, ...]
    places: tuple[int, ...]
    """Index of each rank's device on its machine."""
    nodes: tuple[int, ...]
    """Number of ranks of each machine."""
    this_node: int
    """Index of this machine."""

    @property
    def without_bf16(self) -> Device | None:
        """The first device that does not compute in bfloat16 at full speed."""
        return next((device for device in self.devices if not device.bf16), None)

    @property
    def local(self) -> int:
        """Number of ranks of this machine."""
        return self.nodes[self.this_node]

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """Return the ranks of a machine."""
        start = sum(self.nodes[:node])
        return tuple(range(start, start + self.nodes[node]))

    def name_of(self, node: int) -> str:
        """Return the devices of a machine in words."""
        names = [self.devices[rank].name for rank in self.ranks_of(node)]
        if len(set(names)) > 1:
            return " + ".join(names)
        return names[0] if len(names) == 1 else f"{len(names)} x {names[0]}"


def one_each(hardware: Hardware, launch: LaunchRequest) -> bool:
    """Return whether `HARDWARE` describes one card for each machine, as in `HARDWARE=12GB+8GB+8GB@1Gbit NUM_NODES=3`.

    Like cards count too where each is listed (`8GB+8GB`), whereas `2x8GB` means two cards in each machine.
    """
    networked = hardware.described and hardware.kind == "cuda" and hardware.network is not None
    listed = hardware.listed == len(hardware.devices) or len(set(hardware.devices)) > 1
    return (
        networked
        and listed
        and len(hardware.devices) == launch.num_nodes
        and launch.num_gpus in (None, 1)
        and not launch.node_devices
    )


def ranks_of(hardware: Hardware, launch: LaunchRequest) -> RankLayout:
    """Return the ranks of all machines. Raise `HardwareError` for devices that are absent."""
    single, nodes = launch.command_strategy == "single", launch.num_nodes
    if launch.node_devices and not single:
        assert len(launch.node_devices) == nodes, (len(launch.node_devices), nodes)
        machines = [(tuple(range(len(devices))), devices) for devices in launch.node_devices]
    else:
        machines = [devices_for(hardware, launch, single)] * nodes
    return RankLayout(
        devices=tuple(device for _, devices in machines for device in devices),
        places=tuple(place for places, _ in machines for place in places),
        nodes=tuple(len(devices) for _, devices in machines),
        this_node=min(launch.node_rank, nodes - 1),
    )


MOST_CPU_PROCESSES = 64


def devices_for(
    hardware: Hardware, request: LaunchRequest, wants_one: bool
) -> tuple[tuple[int, ...], tuple[Device, ...]]:
    """Return the index and the device of each of this machine's ranks.

    Raise `HardwareError` if there are too few.
    """
    asked = request.num_gpus
    if wants_one and (asked or 1) > 1:
        raise UserError(
            f"`NUM_GPUS` is {asked}, but `make train` runs one process", hint="use `make train-distributed`"
        )
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
        remedy = (
            "describe more in HARDWARE" if hardware.described else "look at `make gpu-info` and CUDA_VISIBLE_DEVICES"
        )
        raise HardwareError(
            f"`NUM_GPUS` is {asked}, but there {'is' if len(hardware.devices) == 1 else 'are'} {len(hardware.devices)}"
            f" ({names})",
            hint=f"NUM_GPUS={len(hardware.devices)}, or {remedy}",
        )
    if wants_one:
        # The card with the most free memory, rounded to a GiB; among equals, the fastest.
        best = max(hardware.devices, key=lambda device: (device.free_bytes // GIB, device.peak_flops or 0.0))
        return (hardware.devices.index(best),), (best,)
    chosen = hardware.devices[: asked or len(hardware.devices)]
    return tuple(range(len(chosen))), chosen


def visible_names(devices: Sequence[Device], indices: Sequence[int]) -> list[str]:
    """Return how `CUDA_VISIBLE_DEVICES` names these devices: slices by UUID, cards by number, unknown ones by index."""
    chosen = [(index, devices[index]) for index in indices]
    return [device.mig_uuid or str(index if device.number is None else device.number) for index, device in chosen]


def group_size(launch: LaunchConfig, world: int) -> int:
    """Return how many of `world` ranks train the same rows."""
    return launch.sequence_parallel * launch.tensor_parallel * stages(launch, world)


def stages(launch: LaunchConfig, world: int) -> int:
    """Return how many of `world` ranks form a pipeline; 1 without a pipeline."""
    if launch.strategy != "pipeline":
        return 1
    return world if launch.stages == "auto" else launch.stages
