"""Commands on the machines of a cluster. A host whose address is one of this machine's own needs no SSH.

Words reach the other side letter for letter (they are quoted for the shell that sshd starts), host keys are checked, and nothing ever
asks for a password: a terminal that waits on one of eight machines looks like a run that hangs.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import ipaddress
import shlex
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sft_play.config.cluster import Host, Inventory
from sft_play.errors import HardwareError

Result = TypeVar("Result")
CONNECT_SECONDS = 5
OPTIONS = (
    "BatchMode=yes", "StrictHostKeyChecking=yes", f"ConnectTimeout={CONNECT_SECONDS}", "ServerAliveInterval=5", "ServerAliveCountMax=12",
    "LogLevel=ERROR", "ControlMaster=auto", "ControlPersist=60", "ClearAllForwardings=yes", "ForwardAgent=no", "ForwardX11=no",
)  # fmt: skip
"""One connection per host is shared by all commands of this process. Forwarded ports of the user's own configuration would be refused the
second time; a host that trains needs neither the user's keys nor their screen."""
NO_FOLDER = 96
"""Exit code of `in_folder` where the folder is not there."""
NOT_A_FOLDER = 95
"""Exit code of `in_folder` where something else has the folder's name."""
CLOSED_FOLDER = 94
"""Exit code of `in_folder` where the user may not enter it."""
NOT_A_PROGRAM = 126
NO_PROGRAM = 127
"""A shell's exit code for a program that is not there."""
NO_HOME = "Could not chdir to home directory"
"""How sshd begins a remark on stderr, whatever then becomes of the command."""
WITHOUT = (NO_FOLDER, NOT_A_FOLDER, CLOSED_FOLDER, NO_PROGRAM, NOT_A_PROGRAM)
"""With these a host answers, and has no environment where the inventory says."""
SSH_FAILED = 255
TIMED_OUT = 124
IN_FOLDER = (
    'h() { case "$1" in "~/"*) printf "%s" "$HOME/${1#"~/"}";; *) printf "%s" "$1";; esac; }; '
    f'f=$(h "$1"); cd "$f" 2>/dev/null || {{ [ ! -d "$f" ] || {{ echo "$f may not be entered" >&2; exit {CLOSED_FOLDER}; }}; '
    f'[ ! -e "$f" ] || {{ echo "$f is a file" >&2; exit {NOT_A_FOLDER}; }}; echo "there is no folder $f" >&2; exit {NO_FOLDER}; }}; '
    'p=$(h "$2"); shift 2; '
)
"""`~/` is the user's home over there; no path is ever part of a script's text."""


@dataclass(frozen=True, slots=True)
class Done:
    """How a command on a host ended."""

    code: int
    """Its exit code; 255 where SSH itself failed, 124 after the time limit, -N for signal N of a local one."""
    stdout: str
    stderr: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """Why SSH did not reach a host."""

    id: str
    text: str
    remedy: str


def arguments(host: Host, inventory: Inventory, argv: Sequence[str], *, tty: bool = False) -> list[str]:
    """Returns the local command line that runs `argv` on `host`, in its home folder by SSH, or as it is on this machine.

    With `tty` the remote side gets a terminal: what it runs ends with the connection.
    """
    if is_here(host):
        return list(argv)
    words = ["ssh", "-tt" if tty else "-T"]
    if inventory.ssh_config is not None:
        words += ["-F", str(inventory.ssh_config)]
    for option in (*OPTIONS, f"ControlPath={control_path()}"):
        words += ["-o", option]
    words += ["-p", str(host.port)] if host.port is not None else []
    words += ["-l", host.user] if host.user is not None else []
    return [*words, "--", host.ssh or host.address, shlex.join(argv)]


def in_folder(host: Host, argv: Sequence[str]) -> list[str]:
    """Returns the words that run `argv` in the host's project folder.

    For `arguments` and `run_on`. `argv[0]` may be `~/...`, and counts from the folder when it is a relative path. Exits with 96 where
    the folder is not there, with 95 where it is a file, with 94 where the user may not enter it, with 127 where the program is not there.
    """
    return ["sh", "-c", f'{IN_FOLDER}exec "$p" "$@"', "sh", host.folder, *argv]


