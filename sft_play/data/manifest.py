"""The manifest of a prepared split: for each source what was read, kept and skipped, and why; and the checksum of what its files hold."""

from __future__ import annotations

import shutil
import statistics
import sys
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import IO, Any

from sft_play.config.schema import DataSource
from sft_play.data.encode import Outcome
from sft_play.data.example import EMPTY, OTHER_FILE, SCANNED, SHOWN_PLACES, Faults
from sft_play.errors import DataError, raise_all
from sft_play.files import read_json, text_sha256
from sft_play.runs.manifest import ALGORITHM, damage, digests_of

MANIFEST = "manifest.json"
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
DUPLICATE = "duplicate"
NAMED_FILES = 3
"""In the terminal, of the documents that were left out for one reason."""


@dataclass(kw_only=True, slots=True)
class SourceTally:
    """Counts of one source, in rows as they were read (an example), unless it says tokens or prepared rows."""

    rows_read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Left out, by reason."""
    cut: int = 0
    """Kept, but shortened (`data.overlong`)."""
    lost: Counter[str] = field(default_factory=Counter)
    """Of those, how many lost what: kinds of turns, or parts of one."""
    answers_cut: int = 0
    """Answers that lost their end, and with it the token that ends a turn."""
    thoughts: int = 0
    """Thoughts of learnt turns that the chat template left out."""
    empty_thoughts: int = 0
    """Learnt answers that the chat template begins with an empty thought."""
    split: int = 0
    """Made into several rows (`data.overlong: split`, long documents)."""
    overlong: int = 0
    """Conversations and token rows longer than `model.max_seq_len`, whatever became of them."""
    overlong_tokens: int = 0
    """Their tokens, before anything was left out."""
    formats: Counter[str] = field(default_factory=Counter)
    there: int | None = None
    """How many rows there were, where the source's `rows` asks for more."""
    commit: str | None = None
    """Of a hub dataset, the commit that was read."""
    left_out: list[dict[str, str]] = field(default_factory=list)
    """`reason` and `place` of the first that were left out."""

    def add(self, outcome: Outcome) -> None:
        """Count what became of an example that was skipped, cut or lost something."""
        if outcome.dropped:
            self.dropped[outcome.dropped] += 1
            if self.dropped[outcome.dropped] <= SHOWN_PLACES:
                self.left_out.append({"reason": outcome.dropped, "place": outcome.place})
        self.cut += bool(outcome.lost)
        self.lost.update(outcome.lost)
        self.answers_cut += outcome.answers_cut
        self.thoughts += outcome.thoughts
        self.empty_thoughts += outcome.empty_thoughts
        self.overlong += bool(outcome.overlong)
        self.overlong_tokens += outcome.overlong


def source_manifest(
    source: DataSource, tally: SourceTally, lengths: Sequence[int], trained: int, content: str | None
) -> dict[str, Any]:
    """Return what is said of one source. `lengths`: tokens of its prepared rows; `content`: a hash of its files."""
    return {
        "name": source.name or source.path,
        "path": source.path,
        "format": max(tally.formats, key=lambda form: tally.formats[form], default=None),
        "rows_read": tally.rows_read,
        "rows_wanting": None if tally.there is None else {"asked": source.rows, "there": tally.there},
        "kept": tally.kept,
        "dropped": dict(sorted((reason, n) for reason, n in tally.dropped.items() if reason != DUPLICATE)),
        "duplicates": tally.dropped[DUPLICATE],
        "left_out": tally.left_out,
        "cut": tally.cut,
        "lost": dict(sorted(tally.lost.items())),
        "answers_cut": tally.answers_cut,
        "thoughts_left_out": tally.thoughts,
        "empty_thoughts": tally.empty_thoughts,
        "split": tally.split,
        "overlong": tally.overlong,
        "overlong_tokens": tally.overlong_tokens,
        "rows": len(lengths),
        "tokens": sum(lengths),
        "trained_tokens": trained,
        "length_quantiles": quantiles(lengths),
        "content_sha256": content,
        "hub_commit": tally.commit,
    }


