"""`HARDWARE=my-machines.yaml`: hardware described in a file, for what one line cannot say."""

from __future__ import annotations

import difflib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from sft_play.config.yaml_files import Node, read_yaml
from sft_play.errors import HardwareError, UserError, raise_all
from sft_play.plan.catalogue import did_you_mean, find_card
from sft_play.plan.hardware import ASSUMED_RAM, ASSUMED_THREADS, GB, GIB, USABLE, Device, Hardware, device_of, network_speed

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
