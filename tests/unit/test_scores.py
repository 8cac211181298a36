"""ROUGE is rouge_score's own, intervals hold what they say, and batches are shared out without loss."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from sft_play.training.scores import METRICS, bootstrap, mean_scores, perplexity, rouge, without_words
from sft_play.training.shares import choose_rows, share_batches

PAIRS = [
    ("Return the sum of two numbers.", "Returns sums of the numbers"),
    ("Open a file for reading.", ""),
    ("", "anything"),
    ("Größe 12 öffnen", "grosse 12 offnen"),
    ("日本語", "日本語"),
    ("same words here", "same words here"),
]


@pytest.mark.parametrize(("reference", "answer"), PAIRS)
def test_rouge_is_that_of_rouge_score_with_stems(reference: str, answer: str) -> None:
    expected = RougeScorer(list(METRICS), use_stemmer=True).score(reference, answer)
    assert rouge(reference, answer) == {name: expected[name].fmeasure for name in METRICS}


def test_references_without_a_word_that_rouge_knows_are_counted() -> None:
    assert without_words([reference for reference, _ in PAIRS]) == 2


def test_interval_holds_the_mean_and_is_the_same_every_time() -> None:
    values = [0.1, 0.4, 0.35, 0.8, 0.0, 0.55] * 10
    one, again = bootstrap(values), bootstrap(values)
    assert one == again
    assert one.low < one.mean < one.high
    assert one.n == 60
    assert one.mean == pytest.approx(sum(values) / 60)
    # The normal approximation of a mean's interval, which 60 values come close to.
    half = 1.96 * math.sqrt(sum((v - one.mean) ** 2 for v in values) / 60 / 60)
    assert one.high - one.low == pytest.approx(2 * half, rel=0.15)
    assert bootstrap(values, seed=1) != one


def test_interval_of_equal_values_has_no_width() -> None:
    one = bootstrap([0.5] * 7)
    assert (one.low, one.mean, one.high) == (0.5, 0.5, 0.5)
    assert not one.beyond(one)
    assert bootstrap([0.6]).beyond(one)


def test_no_answers_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        bootstrap([])


def test_mean_scores_keep_metrics_apart() -> None:
    rows = [rouge(reference, answer) for reference, answer in PAIRS]
    means = mean_scores(rows)
    assert set(means) == set(METRICS)
    for name in METRICS:
        assert means[name].mean == pytest.approx(sum(row[name] for row in rows) / len(rows))


def test_perplexity() -> None:
    assert perplexity(0.0) == 1.0
    assert perplexity(2.0) == pytest.approx(math.e**2)
    assert math.isfinite(perplexity(1e6))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 9), st.integers(1, 5))
def test_every_row_is_answered_once_in_the_same_company(lengths: list[int], batch_size: int, world: int) -> None:
    alone, rounds = share_batches(lengths, batch_size, 0, 1)
    assert len(alone) == rounds
    shared = [share_batches(lengths, batch_size, rank, world) for rank in range(world)]
    batches = [batch for mine, _ in shared for batch in mine]
    assert sorted(map(tuple, batches)) == sorted(map(tuple, alone))
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(len(mine) in (all_rounds, all_rounds - 1) for mine, all_rounds in shared)
    assert max(lengths) == max(lengths[index] for index in alone[0])


def test_chosen_rows_depend_on_the_seed_only() -> None:
    assert choose_rows(5, 200, 1) == [0, 1, 2, 3, 4]
    chosen = choose_rows(1000, 20, 7)
    assert chosen == choose_rows(1000, 20, 7) == sorted(set(chosen))
    assert len(chosen) == 20
    assert chosen != choose_rows(1000, 20, 8)