def run_on(host: Host, inventory: Inventory, argv: Sequence[str], *, input: str | None = None, timeout: float) -> Done:
    """Runs `argv` on `host` to its end, at most `timeout` seconds; `input` is its standard input. Raises `HardwareError` without `ssh` here."""
    own = is_here(host)
    text = None if input is None else input.encode(errors="surrogateescape")
    try:
        code, out, said = run(arguments(host, inventory, argv), text, timeout, cwd=Path.home() if own else None)
    except FileNotFoundError:
        if not own:
            raise no_client() from None
        return Done(NO_PROGRAM, "", f"there is no program `{argv[0]}`")
    except PermissionError as error:
        return Done(NOT_A_PROGRAM, "", str(error))
    return Done(code, out.decode(errors="replace"), said)


def run(argv: Sequence[str], text: bytes | None, timeout: float, **options: Any) -> tuple[int, bytes, str]:
    """Runs a program here to its end; returns its exit code (124 after `timeout` seconds), its output and its messages. Raises `OSError`."""
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL if text is None else subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )  # fmt: skip
    with process, waited_for(process):
        try:
            out, said = process.communicate(text, timeout=timeout)
        except subprocess.TimeoutExpired as error:
            process.kill()
            return (
                TIMED_OUT,
                error.stdout or b"",
                f"{(error.stderr or b'').decode(errors='replace')}no answer within {timeout:g} s",
            )
        except BaseException:
            process.kill()
            raise
    return process.returncode, out, said.decode(errors="replace")


_running: set[subprocess.Popen[Any]] = set()
_stopped = threading.Event()


