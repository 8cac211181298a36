"""Scores and trackers: their names, what each needs, and the rules about which are measured, which is best and when to stop."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from sft_play.config.rule import Origins, problem
from sft_play.config.schema import Config
from sft_play.config.types import closest_word
from sft_play.errors import HardwareError, UserError
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


# Rules about scores: which are measured, which one is the best model's, when training stops early. No effects.


BEST = "train.metric_for_best_model"


def metric_names(config: Config, origins: Origins) -> Iterator[UserError]:
    """`eval.metrics` holds names that something measures, each once."""
    for index, metric in enumerate(config.eval.metrics):
        if wrong := unknown(metric):
            yield problem(origins, "eval.metrics", f"`eval.metrics[{index}]` is `{metric}`, which {wrong[0]}", wrong[1])
    for name, count in Counter(short_name(metric) for metric in config.eval.metrics).items():
        if count > 1:
            yield problem(
                origins, "eval.metrics", f"`eval.metrics` has {count} entries that are called `{name}`", "keep one of them"
            )
    if not config.eval.metrics and config.train.predict_with_generate is True:
        yield problem(
            origins, "eval.metrics", "`eval.metrics` is empty, but `train.predict_with_generate` is `true`",
            f"one or more of {', '.join(OF_ANSWERS)}, or set `train.predict_with_generate: false`",
        )  # fmt: skip


def best_model(config: Config, origins: Origins) -> Iterator[UserError]:
    """`train.metric_for_best_model` is measured while training, and known to be better one way."""
    train = config.train
    name = train.metric_for_best_model
    bare, known = name.removeprefix("eval_"), measured(config)
    if bare not in known:
        yield problem(origins, BEST, f"`{BEST}` is `{name}`, which nothing measures", _hint(bare, known))
        return
    of_answers = bare.partition("/")[0] not in ("loss", "perplexity")
    if of_answers and train.predict_with_generate is not True:
        yield problem(
            origins, BEST, f"`{BEST}` is `{name}`, but no answers are generated while training", "set `train.predict_with_generate: true`"
        )  # fmt: skip
    if bare != "loss" and (why := _never_evaluated(config)):  # loss is the default, and no sign that anybody waits for it
        yield problem(
            origins, BEST, f"`{BEST}` is `{name}`, but nothing is evaluated while training: {why}",
            "give validation data, and `train.eval_strategy: steps` or `epoch`",
        )  # fmt: skip
    better, said = higher_is_better(bare), train.extra.get("greater_is_better")
    if better is None and said is None:
        yield problem(
            origins, BEST, f"`{BEST}` is `{name}`, and whether more of it is better is not known",
            "set `train.greater_is_better: true` or `false`",
        )  # fmt: skip
    elif better is not None and said is not None and bool(said) != better:
        yield problem(
            origins, "train.greater_is_better", f"`train.greater_is_better` is `{str(bool(said)).lower()}`, but `{name}` is better when "
            f"{'higher' if better else 'lower'}", "leave it out",
        )  # fmt: skip


def loading_best(config: Config, origins: Origins) -> Iterator[UserError]:
    """What `train.load_best_model_at_end` needs."""
    train = config.train
    if train.load_best_model_at_end and (why := _never_evaluated(config)):
        yield problem(
            origins, "train.load_best_model_at_end", f"`train.load_best_model_at_end` is `true`, but nothing is evaluated while training: {why}",
            "give validation data, and `train.eval_strategy: steps` or `epoch`",
        )  # fmt: skip
    if train.load_best_model_at_end and train.save_strategy == "no":
        yield problem(
            origins, "train.load_best_model_at_end", "`train.load_best_model_at_end` is `true`, but `train.save_strategy` is `no`",
            "set `train.save_strategy: steps`",
        )  # fmt: skip


def early_stopping(config: Config, origins: Origins) -> Iterator[UserError]:
    """Stopping early needs evaluations, and a threshold needs stopping early."""
    train = config.train
    if train.early_stopping_patience is not None and (why := _never_evaluated(config)):
        yield problem(
            origins, "train.early_stopping_patience",
            f"`train.early_stopping_patience` is {train.early_stopping_patience}, but nothing is evaluated while training: {why}",
            "give validation data, and `train.eval_strategy: steps` or `epoch`",
        )  # fmt: skip
    if train.early_stopping_patience is None and train.early_stopping_threshold:
        yield problem(
            origins, "train.early_stopping_threshold",
            f"`train.early_stopping_threshold` is {train.early_stopping_threshold}, but `train.early_stopping_patience` is not given",
            "TRAIN_EARLY_STOPPING_PATIENCE=3",
        )  # fmt: skip


def _never_evaluated(config: Config) -> str:
    """Returns why nothing is evaluated while training; empty where something is."""
    if config.train.eval_strategy == "no":
        return "`train.eval_strategy` is `no`"
    return "there is no `data.validation`" if config.data.validation in (None, 0.0, []) else ""


def _hint(bare: str, known: tuple[str, ...]) -> str:
    if bare in OF_ANSWERS:
        return f"add it: `eval.metrics: [{', '.join((*[k for k in known if k in OF_ANSWERS], bare))}]`"
    close = closest(bare, known)
    return f"did you mean `eval_{close}`?" if close else f"one of {', '.join(f'eval_{one}' for one in known)}"


METRIC_RULES = (metric_names, best_model, loading_best, early_stopping)


# Trackers that `train.report_to` names: which there are, and what each needs.


OWN, AIM = "tensorboard", "aim"
"""Written by ourselves; transformers serves the others."""
KEY = "train.report_to"
PACKAGES: Mapping[str, tuple[str, str]] = {
    OWN: ("tensorboard", "tensorboard"), AIM: ("aim", "aim==3.29.1"), "azure_ml": ("azureml", "azureml-sdk"), "clearml": ("clearml", "clearml"),
    "codecarbon": ("codecarbon", "codecarbon"), "comet_ml": ("comet_ml", "comet-ml"), "dagshub": ("dagshub", "dagshub mlflow"),
    "dvclive": ("dvclive", "dvclive"), "flyte": ("flytekit", "flytekit"), "kubeflow": ("", ""), "mlflow": ("mlflow", "mlflow"),
    "neptune": ("neptune", "neptune"), "swanlab": ("swanlab", "swanlab"), "trackio": ("trackio", "trackio"), "wandb": ("wandb", "wandb"),
}  # fmt: skip
"""Tracker -> the module that it needs, and what pip calls it."""


def trackers(config: Config) -> list[str]:
    """Returns the trackers that are named."""
    wanted = config.train.extra.get("report_to", OWN)
    return [wanted] if isinstance(wanted, str) else list(wanted or [])


def known(config: Config, origins: Origins) -> Iterator[UserError]:
    """A name that no tracker has. As the rules of `config.rules`: no effects."""
    place = origins.get(KEY)
    for name in trackers(config):
        if name not in (*PACKAGES, "all", "none"):
            parts = [part.strip() for part in name.split(",")]
            close = f"[{', '.join(parts)}]" if len(parts) > 1 else closest_word(name, list(PACKAGES))
            hint = (
                f"did you mean `{close}`?"
                if close
                else f"one of {', '.join(PACKAGES)}, a list such as `[tensorboard, wandb]`, or `none`"
            )
            yield UserError(f"`{KEY}` names `{name}`, which is not a tracker", place=place, hint=hint)


def missing(config: Config) -> list[HardwareError]:
    """Returns what is wrong with this environment: a tracker that is named and not installed."""
    needed = {name: PACKAGES[name] for name in trackers(config) if name in PACKAGES}
    return [
        HardwareError(
            f"`{KEY}` names `{name}`, which is not installed here",
            hint=f"{shlex.quote(sys.executable)} -m pip install {package}"
            + (" (it takes older versions of filelock and python-dateutil)" if name == AIM else ""),
        )
        for name, (module, package) in needed.items()
        if module and importlib.util.find_spec(module) is None
    ]


TRACKER_RULES = (known,)
