"""One launch of the run under test by its own command: its processes and phases as seen from outside, and the kill -9 at a chosen moment."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from sft_play.files import read_object
from sft_play.runs.folder import RunFolder

MARK = "SOAK_LAUNCH"
"""Variable with the id of a launch, which all of its processes inherit."""
LAUNCHER, AGENT, PREPARATION, OTHER, EVERYTHING = "launcher", "agent", "preparation", "helper", "everything"
STARTING, PREPARING, LOADING, TRAINING = "starting", "preparation", "loading", "training"
EVALUATING, SAVING, PUBLISHING, LEAVING = "evaluating", "saving", "publishing", "leaving"
PHASES = (STARTING, PREPARING, LOADING, TRAINING, EVALUATING, SAVING, PUBLISHING, LEAVING)
"""In the order of a run: those that rank 0 writes to `phase.json`; before it does, `starting` (the launcher alone) and `preparation`;
`publishing`: the final `model/` is written."""
TARGETS = {"rank": 45, LAUNCHER: 25, AGENT: 15, EVERYTHING: 15}
"""Weights of what is killed, where it lives; the preparation, while it lives, is killed every second time."""
LOOK_SECONDS, WAIT_SECONDS = 0.25, 0.002
"""How often new processes are looked for, and how often files are looked at."""
NOTICE_SECONDS = 30.0
"""Within which everything of a launch must have ended after a kill (contract row B9)."""
LAUNCH_SECONDS = 900.0
"""No launch of a soak may take longer than this."""


@dataclass(kw_only=True, slots=True)
class Family:
    """The living processes of a launch by role, as of the last `look`."""

    launcher: int
    mark: str
    roles: dict[psutil.Process, str] = field(default_factory=dict)
    """Every process that was ever seen, with its role."""

    def look(self) -> None:
        """Take note of new processes."""
        with contextlib.suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.launcher)
            for process in [first, *first.children(recursive=True)]:
                if self.roles.get(process, OTHER) == OTHER:
                    with contextlib.suppress(psutil.Error, OSError):
                        self.roles[process] = role_of(process, self.launcher)

    def living(self) -> dict[psutil.Process, str]:
        """Return those that run; a zombie does not."""
        return {process: role for process, role in self.roles.items() if is_alive(process)}

    def has(self, *roles: str) -> bool:
        """Whether a process of one of these roles (or of any rank, for `rank`) lives."""
        return any(role.partition(" ")[0] in roles for role in self.living().values())

    def left(self) -> list[psutil.Process]:
        """Return every living process of this launch, whatever parent or session it has: it looks at all processes there are."""
        found = set(self.living())
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process not in found and process.environ().get(MARK) == self.mark and is_alive(process):
                    found.add(process)
        return sorted(found, key=lambda process: process.pid)

    def wait_until_gone(self, limit: float) -> list[psutil.Process]:
        """Wait until none is left; return what still lives after `limit` seconds."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            if not self.living() and not self.left():
                return []
            time.sleep(0.1)
        return self.left()

    def end(self) -> None:
        """Kill everything that is left."""
        for _ in range(3):  # one may be forking
            if left := self.left():
                kill(left)
                psutil.wait_procs(left, timeout=10)


def kill(processes: Iterable[psutil.Process]) -> None:
    """Send SIGKILL to processes, the first of them first."""
    for process in processes:
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def role_of(process: psutil.Process, launcher: int) -> str:
    """Return what a process is in its launch, from its command line and rank."""
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


@dataclass(kw_only=True, slots=True)
class Watcher:
    """What a launch is doing, from its processes and from the phase that rank 0 writes."""

    run: RunFolder
    family: Family
    started: float = field(default_factory=time.monotonic)
    seen: dict[str, float] = field(default_factory=dict)
    """Phase -> seconds after the launch when it was first seen."""
    _written: str = ""
    """The last phase that rank 0 wrote."""

    def phase(self) -> str:
        """Return one of `PHASES`. `family.look()` must be recent."""
        found = self._phase()
        self.seen.setdefault(found, time.monotonic() - self.started)
        return found

    def _phase(self) -> str:
        if not self.training():
            return PREPARING if self.family.has(PREPARATION) else LOADING if self.family.has(AGENT, "rank") else STARTING
        if any(self.run.checkpoints.glob(".step-*.partial")):  # a thread may write it while training continues
            return SAVING
        if self.run.training_metrics.is_file() or not self.family.has("rank"):
            return LEAVING
        return PUBLISHING if (self.run.path / ".model.partial").is_dir() else self._written

    def training(self) -> bool:
        """Whether the workers of this launch have come to their first step."""
        self._written = read_object(self.run.phase).get("phase", self._written)
        return self._written not in ("", LOADING)


