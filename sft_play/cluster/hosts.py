"""The machines of a cluster: what each says of itself, what does not allow a run on them, and the conversation with a launcher on one of them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from sft_play.cluster.ssh import (
    SSH_FAILED,
    TIMED_OUT,
    WITHOUT,
    Done,
    arguments,
    in_folder,
    is_here,
    last_word,
    login,
    no_client,
    on_all,
    run,
    run_on,
    trouble,
    without_environment,
)
from sft_play.config.cluster import Host, Inventory
from sft_play.config.names import mask
from sft_play.errors import HardwareError, UserError, raise_all
from sft_play.runs.folder import cache_folder, runs_folder
from sft_play.runs.origin import OPTIONAL, PACKAGES

SECONDS = 30.0
"""How long a machine may take to answer."""
BOOT = "import json, sys; exec(compile(json.loads(sys.stdin.buffer.readline()), 'remote', 'exec')); sys.exit(main())"
"""Reads the text of `remote`, and runs it: the same version as here, whatever is installed there."""
TALK_SECONDS = 2.0
"""How often a launcher's machine hears that somebody listens."""
MOST_WAITING = 200
"""Messages of all launchers that wait to be read: a rank that prints faster than the console is slowed down, and its machine still obeys."""
ERROR_LETTERS = 4000
NO_LOGIN = "account is currently not available"
"""What `nologin` prints, on standard output, in the place of a shell."""


class NoEnvironment(HardwareError):
    """A machine answers, and has not the folder or the Python that the inventory states."""


# ---- Asking


@cache
def _program() -> str:
    return json.dumps((Path(__file__).parent / "remote.py").read_text(encoding="utf-8")) + "\n"


def request_of(host: Host, do: str, **values: Any) -> str:
    """Returns program and request, as they are written to a machine's Python. On this machine the working folder is the project's."""
    folder = str(Path.cwd()) if is_here(host) else host.folder
    return _program() + json.dumps({"do": do, "folder": folder, **values}) + "\n"


def python_of(host: Host, inventory: Inventory) -> list[str]:
    """Returns the local command line of a Python on `host` that runs `BOOT`. Here it is the one that runs this."""
    if is_here(host):
        return [sys.executable, "-u", "-c", BOOT]
    return arguments(host, inventory, in_folder(host, [host.python, "-u", "-c", BOOT]))


def ask(host: Host, inventory: Inventory, do: str, *, timeout: float, **values: Any) -> dict[str, Any]:
    """Returns the answer to one request. Raises `HardwareError` where the machine cannot be asked, with what to do."""
    text = request_of(host, do, **values)
    if is_here(host):
        code, out, said = run(python_of(host, inventory), text.encode(), timeout)
        done = Done(code, out.decode(errors="replace"), said)
        if code == TIMED_OUT:
            raise HardwareError(
                f"host `{host.name}`, this machine, did not answer within {timeout:g} s",
                place=host.place or None,
                hint="a disk or the GPU driver may hang: `df` and `nvidia-smi` show which",
            )
    else:
        done = run_on(host, inventory, in_folder(host, [host.python, "-c", BOOT]), input=text, timeout=timeout)
    lines = [parsed for line in done.stdout.splitlines() if (parsed := parse(line)) is not None]
    if lines and "problem" in lines[-1]:
        raise HardwareError(f"host `{host.name}`: {lines[-1]['problem']}", place=host.place or None)
    if done.code or not lines:
        beside = "\n".join(line for line in done.stdout.splitlines() if parse(line) is None)
        raise refused(host, inventory, done.code, done.stderr, beside)
    return lines[-1]


def parse(line: str) -> dict[str, Any] | None:
    """Returns a line's JSON object; `None` for what a login script prints."""
    with contextlib.suppress(ValueError):
        value = json.loads(line)
        return value if isinstance(value, dict) else None
    return None


