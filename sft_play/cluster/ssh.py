"""Run commands on the machines of a cluster with the `ssh` program, and directly on this machine.

All commands of this process share one connection per host. Words arrive verbatim (they are quoted for the shell that
sshd starts), host keys are checked, and nothing asks for a password: a prompt on one of eight machines would look like
a hang.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sft_play.cluster.inventory import Host, Inventory
from sft_play.errors import HardwareError, UserError, mask
from sft_play.launch.environment import is_of_this_machine
from sft_play.text import Finding, tell

Result = TypeVar("Result")
SECONDS = 30.0
"""Time limit for a machine's answer."""
OPTIONS = (
    "BatchMode=yes",
    "StrictHostKeyChecking=yes",
    "ConnectTimeout=5",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=12",
    "LogLevel=ERROR",
    "ControlMaster=auto",
    "ControlPersist=60",
    "ClearAllForwardings=yes",
    "ForwardAgent=no",
    "ForwardX11=no",
)
"""Port forwardings of the user's own configuration would fail on the second connection; a training host needs neither
the user's keys nor their display.
"""
NO_FOLDER = 96
"""Exit code of `IN_FOLDER` if the folder is missing, is a file, or may not be entered."""
NOT_A_PROGRAM, NO_PROGRAM = 126, 127
"""A shell's exit codes for a program that cannot be started, and for one that is missing."""
SSH_FAILED, TIMED_OUT = 255, 124
NO_HOME = "Could not chdir to home directory"
"""Beginning of sshd's warning on stderr, which says nothing about the command."""
HOME = 'h() { case "$1" in "~/"*) printf "%s" "$HOME/${1#"~/"}";; *) printf "%s" "$1";; esac; }; '
"""Shell function that expands `~/` on the remote side; paths are arguments, never part of a script's text."""
IN_FOLDER = HOME + f'f=$(h "$1"); cd "$f" || exit {NO_FOLDER}; p=$(h "$2"); shift 2; exec "$p" "$@"'


def arguments(host: Host, argv: Sequence[str], *, tty: bool = False) -> list[str]:
    """Return the local command line that runs `argv` in the home folder of `host`; on this machine `argv` itself.

    With `tty` the remote side gets a terminal, so that its processes end with the connection.
    """
    if is_here(host):
        return list(argv)
    options = [word for option in (*OPTIONS, f"ControlPath={control_path()}") for word in ("-o", option)]
    user = ["-l", host.user] if host.user else []
    name = host.ssh or host.address
    return ["ssh", "-tt" if tty else "-T", *_client(host), *options, *user, "--", name, shlex.join(argv)]


def login(host: Host, program: str = "ssh") -> str:
    """Return the command with which a person logs in on `host`."""
    target = f"{f'{host.user}@' if host.user else ''}{host.ssh or host.address}"
    return shlex.join([program, *_client(host), target])


def _client(host: Host) -> list[str]:
    config = ["-F", str(host.ssh_config)] if host.ssh_config else []
    return [*config, *(["-p", str(host.port)] if host.port else [])]


def program(host: Host, words: Sequence[str], variables: Mapping[str, str] | None = None) -> list[str]:
    """Return the command that runs `sft_play WORDS` in the host's project; `CAUSES` explains its exit codes."""
    settings = [f"{name}={value}" for name, value in (variables or {}).items()]
    if is_here(host):
        return ["env", *settings, sys.executable, "-m", "sft_play", *words]
    words = [host.python, "-m", "sft_play", *words]
    return ["env", *settings, "sh", "-c", IN_FOLDER, "sh", host.folder, *words]


# ---- Running


_running: weakref.WeakSet[subprocess.Popen[bytes]] = weakref.WeakSet()
_stopped = threading.Event()


