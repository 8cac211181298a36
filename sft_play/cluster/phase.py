"""What a command that controls a run does before any launcher is there to be asked: `cluster-status` shows it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from sft_play.cluster.task import controller, lock_file
from sft_play.errors import UserError
from sft_play.files import read_json, write_json
from sft_play.runs.folder import RunFolder

Phase = Literal["preparing", "sending"]


def phase_file(run: RunFolder) -> Path:
    """Returns where it is noted: beside the lock, since the run may have no folder yet."""
    return lock_file(run).with_suffix(".json")


@contextlib.contextmanager
def noting(run: RunFolder, phase: Phase) -> Iterator[None]:
    """Notes what is done while the body runs. A full disk loses the note, and ends nothing."""
    path = phase_file(run)
    with contextlib.suppress(OSError):
        write_json(path, {"run": str(run.path.absolute()), "phase": phase})
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def noted() -> list[tuple[RunFolder, str]]:
    """Returns the runs of this machine whose command is at one of these now."""
    found = []
    for path in sorted(lock_file(RunFolder(Path())).parent.glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, UserError):
            facts = read_json(path)
            run = RunFolder(Path(facts["run"]))
            if phase_file(run) == path and controller(run) is not None:  # one that was killed leaves its note
                found.append((run, str(facts["phase"])))
    return found
