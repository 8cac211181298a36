"""Answers that are labels: how often each is right, and what is answered instead. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sft_play.config.metrics import OF_LABELS
from sft_play.errors import DataError

MOST_LABELS = 100
"""More different references than this are texts."""
OTHER = "(no label)"
"""An answer that no reference has."""


def label_of(text: str) -> str:
    """Return what is compared: small letters, and one blank where there are several."""
    return " ".join(text.casefold().split())


def accuracy(reference: str, answer: str) -> float:
    """Return 1 where the answer is the reference's label, else 0."""
    return float(label_of(reference) == label_of(answer))


def macro_f1(references: Sequence[str], answers: Sequence[str]) -> Callable[[Any], float]:
    """Return what gives, of indices of answers, the mean F1 of their references' labels, as scikit-learn's
    `average="macro"` over these labels. Raise `DataError` where the references are no labels.
    """
    labels = _labels(references)
    if len(labels) > MOST_LABELS:
        raise DataError(f"the references hold {len(labels)} different texts; labels are at most {MOST_LABELS}")
    number = {label: index for index, label in enumerate(labels)}
    said = np.array([number[label_of(text)] for text in references])
    given = np.array([number.get(label_of(text), len(labels)) for text in answers])

    def mean(picks: Any) -> float:
        counts = np.zeros((len(labels), len(labels) + 1), dtype=np.int64)
        np.add.at(counts, (said[picks], given[picks]), 1)
        sizes = counts.sum(axis=1) + counts.sum(axis=0)[:-1]
        known = counts.sum(axis=1) > 0  # a resample may miss a label
        return float((2 * counts.diagonal()[known] / sizes[known]).mean())

    return mean


def confusion(pairs: Sequence[tuple[str, str]]) -> dict[str, Any] | None:
    """Return label -> `precision`, `recall`, `f1`, `n`, and `answered`: how often which label was given; `None` where
    the references are no labels.

    Labels are named as the first reference writes them.
    """
    names = _labels([reference for reference, _ in pairs])
    if not names or len(names) > MOST_LABELS:
        return None
    counts = Counter((names[label_of(one)], names.get(label_of(two), OTHER)) for one, two in pairs)
    found: dict[str, Any] = {}
    for name in names.values():
        answered = {other: counts[name, other] for other in (*names.values(), OTHER) if counts[name, other]}
        n, given, right = sum(answered.values()), sum(counts[one, name] for one in names.values()), counts[name, name]
        found[name] = {
            "precision": right / given if given else 0.0,
            "recall": right / n,
            "f1": 2 * right / (given + n),
            "n": n,
            "answered": answered,
        }
    return found


def classification(scores: Iterable[str], pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the table of the labels, as `scores.json` holds it, where a score of labels was asked for."""
    found = confusion(pairs) if {*OF_LABELS} & {*scores} else None
    return {"classification": found} if found else {}


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return the table that the user reads."""
    width = min(30, max(12, *map(len, found)))
    heading = f"{'label':<{width}} precision  recall      F1      n   answered as"
    return [
        heading,
        *(
            f"{name:<{width}} {one['precision']:9.3f} {one['recall']:7.3f} {one['f1']:7.3f} {one['n']:6,}   "
            + ", ".join(f"{other} {count}" for other, count in sorted(one["answered"].items(), key=lambda p: -p[1]))
            for name, one in found.items()
        ),
    ]


def _labels(references: Sequence[str]) -> dict[str, str]:
    """Return the labels, in order, each with its name."""
    found: dict[str, str] = {}
    for text in references:
        found.setdefault(label_of(text), " ".join(text.split()) or '""')
    return dict(sorted(found.items()))