@dataclass(frozen=True, kw_only=True, slots=True)
class Aim:
    """When to kill."""

    kind: str
    """`time`, or a phase that is waited for."""
    seconds: float
    """After the launch, or after the phase was first seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shot:
    """What was killed when."""

    aim: Aim
    phase: str
    target: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a launch ended."""

    code: int | None
    """The launcher's exit code; `None` where it was killed itself, or had not ended after `LAUNCH_SECONDS`."""
    shot: Shot | None
    """`None` where the launch ended before its moment came."""
    seen: Mapping[str, float]
    """Phase -> seconds after the launch when it began."""
    seconds: float
    """Of the whole launch."""
    over_seconds: float
    left: str
    """Processes that lived on too long, in words; empty when there were none."""
    output: str
    """The end of what the launcher said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What is started, and where."""

    words: Sequence[str]
    """After `python -m sft_play`."""
    environment: Mapping[str, str]
    run: RunFolder
    log: Path

    def go(self, aim: Aim | None = None, chance: random.Random | None = None) -> Ended:
        """Run until the moment of `aim`, kill, and wait until nothing is left; without an aim, run undisturbed."""
        with self._started() as (process, family):
            watcher = Watcher(run=self.run, family=family)
            shot = _wait(process, watcher, aim, chance or random.Random(0))
            over = time.monotonic()
            if shot and shot.target == PREPARATION and _continues(family):
                _wait(process, watcher, None, random.Random(0))
            left = family.wait_until_gone(NOTICE_SECONDS) if shot else family.left()
            now = time.monotonic()
            return Ended(
                code=None if shot and shot.target in (LAUNCHER, EVERYTHING) else process.poll(),
                shot=shot,
                seen=watcher.seen,
                seconds=now - watcher.started,
                over_seconds=now - over,
                left=", ".join(f"{family.roles.get(p, 'unknown')} {p.pid}" for p in left),
                output=self.log.read_text(encoding="utf-8", errors="replace")[-3000:],
            )

    @contextlib.contextmanager
    def _started(self) -> Iterator[tuple[subprocess.Popen[bytes], Family]]:
        mark = uuid.uuid4().hex
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.run.phase.unlink(missing_ok=True)  # an earlier launch's
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "sft_play", *self.words], env={**self.environment, MARK: mark}, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        family = Family(launcher=process.pid, mark=mark)
        try:
            yield process, family
        finally:
            family.end()
            process.wait(30)


def _wait(process: subprocess.Popen[bytes], watcher: Watcher, aim: Aim | None, chance: random.Random) -> Shot | None:
    """Wait for the moment and kill; return `None` when the launch ended first, or does not end at all."""
    looked, phase, moment = 0.0, STARTING, aim.seconds if aim and aim.kind == "time" else None
    while process.poll() is None:
        now = time.monotonic() - watcher.started
        if now > LAUNCH_SECONDS:
            return None
        if now - looked > LOOK_SECONDS:
            looked = now
            watcher.family.look()
            phase = watcher.phase()
        elif watcher.training():
            phase = watcher.phase()
        if aim and moment is None and (phase == aim.kind or (aim.kind == TRAINING and watcher.training())):
            moment = now + aim.seconds
        if aim and moment is not None and now >= moment:
            return _shoot(watcher, aim, chance)
        time.sleep(WAIT_SECONDS)
    return None


def _shoot(watcher: Watcher, aim: Aim, chance: random.Random) -> Shot | None:
    """Kill one process, or all; the phase is what was seen right before, and a save counts only if it is unfinished right after."""
    family = watcher.family
    if aim.kind not in (SAVING, PUBLISHING):  # looking takes a part of so short a phase, and all processes are known by then
        family.look()
    living = family.living()
    target = choose_target(list(living.values()), chance)
    if target is None:
        return None
    phase = watcher.phase()
    order = {LAUNCHER: 0, AGENT: 1}
    kill(sorted((p for p, role in living.items() if target in (role, EVERYTHING)), key=lambda p: order.get(living[p], 2)))
    seconds, after = time.monotonic() - watcher.started, watcher.phase()
    return Shot(aim=aim, phase=after if SAVING in (phase, after) else phase, target=target, seconds=seconds)


def _continues(family: Family) -> bool:
    """Whether the launcher starts workers after its preparation was killed: then that had done its work and was only leaving."""
    deadline = time.monotonic() + NOTICE_SECONDS
    while time.monotonic() < deadline:
        family.look()
        if not family.has(LAUNCHER) or family.has(AGENT):
            return family.has(LAUNCHER)
        time.sleep(LOOK_SECONDS)
    return False


def choose_target(roles: Sequence[str], chance: random.Random) -> str | None:
    """Return what is killed, of what lives; `None` where nothing does."""
    if LAUNCHER not in roles:
        return None
    if PREPARATION in roles and chance.random() < 0.5:
        return PREPARATION
    ranks = sorted(role for role in roles if role.startswith("rank "))
    possible = [role for role in (*ranks, LAUNCHER, AGENT) if role in roles] + ([EVERYTHING] if len(roles) > 1 else [])
    weights = [TARGETS["rank"] / len(ranks) if role in ranks else TARGETS[role] for role in possible]
    return chance.choices(possible, weights)[0]