def refused(host: Host, inventory: Inventory, code: int, err: str, out: str = "") -> UserError:
    """Returns the error for a machine that could not be asked: what is wrong, and the remedy. `out`: what it printed beside answers."""
    place = host.place or None
    if code in (SSH_FAILED, TIMED_OUT):
        why = trouble(host, inventory, err)
        return HardwareError(f"host `{host.name}`: {why.text}", place=place, hint=why.remedy)
    if code in WITHOUT:
        why = without_environment(host, code, f"make it: make cluster-install CLUSTER={inventory.path}")
        return NoEnvironment(f"host `{host.name}` has no environment: {why.text}", place=place, hint=why.remedy)
    last = last_word(err, out) or f"exit code {code}"
    if NO_LOGIN in last.lower():
        text = f"host `{host.name}`: {f'user `{host.user}`' if host.user else 'its user'} may not log in there: {last}"
        return HardwareError(text, place=place, hint="give another `user` in the inventory: one with a shell and a home")
    return HardwareError(
        f"host `{host.name}`: its Python `{host.python}` did not start, or failed: {last}",
        place=place,
        hint=f"try it by hand: `{login(host, inventory)}`, then in `{host.folder}`: `{host.python} -V`",
    )


# ---- A launcher there


class Launcher:
    """A conversation with the launcher of one machine. What it says comes into a queue that all conversations share, with the machine's number."""

    def __init__(
        self, node: int, host: Host, inventory: Inventory, inbox: queue.Queue[tuple[Launcher, dict[str, Any]]], **request: Any
    ) -> None:
        self.node, self.host, self.inventory, self.inbox = node, host, inventory, inbox
        self.error, self.beside = "", ""
        """The end of what ssh, or the Python there, has printed on stderr; and of what came on stdout and was no message."""
        self.code: int | None = None
        """How the launcher ended; -1 for one that could not be started, or whose connection has ended."""
        self._outbox: queue.Queue[bytes | None] = queue.Queue()
        self._outbox.put(request_of(host, "launch", node=node, token=secrets.token_hex(16), **request).encode())
        pipe = subprocess.PIPE
        try:
            self.process = subprocess.Popen(
                python_of(host, inventory), stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
        except FileNotFoundError as error:
            raise no_client() from error
        for target in (self._write, self._read, self._read_errors):
            threading.Thread(target=target, name=f"{target.__name__}-{host.name}", daemon=True).start()

    def say(self, **command: Any) -> None:
        """Sends a command; a dead link never makes us wait."""
        self._outbox.put((json.dumps(command) + "\n").encode())

    def close(self) -> None:
        """Ends the conversation, and ssh with it."""
        self._outbox.put(None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=0.5)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=10)

    def refusal(self) -> UserError | None:
        """Returns why there was no conversation, where ssh or the Python there has said so."""
        code = self.process.poll()
        return refused(self.host, self.inventory, code, self.error, self.beside) if code else None

    def _write(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            while True:
                try:
                    line = self._outbox.get(timeout=TALK_SECONDS)
                except queue.Empty:
                    line = b'{"here": true}\n'  # also while this console is stopped (Ctrl-S)
                if line is None:
                    break
                self.process.stdin.write(line)
                self.process.stdin.flush()
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            for line in iter(self.process.stdout.readline, b""):
                text = line.decode("utf-8", "replace")
                if (facts := parse(text)) is not None:
                    self.inbox.put((self, facts))
                else:
                    self.beside = (self.beside + text)[-ERROR_LETTERS:]
        self.process.wait()
        self.inbox.put((self, {"closed": self.process.returncode}))

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        with contextlib.suppress(OSError, ValueError):
            for line in iter(self.process.stderr.readline, b""):
                self.error = (self.error + line.decode("utf-8", "replace"))[-ERROR_LETTERS:]


# ---- Facts


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """One machine, as its own Python sees it. Paths are absolute, and that machine's."""

    host: str
    """Its own host name."""
    home: str
    folder: str | None
    """The project; `None` where it is not there."""
    runs: str
    cache: str
    hub: str
    """Where huggingface_hub keeps models."""
    python: str
    versions: Mapping[str, str]
    code: bool
    """Whether the project can be imported there."""
    gpus: int
    rsync: bool
    shares_runs: bool
    """Its folder of runs is this machine's: a network disk."""
    shares_cache: bool
    linux: bool
    run_there: str | None = None
    """Its folder of a run of the name that was asked for, where one was begun there."""
    trains: bool = False
    """Whether a launcher of that run lives there."""
    interfaces: Sequence[str] = field(default=(), compare=False)
    """Its network interfaces by name, without `lo`; empty where it was not asked."""

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Facts:
        """Returns a machine's answer."""
        return cls(**{item.name: answer[item.name] for item in fields(cls)})


def facts_of(host: Host, inventory: Inventory, timeout: float, **more: Any) -> Facts:
    """Asks one host; `mark` names a file to look for in its folders, `.` for none. Raises `HardwareError` where it cannot be asked."""
    return Facts.of(ask(host, inventory, "facts", timeout=timeout, packages=PACKAGES, **more))


def gather(inventory: Inventory, variables: Mapping[str, str], run: str | None = None) -> dict[str, Facts | UserError]:
    """Asks all hosts at once, also for what they have of a run called `run`; returns host name -> its facts, or why it cannot be asked."""

    def one(host: Host) -> Facts | UserError:
        try:
            mine = {} if is_here(host) else dict(variables)
            return facts_of(host, inventory, SECONDS, mark=mark, variables=mine, run=run)
        except UserError as error:
            return error

    with _mark() as mark:
        return on_all(inventory, one)


@contextlib.contextmanager
def _mark() -> Iterator[str]:
    """Leaves a file in the folders of runs and cache, by which another machine can tell that it sees the same ones."""
    name = f".seen-{secrets.token_hex(8)}"
    made = []
    try:
        for folder in (runs_folder(), cache_folder()):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
            made.append(folder / name)
        yield name
    except OSError as error:
        raise HardwareError(f"cannot be written: {error.strerror}", place=str(error.filename)) from error
    finally:
        for path in made:
            path.unlink(missing_ok=True)


def shared_variables(shared: bool) -> dict[str, str]:
    """Returns where all machines keep runs and cache when these are on a disk that all of them see."""
    if not shared:
        return {}
    return {"RUNS_DIR": str(runs_folder().absolute()), "SFT_PLAY_CACHE": str(cache_folder().absolute())}


def check(inventory: Inventory, found: Mapping[str, Facts], shared: bool) -> None:
    """Raises every reason why no run can be started on these machines, each with its remedy.

    Only those that are `found` are judged, and without the master none is compared with it.
    """
    problems: list[UserError] = []
    own = found.get(inventory.master.name)
    if own and not own.rsync and any(name != inventory.master.name for name in found):
        text = "this machine has no `rsync`, by which code and data go to the others"
        problems.append(HardwareError(text, place=inventory.master.place or None, hint="sudo apt install rsync"))
    for host in inventory.hosts:
        facts = found.get(host.name)
        if own and facts is not None and not is_here(host):
            problems += _problems(host, facts, own, inventory, shared)
    for host in inventory.hosts:
        if host.name in found:
            problems += _unlike_stated(host, found[host.name])
    raise_all(problems)


def _unlike_stated(host: Host, facts: Facts) -> Iterator[UserError]:
    """Yields what the inventory states of a machine and is not there."""
    if host.gpus is not None and host.gpus > facts.gpus:
        text = f"host `{host.name}` has {_count(facts.gpus, 'GPU')}, and the inventory states {host.gpus}"
        hint = "`nvidia-smi` there shows what its driver sees; correct `gpus` in the inventory (0 trains on its CPU)"
        yield HardwareError(text, place=host.place or None, hint=hint)
    if host.interface is not None and facts.interfaces and host.interface not in (*facts.interfaces, "lo"):
        text = (
            f"host `{host.name}` has no interface `{host.interface}`; it has {', '.join(f'`{one}`' for one in facts.interfaces)}"
        )
        hint = "correct `interface` in the inventory, or leave it away: that of the route to the master is taken"
        yield HardwareError(text, place=host.place or None, hint=hint)


def _problems(host: Host, facts: Facts, own: Facts, inventory: Inventory, shared: bool) -> Iterator[UserError]:
    place = host.place or None
    install = f"make cluster-install CLUSTER={inventory.path}"
    if not facts.code or "torch" not in facts.versions:
        what = "the project cannot be imported" if not facts.code else "it has no torch"
        yield HardwareError(f"host `{host.name}` has no environment: {what}", place=place, hint=f"make it: {install}")
        return
    if not facts.linux:
        yield HardwareError(f"host `{host.name}` does not run Linux", place=place)
    apart = versions_apart(own, facts)
    if apart:
        yield HardwareError(
            f"host `{host.name}` has other versions: {', '.join(apart)}",
            place=place,
            hint=versions_hint(own, facts, host, f"make them alike: {install}"),
        )
    if shared and not (facts.shares_runs and facts.shares_cache):
        folders = [
            str(f.absolute())
            for f, sees in ((runs_folder(), facts.shares_runs), (cache_folder(), facts.shares_cache))
            if not sees
        ]
        text = f"`data.sync` is `shared`, but host `{host.name}` does not see this machine's {' nor its '.join(f'`{f}`' for f in folders)}"
        hint = "mount them there at the same place (RUNS_DIR and SFT_PLAY_CACHE say where they are), or take `data.sync: rsync`"
        yield HardwareError(text, place=place, hint=hint)
    if not facts.rsync:
        yield HardwareError(f"host `{host.name}` has no `rsync`", place=place, hint="on it: sudo apt install rsync")


def versions_apart(own: Facts, other: Facts) -> list[str]:
    """Returns in which versions another machine is not as this one, each with both: Python to its minor number, packages exactly."""
    apart = [_apart(name, other.versions.get(name), own.versions.get(name)) for name in _names_apart(own, other)]
    if _minor(other.python) != _minor(own.python):
        apart.insert(0, f"Python {other.python} (here {own.python})")
    return apart


def only_optional_apart(own: Facts, other: Facts) -> bool:
    """Whether all that differs are packages that no installation of ours brings: to install the pinned ones again changes nothing."""
    names = _names_apart(own, other)
    return bool(names) and set(names) <= set(OPTIONAL) and _minor(own.python) == _minor(other.python)


def versions_hint(own: Facts, other: Facts, host: Host, install: str) -> str:
    """Returns how a host gets this machine's versions; `install` says what brings the pinned ones."""
    hints = [] if only_optional_apart(own, other) else [install]
    return "; ".join([*hints, *optional_hints(host, other.versions, own.versions, "here")])


def optional_hints(host: Host, theirs: Mapping[str, str], own: Mapping[str, str], where: str) -> list[str]:
    """Returns how a host gets the same packages as `where` has (`own`), of those that no installation of ours brings."""
    hints = []
    for name in OPTIONAL:
        version, other = own.get(name), theirs.get(name)
        if version != other:
            words = f"install {name}=={version}, or uninstall" if version else f"uninstall {name}, or install"
            hints.append(f"on `{host.name}`, in `{host.folder}`: {host.python} -m pip {words} it {where}")
    return hints


def _names_apart(own: Facts, other: Facts) -> list[str]:
    """Returns the packages of which the two have other versions, those of one side only, too."""
    return [name for name in {**own.versions, **other.versions} if own.versions.get(name) != other.versions.get(name)]


def _apart(name: str, theirs: str | None, version: str | None) -> str:
    return f"{name} {theirs or 'is missing'} ({f'here {version}' if version else 'missing here'})"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _count(number: int, what: str) -> str:
    return f"no {what}" if not number else f"{number} {what}" if number == 1 else f"{number} {what}s"


def require_master_here(inventory: Inventory) -> None:
    """Raises `UserError` where the first host is another machine: its launcher, logs and checkpoints are this command's own."""
    if sys.platform != "linux":
        raise HardwareError("cluster runs need Linux on every machine, this one too")
    if not is_here(inventory.master):
        raise UserError(
            f"the first host, `{inventory.master.name}` ({inventory.master.address}), is the master, and this machine has not that address",
            place=inventory.master.place or None,
            hint='type the command on the first host, or put this machine first in the inventory (`CLUSTER_HOSTS="name name"` orders them)',
        )


COMMON = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_FR_", "SFT_")
"""Beginnings of such settings; `SFT_SECTION_KEY` is a key of the configuration."""
OF_THE_HUB = re.compile(r"HF_(?!HOME$)\w+(?<!_CACHE)(?<!_PATH)(?<!_DIR)|AIM_REPO")
"""Settings of the hub's libraries that are no folder, and where tracked runs are kept; of these what looks like a secret stays here."""


def forwarded(ambient: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the user's own settings that reach every machine; those that name devices or a cache's folder are each machine's."""
    ambient = os.environ if ambient is None else ambient
    own = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA")
    return {
        k: v
        for k, v in ambient.items()
        if (k.startswith(COMMON) and k not in own and not k.startswith("SFT_PLAY_"))
        or k == "OMP_NUM_THREADS"
        or (OF_THE_HUB.fullmatch(k) and mask(k, v) == v)
    }
