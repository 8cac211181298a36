"""Scores of an answer against its reference, by the packages whose numbers people quote. No torch.

ROUGE by `rouge_score`, BLEU and chrF by `sacrebleu`, exact match and token F1 by SQuAD's own rules.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np

from sft_play.training.intervals import Interval, mean_interval, resamples

ROUGE = ("rouge1", "rouge2", "rougeL")
USE_STEMMER = True
"""Words longer than three letters are compared by their Porter stem, as in transformers' own summarisation examples."""


class MeanMetric:
    """A score of single answers (0 to 1), whose mean is the score of all."""

    def __init__(self, name: str) -> None:
        self.name = name

    def each(self, references: Sequence[str], answers: Sequence[str]) -> list[float]:
        """Returns one score for each answer."""
        score = {"exact_match": exact_match, "f1": token_f1}.get(self.name)
        if score is None:
            return [rouge(reference, answer)[self.name] for reference, answer in zip(references, answers, strict=True)]
        return [score(reference, answer) for reference, answer in zip(references, answers, strict=True)]

    def whole(self, references: Sequence[str], answers: Sequence[str], each: Sequence[float] | None) -> Interval:
        """Returns the mean of `each` with its interval."""
        return mean_interval(self.each(references, answers) if each is None else each)


class CorpusMetric:
    """BLEU or chrF (0 to 100): a score of all answers from their summed statistics, not a mean of single scores."""

    def __init__(self, name: str) -> None:
        self.name = name

    def each(self, references: Sequence[str], answers: Sequence[str]) -> list[float]:
        """Returns sacrebleu's sentence scores (BLEU with effective order); their mean is not the score of all."""
        scorer = _sacrebleu(self.name, sentence=True)
        return [float(scorer.sentence_score(a, [r]).score) for r, a in zip(references, answers, strict=True)]

    def whole(self, references: Sequence[str], answers: Sequence[str], each: Sequence[float] | None) -> Interval:
        """Returns the corpus score, equal to sacrebleu's, and the interval over resampled answers' summed statistics.

        The interval is that of Koehn (2004), "Statistical Significance Tests for Machine Translation Evaluation", as sacrebleu's
        `--confidence` makes it, with our own draws.
        """
        scorer = _sacrebleu(self.name)
        statistics = np.asarray(scorer._extract_corpus_statistics(list(answers), [list(references)]))
        scores = [
            float(scorer._compute_score_from_stats(statistics[picks].sum(axis=0).tolist()).score)
            for picks in resamples(len(answers))
        ]
        total = scorer._compute_score_from_stats(statistics.sum(axis=0).tolist())
        return Interval.around(float(total.score), scores, n=len(answers))


def rouge(reference: str, answer: str) -> dict[str, float]:
    """Returns the F-measures (0 to 1) of one answer, exactly as `rouge_score` computes them.

    Its words are runs of a-z and 0-9, so a text in another script scores 0, and the numbers cannot be compared with ROUGE
    over other tokenizers (jieba, for one).
    """
    return dict(_rouge(reference, answer))


def without_words(references: Sequence[str]) -> int:
    """Returns how many references have no word that `rouge_score` knows; their score is 0 whatever the answer."""
    tokenize = _scorer()._tokenizer.tokenize
    return sum(not tokenize(reference) for reference in references)


def normalised(text: str) -> str:
    """Returns `text` in lower case without ASCII punctuation, English articles and extra white space.

    `normalize_answer` of SQuAD's evaluation script, v1.1 and v2.0 (https://rajpurkar.github.io/SQuAD-explorer/).
    """
    bare = "".join(letter for letter in text.lower() if letter not in _PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def exact_match(reference: str, answer: str) -> float:
    """Returns 1 where the normalised answer is the normalised reference, else 0."""
    return float(normalised(reference) == normalised(answer))


def token_f1(reference: str, answer: str) -> float:
    """Returns the harmonic mean of precision and recall of the normalised answer's words (0 to 1), as SQuAD v2.0's script.

    Where either text has no words it is 1 if both have none, else 0.
    """
    wanted, given = normalised(reference).split(), normalised(answer).split()
    if not wanted or not given:
        return float(wanted == given)
    common = sum((Counter(wanted) & Counter(given)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(given), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


_PUNCTUATION = frozenset(string.punctuation)


@cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer  # imports nltk: only where answers are scored

    return RougeScorer(list(ROUGE), use_stemmer=USE_STEMMER)


@lru_cache(maxsize=4096)  # three metrics ask for the same answers, one after the other
def _rouge(reference: str, answer: str) -> tuple[tuple[str, float], ...]:
    scores = _scorer().score(reference, answer)
    return tuple((name, float(scores[name].fmeasure)) for name in ROUGE)


@cache
def _sacrebleu(name: str, *, sentence: bool = False) -> Any:
    from sacrebleu.metrics import BLEU, CHRF

    # `force` only silences a remark about texts that look tokenised.
    return BLEU(effective_order=sentence, force=True) if name == "bleu" else CHRF()


def signature(name: str) -> str:
    """Returns sacrebleu's signature of a metric that it computed: version and settings, to be quoted beside the score."""
    scorer = _sacrebleu(name)
    scorer.num_refs = 1
    return str(scorer.get_signature())
