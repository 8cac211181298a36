"""Score answers by the metrics of `eval.metrics`, with bootstrap intervals, per run and paired. No torch.

ROUGE comes from `rouge_score`, BLEU and chrF from `sacrebleu`, exact match and token F1 from SQuAD's own rules: the
numbers that people quote. Other metrics come from the `evaluate` library.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sft_play.config.metrics import (
    LIBRARY,
    MOST_LABELS,
    OF_ANSWERS,
    OF_LABELS,
    label_of,
    library_parts,
    short_name,
    typed_metrics,
)
from sft_play.config.reader import kind_of
from sft_play.errors import DataError, first_line
from sft_play.files import typed_path
from sft_play.runs.folder import LEAST_ROWS, may_run
from sft_play.text import as_typed

if TYPE_CHECKING:
    from sft_play.data.answers import AnswerParts

ROUGE = ("rouge1", "rouge2", "rougeL")
DEFAULT_METRICS = ROUGE
CORPUS = ("bleu", "chrf")
USE_STEMMER = True
"""Words longer than three letters are compared by their Porter stem, as in transformers' own summarisation examples."""
RESAMPLES = 1000
CONFIDENCE = 0.95
FEW_RESAMPLES = 100
"""For a library metric that is not a mean of per-answer scores: each resample computes the complete metric again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A score over `n` answers (a mean, or a corpus score) with its percentile bootstrap interval (95 %)."""

    mean: float
    low: float
    high: float
    n: int

    @staticmethod
    def around(score: float, resampled: Sequence[float] | Any, *, n: int) -> Interval:
        """Return `score` with the percentiles of the scores of resampled answers."""
        tail = 100 * (1 - CONFIDENCE) / 2
        low, high = np.percentile(resampled, [tail, 100 - tail])
        return Interval(mean=score, low=float(low), high=float(high), n=n)


def resamples(count: int, *, times: int = RESAMPLES) -> Iterator[Any]:
    """Yield `times` arrays of `count` indices below `count`, drawn with replacement from a fixed seed.

    They are yielded, not returned: 1,000 draws over a hundred thousand answers would take 800 MB.
    """
    draws = np.random.default_rng(0)
    for _ in range(times):
        yield draws.integers(0, count, size=count)


Together = Callable[[Any], float]
"""Takes indices of answers and returns the score of these answers together."""


def _interval(score: Together, count: int) -> Interval:
    return Interval.around(score(np.arange(count)), [score(picks) for picks in resamples(count)], n=count)


