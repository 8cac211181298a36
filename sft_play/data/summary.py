"""What is printed about a prepared split: what was read, kept, left out and lost, and what its author may not know."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sft_play.config.metrics import are_labels, label_of
from sft_play.data.documents import EMPTY, SCANNED
from sft_play.data.sources import OTHER_FILE
from sft_play.data.store import MANIFEST, OF_BOTH
from sft_play.data.tokens import ANSWER_END, ANSWER_TOO_LONG, TOO_LONG
from sft_play.files import read_json
from sft_play.text import list_some, plural

SHOWN_SPELLINGS, SHOWN_LABELS, SHOWN_UNREAD = 5, 20, 12
"""Of what the manifest has all."""
OFTENER, ALIKE, LEAST_LETTERS, DIGIT = 5, 0.85, 5, re.compile(r"\d")
"""Of a label that may be misspelt: how much more frequent the right one is at least, and how alike, by
`difflib.SequenceMatcher.ratio`; shorter labels, and those with digits, may differ by a letter.
"""
SHOWN_LETTERS = 60
"""Of a line that many answers share."""
NAMED_FILES = 3
"""Of the documents that were left out for one reason."""


def summary(name: str, manifest: Mapping[str, Any]) -> str:
    """Return what is printed about a split: one line, one more for each source, and warnings."""
    split, sources = manifest["split"], manifest["sources"]
    counted = counted_as(name)
    first = (
        f"{name} data: {split['rows']:,} {'row' if split['rows'] == 1 else 'rows'}, {split['tokens']:,} tokens,"
        f" {split['label_tokens'] / split['tokens']:.0%} of them {counted}, median row {split['median']}, longest"
        f" {split['longest']}"
    )
    unused = [source for source in split["sources"] if source["weight"] == 0]
    if rows := sum(source["rows"] for source in unused) if name == "training" else 0:
        first += (
            f"; of sources with weight 0, never trained: {plural(rows, 'row')} ({sum(s['tokens'] for s in unused):,}"
            " tokens)"
        )
    lines = [first, *(_source_line(source, name) for source in sources)]
    reasons = [(reason, rows) for source in sources for reason, rows in source["dropped"].items()]
    gone, read = (
        sum(rows for why, rows in reasons if why in (TOO_LONG, ANSWER_TOO_LONG)),
        sum(s["rows_read"] for s in sources),
    )
    if 2 * gone > read:
        whole = any(reason == TOO_LONG for reason, _ in reasons)  # else they were cut, and too long even so
        other = ", or cut them: DATA_OVERLONG=split" if whole else ""
        lines.append(
            f"  warning: {gone:,} of {read:,} rows are left out for their length; raise MODEL_MAX_SEQ_LEN{other}"
        )
    if groups := manifest["groups"]:
        held_out = manifest.get("held_out")
        share = f", with {held_out['share']:.0%} of the rows, {held_out['asked']:.0%} asked" if held_out else ""
        lines.append(f"  groups of `data.group_by`: {groups:,}{share}")
    lines += _lost_or_unread(sources, name)
    if weighted := manifest["weighted_rows"]:
        purpose = "" if name == "training" else ", which scores do not use"
        lines.append(f"  rows with weights other than 1{purpose}: {weighted:,}")
    for token, uses in manifest["new_tokens"].items() if name == "training" else ():
        never = f"  warning: the new token `{token}` is in no training row"
        lines.append(f"  new token `{token}`: {uses:,} uses" if uses else never)
    lines += _about_labels(manifest["labels"])
    if unknown := manifest.get("overlap", {}).get("labels"):
        lines.append(f"  labels that no row of the training data has: {_counted(unknown)}")
    if (again := manifest["asked_again"]) and name == "training":
        lines.append(f"  answers to a question, with all that stands before it, of an earlier row: {again:,}")
    if alike := manifest["cut_alike"]:
        lines.append(
            f"  the {alike['answers']:,} longest answers have {alike['characters']:,} characters each, as if something"
            " had cut them"
        )
    labels = are_labels(manifest["labels"])
    for line, rows in manifest["repeated"].items() if not labels else ():
        shown = line if len(line) <= SHOWN_LETTERS else f"{line[:SHOWN_LETTERS]}..."
        lines.append(f"  answers that begin or end with the same line: {rows:,}, `{shown}`")
    if manifest["short"] and not labels:
        lines.append(f"  shortest answers: {', '.join(f'`{answer}`' for answer in manifest['short'])}")
    if asked := manifest.get("overlap", {}).get("questions"):
        lines.append(
            f"  rows with a question of the training data: {asked:,}; `data.group_by` keeps rows that belong together"
            " on one side"
        )
    if shared := manifest.get("overlap", {}).get("rows"):
        lines.append(f"  rows that are in the training data too: {shared:,}; scores on them say little")
    return "\n".join(lines)


def labels_only_here(manifest: Mapping[str, Any], train: Path) -> dict[str, int]:
    """Return the answers of a split, each with its rows, that the training data in the folder `train` lack, if those
    are labels.
    """
    trained = read_json(train / MANIFEST)["labels"]
    return {text: rows for text, rows in manifest["labels"].items() if are_labels(trained) and text not in trained}


def _about_labels(labels: Mapping[str, int]) -> list[str]:
    alike: dict[str, dict[str, int]] = {}
    for text, rows in labels.items():
        alike.setdefault(label_of(unicodedata.normalize("NFKC", text)), {})[text] = rows
    apart = [_counted(spelt) for spelt in alike.values() if len(spelt) > 1][:SHOWN_SPELLINGS]
    rare = [(text, _misspelt(text, labels)) for text in labels]
    likely = [f"`{text}` ({labels[text]:,}) for `{other}` ({labels[other]:,})" for text, other in rare if other]
    return [
        *([f"  answers are labels, {len(labels)} in all: {_counted(labels)}"] if are_labels(labels) else []),
        *(f"  warning: answers that differ only by case, blanks or Unicode's form, learnt apart: {a}" for a in apart),
        *(
            [f"  labels that may be misspelt: {list_some(likely, SHOWN_SPELLINGS)}"]
            if are_labels(labels) and likely
            else []
        ),
    ]


def _misspelt(text: str, labels: Mapping[str, int]) -> str | None:
    """Return the label that a rare one may stand for: one with nearly the same letters, several times as frequent."""
    others = [other for other, rows in labels.items() if rows >= OFTENER * labels[text]]
    close = get_close_matches(text, others, n=1, cutoff=ALIKE) if len(text) >= LEAST_LETTERS else []
    return close[0] if close and label_of(close[0]) != label_of(text) and not DIGIT.search(text) else None


def _counted(labels: Mapping[str, int]) -> str:
    return list_some([f"`{text}` ({rows:,})" for text, rows in labels.items()], SHOWN_LABELS)


def _lost_or_unread(sources: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    """Return a line for each kind of thing that is in the rows and is not learnt."""
    lines = []
    if ends := sum(source["lost"].get(ANSWER_END, 0) for source in sources):
        lines.append(
            f"  answers cut before their end, which teach no stop: {ends:,}; raise MODEL_MAX_SEQ_LEN, or leave such"
            " rows out with DATA_OVERLONG=truncate"
        )
    for source in sources if name == "training" else ():
        columns = sorted(map(_values, source["columns_unread"].items()), key=lambda shown: ":" not in shown)
        if columns:
            lines.append(f"  not read of {source['name']}: {list_some(columns, SHOWN_UNREAD)}")
        if marks := ", ".join(f"`{mark}` {rows:,}" for mark, rows in source["marks"].items()):
            lines.append(f"  in texts of {source['name']}, learnt as they are if a program put them there: {marks}")
    doubts = sum((Counter(source["doubts"]) for source in sources), Counter[str]())
    first = {doubt: place for source in reversed(sources) for doubt, place in source["doubt_places"].items()}
    return [
        *lines,
        *(f"  {doubt}: {plural(rows, 'row')}, first {first[doubt]}" for doubt, rows in sorted(doubts.items())),
    ]


def _values(column: tuple[str, Mapping[str, int]]) -> str:
    """Return the name of what is not read, and its values if some come again, as those of a mark do."""
    name, values = column
    words = all(value.replace("_", "").isalpha() for value in values)
    marks = "" not in values and (words or 1 < len(values) < sum(values.values()))
    each = ", ".join(f"`{value}` {rows:,}" for value, rows in values.items())
    return f"{name} ({sum(values.values()):,}{f': {each}' if marks else ''})"


def _source_line(source: Mapping[str, Any], name: str) -> str:
    lacks = ", so it has no validation loss" if name == "validation" and not source["kept"] else ""
    if not source["rows_read"]:
        return f"  {source['name']}: no row{lacks}"
    form = f" as {source['format']}" if source["format"] else ""
    parts = [f"{source['rows_read']:,} read{form}", f"{source['kept']:,} kept"]
    wanting = source["rows_wanting"]
    parts += [f"rows: {wanting['asked']:,} asked, {wanting['there']:,} there"] if wanting else []
    parts += [f"{count:,} left out ({reason}{_files(source, reason)})" for reason, count in left_out_of(source).items()]
    parts += [rows_cut(source)] if source["cut"] else []
    parts += [f"{source['split']:,} split into {source['rows']:,} rows in all"] if source["split"] else []
    long = (
        f"; {source['overlong']:,} were too long ({source['overlong_tokens']:,} tokens)" if source["overlong"] else ""
    )
    return (
        f"  {source['name']}: {', '.join(parts)}{lacks}; {source['tokens']:,} tokens, {source['trained_tokens']:,} "
        f"{counted_as(name)}{long}"
    )


def left_out_of(source: Mapping[str, Any]) -> dict[str, int]:
    """Return how many rows of a source were left out, by reason, copies among them."""
    return source["dropped"] | ({"duplicate": source["duplicates"]} if source["duplicates"] else {})


def counted_as(name: str) -> str:
    """Return what is done with the answers of a split: only those of the training data are trained."""
    return "trained" if name in ("training", "train") else "scored"


def rows_cut(source: Mapping[str, Any]) -> str:
    """Return how many rows of a source were cut, and how many of them lost what."""
    lost = ", ".join(f"{rows:,} lost {what}" for what, rows in source["lost"].items())
    return f"{source['cut']:,} cut to model.max_seq_len ({lost})"


def _files(source: Mapping[str, Any], reason: str) -> str:
    """Return the names of files without rows; rows that were left out for another reason are not named."""
    if reason.removesuffix(OF_BOTH) not in (EMPTY, OTHER_FILE, SCANNED):
        return ""
    places = [row["place"] for row in source["left_out"] if row["reason"] == reason]
    ellipsis = ", ..." if len(places) > NAMED_FILES else ""
    return f": {', '.join(places[:NAMED_FILES])}{ellipsis}" if places else ""
