"""One launch of the run under test by its own command, and the kill -9 that ends it at a chosen moment."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sft_play.runs.folder import RunFolder
from sft_play.soak.processes import (
    AGENT,
    EVALUATING,
    LAUNCHER,
    MARK,
    PREPARATION,
    PREPARING,
    PUBLISHING,
    SAVING,
    TRAINING,
    Family,
    Watcher,
)

LOOK_SECONDS, WAIT_SECONDS = 0.25, 0.002
"""How often processes are looked at, which costs some milliseconds, and files, which costs next to nothing."""
NOTICE_SECONDS = 30.0
"""Within which everything of a launch must have ended after a kill (contract row B9)."""
LAUNCH_SECONDS = 900.0
"""No launch of a soak may take longer than this."""
EVERYTHING = "everything"
TARGETS = {"rank": 45, LAUNCHER: 25, AGENT: 15, EVERYTHING: 15}
"""Weights of what is killed, where it lives; the preparation, while it lives, is killed every second time."""


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
    lasts: Mapping[str, float]
    """Phase -> seconds that it took, of a launch without an aim."""
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
    eval_steps: int | None
    log: Path

    def to_its_end(self) -> Ended:
        """Runs undisturbed."""
        return self.with_kill(None, random.Random(0))

    def with_kill(self, aim: Aim | None, chance: random.Random) -> Ended:
        """Runs until the moment of `aim`, kills, and waits until nothing is left."""
        with self._started() as (process, family):
            watcher = Watcher(run=self.run, family=family, eval_steps=self.eval_steps)
            shot = self._wait(process, watcher, aim, chance)
            over = time.monotonic()
            if shot and shot.target == PREPARATION and _goes_on(family):
                shot = self._wait(process, watcher, None, chance)
            left = family.wait_until_gone(NOTICE_SECONDS) if shot else family.left()
            over_seconds = time.monotonic() - over
            code = None if shot and shot.target in (LAUNCHER, EVERYTHING) else process.poll()
            described = "" if not left else ", ".join(f"{family.roles.get(p, 'unknown')} {p.pid}" for p in left)
        return Ended(
            code=code, shot=shot, seen=watcher.seen, lasts=watcher.lasts, over_seconds=over_seconds, left=described, output=_tail(self.log)
        )  # fmt: skip

    @contextlib.contextmanager
    def _started(self) -> Iterator[tuple[subprocess.Popen[bytes], Family]]:
        mark = uuid.uuid4().hex
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "sft_play", *self.words],
                env={**self.environment, MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        family = Family(launcher=process.pid, mark=mark)
        try:
            yield process, family
        finally:
            family.end()
            process.wait(30)

    def _wait(self, process: subprocess.Popen[bytes], watcher: Watcher, aim: Aim | None, chance: random.Random) -> Shot | None:
        """Waits for the moment and kills; returns `None` when the launch ended first, or does not end at all."""
        looked, moment = 0.0, aim.seconds if aim and aim.kind == "time" else None
        while process.poll() is None:
            now = time.monotonic() - watcher.started
            if now - looked > LOOK_SECONDS:
                looked = now
                watcher.family.look()
                watcher.phase()
            if aim is None:
                watcher.measure()
            if now > LAUNCH_SECONDS:
                return None
            if aim and moment is None and aimed_at(watcher, aim.kind):
                moment = now + aim.seconds
            if aim and moment is not None and now >= moment:
                return _shoot(watcher, aim, chance)
            time.sleep(WAIT_SECONDS)
        return None


def aimed_at(watcher: Watcher, phase: str) -> bool:
    """Whether the run has come to a phase that can be waited for. Cheap where the phase is short."""
    if phase == PREPARING:
        return watcher.family.has(PREPARATION)
    if not watcher.training():
        return False
    if phase == TRAINING:
        return True
    if phase == SAVING:
        return bool(watcher.half_written())
    if phase == EVALUATING:
        return watcher.evaluating()
    assert phase == PUBLISHING, phase
    return (watcher.run.path / ".model.partial").is_dir()


def _shoot(watcher: Watcher, aim: Aim, chance: random.Random) -> Shot | None:
    """Kills one process, or all; the phase is what was seen right before, and a save counts only if it is unfinished right after."""
    family = watcher.family
    if aim.kind not in (SAVING, PUBLISHING):  # looking takes a part of so short a phase, and all processes are known by then
        family.look()
    living = family.living()
    target = choose_target(list(living.values()), chance)
    if target is None:
        return None
    phase = watcher.phase()
    order: dict[str, int] = {LAUNCHER: 0, AGENT: 1}
    chosen = [p for p, role in living.items() if target in (role, EVERYTHING)]
    family.kill(sorted(chosen, key=lambda process: order.get(living[process], 2)))
    seconds = time.monotonic() - watcher.started
    after = watcher.phase()
    if (phase == SAVING) != (after == SAVING):
        phase = after
    return Shot(aim=aim, phase=phase, target=target, seconds=seconds)


def _goes_on(family: Family) -> bool:
    """Whether the launcher starts workers after its preparation was killed: then that had done its work and was only leaving."""
    deadline = time.monotonic() + NOTICE_SECONDS
    while time.monotonic() < deadline:
        family.look()
        if not family.has(LAUNCHER) or family.has(AGENT):
            return family.has(LAUNCHER)
        time.sleep(LOOK_SECONDS)
    return False


def choose_target(roles: Sequence[str], chance: random.Random) -> str | None:
    """Returns what is killed, of what lives; `None` where nothing does."""
    if LAUNCHER not in roles:
        return None
    if PREPARATION in roles and chance.random() < 0.5:
        return PREPARATION
    ranks = sorted(role for role in roles if role.startswith("rank "))
    possible = [role for role in (*ranks, LAUNCHER, AGENT) if role in roles]
    possible += [EVERYTHING] if len(roles) > 1 else []
    weights = [TARGETS["rank"] / len(ranks) if role in ranks else TARGETS[role] for role in possible]
    return chance.choices(possible, weights)[0]


def environment(runs: Path, cache: Path | None, temporary: Path) -> dict[str, str]:
    """Returns the variables of every launch: its own runs, temporary files where they can be counted, no outer make's."""
    kept = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    temporary.mkdir(parents=True, exist_ok=True)
    own = {"RUNS_DIR": str(runs), "TMPDIR": str(temporary)}
    return kept | own | ({"SFT_PLAY_CACHE": str(cache)} if cache else {})


def _tail(path: Path, limit: int = 3000) -> str:
    return path.read_text(encoding="utf-8", errors="replace")[-limit:]
