"""What a run is doing, seen from outside: from its processes and from what it writes anyway."""

from __future__ import annotations

import contextlib
import json
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from sft_play.runs.folder import RunFolder
from sft_play.soak.processes import AGENT, PREPARATION, Family

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
