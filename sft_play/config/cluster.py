"""`CLUSTER=configs/clusters/home_lan.yaml`: the machines of a cluster, in a YAML file of its own.

    extends: other                  # takes every key of another inventory, beside this file or in configs/clusters/
    network: 1Gbit                  # speed of the network between the machines
    ssh_config: lan_ssh_config      # a configuration for ssh, counted from this file's folder; else ssh's own
    defaults: {user: me}            # keys of a host, for every host that has no value of its own
    hosts:
      desktop: {address: 192.168.1.10, gpus: 1}
      laptop: {address: 192.168.1.11, gpus: 1}

The first host is the master: rank 0 runs there, and the others must reach its `address`. Type the cluster commands on it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play.config.cluster_host import ADDRESS, NAME, NETWORK, Host, Inventory, listed, meant, value_of
from sft_play.config.sources import PRESETS, check_name
from sft_play.config.types import shown
from sft_play.config.yaml_files import Node, read_yaml, resolve_scalar
from sft_play.errors import UserError, raise_all
from sft_play.files import is_file_name, typed_path

if TYPE_CHECKING:
    from sft_play.config.call import Call

__all__ = ["Host", "Inventory", "inventory_for_call", "inventory_path", "read_inventory", "variable"]

INVENTORIES = PRESETS / "clusters"
"""The shipped inventories."""
TOP_KEYS = ("extends", "network", "ssh_config", "defaults", "hosts")
HOST_KEYS = ("address", "ssh", "user", "port", "gpus", "python", "folder", "interface")
DEFAULT_KEYS = tuple(key for key in HOST_KEYS if key not in ("address", "ssh"))
MEANT_ADDRESS = "did you mean `address`?"
MOST_HOSTS = 256
MOST_FILES = 20


def inventory_for_call(call: Call) -> Inventory:
    """Returns the inventory of `CLUSTER=`, with what `CLUSTER_...=` variables change. Raises `UserError`."""
    name = call.options.get("CLUSTER")
    if not name:
        raise UserError(
            f"`{call.command}` needs an inventory of machines",
            hint=f"make {call.command} CLUSTER=configs/clusters/home_lan.yaml; docs/home-cluster.md shows how to write one",
        )
    changes = {option: text for option, text in call.options.items() if option.startswith("CLUSTER_")}
    return read_inventory(inventory_path(name), changes)


def inventory_path(name: str) -> Path:
    """Returns the file that `CLUSTER=` names; the bare name of a shipped inventory is its file. Raises `UserError`."""
    check_name(name, "CLUSTER")
    path, shipped = Path(name), INVENTORIES / f"{name}.yaml"
    if path.is_file():
        return path
    if "/" not in name and shipped.is_file():
        return shipped
    if path.is_dir():
        raise UserError(f"`{name}` is a folder; expected an inventory, a YAML file")
    beside = {str(p): p for p in [*path.parent.glob("*.yaml"), *INVENTORIES.glob("*.yaml")]} if path.parent.is_dir() else {}
    near = get_close_matches(path.stem, {p.stem: p for p in beside.values()}, n=1, cutoff=0.6)
    found = next((text for text, p in beside.items() if near and p.stem == near[0]), None)
    hint = f"did you mean `{found}`?" if found else "CLUSTER= takes an inventory, such as configs/clusters/home_lan.yaml"
    raise UserError(f"there is no file `{name}`", hint=hint)


def read_inventory(path: Path, changes: Mapping[str, str] | None = None) -> Inventory:
    """Returns the inventory of a file and of those that it extends. Raises every problem at once, each with its `file:line`.

    `changes` are variables of the command line: `CLUSTER_NETWORK`, `CLUSTER_SSH_CONFIG`, `CLUSTER_HOSTS` (the names of those to use, in
    this order), `CLUSTER_PYTHON` and other keys of hosts, for all of them, and `CLUSTER_NAME_GPUS`, for one.
    """
    found = _Found()
    _read_file(path, found, ())
    _change(found, changes or {})
    inventory = _inventory(found, path)
    raise_all(found.problems)
    assert inventory is not None
    return inventory


@dataclass(slots=True)
class _Given:
    """A value and where it was written."""

    node: Node
    place: str
    folder: Path
    """From which a path in it counts."""


@dataclass(slots=True)
class _Found:
    """What the files say, the later over the earlier."""

    top: dict[str, _Given] = field(default_factory=dict)
    defaults: dict[str, _Given] = field(default_factory=dict)
    hosts: dict[str, dict[str, _Given]] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    """Where each host is named."""
    without_address: set[str] = field(default_factory=set)
    """Hosts of which something was told that says as well that they have no address."""
    problems: list[UserError] = field(default_factory=list)
    files: int = 0

    def problem(self, text: str, place: str, hint: str | None = None) -> None:
        self.problems.append(UserError(text, place=place, hint=hint))


# ---- Files


def _read_file(path: Path, found: _Found, chain: tuple[Path, ...]) -> None:
    if path.resolve() in (other.resolve() for other in chain):
        raise UserError(f"`extends` goes round in a circle: {' -> '.join(map(str, (*chain, path)))}", place=str(chain[0]))
    found.files += 1
    if found.files > MOST_FILES:
        raise UserError(f"`extends` leads to more than {MOST_FILES} files", place=str(chain[0]))
    root = read_yaml(path)
    place = f"{path}:{root.line or 1}"
    if not isinstance(root.value, dict):
        raise UserError(
            f"`{shown(root)}` is not an inventory", place=place, hint="it begins with `hosts:`, and a line for each machine"
        )
    tree = _known(root, TOP_KEYS, path, found)
    for parent in _parents(tree.get("extends"), path):
        _read_file(parent, found, (*chain, path))
    for key in ("network", "ssh_config"):
        if key in tree:
            found.top[key] = _Given(tree[key], f"{path}:{tree[key].line}", path.parent)
    if "defaults" in tree:
        _keys(tree["defaults"], DEFAULT_KEYS, "`defaults`", path, found, found.defaults)
    if "hosts" in tree:
        _hosts(tree["hosts"], path, found)


def _parents(node: Node | None, path: Path) -> list[Path]:
    if node is None or node.value is None:
        return []
    parents = []
    for entry in node.value if isinstance(node.value, list) else [node]:
        name = entry.value
        if not isinstance(name, str) or not is_file_name(name):
            raise UserError(f"`extends` is `{shown(entry)}`; expected an inventory", place=f"{path}:{node.line}")
        choices = [path.parent / name, path.parent / f"{name}.yaml", INVENTORIES / f"{name}.yaml"]
        parent = next((choice for choice in choices if choice.is_file()), None)
        if parent is None:
            hint = "files count from the folder of the file that extends"
            raise UserError(f"`extends` is `{name}`, which is no inventory", place=f"{path}:{node.line}", hint=hint)
        parents.append(parent)
    return parents


def _hosts(node: Node, path: Path, found: _Found) -> None:
    if isinstance(node.value, list):
        hint = "write `hosts:`, then `  desktop: {address: 192.168.1.10}`, a line for each"
        return found.problem("`hosts` is a list; expected names with their keys", f"{path}:{node.line}", hint)
    if not isinstance(node.value, dict):
        text = "`hosts` is empty" if node.value is None else f"`hosts` is `{shown(node)}`"
        hint = "below it, a line for each machine: `  desktop: {address: 192.168.1.10}`"
        return found.problem(f"{text}; expected names with their keys", f"{path}:{node.line}", hint)
    for name, part in node.value.items():
        place = f"{path}:{part.line}"
        if not NAME.fullmatch(name):
            found.problem(f"`{name}` is not a name for a host; expected letters, digits, `.`, `_` and `-`", place)
        elif part.value is None and name in found.hosts:
            del found.hosts[name]  # a file that extends another leaves this host out
        elif isinstance(part.value, str) and ADDRESS.fullmatch(part.value.rpartition("@")[2]):
            found.hosts.setdefault(name, {})["address"] = _Given(part, place, path.parent)
            found.places[name] = place
        else:
            keys, before = found.hosts.setdefault(name, {}), len(found.problems)
            found.places[name] = place
            _keys(part, HOST_KEYS, f"host `{name}`", path, found, keys)
            if not isinstance(part.value, dict) or any(one.hint == MEANT_ADDRESS for one in found.problems[before:]):
                found.without_address.add(name)
    return None


def _keys(node: Node, known: Sequence[str], what: str, path: Path, found: _Found, into: dict[str, _Given]) -> None:
    if not isinstance(node.value, dict):
        if node.value is None and what != "`defaults`":
            hint = "`address: 192.168.1.10`, the address by which the others reach it"
            return found.problem(f"{what} has no keys", f"{path}:{node.line}", hint)
        if node.value is not None:
            found.problem(f"{what} is `{shown(node)}`; expected {listed(known)}", f"{path}:{node.line}")
        return None
    for key, part in _known(node, known, path, found).items():
        if part.value is None:
            into.pop(key, None)
        else:
            into[key] = _Given(part, f"{path}:{part.line}", path.parent)
    return None


def _known(node: Node, known: Sequence[str], path: Path, found: _Found) -> dict[str, Node]:
    """Returns the entries of a mapping with known keys; the others are problems."""
    for key, part in node.value.items():
        if key not in known:
            found.problem(f"unknown key `{key}`", f"{path}:{part.line}", meant(key, known) or f"known: {listed(known)}")
    return {key: part for key, part in node.value.items() if key in known}


# ---- Command line


def variable(name: str) -> str:
    """Returns a host's name as it stands in a variable: `old-desktop` is `OLD_DESKTOP`."""
    return re.sub(r"[^A-Za-z0-9]", "_", name).upper()