def _mean_of(values: Sequence[float]) -> Together:
    array = np.asarray(values, dtype=np.float64)
    return lambda picks: float(array[picks].mean())


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean of `values` with the interval of the means of resamples. Raise `ValueError` for no values."""
    if not values:
        raise ValueError("an interval needs at least one value")
    return _interval(_mean_of(values), len(values))


def share_interval(values: Sequence[float], parts: Iterable[int] = ()) -> Interval:
    """Return `mean_interval`, or, if all answers are right or all are wrong, the exact interval of a share.

    Resamples would then be all the same. The exact interval is that of Clopper and Pearson (1934); a mean of scores
    between 0 and 1 is within it too. `parts` are numbers of answers whose shares are averaged.
    """
    interval, distinct = mean_interval(values), set(values)
    widths = [1 - ((1 - CONFIDENCE) / 2) ** (1 / count) for count in parts or [len(values)]]
    width = sum(widths) / len(widths)
    if distinct == {0.0}:
        return replace(interval, high=width)
    return replace(interval, low=1 - width) if distinct == {1.0} else interval


Score = Callable[[Sequence[str], Sequence[str]], tuple[Sequence[float | None] | None, Interval]]
"""Takes references and answers in row order; returns a score per answer (`None` where an answer has none) and the
score of all answers.
"""


def single_scores(name: str, references: Sequence[str], answers: Sequence[str]) -> tuple[list[float | None], Interval]:
    """Return per-answer scores and their mean, which is the score of all answers. Raise `DataError` if none has one."""
    score = OF_SINGLE_ANSWERS.get(name) or (lambda reference, answer: rouge(reference, answer)[name])
    each = [score(reference, answer) for reference, answer in zip(references, answers, strict=True)]
    scores = [value for value in each if value is not None]
    if not scores:
        raise DataError("no reference is JSON")
    return each, share_interval(scores)


def corpus_scores(name: str, references: Sequence[str], answers: Sequence[str]) -> tuple[list[float], Interval]:
    """Return sacrebleu's sentence scores (BLEU with effective order) and the corpus score, 0 to 100.

    The corpus score comes from the answers' summed statistics and is not a mean. Its interval follows Koehn (2004),
    "Statistical Significance Tests for Machine Translation Evaluation": the statistics of resampled answers, as with
    sacrebleu's `--confidence`, but with our own draws.
    """
    single = _sacrebleu(name, sentence=True)
    each = [float(single.sentence_score(a, [r]).score) for r, a in zip(references, answers, strict=True)]
    return each, _interval(_corpus_score(name, references, answers), len(answers))


def _corpus_score(name: str, references: Sequence[str], answers: Sequence[str]) -> Together:
    scorer = _sacrebleu(name)
    statistics = np.asarray(scorer._extract_corpus_statistics(list(answers), [list(references)]))
    return lambda picks: float(scorer._compute_score_from_stats(statistics[picks].sum(axis=0).tolist()).score)


def rouge(reference: str, answer: str) -> dict[str, float]:
    """Return the F-measures (0 to 1) of one answer, exactly as `rouge_score` computes them.

    Words are runs of a-z and 0-9, so text in another script scores 0, and the numbers cannot be compared with ROUGE
    over other tokenizers, such as jieba.
    """
    return dict(_rouge(reference, answer))


def without_words(references: Sequence[str]) -> int:
    """Return how many references have no word that `rouge_score` recognises; they score 0 whatever the answer."""
    tokenize = _scorer()._tokenizer.tokenize
    return sum(not tokenize(reference) for reference in references)


def macro_f1(references: Sequence[str], answers: Sequence[str]) -> tuple[None, Interval]:
    """Return the mean F1 of all labels; a single answer has none.

    Where all answers are right or all are wrong, its interval is the mean of the labels' (`share_interval`).
    """
    mean = _mean_f1(references, answers)
    right = [accuracy(reference, answer) for reference, answer in zip(references, answers, strict=True)]
    if len(set(right)) == 1:
        return None, share_interval(right, Counter(map(label_of, references)).values())
    return None, _interval(mean, len(answers))


def normalise(text: str) -> str:
    """Return `text` in lower case without ASCII punctuation, English articles and extra white space.

    `normalize_answer` of SQuAD's evaluation script, v1.1 and v2.0 (https://rajpurkar.github.io/SQuAD-explorer/).
    """
    bare = "".join(letter for letter in text.lower() if letter not in _PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def exact_match(reference: str, answer: str) -> float:
    """Return 1 where the normalised answer is the normalised reference, else 0."""
    return float(normalise(reference) == normalise(answer))


def token_f1(reference: str, answer: str) -> float:
    """Return the F1 (0 to 1) of the normalised answer's words, as SQuAD v2.0's script computes it.

    If either text has no words, the score is 1 when both have none and 0 otherwise.
    """
    reference_words, answer_words = normalise(reference).split(), normalise(answer).split()
    if not reference_words or not answer_words:
        return float(reference_words == answer_words)
    common = sum((Counter(reference_words) & Counter(answer_words)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(answer_words), common / len(reference_words)
    return 2 * precision * recall / (precision + recall)


def valid_json(_reference: str, answer: str) -> float:
    """Return 1 where the answer is one JSON value (RFC 8259: no `NaN`, no text around it), else 0."""
    return float(_parsed(answer) is not NOT_JSON)


def json_match(reference: str, answer: str) -> float | None:
    """Return 1 where the answer is the reference's JSON value, whatever the order of keys and the white space; `None`
    where the reference is not JSON, as of conversations that end without a call.

    Numbers must be written alike: 1 and 1.0 differ.
    """
    return None if _parsed(reference) is NOT_JSON else float(_parsed(answer) == _parsed(reference))


NOT_JSON = object()


def _parsed(text: str) -> Any:
    try:
        # As text, since `true` equals 1 in Python. `int` refuses the constants: `NaN` and the infinities.
        return json.dumps(json.loads(text, parse_constant=int), sort_keys=True)
    except (ValueError, RecursionError):
        return NOT_JSON


# Answers that are labels: how often each is right, and what is answered instead.


OTHER = "(no label)"
"""Stands for an answer that matches no reference."""


def accuracy(reference: str, answer: str) -> float:
    """Return 1 if the answer is the reference's label, else 0."""
    return float(label_of(reference) == label_of(answer))


