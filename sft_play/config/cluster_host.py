"""A machine of a cluster and the list of them, as `config.cluster` reads it, and what their values may be."""

from __future__ import annotations

import ipaddress
import math
import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sft_play.config.types import shown
from sft_play.config.yaml_files import Node
from sft_play.errors import UserError

MEANT = {
    "ip": "address", "host": "address", "hostname": "address", "host_name": "address", "addr": "address", "username": "user", "login": "user",
    "ssh_user": "user", "ssh_port": "port", "num_gpus": "gpus", "gpu": "gpus", "slots": "gpus", "gpus_per_node": "gpus", "venv": "python",
    "env": "python", "environment": "python", "interpreter": "python", "path": "folder", "dir": "folder", "directory": "folder", "workdir": "folder",
    "iface": "interface", "ifname": "interface", "device": "interface", "nodes": "hosts", "machines": "hosts", "workers": "hosts",
    "speed": "network", "bandwidth": "network", "config": "ssh_config", "vars": "defaults", "default": "defaults", "all": "defaults",
}  # fmt: skip
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
ADDRESS = re.compile(r"[A-Za-z0-9:][A-Za-z0-9.:_%-]{0,252}")
WITH_PORT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*):([0-9]{1,5})")
NUMBERS = re.compile(r"[0-9.]+")
"""What is read as an IPv4 address, or the short form of one, and never as a name."""
BROADCAST = ipaddress.IPv4Address("255.255.255.255")
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}")
INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,14}")
NETWORK = re.compile(r"(\d+(?:\.\d+)?)\s*(G|M)bit(?:/s)?", re.IGNORECASE)
MOST_GPUS = 64
FOLDER = "~/sft-play"
PYTHON = ".venv/bin/python"


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One machine."""

    name: str
    """As the user calls it; in messages, and in `CLUSTER_HOSTS=`."""
    address: str
    """Name or IPv4 address by which the other machines reach it."""
    ssh: str | None = None
    """Where `ssh` goes when that is not `address`: a `Host` of the ssh configuration, such as one with a jump host or a tunnel."""
    user: str | None = None
    """For ssh; `None`: as ssh's configuration says."""
    port: int | None = None
    """Of its sshd; `None`: as ssh's configuration says, else 22."""
    gpus: int | None = None
    """GPUs to use, 0 for the CPU; `None`: all that are found."""
    python: str = PYTHON
    """Interpreter of the environment: absolute, `~/...`, or counted from `folder`."""
    folder: str = FOLDER
    """The project there: absolute or `~/...`."""
    interface: str | None = None
    """Network interface towards the others; `None`: that of the route to the master."""
    place: str = ""
    """Where the inventory names it, `file:line`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """The machines of a cluster, the master first."""

    hosts: tuple[Host, ...]
    network: str | None
    """Speed of the network, such as `1Gbit`."""
    ssh_config: Path | None
    """For `ssh -F`; `None`: ssh's own files."""
    path: Path

    @property
    def master(self) -> Host:
        """The host of rank 0."""
        return self.hosts[0]

    def host(self, name: str) -> Host:
        """Returns the host called `name`. Raises `UserError` for an unknown one."""
        for host in self.hosts:
            if host.name == name:
                return host
        names = [host.name for host in self.hosts]
        raise UserError(f"`{name}` is not a host of `{self.path}`", hint=meant(name, names) or f"it has {listed(names)}")


def meant(key: str, known: Sequence[str]) -> str | None:
    """Returns the hint for a word that nobody knows."""
    word = key.lower().replace("-", "_")
    close = [MEANT[word]] if MEANT.get(word) in known else get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`?" if close else None


def listed(words: Sequence[str]) -> str:
    """Returns words in backticks."""
    return ", ".join(f"`{word}`" for word in words)


def value_of(key: str, node: Node, place: str, problems: list[UserError]) -> Any:
    """Returns a host's value, `None` with a problem added where it is wrong."""
    text = str(node.text if node.text is not None else node.value)
    if key in ("port", "gpus"):
        low, high = (1, 65_535) if key == "port" else (0, MOST_GPUS)
        if isinstance(node.value, int) and not isinstance(node.value, bool) and low <= node.value <= high:
            return node.value
        expected = f"an integer from {low} to {high}"
        problems.append(UserError(f"`{key}` is `{shown(node)}`; expected {expected}", place=place))
        return None
    right, expected, hint = True, "", None
    if isinstance(node.value, (dict, list)) or (isinstance(node.value, float) and not math.isfinite(node.value)):
        right, expected = False, "text"
    elif key in ("address", "ssh"):
        expected, hint = _no_address(key, text)
        right = not expected
    elif key in ("user", "interface"):
        right = bool((USER if key == "user" else INTERFACE).fullmatch(text))
        expected = "a user's name" if key == "user" else "a network interface, such as `eth0`"
    elif key == "folder":
        text, expected = _plain(text), "an absolute path below `/`, or `~/...` for a folder in the user's home there"
        right = text.startswith(("/", "~/")) and text.isprintable() and text not in ("/", "~/.") and not text.startswith("~/..")
    elif key == "python":
        right, expected = bool(text.strip()) and text.isprintable() and not text.startswith("-"), "a Python interpreter"
    if not right:
        problems.append(UserError(f"`{key}` is `{shown(node)}`; expected {expected}", place=place, hint=hint))
    return text if right else None


def _no_address(key: str, text: str) -> tuple[str, str | None]:
    """Returns what was expected in the place of `text`, and a hint; `""` where it is an address or a name."""
    user, at, rest = text.rpartition("@")
    if at and USER.fullmatch(user) and ADDRESS.fullmatch(rest):
        return "a name or an IP address alone", f"the user goes into `user:`: `{key}: {rest}, user: {user}`"
    if match := WITH_PORT.fullmatch(text):
        return "a name or an IP address alone", f"the port goes into `port:`: `{key}: {match[1]}, port: {match[2]}`"
    if not ADDRESS.fullmatch(text):
        return "a name or an IP address", None
    if key == "address" and ":" in text:
        hint = "ranks meet over IPv4 only: `ip -4 -br address` there lists its IPv4 addresses; `ssh` may be an IPv6 address"
        return "an IPv4 address, or a name that has one", hint
    if NUMBERS.fullmatch(text) and (key == "address" or "." in text):
        try:
            known = ipaddress.IPv4Address(text)
        except ValueError:
            return "a name or an IP address", "an IPv4 address is four numbers from 0 to 255, such as `192.168.1.10`"
        if known.is_unspecified or known.is_multicast or known == BROADCAST:
            return "the address of one machine", "`ip -4 -br address` there lists its addresses"
    return "", None


def _plain(path: str) -> str:
    """Returns a path without `.`, `..` and double slashes, `~/` kept: files are sent to where it leads."""
    home = "~/" if path.startswith("~/") else ""
    plain = posixpath.normpath(path[2:].lstrip("/") or ".") if home else posixpath.normpath(path)
    return home + (plain.replace("//", "/") if plain.startswith("//") else plain)