def start(argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a program that `on_all` kills if the command is stopped. Raise `HardwareError` if it is not installed."""
    try:
        process = subprocess.Popen(argv, **options)
    except FileNotFoundError as error:
        package = "openssh-client" if argv[0] == "ssh" else argv[0]
        raise HardwareError(f"there is no `{argv[0]}` on this machine", hint=f"apt install {package}") from error
    _running.add(process)
    if _stopped.is_set():
        process.kill()
    return process


def run(argv: Sequence[str], text: bytes | None = None, timeout: float = SECONDS) -> tuple[int, bytes, str]:
    """Run a program to its end; return its exit code (124 after `timeout` seconds), stdout and stderr. Raises as
    `start`.
    """
    stdin = subprocess.DEVNULL if text is None else subprocess.PIPE
    with start(argv, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            out, err = process.communicate(text, timeout)
            return process.returncode, out, err.decode(errors="replace")
        except subprocess.TimeoutExpired as error:
            return TIMED_OUT, error.stdout or b"", f"no answer within {timeout:g} s"
        finally:
            process.kill()


def ask(host: Host, words: Sequence[str], what: str, *, text: bytes | None = None, timeout: float = SECONDS) -> str:
    """Run a command on `host` and return its output. Raise `HardwareError`, which says `what` failed.

    The time limit applies on `host` too, since nothing could end the command there after a lost connection.
    """
    code, out, err = run(arguments(host, ["timeout", f"{timeout + 30:.0f}", *words]), text, timeout)
    require_done(host, code, err, what)
    return out.decode(errors="replace")


def require_done(host: Host, code: int, err: str, what: str) -> None:
    """Raise `HardwareError` for a nonzero exit code."""
    if code in (SSH_FAILED, TIMED_OUT):
        why = trouble(host, code, err)
        raise failed(host, why.text, why.remedy)
    if code:
        hint = "make room on its disk, and type the same command again" if "No space left" in err else None
        hint = "on it: sudo apt install rsync" if "rsync" in what and "not found" in err else hint
        raise failed(host, f"{what}: {last_word(err) or f'exit code {code}'}", hint)


def failed(host: Host, text: str, hint: str | None) -> HardwareError:
    """Return an error about one host."""
    return HardwareError(f"host `{host.name}`: {text}", place=host.place, hint=hint)


def on_all(hosts: Sequence[Host], call: Callable[[Host], Result]) -> dict[str, Result | UserError]:
    """Call `call` for all hosts in parallel; return host name -> its result, or the `UserError` that it raised.

    Any other exception, such as one raised by a signal, kills the programs that the calls wait for and is raised when
    all calls have ended.
    """

    def attempt(host: Host) -> Result | UserError:
        try:
            return call(host)
        except UserError as error:
            return error

    try:
        with ThreadPoolExecutor(max_workers=max(1, len(hosts))) as pool:
            try:
                futures = {host.name: pool.submit(attempt, host) for host in hosts}
                return {name: future.result() for name, future in futures.items()}
            except BaseException:
                _stopped.set()
                for process in list(_running):
                    process.kill()
                raise
    finally:
        _stopped.clear()


def relay(host: Host, process: subprocess.Popen[bytes]) -> str:
    """Print a program's output with the host's name before each line until it ends; return its first error line, else
    its last line.
    """
    last = ""
    assert process.stdout is not None
    for raw in iter(process.stdout.readline, b""):
        line = CONTROL.sub("", raw.decode("utf-8", "replace")).rstrip()
        if line:
            last = last if last.lower().startswith("error: ") else line
            tell(f"{host.name} | {line}")
    return re.sub("^error: ", "", last, flags=re.IGNORECASE)


CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r(?=.)|[\x00-\x08\x0b-\x1f\x7f]")
"""Control sequences that programs write to a terminal."""


# ---- The connection


@functools.cache
def control_path() -> str:
    """Return the path of this process's shared connections, in a private folder that is removed at exit; sockets need a
    short path.
    """
    folder = Path(tempfile.mkdtemp(prefix="sft-", dir="/tmp"))  # the path of TMPDIR may be too long

    def close() -> None:
        for path in folder.glob("*"):
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(["ssh", "-O", "exit", "-S", str(path), "x"], capture_output=True, timeout=5, check=False)
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(close)
    return f"{folder}/%C"


@functools.cache
def is_here(host: Host) -> bool:
    """Return whether `host` is this machine, by the addresses of its interfaces."""
    with contextlib.suppress(UserError, UnicodeError):
        return is_of_this_machine(host.address)
    return False


def require_master_here(inventory: Inventory) -> None:
    """Raise `UserError` unless the first host is this machine, which runs rank 0 and has the run's folder and
    checkpoints.
    """
    if not is_here(master := inventory.master):
        text = f"the first host, `{master.name}` ({master.address}), is the master, and this machine does not have that"
        hint = "type the command on the first host, or put this machine first (`CLUSTER_HOSTS` orders them)"
        raise UserError(f"{text} address", place=master.place, hint=hint)


# ---- Failures


class Cause(NamedTuple):
    """A kind of failure, with its remedy."""

    id: str
    codes: Sequence[int]
    words: Sequence[str]
    """Lower-case texts, one of which must be in the output."""
    text: str
    remedy: str


INSTALL = "make it: make cluster-install CLUSTER={cluster}"
OF_SSH = (SSH_FAILED, TIMED_OUT)
CAUSES = (
    Cause(
        "unknown-host-key",
        OF_SSH,
        ("host key verification failed", "host key is known", "has changed"),
        "`{target}` has a host key that is not known here",
        "log in once and compare the fingerprint: `{login}`",
    ),
    Cause(
        "refused-key",
        OF_SSH,
        ("permission denied", "too many authentication failures"),
        "`{target}` refuses this machine's key: {last}",
        "`{copy_id}` (after `ssh-keygen` where there is no key; `ssh-add` where it has a passphrase)",
    ),
    Cause(
        "unknown-name",
        OF_SSH,
        ("could not resolve", "name or service not known"),
        "`{target}` is not a name that can be resolved here",
        "give its IP address, or add it to /etc/hosts",
    ),
    Cause(
        "no-sshd",
        OF_SSH,
        ("connection refused",),
        "`{target}` is there, but no sshd listens: {last}",
        "on it: `sudo apt install openssh-server`, `sudo systemctl enable --now ssh`; then check `port` in the"
        " inventory",
    ),
    Cause(
        "unreachable",
        OF_SSH,
        ("no route", "timed out", "no answer", "unreachable"),
        "`{target}` cannot be reached: {last}",
        "is it on, plugged in, and not asleep? `ping {address}`; does its firewall let port {port} in? Does a disk"
        " hang?",
    ),
    Cause("ssh", OF_SSH, ("",), "ssh to `{target}` failed: {last}", "try `{login} true` manually"),
    Cause(
        "no-environment",
        (NO_FOLDER,),
        ("",),
        "no environment: no folder `{folder}` that its user can enter",
        f"{INSTALL}; where a file has that name, give another `folder` or `user` in the inventory",
    ),
    Cause(
        "no-environment",
        (NO_PROGRAM, NOT_A_PROGRAM),
        ("",),
        "no environment: no Python `{python}` in `{folder}`",
        INSTALL,
    ),
    Cause(
        "broken-python",
        range(-99, 256),
        ("",),
        "`{python}` ended with code {code}: {last}",
        "start it manually: `{login}`, then in `{folder}`; `make cluster-install CLUSTER={cluster}` reinstalls it",
    ),
)
"""Causes of failures; the first match counts."""


def trouble(host: Host, code: int, err: str, out: str = "") -> Finding:
    """Return why a command on `host` failed, by the exit code of ssh or of the command, and by their output."""
    target, last = host.ssh or host.address, last_word(err, out) or "no answer"
    words = f"{err}\n{out}".lower() if err or out else last
    cause = next(row for row in CAUSES if code in row.codes and any(part in words for part in row.words))
    values = {
        **{key: getattr(host, key) for key in ("address", "folder", "python", "cluster")},
        "target": target,
        "last": last,
        "code": code,
        "port": host.port or 22,
        "login": login(host),
        "copy_id": login(host, "ssh-copy-id"),
    }
    return Finding(cause.id, "fail", cause.text.format(**values), cause.remedy.format(**values))


def last_word(err: str, out: str = "") -> str:
    """Return the most informative line of a program's output: one about a full disk, else the last on stderr, else on
    stdout.

    rsync's summary and sshd's warning about a missing home, which come last, are skipped.
    """
    lines = [line.strip() for text in (out, err) for line in text.splitlines() if line.strip()]
    full = [line for line in lines if "No space left" in line or "quota exceeded" in line.lower()]
    others = [line for line in lines if not line.startswith((NO_HOME, "rsync error:"))]
    return (full[:1] or others[-1:] or lines[-1:] or [""])[0]


# ---- Settings


COMMON = re.compile(r"(NCCL|GLOO|TORCH_NCCL|TORCH_FR|SFT)_(?!PLAY_)\w+|OMP_NUM_THREADS")
OF_THE_HUB = re.compile(r"HF_(?!HOME$)\w+(?<!_CACHE)(?<!_PATH)(?<!_DIR)|AIM_REPO")
"""Settings of the hub's libraries that are not folders, and the place of tracked runs; those that look like a secret
are not forwarded.
"""
EACH_ITS_OWN = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA")


def settings_to_forward(ambient: Mapping[str, str]) -> dict[str, str]:
    """Return the user's settings that apply on every machine, without those that name devices or cache folders."""
    return {
        name: value
        for name, value in ambient.items()
        if name not in EACH_ITS_OWN
        and (COMMON.fullmatch(name) or (OF_THE_HUB.fullmatch(name) and mask(name, value) == value))
    }