def _mean_f1(references: Sequence[str], answers: Sequence[str]) -> Callable[[Any], float]:
    """Return a function of answer indices: the mean F1 over their references' labels.

    It equals scikit-learn's `average="macro"` over these labels. A label that a resample misses keeps its F1 over all
    answers: without it the mean would be that of other labels. Raise `DataError` if the references are not labels.
    """
    labels = _labels(references)
    if len(labels) > MOST_LABELS:
        raise DataError(f"the references contain {len(labels)} different texts; labels are at most {MOST_LABELS}")
    number = {label: index for index, label in enumerate(labels)}
    reference_labels = np.array([number[label_of(text)] for text in references])
    answer_labels = np.array([number.get(label_of(text), len(labels)) for text in answers])

    def each(picks: Any) -> Any:
        counts = np.zeros((len(labels), len(labels) + 1), dtype=np.int64)
        np.add.at(counts, (reference_labels[picks], answer_labels[picks]), 1)
        sizes = counts.sum(axis=1) + counts.sum(axis=0)[:-1]
        missing = counts.sum(axis=1) == 0
        return np.where(missing, np.nan, 2 * counts.diagonal() / np.maximum(sizes, 1))

    whole = each(np.arange(len(references)))
    return lambda picks: float(np.where(np.isnan(scores := each(picks)), whole, scores).mean())


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


def label_lines(table: Mapping[str, Any]) -> list[str]:
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


OF_SINGLE_ANSWERS: Mapping[str, Callable[[str, str], float | None]] = {
    "exact_match": exact_match,
    "f1": token_f1,
    "valid_json": valid_json,
    "json_match": json_match,
    "accuracy": accuracy,
}
"""Built-in metric other than ROUGE -> its score of a reference and an answer; `config.metrics.LABELS` lists all."""
_PUNCTUATION = frozenset(string.punctuation)


@cache
def _scorer() -> Any:
    # Imported here because it imports nltk, which only scoring needs.
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(ROUGE), use_stemmer=USE_STEMMER)


# Cached because the three ROUGE metrics each score the same answers.
@lru_cache(maxsize=4096)
def _rouge(reference: str, answer: str) -> tuple[tuple[str, float], ...]:
    scores = _scorer().score(reference, answer)
    return tuple((name, float(scores[name].fmeasure)) for name in ROUGE)


@cache
def _sacrebleu(name: str, *, sentence: bool = False) -> Any:
    from sacrebleu.metrics import BLEU, CHRF

    # `force` only silences a warning about texts that look tokenised.
    return {"bleu": partial(BLEU, effective_order=sentence, force=True), "chrf": CHRF}[name]()


def signature(name: str) -> str:
    """Return sacrebleu's signature of its metric `name`: version and settings, to be quoted with the score."""
    scorer = _sacrebleu(name)
    scorer.num_refs = 1
    return str(scorer.get_signature())


