"""What ranks keep that do not see rank 0's folder: files in `random/step-NNNNNN/` of their own run folder, each rank's with its manifest.

A manifest of each rank, since several ranks of a machine write there, and a cluster's launcher brings those of all machines together.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sft_play.files import read_json
from sft_play.runs.manifest import Facts, damage, write_part


def seal_own(folder: Path, rank: int, files: Mapping[str, Facts]) -> None:
    """Writes the manifest of a rank's own files, once they are on the disk and have been compared. Raises `OSError`."""
    write_part(folder, rank, files)


def kept_apart(trainer: Any, checkpoint: Path, name: str) -> Path | None:
    """Returns this rank's own file `name` at the step of a checkpoint; `None` where there is none, or a damaged one, which is said."""
    folder: Path = trainer.run.random_states(int(checkpoint.name.rpartition("-")[2]))
    if (folder / name).exists() and _intact(folder, int(trainer.args.process_index), name):
        return folder / name
    return None


@functools.cache
def _intact(folder: Path, rank: int, name: str) -> bool:
    """Reads the file once in a process, and says once what is wrong with it."""
    problem = _problem(folder, rank, name)
    if problem is not None:
        print(f"note: {folder}: {problem}; it counts as absent", file=sys.stderr, flush=True)
    return problem is None


def _problem(folder: Path, rank: int, name: str) -> str | None:
    path = folder / f".manifest-rank{rank}.json"
    try:
        facts: Facts = read_json(path)["files"][name]
        return damage(folder, {name: facts})
    except FileNotFoundError:
        return f"`{name}` stands in no manifest: it was never completed"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"`{path.name}` cannot be read: {error}"