def _change(found: _Found, changes: Mapping[str, str]) -> None:
    """Puts the variables of the command line over the files."""
    by_variable = {variable(name): name for name in found.hosts}
    general = [option for option in changes if option.removeprefix("CLUSTER_").lower() in DEFAULT_KEYS]
    for option in [
        *general,
        *(option for option in changes if option not in general),
    ]:  # one host's own value goes over that of all
        text = changes[option]
        word, origin = option.removeprefix("CLUSTER_"), f"{option}={text}"
        given = _Given(Node(resolve_scalar(text), text=text), origin, Path.cwd())
        key = word.lower()
        owner = next((v for v in by_variable if word.startswith(v + "_") and word[len(v) + 1 :].lower() in HOST_KEYS), None)
        if word == "HOSTS":
            _choose(found, text, origin)
        elif key in ("network", "ssh_config"):
            found.top[key] = given
        elif key in DEFAULT_KEYS:
            for keys in found.hosts.values():
                keys[key] = given
        elif owner:
            found.hosts.get(by_variable[owner], {})[word[len(owner) + 1 :].lower()] = given
        else:
            names = ["HOSTS", "NETWORK", "SSH_CONFIG", *(k.upper() for k in DEFAULT_KEYS)]
            names += [f"{host}_{k.upper()}" for host in by_variable for k in HOST_KEYS]
            close = get_close_matches(word, names, n=1, cutoff=0.6)
            hint = f"did you mean `CLUSTER_{close[0]}`?" if close else f"the hosts are {listed(list(found.hosts))}"
            found.problem(f"unknown variable `{option}`", origin, hint)


