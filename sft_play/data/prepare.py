"""Prepares the training and validation rows once, before any process group, cached by the content of all that they
depend on.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import version
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sft_play.config.reader import record_of
from sft_play.config.schema import Config, DataSource
from sft_play.data import IGNORED
from sft_play.data.bad_rows import BAD, RowProblems, as_in_file
from sft_play.data.chat import Encoded, template_sha256
from sft_play.data.documents import EMPTY, SCANNED
from sft_play.data.formats import Example, recognise, understand
from sft_play.data.readers import Placed
from sft_play.data.sources import FILTERED, LeftOut, identify, read_source, start_of_places
from sft_play.data.store import OF_BOTH, Made, SourceTally, SplitWriter, TokenRow, read_manifest, split_manifest
from sft_play.data.summary import labels_only_here
from sft_play.data.tokens import EncodedExample, Encoder
from sft_play.errors import DataError, HardwareError
from sft_play.files import text_sha256
from sft_play.launch.process import leave_stops_to_parent, raise_what_was_heard
from sft_play.model.tokenizer import DAY, base_stops, fix_day, write_chat, writes_day
from sft_play.plan.hardware import cpu_threads
from sft_play.runs.folder import cache_folder
from sft_play.runs.prepared import (
    HUB,
    KEY_BYTES,
    QUESTIONS,
    Prepared,
    PreparedSplit,
    ResolvedModel,
    preparation_code,
    settings_that_matter,
    trained_too,
)
from sft_play.text import bar, tell


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


def prepare_data(
    config: Config,
    model: ResolvedModel,
    tokenizer: Callable[[], Any],
    day: str | None = None,
    before: Prepared | None = None,
) -> tuple[Prepared, dict[str, dict[str, Any]]]:
    """Return the prepared splits, from the cache when nothing that matters has changed, and their manifests. Raise
    `DataError`.

    `tokenizer` is called only when something must be prepared: loading one means importing transformers, for seconds.
    `day`: the date (ISO) that rows must have where the template writes one; without it that of their first preparation.
    `before` is what a run that continues was given: rows of files that are gone since are taken from the cache.
    """
    if not config.data.sources:
        raise DataError("no training data was given", hint="set `data.train_path`, or `data.sources`")
    splits = [split for split in (before.train, before.validation) if split] if before else []
    content_hashes = {source.name: source.content for split in splits for source in split.sources}
    parts, manifests = _of_day(config, model, tokenizer, content_hashes, day)
    if missing := [part for part in parts if manifests[part.name] is None]:
        if writes_day(tokenizer()):
            there = (manifest["split"].get("day") for manifest in manifests.values() if manifest)
            fix_day(tokenizer(), day or next(there, None) or date.today().isoformat())
        # Those of one fraction in one pass over their rows.
        for together in [missing] if all(part.fraction for part in missing) else [[part] for part in missing]:
            if moved := _prepare_in_one_pass(config, tokenizer(), together, parts[0]):
                _prepare_in_one_pass(config, tokenizer(), together, parts[0], moved)
        manifests = _manifests(parts)
    named = {part.name: _name_sources(manifests[part.name], part) for part in parts}
    train, validation = [*(record_of(manifest["split"], PreparedSplit) for manifest in named.values()), None][:2]
    return Prepared(model=model, train=train, validation=validation), named


Manifests = dict[str, dict[str, Any] | None]
Known = Mapping[str, str | None]
"""Source -> sha256 of its files at an earlier preparation."""


def _manifests(parts: Sequence[Part]) -> Manifests:
    return {part.name: read_manifest(part.folder) for part in parts}


def _of_day(
    config: Config, model: ResolvedModel, tokenizer: Callable[[], Any], content_hashes: Known, day: str | None
) -> tuple[list[Part], Manifests]:
    """Return the splits, and their manifests where they are prepared: any day's, or those of `day`."""
    parts = _parts(config, model, content_hashes)
    manifests = _manifests(parts)
    if day is None or all(manifest and manifest["split"].get("day") in (None, day) for manifest in manifests.values()):
        return parts, manifests
    dated = _parts(config, model, content_hashes, day)
    dated_manifests = _manifests(dated)
    if any(dated_manifests.values()) or any(manifests.values()) or writes_day(tokenizer()):
        return dated, dated_manifests
    return parts, manifests


