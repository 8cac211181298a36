"""Folders in which something is made before it gets its name; those of processes that were killed meanwhile are removed by the next."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def made_aside(parent: Path, name: str) -> Iterator[Path]:
    """Yields a new folder inside `parent`, and removes what is left of it in the end, as of those that were abandoned there."""
    folder = new_folder(parent, name)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def new_folder(parent: Path, name: str) -> Path:
    """Returns a new folder inside `parent` whose name says which process on which machine makes it."""
    parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(parent)
    return Path(tempfile.mkdtemp(prefix=f".{name}.{socket.gethostname()}.{os.getpid()}.", dir=parent))


def remove_abandoned(folder: Path) -> None:
    """Removes what processes of this machine that live no more have left half-written."""
    for path in folder.glob(f".*.{socket.gethostname()}.*.*"):
        owner = path.name.rsplit(".", 2)[1]
        if owner.isdigit() and not _lives(int(owner)):
            shutil.rmtree(path, ignore_errors=True)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True
