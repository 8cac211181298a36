"""The manifest of a checkpoint: every file with size and checksum, so that a reader can check before it trusts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sft_play.files import file_sha256, read_json, sync_folder, write_json

NAME = "manifest.json"


def write_manifest(folder: Path) -> None:
    """Syncs every file below `folder` to the disk and lists them in `manifest.json`."""
    files = {}
    for path in _files(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    write_json(folder / NAME, {"files": files})
    for inner in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        sync_folder(inner)


def verify(folder: Path, *, needed: Callable[[str], bool] | None = None) -> str | None:
    """Returns why a checkpoint cannot be trusted, or `None` when every file is there and unchanged.

    `needed` says by its name (relative to `folder`) whether a file is looked at; without it every file is.
    """
    if not folder.is_dir():
        return "it is not there"
    try:
        manifest: dict[str, Any] = read_json(folder / NAME)
        listed = manifest["files"].items()
    except FileNotFoundError:
        return "it has no manifest: it was never completed"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest cannot be read: {error}"
    for name, facts in listed:
        if needed and not needed(name):
            continue
        path = folder / name
        try:
            size = path.stat().st_size
            if size != facts["bytes"]:
                return f"`{name}` has {size} bytes, not {facts['bytes']}"
            if file_sha256(path) != facts["sha256"]:
                return f"`{name}` has another checksum than the manifest says"
        except FileNotFoundError:
            return f"`{name}` is missing"
        except (OSError, KeyError, TypeError) as error:
            return f"`{name}` cannot be checked: {error}"
    return None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != NAME)
