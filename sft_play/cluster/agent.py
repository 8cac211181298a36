"""The other end of `remote`: asks machines of a cluster, and holds a conversation with each launcher that it has started there."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sft_play.cluster.ssh import (
    SSH_FAILED,
    TIMED_OUT,
    WITHOUT,
    arguments,
    in_folder,
    is_here,
    last_word,
    login,
    no_client,
    run_on,
    trouble,
    without_environment,
)
from sft_play.config.cluster import Host, Inventory
from sft_play.errors import HardwareError, UserError

SOURCES = ("remote", "remote_processes", "remote_launch")
BOOT = """import json, sys, types
for name, text in json.loads(sys.stdin.buffer.readline()):
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
sys.exit(module.main())
"""
"""Reads the modules that follow, in the order of their imports, and runs the last; nothing is left on the machine's disk."""
TALK_SECONDS = 2.0
"""How often a launcher's machine hears that somebody listens."""
ERROR_LETTERS = 4000
NO_LOGIN = "account is currently not available"
"""What `nologin` prints, on standard output, in the place of a shell."""


class NoEnvironment(HardwareError):
    """A machine answers, and has not the folder or the Python that the inventory states."""


@cache
def program() -> str:
    """Returns the line that `BOOT` reads."""
    folder, package = Path(__file__).parent, "sft_play.cluster"
    return json.dumps([(f"{package}.{name}", (folder / f"{name}.py").read_text(encoding="utf-8")) for name in SOURCES]) + "\n"


def request_of(host: Host, do: str, **values: Any) -> str:
    """Returns program and request, as they are written to a machine's Python. On this machine the working folder is the project's."""
    folder = str(Path.cwd()) if is_here(host) else host.folder
    return program() + json.dumps({"do": do, "folder": folder, **values}) + "\n"


def python_of(host: Host, inventory: Inventory) -> list[str]:
    """Returns the local command line of a Python on `host` that runs `BOOT`. Here it is the one that runs this."""
    if is_here(host):
        return [sys.executable, "-u", "-c", BOOT]
    return arguments(host, inventory, in_folder(host, [host.python, "-u", "-c", BOOT]))


def ask(host: Host, inventory: Inventory, do: str, *, timeout: float, **values: Any) -> dict[str, Any]:
    """Returns the answer to one request. Raises `HardwareError` where the machine cannot be asked, with what to do."""
    text = request_of(host, do, **values)
    if is_here(host):
        try:
            done = subprocess.run(
                [sys.executable, "-c", BOOT], input=text, capture_output=True, text=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            raise HardwareError(
                f"host `{host.name}`, this machine, did not answer within {timeout:g} s",
                place=host.place or None,
                hint="a disk or the GPU driver may hang: `df` and `nvidia-smi` show which",
            ) from None
        code, out, err = done.returncode, done.stdout, done.stderr
    else:
        answer = run_on(host, inventory, in_folder(host, [host.python, "-c", BOOT]), input=text, timeout=timeout)
        code, out, err = answer.code, answer.stdout, answer.stderr
    lines = [parsed for line in out.splitlines() if (parsed := parse(line)) is not None]
    if lines and "problem" in lines[-1]:
        raise HardwareError(f"host `{host.name}`: {lines[-1]['problem']}", place=host.place or None)
    if code or not lines:
        raise refused(host, inventory, code, err, _without_answers(out))
    return lines[-1]


def parse(line: str) -> dict[str, Any] | None:
    """Returns a line's JSON object; `None` for what a login script prints."""
    with contextlib.suppress(ValueError):
        value = json.loads(line)
        return value if isinstance(value, dict) else None
    return None


def _without_answers(out: str) -> str:
    """Returns what a login shell, or a program in the place of one, has printed."""
    return "\n".join(line for line in out.splitlines() if parse(line) is None)


def refused(host: Host, inventory: Inventory, code: int, err: str, out: str = "") -> UserError:
    """Returns the error for a machine that could not be asked: what is wrong, and the remedy. `out`: what it printed beside answers."""
    if code in (SSH_FAILED, TIMED_OUT):
        why = trouble(host, inventory, err)
        return HardwareError(f"host `{host.name}`: {why.text}", place=host.place or None, hint=why.remedy)
    if code in WITHOUT:
        why = without_environment(host, code, f"make it: make cluster-install CLUSTER={inventory.path}")
        return NoEnvironment(f"host `{host.name}` has no environment: {why.text}", place=host.place or None, hint=why.remedy)
    last = last_word(err, out) or f"exit code {code}"
    if NO_LOGIN in last.lower():
        text = f"host `{host.name}`: {f'user `{host.user}`' if host.user else 'its user'} may not log in there: {last}"
        return HardwareError(
            text, place=host.place or None, hint="give another `user` in the inventory: one with a shell and a home"
        )
    return HardwareError(
        f"host `{host.name}`: its Python `{host.python}` did not start, or failed: {last}",
        place=host.place or None,
        hint=f"try it by hand: `{login(host, inventory)}`, then in `{host.folder}`: `{host.python} -V`",
    )


@dataclass(frozen=True, slots=True)
class Message:
    """What came from a launcher's machine, and when (monotonic seconds)."""

    node: int
    facts: Mapping[str, Any]
    at: float


class Agent:
    """A conversation with the launcher of one machine. What it says comes into a queue that all conversations share."""

    def __init__(self, node: int, host: Host, inventory: Inventory, inbox: queue.Queue[Message], **request: Any) -> None:
        self.node, self.host, self.inventory, self.inbox = node, host, inventory, inbox
        self.begun = self.heard = time.monotonic()
        """When its machine last said something, at first when it was asked."""
        self.error = ""
        """The end of what ssh, or the Python there, has printed on stderr."""
        self.beside = ""
        """The end of what came on stdout and was no message."""
        self.closed = False
        """The conversation has ended: ssh has gone."""
        try:
            self.process = subprocess.Popen(
                python_of(host, inventory),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise no_client() from error
        self._outbox: queue.Queue[bytes | None] = queue.Queue()
        self._outbox.put(request_of(host, "launch", node=node, **request).encode())
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

    def _next_line(self) -> bytes | None:
        """Returns what is to be said next; while there is nothing, that somebody listens, even when this console is stopped (Ctrl-S)."""
        try:
            return self._outbox.get(timeout=TALK_SECONDS)
        except queue.Empty:
            return b'{"here": true}\n'

    def _write(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            while (line := self._next_line()) is not None:
                self.process.stdin.write(line)
                self.process.stdin.flush()
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            for line in iter(self.process.stdout.readline, b""):
                self.heard = time.monotonic()
                text = line.decode("utf-8", "replace")
                if (facts := parse(text)) is not None:
                    self.inbox.put(Message(self.node, facts, self.heard))
                else:
                    self.beside = (self.beside + text)[-ERROR_LETTERS:]
        self.process.wait()
        self.closed = True
        self.inbox.put(Message(self.node, {"closed": self.process.returncode}, time.monotonic()))

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        with contextlib.suppress(OSError, ValueError):
            for line in iter(self.process.stderr.readline, b""):
                self.error = (self.error + line.decode("utf-8", "replace"))[-ERROR_LETTERS:]
