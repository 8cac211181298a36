"""The names of scores: which there are, what each is called in files, and whether more of it is better. No heavy packages."""

from __future__ import annotations

import re
from difflib import get_close_matches

from sft_play.config.schema import Config
from sft_play.files import is_file_name, typed_path

LIBRARY = "evaluate:"
"""Prefix of a metric of the `evaluate` library: `evaluate:NAME_OR_PATH`, or `evaluate:NAME_OR_PATH:SCORE` for one of several scores."""
OF_ANSWERS = ("rouge1", "rouge2", "rougeL", "bleu", "chrf", "exact_match", "f1")
"""Built in; more is better for each."""
OF_LOSS = ("loss", "perplexity")
"""Less is better for each; also per source, as `loss/NAME`."""


def short_name(metric: str) -> str:
    """Returns what an entry of `eval.metrics` is called in files: itself, or the last part of a library metric's name or path."""
    if not metric.startswith(LIBRARY):
        return metric
    where, score = library_parts(metric)
    last = re.sub(r"\.py$", "", where.rstrip("/").rpartition("/")[2])
    return f"{last}_{score}" if score and score != last else last


def library_parts(metric: str) -> tuple[str, str | None]:
    """Returns (name or path, score or `None`) of `evaluate:NAME_OR_PATH[:SCORE]`; a path that exists is never cut."""
    where = metric.removeprefix(LIBRARY)
    head, colon, tail = where.rpartition(":")
    if colon and head and re.fullmatch(r"\w+", tail) and not (is_file_name(where) and typed_path(where).exists()):
        return head, tail
    return where, None


def unknown(metric: str) -> tuple[str, str] | None:
    """Returns (problem, hint) for an entry of `eval.metrics` that nothing can measure; `None` where something can."""
    if metric in OF_ANSWERS:
        return None
    if metric.startswith(LIBRARY):
        where, _ = library_parts(metric)
        if not is_file_name(where):
            return (
                "names no metric of the `evaluate` library: no folder can be called so",
                "evaluate:exact_match, or evaluate:path/to/folder",
            )
        return (
            None
            if where.strip("/ ")
            else ("names no metric of the `evaluate` library", "evaluate:exact_match, or evaluate:path/to/folder")
        )
    if metric in OF_LOSS or metric.startswith(("loss/", "perplexity/")):
        return "is no score of answers", "loss and perplexity, also per source, are always measured; leave it out here"
    close = closest(metric, OF_ANSWERS)
    choices = f"one of {', '.join(OF_ANSWERS)}, or evaluate:NAME for one of the `evaluate` library"
    return "is no metric", f"did you mean `{close}`?" if close else choices


def metrics_hint(value: object) -> str | None:
    """Returns what was probably meant by text in the place of a list of metrics: the right names first, then the brackets."""
    if not isinstance(value, str) or not value.strip():
        return None
    words = [word.strip() for word in value.split(",")]
    meant = [word if unknown(word) is None else closest(word, OF_ANSWERS) for word in words]
    if None in meant:
        return None
    listed = f"a list is written `[{', '.join(str(word) for word in meant)}]`"
    mended = [f"`{better}`" for word, better in zip(words, meant, strict=True) if word != better]
    return f"did you mean {' and '.join(mended)}? {listed}" if mended else listed


def closest(name: str, known: tuple[str, ...]) -> str | None:
    """Returns the known name that `name` most likely stands for; letters' case and `_`, `-` do not count."""
    plain = {re.sub(r"[^a-z0-9/]", "", one.lower()): one for one in known}
    found = get_close_matches(re.sub(r"[^a-z0-9/]", "", name.lower()), plain, n=1)
    return plain[found[0]] if found else None


def validation_names(config: Config) -> tuple[str, ...]:
    """Returns what the sources of the validation rows are called; they are measured one by one where there are several."""
    validation = config.data.validation
    sources = validation if isinstance(validation, list) else config.data.sources if validation else []
    return tuple(source.name or source.path for source in sources)


def measured(config: Config) -> tuple[str, ...]:
    """Returns every name that `train.metric_for_best_model` may take, without `eval_`."""
    names = validation_names(config)
    per_source = [f"{kind}/{name}" for kind in OF_LOSS for name in names] if len(names) > 1 else []
    return (*OF_LOSS, *(short_name(metric) for metric in config.eval.metrics), *per_source)


def higher_is_better(name: str) -> bool | None:
    """Whether more of the score `name` (with or without `eval_`) is better; `None` where only the user knows."""
    bare = name.removeprefix("eval_")
    if bare.partition("/")[0] in OF_LOSS:
        return False
    return True if bare in OF_ANSWERS else None
