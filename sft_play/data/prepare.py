"""Prepares the training and validation rows once, before any process group, cached by the content of all that matters."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sft_play.config.schema import Config, DataSource
from sft_play.data.formats import Message, recognise, to_messages
from sft_play.data.read import BUILTIN, Placed, files_of, read_source
from sft_play.data.template import IGNORED, Encoded, Renderer
from sft_play.errors import DataError, Problems
from sft_play.files import file_sha256, read_json, sync_folder, text_sha256, write_json
from sft_play.model.tokenizer import end_of_turn_ids
from sft_play.runs.folder import cache_folder
from sft_play.runs.prepared import PreparedSplit, ResolvedModel

VERSION = "3"
"""Raised when the same input would give other rows, so that older caches are not used."""
SHOWN_PROBLEMS = 5
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Conversation:
    """One row, read and understood but not yet in tokens."""

    place: str
    form: str
    messages: list[Message]

    @property
    def key(self) -> str:
        """A hash of the content."""
        return text_sha256(json.dumps(self.messages, ensure_ascii=False, sort_keys=True))


@dataclass(frozen=True, slots=True)
class Part:
    """One split that is to be prepared."""

    name: str
    """`train` or `validation`."""
    sources: Sequence[DataSource]
    fraction: float
    """Share of the rows that belongs to the validation split, where both come from the same sources; else 0."""


def prepare_data(
    config: Config, model: ResolvedModel, tokenizer: Callable[[], Any]
) -> tuple[PreparedSplit, PreparedSplit | None]:
    """Returns the prepared splits, from the cache when nothing that matters has changed. Raises `DataError`.

    `tokenizer` is called only when something must be prepared: loading one means importing transformers, for seconds.
    """
    sources, validation = config.data.sources, config.data.validation
    if not sources:
        raise DataError("no training data was given", hint="set `data.train_path`, or `data.sources`")
    if isinstance(validation, list):
        parts = [Part("train", sources, 0.0), Part("validation", validation, 0.0)]
    elif validation:
        parts = [Part("train", sources, validation), Part("validation", sources, validation)]
    else:
        parts = [Part("train", sources, 0.0)]
    splits = [_split(config, model, tokenizer, part) for part in parts]
    return splits[0], splits[1] if len(splits) > 1 else None


def _split(config: Config, model: ResolvedModel, tokenizer: Callable[[], Any], part: Part) -> PreparedSplit:
    folder = cache_folder() / "data" / f"{part.name}-{_content_key(config, model, part)}"
    if not _whole(folder):
        rows = _read(part.sources)
        if part.fraction:
            rows = [row for row in rows if _held_out(row, part.fraction) == (part.name == "validation")]
            if not rows:
                raise DataError(
                    f"`data.validation: {part.fraction}` leaves no row for {part.name}",
                    hint="give more rows, or another fraction",
                )
        _write(folder, _encode(config, tokenizer(), rows, part.name), rows)
    split = read_json(folder / MANIFEST)["split"]
    return PreparedSplit(**{**split, "path": str(folder.resolve())})


def _whole(folder: Path) -> bool:
    """Whether a prepared split is there as it was written. What is damaged is removed, to be made again."""
    try:
        sizes = read_json(folder / MANIFEST)["files"]
        if all((folder / name).stat().st_size == size for name, size in sizes.items()):
            return True
    except (OSError, ValueError, KeyError):
        pass
    if folder.exists():
        shutil.rmtree(folder)
    return False


def _held_out(row: Conversation, fraction: float) -> bool:
    """Whether a row is validation: by a hash of its content, so the same row falls on the same side for ever."""
    return int(row.key[:12], 16) / 16**12 < fraction


def _content_key(config: Config, model: ResolvedModel, part: Part) -> str:
    parts: list[Any] = [VERSION, part.name, part.fraction, config.model.max_seq_len, config.data.overlong]
    parts += [model.tokenizer_fingerprint, *(version(package) for package in ("transformers", "tokenizers"))]
    for source in part.sources:
        files = files_of(source)
        parts.append(asdict(source))
        if files:
            parts.append([[path.name, file_sha256(path)] for path in files])
        elif source.path.startswith(BUILTIN):
            parts.append(platform.python_version())  # the rows are the interpreter's own library
    return text_sha256(json.dumps(parts, ensure_ascii=False, sort_keys=True))[:24]


def _read(sources: Sequence[DataSource]) -> list[Conversation]:
    """Reads and understands every row; up to five problems are reported together."""
    rows: list[Conversation] = []
    problems: list[DataError] = []
    for source in sources:
        form: str | None = None if source.format == "auto" else source.format
        for placed in read_source(source):
            try:
                row = _understand(placed, form)
                form = form or row.form  # `auto` goes by the first row; another format later is an error of that row
                rows.append(row)
            except DataError as error:
                error.place = error.place or placed[0]
                problems.append(error)
                if len(problems) == SHOWN_PROBLEMS:
                    raise Problems(problems) from None
    if problems:
        raise Problems(problems) if len(problems) > 1 else problems[0]
    if not rows:
        raise DataError("the sources hold no row", place=", ".join(source.path for source in sources))
    return rows


def _understand(placed: Placed, form: str | None) -> Conversation:
    place, row = placed
    if isinstance(row, DataError):
        raise row
    form = form or recognise(row)
    return Conversation(place, form, to_messages(row, form))


@dataclass(frozen=True, slots=True)
class _Encoded:
    rows: list[tuple[int, Encoded]]
    dropped: Counter[str]
    truncated: int


def _encode(config: Config, tokenizer: Any, rows: Sequence[Conversation], part: str) -> _Encoded:
    """Encodes all rows, applies `data.overlong`, and refuses what would train nothing."""
    renderer = Renderer(tokenizer, end_of_turn_ids(tokenizer))
    limit, policy = config.model.max_seq_len, config.data.overlong
    kept: list[tuple[int, Encoded]] = []
    dropped: Counter[str] = Counter()
    overlong: list[tuple[str, int]] = []
    truncated = 0
    for index, row in enumerate(rows):
        try:
            encoded = renderer.encode(row.messages)
        except DataError as error:
            error.place = error.place or row.place
            raise
        if len(encoded.input_ids) > limit:
            overlong.append((row.place, len(encoded.input_ids)))
            cut = _truncate(renderer, row.messages, encoded, limit) if policy == "truncate" else None
            if cut is None:
                dropped["too long"] += 1
                continue
            encoded = cut
            truncated += 1
        kept.append((index, encoded))
    if overlong and policy == "error":
        place, longest = max(overlong, key=lambda item: item[1])
        raise DataError(
            f"{len(overlong)} of {len(rows)} {part} rows are longer than `model.max_seq_len` {limit}; the longest has {longest} tokens",
            place=place,
            hint=f"raise MODEL_MAX_SEQ_LEN to {longest}, or set DATA_OVERLONG=drop to leave them out, or truncate to cut them",
        )
    if not kept:
        raise DataError(
            f"no {part} row is left: all {len(rows)} are longer than `model.max_seq_len` {limit}"
            + (" before their answer begins" if policy == "truncate" else ""),
            hint=f"raise MODEL_MAX_SEQ_LEN; the longest row has {max(length for _, length in overlong)} tokens",
        )
    return _Encoded(kept, dropped, truncated)


def _truncate(renderer: Renderer, messages: Sequence[Message], encoded: Encoded, limit: int) -> Encoded | None:
    """Cuts a row at `limit` tokens; `None` where nothing of an answer would be left.

    Turns after the last answer that begins before the limit go first, so that prompt and reference belong to an answer that is
    trained.
    """
    while len(encoded.prompt_ids) >= limit:
        messages = messages[:-1]
        while messages and messages[-1]["role"] != "assistant":
            messages = messages[:-1]
        if not messages:
            return None
        encoded = renderer.encode(messages)
    labels = encoded.labels[:limit]
    if all(label == IGNORED for label in labels[1:]):  # the first token follows nothing, so it is never a target
        return None
    return Encoded(encoded.input_ids[:limit], labels, encoded.prompt_ids, encoded.reference)


def _write(folder: Path, encoded: _Encoded, rows: Sequence[Conversation]) -> None:
    """Writes the Arrow folder and its manifest aside and publishes it by rename."""
    import datasets

    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        columns = {
            "input_ids": [item.input_ids for _, item in encoded.rows],
            "labels": [item.labels for _, item in encoded.rows],
            "row": [index for index, _ in encoded.rows],
            "prompt_ids": [item.prompt_ids for _, item in encoded.rows],
            "reference": [item.reference for _, item in encoded.rows],
        }
        datasets.disable_progress_bars()
        datasets.Dataset.from_dict(columns, features=_features(datasets)).save_to_disk(str(scratch))
        sizes = {path.name: path.stat().st_size for path in scratch.iterdir()}
        write_json(scratch / MANIFEST, {**_manifest(encoded, rows), "files": sizes})
        scratch.chmod(0o755)
        try:
            scratch.rename(folder)
        except OSError:  # another process was first; its rows are the same
            if not (folder / MANIFEST).is_file():
                raise
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _features(datasets: Any) -> Any:
    tokens = datasets.List(datasets.Value("int32"))
    return datasets.Features(
        {
            "input_ids": tokens,
            "labels": tokens,
            "row": datasets.Value("int64"),
            "prompt_ids": tokens,
            "reference": datasets.Value("string"),
        }
    )


def _manifest(encoded: _Encoded, rows: Sequence[Conversation]) -> dict[str, Any]:
    lengths = sorted(len(item.input_ids) for _, item in encoded.rows)
    split = PreparedSplit(
        path="",
        rows=len(lengths),
        dropped=sum(encoded.dropped.values()),
        tokens=sum(lengths),
        label_tokens=sum(label != IGNORED for _, item in encoded.rows for label in item.labels[1:]),
        longest=lengths[-1],
        median=int(statistics.median(lengths)),
        fingerprint=_fingerprint(item for _, item in encoded.rows),
        truncated=encoded.truncated,
    )
    quantiles = {
        f"{share:.0%}": lengths[min(len(lengths) - 1, int(share * len(lengths)))] for share in (0.05, 0.25, 0.5, 0.75, 0.95)
    }
    return {
        "split": asdict(split),
        "rows_read": len(rows),
        "dropped": dict(encoded.dropped),
        "formats": dict(Counter(row.form for row in rows)),
        "length_quantiles": quantiles,
    }


def _fingerprint(items: Iterable[Encoded]) -> str:
    digest = hashlib.sha256()
    for item in items:
        digest.update(json.dumps([item.input_ids, item.labels]).encode())
    return digest.hexdigest()
