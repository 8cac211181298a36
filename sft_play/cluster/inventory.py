"""`CLUSTER=configs/clusters/home_lan.yaml`: the machines of a cluster, in a YAML file of its own.

docs/home-cluster.md describes its keys. The first host is the master: rank 0 runs there, and the others must reach its `address`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from sft_play.config.layers import PRESETS, check_name
from sft_play.config.names import closest_file
from sft_play.config.reader import INVALID, Mismatch, Range, convert, fields_of, shown
from sft_play.config.yaml_files import Node, read_yaml, resolve_scalar
from sft_play.errors import UserError, raise_all
from sft_play.files import is_file_name, typed_path
from sft_play.plan.hardware import network_speed

if TYPE_CHECKING:
    from sft_play.config.call import Call

INVENTORIES = PRESETS / "clusters"
"""The shipped inventories."""
MEANT = {
    "ip": "address", "host": "address", "hostname": "address", "username": "user", "login": "user", "ssh_user": "user", "ssh_port": "port",
    "num_gpus": "gpus", "slots": "gpus", "venv": "python", "interpreter": "python", "path": "folder", "directory": "folder",
    "iface": "interface", "nodes": "hosts", "machines": "hosts", "bandwidth": "network", "vars": "defaults", "all": "defaults",
}  # fmt: skip
"""What other tools call a key."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
NUMBERS = re.compile(r"[0-9.]+")
"""What is read as an IPv4 address, or the short form of one, and never as a name."""
PATTERNS = {
    "address": (r"[A-Za-z0-9:][A-Za-z0-9.:_%-]{0,252}", "a name or an IP address"),
    "ssh": (r"[A-Za-z0-9:][A-Za-z0-9.:_%-]{0,252}", "a name or an IP address"),
    "user": (r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}", "a user's name"),
    "interface": (r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,14}", "a network interface, such as `eth0`"),
    "folder": (r"(?!~/(\.$|\.\.))(~/|/[^/\x00-\x1f])[^\x00-\x1f]*", "an absolute path below `/`, or `~/...` for a folder in the user's home there"),
    "python": (r"[^\s\x00-\x1f-][^\x00-\x1f]*", "a Python interpreter"),
}  # fmt: skip
OVER_IPV4 = "ranks meet over IPv4 only: `ip -4 -br address` there lists its IPv4 addresses; `ssh` may be an IPv6 address"
ALONE = "only a name or an IP address"
AN_ADDRESS = "`address: 192.168.1.10`, the address by which the others reach it"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostKeys:
    """What an inventory says of one machine."""

    address: str
    """Name or IPv4 address by which the other machines reach it."""
    ssh: str | None = None
    """Where `ssh` goes when that is not `address`: a `Host` of the ssh configuration, such as one with a jump host or a tunnel."""
    user: str | None = None
    """For ssh; `None`: as ssh's configuration says."""
    port: Annotated[int, Range(minimum=1, maximum=65_535)] | None = None
    """Of its sshd; `None`: as ssh's configuration says, else 22."""
    gpus: Annotated[int, Range(minimum=0, maximum=64)] | None = None
    """GPUs to use, 0 for the CPU; `None`: all that are found."""
    python: str = ".venv/bin/python"
    """Interpreter of the environment: absolute, `~/...`, or relative to `folder`."""
    folder: str = "~/sft-play"
    """The project there: absolute or `~/...`."""
    interface: str | None = None
    """Network interface towards the others; `None`: that of the route to the master."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host(HostKeys):
    """One machine."""

    name: str
    """As the user calls it; in messages, and in `CLUSTER_HOSTS=`."""
    place: str | None = None
    """Where the inventory names it, `file:line`."""
    ssh_config: Path | None = None
    """For `ssh -F`; `None`: ssh's own files."""
    cluster: Path = Path("...")
    """The inventory's file, as `CLUSTER=` takes it."""


