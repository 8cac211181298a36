"""Prepared rows on the disk: written as Arrow, published by rename, read without `datasets`; and what was read, kept
and skipped, and why.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import statistics
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import compress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sft_play.config.data_rules import Condition
from sft_play.config.metrics import MOST_LABELS
from sft_play.config.schema import DataSource
from sft_play.data import IGNORED, WEIGHTS
from sft_play.data.rows import PLACES
from sft_play.data.sources import SHOWN_PLACES, LeftOut
from sft_play.data.tokens import EncodedExample
from sft_play.files import new_folder, read_json, sync_path, write_bytes, write_json
from sft_play.runs.manifest import ALGORITHM, checksum, damage
from sft_play.runs.prepared import KEY_BYTES, KEYS, QUESTIONS

MANIFEST = "manifest.json"
OF_BOTH = ", before the split"
"""Where a fraction is held out, added to why readers leave something out, which is on no side."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
MOST_UNREAD, MOST_VALUES = 200, 7
SHOWN_MARKS = 12
LABEL = re.compile(".{1,80}")
"""An answer that may be a label."""


@dataclass(kw_only=True, slots=True)
class SourceTally:
    """Counts of one source, in rows as they were read (an example), unless it says tokens or prepared rows."""

    format: str | None = None
    rows_read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Left out, by reason; copies aside."""
    duplicates: int = 0
    cut: int = 0
    """Kept, but shortened (`data.overlong`)."""
    lost: Counter[str] = field(default_factory=Counter)
    """Of those, how many lost what: kinds of turns, or parts of one."""
    doubts: Counter[str] = field(default_factory=Counter)
    """What the author of kept rows may not know of them -> in how many."""
    doubt_places: dict[str, str] = field(default_factory=dict)
    """Each doubt -> the place of its first row."""
    columns_unread: dict[str, Counter[str]] = field(default_factory=dict)
    """What nothing reads, see `Example.unread` -> each value, and in how many rows it is."""
    marks: Counter[str] = field(default_factory=Counter)
    """What looks like a mark in texts -> in how many rows."""
    split: int = 0
    """Made into several rows (`data.overlong: split`, long documents)."""
    overlong: int = 0
    """Conversations and token rows longer than `model.max_seq_len`, whatever became of them."""
    overlong_tokens: int = 0
    """Their tokens, before anything was left out."""
    there: int | None = None
    """How many rows there were, where the source's `rows` asks for more."""
    hub_commit: str | None = None
    """Of a hub dataset, the commit that was read."""
    left_out: list[dict[str, str]] = field(default_factory=list)
    """`reason` and `place` of the first that were left out."""

    def add(self, outcome: EncodedExample) -> None:
        """Count what became of an example that was skipped, cut or lost something."""
        if outcome.dropped:
            self.dropped[outcome.dropped] += 1
            if self.dropped[outcome.dropped] <= SHOWN_PLACES:
                self.left_out.append({"reason": outcome.dropped, "place": outcome.place})
        self.cut += bool(outcome.lost)
        self.lost.update(outcome.lost)
        self.doubts.update(outcome.doubts)
        self.doubt_places = dict.fromkeys(outcome.doubts, outcome.place) | self.doubt_places
        self.overlong += bool(outcome.overlong)
        self.overlong_tokens += outcome.overlong

    def add_left_out(self, skipped: LeftOut, of: str = "") -> None:
        """Count what readers left out, `of` which part of the source."""
        self.rows_read += skipped.counts.total()
        self.dropped += {f"{reason}{of}": rows for reason, rows in skipped.counts.items()}
        self.left_out += [
            {"reason": f"{reason}{of}", "place": place} for reason, places in skipped.places.items() for place in places
        ]
        self.there = skipped.there

    def add_unread(self, unread: Mapping[tuple[str, str], int], marks: Mapping[str, int]) -> None:
        """Count what nothing reads, and marks; of either the first are kept, since mappings with free keys are many."""
        for (name, value), rows in unread.items():
            if name in self.columns_unread or len(self.columns_unread) < MOST_UNREAD:
                values = self.columns_unread.setdefault(name, Counter())
                values[value if value in values or len(values) < MOST_VALUES else ""] += rows
        for mark, rows in marks.items():
            if mark in self.marks or len(self.marks) < MOST_LINES:
                self.marks[mark] += rows

    def manifest(self, source: DataSource, lengths: Sequence[int], trained: int, content: str | None) -> dict[str, Any]:
        """Return the source's part of the manifest. `lengths`: tokens of its rows; `content`: a hash of its files."""
        counts = asdict(self)
        there = counts.pop("there")
        heeded = Condition(source.filter).names if source.filter is not None else set()
        # Names of lines are last.
        marks = sorted(self.marks.items(), key=lambda mark: (mark[0].endswith(":"), -mark[1], mark[0]))
        counts["columns_unread"] = {
            name: dict(values.most_common())
            for name, values in sorted(self.columns_unread.items())
            if name not in heeded
        }
        return counts | {
            "name": source.name or source.path,
            "path": source.path,
            "rows_wanting": None if there is None else {"asked": source.rows, "there": there},
            "dropped": dict(sorted(self.dropped.items())),
            "lost": dict(sorted(self.lost.items())),
            "doubts": dict(sorted(self.doubts.items())),
            "marks": dict(marks[:SHOWN_MARKS]),
            "rows": len(lengths),
            "tokens": sum(lengths),
            "trained_tokens": trained,
            "content_sha256": content,
        }


