"""`CLUSTER=configs/clusters/home_lan.yaml`: the machines of a cluster, in a separate YAML file.

docs/home-cluster.md describes its keys. The first host is the master: rank 0 runs there, and the others must reach its
`address`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from sft_play.config.call import Call
from sft_play.config.layers import PRESETS
from sft_play.config.names import closest_file
from sft_play.config.reader import INVALID, Mismatch, Range, convert, fields_of, quoted, shown
from sft_play.config.yaml_files import YamlNode, read_yaml, resolve_scalar
from sft_play.errors import UserError, raise_all
from sft_play.files import is_file_name, typed_path
from sft_play.plan.hardware import network_speed

INVENTORIES = PRESETS / "clusters"
"""The shipped inventories."""
ALIASES = {
    "ip": "address",
    "host": "address",
    "hostname": "address",
    "username": "user",
    "num_gpus": "gpus",
    "slots": "gpus",
    "venv": "python",
    "path": "folder",
    "nodes": "hosts",
    "bandwidth": "network",
}
"""Name in other tools -> key."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
OCTET = "(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])"
ADDRESS = rf"{OCTET}(\.{OCTET}){{3}}|(?=.*[A-Za-z])[A-Za-z0-9][A-Za-z0-9._-]{{0,252}}"
ALONE = "a user goes into `user:`, a port into `port:`; ranks meet over IPv4 only (`ip -4 -br address` lists addresses)"
PATTERNS = {
    "address": (ADDRESS, "a name or an IPv4 address, such as `192.168.1.10`", ALONE),
    "ssh": (rf"{ADDRESS}|[0-9A-Fa-f]*:[0-9A-Fa-f:.]+(%\w+)?", "a name or an IP address", ALONE),
    "user": (r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}", "a user's name", None),
    "interface": (r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,14}", "a network interface, such as `eth0`", None),
    "folder": (
        r"(?!~/(\.$|\.\.))(~/|/[^/\x00-\x1f])[^\x00-\x1f]*",
        "an absolute path below `/`, or `~/...` for a folder in the user's home there",
        None,
    ),
    "python": (r"[^\s\x00-\x1f-][^\x00-\x1f]*", "a Python interpreter", None),
}
"""Key -> pattern of its values, the pattern in words, and a hint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One machine."""

    address: str
    """Name or IPv4 address by which the other machines reach it."""
    ssh: str | None = None
    """Target of `ssh` if it is not `address`: a `Host` of the ssh configuration, such as one with a jump host."""
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
    name: str
    """Its name in the inventory, in messages and in `CLUSTER_HOSTS=`."""
    place: str | None = None
    """`file:line` of its entry."""
    ssh_config: Path | None = None
    """File for `ssh -F`; `None`: ssh's default files."""
    cluster: Path = Path("...")
    """The inventory's file, as `CLUSTER=` takes it."""


KEYS = {key: kind for key, kind in fields_of(Host).items() if key not in ("name", "place", "ssh_config", "cluster")}
DEFAULT_KEYS = [key for key in KEYS if key not in ("address", "ssh")]
TOP_KEYS = ("extends", "network", "ssh_config", "defaults", "hosts")


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
    """Return the inventory of `CLUSTER=`, changed by the `CLUSTER_...=` variables. Raise `UserError`."""
    if not (name := call.options.get("CLUSTER")):
        hint = (
            f"make {call.command} CLUSTER=configs/clusters/home_lan.yaml; docs/home-cluster.md shows how to write one"
        )
        raise UserError(f"`{call.command}` needs an inventory of machines", hint=hint)
    changes = {key: text for key, text in call.options.items() if key.startswith("CLUSTER_")}
    return read_inventory(inventory_path(name), changes)


def inventory_path(name: str) -> Path:
    """Return the file that `CLUSTER=` names, a path or a shipped inventory's name. Raise `UserError`."""
    if not is_file_name(name):
        raise UserError(f"`CLUSTER` is `{quoted(name)}`, which cannot be a file name")
    path, shipped = Path(name), INVENTORIES / f"{name}.yaml"
    if path.is_file():
        return path
    if "/" not in name and shipped.is_file():
        return shipped
    near = closest_file(path, INVENTORIES)
    hint = "CLUSTER= takes an inventory, such as configs/clusters/home_lan.yaml"
    if near:
        hint = f"did you mean `{near if Path(near).is_file() else Path(near).stem}`?"
    raise UserError(f"there is no file `{name}`", hint=hint)