KEYS = fields_of(HostKeys)
DEFAULT_KEYS = [key for key in KEYS if key not in ("address", "ssh")]


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
    """Return the inventory of `CLUSTER=`, changed by the `CLUSTER_...=` variables. Raises `UserError`."""
    name = call.options.get("CLUSTER")
    if not name:
        raise UserError(
            f"`{call.command}` needs an inventory of machines",
            hint=f"make {call.command} CLUSTER=configs/clusters/home_lan.yaml; docs/home-cluster.md shows how to write one",
        )
    return read_inventory(inventory_path(name), {key: text for key, text in call.options.items() if key.startswith("CLUSTER_")})


def inventory_path(name: str) -> Path:
    """Return the file that `CLUSTER=` names; a bare name is that of a shipped inventory. Raises `UserError`."""
    check_name(name, "CLUSTER")
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
    """Return the inventory of a file and of those that it extends. Raises every problem at once, each with its `file:line`.

    `changes` are variables of the command line: `CLUSTER_NETWORK`, `CLUSTER_SSH_CONFIG`, `CLUSTER_HOSTS` (the hosts to use, in this
    order), `CLUSTER_PYTHON` and other keys, for all hosts, and `CLUSTER_NAME_GPUS`, for one.
    """
    given = _Layers()
    given.read(path)
    given.change(changes or {})
    return given.inventory(path)


class _Given(NamedTuple):
    node: Node
    place: str
    folder: Path
    """The folder that a path in it is relative to."""


