"""A folder from elsewhere gives only plain files that really are in it: data, a model, a run. A link in it must not bring in others."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sft_play.errors import DataError

WILD = "*?["


def require_inside(files: Iterable[Path], root: Path) -> None:
    """Raises `DataError` for a file that a link leads out of `root`. Links into the hub's own cache, beside its snapshots, are its way.

    Data come from strangers as folders and archives, and a link of theirs (`rows.jsonl -> /home/me/.ssh/id_ed25519`) would be trained on.
    """
    base = root.resolve()
    folders: dict[Path, Path] = {}
    for file in files:
        if file.parent not in folders:
            folders[file.parent] = file.parent.resolve()
        folder = folders[file.parent]
        target = file.resolve() if file.is_symlink() else folder / file.name
        if not target.is_relative_to(base) and not _in_hub_cache(base, target):
            raise DataError(
                f"is a link to `{target}`, which is outside of the folder", place=str(file),
                hint="put a copy of that file in its place, if it belongs there (`cp -rL FOLDER COPY` copies a folder of links)",
            )  # fmt: skip


def require_plain(folder: Path) -> None:
    """Raises `DataError` for a file directly in a model's or a run's folder that is a pipe or a device, or that leads out of it.

    Each is read, hashed and perhaps copied to what is published: `LICENSE.txt -> /home/me/.ssh/id_ed25519`, `a.safetensors -> /dev/zero`.
    """
    files = [path for path in sorted(folder.iterdir()) if not path.is_dir()]
    for path in files:
        if path.exists() and not path.is_file():
            raise DataError(
                "is not a plain file", place=str(path), hint="a model is made of plain files: remove it, or fetch the model again"
            )
    require_inside(files, folder)


def root_of(pattern: Path) -> Path:
    """Returns the folder that a pattern begins with: its parts before the first with a wildcard."""
    parts = pattern.parts
    first = next((number for number, part in enumerate(parts) if any(mark in part for mark in WILD)), len(parts) - 1)
    return Path(*parts[:first])


def _in_hub_cache(base: Path, target: Path) -> bool:
    """Whether `base` is (in) a snapshot of the hub's cache, and `target` one of the same repository's blobs."""
    return any(
        folder.name == "snapshots" and target.parent == folder.parent / "blobs" for folder in (base, *base.parents)
    )  # fmt: skip