def _parts(config: Config, model: ResolvedModel, content_hashes: Known, *day: str) -> list[Part]:
    """Return the splits that a configuration asks for, training first; those of a `day` other than that of their first
    preparation.
    """
    sources, validation = config.data.sources, config.data.validation
    fraction = 0.0 if isinstance(validation, list) else float(validation or 0.0)
    # What the rows of both splits depend on, next to their sources.
    versions = [version(package) for package in ("transformers", "tokenizers")]
    stops = base_stops(Path(model.path))
    common = [settings_that_matter(config), model.tokenizer_fingerprint, preparation_code(), stops, *versions, *day]
    train = _part("train", sources, fraction, common, content_hashes)
    if validation and isinstance(validation, list):
        # The training rows are in the key, since the manifest says how many rows of the validation data are among them.
        return [train, _part("validation", validation, 0.0, [*common, train.folder.name], content_hashes)]
    return [train, _part("validation", sources, fraction, common, content_hashes)] if fraction else [train]


def _part(
    name: str,
    sources: Sequence[DataSource],
    fraction: float,
    common: list[Any],
    content_hashes: Mapping[str, str | None],
) -> Part:
    identities = [identify(source, content_hashes.get(source.name or source.path)) for source in sources]
    keys, contents = zip(*identities, strict=True)
    digest = text_sha256(json.dumps([*common, name, fraction, *keys], ensure_ascii=False, sort_keys=True))[:24]
    return Part(
        name=name,
        sources=sources,
        contents=contents,
        fraction=fraction,
        folder=cache_folder() / "data" / f"{name}-{digest}",
    )


def _name_sources(manifest: dict[str, Any] | None, part: Part) -> dict[str, Any]:
    """Return a manifest with this configuration's names and weights, which the cache does not go by."""
    assert manifest is not None, f"{part.folder} was published a moment ago"
    names = [{"name": source.name or source.path} for source in part.sources]
    commits = [source["hub_commit"] for source in manifest["sources"]]
    contents = [
        content or (f"{HUB}{commit}" if commit else None)
        for content, commit in zip(part.contents, commits, strict=True)
    ]
    facts = [
        fact | name | {"weight": source.weight, "content": content}
        for fact, name, source, content in zip(manifest["split"]["sources"], names, part.sources, contents, strict=True)
    ]
    sources = [entry | name for entry, name in zip(manifest["sources"], names, strict=True)]
    split = manifest["split"] | {"path": str(part.folder.resolve()), "sources": facts}
    return manifest | {"split": split, "sources": sources}


# Reads, encodes and publishes splits that the cache does not have.