def _choose(found: _Found, text: str, origin: str) -> None:
    """Keeps the named hosts, in the order given."""
    if not found.hosts:  # which is told where they should stand
        return
    given = text.replace(",", " ").split()
    names = list(dict.fromkeys(given))
    if not names:
        found.problem("`CLUSTER_HOSTS` names no host", origin, f"the inventory has {listed(list(found.hosts))}")
    for name in names:
        if given.count(name) > 1:
            found.problem(
                f"`{name}` stands there {given.count(name)} times", origin, "name each host once; the first is the master"
            )
        if name not in found.hosts:
            hosts = list(found.hosts)
            found.problem(f"`{name}` is not a host", origin, meant(name, hosts) or f"the inventory has {listed(hosts)}")
    found.hosts = {name: found.hosts[name] for name in names if name in found.hosts}


# ---- Values


def _inventory(found: _Found, path: Path) -> Inventory | None:
    """Returns what was found, or `None` after a problem."""
    if not found.hosts and not found.problems:
        found.problem(
            "the inventory has no hosts", str(path), "hosts: {desktop: {address: 192.168.1.10}, laptop: {address: 192.168.1.11}}"
        )
    if len(found.hosts) > MOST_HOSTS:
        found.problem(f"the inventory has {len(found.hosts)} hosts; {MOST_HOSTS} at most", str(path))
    hosts = [_host(name, {**found.defaults, **keys}, found) for name, keys in found.hosts.items()]
    _refuse_doubles([host for host in hosts if host], found)
    network, config = found.top.get("network"), found.top.get("ssh_config")
    speed = None
    if network and network.node.value is not None:
        match = NETWORK.fullmatch(str(network.node.text or network.node.value).strip())
        speed = match[0] if match and float(match[1]) > 0 else None
        if speed is None:
            found.problem(f"`network` is `{shown(network.node)}`; expected a speed such as `1Gbit`", network.place)
    ssh_config = None
    if config and config.node.value is not None:
        text = str(config.node.text or config.node.value)
        if isinstance(config.node.value, (dict, list)) or not is_file_name(text):
            found.problem(f"`ssh_config` is `{shown(config.node)}`; expected a file", config.place)
        else:
            ssh_config = config.folder / typed_path(text)
            if not ssh_config.is_file():
                hint = "paths count from the inventory's folder"
                found.problem(f"`ssh_config` is `{ssh_config}`, which is no file", config.place, hint)
    if found.problems:
        return None
    return Inventory(hosts=tuple(host for host in hosts if host), network=speed, ssh_config=ssh_config, path=path)


def _host(name: str, keys: Mapping[str, _Given], found: _Found) -> Host | None:
    before = len(found.problems)
    place = found.places.get(name, "")
    if "address" not in keys and name in found.without_address:
        return None
    if "address" not in keys:
        hint = f"`{name}: {{address: 192.168.1.10}}`, the address by which the others reach it"
        found.problem(f"host `{name}` has no `address`", place, hint)
    values: dict[str, Any] = {}
    for key, given in keys.items():
        value = value_of(key, given.node, given.place, found.problems)
        if value is not None:
            values[key] = value
    return Host(name=name, place=place, **values) if len(found.problems) == before else None


def _refuse_doubles(hosts: Sequence[Host], found: _Found) -> None:
    """Two hosts with one address would be one machine that is asked to be two; a loopback address reaches nobody else."""
    seen: dict[str, Host] = {}
    for host in hosts:
        first = seen.setdefault(host.address.lower(), host)
        if first is not host:
            text = f"hosts `{first.name}` and `{host.name}` have one address, `{host.address}`"
            found.problem(text, host.place, f"the other stands at {first.place}; give each machine its own")
        if len(hosts) > 1 and (host.address.startswith("127.") or host.address.lower() in ("localhost", "::1")):
            hint = "give the address that it has in the network between the machines (`ip -br address` there lists them)"
            found.problem(
                f"host `{host.name}` has the address `{host.address}`, which every machine calls itself", host.place, hint
            )
