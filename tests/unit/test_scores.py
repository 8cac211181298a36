"""ROUGE is rouge_score's own, BLEU and chrF sacrebleu's, intervals cover what they promise, and batches are divided
without loss.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU, CHRF

from sft_play.config.metrics import LABELS
from sft_play.errors import DataError
from sft_play.evaluation.scores import (
    CORPUS,
    OF_SINGLE_ANSWERS,
    LibraryMetric,
    PairedDifference,
    confusion,
    exact_match,
    label_lines,
    library_metrics,
    paired_difference,
    score_answers,
    together,
    token_f1,
)
from sft_play.evaluation.scores import ROUGE as METRICS
from sft_play.evaluation.scores import mean_interval as bootstrap
from tests.documents import ROOT
from tests.library_metric import library_metric

PAIRS = [
    ("Return the sum of two numbers.", "Returns sums of the numbers"),
    ("Open a file for reading.", ""),
    ("", "anything"),
    ("Größe 12 öffnen", "grosse 12 offnen"),
    ("日本語", "日本語"),
    ("same words here", "same words here"),
]


REFERENCES = [reference for reference, _ in PAIRS]
ANSWERS = [answer for _, answer in PAIRS]


def test_every_metric_with_a_label_is_computed() -> None:
    assert LABELS.keys() == {*METRICS, *CORPUS, *OF_SINGLE_ANSWERS, "macro_f1"}


def test_scores_of_labels_are_those_of_their_confusion_matrix() -> None:
    references = ["Billing", "billing", "bug", "bug", "bug", "how to"] * 4
    answers = ["billing", "bug", "Bug ", "bug", "nonsense", "How  to"] * 4
    scored = score_answers(["accuracy", "macro_f1"], references, answers)
    assert scored.intervals["accuracy"].mean == pytest.approx(4 / 6)
    # by hand: billing precision 1, recall 1/2; bug 2/3, 2/3; how to 1, 1
    assert scored.intervals["macro_f1"].mean == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)
    assert scored.intervals["macro_f1"].low < scored.intervals["macro_f1"].mean < scored.intervals["macro_f1"].high
    assert [row.get("macro_f1") for row in scored.each] == [None] * 24
    right = score_answers(["accuracy", "macro_f1"], references, references).intervals["macro_f1"]
    assert right.mean == right.high == 1
    assert right.low == pytest.approx(sum(0.025 ** (1 / n) for n in (8, 12, 4)) / 3), "4 right answers prove little"
    scores = confusion(list(zip(references, answers, strict=True)))
    assert scores is not None and list(scores) == ["Billing", "bug", "how to"]
    assert scores["bug"]["answered"] == {"bug": 8, "(no label)": 4} and scores["Billing"]["recall"] == 0.5
    assert (scores["bug"]["precision"], scores["bug"]["recall"]) == pytest.approx((2 / 3, 2 / 3))
    text = "\n".join(label_lines(scores))
    assert "bug 8, (no label) 4" in text and "0.667" in text
    texts = [f"a text {number}" for number in range(101)]
    assert confusion([(text, text) for text in texts]) is None
    [warning] = score_answers(["macro_f1"], texts, texts).warnings
    assert "101 different texts; labels are at most 100" in warning


def test_answers_in_json_are_compared_as_values() -> None:
    reference = '{"name": "Ann", "paid": true, "total": 12}'
    answers = {
        '{"total": 12, "name": "Ann",\n "paid": true}': (1, 1),
        '{"name": "Ann", "paid": 1, "total": 12}': (1, 0),
        '"Ann"': (1, 0),
        f"```json\n{reference}\n```": (0, 0),
        f"{reference} Done.": (0, 0),
        '{"name": "Ann", "paid": true, "total": NaN}': (0, 0),
        "": (0, 0),
    }
    scored = score_answers(["valid_json", "json_match"], [reference] * len(answers), list(answers))
    assert [(row["valid_json"], row["json_match"]) for row in scored.each] == list(answers.values())
    mixed = score_answers(["json_match"], [reference, "It is sunny."], [reference, "It is sunny."])
    assert mixed.each == ({"json_match": 1.0}, {}) and mixed.intervals["json_match"].n == 1
    assert mixed.warnings == ("`json_match` covers 1 of 2 answers: it cannot score the other 1",)
    none = score_answers(["json_match"], ["not JSON"], ["not JSON"])
    assert none.each == ({},) and none.warnings == ("`json_match` is skipped: no reference is JSON",)


def test_answers_that_are_all_wrong_or_all_right_are_not_certain() -> None:
    none = score_answers(["exact_match"], ["a b"] * 54, ["c"] * 54).intervals["exact_match"]
    assert (none.mean, none.low) == (0.0, 0.0) and none.high == pytest.approx(0.066, abs=1e-3)  # 1 - 0.025 ** (1 / 54)
    every = score_answers(["exact_match"], ["b"] * 54, ["b"] * 54).intervals["exact_match"]
    assert (every.mean, every.high) == (1.0, 1.0) and every.low == pytest.approx(1 - none.high)


def test_rouge_is_that_of_rouge_score_with_stems() -> None:
    scorer = RougeScorer(list(METRICS), use_stemmer=True)
    expected = [{name: score.fmeasure for name, score in scorer.score(*pair).items()} for pair in PAIRS]
    assert list(score_answers(METRICS, REFERENCES, ANSWERS).each) == expected


@pytest.mark.parametrize("name", ["bleu", "chrf"])
def test_bleu_and_chrf_are_sacrebleus_own(name: str) -> None:
    scorer = BLEU(force=True) if name == "bleu" else CHRF()
    sentences = BLEU(effective_order=True, force=True) if name == "bleu" else CHRF()
    references, answers = REFERENCES * 5, ANSWERS * 4 + REFERENCES
    scored = score_answers([name], references, answers)
    interval = scored.intervals[name]
    own = scorer.corpus_score(answers, [references], n_bootstrap=1000)
    assert interval.mean == pytest.approx(own.score, abs=1e-12)
    # sacrebleu draws with its generator, and gives half the width of its interval.
    assert (interval.high - interval.low) / 2 == pytest.approx(own._ci, rel=0.15)
    for row, answer, reference in zip(scored.each, answers, references, strict=True):
        assert row[name] == pytest.approx(sentences.sentence_score(answer, [reference]).score, abs=1e-12)


@pytest.mark.parametrize(
    ("reference", "answer", "match", "f1"),
    [
        ("The cat sat.", "cat sat", 1, 1),  # articles, case and punctuation do not count
        ("the cat", "cat a dog", 0, 2 / 3),
        ("cat cat dog", "cat", 0, 1 / 2),  # a word counts as often as it stands there
        ("theory", "ory", 0, 0),  # only whole words are articles
    ],
)
def test_exact_match_and_f1_are_those_of_squad(reference: str, answer: str, match: int, f1: float) -> None:
    assert (exact_match(reference, answer), token_f1(reference, answer)) == (match, pytest.approx(f1))


def test_a_metric_named_only_by_a_runs_configuration_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SFT_PLAY_CONSENT", raising=False)  # what a command in this test process noted
    metric = library_metric(tmp_path, "my_share", '{"my_share": sum(each) / len(each)}')
    for name in (metric, "evaluate:someone/metric"):
        with pytest.raises(DataError, match="is Python code"):
            library_metrics([name])
    monkeypatch.setenv("SFT_PLAY_CONSENT", "metrics")
    library_metrics([metric])
    monkeypatch.delenv("SFT_PLAY_CONSENT")
    with pytest.raises(DataError, match="is Python code"):
        library_metrics([metric])


@pytest.fixture
def consent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Return what a command records if users name metrics in their YAML."""
    monkeypatch.setenv("SFT_PLAY_CONSENT", "metrics")
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("consent")
def test_metrics_of_the_evaluate_library_from_a_local_folder(tmp_path: Path) -> None:
    share = library_metric(tmp_path, "my_share", '{"my_share": sum(each) / len(each)}')
    length = library_metric(tmp_path, "my_length", '{"ratio": lengths, "total": len(each)}') + ":ratio"
    library_metrics([share, length])
    scored = score_answers([share, length], REFERENCES, ANSWERS)
    assert set(scored.intervals) == {"my_share", "my_length_ratio"}
    equal = [float(reference == answer) for reference, answer in PAIRS]
    assert scored.intervals["my_share"] == bootstrap(equal)
    assert [row["my_share"] for row in scored.each] == equal
    ratio = scored.intervals["my_length_ratio"]
    assert ratio.mean == pytest.approx(sum(map(len, ANSWERS)) / sum(map(len, REFERENCES)))
    assert ratio.low < ratio.mean < ratio.high
    assert all("my_length_ratio" not in row for row in scored.each), "no mean of single scores, so none has one"


