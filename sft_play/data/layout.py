"""Which files of a folder are which split, by the hub's own rules: what its README says, else the names of files and
folders.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Any

from sft_play.config.reader import names_of
from sft_play.config.schema import DataSource
from sft_play.config.yaml_files import parse_yaml
from sft_play.data.documents import DOCUMENTS
from sft_play.data.readers import ASIDE, ENDINGS, TABLES
from sft_play.data.streams import kind
from sft_play.errors import DataError, UserError
from sft_play.runs.folder import require_inside, root_of
from sft_play.text import plural

KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Split -> the words in names that mean it, as `datasets.data_files` has them."""
WORDS = {
    split: re.compile(rf"(?:^|[-._ 0-9])(?:{'|'.join(words)})(?:[-._ 0-9]|$)", re.IGNORECASE)
    for split, words in KEYWORDS.items()
}
SHARD = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}")
NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})")
ABOUT_DATA = frozenset(
    {
        *("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"),
        *("package.json", "package-lock.json", "tsconfig.json", "composer.json"),
    }
)
"""Files that describe data sets and programs, and hold no row."""
INSTALLED = frozenset({"node_modules", "site-packages", "__pycache__", "__MACOSX"})
"""Folders of what others wrote, which a folder of documents does not mean."""
NO_SPLIT = ""
"""Stands for files that belong to no split, where others do."""
README_KEYS = frozenset(
    {"config_name", "data_files", "data_dir", "default", "description", "version", "dataset_size", "features"}
)
NAME_FILES = "name the files in `path`: `FOLDER/*.parquet`"
FRONT_MATTER = re.compile(r"\A\ufeff?---\r?\n(.*?)\r?\n---", re.DOTALL)

Splits = dict[str, list[Path]]


def splits_of_folder(folder: Path, source: DataSource) -> Splits:
    """Return split -> files: the tables of a folder at any depth, or its documents where it has no table. Raise
    `DataError`.

    All files are `train` where no name means a split.
    """
    files = visible_files(folder)
    named = _named_in_readme(folder, files, source)
    if named is not None:
        require_inside((file for rows in named.values() for file in rows), folder)
        return named
    if source.config is not None:
        raise DataError(
            f"`config: {source.config}` is given, but no README with `configs` is in the folder", place=source.path
        )
    own = [path for path in files if INSTALLED.isdisjoint(path.relative_to(folder).parts)]
    for endings in (TABLES, DOCUMENTS):
        rows = [path for path in own if kind(path) in endings and path.name not in ABOUT_DATA]
        if rows:
            require_inside(rows, folder)
            return by_names(rows, folder, documents=endings is DOCUMENTS)
    hint = f"it contains `{files[0].name}`; plain text is read from files whose names end in `.txt`" if files else None
    raise DataError(f"the folder contains no {ENDINGS} file", place=source.path, hint=hint)


def splits_of_glob(files: Sequence[Path], pattern: Path, source: DataSource) -> Splits:
    """Return split -> files that a pattern matched; all are used unless their names mean several splits."""
    require_inside(files, root_of(pattern))
    splits = by_names(files, root_of(pattern), documents=all(kind(path) in DOCUMENTS for path in files))
    alone = source.split is None and len(splits.keys() - {NO_SPLIT}) < 2
    return {"train": list(files)} if alone else splits


def choose_split(splits: Splits, source: DataSource) -> list[Path]:
    """Return the files of `split`, or of the only split if it may be training. Raise `DataError`."""
    names = [name for name in splits if name != NO_SPLIT]
    if source.split is not None and source.split in names:
        return splits[source.split]
    shown = ", ".join(f"`{name}` ({plural(len(splits[name]), 'file')})" for name in names)
    hint = (
        f"`sources: [{{path: {source.path}, split: {names[0]}}}]` instead of `train_path`; a glob takes the files that"
        " it names"
    )
    if source.split is not None:
        hint = "only splits of hub datasets have slices; `rows: 500` takes so many" if "[" in source.split else hint
        raise DataError(f"there is no split `{source.split}`: {shown}", place=source.path, hint=hint)
    if len(names) > 1:
        raise DataError(f"there are several splits: {shown}", place=source.path, hint=hint)
    if any(WORDS[held_out].search(names[0].replace("_", "-")) for held_out in ("validation", "test")):
        raise DataError(f"the only split is {shown}, which is used only if you name it", place=source.path, hint=hint)
    return splits[names[0]]


def missing_shards(files: Iterable[Path]) -> list[str]:
    """Return a note for each table of which only some shards are there, as after an interrupted download."""
    shards: dict[tuple[str, str], set[str]] = {}
    for file in files:
        if shard := NUMBERED.match(str(file)):
            shards.setdefault((shard[1], shard[3]), set()).add(shard[2])
    return [
        f"{name}: {len(numbers)} of {int(of)} shards"
        for (name, of), numbers in shards.items()
        if len(numbers) < int(of)
    ]