class Gatherer:
    """Takes the rows of one split out of chunks: counts them, leaves out copies, hands the rest to the writer."""

    def __init__(self, config: Config, part: Part, writer: SplitWriter) -> None:
        self.config, self.part, self.writer = config, part, writer
        self.tallies = [SourceTally() for _ in part.sources]
        self.longest = ("", 0)
        """Place and tokens of the longest row that is too long."""
        self.systems: set[str | None] = set()
        """Two or more system turns of rows, or the only one."""
        self._seen: set[bytes] = set()
        self.examples = 0
        """Rows of this split, also those that were skipped because of their length or as copies."""

    def take(self, chunk: Chunk) -> None:
        """Add what belongs to this split."""
        tally = self.tallies[chunk.source]
        if len(self.systems) < 2:
            self.systems |= chunk.systems
        if self.part.name == "train" or not self.part.fraction:
            tally.add_unread(chunk.ignored, chunk.marks)
        for example in chunk.examples:
            if self.part.fraction and example.held_out != (self.part.name == "validation"):
                continue
            number, self.examples = self.examples, self.examples + 1
            tally.rows_read += 1
            tally.format = tally.format or chunk.form
            if self.config.data.duplicates == "drop":
                if example.key in self._seen:
                    tally.duplicates += 1
                    continue
                self._seen.add(example.key)
            if example.outcome:
                tally.add(example.outcome)
                self.longest = max(
                    self.longest, (example.outcome.place, example.outcome.overlong), key=lambda item: item[1]
                )
            tally.kept += bool(example.rows)
            tally.split += len(example.rows) > 1
            self.writer.append(example, source=chunk.source, number=number)

    def take_left_out(self, skipped: Sequence[LeftOut]) -> None:
        """Count what readers left out; where a fraction is validation it belongs to no side, and is counted once, with
        training.
        """
        for tally, out in zip(self.tallies, skipped, strict=True):
            tally.hub_commit = out.commit
            if not self.part.fraction or self.part.name == "train":
                tally.add_left_out(out, OF_BOTH if self.part.fraction else "")

    def refuse_what_cannot_be_trained(self, of_both: int) -> None:
        """Raise `DataError` for rows that are too long, and for a split without any row. `of_both`: rows of both
        splits.
        """
        part, limit = self.part, self.config.model.max_seq_len
        kind = "" if part.name == "train" else f"{part.name} "
        place, tokens = self.longest
        overlong = sum(tally.overlong for tally in self.tallies)
        if overlong and self.config.data.overlong == "error":
            raise DataError(
                f"{overlong:,} of {self.examples:,} {kind}rows are longer than `model.max_seq_len` {limit}; "
                f"the longest has {tokens} tokens",
                place=place,
                hint=(
                    f"raise MODEL_MAX_SEQ_LEN to {tokens} if the model has as many positions; or set"
                    " DATA_OVERLONG=drop to omit them, truncate to cut them, or split to make several rows of each"
                ),
            )
        if not self.examples:
            raise DataError(
                f"`data.validation: {part.fraction}` leaves no row for {part.name}: "
                + (
                    f"all {of_both:,} are of one group of `data.group_by: {group_by}`"
                    if (group_by := self.config.data.group_by)
                    else f"there are {of_both:,}, and a hash of content assigns each row"
                ),
                hint="give more rows, another fraction, or a separate file: DATA_VAL_PATH="
                if group_by is None
                else "name a column with more values, or omit DATA_GROUP_BY",
            )
        if not len(self.writer.lengths):
            hint = f"raise MODEL_MAX_SEQ_LEN; the longest row has {tokens} tokens" if overlong else None
            reasons = sum(
                (tally.dropped for tally in self.tallies), Counter(duplicate=sum(t.duplicates for t in self.tallies))
            )
            raise DataError(
                f"no {kind}row is left of {self.examples:,}: {_list_reasons(reasons)}", place=place or None, hint=hint
            )


