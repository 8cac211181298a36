"""Prepared rows as pieces of text: what is trained, what is only read, what is a special token."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from sft_play.data.template import IGNORED

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
