"""Facts that preparation passes to the plan and the workers, and the index with which `make plan` finds them without
torch.
"""

from __future__ import annotations

import functools
import itertools
import json
import platform
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from sft_play.config.reader import Count, quoted, record_of
from sft_play.config.schema import Config, DataSource
from sft_play.errors import CheckpointError, first_line
from sft_play.files import file_sha256, read_json, text_sha256, typed_path, write_json
from sft_play.runs.folder import RunFolder, cache_folder

HUB = "hub:"
"""Prefix of a hub data set's commit, in the place of a checksum of files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatFormat:
    """Format of conversations that differs from the tokenizer's (`model.tokenizer.chat_format`)."""

    name: str | None = None
    """Name of a template of this package; `None` for a file's or the tokenizer's template."""
    template: str | None = None
    """Text of the template, so that a run does not depend on its file; `None` for the tokenizer's own."""
    system: str | None = None
    """System turn for conversations without one."""
    style: Mapping[str, str] = field(default_factory=dict)
    """The non-empty values of `data.style`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedModel:
    """The base model's place and identity."""

    name: str
    """Its name in the configuration."""
    path: str
    """Folder with `config.json`, weights and tokenizer."""
    source: str
    """`folder`, `hub`, `embedded`, or `scratch` for random weights that were created here."""
    revision: str | None
    """The hub's commit; `None` for a folder."""
    fingerprint: str
    """sha256 over the hub's commit, config, weight index and every weight file's checksum (`model.resolve`)."""
    tokenizer_fingerprint: str
    """sha256 over the tokenizer's files, the chat template, `data.system` and `data.style`."""
    chat: ChatFormat | None = None
    """Format of conversations; `None` for the tokenizer's own template."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParentAdapter:
    """The adapter that a run starts from (`model.adapter`)."""

    name: str
    """A run's name with the checkpoint's, a folder, or a hub id."""
    path: str
    """Folder with its configuration and weights."""
    fingerprint: str
    """sha256 over the content of both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFacts:
    """A source's share of a split."""

    name: str
    """`data.sources[].name`, else its path."""
    rows: Count
    tokens: Count
    label_tokens: Count
    weight: float | None = None
    """The configured weight; `None` if each of the source's rows is used once per epoch."""
    content: str | None = None
    """sha256 over the source's files, or `hub:` and the commit of a hub data set; `None` if neither is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedSplit:
    """Facts of one prepared split."""

    path: str
    """Folder for `datasets.load_from_disk`, columns `input_ids`, `labels` (-100 if not trained), `row`, `source` (index
    into `sources`), `prompt_ids` and `reference` (both empty for a row without an answer to generate), `place` (what
    follows the source's file or folder).
    """
    rows: Count
    dropped: Count
    """Skipped rows; the manifest has the reason for each."""
    tokens: Count
    label_tokens: Count
    """Label tokens after the shift by one."""
    longest: Count
    """Tokens of the longest row."""
    median: Count
    """Tokens of the median row."""
    fingerprint: str
    """sha256 over the content of the prepared rows."""
    most_labels: int = 0
    """Most label tokens of a row; 0 if an earlier version prepared it."""
    truncated: int = 0
    """Rows cut to `model.max_seq_len`."""
    sources: tuple[SourceFacts, ...] = ()
    """In the order of `data.sources`."""
    template: str | None = None
    """sha256 of a conversation as the chat template writes it (`data.chat`)."""
    day: str | None = None
    """ISO date used as today in the rows, if the chat template writes it."""
    system: str | None = None
    """The system turn with which every row began as read, if all had the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """The model and the data that a run really uses."""

    model: ResolvedModel
    train: PreparedSplit | None
    validation: PreparedSplit | None
    adapter: ParentAdapter | None = None
    """What was trained on, or merged into the model."""

    def save(self, path: Path) -> None:
        write_json(path, asdict(self))

    @staticmethod
    def load(path: Path) -> Prepared:
        """Read `prepared.json`. Raise `CheckpointError` if it is invalid."""
        try:
            return record_of(read_json(path, follow=False), Prepared)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"not a valid record of the preparation: {first_line(error)}", place=str(path)
            ) from error


def common_system(run: RunFolder) -> str | None:
    """Return the system turn with which every training row of a run began, or `None`."""
    train = Prepared.load(run.prepared).train
    return train.system if train else None


def needs_system(text: str) -> str:
    """Return in words that all training rows had this system turn."""
    return f'every training row began with the system turn "{quoted(text)}"'