def _prepare_in_one_pass(
    config: Config, tokenizer: Any, parts: Sequence[Part], train: Part, moved: str | None = None
) -> str | None:
    """Read the sources once, and publish `parts` from them; `train` is published already or among them.

    Publish nothing where a hash gives all groups to one side, and return the group that is to be `moved`. Raise
    `DataError` with all problems of rows together, and `HardwareError` when a process was killed.
    """
    sources, drop = parts[0].sources, config.data.bad_rows == "drop"
    problems = RowProblems(cache_folder() / "bad_rows" / f"{parts[0].folder.name}.txt", drop=drop)
    skipped, new_tokens = [LeftOut() for _ in sources], ids_of_new_tokens(config.data.new_tokens, tokenizer)
    fraction, groups = parts[0].fraction, Counter[str | None]()
    with ExitStack() as stack:
        starts = [start_of_places(source) for source in sources]
        writers = [stack.enter_context(SplitWriter(part.folder, new_tokens, starts)) for part in parts]
        gatherers = [Gatherer(config, part, writer) for part, writer in zip(parts, writers, strict=True)]
        works = works_of(sources, problems, config.train.seed, skipped)
        chunks = stack.enter_context(closing(encode_all(config, tokenizer, works, fraction=fraction, moved=moved)))
        show, rows = stack.enter_context(bar(f"preparing {' and '.join(part.name for part in parts)}", "rows")), 0
        for chunk in chunks:
            rows += len(chunk.examples)
            show(rows, None)
            groups.update(example.group for example in chunk.examples)
            unencoded = [
                example.outcome.error for example in chunk.examples if example.outcome and example.outcome.error
            ]
            problems.good[chunk.source] += len(chunk.examples) - len(unencoded)
            for error in (*chunk.unread, *unencoded):
                problems.add(as_in_file(error, sources[chunk.source].columns), chunk.source)
            for error in chunk.unread if drop else ():  # others are counted as examples
                skipped[chunk.source].add(BAD, error.place or "")
            if not problems.stops:
                for gatherer in gatherers:
                    gatherer.take(chunk)
            raise_what_was_heard()
        if moved is None and not problems.stops and (moved := group_to_move(groups, fraction)):
            side = "validation" if is_held_out("", moved, fraction) else "training"
            tell(
                f"note: `data.group_by: {config.data.group_by}`: a hash gives all {len(groups)} groups to {side}; one"
                f" with {groups[moved]:,} of the {groups.total():,} rows changes sides, nearest to"
                f" `data.validation: {fraction}`"
            )
            return moved
        problems.good.update({source: out.counts[FILTERED] for source, out in enumerate(skipped)})
        problems.end()
        if not any(gatherer.examples for gatherer in gatherers):
            refuse_nothing(sources, skipped)
        for gatherer in gatherers:
            gatherer.take_left_out(skipped)
            gatherer.refuse_what_cannot_be_trained(sum(each.examples for each in gatherers))
        for gatherer in gatherers:
            part, writer = gatherer.part, gatherer.writer
            manifest = split_manifest(writer, part.sources, gatherer.tallies, part.contents)
            manifest["split"]["template"] = template_sha256(tokenizer)
            manifest["split"]["day"] = day.isoformat() if (day := getattr(tokenizer, DAY, None)) else None
            manifest["split"]["system"] = None if len(gatherer.systems) > 1 else next(iter(gatherer.systems), None)
            if part.name == "validation":
                share = {"share": gatherer.examples / groups.total(), "asked": fraction}
                manifest["held_out"] = share if fraction else None
                repeated = trained_too(bytes(writer.keys), train.folder)
                asked = trained_too(bytes(writer.questions), train.folder, QUESTIONS)
                manifest["overlap"] = {
                    "with": "train",
                    "rows": sum(repeated),
                    "questions": sum(question > row for question, row in zip(asked, repeated, strict=True)),
                    "labels": labels_only_here(manifest, train.folder),
                }
            writer.publish(manifest)
    return None


def ids_of_new_tokens(tokens: Sequence[str], tokenizer: Any) -> dict[str, int]:
    """Return the id of each of `data.new_tokens`. Raise `DataError` for one that the template splits."""
    ids = {token: int(tokenizer.convert_tokens_to_ids(token)) for token in tokens}
    for token, number in ids.items():
        text = write_chat(tokenizer, [{"role": "user", "content": token}, {"role": "assistant", "content": token}])
        if tokenizer(text, add_special_tokens=False)["input_ids"].count(number) < 2:
            raise DataError(
                f"`data.new_tokens` names `{token}`, which the chat template or the tokenizer splits",
                hint="use one without spaces at its ends, with which no other token begins or ends",
            )
    return ids


def refuse_nothing(sources: Sequence[DataSource], skipped: Sequence[LeftOut]) -> None:
    """Raise `DataError` for sources without any row, with what was left out of them (`skipped`) and why."""
    reasons = sum((out.counts for out in skipped), Counter[str]())
    first = next((place for out in skipped for places in out.places.values() for place in places), None)
    raise DataError(
        f"the sources hold no row: {_list_reasons(reasons)}" if reasons else "the sources hold no row",
        place=first or ", ".join(source.path for source in sources),
        hint=(
            "pages that are pictures must be read by an OCR program first"
            if SCANNED in reasons or EMPTY in reasons
            else None
        ),
    )


def _list_reasons(reasons: Counter[str]) -> str:
    return ", ".join(f"{count:,} left out ({reason})" for reason, count in reasons.items() if count)


