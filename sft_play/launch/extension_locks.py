"""Locks of torch's extension builder that a killed process has left: everyone who loads that extension would wait for ever.

DeepSpeed's extensions are built, or looked at, under a file `lock` in the extension's folder at every start (`torch.utils.file_baton`). Who
has the lock keeps the file open, so one that no process has open is nobody's.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

LOCKS = ("lock", "*/lock", "*/*/lock")
PROCESSES = Path("/proc")


def remove_abandoned_locks(variables: Mapping[str, str]) -> list[Path]:
    """Removes the locks that no process of this machine has open, and returns them; nothing where `/proc` is not to be had."""
    found = {path.resolve() for pattern in LOCKS for path in extension_folder(variables).glob(pattern)}
    if not found or not PROCESSES.is_dir():
        return []
    abandoned = sorted(found - _open_files(found))
    for path in abandoned:
        path.unlink(missing_ok=True)
    return abandoned


def extension_folder(variables: Mapping[str, str]) -> Path:
    """Returns where torch builds extensions, by the workers' variables (`torch.utils.cpp_extension`)."""
    if own := variables.get("TORCH_EXTENSIONS_DIR"):
        return Path(own)
    cache = variables.get("XDG_CACHE_HOME") or Path(variables.get("HOME") or Path.home()) / ".cache"
    return Path(cache) / "torch_extensions"


def _open_files(wanted: set[Path]) -> set[Path]:
    """Returns those of `wanted` that some process has open, as far as we may look."""
    found: set[Path] = set()
    for process in PROCESSES.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for descriptor in os.scandir(process / "fd"):
                with contextlib.suppress(OSError):
                    target = Path(descriptor.path).readlink()
                    if target in wanted:
                        found.add(target)
    return found
