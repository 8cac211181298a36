"""Devices as the plan sees them: detected, or described by the user (`HARDWARE=2x24GB`, or a file)."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sft_play.config.yaml_files import Node, read_yaml
from sft_play.errors import HardwareError, UserError, raise_all
from sft_play.plan.catalogue import BOARD_WATTS, Card, did_you_mean, find_card

GIB = 2**30
GB = 10**9
USABLE = 0.98
"""Share of a card's nominal gigabytes (which are GiB on cards) that programs see; ECC and driver keep the rest."""
HEADROOM = {"cuda": 0.94, "cpu": 0.85}
"""Share of the free memory that is planned for."""
FULL = 0.05
"""A GPU with a smaller share of its memory free is full: CUDA and a model's first layer already need more."""
COMPUTE_MODE_REMEDY = "`sudo nvidia-smi -c 0` lets every process compute on it; CUDA_VISIBLE_DEVICES chooses another"
ASSUMED_THREADS, ASSUMED_RAM = 8, 64 * GIB
"""Of a machine whose GPUs alone are described."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One GPU, or the CPU of a machine."""

    name: str
    memory_bytes: int
    free_bytes: int
    bf16: bool
    """Whether bfloat16 computes at full speed."""
    fp8: bool = False
    compute_capability: tuple[int, int] | None = None
    peak_flops: float | None = None
    """Dense bf16 operations per second with fp32 accumulation; fp32 on a CPU. `None` when unknown."""
    bandwidth: float | None = None
    """Bytes per second of device memory."""
    power_watts: float | None = None
    """The limit that the driver enforces, or the card's by its data sheet; `None` when unknown (always so for a CPU)."""
    number: int | None = None
    """The driver's number, as `CUDA_VISIBLE_DEVICES` takes it; `None` for the CPU and for what is described."""
    mig_uuid: str | None = None
    """Of a MIG slice, as `CUDA_VISIBLE_DEVICES` takes it."""
    blocked: str = ""
    """Why no program of ours may compute on it (its compute mode); empty where one may."""
    expandable_segments: bool = True
    """Whether torch's allocator can grow its blocks in place there. Under WSL2 the first allocation would fail (pytorch#192330)."""

    @property
    def full(self) -> bool:
        """Whether other programs hold nearly all of its memory."""
        return self.free_bytes < FULL * self.memory_bytes

    @property
    def cannot_be_used(self) -> str:
        """The refusal of a `blocked` GPU, with the driver's number, which `nvidia-smi` shows too."""
        return f"GPU {self.number} ({self.name}) cannot be used: {self.blocked}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """What a run may use on this machine."""

    kind: Literal["cpu", "cuda"]
    devices: tuple[Device, ...]
    """The GPUs, or one entry for the CPU."""
    cpu_threads: int
    ram_bytes: int
    described: bool = False
    """Whether the user described it, rather than this machine being looked at."""
    network_bytes_per_second: float | None = None
    """Between machines, or between cards without a faster link; `None` when nothing is known."""
    ram_known: bool = True
    """Whether `ram_bytes` was looked up or stated, rather than assumed."""
    nodes: int = 1
    """Machines like this one that a description names; `NUM_NODES` wins."""
    listed: int = 0
    """Entries of a description that `+` joins, such as 2 of `12GB+8GB`; 0 where nothing was written so."""
    driver: str | None = None
    """Version of NVIDIA's driver; `None` where none was looked at."""
    driver_cuda: str | None = None
    """The newest CUDA that it supports, such as `13.0`."""
    unused: str = ""
    """Why a GPU of this machine does nothing."""


PART = re.compile(r"(?:(\d{1,4})\s*[x*]\s*)?([A-Za-z0-9 .\-]+?)(?:\s*[x*]\s*(\d{1,2}))?")
"""`2x24GB`, `4090`, `A100 x 2`."""
MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(GB|GiB|G)", re.IGNORECASE)
WELL_KNOWN = ("RTX4090", "RTX5090", "L40S", "A100", "H100", "H200")
NETWORK = re.compile(r"(\d+(?:\.\d+)?)\s*(G|M)bit(?:/s)?", re.IGNORECASE)


def parse_hardware(text: str) -> Hardware:
    """Returns described hardware: `2x24GB`, `12GB+8GB@1Gbit`, `2x8xH100` (machines first), `cpu`, or a YAML file. Raises `UserError`."""
    if re.search(r"\.ya?ml$", text.strip(), re.IGNORECASE):
        return read_hardware(Path(text.strip()))
    body, at, network = text.partition("@")
    speed = network_speed(network, f"HARDWARE={text}") if at else None
    if body.strip().lower() == "cpu":
        from sft_play.plan.detect import cpu_only

        return replace(cpu_only(), network_bytes_per_second=speed)
    machines = re.match(r"\s*(\d{1,4})\s*x\s*(?=\d+\s*x)", body)  # `2x8xH100`
    parts = re.split("[+,]", body[machines.end() if machines else 0 :])
    devices = [device for part in parts for device in _devices(part.strip(), text)]
    return Hardware(
        kind="cuda", devices=tuple(devices), cpu_threads=ASSUMED_THREADS, ram_bytes=ASSUMED_RAM, described=True,
        network_bytes_per_second=speed, ram_known=False, listed=len(parts), nodes=int(machines.group(1)) if machines else 1,
    )  # fmt: skip