@contextlib.contextmanager
def waited_for(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Keeps a program among those that `on_all` ends, while a thread waits for it."""
    _running.add(process)
    try:
        if _stopped.is_set():
            process.kill()
        yield
    finally:
        _running.discard(process)


@functools.cache
def control_path() -> str:
    """Returns where this process keeps its shared connections: a private folder with a short path, as sockets need, gone at exit."""
    folder = Path(tempfile.mkdtemp(prefix="sft-", dir="/tmp"))  # TMPDIR may be too long

    def close() -> None:
        for path in folder.glob("*"):
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(["ssh", "-O", "exit", "-S", str(path), "x"], capture_output=True, timeout=5, check=False)
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(close)
    return f"{folder}/%C"


def no_client() -> HardwareError:
    """Returns the error for a machine without the `ssh` program."""
    return HardwareError("there is no `ssh` on this machine", hint="apt install openssh-client")


def on_all(inventory: Inventory, call: Callable[[Host], Result]) -> dict[str, Result]:
    """Returns host name -> what `call` returned for it; all hosts at once.

    An exception, a signal's included, is raised when all have ended: at once, since the programs that they wait for are ended then.
    """
    try:
        with ThreadPoolExecutor(max_workers=max(1, len(inventory.hosts))) as pool:
            try:
                started = {host.name: pool.submit(call, host) for host in inventory.hosts}
                return {name: future.result() for name, future in started.items()}
            except BaseException:
                _stopped.set()
                for process in list(_running):
                    process.kill()
                raise
    finally:
        _stopped.clear()


def is_here(host: Host) -> bool:
    """Whether `host` is this machine: its address is one of the addresses that interfaces here have."""
    return _is_own(host.address)


@functools.cache
def _is_own(address: str) -> bool:
    own = _own_addresses()
    try:
        found = {ipaddress.ip_address(address.partition("%")[0])}
    except ValueError:
        try:
            entries = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return False
        found = {ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in entries}
    return any(one.is_loopback or one in own for one in found)


@functools.cache
def _own_addresses() -> frozenset[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    import psutil

    inet = (socket.AF_INET, socket.AF_INET6)
    entries = [entry for given in psutil.net_if_addrs().values() for entry in given if entry.family in inet]
    return frozenset(ipaddress.ip_address(entry.address.partition("%")[0]) for entry in entries)


def trouble(host: Host, inventory: Inventory, message: str) -> Trouble:
    """Returns what an SSH that ended with 255 (or was silent) says about `host`, and what to do; `message` is its stderr."""
    target = host.ssh or host.address
    user = f"{host.user}@" if host.user else ""
    with_config = f" -F {inventory.ssh_config}" if inventory.ssh_config else ""
    port = f" -p {host.port}" if host.port else ""
    last = next((line.strip() for line in reversed(message.splitlines()) if line.strip()), "no answer")
    low = message.lower()
    if "remote host identification has changed" in low or ("host key for" in low and "has changed" in low):
        text = f"the host key of `{target}` is not the one that is known: another machine answers there, or it was installed anew"
        known_as = f"'[{target}]:{host.port}'" if host.port not in (None, 22) else target
        return Trouble(
            id="host-key-changed", text=text, remedy=f"when you know why: `ssh-keygen -R {known_as}`, then as for a new host"
        )
    if "host key verification failed" in low or "host key is known" in low:
        remedy = f"log in once and compare the fingerprint: `ssh{with_config}{port} {user}{target}`"
        return Trouble(id="unknown-host-key", text=f"the host key of `{target}` is not known here", remedy=remedy)
    if "permission denied" in low or "too many authentication failures" in low:
        remedy = f"`ssh-copy-id{with_config}{port} {user}{target}` (after `ssh-keygen` where there is no key; `ssh-add` where it has a passphrase)"
        return Trouble(id="refused-key", text=f"`{target}` refuses this machine's key: {last}", remedy=remedy)
    if "could not resolve" in low or "name or service not known" in low:
        return Trouble(
            id="unknown-name",
            text=f"`{target}` is not a name that can be resolved here",
            remedy="give its IP address, or add it to /etc/hosts",
        )
    if "connection refused" in low:
        remedy = "on it: `sudo apt install openssh-server`, `sudo systemctl enable --now ssh`; then check `port` in the inventory"
        return Trouble(id="no-sshd", text=f"`{target}` is there, but no sshd listens: {last}", remedy=remedy)
    if "no route" in low or "timed out" in low or "no answer" in low or "unreachable" in low:
        remedy = f"is it on, plugged in, and not asleep? `ping {host.address}`; does its firewall let port {host.port or 22} in?"
        return Trouble(id="unreachable", text=f"`{target}` cannot be reached: {last}", remedy=remedy)
    return Trouble(
        id="ssh", text=f"ssh to `{target}` failed: {last}", remedy=f"try `ssh{with_config}{port} {user}{target} true` by hand"
    )


def without_environment(host: Host, code: int, install: str) -> Trouble:
    """Returns what an exit code of `WITHOUT` says about `host`; `install` is the remedy where there is nothing yet."""
    if code == NOT_A_FOLDER:
        remedy = "give another `folder` in the inventory, or move that file away there"
        return Trouble(id="no-environment", text=f"`folder` is `{host.folder}`, which is a file there", remedy=remedy)
    if code == CLOSED_FOLDER:
        remedy = f"`ls -ld {host.folder}` there says who may; give another `folder` or `user` in the inventory"
        return Trouble(id="no-environment", text=f"its user may not enter the folder `{host.folder}`", remedy=remedy)
    what = f"no folder `{host.folder}`" if code == NO_FOLDER else f"no Python `{host.python}` in `{host.folder}`"
    return Trouble(id="no-environment", text=what, remedy=install)


def login(host: Host, inventory: Inventory) -> str:
    """Returns the command by which a person logs in on `host`."""
    words = (
        ["ssh"]
        + (["-F", str(inventory.ssh_config)] if inventory.ssh_config else [])
        + (["-p", str(host.port)] if host.port else [])
    )
    return shlex.join([*words, f"{f'{host.user}@' if host.user else ''}{host.ssh or host.address}"])


def last_word(err: str, out: str = "") -> str:
    """Returns the last line of what a host has printed on stderr, else on stdout; sshd's own remark, that there is no home, comes after both."""
    lines = [line.strip() for text in (out, err) for line in text.splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith(NO_HOME)]
    return (said or lines or [""])[-1]