SAMPLES = ["the first text", "another one"]


class LibraryMetric:
    """`evaluate:NAME_OR_PATH[:SCORE]`."""

    def __init__(self, metric: str, among: Sequence[str] = ()) -> None:
        """Load the metric, which is one `among` those of a configuration. Raise `DataError` if it cannot be loaded."""
        self.metric = metric
        self.where, self.score_name = library_parts(metric)
        self._module = _load(self.metric, self.where, among)

    def check(self, references: Sequence[str] = ()) -> None:
        """Score one of two references, or of two sample texts, as the answer to both. Raise `DataError` if the metric
        returns no number.
        """
        texts = (references if len(references) > 1 else SAMPLES)[:2]
        try:
            self.compute(texts, [texts[0]] * 2)
        except DataError as error:
            what = "two right answers of the validation rows" if len(references) > 1 else "two texts"
            error.hint = "; ".join(filter(None, [error.hint, f"it was tried on {what}"]))
            raise

    def compute(self, references: Sequence[str], answers: Sequence[str]) -> float:
        """Return the metric of all answers together. Raise `DataError` if it fails or returns no single number."""
        try:
            scores = self._module.compute(predictions=list(answers), references=list(references))
        except Exception as error:  # third-party code may raise anything
            reason = first_line(error)
            hint = "metrics of answers take two lists of texts, `predictions` and `references`"
            raise DataError(f"the metric `{self.metric}` cannot score texts: {reason}", hint=hint) from error
        if scores is not None and not isinstance(scores, Mapping):
            name = Path(self.where).stem
            raise DataError(
                f"the metric `{self.metric}` returns {kind_of(scores)}; expected a dictionary",
                hint=f'`return {{"{name}": ...}}` in `_compute`',
            )
        return self._number(scores or {})

    def score(self, references: Sequence[str], answers: Sequence[str]) -> tuple[list[float | None] | None, Interval]:
        """Return per-answer scores, if their mean is the score of all answers, and that score with its interval.

        If the answers cannot be scored together, those that cannot be scored individually are skipped; the interval's
        `n` counts the others. Raise `DataError` if none can be scored.
        """
        single = [self._score_of([reference], [answer]) for reference, answer in zip(references, answers, strict=True)]
        total = self._score_of(references, answers)
        if total is None:
            scored = [index for index, value in enumerate(single) if value is not None] or range(len(answers))
            references, answers = [references[i] for i in scored], [answers[i] for i in scored]
            total = self.compute(references, answers)
        values = [value for value in single if value is not None]
        if len(values) == len(answers) and math.isclose(sum(values) / len(values), total, rel_tol=1e-6, abs_tol=1e-9):
            return single, mean_interval(values)
        again = [
            self._score_of([references[i] for i in picks], [answers[i] for i in picks])
            for picks in resamples(len(answers), times=FEW_RESAMPLES)
        ]
        return None, Interval.around(total, [value for value in again if value is not None] or [total], n=len(answers))

    def _score_of(self, references: Sequence[str], answers: Sequence[str]) -> float | None:
        """Return the metric, or `None` if it fails or is not finite, as for an answer without words."""
        try:
            return self.compute(references, answers)
        except DataError:
            return None

    def _number(self, scores: Mapping[str, Any]) -> float:
        numbers = {}
        for name, value in scores.items():
            if not isinstance(value, str):
                with contextlib.suppress(TypeError, ValueError):
                    numbers[name] = float(value)
        chosen = self.score_name or (next(iter(numbers)) if len(numbers) == 1 else Path(self.where).stem)
        if chosen not in numbers:
            choices = ", ".join(f"`{LIBRARY}{self.where}:{name}`" for name in numbers)
            problem = "has several scores" if numbers else "returns no number"
            if self.score_name:
                problem = f"has no score `{self.score_name}`"
            raise DataError(f"the metric `{self.metric}` {problem}", hint=f"one of {choices}" if choices else None)
        if not math.isfinite(numbers[chosen]):
            raise DataError(f"the metric `{self.metric}` returned {numbers[chosen]}")
        return numbers[chosen]


