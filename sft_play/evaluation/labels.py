"""Score answers that are labels: how often each is right, and what is answered instead. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sft_play.config.metrics import MOST_LABELS, OF_LABELS, label_of
from sft_play.errors import DataError

OTHER = "(no label)"
"""Stands for an answer that matches no reference."""


def accuracy(reference: str, answer: str) -> float:
    """Return 1 if the answer is the reference's label, else 0."""
    return float(label_of(reference) == label_of(answer))


def macro_f1(references: Sequence[str], answers: Sequence[str]) -> Callable[[Any], float]:
    """Return a function of answer indices: the mean F1 over their references' labels.

    It equals scikit-learn's `average="macro"` over these labels. Raise `DataError` if the references are not labels.
    """
    labels = _labels(references)
    if len(labels) > MOST_LABELS:
        raise DataError(f"the references contain {len(labels)} different texts; labels are at most {MOST_LABELS}")
    number = {label: index for index, label in enumerate(labels)}
    reference_labels = np.array([number[label_of(text)] for text in references])
    answer_labels = np.array([number.get(label_of(text), len(labels)) for text in answers])

    def mean(picks: Any) -> float:
        counts = np.zeros((len(labels), len(labels) + 1), dtype=np.int64)
        np.add.at(counts, (reference_labels[picks], answer_labels[picks]), 1)
        sizes = counts.sum(axis=1) + counts.sum(axis=0)[:-1]
        present = counts.sum(axis=1) > 0  # a resample may miss a label
        return float((2 * counts.diagonal()[present] / sizes[present]).mean())

    return mean


def confusion(pairs: Sequence[tuple[str, str]]) -> dict[str, Any] | None:
    """Return label -> `precision`, `recall`, `f1`, `n`, and `answered` (answer -> count).

    Return `None` if the references are not labels. Labels are spelled as in their first reference.
    """
    names = _labels([reference for reference, _ in pairs])
    if not names or len(names) > MOST_LABELS:
        return None
    counts = Counter((names[label_of(text)], names.get(label_of(answer), OTHER)) for text, answer in pairs)
    table: dict[str, Any] = {}
    for name in names.values():
        answered = {other: counts[name, other] for other in (*names.values(), OTHER) if counts[name, other]}
        n, right = sum(answered.values()), counts[name, name]
        answers = sum(counts[label, name] for label in names.values())
        table[name] = {
            "precision": right / answers if answers else 0.0,
            "recall": right / n,
            "f1": 2 * right / (answers + n),
            "n": n,
            "answered": answered,
        }
    return table


def classification(scores: Iterable[str], pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the table of labels for `scores.json`, if `scores` include a score of labels."""
    table = confusion(pairs) if {*OF_LABELS} & {*scores} else None
    return {"classification": table} if table else {}


def lines(table: Mapping[str, Any]) -> list[str]:
    """Return the table of labels as lines for the user."""
    width = min(30, max(12, *map(len, table)))
    heading = f"{'label':<{width}} precision  recall      F1      n   answered as"
    return [
        heading,
        *(
            f"{name:<{width}} {row['precision']:9.3f} {row['recall']:7.3f} {row['f1']:7.3f} {row['n']:6,}   "
            + ", ".join(f"{other} {count}" for other, count in sorted(row["answered"].items(), key=lambda p: -p[1]))
            for name, row in table.items()
        ),
    ]


def _labels(references: Sequence[str]) -> dict[str, str]:
    """Return label -> its spelling in the first reference, sorted."""
    labels: dict[str, str] = {}
    for text in references:
        labels.setdefault(label_of(text), " ".join(text.split()) or '""')
    return dict(sorted(labels.items()))
