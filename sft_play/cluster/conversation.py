"""A conversation with a host: its Python runs the probe, over SSH or here, and answers one request at a time."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import sft_play
from sft_play.cluster.probe import MARK
from sft_play.cluster.ssh import arguments, in_folder, is_here, no_client
from sft_play.config.cluster import Host, Inventory

MODULES = ("probe_network", "probe")
"""Sent in this order, under their own names: the second imports the first."""
BOOT = (
    "import sys,json,types\n"
    "n=int(sys.stdin.readline())\n"
    "for name,text in json.loads(sys.stdin.read(n)):\n"
    " m=types.ModuleType(name); sys.modules[name]=m; exec(compile(text,name,'exec'),m.__dict__)\n"
    "m.serve()\n"
)
PROJECT = Path(sft_play.__file__).resolve().parent.parent
KEPT_LETTERS = 20_000
"""Of what a host says on stderr, the last."""
END_SECONDS = 3.0


class Silent(Exception):
    """No answer in time."""


class Gone(Exception):
    """The probe, or the connection, ended."""


class Refused(Exception):
    """The probe could not do what was asked; says why."""


class Session:
    """The probe on one host. Not for several threads at once."""

    def __init__(self, host: Host, inventory: Inventory, *, system: bool = False) -> None:
        """Starts; nothing is waited for. Raises `HardwareError` where there is no ssh program.

        `system`: by the machine's own `python3` in the user's home, where it has no environment yet.
        """
        self.host = host
        self.errors = ""
        """Of what came on stderr, the end."""
        self.beside = ""
        """Of what came on stdout before the probe's first line, the end."""
        here = is_here(host)  # then it is this very project and interpreter, whatever the inventory says
        start = ["-u", "-B", "-c", BOOT]
        there = ["python3", *start] if system else in_folder(host, [host.python, *start])
        words = [sys.executable, *start] if here else arguments(host, inventory, there)
        try:
            self.process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", bufsize=1,
                cwd=PROJECT if here else None, start_new_session=True,
            )  # fmt: skip
        except FileNotFoundError:
            raise no_client() from None
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.readers = [threading.Thread(target=self._read), threading.Thread(target=self._read_errors)]
        for reader in self.readers:
            reader.daemon = True
            reader.start()
        folder = Path(__file__).parent
        texts = [(f"sft_play.cluster.{name}", (folder / f"{name}.py").read_text(encoding="utf-8")) for name in MODULES]
        source = json.dumps(texts)
        self._write(f"{len(source)}\n{source}")

    def await_start(self, timeout: float) -> None:
        """Waits for the probe's first line; what a login shell prints before it is passed over. Raises `Silent` or `Gone`."""
        while (line := self._line(timeout)) != MARK:
            self.beside = (self.beside + line + "\n")[-KEPT_LETTERS:]

    def call(self, name: str, timeout: float, /, **request: Any) -> Any:
        """Returns what the probe's function `name` returns. Raises `Refused`, `Silent` or `Gone`."""
        self._write(json.dumps({"call": name, **request}) + "\n")
        try:
            answer = json.loads(self._line(timeout))
        except ValueError as error:
            raise Refused(f"an answer that is none: {error}") from error
        if "error" in answer:
            raise Refused(answer["error"])
        return answer["ok"]

    def close(self) -> int:
        """Ends the probe, which ends when its input does, and returns the exit code of it or of ssh."""
        try:
            if self.process.stdin:
                self.process.stdin.close()
        except OSError:  # it has ended
            pass
        try:
            code = self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        for reader in self.readers:
            reader.join(END_SECONDS)
        return code

    def _write(self, text: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(text)
            self.process.stdin.flush()
        except (OSError, ValueError):  # it has ended: the missing answer says so
            pass

    def _line(self, timeout: float) -> str:
        try:
            line = self.lines.get(timeout=max(timeout, 0.01))
        except queue.Empty:
            raise Silent(f"no answer within {timeout:.0f} s") from None
        if line is None:
            self.lines.put(None)  # for the next call
            raise Gone("the connection ended")
        return line.rstrip("\n")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)
        self.process.stdout.close()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors = (self.errors + line)[-KEPT_LETTERS:]
        self.process.stderr.close()