def works_of(
    sources: Sequence[DataSource], problems: RowProblems, seed: int, skipped: Sequence[LeftOut]
) -> Iterator[SourceRows]:
    """Yield the rows of all sources by the chunk; what ends the reading of a source goes to `problems`.

    `seed` chooses where a source takes only some `rows`; what readers leave out is counted in `skipped`, by source.
    """
    for index, source in enumerate(sources):
        form: str | None = None if source.format == "auto" else source.format
        try:
            for rows in _chunks(read_source(source, seed=seed, skipped=skipped[index])):
                form = form or _first_form(
                    rows
                )  # `auto` goes by the first row; another format later is an error of that row
                yield SourceRows(index, form, rows)
        except DataError as error:
            problems.ended.append(error)


def _chunks(rows: Iterator[Placed]) -> Iterator[list[Placed]]:
    gathered: list[Placed] = []
    size = 0
    try:
        for placed in rows:
            gathered.append(placed)
            size += len(str(placed[1]))
            if len(gathered) == CHUNK_ROWS or size >= CHUNK_CHARACTERS:
                yield gathered
                gathered, size = [], 0
    except DataError:  # what stands before the place that cannot be read may have problems of its own
        if gathered:
            yield gathered
        raise
    if gathered:
        yield gathered


def _first_form(rows: Sequence[Placed]) -> str | None:
    for _, row in rows:
        if not isinstance(row, DataError):
            try:
                return recognise(row)
            except (
                DataError
            ):  # told when the row is understood; a later row's format must not settle what this one leaves open
                return None
    return None


# Chunks of rows through one process or many: in order, a bounded number at a time, the same for every number of
# processes.


CHUNK_ROWS = 256
CHUNK_CHARACTERS = 1_000_000
"""A chunk ends with either, so that neither short rows cost a message each, nor long documents the memory."""
FEW_CHUNKS = 8
"""With `data.num_proc: auto`, as many chunks or fewer are made in this process: starting others would take longer."""
WAITING = 3
"""Chunks on their way for each process: one in work, and enough that it never waits."""
POSITION_DIGITS = 12
"""Hexadecimal digits of a hash that tell a row's place between 0 and 1."""


class SourceRows(NamedTuple):
    """Consecutive rows of a source, as read."""

    source: int
    """Index into the split's sources."""
    form: str | None
    """The source's format; `None` if it is not known yet."""
    rows: Sequence[Placed]


class Chunk(NamedTuple):
    """The results for the rows of one `SourceRows`, in order."""

    source: int
    form: str | None
    unread: list[DataError]
    """What is wrong with rows themselves, each with its place."""
    examples: list[Made]
    """What was read."""
    ignored: Counter[tuple[str, str]]
    """What nothing reads, see `Example.unread`, with the number of rows that have it."""
    marks: Counter[str]
    """What looks like a mark in texts, with the number of rows that have it."""
    systems: set[str | None]
    """Texts of the rows' own first system turns; `None` for a row without one."""


