"""What is kept of an evaluation: which scores count as whole, and what folders of other data are called."""

from __future__ import annotations

from pathlib import Path

from sft_play.evaluation.evaluate import kept_scores
from sft_play.files import write_json, write_text
from sft_play.runs.folder import metrics_of, read_predictions

INTERVAL = {"mean": 0.5, "low": 0.4, "high": 0.6, "n": 3}
SCORES = {"step": 2, "loss": 1.0, "bleu": INTERVAL, "answers": 3, "speed": {"mean": 1.0}, "settings": {"key": "k"}}


def write(folder: Path, **changed: object) -> Path:
    write_json(folder / "scores.json", SCORES | changed)
    write_text(folder / "predictions.jsonl", '{"row": 1}\n')
    return folder


def test_the_same_key_is_kept(tmp_path: Path) -> None:
    found = kept_scores(write(tmp_path), {"key": "k"})
    assert found is not None
    assert list(metrics_of(found)) == ["bleu"]
    assert read_predictions(tmp_path) == [{"row": 1}]


def test_what_is_not_whole_or_not_the_same_is_made_again(tmp_path: Path) -> None:
    assert kept_scores(tmp_path / "none", {"key": "k"}) is None
    assert kept_scores(write(tmp_path), {"key": "other"}) is None
    assert kept_scores(write(tmp_path, complete=False), {"key": "k"}) is None, "a time budget ended it early"
    (write(tmp_path) / "predictions.jsonl").unlink()
    assert kept_scores(tmp_path, {"key": "k"}) is None, "its answers are gone"
    write_text(tmp_path / "scores.json", "{")
    assert kept_scores(tmp_path, {"key": "k"}) is None