def day_of(path: Path) -> str | None:
    """Return the day in the rows of a prepared run, from its `prepared.json`, or `None`."""
    try:
        train = Prepared.load(path).train
    except CheckpointError:
        return None
    return train.day if train else None


# Index of prepared configurations, so that `make plan` knows rows and steps without torch.


MOST_FILES = 50_000
"""Most files of a source whose states are read, in a second or two: a plan must be fast, and a folder may be `/`."""
NO_MATTER = ("sources", "validation", "train_path", "val_path", "num_proc", "mix_by", "exhausted", "sync")
"""Keys of `data` that change no row or are compared per source."""


def lookup(config: Config) -> Prepared | None:
    """Return the facts for this model and data, or `None` if they were never prepared or have changed since."""
    path = _path(config)
    if path is None or not path.is_file():
        return None
    try:
        prepared = Prepared.load(path)
    except CheckpointError:  # written by another version
        return None
    folders = [*(part.path for part in (prepared.model, prepared.adapter, prepared.train, prepared.validation) if part)]
    return prepared if all(Path(folder).is_dir() for folder in folders) else None


def remember(config: Config, prepared: Prepared) -> None:
    """Save `prepared` for the next `lookup` of the same model and data."""
    path = _path(config)
    if path is not None:
        prepared.save(path)


def settings_that_matter(config: Config) -> dict[str, Any]:
    """Return every setting, except model and sources, that changes a prepared row."""
    data = {name: value for name, value in asdict(config.data).items() if name not in NO_MATTER}
    template = typed_path(config.data.chat_template or "")
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
    """Return a sha256 over the source code that makes rows, so that another version has another cache entry."""
    package = Path(__file__).resolve().parent.parent
    files = [
        *sorted((package / "data").glob("*.py")),
        package / "model" / "tokenizer.py",
        package / "config" / "data_rules.py",
    ]
    return text_sha256("\n".join(file_sha256(path) for path in files))


def sources_of(config: Config) -> list[DataSource]:
    """Return the sources of training and validation."""
    return [*config.data.sources, *(config.data.validation if isinstance(config.data.validation, list) else [])]


def _path(config: Config) -> Path | None:
    """Return the path of the index entry; `None` for data with more files than can be checked quickly."""
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
        # A rewritten model folder may have another tokenizer; a hub id has no files here.
        "model_files": [
            _stats(typed_path(name).glob("*"))
            for name in (config.model.name, config.model.tokenizer, config.model.adapter)
            if name
        ],
        "adapter": config.tuning.adapter if config.model.adapter else None,
        "weights_seed": config.train.seed if config.model.init == "random" else None,
        "python": platform.python_version(),
        "code": preparation_code(),
    }
    return cache_folder() / "prepared" / f"{text_sha256(json.dumps(key, sort_keys=True))[:24]}.json"


def _state(source: DataSource) -> list[list[object]] | None:
    path = typed_path(source.path)
    stats: Iterable[Path]
    if any(mark in source.path for mark in "*?["):
        stats = Path(path.anchor).glob(str(path.relative_to(path.anchor)))  # an empty anchor means the working folder
    else:
        stats = path.rglob("*") if path.is_dir() else [path]
    files = list(itertools.islice(stats, MOST_FILES + 1))
    return _stats(files) if len(files) <= MOST_FILES else None


def _stats(files: Iterable[Path]) -> list[list[object]]:
    matches = [(str(path.resolve()), path.stat()) for path in sorted(files) if path.is_file()]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in matches]


# Numbers per prepared row besides its tokens (length, source, label tokens), read without numpy.


RowFile = Literal["lengths.i32", "sources.i32", "labels.i32"]
"""Files of little-endian int32: tokens per row, index of its source in `PreparedSplit.sources`, label tokens."""


def row_integers(split: PreparedSplit, name: RowFile) -> array[int] | None:
    """Return one number per row, or `None` if an earlier version prepared the split without them."""
    path = Path(split.path) / name
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) != 4 * split.rows:  # written for other rows
        return None
    return array("i", data)


KEYS, QUESTIONS, KEY_BYTES = "keys.bin", "questions.bin", 16
"""File with a hash of the content of each row's example, one after the other, and the bytes of one: a chance meeting
among 10 million has a probability of 1e-25.
"""


def trained_too(keys: bytes, train: str | Path, file: str = KEYS) -> list[bool]:
    """Return for each of these `keys`, or hashes of questions, whether the prepared split in the folder `train` has it
    too. Raise `OSError`.
    """
    trained = set(_each((Path(train) / file).read_bytes()))
    return [key in trained for key in _each(keys)]


def _each(keys: bytes) -> Iterator[bytes]:
    yield from (keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES))