def network_speed(text: str, place: str, named: str = "`HARDWARE` names the network") -> float:
    """Returns the bytes per second that a network such as `1Gbit` carries. Raises `HardwareError`."""
    match = NETWORK.fullmatch(text.strip())
    if not match or float(match.group(1)) <= 0:
        raise HardwareError(f"{named} `{text}`; expected such as `1Gbit`", place=place)
    # Ethernet and TCP headers leave 94 % of the line rate.
    return float(match.group(1)) * (1e9 if match.group(2).upper() == "G" else 1e6) / 8 * 0.94


def _devices(part: str, text: str) -> list[Device]:
    match = PART.fullmatch(
        re.sub(r"^(\d{1,2}) +(?=[A-WYZa-wyz])(?!Gi?B?$)", r"\1x", part)
    )  # `2 RTX 3090`, but neither `2 x A100` nor `24 GB`
    count = int(match.group(1) or match.group(3) or 1) if match and not (match.group(1) and match.group(3)) else 0
    name = match.group(2).strip() if match else ""
    if not 1 <= count <= 4096:
        raise _nonsense(part, text)
    if memory := MEMORY.fullmatch(name):
        size = int(float(memory.group(1)) * GIB * USABLE)
        if size < GIB:
            raise _nonsense(part, text)
        return [Device(name=f"{memory.group(1)} GB GPU", memory_bytes=size, free_bytes=size, bf16=True)] * count
    found = find_card(name)
    if found is None:
        raise _nonsense(part, text)
    device = device_of(*found)
    if written := re.search(r"(\d+)\s*Gi?B$", name, re.IGNORECASE):
        size = int(int(written.group(1)) * GIB * USABLE)
        if abs(size - device.memory_bytes) > 0.1 * device.memory_bytes:  # another version of the card: `3080 12GB`, `4090 48GB`
            device = replace(device, name=f"{device.name} {written.group(1)}GB", memory_bytes=size, free_bytes=size)
    return [device] * count


def device_of(label: str, card: Card) -> Device:
    """Returns the device that a catalogue row describes."""
    size = int(card.memory_gib * GIB)
    return Device(
        name=label,
        memory_bytes=size,
        free_bytes=size,
        bf16=card.capability >= (8, 0),
        fp8=card.capability >= (8, 9),
        compute_capability=card.capability,
        peak_flops=card.bf16_tflops * 1e12,
        bandwidth=card.bandwidth_gb_s * GB,
        power_watts=BOARD_WATTS.get(label),
    )


def _nonsense(part: str, text: str) -> HardwareError:
    meant = did_you_mean(part.split("x", 1)[-1] if re.match(r"\d+\s*x", part) else part)
    return HardwareError(
        f"`{part}` is not hardware that is known",
        place=f"HARDWARE={text}",
        hint=(f"did you mean `{meant}`? " if meant else "")
        + f"write 2x24GB, 12GB+8GB@1Gbit, 2x8xH100, cpu, a YAML file, or a count and a name of docs/hardware.md, such as {', '.join(WELL_KNOWN)}",
    )


# `HARDWARE=my-machines.yaml`: hardware described in a file, for what one line cannot say.


KEYS = ("devices", "network", "ram_gb", "cpu_threads", "nodes")
DEVICE_KEYS = ("name", "count", "memory_gb", "free_gb", "bf16_tflops", "bandwidth_gb_s")
MOST_DEVICES = 4096


def read_hardware(path: Path) -> Hardware:
    """Returns the machine that a YAML file describes. Raises every problem at once, each with `file:line`.

    `devices` is a list of GPUs (`name` of the catalogue, or any name with `memory_gb`; `count`, `free_gb`, `bf16_tflops`,
    `bandwidth_gb_s`); `network` (`1Gbit`) joins them, or the `nodes` like it; `ram_gb` and `cpu_threads` are one machine's.
    """
    return _Reader(path).read()


