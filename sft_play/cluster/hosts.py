"""Commands on the machines of a cluster by SSH, the conversation with them, and the facts that they tell. This
machine's own addresses need no SSH.

Words reach the other side letter for letter (they are quoted for the shell that sshd starts), host keys are checked,
and nothing ever asks for a password: a terminal that waits on one of eight machines looks like a run that hangs.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import queue
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from sft_play.cluster import remote
from sft_play.cluster.inventory import Host, Inventory
from sft_play.cluster.remote import Facts
from sft_play.errors import HardwareError, UserError, mask
from sft_play.launch.environment import is_of_this_machine
from sft_play.runs.folder import cache_folder, runs_folder
from sft_play.text import Finding

Result = TypeVar("Result")
CONNECT_SECONDS = 5
OPTIONS = (
    "BatchMode=yes",
    "StrictHostKeyChecking=yes",
    f"ConnectTimeout={CONNECT_SECONDS}",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=12",
    "LogLevel=ERROR",
    "ControlMaster=auto",
    "ControlPersist=60",
    "ClearAllForwardings=yes",
    "ForwardAgent=no",
    "ForwardX11=no",
)
"""One connection per host is shared by all commands of this process. Forwarded ports of the user's own configuration
would be refused the second time; a host that trains needs neither the user's keys nor their screen.
"""
NO_FOLDER = 96
"""Exit code of `in_folder` where the folder is not there, is a file, or may not be entered."""
NOT_A_PROGRAM, NO_PROGRAM = 126, 127
"""A shell's exit codes for a program that cannot be started, or is not there."""
SSH_FAILED, TIMED_OUT = 255, 124
NO_HOME = "Could not chdir to home directory"
"""How sshd begins a remark on stderr, whatever then becomes of the command."""
HOME = 'h() { case "$1" in "~/"*) printf "%s" "$HOME/${1#"~/"}";; *) printf "%s" "$1";; esac; }; '
"""`~/` is the user's home over there; no path is ever part of a script's text."""
IN_FOLDER = HOME + f'f=$(h "$1"); cd "$f" || exit {NO_FOLDER}; p=$(h "$2"); shift 2; exec "$p" "$@"'


def arguments(host: Host, argv: Sequence[str], *, tty: bool = False) -> list[str]:
    """Return the local command line that runs `argv` on `host`, in its home folder by SSH, or as it is on this machine.

    With `tty` the remote side gets a terminal: what it runs ends with the connection.
    """
    if is_here(host):
        return list(argv)
    options = [word for option in (*OPTIONS, f"ControlPath={control_path()}") for word in ("-o", option)]
    user = ["-l", host.user] if host.user else []
    return [
        "ssh",
        "-tt" if tty else "-T",
        *_client(host),
        *options,
        *user,
        "--",
        host.ssh or host.address,
        shlex.join(argv),
    ]


def login(host: Host, program: str = "ssh") -> str:
    """Return the command by which a person logs in on `host`."""
    target = f"{f'{host.user}@' if host.user else ''}{host.ssh or host.address}"
    return shlex.join([program, *_client(host), target])


def _client(host: Host) -> list[str]:
    config = ["-F", str(host.ssh_config)] if host.ssh_config else []
    return [*config, *(["-p", str(host.port)] if host.port else [])]


def in_folder(host: Host, argv: Sequence[str]) -> list[str]:
    """Return the words that run `argv` in the host's project folder; see `ENDED` for its exit codes.

    `argv[0]` may be `~/...`, and is relative to the folder when it is a relative path.
    """
    return ["sh", "-c", IN_FOLDER, "sh", host.folder, *argv]


_running: weakref.WeakSet[subprocess.Popen[bytes]] = weakref.WeakSet()
_stopped = threading.Event()


