"""Prepared rows as pieces of text (trained, only read, special), and in the terminal: coloured, framed, with what was skipped."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from sft_play.data.chat import IGNORED
from sft_play.data.manifest import counted_as, rows_cut
from sft_play.errors import printable
from sft_play.plan.mixture import Mixture

SEARCHED_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Neighbouring tokens of one kind."""

    text: str
    trained: bool
    """Whether a loss is computed for these tokens."""
    special: bool
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One prepared row."""

    index: int
    """Its place in the prepared split, from 0."""
    row: int
    """Where it stood among the rows that were read, from 0; rows of one split example share it."""
    source: str
    tokens: int
    trained: int
    pieces: tuple[Piece, ...]


def sample_of(index: int, row: Any, sources: Sequence[str], tokenizer: Any, special: frozenset[int]) -> Sample:
    """Returns the row at `index` of a prepared dataset with its text. `special`: ids that are shown as special tokens."""
    ids, labels = list(row["input_ids"]), list(row["labels"])
    trained = [position > 0 and label != IGNORED for position, label in enumerate(labels)]  # nothing predicts the first token
    kinds = [(kind, token in special) for kind, token in zip(trained, ids, strict=True)]
    pieces, start = [], 0
    for (is_trained, is_special), group in groupby(kinds):
        count = sum(1 for _ in group)
        text = tokenizer.decode(ids[start : start + count], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        pieces.append(Piece(text=text, trained=is_trained, special=is_special, tokens=count))
        start += count
    number = row.get("source", 0)
    name = sources[number] if number < len(sources) else ""
    return Sample(index=index, row=row["row"], source=name, tokens=len(ids), trained=sum(trained), pieces=tuple(pieces))


def chosen(rows: Any, count: int, seed: int, of_source: Sequence[int]) -> list[int]:
    """Returns `count` row indices in order: the same number of each source as far as it has them, chosen by `seed`."""
    by_source: dict[int, list[int]] = {}
    for index, source in enumerate(of_source):
        by_source.setdefault(source, []).append(index)
    shuffler = random.Random(seed)
    for indices in by_source.values():
        shuffler.shuffle(indices)
    taken: list[int] = []
    for turn in range(max(map(len, by_source.values()), default=0)):
        taken += [indices[turn] for _, indices in sorted(by_source.items()) if turn < len(indices)]
        if len(taken) >= count:
            break
    return sorted(taken[: min(count, len(rows))])


def holding(rows: Any, words: str, decode: Callable[[list[list[int]]], list[str]]) -> Iterator[int]:
    """Yields the indices of rows whose text holds `words`, letter case aside."""
    wanted = words.casefold()
    for start in range(0, len(rows), SEARCHED_AT_ONCE):
        ids = rows[start : start + SEARCHED_AT_ONCE]["input_ids"]
        for offset, text in enumerate(decode([list(row) for row in ids])):
            if wanted in text.casefold():
                yield start + offset


# Samples in the terminal: trained tokens coloured, special tokens framed, and what was left out.


TRAINED, SPECIAL, READ = "green", "magenta", "default"
WITHOUT_COLOUR = ("«", "»")
"""Around what is trained where nothing can be coloured (a file, a pipe)."""


def show(split: str, manifest: Mapping[str, Any], samples: Sequence[Sample], words: str | None, mixture: Mixture | None) -> None:
    """Prints a legend, the samples, how sources are mixed and what was left out."""
    if words and not samples:  # that no row holds them is said already
        return
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)  # `[/x]` and `:x:` are data here
    colours = console.color_system is not None
    word = counted_as(split)
    legend = Text(word, style=f"{TRAINED} bold") if colours else Text(word.join(WITHOUT_COLOUR))
    console.print(Text.assemble(legend, "  read only  ", Text("special token", style=SPECIAL if colours else ""), " ↵ line end"))
    for sample in samples:
        title = f"{split} row {sample.index} of {sample.source}: {sample.tokens} tokens, {sample.trained} {word}"
        console.print(Rule(printable(title), align="left", characters="─" if console.encoding.startswith("utf") else "-"))
        console.print(Text.assemble(*(_coloured(piece) for piece in sample.pieces)) if colours else Text(_marked(sample)))
    console.print()
    for line in mixture.describe() if mixture else []:
        console.print(f"mixture: {printable(line)}")
    for line in left_out(manifest):
        console.print(line)
    if words is None and len(samples) < manifest["split"]["rows"]:
        console.print(f"{len(samples)} of {manifest['split']['rows']:,} rows; more with ROWS=, SEARCH= or HTML=1")


def _coloured(piece: Piece) -> Text:
    style = SPECIAL if piece.special else TRAINED if piece.trained else READ
    return Text(_with_line_ends(piece), style=f"{style} bold" if piece.trained else style)


def _marked(sample: Sample) -> str:
    before, after = WITHOUT_COLOUR
    text = "".join(
        f"{before}{_with_line_ends(piece)}{after}" if piece.trained else printable(piece.text) for piece in sample.pieces
    )
    return text.replace(after + before, "")


def _with_line_ends(piece: Piece) -> str:
    """A line end that is learnt must be seen."""
    text = printable(piece.text)
    return text.replace("\n", "↵\n") if piece.trained else text


def left_out(manifest: Mapping[str, Any]) -> list[str]:
    """Returns a line for each reason for which rows of a source were left out, with the first places, and one for rows that were cut."""
    lines = []
    for source in manifest["sources"]:
        reasons = {**source["dropped"], **({"duplicate": source["duplicates"]} if source["duplicates"] else {})}
        for reason, count in reasons.items():
            places = [example["place"] for example in source.get("left_out", []) if example["reason"] == reason]
            shown = f": {', '.join(places[:3])}{', ...' if count > len(places[:3]) else ''}" if places else ""
            lines.append(f"left out of {printable(source['name'])}: {count:,} {reason}{printable(shown)}")
        if source["cut"]:
            lines.append(f"kept of {printable(source['name'])}: {rows_cut(source)}")
    return lines or ["no row was left out"]