def split_manifest(
    sources: Sequence[DataSource],
    tallies: Sequence[SourceTally],
    *,
    lengths: array[int],
    of_source: array[int],
    trained: array[int],
    contents: Sequence[str | None],
    fingerprint: str,
) -> dict[str, Any]:
    """Return the manifest of a split. `lengths`, `of_source` (index of the source) and `trained` (tokens) are by prepared row."""
    described = []
    for index, (source, tally, content) in enumerate(zip(sources, tallies, contents, strict=True)):
        chosen = [number == index for number in of_source] if len(sources) > 1 else [True] * len(lengths)
        described.append(source_manifest(source, tally, list(compress(lengths, chosen)), sum(compress(trained, chosen)), content))
    dropped = sum((tally.dropped for tally in tallies), Counter[str]())
    facts = [
        {"name": d["name"], "rows": d["rows"], "tokens": d["tokens"], "label_tokens": d["trained_tokens"], "weight": s.weight}
        for s, d in zip(sources, described, strict=True)
    ]
    split = {
        "path": "",
        "rows": len(lengths),
        "dropped": dropped.total(),
        "tokens": sum(lengths),
        "label_tokens": sum(trained),
        "longest": max(lengths),
        "median": int(statistics.median(lengths)),
        "fingerprint": fingerprint,
        "most_labels": max(trained),
        "truncated": sum(tally.cut for tally in tallies),
        "sources": facts,
    }
    return {
        "split": split,
        "answers_cut": sum(tally.answers_cut for tally in tallies),
        "thoughts_left_out": sum(tally.thoughts for tally in tallies),
        "empty_thoughts": sum(tally.empty_thoughts for tally in tallies),
        "rows_read": sum(tally.rows_read for tally in tallies),
        "dropped": dict(sorted((reason, n) for reason, n in dropped.items() if reason != DUPLICATE)),
        "duplicates": dropped[DUPLICATE],
        "formats": dict(sum((tally.formats for tally in tallies), Counter[str]())),
        "length_quantiles": quantiles(lengths),
        "sources": described,
    }