class _Reader:
    """Collects problems while it reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[UserError] = []

    def read(self) -> Hardware:
        root = read_yaml(self.path)
        top = self.mapping(root, KEYS, "the file")
        listed = top.get("devices")
        devices: list[Device] = []
        if listed is None or not isinstance(listed.value, list) or not listed.value:
            self.problem("`devices` is missing or empty; expected a list", listed or root, "devices: [{name: RTX4090, count: 2}]")
        else:
            for entry in listed.value:
                devices += self.devices(entry)
        network, speed = top.get("network"), None
        if network is not None:
            try:
                speed = network_speed(str(network.text or network.value), self.place(network))
            except HardwareError as error:
                self.problems.append(error)
        ram = self.number(top, "ram_gb", minimum=0.5)
        threads, nodes = self.whole(top, "cpu_threads", 1, 65_536), self.whole(top, "nodes", 1, MOST_DEVICES)
        raise_all(self.problems)
        return Hardware(
            kind="cuda", devices=tuple(devices), cpu_threads=threads or ASSUMED_THREADS, ram_bytes=int(ram * GIB) if ram else ASSUMED_RAM,
            described=True, network_bytes_per_second=speed, ram_known=ram is not None, nodes=nodes or 1,
        )  # fmt: skip

    def devices(self, entry: Node) -> list[Device]:
        """Returns the devices of one entry of the list, none after a problem."""
        before = len(self.problems)
        keys = self.mapping(entry, DEVICE_KEYS, "an entry of `devices`")
        count = self.whole(keys, "count", 1, MOST_DEVICES) or 1
        memory, free = self.number(keys, "memory_gb", minimum=1), self.number(keys, "free_gb", minimum=0)
        tflops, bandwidth = self.number(keys, "bf16_tflops", above=0), self.number(keys, "bandwidth_gb_s", above=0)
        name = str(keys["name"].text or keys["name"].value) if "name" in keys else None
        found = find_card(name) if name else None
        if found is None and memory is None and len(self.problems) == before:
            self.unknown(entry, name, keys)
        if len(self.problems) > before:
            return []
        unknown = Device(name=name or f"{memory:g} GB GPU", memory_bytes=0, free_bytes=0, bf16=True)
        device = device_of(*found) if found else unknown
        if memory is not None:
            size = int(memory * GIB * USABLE)
            device = replace(device, memory_bytes=size, free_bytes=size)
        if free is not None:
            device = replace(device, free_bytes=int(free * GIB))
            if device.free_bytes > device.memory_bytes:
                text = f"`free_gb` is {free:g}, but the card has {device.memory_bytes / GIB:.1f} GiB in all"
                self.problem(text, keys["free_gb"])
                return []
        if tflops is not None:
            device = replace(device, peak_flops=tflops * 1e12)
        if bandwidth is not None:
            device = replace(device, bandwidth=bandwidth * GB)
        return [device] * count

    def unknown(self, entry: Node, name: str | None, keys: dict[str, Node]) -> None:
        """A card without a size that is not in the catalogue."""
        if name is None:
            self.problem("an entry of `devices` has neither `name` nor `memory_gb`", entry, "name: RTX4090, or memory_gb: 24")
            return
        meant = did_you_mean(name)
        self.problem(
            f"`{name}` is not a card that is known, and its `memory_gb` is not given",
            keys["name"],
            (f"did you mean `{meant}`? " if meant else "") + "add `memory_gb`, or use a name of docs/hardware.md",
        )

    def mapping(self, node: Node, known: tuple[str, ...], what: str) -> dict[str, Node]:
        """Returns the entries of a mapping that have a value; unknown ones are problems."""
        if not isinstance(node.value, dict):
            self.problem(f"{what} is not `key: value` lines; expected {', '.join(f'`{key}`' for key in known)}", node)
            return {}
        for key, value in node.value.items():
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
                self.problem(
                    f"unknown key `{key}`", value, f"did you mean `{close[0]}`?" if close else f"known: {', '.join(known)}"
                )
        return {key: value for key, value in node.value.items() if key in known and value.value is not None}

    def number(
        self, keys: dict[str, Node], key: str, *, minimum: float | None = None, above: float | None = None
    ) -> float | None:
        """Returns the number of `key`, `None` when it is not given or wrong."""
        node = keys.get(key)
        if node is None:
            return None
        value: Any = node.value
        right = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value <= 1e9
        if not right or (minimum is not None and value < minimum) or (above is not None and value <= above):
            bound = f"of {minimum:g} or more" if minimum is not None else f"above {above:g}"
            self.problem(f"`{key}` is `{node.text or node.plain()}`; expected a number {bound}", node)
            return None
        return float(value)

    def whole(self, keys: dict[str, Node], key: str, low: int, high: int) -> int | None:
        """Returns the integer of `key`, `None` when it is not given or wrong."""
        node = keys.get(key)
        if node is None:
            return None
        if not isinstance(node.value, int) or isinstance(node.value, bool) or not low <= node.value <= high:
            self.problem(f"`{key}` is `{node.text or node.plain()}`; expected an integer from {low} to {high}", node)
            return None
        return node.value

    def place(self, node: Node) -> str:
        return f"{self.path}:{node.line}" if node.line else str(self.path)

    def problem(self, text: str, node: Node, hint: str | None = None) -> None:
        self.problems.append(HardwareError(text, place=self.place(node), hint=hint))
