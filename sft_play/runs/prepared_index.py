"""Remembers what preparation found for a configuration, so that `make plan` knows rows and steps without torch."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path

from sft_play.config.schema import Config, DataSource
from sft_play.files import text_sha256
from sft_play.runs.folder import cache_folder
from sft_play.runs.prepared import Prepared


def lookup(config: Config) -> Prepared | None:
    """Returns what is known for this model and data, or `None` when they were never prepared or have changed since."""
    path = _path(config)
    if not path.is_file():
        return None
    try:
        prepared = Prepared.load(path)
    except (OSError, ValueError, TypeError, KeyError):  # written by another version: as good as never
        return None
    splits = [split for split in (prepared.train, prepared.validation) if split]
    return prepared if all(Path(split.path).is_dir() for split in splits) else None


def remember(config: Config, prepared: Prepared) -> None:
    """Keeps `prepared` for the next `lookup` of the same model and data."""
    prepared.save(_path(config))


def _path(config: Config) -> Path:
    data = config.data
    sources = [*data.sources, *(data.validation if isinstance(data.validation, list) else [])]
    key = {
        "model": asdict(config.model),
        "data": asdict(data),
        "files": [_state(source) for source in sources],
        "python": platform.python_version(),
    }
    return cache_folder() / "prepared" / f"{text_sha256(json.dumps(key, sort_keys=True))[:24]}.json"


def _state(source: DataSource) -> list[list[object]]:
    path = Path(source.path).expanduser()
    if any(mark in source.path for mark in "*?["):
        files = sorted(Path().glob(source.path)) if not path.is_absolute() else sorted(path.parent.glob(path.name))
    elif path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file())
    else:
        files = [path] if path.is_file() else []
    return [[str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in files]
