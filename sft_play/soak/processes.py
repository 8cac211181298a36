"""The processes of one launch, and what it is doing, as seen from outside: from its processes and from what it writes anyway."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from sft_play.runs.folder import RunFolder

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


# What a run is doing, seen from outside: from its processes and from what it writes anyway.


STARTING, PREPARING, LOADING, TRAINING = "starting", "preparation", "loading", "training"
EVALUATING, SAVING, PUBLISHING, ENDING = "evaluation", "save", "publishing", "ending"
PHASES = (STARTING, PREPARING, LOADING, TRAINING, EVALUATING, SAVING, PUBLISHING, ENDING)
"""In the order of a run. `starting`: the launcher alone, before and after the preparation; `loading`: agent and workers until steps can
begin; `publishing`: the final `model/` is written; `ending`: the run is complete or the workers have gone, the launcher not yet."""
TAIL_BYTES = 16384
HALF_WRITTEN = re.compile(r"\.step-\d+\.partial")


@dataclass(kw_only=True, slots=True)
class Watcher:
    """Looks at one launch of a run."""

    run: RunFolder
    family: Family
    eval_steps: int | None
    """Optimizer steps between evaluations; `None` without any."""
    started: float = field(default_factory=time.monotonic)
    seen: dict[str, float] = field(default_factory=dict)
    """Phase -> seconds after the launch when it was first seen."""
    lasts: dict[str, float] = field(default_factory=dict)
    """Phase -> seconds of its longest stretch, where `measure` was called."""
    _stretch: tuple[str, float] = ("", 0.0)
    _metrics_before: tuple[int, int] | None = None
    _training: bool = False
    _looked_at: tuple[int, int] | None = None
    _rows: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self._metrics_before = _identity(self.run.metrics)

    def phase(self) -> str:
        """Returns one of `PHASES`. `family.look()` must be recent."""
        found = self._phase()
        self.seen.setdefault(found, time.monotonic() - self.started)
        return found

    def measure(self) -> None:
        """Looks as `phase` does and keeps how long phases last; for launches that are not to be killed."""
        found, now = self.phase(), time.monotonic()
        before, since = self._stretch
        if found != before:
            self.lasts[before] = max(self.lasts.get(before, 0.0), now - since)
            self._stretch = (found, now)

    def _phase(self) -> str:
        if self.training():
            if self.half_written():
                return SAVING
            if not self.family.has("rank") or self.run.training_metrics.is_file():
                return ENDING
            if (self.run.path / ".model.partial").is_dir():
                return PUBLISHING
            return EVALUATING if self.evaluating() else TRAINING
        if self.family.has(PREPARATION):
            return PREPARING
        return LOADING if self.family.has(AGENT, "rank") else STARTING

    def training(self) -> bool:
        """Whether the workers of this launch have come to their first step: rank 0 then writes `metrics.jsonl` anew.

        Before that it has removed what an earlier launch left half-written, so what is found later is this launch's own.
        """
        if not self._training:
            now = _identity(self.run.metrics)
            self._training = now is not None and now != self._metrics_before
        return self._training

    def half_written(self) -> list[str]:
        """Returns the names of checkpoints that are being written. Cheap: it lists one folder."""
        with contextlib.suppress(OSError):
            return [path.name for path in self.run.checkpoints.iterdir() if HALF_WRITTEN.fullmatch(path.name)]
        return []

    def evaluating(self) -> bool:
        """Whether the row of a step that is to be evaluated is there, and its evaluation not yet."""
        if not self.eval_steps:
            return False
        trained, evaluated = self.last_rows()
        return trained > 0 and trained % self.eval_steps == 0 and evaluated < trained

    def last_rows(self) -> tuple[int, int]:
        """Returns the steps of the last train and the last eval row."""
        now = _identity(self.run.metrics)
        if now != self._looked_at:
            self._looked_at, self._rows = now, last_rows(self.run.metrics)
        return self._rows


def last_rows(path: Path) -> tuple[int, int]:
    """Returns the steps of the last train and eval row at the end of a metrics file; 0 where there is none."""
    found = {"train": 0, "eval": 0}
    with contextlib.suppress(OSError), path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - TAIL_BYTES))
        for line in stream.read().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                row = json.loads(line)
                found[row["kind"]] = int(row["step"])
    return found["train"], found["eval"]


def _identity(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        facts = path.stat()
        return facts.st_ino, facts.st_mtime_ns
    return None