def read_inventory(path: Path, changes: Mapping[str, str] | None = None) -> Inventory:
    """Return the inventory of a file and of the files that it extends. Raise all problems together, with `file:line`.

    `changes` are variables of the command line: `CLUSTER_NETWORK`, `CLUSTER_SSH_CONFIG`, `CLUSTER_HOSTS` (the hosts to
    use, in this order), a key for all hosts such as `CLUSTER_PYTHON`, and a key for one host such as
    `CLUSTER_NAME_GPUS`.
    """
    layers = _Layers()
    layers.read_file(path)
    layers.change(changes or {})
    return layers.inventory(path)


class _Placed(NamedTuple):
    """A value and its place in a file or variable."""

    node: YamlNode
    place: str
    folder: Path
    """The folder that its path is relative to."""


@dataclass(slots=True)
class _Layers:
    """Values of the files, later ones over earlier ones, then of the command line."""

    top: dict[str, _Placed] = field(default_factory=dict)
    defaults: dict[str, _Placed] = field(default_factory=dict)
    hosts: dict[str, dict[str, _Placed]] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    problems: list[UserError] = field(default_factory=list)

    def problem(self, text: str, place: str | None, hint: str | None = None) -> None:
        self.problems.append(UserError(text, place=place, hint=hint))

    def read_file(self, path: Path, chain: tuple[Path, ...] = ()) -> None:
        """Read a file over the file that it extends."""
        if path.resolve() in (other.resolve() for other in chain):
            circle = " -> ".join(map(str, (*chain, path)))
            raise UserError(f"`extends` forms a cycle: {circle}", place=str(chain[0]))
        root: dict[str, _Placed] = {}
        self.take(read_yaml(path), TOP_KEYS, "the inventory", path, root)
        if parent := root.pop("extends", None):
            self.read_file(_parent(parent), (*chain, path))
        defaults, hosts = root.pop("defaults", None), root.pop("hosts", None)
        self.top |= root
        if defaults:
            self.take(defaults.node, DEFAULT_KEYS, "`defaults`", path, self.defaults)
        if hosts and not isinstance(hosts.node.value, dict):
            hint = "below it, a line for each machine: `  desktop: {address: 192.168.1.10}`"
            self.problem(f"`hosts` is `{shown(hosts.node)}`; expected names with their keys", hosts.place, hint)
        elif hosts:
            for name, node in hosts.node.value.items():
                self.take_host(name, node, path)

    def take_host(self, name: str, node: YamlNode, path: Path) -> None:
        place = f"{path}:{node.line}"
        if not NAME.fullmatch(name):
            self.problem(f"`{name}` is not a name for a host; expected letters, digits, `.`, `_` and `-`", place)
        elif node.value is None and name in self.hosts:
            del self.hosts[name]  # null removes a host of the extended file
        else:
            keys, self.places[name] = self.hosts.setdefault(name, {}), place
            if isinstance(node.value, dict):
                self.take(node, KEYS, f"host `{name}`", path, keys)
            elif node.value is not None:
                keys["address"] = _Placed(node, place, path.parent)

    def take(self, node: YamlNode, allowed: Iterable[str], what: str, path: Path, into: dict[str, _Placed]) -> None:
        """Store the entries of a mapping; null removes an earlier file's value."""
        if not isinstance(node.value, dict):
            self.problem(f"{what} is `{shown(node)}`; expected {_listed(allowed)}", f"{path}:{node.line}")
            return
        for key, part in node.value.items():
            place = f"{path}:{part.line}"
            if key not in allowed:
                self.problem(f"unknown key `{key}`", place, _nearest(key, allowed))
            elif part.value is None:
                into.pop(key, None)
            else:
                into[key] = _Placed(part, place, path.parent)

    def change(self, changes: Mapping[str, str]) -> None:
        """Apply the variables of the command line: those for all hosts, for one, then the choice of hosts."""
        targets = {f"CLUSTER_{key}".upper(): [(self.top, key)] for key in ("network", "ssh_config")}
        targets |= {f"CLUSTER_{key}".upper(): [(keys, key) for keys in self.hosts.values()] for key in DEFAULT_KEYS}
        for name, keys in self.hosts.items():
            prefix = f"CLUSTER_{re.sub('[^A-Za-z0-9]', '_', name)}_"
            targets |= {f"{prefix}{key}".upper(): [(keys, key)] for key in KEYS}
        for option, places in targets.items():
            for values, key in places if option in changes else ():
                text = changes[option]
                values[key] = _Placed(YamlNode(resolve_scalar(text), text=text), f"{option}={text}", Path.cwd())
        for option in sorted(changes.keys() - targets.keys() - {"CLUSTER_HOSTS"}):
            hint = _nearest(option, ["CLUSTER_HOSTS", *targets])
            self.problem(f"unknown variable `{option}`", f"{option}={changes[option]}", hint)
        if "CLUSTER_HOSTS" in changes and self.hosts:
            self.choose_hosts(changes["CLUSTER_HOSTS"])

    def choose_hosts(self, text: str) -> None:
        """Keep only the named hosts, in that order; each may be named once."""
        names = text.replace(",", " ").split()
        origin, listed = f"CLUSTER_HOSTS={text}", _listed(self.hosts)
        if not names:
            self.problem("`CLUSTER_HOSTS` names no host", origin, f"the inventory has {listed}")
        for name in dict.fromkeys(names):
            if name not in self.hosts:
                self.problem(f"`{name}` is not a host", origin, _nearest(name, self.hosts))
            elif (count := names.count(name)) > 1:
                self.problem(
                    f"`{name}` is listed {count} times", origin, "name each host once; the first is the master"
                )
        self.hosts = {name: self.hosts[name] for name in names if name in self.hosts}

    # ---- Values

    def inventory(self, path: Path) -> Inventory:
        if not self.hosts and not self.problems:
            hint = "hosts: {desktop: {address: 192.168.1.10}, laptop: {address: 192.168.1.11}}"
            self.problem("the inventory has no hosts", str(path), hint)
        network, file = (self.value(key, str, self.top[key]) if key in self.top else None for key in TOP_KEYS[1:3])
        ssh_config = None
        if network:
            try:
                network_speed(network, self.top["network"].place, "`network` is")
            except UserError as error:
                self.problems.append(error)
        if file:
            ssh_config = self.top["ssh_config"].folder / typed_path(file)
            if not (is_file_name(file) and ssh_config.is_file()):
                hint = "paths are relative to the inventory's folder"
                self.problem(f"`ssh_config` is `{file}`, which is not a file", self.top["ssh_config"].place, hint)
        hosts = []
        for name, own in self.hosts.items():
            keys = {**self.defaults, **own}
            values = {key: self.value(key, KEYS[key], placed) for key, placed in keys.items()}
            if "address" in keys:
                hosts.append(Host(name=name, place=self.places[name], ssh_config=ssh_config, cluster=path, **values))
            elif not self.problems:  # an earlier problem, such as a mistyped key, may be the cause
                hint = "`address: 192.168.1.10`, the address by which the others reach it"
                self.problem(f"host `{name}` has no `address`", self.places[name], hint)
        if not self.problems:
            self.refuse_doubles(hosts)
        raise_all(self.problems)
        return Inventory(hosts=tuple(hosts), network=network, path=path)

    def value(self, key: str, annotation: Any, placed: _Placed) -> Any:
        mismatches: list[Mismatch] = []
        value = convert(placed.node, annotation, key, mismatches)
        pattern, expected, hint = PATTERNS.get(key, (".*", "", None))
        if value is INVALID:
            self.problem(f"`{key}` {mismatches[0].problem}", placed.place, mismatches[0].hint)
        elif isinstance(value, str) and not re.fullmatch(
            pattern, value := plain_path(value) if key == "folder" else value
        ):
            self.problem(f"`{key}` is `{shown(placed.node)}`; expected {expected}", placed.place, hint)
        return value

    def refuse_doubles(self, hosts: Iterable[Host]) -> None:
        """Refuse two hosts with one address, and a loopback address."""
        seen: dict[str, Host] = {}
        for host in hosts:
            first = seen.setdefault(host.address.lower(), host)
            if first is not host:
                text = f"hosts `{first.name}` and `{host.name}` have one address, `{host.address}`"
                self.problem(text, host.place, f"the other is at {first.place}; give each machine its own")
        for host in seen.values() if len(seen) > 1 else ():
            if host.address.startswith("127.") or host.address == "localhost":
                hint = "give its address in the network between the machines (`ip -br address` there lists them)"
                text = f"host `{host.name}` has the address `{host.address}`, which every machine calls itself"
                self.problem(text, host.place, hint)


def _nearest(word: str, words: Iterable[str]) -> str:
    """Return the hint for an unknown word."""
    plain = word if word.isupper() else word.lower().replace("-", "_")
    close = [ALIASES[plain]] if ALIASES.get(plain, "") in words else get_close_matches(plain, words, n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`?" if close else f"known: {_listed(words)}"


def _listed(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _parent(parent: _Placed) -> Path:
    name = str(parent.node.text or parent.node.value)
    for choice in (parent.folder / name, parent.folder / f"{name}.yaml", INVENTORIES / f"{name}.yaml"):
        if is_file_name(name) and choice.is_file():
            return choice
    hint = "files are relative to the folder of the file that extends"
    raise UserError(f"`extends` is `{shown(parent.node)}`, which is not an inventory", place=parent.place, hint=hint)


def plain_path(path: str) -> str:
    """Return a path of a host without `.`, `..` and double slashes, `~/` kept."""
    if path.startswith("~/"):
        return f"~/{posixpath.normpath(path[2:].lstrip('/') or '.')}"
    return re.sub("^//", "/", posixpath.normpath(path))
