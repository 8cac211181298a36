"""Remembers what preparation found for a configuration, so that `make plan` knows rows and steps without torch."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
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
    folders = [prepared.model.path, *(split.path for split in (prepared.train, prepared.validation) if split)]
    return prepared if all(Path(folder).is_dir() for folder in folders) else None


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
        # A model folder that was written again may have another tokenizer; a hub id has no files here.
        "model_files": _stats(_folder_files(config.model.name)) + _stats(_folder_files(config.model.tokenizer)),
        "seed": config.train.seed if config.model.init == "random" else None,  # of the weights
        "python": platform.python_version(),
    }
    return cache_folder() / "prepared" / f"{text_sha256(json.dumps(key, sort_keys=True))[:24]}.json"


def _folder_files(name: str | None) -> Iterable[Path]:
    """Returns the files of a model's or tokenizer's folder; nothing for a hub id, or where none is named."""
    return Path(name).expanduser().glob("*") if name else ()


def _state(source: DataSource) -> list[list[object]]:
    path = Path(source.path).expanduser()
    if any(mark in source.path for mark in "*?["):
        files = list(Path(path.anchor).glob(str(path.relative_to(path.anchor))))  # an empty anchor is the working folder
    else:
        files = list(path.rglob("*")) if path.is_dir() else [path]
    return _stats(files)


def _stats(files: Iterable[Path]) -> list[list[object]]:
    found = [(str(path.resolve()), path.stat()) for path in sorted(files) if path.is_file()]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in found]
