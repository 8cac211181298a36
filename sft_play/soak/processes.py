"""The processes of one launch: which is which, what of them lives, and kill -9."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import psutil

MARK = "SOAK_LAUNCH"
"""Variable with an id of its own for each launch; every process of it inherits it."""
LAUNCHER, AGENT, PREPARATION, OTHER = "launcher", "agent", "preparation", "helper"


@dataclass(kw_only=True, slots=True)
class Family:
    """The living processes of a launch by role, as of the last `look`."""

    launcher: int
    mark: str
    roles: dict[psutil.Process, str] = field(default_factory=dict)
    """Every process that was ever seen, with its role."""

    def look(self) -> None:
        """Takes note of new processes."""
        with contextlib.suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.launcher)
            for process in [first, *first.children(recursive=True)]:
                if self.roles.get(process, OTHER) == OTHER:
                    with contextlib.suppress(psutil.Error, OSError):
                        self.roles[process] = role_of(process, self.launcher)

    def living(self) -> dict[psutil.Process, str]:
        """Returns those that run; a zombie does not."""
        return {process: role for process, role in self.roles.items() if is_alive(process)}

    def has(self, *roles: str) -> bool:
        """Whether a process of one of these roles (or of any rank, for `rank`) lives."""
        return any(role in roles or ("rank" in roles and role.startswith("rank ")) for role in self.living().values())

    def kill(self, processes: Iterable[psutil.Process]) -> None:
        """Sends SIGKILL to processes, the first of them first."""
        for process in processes:
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    def left(self) -> list[psutil.Process]:
        """Returns every living process of this launch, whatever parent or session it has: it looks at all processes there are."""
        found = set(self.living())
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process not in found and process.environ().get(MARK) == self.mark and is_alive(process):
                    found.add(process)
        return sorted(found, key=lambda process: process.pid)

    def wait_until_gone(self, limit: float) -> list[psutil.Process]:
        """Waits until none is left; returns what still lives after `limit` seconds."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            if not self.living() and not self.left():
                return []
            time.sleep(0.1)
        return self.left()

    def end(self) -> None:
        """Kills everything that is left."""
        for _ in range(3):  # one may be forking
            left = self.left()
            if not left:
                return
            self.kill(left)
            psutil.wait_procs(left, timeout=10)


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def role_of(process: psutil.Process, launcher: int) -> str:
    """Returns what a process is in its launch, from its command line and rank."""
    if process.pid == launcher:
        return LAUNCHER
    line = process.cmdline()
    if "accelerate.commands.launch" in line:
        return AGENT
    if "sft_play.prepare" in line:
        return PREPARATION
    if "sft_play.train" in line:
        parent = process.parent()
        if parent is None or "sft_play.train" not in parent.cmdline() or "accelerate.commands.launch" in parent.cmdline():
            return f"rank {process.environ().get('RANK', '0')}"
    return OTHER


def describe(processes: Iterable[psutil.Process]) -> str:
    """Returns processes in words, for a report of what should not be there."""
    words = []
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            words.append(f"{process.pid} ({' '.join(process.cmdline())[:120]})")
    return ", ".join(words) or "none"
