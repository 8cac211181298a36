"""Prepares the training and validation rows once, before any process group, cached by the content of all that matters.

Nothing here imports a heavy package until something must be made: from the cache, preparation takes a fraction of a second.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sft_play.config.schema import Config, DataSource
from sft_play.data.contents import files_sha256
from sft_play.data.manifest import read_manifest
from sft_play.data.read import BUILTIN, files_of
from sft_play.errors import DataError
from sft_play.files import text_sha256
from sft_play.runs.folder import cache_folder
from sft_play.runs.prepared import HUB, PreparedSplit, ResolvedModel, preparation_code, settings_that_matter


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One split that is to be prepared."""

    name: str
    """`train` or `validation`."""
    sources: Sequence[DataSource]
    contents: Sequence[str | None]
    """A checksum of each source's files; `None` for what is not a file."""
    fraction: float
    """Share of the rows that belongs to the validation split, where both come from the same sources; else 0."""
    folder: Path
    """Where it is published, by the content of everything that matters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedData:
    """Both splits, with what their manifests say."""

    train: PreparedSplit
    validation: PreparedSplit | None
    manifests: Mapping[str, Mapping[str, Any]]
    """By split."""


def prepare_data(config: Config, model: ResolvedModel, tokenizer: Callable[[], Any]) -> PreparedData:
    """Returns the prepared splits, from the cache when nothing that matters has changed. Raises `DataError`.

    `tokenizer` is called only when something must be prepared: loading one means importing transformers, for seconds.
    """
    if not config.data.sources:
        raise DataError("no training data was given", hint="set `data.train_path`, or `data.sources`")
    parts = parts_of(config, model)
    manifests = {part.name: read_manifest(part.folder) for part in parts}
    if None in manifests.values():
        from sft_play.data.make import make_parts

        make_parts(config, tokenizer(), [part for part in parts if manifests[part.name] is None], parts[0])
        manifests = {part.name: read_manifest(part.folder) for part in parts}
    named = {part.name: _named(manifests[part.name], part) for part in parts}
    splits = [PreparedSplit.from_json(named[part.name]["split"]) for part in parts]
    return PreparedData(train=splits[0], validation=splits[1] if len(splits) > 1 else None, manifests=named)


def parts_of(config: Config, model: ResolvedModel) -> list[Part]:
    """Returns the splits that a configuration asks for, training first."""
    sources, validation = config.data.sources, config.data.validation
    fraction = 0.0 if isinstance(validation, list) else float(validation or 0.0)
    train = _part("train", sources, fraction, [*_common(config, model)])
    if isinstance(validation, list):
        # The training rows are in the key, since the manifest says how many rows of the validation data are among them.
        return [train, _part("validation", validation, 0.0, [*_common(config, model), train.folder.name])]
    if fraction:
        return [train, _part("validation", sources, fraction, [*_common(config, model)])]
    return [train]


def _common(config: Config, model: ResolvedModel) -> list[Any]:
    """What the rows of both splits depend on, beside their sources."""
    versions = [version(package) for package in ("transformers", "tokenizers")]
    return [settings_that_matter(config), model.tokenizer_fingerprint, preparation_code(), *versions]


def _part(name: str, sources: Sequence[DataSource], fraction: float, common: list[Any]) -> Part:
    key, contents = [*common, name, fraction], []
    for source in sources:
        files = files_of(source)
        content = files_sha256(files) if files else None
        contents.append(content)
        key += [asdict(replace(source, name=None, weight=None)), content]  # neither changes a row
        if source.path.startswith(BUILTIN):
            key.append(platform.python_version())  # the rows are the interpreter's own library
    digest = text_sha256(json.dumps(key, ensure_ascii=False, sort_keys=True))[:24]
    return Part(
        name=name, sources=sources, contents=contents, fraction=fraction, folder=cache_folder() / "data" / f"{name}-{digest}"
    )


def _named(manifest: dict[str, Any] | None, part: Part) -> dict[str, Any]:
    """Returns a manifest with this configuration's names and weights, which the cache does not go by."""
    assert manifest is not None, f"{part.folder} was published a moment ago"
    names = [{"name": source.name or source.path} for source in part.sources]
    commits = [source.get("hub_commit") for source in manifest["sources"]]
    contents = [content or (f"{HUB}{commit}" if commit else None) for content, commit in zip(part.contents, commits, strict=True)]
    facts = [
        fact | name | {"weight": source.weight, "content": content}
        for fact, name, source, content in zip(manifest["split"]["sources"], names, part.sources, contents, strict=True)
    ]
    sources = [found | name for found, name in zip(manifest["sources"], names, strict=True)]
    split = manifest["split"] | {"path": str(part.folder.resolve()), "sources": facts}
    return manifest | {"split": split, "sources": sources}
