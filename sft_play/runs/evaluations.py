"""What an evaluation left in its folder: scores, answers, benchmarks. Read by whoever shows or compares them; no heavy packages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sft_play.files import read_json

SCORES = "scores.json"
PREDICTIONS = "predictions.jsonl"
BENCHMARKS = "benchmarks.json"
LABELS = {
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "bleu": "BLEU",
    "chrf": "chrF",
    "exact_match": "exact match",
    "f1": "token F1",
}
"""Metric -> what the user reads; one that is not here is called by its own name."""
INTERVAL = frozenset({"mean", "low", "high", "n"})
LEAST_ROWS = 20
"""Of fewer rows a percentile bootstrap's interval is too narrow to decide by: by 9 % at 20, by 47 % at 4 (sqrt((n-1)/n) z/t, Hesterberg 2015,
"What Teachers Should Know About the Bootstrap")."""


def label_of_metric(name: str) -> str:
    """Returns what the user reads for a metric."""
    return LABELS.get(name, name)


def metrics_of(scores: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the scores of answers: metric -> `mean`, `low`, `high`, `n`, in the order of the file."""
    return {name: value for name, value in scores.items() if isinstance(value, dict) and value.keys() >= INTERVAL}


def read_scores(folder: Path) -> dict[str, Any] | None:
    """Returns an evaluation's scores; `None` where none was finished, or its answers are gone."""
    try:
        scores: dict[str, Any] = read_json(folder / SCORES)
    except (OSError, ValueError):
        return None
    return scores if not scores.get("answers") or (folder / PREDICTIONS).is_file() else None


def read_benchmarks(folder: Path) -> dict[str, Any] | None:
    """Returns what standard benchmarks found for these weights; `None` where none was run."""
    try:
        found: dict[str, Any] = read_json(folder / BENCHMARKS)
    except (OSError, ValueError):
        return None
    return found


def read_predictions(folder: Path) -> list[dict[str, Any]]:
    """Returns the answers of an evaluation, in the order of the file; none where it was loss only."""
    path = folder / PREDICTIONS
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def data_name(path: str, fingerprint: str) -> str:
    """Returns a short name for other data than a run's own: of the file, and of its rows, so that no two share a folder."""
    stem = re.sub(r"[^\w.+=-]+", "-", Path(path.partition(":")[2] or path).name.partition(".")[0]).strip("-._") or "data"
    return f"{stem[:40]}-{fingerprint[:8]}"