def start(argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a program whose output is read here, and which `on_all` ends when its command is stopped.

    Raise `HardwareError` where there is no `ssh`, `OSError` where another program cannot be started.
    """
    try:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, **options)
    except FileNotFoundError as error:
        if argv[0] == "ssh":
            raise HardwareError("there is no `ssh` on this machine", hint="apt install openssh-client") from error
        raise
    _running.add(process)
    if _stopped.is_set():
        process.kill()
    return process


def run(
    argv: Sequence[str], text: bytes | None, timeout: float, *, heard: Callable[[bytes], object] | None = None
) -> tuple[int, bytes, str]:
    """Run a program here to its end; return its exit code (124 after `timeout` seconds), output and messages. Raise as
    `start`.

    `heard` gets its output so far, twice a second.
    """
    until = time.monotonic() + timeout
    with start(argv, stdin=subprocess.DEVNULL if text is None else subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            while True:
                try:
                    out, said = process.communicate(text, timeout=0.5)
                    return process.returncode, out, said.decode(errors="replace")
                except subprocess.TimeoutExpired as error:
                    text, out = None, error.stdout or b""  # the text is being written
                    if time.monotonic() > until:
                        return TIMED_OUT, out, f"no answer within {timeout:g} s"
                    if heard:
                        heard(out)
        finally:
            process.kill()


def on_all(hosts: Sequence[Host], call: Callable[[Host], Result]) -> dict[str, Result | UserError]:
    """Return host name -> what `call` returned for it, or the `UserError` that it raised; all hosts at once.

    Another exception, a signal's included, is raised when all have ended: at once, since the programs that they wait
    for are ended then.
    """

    def one(host: Host) -> Result | UserError:
        try:
            return call(host)
        except UserError as error:
            return error

    try:
        with ThreadPoolExecutor(max_workers=max(1, len(hosts))) as pool:
            try:
                started = {host.name: pool.submit(one, host) for host in hosts}
                return {name: future.result() for name, future in started.items()}
            except BaseException:
                _stopped.set()
                for process in list(_running):
                    process.kill()
                raise
    finally:
        _stopped.clear()


@functools.cache
def control_path() -> str:
    """Return where this process keeps its shared connections: a private folder with a short path, as sockets need, gone
    at exit.
    """
    folder = Path(tempfile.mkdtemp(prefix="sft-", dir="/tmp"))  # TMPDIR may be too long

    def close() -> None:
        for path in folder.glob("*"):
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(["ssh", "-O", "exit", "-S", str(path), "x"], capture_output=True, timeout=5, check=False)
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(close)
    return f"{folder}/%C"


def is_here(host: Host) -> bool:
    """Whether `host` is this machine: its address is one of the addresses that interfaces here have."""
    return _is_own(host.address)


@functools.cache
def _is_own(address: str) -> bool:
    with contextlib.suppress(UserError, UnicodeError):
        return is_of_this_machine(address)
    return False


SAYS = (
    ("host-key-changed", ("remote host identification has changed", "has changed"),
     "the host key of `{target}` is not the known one: another machine answers there, or it was reinstalled",
     "when you know why: `ssh-keygen -R {known_as}`, then as for a new host"),
    ("unknown-host-key", ("host key verification failed", "host key is known"), "the host key of `{target}` is not known here",
     "log in once and compare the fingerprint: `{login}`"),
    ("refused-key", ("permission denied", "too many authentication failures"), "`{target}` refuses this machine's key: {last}",
     "`{copy_id}` (after `ssh-keygen` where there is no key; `ssh-add` where it has a passphrase)"),
    ("unknown-name", ("could not resolve", "name or service not known"), "`{target}` is not a name that can be resolved here",
     "give its IP address, or add it to /etc/hosts"),
    ("no-sshd", ("connection refused",), "`{target}` is there, but no sshd listens: {last}",
     "on it: `sudo apt install openssh-server`, `sudo systemctl enable --now ssh`; then check `port` in the inventory"),
    ("unreachable", ("no route", "timed out", "no answer", "unreachable"), "`{target}` cannot be reached: {last}",
     "is it on, plugged in, and not asleep? `ping {address}`; does its firewall let port {port} in? Does a disk of it hang (`df`)?"),
    ("ssh", ("",), "ssh to `{target}` failed: {last}", "try `{login} true` manually"),
)  # fmt: skip
"""What ssh says when it ends with 255, or is silent: id, words in it, text, remedy; the first that fits."""
ENDED = (
    ("no-environment", (NO_FOLDER,), "", "no environment: no folder `{folder}` that its user can enter",
     "make it: make cluster-install CLUSTER={cluster}; where a file has that name, give another `folder` or `user` in the inventory"),
    ("no-environment", (NO_PROGRAM, NOT_A_PROGRAM), "", "no environment: no Python `{python}` in `{folder}`",
     "make it: make cluster-install CLUSTER={cluster}"),
    ("refused-key", range(256), "account is currently not available", "user `{user}` may not log in there: {last}",
     "give another `user` in the inventory: one with a shell and a home"),
    ("broken-python", range(-99, 256), "", "`{python}` ended with code {code}: {last}",
     "start it manually: `{login}`, then in `{folder}`; `make cluster-install CLUSTER={cluster}` reinstalls it"),
)  # fmt: skip
"""What the exit code of a program there means: id, codes, words that it printed, text, remedy; the first that fits."""


def trouble(host: Host, code: int, err: str, out: str = "") -> Finding:
    """Return why `host` cannot be asked, by the exit code of ssh or of what it ran there, and by what these printed."""
    target = host.ssh or host.address
    if code in (SSH_FAILED, TIMED_OUT):
        last = last_word(err) or "no answer"
        low = err.lower() or last
        name, _, text, remedy = next(row for row in SAYS if any(words in low for words in row[1]))
    else:
        last = last_word(err, out) or "no word"
        name, _, _, text, remedy = next(row for row in ENDED if code in row[1] and row[2] in last)
    fields = {
        **{key: getattr(host, key) for key in ("address", "folder", "python", "cluster")},
        "target": target,
        "last": last,
        "code": code,
        "port": host.port or 22,
        "user": host.user or "of ssh's configuration",
        "login": login(host),
        "copy_id": login(host, "ssh-copy-id"),
        "known_as": f"'[{target}]:{host.port}'" if host.port not in (None, 22) else target,
    }
    return Finding(name, "fail", text.format(**fields), remedy.format(**fields))


def print_line(text: str) -> None:
    """Tell the user, on stderr; lines of several threads stay complete."""
    print(f"{text}\n", end="", file=sys.stderr, flush=True)


def last_word(err: str, out: str = "") -> str:
    """Return the line of a program's words that says most: a full disk before what followed from it, else the last on
    stderr, else on stdout.

    Neither rsync's summary nor sshd's own remark, that there is no home, which comes after all others.
    """
    lines = [line.strip() for text in (out, err) for line in text.splitlines() if line.strip()]
    full = [line for line in lines if "No space left" in line or "quota exceeded" in line.lower()]
    said = [line for line in lines if not line.startswith((NO_HOME, "rsync error:"))]
    return (full[:1] or said[-1:] or lines[-1:] or [""])[0]


SECONDS = 30.0
"""How long a machine may take to answer."""
BOOT = (
    "import json, sys, types\nmodule = sys.modules['remote'] = types.ModuleType('remote')\n"
    "exec(compile(json.loads(sys.stdin.buffer.readline()), 'remote', 'exec'), module.__dict__)\nmodule.main()"
)
"""Reads the text of `remote` and runs it: the same version as here, whatever is installed there."""
TALK_SECONDS = 2.0
"""How often a launcher's machine hears that somebody listens."""
MOST_WAITING = 200
"""Messages of all launchers that wait to be read: a rank that prints faster than the console is slowed down, and its
machine still obeys.
"""
END_SECONDS = 3.0
ERROR_LETTERS = 4000


class NoEnvironment(HardwareError):
    """A machine answers, and has not the folder or the Python that the inventory states."""


class NoAnswer(Exception):
    """A machine did not answer in time, or its connection has ended."""


class Session:
    """The program of `remote` on one machine. Its messages come into `inbox`, which several sessions may share."""

    def __init__(
        self,
        host: Host,
        variables: Mapping[str, str] | None = None,
        *,
        system: bool = False,
        inbox: Inbox | None = None,
    ) -> None:
        """Start; nothing is waited for. Raise `HardwareError` where there is no ssh program.

        `variables` say where runs and cache are. `system`: by the machine's own `python3`, where it has no environment
        yet.
        """
        self.host = host
        self.inbox: Inbox = queue.Queue() if inbox is None else inbox
        self.silent = False
        self._noise = ""
        """What came on stdout and was no message, such as a login script's words."""
        self._said = ""
        """The end of what came on stderr."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._outbox: queue.Queue[str | None] = queue.Queue()
        words, here = ["-u", "-B", "-c", BOOT], is_here(host)
        there = ["python3", *words] if system else in_folder(host, [host.python, *words])
        setup = {"folder": str(Path.cwd()) if here else host.folder, "variables": dict(variables or {})}
        text = Path(str(remote.__file__)).read_text(encoding="utf-8")
        self._outbox.put(json.dumps(text) + "\n" + json.dumps(setup) + "\n")
        argv = [sys.executable, *words] if here else arguments(host, there)
        self.process = start(argv, stdin=subprocess.PIPE, stderr=self._errors, start_new_session=True)
        for target in (self._write, self._read):
            threading.Thread(target=target, name=f"{target.__name__}-{host.name}", daemon=True).start()

    def send(self, **words: Any) -> None:
        """Send a line; a dead link never makes us wait."""
        self._outbox.put(json.dumps(words) + "\n")

    def call(self, do: str, timeout: float, /, **values: Any) -> dict[str, Any]:
        """Return the answer to one request, which may be a `problem`. Raise `NoAnswer`, after which there are no
        more.
        """
        self.send(do=do, seconds=timeout, **values)
        try:
            _, found = self.inbox.get(timeout=timeout)
        except queue.Empty:
            self.process.kill()
            self.silent = True
            raise NoAnswer(f"no answer within {timeout:.3g} s") from None
        if "closed" in found:
            raise NoAnswer("the connection ended")
        return found

    def close(self) -> None:
        """End the conversation, and ssh with it."""
        self._outbox.put(None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        self.process.kill()
        self.process.wait()
        if not self._errors.closed:
            self._errors.seek(0)
            self._said = self._errors.read().decode(errors="replace")[-ERROR_LETTERS:]
            self._errors.close()

    def trouble(self) -> Finding:
        """Return why there is no conversation any more, of a session that is closed."""
        return trouble(self.host, TIMED_OUT if self.silent else self.process.wait(), self._said, self._noise)

    def _write(self) -> None:
        stream = self.process.stdin
        assert stream is not None
        with contextlib.suppress(OSError, ValueError):
            while True:
                try:
                    line = self._outbox.get(timeout=TALK_SECONDS)
                except queue.Empty:
                    line = "{}\n"  # also while this console is stopped (Ctrl-S)
                if line is None:
                    break
                stream.write(line.encode(errors="surrogateescape"))
                stream.flush()
        with contextlib.suppress(OSError, ValueError):
            stream.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in iter(self.process.stdout.readline, b""):
            text = line.decode("utf-8", "replace")
            try:
                self.inbox.put((self, dict(json.loads(text))))
            except (ValueError, TypeError):
                self._noise = (self._noise + text)[-ERROR_LETTERS:]
        self.inbox.put((self, {"closed": self.process.wait()}))


Inbox = queue.Queue[tuple[Session, dict[str, Any]]]


def ask(
    host: Host, do: str, *, timeout: float = SECONDS, variables: Mapping[str, str] | None = None, **values: Any
) -> dict[str, Any]:
    """Return the answer to one request. Raise `HardwareError` where the machine cannot be asked, with what to do."""
    session = Session(host, variables)
    try:
        found = session.call(do, timeout, **values)
    except NoAnswer:
        session.close()
        why = session.trouble()
        kind = NoEnvironment if why.id == "no-environment" else HardwareError
        raise kind(f"host `{host.name}`: {why.text}", place=host.place, hint=why.remedy) from None
    finally:
        session.close()
    if "problem" in found:
        raise HardwareError(f"host `{host.name}`: {found['problem']}", place=host.place)
    return found


# ---- Facts


def facts_of(host: Host, **wanted: Any) -> Facts:
    """Ask one host. Raise `HardwareError` where it cannot be asked."""
    return Facts(**ask(host, "facts", **wanted))


def gather(hosts: Sequence[Host], shared: Mapping[str, str], run: str) -> dict[str, Facts | UserError]:
    """Ask hosts at once, also for what they have of a run; return host name -> its facts, or why it cannot be asked."""
    with mark_in(runs_folder(), cache_folder()) as mark:
        return on_all(hosts, lambda host: facts_of(host, mark=mark, variables={} if is_here(host) else shared, run=run))


@contextlib.contextmanager
def mark_in(*folders: Path) -> Iterator[str]:
    """Leave a file in folders, by which another machine can tell that it sees the same ones; yield its name."""
    name, new = f".seen-{secrets.token_hex(8)}", [folder for folder in folders if not folder.exists()]
    try:
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        yield name
    finally:
        for folder in folders:
            with contextlib.suppress(OSError):
                (folder / name).unlink()
                if folder in new:
                    folder.rmdir()  # where nothing else has come into it


def shared_variables(shared: bool) -> dict[str, str]:
    """Return where all machines keep runs and cache when these are on a disk that all of them see."""
    if not shared:
        return {}
    return {"RUNS_DIR": str(runs_folder().absolute()), "SFT_PLAY_CACHE": str(cache_folder().absolute())}


def require_master_here(inventory: Inventory) -> None:
    """Raise `UserError` where the first host is another machine: its launcher, logs and checkpoints are this command's
    own.
    """
    if sys.platform != "linux":
        raise HardwareError("cluster runs need Linux on every machine, this one too")
    if not is_here(inventory.master):
        raise UserError(
            f"the first host, `{inventory.master.name}` ({inventory.master.address}), is the master, and this machine"
            " does not have that address",
            place=inventory.master.place,
            hint=(
                'type the command on the first host, or put this machine first in the inventory (`CLUSTER_HOSTS="name'
                ' name"` orders them)'
            ),
        )


COMMON = re.compile(r"(NCCL|GLOO|TORCH_NCCL|TORCH_FR|SFT)_(?!PLAY_)\w+|OMP_NUM_THREADS")
OF_THE_HUB = re.compile(r"HF_(?!HOME$)\w+(?<!_CACHE)(?<!_PATH)(?<!_DIR)|AIM_REPO")
"""Settings of the hub's libraries that are no folder, and where tracked runs are kept; of these what looks like a
secret stays here.
"""
EACH_ITS_OWN = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA")


def settings_to_forward(ambient: Mapping[str, str]) -> dict[str, str]:
    """Return the user's own settings that reach every machine; those that name devices or a cache's folder are each
    machine's.
    """
    return {
        name: value
        for name, value in ambient.items()
        if name not in EACH_ITS_OWN
        and (COMMON.fullmatch(name) or (OF_THE_HUB.fullmatch(name) and mask(name, value) == value))
    }