@pytest.mark.usefixtures("consent")
def test_the_metric_of_the_documentation_scores(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    script = page.partition("`evaluate:my/word_share`, that folder")[2].partition("```python\n")[2].partition("```")[0]
    (tmp_path / "word_share").mkdir()
    (tmp_path / "word_share" / "word_share.py").write_text(script)
    scores = score_answers([f"evaluate:{tmp_path / 'word_share'}"], ["one two", "three"], ["two", "three"])
    assert scores.intervals["word_share"].mean == 0.75


@pytest.mark.usefixtures("consent")
def test_library_metrics_that_cannot_be_loaded_or_return_no_number_are_refused(tmp_path: Path) -> None:
    several = library_metric(tmp_path, "several", '{"one": 1.0, "two": 2.0}')
    no_number = library_metric(tmp_path, "no_number", '{"said": "well"}')
    broken = library_metric(tmp_path, "broken", "1 / 0")
    bare, zero = library_metric(tmp_path, "bare", "each[0]"), library_metric(tmp_path, "zero", "0")
    for metric, words in (
        (several, "has several scores"),
        (f"{several}:three", "has no score `three`"),
        (no_number, "returns no number"),
        (bare, "returns a number; expected a dictionary"),
        (zero, "returns a number; expected a dictionary"),
        (broken, "cannot score texts: division by zero"),
        (f"evaluate:{tmp_path}/nothing_here", "no folder or script"),
    ):
        with pytest.raises(DataError, match=words):
            LibraryMetric(metric).check()
    of_json = library_metric(tmp_path, "of_json", '{"of_json": float(len(__import__("json").loads(references[0])))}')
    LibraryMetric(of_json).check(["[1, 2]", "{}"])
    with pytest.raises(DataError, match="cannot score texts: ") as caught:
        LibraryMetric(of_json).check()
    assert "it was tried on two texts" in str(caught.value.hint)


@pytest.mark.usefixtures("consent")
def test_answers_without_words_are_skipped_and_counted(tmp_path: Path) -> None:
    words = library_metric(
        tmp_path,
        "per_word",
        '{"per_word": sum(len(r) / len(p.split()) for p, r in zip(predictions, references)) / len(each)}',
    )
    nan = library_metric(
        tmp_path, "nan", '{"nan": sum(float(len(p)) if p else float("nan") for p in predictions) / len(each)}'
    )
    never = library_metric(tmp_path, "never", "1 / 0")
    references, answers = ["one two", "three", "four five"], ["one", "", "five four"]
    scored = score_answers([words, nan, never, "f1"], references, answers)
    assert (
        scored.intervals["per_word"].mean == pytest.approx((7 / 1 + 9 / 2) / 2) and scored.intervals["per_word"].n == 2
    )
    assert scored.intervals["nan"].mean == 6.0 and [row.get("nan") for row in scored.each] == [3.0, None, 9.0]
    assert set(scored.intervals) == {"per_word", "nan", "f1"} and scored.intervals["f1"].n == 3
    for notice in ("`per_word` covers 2 of 3 answers: it cannot score the other 1", "`never` is skipped: the metric"):
        assert any(notice in warning for warning in scored.warnings)


def difference_of(first: list[float], second: list[float], **options: bool) -> PairedDifference:
    totals = [together("f1", [], [], scores) for scores in (first, second)]
    return paired_difference(*totals, len(first), **options)


def test_a_steady_gain_is_certain_and_better_only_where_more_is_better() -> None:
    first = [0.0, 0.9, 0.1, 0.7, 0.3] * 4
    difference, rising = (
        difference_of(first, [score + 0.05 for score in first], more_is_better=more_is_better)
        for more_is_better in (True, False)
    )
    assert (difference.n, difference.verdict) == (20, "better")
    assert rising.verdict == "higher", (
        "of a library's metric, such as an error rate, only the user knows what is better"
    )


def test_the_interval_is_of_resampled_means() -> None:
    first, second = [0.1, 0.5, 0.2, 0.8], [0.4, 0.3, 0.2, 0.9]
    gaps = np.array(second) - np.array(first)
    draws = np.random.default_rng(0)
    means = [gaps[draws.integers(0, 4, size=4)].mean() for _ in range(1000)]
    difference = difference_of(first, second)
    assert (difference.low, difference.high) == pytest.approx(tuple(np.percentile(means, [2.5, 97.5])))
    assert difference.verdict == "too few to compare", "n = 4"
    assert difference_of(first * 5, second * 5).verdict == "undecided"
    assert together("evaluate:mine", [], [], [0.5, None]) is None, "no score of a single answer"


@pytest.mark.parametrize("metric", ["macro_f1", "bleu"])
def test_scores_of_all_answers_together_are_paired_too(metric: str) -> None:
    references = ["the red fox ran home", "a grey cat sat down", "the red fox ran home"] * 8
    worse = ["the red fox ran home" if row % 4 else "a grey cat sat there" for row in range(24)]
    totals = [together(metric, references, answers, [None] * 24) for answers in (worse, references)]
    difference = paired_difference(*totals, 24)
    scores = [score_answers([metric], references, answers).intervals[metric] for answers in (worse, references)]
    assert difference.mean == pytest.approx(scores[1].mean - scores[0].mean) and difference.verdict == "better"
    assert difference.high - difference.low < 2 * (scores[0].high - scores[0].low)


def test_a_label_that_resamples_miss_stays_in_the_interval_of_macro_f1() -> None:
    references = ["a"] * 20 + ["b"] * 20 + ["rare"]
    answers = ["a"] * 15 + ["b"] * 5 + ["b"] * 15 + ["a"] * 5 + ["a"]
    interval = score_answers(["macro_f1"], references, answers).intervals["macro_f1"]
    assert interval.high < 2 / 3, "two labels of three can be right; without the third all could be"