def split_manifest(
    writer: SplitWriter, sources: Sequence[DataSource], tallies: Sequence[SourceTally], contents: Sequence[str | None]
) -> dict[str, Any]:
    """Return the manifest of a split; `contents`: a hash of each source's files."""
    described, lengths, trained = [], writer.lengths, writer.trained
    for index, (source, tally, content) in enumerate(zip(sources, tallies, contents, strict=True)):
        mine = [number == index for number in writer.sources]
        described.append(tally.manifest(source, list(compress(lengths, mine)), sum(compress(trained, mine)), content))
    split = {
        "path": "",
        "rows": len(lengths),
        "dropped": sum(tally.dropped.total() + tally.duplicates for tally in tallies),
        "tokens": sum(lengths),
        "label_tokens": sum(trained),
        "longest": max(lengths),
        "median": int(statistics.median(lengths)),
        "fingerprint": writer.fingerprint(),
        "most_labels": max(trained),
        "truncated": sum(tally.cut for tally in tallies),
        "sources": [
            {
                "name": d["name"],
                "rows": d["rows"],
                "tokens": d["tokens"],
                "label_tokens": d["trained_tokens"],
                "weight": s.weight,
            }
            for s, d in zip(sources, described, strict=True)
        ],
    }
    ordered = sorted(lengths)
    quantiles = {f"{share:.0%}": ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in QUANTILES}
    return {
        "split": split,
        "length_quantiles": quantiles,
        "sources": described,
        "groups": len(writer.groups),
        "weighted_rows": writer.weighted,
        "new_tokens": writer.uses,
        "labels": writer.labels(),
        "asked_again": writer.asked_again(),
        "cut_alike": writer.cut_alike(),
        "repeated": writer.repeated(),
        "short": writer.short(),
    }


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of an intact split; remove a damaged one and return `None`.

    Every file is read, once in a launch: neither its size nor its time tells of bits that a disk lost. Training reads
    them anyway.
    """
    try:
        manifest: dict[str, Any] = read_json(folder / MANIFEST)
        sums = manifest["checksums"]
        if (
            damage(folder, {name: {"bytes": size, ALGORITHM: sums[name]} for name, size in manifest["files"].items()})
            is None
        ):
            return manifest
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    if folder.exists():
        shutil.rmtree(folder)
    return None


def _hash(tokens: Integers) -> bytes:
    return hashlib.blake2b(tokens.tobytes(), digest_size=KEY_BYTES).digest()


WORDS, MOST_LINES, MOST_LETTERS = re.compile(r"[^\W\d_]{2,}\W+[^\W\d_]{2,}"), 50_000, 200
"""Of first and last lines: what is more than marks and names of code; how many are counted, and how much of each."""
LEAST_LINE, SHOWN_LINES = 20, 6
"""Characters of an answer that is counted as a line; and lines and short answers that are shown."""
LEAST_ALIKE, LEAST_CUT = 3, 100
"""Different answers of the same length that end in a word, and their characters, from which on they seem to be cut."""
ARROW = "data-00000-of-00001.arrow"
LENGTHS, SOURCES, LABELS = "lengths.i32", "sources.i32", "labels.i32"
BATCH_ROWS, BATCH_TOKENS = 8192, 2**22
"""An Arrow record batch ends with either; it is what is held in memory."""
TOKENS = pa.list_(pa.int32())
SCHEMA = pa.schema(
    [
        ("input_ids", TOKENS),
        ("labels", TOKENS),
        ("row", pa.int64()),
        ("source", pa.int32()),
        ("prompt_ids", TOKENS),
        ("reference", pa.string()),
        ("place", pa.string()),
        (WEIGHTS, pa.list_(pa.float32())),
    ]
)


Integers = NDArray[np.int32]


class TokenRow(NamedTuple):
    """One prepared row."""

    input_ids: Integers
    labels: Integers
    prompt_ids: Integers
    reference: str
    trained: int
    """Tokens that a loss is computed for: the first one follows nothing, and never is."""
    weights: NDArray[np.float32] | None = None
    """How much each token counts in the loss, 0 if it is not learnt; `None`: all that are count 1."""


class Made(NamedTuple):
    """What became of one example: no row, one, or several."""

    key: bytes
    """`KEY_BYTES` of a hash of its content."""
    held_out: bool
    group: str | None
    """The value of `data.group_by`."""
    place: str
    rows: list[TokenRow]
    outcome: EncodedExample | None
    """Of one that was skipped, cut, lost something or is wrong: what there is to say, without rows."""


class SplitWriter:
    """Write one split into a folder aside. A context manager: what was not published is gone when it is left."""

    def __init__(
        self, folder: Path, counted: Mapping[str, int] = MappingProxyType({}), starts: Sequence[str] = ()
    ) -> None:
        """`folder` is where the split is published; its neighbours that a killed process left half-written are
        removed. `counted`: tokens whose uses are counted, with their ids. `starts`: what the places of each source
        begin with, which its rows then omit.
        """
        self.folder, self._counted = folder, counted
        self.uses = dict.fromkeys(counted, 0)
        self._scratch = new_folder(folder.parent, folder.name)
        self._stream = pa.OSFile(str(self._scratch / ARROW), "wb")
        self._starts, self._schema = starts, SCHEMA.with_metadata({PLACES: json.dumps(starts)})
        self._writer = pa.ipc.new_stream(self._stream, self._schema)
        self._waiting: list[tuple[Any, ...]] = []
        self._tokens_waiting = 0
        self._digests = [hashlib.sha256() for _ in range(3)]
        self._of_weights = hashlib.sha256()
        self.weighted = 0
        """Rows with weights."""
        self.lengths, self.sources, self.trained = array("i"), array("i"), array("i")
        """By row: tokens, index of the source, tokens that a loss is computed for."""
        self.groups: set[str] = set()
        """Values of `data.group_by`."""
        self.answers: Counter[str] = Counter()
        """Spelling of an answer -> rows; counted until they are too many for labels."""
        self.lines: Counter[str] = Counter()
        """First and last lines of answers -> rows; counted until they are too many."""
        self._shortest: list[str] = []
        self._longest = 0
        self._longest_answers: set[str] = set()
        """The most characters of an answer, and the answers that have as many."""
        self._asked = array("Q")
        """Half a hash, in less memory, of what is read before each answer that is learnt."""
        self.questions = bytearray()
        """`KEY_BYTES` for each row: of a hash of what is read before its last answer, or its key where nothing is."""
        self.keys = bytearray()
        """`KEY_BYTES` of each row's example."""

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # a full disk was told already
            self._stream.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def append(self, example: Made, *, source: int, number: int) -> None:
        """Add the rows of an example; `number` is its place among those of the split."""
        place = example.place.removeprefix(self._starts[source])
        if example.group is not None:
            self.groups.add(example.group)
        for row in example.rows:
            length = np.int32(len(row.input_ids))
            for digest, part in zip(self._digests, (length, row.input_ids, row.labels), strict=True):
                digest.update(part.tobytes())
            if row.weights is not None:
                self._of_weights.update(np.int32(len(self.lengths)).tobytes() + row.weights.tobytes())
                self.weighted += 1
            for token, token_id in self._counted.items():
                self.uses[token] += int((row.input_ids == token_id).sum())
            self.lengths.append(int(length))
            self.sources.append(source)
            self.trained.append(row.trained)
            if row.reference and len(self.answers) <= MOST_LABELS:
                self.answers[row.reference] += 1
            text = row.reference.strip()
            if len(self.lines) <= MOST_LINES and ("\n" in text or len(text) >= LEAST_LINE):
                self.lines.update({text.partition("\n")[0][:MOST_LETTERS], text.rpartition("\n")[2][:MOST_LETTERS]})
            self._shortest = sorted({*self._shortest, text}, key=lambda answer: (len(answer), answer))[:SHOWN_LINES]
            if len(row.reference) > self._longest:
                self._longest, self._longest_answers = len(row.reference), set()
            if len(row.reference) == self._longest:
                self._longest_answers.add(row.reference)
            self.questions += _hash(row.prompt_ids) if len(row.prompt_ids) else example.key
            if len(row.prompt_ids):
                learnt = row.labels != IGNORED
                starts = {len(row.prompt_ids), *(np.flatnonzero(learnt[1:] & ~learnt[:-1]) + 1)}
                self._asked.extend(int.from_bytes(_hash(row.input_ids[:start])[:8]) for start in starts)
            values = (row.input_ids, row.labels, number, source, row.prompt_ids, row.reference, place, row.weights)
            self._waiting.append(values)
            self._tokens_waiting += int(length)
            if len(self._waiting) >= BATCH_ROWS or self._tokens_waiting >= BATCH_TOKENS:
                self._flush()
        self.keys += example.key * len(example.rows)

    def _flush(self) -> None:
        if self._waiting:
            columns = zip(SCHEMA, zip(*self._waiting, strict=True), strict=True)
            arrays = [pa.array(values, field.type) for field, values in columns]
            self._writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        self._waiting, self._tokens_waiting = [], 0

    def repeated(self) -> dict[str, int]:
        """Return lines that many answers begin or end with, as what a page or a program adds to them."""
        least = max(LEAST_ALIKE, len(self.lengths) // 200)
        alike = [line for line in self.lines.most_common() if line[1] >= least and WORDS.search(line[0])]
        return dict(alike[:SHOWN_LINES])

    def short(self) -> list[str]:
        """Return the shortest answers with fewer letters than the usual one has tokens."""
        return [answer for answer in self._shortest if answer and len(answer) < statistics.median(self.trained)]

    def labels(self) -> dict[str, int]:
        """Return the answers, each with its rows, the most frequent first; none if they are many or long."""
        few = len(self.answers) <= MOST_LABELS and all(map(LABEL.fullmatch, self.answers))
        return dict(self.answers.most_common()) if few else {}

    def asked_again(self) -> int:
        """Return the number of answers to what an earlier answer of the split answers too."""
        return len(self._asked) - len(np.unique(np.frombuffer(self._asked, np.uint64)))

    def cut_alike(self) -> dict[str, int] | None:
        """Return the length of the longest answers, and how many there are, if so many that something cut them."""
        open_ended = [answer for answer in self._longest_answers if answer[-1:].isalnum() or answer[-1:].isspace()]
        many = len(open_ended) >= max(LEAST_ALIKE, len(self._longest_answers) / 2) and self._longest >= LEAST_CUT
        return {"characters": self._longest, "answers": len(self._longest_answers)} if many else None

    def fingerprint(self) -> str:
        """Return a sha256 over lengths, tokens, labels and weights of all rows, in order."""
        digests = [*self._digests, *([self._of_weights] if self.weighted else [])]
        return hashlib.sha256("".join(digest.hexdigest() for digest in digests).encode()).hexdigest()

    def publish(self, manifest: Mapping[str, Any]) -> None:
        """Write the remaining rows and make the folder visible; of two processes that race, one publishes."""
        self._flush()
        self._writer.close()
        self._stream.close()
        with (self._scratch / ARROW).open("rb") as stream:
            os.fsync(stream.fileno())
        for name, content in ((LENGTHS, self.lengths), (SOURCES, self.sources), (LABELS, self.trained)):
            write_bytes(self._scratch / name, np.asarray(content, "<i4").tobytes())
        write_bytes(self._scratch / KEYS, bytes(self.keys))
        write_bytes(self._scratch / QUESTIONS, bytes(self.questions))
        state: dict[str, Any] = {
            "_data_files": [{"filename": ARROW}],
            "_fingerprint": self.fingerprint()[:16],
            "_format_columns": None,
        }
        state |= {"_format_kwargs": {}, "_format_type": None, "_output_all_columns": False, "_split": None}
        write_json(self._scratch / "state.json", state)  # what `datasets.load_from_disk` looks for
        write_json(
            self._scratch / "dataset_info.json", {"citation": "", "description": "", "homepage": "", "license": ""}
        )
        sizes = {path.name: path.stat().st_size for path in self._scratch.iterdir()}
        checksums = {name: checksum(self._scratch / name) for name in sizes}
        write_json(self._scratch / MANIFEST, {**manifest, "files": sizes, "checksums": checksums})
        self._scratch.chmod(0o755)
        try:
            self._scratch.rename(self.folder)
        except OSError:  # another process was first; its rows are the same
            if not (self.folder / MANIFEST).is_file():
                raise
        sync_path(self.folder.parent)
