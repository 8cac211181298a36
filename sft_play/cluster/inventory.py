"""`CLUSTER=configs/clusters/home_lan.yaml`: the machines of a cluster, in a separate YAML file.

docs/home-cluster.md describes its keys. The first host is the master: rank 0 runs there, and the others must reach its
`address`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

from sft_play.config.call import Call
from sft_play.config.layers import config_path
from sft_play.config.reader import Mismatch, Range, closest_word, quoted, read_record
from sft_play.config.yaml_files import read_yaml
from sft_play.errors import UserError, raise_all
from sft_play.files import typed_path
from sft_play.plan.hardware import network_speed

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
OCTET = "(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])"
ADDRESS = rf"{OCTET}(\.{OCTET}){{3}}|(?=.*[A-Za-z])[A-Za-z0-9][A-Za-z0-9._-]{{0,252}}"
ALONE = "a user goes into `user:`, a port into `port:`; ranks meet over IPv4 only (`ip -4 -br address` lists addresses)"
PATTERNS = {
    "address": (ADDRESS, "a name or an IPv4 address, such as `192.168.1.10`", ALONE),
    "ssh": (rf"{ADDRESS}|[0-9A-Fa-f]*:[0-9A-Fa-f:.]+(%\w+)?", "a name or an IP address", ALONE),
    "folder": (
        r"(?!~/(\.$|\.\.))(~/|/[^/\x00-\x1f])[^\x00-\x1f]*",
        "an absolute path below `/`, or `~/...` for a folder in the user's home there",
        None,
    ),
}
"""Key -> pattern of its values, the pattern in words, and a hint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Defaults:
    """Keys for all hosts, which a host may set for itself."""

    user: str | None = None
    """User for ssh; `None`: by ssh's configuration."""
    port: Annotated[int, Range(minimum=1, maximum=65_535)] | None = None
    """Port of its sshd; `None`: by ssh's configuration, else 22."""
    gpus: Annotated[int, Range(minimum=0, maximum=64)] | None = None
    """GPUs to use, 0 for the CPU; `None`: all."""
    python: str = ".venv/bin/python"
    """Interpreter of the environment: absolute, `~/...`, or relative to `folder`."""
    folder: str = "~/sft-play"
    """The project's folder there: absolute or `~/...`."""
    interface: str | None = None
    """Network interface to the others; `None`: that of the route to the master."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry(Defaults):
    """A host's keys."""

    address: str
    """Name or IPv4 address by which the other machines reach it."""
    ssh: str | None = None
    """Target of `ssh` if it is not `address`: a `Host` of the ssh configuration, such as one with a jump host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host(Entry):
    """One machine."""

    name: str
    """Its name in the inventory, in messages and in `CLUSTER_HOSTS=`."""
    place: str | None = None
    """`file:line` of its entry."""
    ssh_config: Path | None = None
    """File for `ssh -F`; `None`: ssh's default files."""
    cluster: Path = Path("...")
    """The inventory's file, as `CLUSTER=` takes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """The keys of an inventory."""

    hosts: Mapping[str, Entry | str]
    defaults: Defaults = field(default_factory=Defaults)
    network: str | None = None
    ssh_config: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """The machines of a cluster, the master first."""

    hosts: tuple[Host, ...]
    network: str | None = None
    """Speed of the network, such as `1Gbit`."""
    path: Path

    @property
    def master(self) -> Host:
        """The host of rank 0."""
        return self.hosts[0]


def inventory_for_call(call: Call) -> Inventory:
    """Return the inventory of `CLUSTER=` with the hosts of `CLUSTER_HOSTS=`. Raise `UserError`."""
    if not (name := call.options.get("CLUSTER")):
        hint = (
            f"make {call.command} CLUSTER=configs/clusters/home_lan.yaml; docs/home-cluster.md shows how to write one"
        )
        raise UserError(f"`{call.command}` needs an inventory of machines", hint=hint)
    takes = "CLUSTER= takes an inventory, such as configs/clusters/home_lan.yaml"
    return read_inventory(config_path(name, "configs/clusters", takes), call.options.get("CLUSTER_HOSTS"))


def read_inventory(path: Path, chosen: str | None = None) -> Inventory:
    """Return the inventory of a file, with the `chosen` hosts in this order. Raise all problems together, with
    `file:line`.
    """
    root = read_yaml(path)
    if not isinstance(root.value, dict):
        hint = "hosts: {desktop: {address: 192.168.1.10}, laptop: {address: 192.168.1.11}}"
        raise UserError("an inventory of machines has `hosts`", place=str(path), hint=hint)
    mismatches: list[Mismatch] = []
    file = read_record(root, File, "", mismatches)
    raise_all(
        [
            UserError(f"`{key}` {problem}", place=f"{path}:{node.line}" if node.line else str(path), hint=hint)
            for key, node, problem, hint in mismatches
        ]
    )
    config = path.parent / typed_path(file.ssh_config) if file.ssh_config else None
    hosts = []
    for name, entry in file.hosts.items():
        node = root.value["hosts"].value[name]
        keys = {item.name: getattr(file.defaults, item.name) for item in fields(Defaults)}
        keys |= {"address": entry} if isinstance(entry, str) else {key: getattr(entry, key) for key in node.value}
        keys["folder"] = plain_path(keys["folder"])
        hosts.append(Host(name=name, place=f"{path}:{node.line}", ssh_config=config, cluster=path, **keys))
    problems = [*_problems(hosts)]
    if config and not config.is_file():
        text = f"`ssh_config` is `{file.ssh_config}`, which is not a file"
        hint = "paths are relative to the inventory's folder"
        problems.append(UserError(text, place=root.place(path, "ssh_config"), hint=hint))
    raise_all(problems)
    if file.network:
        network_speed(file.network, root.place(path, "network"), "`network` is")
    return Inventory(hosts=_chosen(hosts, chosen), network=file.network, path=path)


def _problems(hosts: Sequence[Host]) -> Iterator[UserError]:
    """Yield what is wrong with names and values, and two hosts with one address, or a loopback address."""
    first: dict[str, Host] = {}
    for host in hosts:
        if not NAME.fullmatch(host.name):
            text = f"`{host.name}` is not a name for a host; expected letters, digits, `.`, `_` and `-`"
            yield UserError(text, place=host.place)
        for key, (pattern, expected, hint) in PATTERNS.items():
            value = getattr(host, key)
            if value is not None and not re.fullmatch(pattern, value):
                yield UserError(f"`{key}` is `{quoted(value)}`; expected {expected}", place=host.place, hint=hint)
        other = first.setdefault(host.address.lower(), host)
        if other is not host:
            text = f"hosts `{other.name}` and `{host.name}` have one address, `{host.address}`"
            yield UserError(text, place=host.place, hint=f"the other is at {other.place}; give each machine its own")
        elif len(hosts) > 1 and (host.address.startswith("127.") or host.address == "localhost"):
            hint = "give its address in the network between the machines (`ip -br address` there lists them)"
            text = f"host `{host.name}` has the address `{host.address}`, which every machine calls itself"
            yield UserError(text, place=host.place, hint=hint)


def _chosen(hosts: Sequence[Host], chosen: str | None) -> tuple[Host, ...]:
    """Return the hosts that `CLUSTER_HOSTS=` names, in its order, or all. Raise `UserError`."""
    by_name = {host.name: host for host in hosts}
    names = list(by_name) if chosen is None else list(dict.fromkeys(chosen.replace(",", " ").split()))
    listed = ", ".join(f"`{name}`" for name in by_name)
    for name in names:
        if name not in by_name:
            close = closest_word(name, list(by_name))
            hint = f"did you mean `{close}`?" if close else f"known: {listed}"
            raise UserError(f"`{name}` is not a host", place=f"CLUSTER_HOSTS={chosen}", hint=hint)
    if not names:
        raise UserError("there are no hosts", place="CLUSTER_HOSTS or `hosts:`", hint=f"the inventory has {listed}")
    return tuple(by_name[name] for name in names)


def plain_path(path: str) -> str:
    """Return a path of a host without `.`, `..` and double slashes, `~/` kept."""
    if path.startswith("~/"):
        return f"~/{posixpath.normpath(path[2:].lstrip('/') or '.')}"
    return re.sub("^//", "/", posixpath.normpath(path))