def visible_files(folder: Path) -> list[Path]:
    """Return the files of a folder at any depth, without hidden ones; also links that lead to none."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if (path.is_file() or path.is_symlink())
        and not any(part.startswith((".", "~$")) for part in path.relative_to(folder).parts)
    ]


def by_names(files: Iterable[Path], root: Path, *, documents: bool) -> Splits:
    """Return split -> files, by the names of files and folders below `root`. A file whose name means two is in both, as
    on the hub.
    """
    splits: Splits = {}
    parts_of = {file: file.relative_to(root).parts if root != Path() else file.parts for file in files}
    for file, parts in parts_of.items():
        for split in _documents_split(parts) if documents else _splits_of(parts, root.name):
            splits.setdefault(split, []).append(file)
    if documents and "train" not in splits:  # chapters about tests are no split
        return {"train": sorted(parts_of)}
    if set(splits) == {NO_SPLIT}:
        for file in splits.pop(NO_SPLIT):
            names = (*parts_of[file][:-1], file.name.partition(".")[0])
            aside = next((name.lower() for name in names if ASIDE.fullmatch(name)), "train")
            splits.setdefault(aside, []).append(file)
    order = [*KEYWORDS, *sorted(splits.keys() - KEYWORDS.keys() - {NO_SPLIT}), NO_SPLIT]
    return {split: splits[split] for split in order if split in splits}


def _splits_of(parts: Sequence[str], root: str) -> list[str]:
    shard = SHARD.match(parts[-1])
    if shard and (parts[-2] if len(parts) > 1 else root) == "data":
        return [shard[1]]
    for names in (parts[:-1], parts[-1:]):
        if splits := [split for split, words in WORDS.items() if any(map(words.search, names))]:
            return splits
    return [NO_SPLIT]


def _documents_split(parts: Sequence[str]) -> list[str]:
    """Return the split of a document: only a complete name means one, since documents are about things."""
    name = parts[0].partition(".")[0].lower()
    return [next((split for split, words in KEYWORDS.items() if name in words), NO_SPLIT)]


def _named_in_readme(folder: Path, files: Sequence[Path], source: DataSource) -> Splits | None:
    """Return the splits of one of the `configs` that a data set's README lists; `None` if it lists none. Raise
    `DataError`.
    """
    readme = folder / "README.md"
    front_matter = FRONT_MATTER.match(readme.read_text(encoding="utf-8", errors="replace")) if readme in files else None
    if not front_matter:
        return None
    try:
        about = parse_yaml(front_matter[1], str(readme)).plain()
    except UserError as error:
        raise DataError(
            f"its head cannot be read: {error.message}", place=error.place or str(readme), hint=NAME_FILES
        ) from None
    configs = about.get("configs") if isinstance(about, Mapping) else None
    if not isinstance(configs, list) or not configs or not all(isinstance(config, Mapping) for config in configs):
        return None
    named = {str(config.get("config_name", "default")): config for config in configs}
    default = [name for name, config in named.items() if config.get("default") is True or name == "default"] or list(
        named
    )
    name = source.config if source.config is not None else default[0]
    if name not in named or (source.config is None and len(default) > 1):
        raise DataError(
            f"there is no configuration `{name}`"
            if name not in named
            else "there are several configurations, and none is the default",
            place=str(readme),
            hint=f"set `config` to one of {names_of(named)}",
        )
    config = named[name]
    if unread := config.keys() - README_KEYS:
        raise DataError(
            f"the configuration `{name}` has {names_of(sorted(unread))}, which is not read",
            place=str(readme),
            hint=NAME_FILES,
        )
    below = folder / str(config.get("data_dir") or "")
    if "data_files" not in config:
        inside = [
            file
            for file in files
            if file.is_relative_to(below) and kind(file) in TABLES and file.name not in ABOUT_DATA
        ]
        return by_names(inside, below, documents=False) if inside else None
    splits = {split: _matching(patterns, below, files) for split, patterns in _patterns(config["data_files"]).items()}
    if not splits or not all(splits.values()):
        empty = next((f" for the split `{split}`" for split, matching in splits.items() if not matching), "")
        raise DataError(f"there is no file{empty} of the configuration `{name}`", place=str(readme), hint=NAME_FILES)
    return splits


def _patterns(data_files: Any) -> dict[str, list[str]]:
    """Return split -> patterns of `data_files`: a text, a list of texts, a mapping, or a list of `split` and `path`."""
    if isinstance(data_files, list) and all(isinstance(entry, Mapping) for entry in data_files):
        data_files = {str(entry.get("split", "train")): entry.get("path", []) for entry in data_files}
    patterns = data_files if isinstance(data_files, Mapping) else {"train": data_files}
    return {
        str(split): [str(entry) for entry in (paths if isinstance(paths, list) else [paths])]
        for split, paths in patterns.items()
    }


def _matching(patterns: Sequence[str], below: Path, files: Sequence[Path]) -> list[Path]:
    """Return the files that match one of the hub's patterns: `*` stays within a folder, `**` does not."""
    names = (name for pattern in patterns for name in glob(pattern, root_dir=below, recursive=True))  # noqa: PTH207
    matching = {below / name for name in names}
    return [file for file in files if file in matching]
