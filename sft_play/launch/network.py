"""Ports and interfaces of this machine. Opens sockets, sends nothing."""

from __future__ import annotations

import contextlib
import socket

from sft_play.errors import HardwareError, UserError


def free_port() -> int:
    """Returns a TCP port on 127.0.0.1 that nothing listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int, address: str = "") -> bool:
    """Whether a listener could be opened on `port`; the default address is every interface."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def require_free_port(port: int, *, hint: str) -> None:
    """Raises `HardwareError` when another process has the port."""
    if not port_is_free(port):
        raise HardwareError(f"port {port} is taken by another process on this machine{holder_of(port)}", hint=hint)


def address_towards(host: str, port: int) -> str:
    """Returns this machine's own address on the route to `host`. Raises `UserError` when the name cannot be resolved."""
    try:
        target = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_DGRAM)[0][4]
    except socket.gaierror as error:
        raise UserError(
            f"`MASTER_ADDR` is `{host}`, which cannot be resolved: {error.strerror}", hint="give its IP address"
        ) from error
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(target)  # a datagram socket only looks up the route; no packet leaves
        except OSError as error:
            raise HardwareError(f"there is no route to `MASTER_ADDR` `{host}`: {error.strerror}") from error
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Returns the name of the interface that carries `address` (`eth0`, `lo`), or `None`."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET and entry.address == address for entry in entries):
            return name
    return None


def loopback_interface() -> str:
    """Returns the loopback interface's name (`lo` on Linux, `lo0` on macOS)."""
    return interface_of("127.0.0.1") or "lo"


def holder_of(port: int) -> str:
    """Returns `: NAME (process N) has it` for what listens on `port` here; empty where that cannot be seen."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port:
                if one.pid is None:
                    return ": a process of another user has it"
                return f": `{' '.join(psutil.Process(one.pid).cmdline())[:100]}` (process {one.pid}) has it"
    return ""


def is_of_this_machine(host: str) -> bool:
    """Whether a name or address is this machine's own; `False` too where it cannot be resolved."""
    import psutil

    try:
        found = {str(one[4][0]) for one in socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)}
    except socket.gaierror:
        return False
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries if entry.family == socket.AF_INET}
    return any(address in own or address.startswith("127.") for address in found)
