"""Remembers what preparation found for a configuration, so that `make plan` knows rows and steps without torch."""

from __future__ import annotations

import functools
import itertools
import json
import platform
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sft_play.config.schema import Config, DataSource
from sft_play.errors import CheckpointError
from sft_play.files import file_sha256, text_sha256
from sft_play.runs.folder import cache_folder
from sft_play.runs.prepared import Prepared

MOST_FILES = 50_000
"""Of a source: their states are read within a second or two. A plan must come at once, and a folder may be `/`."""
NO_MATTER = ("sources", "validation", "train_path", "val_path", "num_proc", "mix_by", "exhausted", "sync")
"""Keys of `data` that change no row, or are looked at source by source."""


def lookup(config: Config) -> Prepared | None:
    """Returns what is known for this model and data, or `None` when they were never prepared or have changed since."""
    path = _path(config)
    if path is None or not path.is_file():
        return None
    try:
        prepared = Prepared.load(path)
    except CheckpointError:  # written by another version: as good as never
        return None
    folders = [prepared.model.path, *(split.path for split in (prepared.train, prepared.validation) if split)]
    return prepared if all(Path(folder).is_dir() for folder in folders) else None


def remember(config: Config, prepared: Prepared) -> None:
    """Keeps `prepared` for the next `lookup` of the same model and data."""
    path = _path(config)
    if path is not None:
        prepared.save(path)


def settings_that_matter(config: Config) -> dict[str, Any]:
    """Returns every setting, beside model and sources, that changes a prepared row."""
    data = {name: value for name, value in asdict(config.data).items() if name not in NO_MATTER}
    template = Path(config.data.chat_template or "").expanduser()
    sources = sources_of(config)
    return {
        "data": data,
        "template": file_sha256(template) if template.is_file() else None,
        "max_seq_len": config.model.max_seq_len,
        "task": config.tuning.task,
        "loss_on": config.train.loss_on,
        "seed": config.train.seed if any(source.rows is not None for source in sources) else None,
    }


@functools.cache
def preparation_code() -> str:
    """Returns a sha256 over the source of all that makes rows: another version of it is another cache entry."""
    package = Path(__file__).resolve().parent.parent
    files = [*sorted((package / "data").glob("*.py")), package / "model" / "tokenizer.py", package / "config" / "filters.py"]
    return text_sha256("\n".join(file_sha256(path) for path in files))


def sources_of(config: Config) -> list[DataSource]:
    """Returns the sources of training and validation."""
    return [*config.data.sources, *(config.data.validation if isinstance(config.data.validation, list) else [])]


def _path(config: Config) -> Path | None:
    """Returns where it is remembered; `None` for data of more files than can be looked at in no time."""
    validation = config.data.validation
    files = [_state(source) for source in sources_of(config)]
    if any(state is None for state in files):
        return None
    key = {
        "model": asdict(config.model),
        "settings": settings_that_matter(config),
        "sources": [asdict(source) for source in config.data.sources],
        "validation": [asdict(source) for source in validation] if isinstance(validation, list) else validation,
        "files": files,
        # A model folder that was written again may have another tokenizer; a hub id has no files here.
        "model_files": [_folder_state(name) for name in (config.model.name, config.model.tokenizer) if name],
        "weights_seed": config.train.seed if config.model.init == "random" else None,
        "python": platform.python_version(),
        "code": preparation_code(),
    }
    return cache_folder() / "prepared" / f"{text_sha256(json.dumps(key, sort_keys=True))[:24]}.json"


def _folder_state(name: str) -> list[list[object]]:
    return _stats(Path(name).expanduser().glob("*"))


def _state(source: DataSource) -> list[list[object]] | None:
    path = Path(source.path).expanduser()
    found: Iterable[Path]
    if any(mark in source.path for mark in "*?["):
        found = Path(path.anchor).glob(str(path.relative_to(path.anchor)))  # an empty anchor is the working folder
    else:
        found = path.rglob("*") if path.is_dir() else [path]
    files = list(itertools.islice(found, MOST_FILES + 1))
    return _stats(files) if len(files) <= MOST_FILES else None


def _stats(files: Iterable[Path]) -> list[list[object]]:
    found = [(str(path.resolve()), path.stat()) for path in sorted(files) if path.is_file()]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in found]