def quantiles(lengths: Sequence[int]) -> dict[str, int]:
    """Return lengths in tokens that the given shares of rows do not exceed; empty for no row."""
    found = sorted(lengths)
    return {f"{share:.0%}": found[min(len(found) - 1, int(share * len(found)))] for share in QUANTILES if found}


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a split that is there as it was written; removes what is damaged and returns `None`.

    Every file is read, once in a launch: neither its size nor its time tells of bits that a disk lost. Training reads them anyway.
    """
    try:
        manifest: dict[str, Any] = read_json(folder / MANIFEST)
        sums = manifest["checksums"]
        if damage(folder, {name: {"bytes": size, ALGORITHM: sums[name]} for name, size in manifest["files"].items()}) is None:
            return manifest
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    if folder.exists():
        shutil.rmtree(folder)
    return None


def summary(name: str, manifest: Mapping[str, Any]) -> str:
    """Return what is printed about a split: one line, and with several sources one more for each."""
    split = manifest["split"]
    share = split["label_tokens"] / split["tokens"]
    first = (
        f"{name} data: {split['rows']:,} {'row' if split['rows'] == 1 else 'rows'}, {split['tokens']:,} tokens, "
        f"{share:.0%} of them {counted_as(name)}, median row {split['median']}, longest {split['longest']}"
    )
    if name == "training":
        first += _never_trained(split["sources"])
    lines = [first, *(_source_line(source, name) for source in manifest["sources"])]
    gone = sum(rows for reason, rows in manifest["dropped"].items() if reason.endswith("model.max_seq_len"))
    if 2 * gone > manifest["rows_read"]:
        whole = any(reason.startswith("longer") for reason in manifest["dropped"])  # else they were cut, and too long even so
        other = ", or cut them: DATA_OVERLONG=split" if whole else ""
        lines.append(
            f"  warning: {gone:,} of {manifest['rows_read']:,} rows are left out for their length; raise MODEL_MAX_SEQ_LEN{other}"
        )
    if ends := manifest["answers_cut"]:
        what = (
            f"{ends:,} answers cut before their end: they teach no stop"
            if ends > 1
            else "1 answer cut before its end: it teaches no stop"
        )
        lines.append(f"  {what}; raise MODEL_MAX_SEQ_LEN, or leave such rows out with DATA_OVERLONG=truncate")
    if thoughts := manifest.get("thoughts_left_out", 0):  # a manifest of an earlier version says nothing of them
        what = f"{thoughts:,} thoughts" if thoughts > 1 else "1 thought"
        lines.append(f"  {what} of learnt turns left out by the chat template, so not learnt: docs/data.md, What is learnt")
    if empty := manifest.get("empty_thoughts", 0):
        what = f"{empty:,} learnt answers begin" if empty > 1 else "1 learnt answer begins"
        lines.append(f"  {what} with an empty thought, which the chat template writes; their tokens are learnt too: docs/data.md")
    shared = manifest.get("overlap")
    if shared and shared["rows"]:
        lines.append(
            f"  {shared['rows']:,} of its rows {'is' if shared['rows'] == 1 else 'are'} in the training data too: scores on them say little"
        )
    return "\n".join(lines)


def _never_trained(sources: Sequence[Mapping[str, Any]]) -> str:
    """Return what is said of sources that stand in the counts of the training data, but not in any epoch."""
    rows = sum(source["rows"] for source in sources if source["weight"] == 0)
    tokens = sum(source["tokens"] for source in sources if source["weight"] == 0)
    have = "has weight 0 and is" if rows == 1 else "have weight 0 and are"
    return f"; {rows:,} of the rows ({tokens:,} tokens) {have} never trained" if rows else ""


def _source_line(source: Mapping[str, Any], name: str) -> str:
    lacks = ", so it has no validation loss" if name == "validation" and not source["kept"] else ""
    if not source["rows_read"]:
        return f"  {source['name']}: no row{lacks}"
    form = f" as {source['format']}" if source["format"] else ""
    parts = [f"{source['rows_read']:,} read{form}", f"{source['kept']:,} kept"]
    wanting = source.get("rows_wanting")
    parts += [f"rows: {wanting['asked']:,} asked, {wanting['there']:,} there"] if wanting else []
    left_out = {**source["dropped"], **({DUPLICATE: source["duplicates"]} if source["duplicates"] else {})}
    parts += [f"{count:,} left out ({reason}{_files(source, reason)})" for reason, count in left_out.items()]
    parts += [rows_cut(source)] if source["cut"] else []
    parts += [f"{source['split']:,} split" + (f" into {source['rows']:,} rows in all")] if source["split"] else []
    long = f"; {source['overlong']:,} were too long ({source['overlong_tokens']:,} tokens)" if source["overlong"] else ""
    return (
        f"  {source['name']}: {', '.join(parts)}{lacks}; {source['tokens']:,} tokens, {source['trained_tokens']:,} "
        f"{counted_as(name)}{long}"
    )


def counted_as(name: str) -> str:
    """Return what is done with the answers of a split: only those of the training data are trained."""
    return "trained" if name in ("training", "train") else "scored"


def rows_cut(source: Mapping[str, Any]) -> str:
    """Return how many rows of a source were cut, and how many of them lost what."""
    lost = ", ".join(f"{rows:,} lost {what}" for what, rows in source["lost"].items())
    return f"{source['cut']:,} cut to model.max_seq_len ({lost})"


def _files(source: Mapping[str, Any], reason: str) -> str:
    """Return the names of files without rows; rows that were left out for another reason are not named."""
    if reason not in (EMPTY, OTHER_FILE, SCANNED):
        return ""
    places = [found["place"] for found in source["left_out"] if found["reason"] == reason]
    more = ", ..." if len(places) > NAMED_FILES else ""
    return f": {', '.join(places[:NAMED_FILES])}{more}" if places else ""


def files_sha256(paths: Sequence[Path]) -> str:
    """Return a sha256 over names and contents of `paths`, in order. Raises `DataError` for a file that cannot be read."""
    try:
        digests = digests_of(paths, "data")
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", place=str(error.filename or paths[0])) from None
    return text_sha256("\n".join(f"{path.name} {digest}" for path, digest in zip(paths, digests, strict=True)))


# What is wrong with rows, gathered: up to five different problems are shown, each once with its number of rows; one file holds all.


class RowProblems:
    """Gathers bad rows: to raise them together, or with `drop` to say what was skipped (`data.bad_rows`)."""

    def __init__(self, file: Path, *, drop: bool = False) -> None:
        """`file`: gets a line for each row, `place: reason`; it is made with the first one."""
        self.file, self.drop = file, drop
        self._stream: IO[str] | None = None
        self._faults = Faults()
        self.good = 0
        """Rows that nothing is wrong with, so far."""
        self._ended: list[DataError] = []

    @property
    def stops(self) -> bool:
        """Whether something was found that ends the preparation, so that nothing needs to be written."""
        return bool(self._ended) or (not self.drop and self._faults.rows > 0)

    def add(self, error: DataError) -> None:
        if self._stream is None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._stream = self.file.open("w", encoding="utf-8", errors="backslashreplace")
        self._stream.write(" ".join(f"{error.place}: {error.message}".split()) + "\n")
        self._faults.add(error)

    def add_error(self, error: DataError, place: str) -> None:
        """Keep what ended the reading of a source, which is never skipped."""
        self._ended.append(DataError(error.message, place=error.place or place, hint=error.hint))

    def end(self) -> None:
        """Raise `DataError` for what cannot be skipped; say which rows were, and where all of them are named."""
        if self._stream is not None:
            self._stream.close()
            what = "; left out" if self.drop else "; DATA_BAD_ROWS=drop leaves them out" if self.good else ""
            print(f"bad rows: {self._faults.rows:,}, each with its reason in {self.file}{what}", file=sys.stderr, flush=True)
        found = self._faults.told()
        if self.drop:
            for error in found:
                print(f"left out: {error.place}: {error.message}", file=sys.stderr, flush=True)
        raise_all([*([] if self.drop else found), *self._ended])
