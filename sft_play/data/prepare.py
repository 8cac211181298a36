"""Prepares the training and validation rows once, before any process group, cached by the content of all that matters."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sft_play.config.schema import Config, DataSource
from sft_play.data.formats import Message, recognise, to_messages
from sft_play.data.read import BUILTIN, Placed, files_of, read_source
from sft_play.data.store import RowTable, read_manifest, write_split
from sft_play.data.template import IGNORED, Encoded, Renderer
from sft_play.errors import DataError, raise_all
from sft_play.files import file_sha256, text_sha256
from sft_play.model.tokenizer import end_of_turn_ids
from sft_play.runs.folder import cache_folder
from sft_play.runs.prepared import PreparedSplit, ResolvedModel

VERSION = "5"
"""Raised when the same input would give other rows, so that older caches are not used."""
SHOWN_PROBLEMS = 5
PROGRESS_SECONDS = 10


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
    manifest = read_manifest(folder)
    if manifest is None:
        manifest = _make(config, tokenizer(), part, folder)
    return PreparedSplit.from_json({**manifest["split"], "path": str(folder.resolve())})


def _make(config: Config, tokenizer: Any, part: Part, folder: Path) -> dict[str, Any]:
    """Reads, encodes and publishes one split; returns its manifest."""
    rows = _read(part.sources)
    if part.fraction:
        rows = [row for row in rows if _held_out(row, part.fraction) == (part.name == "validation")]
        if not rows:
            message = f"`data.validation: {part.fraction}` leaves no row for {part.name}"
            raise DataError(message, hint="give more rows, or another fraction")
    encoded = _encode(config, tokenizer, rows, part.name)
    split = PreparedSplit(path="", dropped=sum(encoded.dropped.values()), truncated=encoded.truncated, **encoded.rows.facts())
    manifest = {
        "split": asdict(split),
        "rows_read": len(rows),
        "dropped": dict(encoded.dropped),
        "formats": dict(Counter(row.form for row in rows)),
        "length_quantiles": encoded.rows.quantiles(),
    }
    write_split(folder, encoded.rows, manifest)
    return manifest


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
    """Reads and understands every row; up to five different problems are reported together, each once with its number of rows."""
    rows: list[Conversation] = []
    problems: dict[str, DataError] = {}
    alike: Counter[str] = Counter()
    for source in sources:
        form: str | None = None if source.format == "auto" else source.format
        for placed in read_source(source):
            try:
                row = _understand(placed, form)
                form = form or row.form  # `auto` goes by the first row; another format later is an error of that row
                rows.append(row)
            except DataError as error:
                error.place = error.place or placed[0]
                if error.message in problems or len(problems) < SHOWN_PROBLEMS:  # a large file may hold a million different ones
                    problems.setdefault(error.message, error)
                    alike[error.message] += 1
    raise_all([_counted(error, alike[message]) for message, error in problems.items()])
    if not rows:
        raise DataError("the sources hold no row", place=", ".join(source.path for source in sources))
    return rows


def _counted(error: DataError, rows: int) -> DataError:
    """Returns one error for `rows` rows that have the same problem, at the place of the first."""
    if rows == 1:
        return error
    return DataError(f"{error.message} ({rows:,} such rows; the first is here)", place=error.place, hint=error.hint)


def _understand(placed: Placed, form: str | None) -> Conversation:
    place, row = placed
    if isinstance(row, DataError):
        raise row
    form = form or recognise(row)
    return Conversation(place, form, to_messages(row, form))


@dataclass(frozen=True, slots=True)
class _Encoded:
    rows: RowTable
    dropped: Counter[str]
    truncated: int


def _encode(config: Config, tokenizer: Any, rows: Sequence[Conversation], part: str) -> _Encoded:
    """Encodes all rows, applies `data.overlong`, and refuses what would train nothing."""
    renderer = Renderer(tokenizer, end_of_turn_ids(tokenizer))
    limit, policy = config.model.max_seq_len, config.data.overlong
    kept = RowTable()
    dropped: Counter[str] = Counter()
    overlong: list[tuple[str, int]] = []
    truncated, shown = 0, time.monotonic()
    for index, row in enumerate(rows):
        try:
            encoded = _without_tail(renderer.encode(row.messages))
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
        kept.append(index, encoded)
        shown = _tell_progress(part, index + 1, len(rows), shown)
    if overlong and policy == "error":
        place, longest = max(overlong, key=lambda item: item[1])
        raise DataError(
            f"{len(overlong)} of {len(rows)} {part} rows are longer than `model.max_seq_len` {limit}; the longest has {longest} tokens",
            place=place,
            hint=f"raise MODEL_MAX_SEQ_LEN to {longest}, or set DATA_OVERLONG=drop to leave them out, or truncate to cut them",
        )
    if not len(kept):
        raise DataError(
            f"no {part} row is left: all {len(rows)} are longer than `model.max_seq_len` {limit}"
            + (" before their answer begins" if policy == "truncate" else ""),
            hint=f"raise MODEL_MAX_SEQ_LEN; the longest row has {max(length for _, length in overlong)} tokens",
        )
    return _Encoded(kept, dropped, truncated)


def _tell_progress(part: str, done: int, count: int, shown: float) -> float:
    """Says how far it is every ten seconds, so that millions of rows do not look like a hang. Returns when it last did."""
    now = time.monotonic()
    if now - shown < PROGRESS_SECONDS:
        return shown
    print(f"preparing {part} rows: {done:,} of {count:,}", file=sys.stderr, flush=True)
    return now


def _without_tail(encoded: Encoded) -> Encoded:
    """Leaves out what follows the last trained token (a newline, with some templates a new header): nothing depends on it."""
    end = len(encoded.labels)
    while encoded.labels[end - 1] == IGNORED:  # a conversation ends with an answer, so there is a trained token
        end -= 1
    return replace(encoded, input_ids=encoded.input_ids[:end], labels=encoded.labels[:end])


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
        encoded = _without_tail(renderer.encode(messages))
    labels = encoded.labels[:limit]
    if all(label == IGNORED for label in labels[1:]):  # the first token follows nothing, so it is never a target
        return None
    return Encoded(encoded.input_ids[:limit], labels, encoded.prompt_ids, encoded.reference)