def encode_all(
    config: Config, tokenizer: Any, works: Iterator[SourceRows], *, fraction: float, moved: str | None
) -> Generator[Chunk, None, None]:
    """Yield the chunk of each work, in order. Raise `DataError`, and `HardwareError` when a process was killed.

    `works` is read as chunks are taken: at most `WAITING` for each process are in memory.
    """
    make, processes = _Maker(config, tokenizer, fraction, moved), config.data.num_proc
    if not isinstance(processes, int):
        first = list(itertools.islice(works, FEW_CHUNKS + 1))
        works, processes = itertools.chain(first, works), cpu_threads() if len(first) > FEW_CHUNKS else 1
    if processes == 1:
        yield from map(make, works)
        return
    # On Linux the processes are forked: that takes milliseconds where importing transformers takes seconds. It is safe
    # because the tokenizer's threads do not exist where it has not run yet, and are not used in the processes.
    method = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(processes, method, initializer=_begin, initargs=(make,))
    waiting: deque[Future[Chunk]] = deque()
    try:
        for work in works:
            waiting.append(pool.submit(_encode, work))
            if len(waiting) >= WAITING * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise HardwareError(
            "a process that prepares the data was killed, most likely because the memory ran out",
            hint=f"use fewer processes than {processes}: DATA_NUM_PROC=1",
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _Maker:
    """Makes chunks; the encoder is made with the first one, in the process that needs it."""

    def __init__(self, config: Config, tokenizer: Any, fraction: float, moved: str | None) -> None:
        self._config, self._tokenizer, self._fraction, self._moved = config, tokenizer, fraction, moved
        self._encoder: Encoder | None = None

    def __call__(self, work: SourceRows) -> Chunk:
        self._encoder = self._encoder or Encoder(self._config, self._tokenizer)
        examples: list[Example] = []
        unread: list[DataError] = []
        for placed in work.rows:
            try:
                examples.append(understand(placed, work.form, group_by=self._config.data.group_by))
            except DataError as error:
                unread.append(error)
        outcomes = self._encoder.encode(examples)
        encoded = [self._made(example, outcome) for example, outcome in zip(examples, outcomes, strict=True)]
        ignored = Counter(pair for example in examples for pair in example.unread)
        marks = Counter(mark for example in examples for mark in example.marks)
        first = [(example.messages or [{}])[0] for example in examples]
        systems = {str(turn["content"]) if turn.get("role") == "system" else None for turn in first}
        return Chunk(work.source, examples[0].form if examples else None, unread, encoded, ignored, marks, systems)

    def _made(self, example: Example, outcome: EncodedExample) -> Made:
        key = example.key
        about = replace(outcome, rows=(), dropped=BAD if outcome.error else outcome.dropped)
        return Made(
            key=bytes.fromhex(key[: 2 * KEY_BYTES]),
            held_out=is_held_out(key, example.group, self._fraction)
            != (self._moved is not None and self._moved == example.group),
            group=example.group,
            place=example.place,
            rows=[_token_row(row) for row in outcome.rows],
            outcome=None if about == EncodedExample(place=outcome.place) else about,
        )


def _token_row(row: Encoded) -> TokenRow:
    ids, labels, prompt = (np.asarray(part, np.int32) for part in (row.input_ids, row.labels, row.prompt_ids))
    learnt = labels != IGNORED
    weights = None if row.weights is None else np.where(learnt, np.asarray(row.weights, np.float32), np.float32(0))
    if weights is not None:  # a product of small ones may be 0
        labels = np.where(weights == 0, np.int32(IGNORED), labels)
        learnt = labels != IGNORED
    if weights is not None and (weights[learnt] == 1).all():
        weights = None
    return TokenRow(ids, labels, prompt, row.reference, int(learnt[1:].sum()), weights)


_of_process: list[_Maker] = []
"""Of a process of the pool: its own."""


def _begin(make: _Maker) -> None:
    """Set up a process of the pool."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the cores are shared out already
    leave_stops_to_parent()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _of_process[:] = [make]


def _end_with_parent() -> None:
    """End this process when its parent ends: a killed parent cannot end its processes."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "only processes of the pool watch"
    connection.wait([parent.sentinel])
    os._exit(1)


def _encode(work: SourceRows) -> Chunk:
    return _of_process[0](work)


def is_held_out(key: str, group: str | None, fraction: float) -> bool:
    """Return whether a row belongs to validation: decided only by its group or, without one, by its content.

    So a row keeps its side when rows are added, removed or moved, and a larger `fraction` only adds rows to validation.
    `key` is `Example.key`; `group` is the value of `data.group_by`; `fraction` is in [0, 1).
    """
    digest = text_sha256(f"row {key}" if group is None else f"group {group}")
    return int(digest[:POSITION_DIGITS], 16) / 16**POSITION_DIGITS < fraction


def group_to_move(groups: Counter[str | None], fraction: float) -> str | None:
    """Return the group that changes sides where a hash gives all of two or more to one: that whose share of the rows is
    nearest to what the other side should have.
    """
    sides = {is_held_out("", group, fraction) for group in groups}
    if len(groups) < 2 or len(sides) > 1:
        return None
    share = (1 - fraction if True in sides else fraction) * groups.total()
    return min(groups, key=lambda group: (abs(groups[group] - share), text_sha256(f"group {group}")))
