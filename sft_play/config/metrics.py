"""Names of scores, and the rules about which are measured, which one is best and when to stop."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from sft_play.config.reader import Conflict, closest_word
from sft_play.config.schema import Config
from sft_play.files import typed_path

LIBRARY = "evaluate:"
"""Prefix of a metric of the `evaluate` library: `evaluate:NAME_OR_PATH`, or `evaluate:NAME_OR_PATH:SCORE` for one of
several scores.
"""


def typed_metrics(metrics: Sequence[str]) -> list[str]:
    """Return what must be typed so that the code of a run's own metrics runs; nothing for built-in ones."""
    return [f"EVAL_METRICS=[{','.join(metrics)}]"] if any(name.startswith(LIBRARY) for name in metrics) else []


LABELS: Mapping[str, str] = {
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "bleu": "BLEU",
    "chrf": "chrF",
    "exact_match": "exact match",
    "f1": "token F1",
    "valid_json": "valid JSON",
    "json_match": "JSON match",
    "accuracy": "accuracy",
    "macro_f1": "macro F1",
}
"""Built-in metric of answers -> label; higher is better for each. `evaluation.scores` computes them."""
OF_ANSWERS = tuple(LABELS)
OF_LABELS = ("accuracy", "macro_f1")
"""For answers from a small set of labels: a table of each label goes with them."""
MOST_LABELS = 100
"""Answers with more distinct values than this are texts, not labels."""
LEAST_OF_EACH = 2
"""Rows for each answer, on average, from which on answers are labels."""
OF_LOSS = ("loss", "perplexity")
"""Lower is better for each; also per source, as `loss/NAME`."""


def label_of(text: str) -> str:
    """Return an answer that is a label as it is compared: in lower case, with single spaces."""
    return " ".join(text.casefold().split())


def are_labels(answers: Mapping[str, int]) -> bool:
    """Return whether answers, each with its rows, come from a small set."""
    return sum(answers.values()) >= LEAST_OF_EACH * len(answers) > 0


def label_of_metric(name: str) -> str:
    """Return the label of a metric, or its name if it has none."""
    return LABELS.get(name, name)


def short_name(metric: str) -> str:
    """Return the name of an `eval.metrics` entry in files: the entry itself, or the last part of a library metric's
    name or path.
    """
    if not metric.startswith(LIBRARY):
        return metric
    where, score = library_parts(metric)
    last = re.sub(r"\.py$", "", where.rstrip("/").rpartition("/")[2])
    return f"{last}_{score}" if score and score != last else last


def library_parts(metric: str) -> tuple[str, str | None]:
    """Return (name or path, score or `None`) of `evaluate:NAME_OR_PATH[:SCORE]`; a path that exists is never cut."""
    where = metric.removeprefix(LIBRARY)
    head, colon, tail = where.rpartition(":")
    if colon and head and re.fullmatch(r"\w+", tail) and not typed_path(where).exists():
        return head, tail
    return where, None


def unknown(metric: str) -> tuple[str, str] | None:
    """Return (problem, hint) for an entry of `eval.metrics` that cannot be measured, else `None`."""
    if metric in OF_ANSWERS:
        return None
    if metric.startswith(LIBRARY):
        where, _ = library_parts(metric)
        wrong = ("is not a metric of the `evaluate` library", "evaluate:exact_match, or evaluate:path/to/folder")
        return None if where.strip("/ ") else wrong
    if metric in OF_LOSS or metric.startswith(("loss/", "perplexity/")):
        return (
            "is not a score of answers",
            "loss and perplexity, also per source, are always measured; omit it here",
        )
    close = closest_word(metric, OF_ANSWERS)
    choices = f"one of {', '.join(OF_ANSWERS)}, or evaluate:NAME for one of the `evaluate` library"
    return "is not a metric", f"did you mean `{close}`?" if close else choices


def validation_names(config: Config) -> tuple[str, ...]:
    """Return the names of the validation sources, which are measured separately if there are several."""
    validation = config.data.validation
    sources = validation if isinstance(validation, list) else config.data.sources if validation else []
    return tuple(source.name or source.path for source in sources)


def measurable_scores(config: Config) -> tuple[str, ...]:
    """Return every name that `train.metric_for_best_model` may take, without `eval_`."""
    names = validation_names(config)
    per_source = [f"{kind}/{name}" for kind in OF_LOSS for name in names] if len(names) > 1 else []
    return (*OF_LOSS, *(short_name(metric) for metric in config.eval.metrics), *per_source)


