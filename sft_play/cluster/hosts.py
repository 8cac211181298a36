"""The conversation with the machines of a cluster, and the facts that they tell of themselves."""

from __future__ import annotations

import contextlib
import json
import queue
import re
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sft_play.cluster.inventory import Host, Inventory
from sft_play.cluster.probe import Facts
from sft_play.cluster.ssh import TIMED_OUT, arguments, in_folder, is_here, on_all, start, trouble
from sft_play.errors import HardwareError, UserError, mask
from sft_play.runs.folder import cache_folder, runs_folder
from sft_play.text import Finding

SECONDS = 30.0
"""How long a machine may take to answer."""
BOOT = (
    "import json, sys, types\nfor name, text in json.loads(sys.stdin.buffer.readline()):\n"
    " module = sys.modules[name] = types.ModuleType(name)\n exec(compile(text, name, 'exec'), module.__dict__)\nmodule.main()"
)
"""Reads the texts of `probe` and `remote`, and runs them: the same version as here, whatever is installed there."""
TALK_SECONDS = 2.0
"""How often a launcher's machine hears that somebody listens."""
MOST_WAITING = 200
"""Messages of all launchers that wait to be read: a rank that prints faster than the console is slowed down, and its machine still obeys."""
END_SECONDS = 3.0
ERROR_LETTERS = 4000


class NoEnvironment(HardwareError):
    """A machine answers, and has not the folder or the Python that the inventory states."""


class NoAnswer(Exception):
    """A machine did not answer in time, or its connection has ended."""


class Session:
    """The program of `remote` on one machine. Its messages come into `inbox`, which several sessions may share."""

    def __init__(
        self, host: Host, variables: Mapping[str, str] | None = None, *, system: bool = False, inbox: Inbox | None = None
    ) -> None:
        """Start; nothing is waited for. Raise `HardwareError` where there is no ssh program.

        `variables` say where runs and cache are. `system`: by the machine's own `python3`, where it has no environment yet.
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
        self._outbox.put(program() + json.dumps(setup) + "\n")
        argv = [sys.executable, *words] if here else arguments(host, there)
        self.process = start(argv, stdin=subprocess.PIPE, stderr=self._errors, start_new_session=True)
        for target in (self._write, self._read):
            threading.Thread(target=target, name=f"{target.__name__}-{host.name}", daemon=True).start()

    def say(self, **words: Any) -> None:
        """Send a line; a dead link never makes us wait."""
        self._outbox.put(json.dumps(words) + "\n")

    def call(self, do: str, timeout: float, /, **values: Any) -> dict[str, Any]:
        """Return the answer to one request, which may be a `problem`. Raise `NoAnswer`, after which there are no more."""
        self.say(do=do, seconds=timeout, **values)
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


@cache
def program() -> str:
    """Return what `BOOT` reads."""
    texts = {name: (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8") for name in ("probe", "remote")}
    return json.dumps([(f"sft_play.cluster.{name}", text) for name, text in texts.items()]) + "\n"


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
    name = f".seen-{secrets.token_hex(8)}"
    try:
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        yield name
    finally:
        for folder in folders:
            with contextlib.suppress(OSError):
                (folder / name).unlink()


def shared_variables(shared: bool) -> dict[str, str]:
    """Return where all machines keep runs and cache when these are on a disk that all of them see."""
    if not shared:
        return {}
    return {"RUNS_DIR": str(runs_folder().absolute()), "SFT_PLAY_CACHE": str(cache_folder().absolute())}


def require_master_here(inventory: Inventory) -> None:
    """Raise `UserError` where the first host is another machine: its launcher, logs and checkpoints are this command's own."""
    if sys.platform != "linux":
        raise HardwareError("cluster runs need Linux on every machine, this one too")
    if not is_here(inventory.master):
        raise UserError(
            f"the first host, `{inventory.master.name}` ({inventory.master.address}), is the master, and this machine does not have that address",
            place=inventory.master.place,
            hint='type the command on the first host, or put this machine first in the inventory (`CLUSTER_HOSTS="name name"` orders them)',
        )


COMMON = re.compile(r"(NCCL|GLOO|TORCH_NCCL|TORCH_FR|SFT)_(?!PLAY_)\w+|OMP_NUM_THREADS")
OF_THE_HUB = re.compile(r"HF_(?!HOME$)\w+(?<!_CACHE)(?<!_PATH)(?<!_DIR)|AIM_REPO")
"""Settings of the hub's libraries that are no folder, and where tracked runs are kept; of these what looks like a secret stays here."""
EACH_ITS_OWN = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA")


def settings_to_forward(ambient: Mapping[str, str]) -> dict[str, str]:
    """Return the user's own settings that reach every machine; those that name devices or a cache's folder are each machine's."""
    return {
        name: value for name, value in ambient.items() if name not in EACH_ITS_OWN
        and (COMMON.fullmatch(name) or (OF_THE_HUB.fullmatch(name) and mask(name, value) == value))
    }  # fmt: skip