@dataclass(slots=True)
class _Layers:
    """What the files say, later ones over earlier ones, then the command line."""

    top: dict[str, _Given] = field(default_factory=dict)
    defaults: dict[str, _Given] = field(default_factory=dict)
    hosts: dict[str, dict[str, _Given]] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    problems: list[UserError] = field(default_factory=list)

    def problem(self, text: str, place: str | None, hint: str | None = None) -> None:
        self.problems.append(UserError(text, place=place, hint=hint))

    def read(self, path: Path, chain: tuple[Path, ...] = ()) -> None:
        """Take a file's values over those of the files that it extends."""
        if path.resolve() in (other.resolve() for other in chain):
            raise UserError(f"`extends` goes round in a circle: {' -> '.join(map(str, (*chain, path)))}", place=str(chain[0]))
        found: dict[str, _Given] = {}
        self.take(read_yaml(path), ("extends", "network", "ssh_config", "defaults", "hosts"), "the inventory", path, found)
        if extends := found.pop("extends", None):
            self.read(_parent(extends), (*chain, path))
        if defaults := found.pop("defaults", None):
            self.take(defaults.node, DEFAULT_KEYS, "`defaults`", path, self.defaults)
        hosts = found.pop("hosts", None)
        self.top |= found
        if hosts and not isinstance(hosts.node.value, dict):
            hint = "below it, a line for each machine: `  desktop: {address: 192.168.1.10}`"
            self.problem(f"`hosts` is `{shown(hosts.node)}`; expected names with their keys", hosts.place, hint)
        elif hosts:
            for name, part in hosts.node.value.items():
                self.take_host(name, part, path)

    def take_host(self, name: str, part: Node, path: Path) -> None:
        place = f"{path}:{part.line}"
        if not NAME.fullmatch(name):
            self.problem(f"`{name}` is not a name for a host; expected letters, digits, `.`, `_` and `-`", place)
        elif part.value is None and name in self.hosts:
            del self.hosts[name]  # a file that extends another leaves this host out
        else:
            keys, self.places[name] = self.hosts.setdefault(name, {}), place
            if isinstance(part.value, dict):
                self.take(part, list(KEYS), f"host `{name}`", path, keys)
            elif part.value is None:
                self.problem(f"host `{name}` has no keys", place, AN_ADDRESS)
            else:
                keys["address"] = _Given(part, place, path.parent)

    def take(self, node: Node, known: Sequence[str], what: str, path: Path, into: dict[str, _Given]) -> None:
        """Take the entries of a mapping; null takes back what an earlier file said."""
        if not isinstance(node.value, dict):
            self.problem(f"{what} is `{shown(node)}`; expected {_listed(known)}", f"{path}:{node.line}")
            return
        for key, part in node.value.items():
            place = f"{path}:{part.line}"
            if key not in known:
                self.problem(f"unknown key `{key}`", place, _meant(key, known) or f"known: {_listed(known)}")
            elif part.value is None:
                into.pop(key, None)
            else:
                into[key] = _Given(part, place, path.parent)

    def change(self, changes: Mapping[str, str]) -> None:
        """Apply the variables of the command line; one host's own value goes over that of all."""
        own = {f"CLUSTER_{re.sub('[^A-Za-z0-9]', '_', host)}_{key}".upper(): (host, key) for host in self.hosts for key in KEYS}
        of_all = {f"CLUSTER_{key}".upper(): key for key in DEFAULT_KEYS}
        of_top = {"CLUSTER_NETWORK": "network", "CLUSTER_SSH_CONFIG": "ssh_config"}
        for option, text in sorted(changes.items(), key=lambda item: item[0] in own):
            origin = f"{option}={text}"
            given = _Given(Node(resolve_scalar(text), text=text), origin, Path.cwd())
            if option == "CLUSTER_HOSTS":
                self.choose(text, origin)
            elif option in of_top:
                self.top[of_top[option]] = given
            elif option in of_all:
                for keys in self.hosts.values():
                    keys[of_all[option]] = given
            elif option in own:
                host, key = own[option]
                self.hosts.get(host, {})[key] = given
            else:
                hint = _meant(option, ["CLUSTER_HOSTS", *of_top, *of_all, *own]) or f"the hosts are {_listed(self.hosts)}"
                self.problem(f"unknown variable `{option}`", origin, hint)

    def choose(self, text: str, origin: str) -> None:
        """Keep the named hosts, in the order given."""
        hosts, names = self.hosts, text.replace(",", " ").split()
        if hosts and not names:
            self.problem("`CLUSTER_HOSTS` names no host", origin, f"the inventory has {_listed(hosts)}")
        for name in dict.fromkeys(names):
            if (count := names.count(name)) > 1:
                self.problem(f"`{name}` is listed {count} times", origin, "name each host once; the first is the master")
            if hosts and name not in hosts:
                self.problem(
                    f"`{name}` is not a host", origin, _meant(name, list(hosts)) or f"the inventory has {_listed(hosts)}"
                )
        self.hosts = {name: hosts[name] for name in names if name in hosts}

    # ---- Values

    def inventory(self, path: Path) -> Inventory:
        if not self.hosts and not self.problems:
            hint = "hosts: {desktop: {address: 192.168.1.10}, laptop: {address: 192.168.1.11}}"
            self.problem("the inventory has no hosts", str(path), hint)
        found = [self.host(name, {**self.defaults, **keys}) for name, keys in self.hosts.items()]
        hosts = [host for host in found if host]
        self.refuse_doubles(hosts)
        network, file, ssh_config = self.text_of("network"), self.text_of("ssh_config"), None
        if network:
            place = self.top["network"].place
            try:
                network_speed(network, place, "`network` is")
            except UserError as error:
                self.problem(error.message, place)
        if file:
            ssh_config = self.top["ssh_config"].folder / typed_path(file)
            if not (is_file_name(file) and ssh_config.is_file()):
                text = f"`ssh_config` is `{shown(Node(str(ssh_config)))}`, which is not a file"
                self.problem(text, self.top["ssh_config"].place, "paths are relative to the inventory's folder")
        raise_all(self.problems)
        return Inventory(
            hosts=tuple(replace(host, ssh_config=ssh_config, cluster=path) for host in hosts), network=network, path=path
        )

    def text_of(self, key: str) -> str | None:
        """Return a key of the whole inventory; `None` where it is not given, or a problem."""
        return self.value(key, str, self.top[key]) if key in self.top else None

    def host(self, name: str, keys: Mapping[str, _Given]) -> Host | None:
        before = len(self.problems)
        values = {key: self.value(key, KEYS[key], given) for key, given in keys.items()}
        if "address" not in keys and not before:  # another problem may be its cause, such as a mistyped key
            self.problem(f"host `{name}` has no `address`", self.places[name], AN_ADDRESS)
        fine = "address" in keys and len(self.problems) == before
        return Host(name=name, place=self.places[name], **values) if fine else None

    def value(self, key: str, annotation: Any, given: _Given) -> Any:
        found: list[Mismatch] = []
        value = convert(given.node, annotation, key, found)
        expected, hint = "", None
        if value is INVALID:
            self.problem(f"`{key}` {found[0].problem}", given.place, found[0].hint)
            return None
        if key in ("address", "ssh"):
            expected, hint = _fault_of_address(key, value)
        elif key == "folder":
            value = plain_path(value)
        if key in PATTERNS and not expected and not re.fullmatch(PATTERNS[key][0], value):
            expected = PATTERNS[key][1]
        if expected:
            self.problem(f"`{key}` is `{shown(given.node)}`; expected {expected}", given.place, hint)
        return value

    def refuse_doubles(self, hosts: Sequence[Host]) -> None:
        """Refuse two hosts with one address, and an address by which every machine reaches itself."""
        seen: dict[str, Host] = {}
        for host in hosts:
            address = host.address.lower()
            if (first := seen.setdefault(address, host)) is not host:
                hint = f"the other is at {first.place}; give each machine its own"
                self.problem(f"hosts `{first.name}` and `{host.name}` have one address, `{host.address}`", host.place, hint)
            if len(hosts) > 1 and (address.startswith("127.") or address == "localhost"):
                hint = "give the address that it has in the network between the machines (`ip -br address` there lists them)"
                self.problem(
                    f"host `{host.name}` has the address `{host.address}`, which every machine calls itself", host.place, hint
                )