def higher_is_better(name: str) -> bool | None:
    """Return whether a higher `name` (with or without `eval_`) is better; `None` if only the user knows."""
    bare = name.removeprefix("eval_")
    if bare.partition("/")[0] in OF_LOSS:
        return False
    return True if bare in OF_ANSWERS else None


# Rules about scores: which are measured, which one is the best model's, when training stops early.


BEST = "train.metric_for_best_model"
VALIDATE = "give validation data, and `train.eval_strategy: steps` or `epoch`"


def metric_names(config: Config) -> Iterator[Conflict]:
    """Check that each entry of `eval.metrics` can be measured and is listed once."""
    for index, metric in enumerate(config.eval.metrics):
        if wrong := unknown(metric):
            yield Conflict(f"eval.metrics[{index}]", f", which {wrong[0]}", wrong[1])
    for name, count in Counter(short_name(metric) for metric in config.eval.metrics).items():
        if count > 1:
            yield Conflict(
                "eval.metrics", f"`eval.metrics` has {count} entries that are called `{name}`", "keep one of them"
            )
    if not config.eval.metrics and config.train.predict_with_generate is True:
        hint = f"one or more of {', '.join(OF_ANSWERS)}, or set `train.predict_with_generate: false`"
        yield Conflict("eval.metrics", "`eval.metrics` is empty, but `train.predict_with_generate` is `true`", hint)


def best_model(config: Config) -> Iterator[Conflict]:
    """Check that `train.metric_for_best_model` is measured while training and that its better direction is known."""
    train = config.train
    name = train.metric_for_best_model
    bare, measured = name.removeprefix("eval_"), measurable_scores(config)
    if bare not in measured:
        yield Conflict(BEST, ", which nothing measures", _hint(bare, measured))
        return
    if bare.partition("/")[0] not in OF_LOSS and train.predict_with_generate is not True:
        yield Conflict(BEST, ", but no answers are generated while training", "set `train.predict_with_generate: true`")
    # `loss` is the default, so it does not show that the user expects an evaluation.
    if bare != "loss" and (why := never_evaluated(config)):
        yield Conflict(BEST, f", but nothing is evaluated while training: {why}", VALIDATE)
    better, choice = higher_is_better(bare), train.extra.get("greater_is_better")
    if better is None and choice is None:
        yield Conflict(
            BEST, ", and it is not known whether higher is better", "set `train.greater_is_better: true` or `false`"
        )
    elif better is not None and choice is not None and bool(choice) != better:
        text = (
            f"`train.greater_is_better` is `{str(bool(choice)).lower()}`, but `{name}` is better when"
            f" {'higher' if better else 'lower'}"
        )
        yield Conflict("train.greater_is_better", text, "omit it")


def needs_evaluation(config: Config) -> Iterator[Conflict]:
    """Check what `train.load_best_model_at_end` and early stopping need."""
    train, why = config.train, never_evaluated(config)
    for key in ("load_best_model_at_end", "early_stopping_patience"):
        if getattr(train, key) not in (False, None) and why:
            yield Conflict(f"train.{key}", f", but nothing is evaluated while training: {why}", VALIDATE)
    if train.load_best_model_at_end and train.save_strategy == "no":
        yield Conflict(
            "train.load_best_model_at_end", ", but `train.save_strategy` is `no`", "set `train.save_strategy: steps`"
        )
    if train.early_stopping_patience is None and train.early_stopping_threshold:
        text = ", but `train.early_stopping_patience` is not given"
        yield Conflict("train.early_stopping_threshold", text, "TRAIN_EARLY_STOPPING_PATIENCE=3")


def never_evaluated(config: Config) -> str:
    """Return why nothing is evaluated while training, or an empty string."""
    if config.train.eval_strategy == "no":
        return "`train.eval_strategy` is `no`"
    return "there is no `data.validation`" if not config.data.validation else ""


def _hint(bare: str, measured: tuple[str, ...]) -> str:
    if bare in OF_ANSWERS:
        return f"add it: `eval.metrics: [{', '.join((*[k for k in measured if k in OF_ANSWERS], bare))}]`"
    close = closest_word(bare, measured)
    return f"did you mean `eval_{close}`?" if close else f"one of {', '.join(f'eval_{score}' for score in measured)}"


RULES = (metric_names, best_model, needs_evaluation)