def _load(metric: str, where: str, among: Sequence[str]) -> Any:
    """Return the library's module for `where`, with its data in memory, since ranks share no files here."""
    path = typed_path(where)
    local, reached = path.exists(), True
    if not local and (where.startswith((".", "/", "~")) or where.endswith(".py")):
        raise DataError(
            f"the metric `{metric}` does not exist: no folder or script `{where}`",
            hint="a folder contains NAME/NAME.py",
        )
    if not may_run("metrics"):
        typed = as_typed(*typed_metrics(among or [metric]))
        raise DataError(
            f"the metric `{metric}` is Python code named by a run's configuration, and does not run without consent",
            hint=f"read that code; to let it run, type {typed}",
        )
    if not local:
        from sft_play.plan.architecture import offline_unless_reachable

        reached = offline_unless_reachable()
    import evaluate

    evaluate.disable_progress_bar()
    try:
        with _comma_imports_split():
            return evaluate.load(str(path) if local else where, keep_in_memory=True)
    except ImportError as error:
        raise DataError(f"the metric `{metric}` needs a package that is not installed: {error}") from error
    except Exception as error:  # the library raises many kinds of error for a metric that cannot be loaded
        reason = first_line(error)
        if not reached:
            reason = "the hub does not answer, and no metric of that name is in the cache"
        hint = (
            "check the name at https://huggingface.co/evaluate-metric, or give a local folder: evaluate:path/to/metric"
        )
        raise DataError(f"the metric `{metric}` cannot be loaded: {reason}", hint=hint) from error


@contextlib.contextmanager
def _comma_imports_split() -> Iterator[None]:
    """Let the library parse `import a, b`, in which it mistakes `a,` for a package."""
    from evaluate import loading

    def read(path: str) -> list[tuple[Any, ...]]:
        return [
            (kind, name.partition(",")[0], name.partition(",")[0] if where == name else where, folder)
            for kind, name, where, folder in original(path)
        ]

    original, loading.get_imports = loading.get_imports, read
    try:
        yield
    finally:
        loading.get_imports = original