def _meant(key: str, known: Sequence[str]) -> str | None:
    """Return the hint for an unknown word."""
    word = key if key.isupper() else key.lower().replace("-", "_")
    close = [MEANT[word]] if MEANT.get(word) in known else get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`?" if close else None


def _listed(words: Sequence[str] | Mapping[str, object]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _parent(given: _Given) -> Path:
    name = str(given.node.text or given.node.value)
    for choice in (given.folder / name, given.folder / f"{name}.yaml", INVENTORIES / f"{name}.yaml"):
        if is_file_name(name) and choice.is_file():
            return choice
    hint = "files are relative to the folder of the file that extends"
    raise UserError(f"`extends` is `{shown(given.node)}`, which is not an inventory", place=given.place, hint=hint)


def _fault_of_address(key: str, text: str) -> tuple[str, str | None]:
    """Return what was expected in place of `text`, and a hint; `""` where nothing of that is wrong."""
    user, at, rest = text.rpartition("@")
    if at:
        return ALONE, f"the user goes into `user:`: `{key}: {rest}, user: {user}`"
    name, _, port = text.partition(":")
    if name and port.isdecimal():
        return ALONE, f"the port goes into `port:`: `{key}: {name}, port: {port}`"
    if key == "address" and ":" in text:
        return "an IPv4 address, or a name that has one", OVER_IPV4
    if NUMBERS.fullmatch(text) and (key == "address" or "." in text):
        with contextlib.suppress(ValueError):
            ipaddress.IPv4Address(text)
            return "", None
        return "a name or an IP address", "an IPv4 address is four numbers from 0 to 255, such as `192.168.1.10`"
    return "", None


def plain_path(path: str) -> str:
    """Return a path of a host without `.`, `..` and double slashes, `~/` kept."""
    home = "~/" if path.startswith("~/") else ""
    plain = posixpath.normpath(path[2:].lstrip("/") or ".") if home else posixpath.normpath(path)
    return home + (plain[1:] if plain.startswith("//") else plain)
