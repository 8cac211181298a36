"""Whose code may run: a model's or a metric's, only where this user says so, never because a run's folder does.

A run can be a copy of somebody else's, and its `config.json` says what its author wished. So consent comes from the words of this
command and from the user's own YAML; it is kept outside of all runs, for exactly the code that it was given for.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Literal

from sft_play.files import text_sha256, write_text
from sft_play.runs.folder import cache_folder

What = Literal["model", "metrics"]
VARIABLE = "SFT_PLAY_CONSENT"
"""Tells the processes that a command starts what its user said; a command forgets what its own environment says."""


def forget() -> None:
    """Forgets what the environment says: it may be that of an image or a profile, and would hold for every model."""
    os.environ.pop(VARIABLE, None)


def give(*what: What) -> None:
    """Notes for this command's processes what code the user lets run."""
    os.environ[VARIABLE] = ",".join(sorted({*what, *_said()}))


def may_run(code: Path | str, what: What) -> bool:
    """Whether the code of a folder or file (or a metric of the hub, by its name) may run: the user says so now, or said so before of the same code.

    What is said now never holds for code in a run's folder: that must be the code of a base that was consented to.
    """
    mark = cache_folder() / "consent" / _digest(code)
    if what in _said() and not (isinstance(code, Path) and in_run(code)):
        if not mark.is_file():
            write_text(mark, f"{code}\n")
        return True
    return mark.is_file()


def in_run(path: Path) -> bool:
    """Whether a file or folder is (in) the folder of a run, a checkpoint or a trained model: these have a stamp."""
    path = path.resolve()
    return any((folder / "stamp.json").exists() for folder in (path, *path.parents))


def _said() -> set[str]:
    return set(filter(None, os.environ.get(VARIABLE, "").split(",")))


def _digest(code: Path | str) -> str:
    """Returns a hash of the names and contents of all Python files of a folder, of one file's, or of a name."""
    if isinstance(code, str):
        return text_sha256(f"name {code}")
    files = sorted(code.rglob("*.py")) if code.is_dir() else [code]
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(code).as_posix() if code.is_dir() else path.name} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