def library_metrics(names: Sequence[str]) -> list[LibraryMetric]:
    """Load every library metric among `names`. Raise `DataError`."""
    return [LibraryMetric(name, names) for name in names if name.startswith(LIBRARY)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """The scores of all answers by all metrics."""

    each: tuple[Mapping[str, float], ...]
    """Per answer: metric -> score; metrics without per-answer scores are omitted."""
    intervals: Mapping[str, Interval]
    """Metric -> score of all answers that it could score."""
    warnings: tuple[str, ...] = ()
    """What was not measured, or not for all answers, and why."""


def scorer_of(name: str) -> Score:
    """Return the function that computes an entry of `eval.metrics`. Raise `DataError` if it cannot be loaded."""
    if name.startswith(LIBRARY):
        return LibraryMetric(name).score
    assert name in OF_ANSWERS, "the rules of the configuration know every metric"
    if name == "macro_f1":
        return macro_f1
    return partial(corpus_scores if name in CORPUS else single_scores, name)


def score_answers(
    names: Sequence[str], references: Sequence[str], answers: Sequence[str], *, other_calls: Sequence[bool] = ()
) -> Scored:
    """Score `answers` by the metrics `names` (`eval.metrics`); a metric that fails becomes a warning.

    `other_calls` marks answers whose tool calls differ from the reference's: these never match exactly, even if the
    words do after normalisation. Raise `ValueError` if there are no answers.
    """
    if not answers:
        raise ValueError("no answers to score")
    each: list[dict[str, float]] = [{} for _ in answers]
    intervals: dict[str, Interval] = {}
    warnings: list[str] = []
    for entry in names:
        name = short_name(entry)
        try:
            single, intervals[name] = scorer_of(entry)(references, answers)
        except Exception as error:  # noqa: BLE001 - one failing metric must not cost the other scores
            reason = error.message if isinstance(error, DataError) else f"{type(error).__name__}: {first_line(error)}"
            warnings.append(f"`{name}` is skipped: {reason}")
            continue
        if short_name(entry) == "exact_match" and single and any(other_calls):
            single = [0.0 if other else value for value, other in zip(single, other_calls, strict=True)]
            intervals[name] = mean_interval([value for value in single if value is not None])
        if (skipped := len(answers) - intervals[name].n) > 0:
            warnings.append(
                f"`{name}` covers {intervals[name].n} of {len(answers)} answers: it cannot score the other {skipped}"
            )
        for row, value in zip(each, single or (), strict=single is not None):
            if value is not None:
                row[name] = value
    return Scored(each=tuple(each), intervals=intervals, warnings=tuple(warnings))


def score_parts(names: Sequence[str], pairs: Sequence[tuple[AnswerParts, AnswerParts]]) -> Scored:
    """Score (reference, answer) pairs by their words and by their tool calls, each as a line of JSON."""
    compared = [(reference.compared, answer.compared) for reference, answer in pairs]
    shown = [(reference.shown, answer.shown, reference.calls != answer.calls) for reference, answer in compared]
    references, answers, other = zip(*shown, strict=True)
    return score_answers(names, references, answers, other_calls=other)


def how_scored(names: Sequence[str]) -> dict[str, object]:
    """Return the settings needed to reproduce the scores, for `scores.json`."""
    facts: dict[str, object] = {"bootstrap": {"resamples": RESAMPLES, "confidence": CONFIDENCE}}
    if any(name.startswith("rouge") for name in names):
        facts["use_stemmer"] = USE_STEMMER
    signatures = {name: signature(name) for name in map(short_name, names) if name in CORPUS}
    return facts | ({"sacrebleu": signatures} if signatures else {})


def perplexity(loss: float) -> float:
    """Return exp of a token-weighted loss in nats; the largest float where that overflows."""
    return math.exp(min(loss, 709.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedDifference(Interval):
    """The mean of the second model's scores minus the first's, over `n` rows that both answered."""

    verdict: str
    """`better` or `worse` if the interval excludes 0 (`higher` or `lower` if only the user knows which direction is
    better), else `undecided`; `too few to compare` below `LEAST_ROWS` rows.
    """


def together(metric: str, references: Sequence[str], answers: Sequence[str], each: Sequence[Any]) -> Together | None:
    """Return the score of any of the answers together: by their texts, or as the mean of `each` one's score.

    Return `None` for a metric of a library that has no score of a single answer.
    """
    if metric == "macro_f1":
        return _mean_f1(references, answers)
    if metric in CORPUS:
        return _corpus_score(metric, references, answers)
    return None if None in each else _mean_of(each)


def paired_difference(
    first: Together, second: Together, count: int, *, more_is_better: bool = True
) -> PairedDifference:
    """Return the difference of two models' scores of the same `count` rows, in the same order.

    Each draw takes both models' answers to a row: what makes a row easy or hard for both cancels out, so the interval
    is narrower than that of two separate scores (Koehn 2004, "Statistical Significance Tests for Machine Translation
    Evaluation"). Raise `ValueError` for no rows.
    """
    if not count:
        raise ValueError("no rows that both answered")
    mean = _interval(lambda picks: second(picks) - first(picks), count)
    up, down = ("better", "worse") if more_is_better else ("higher", "lower")
    verdict = up if mean.low > 0 else down if mean.high < 0 else "undecided"
    return PairedDifference(
        **asdict(mean),
        verdict=verdict if mean.n >= LEAST_ROWS else "too few to compare",
    )
