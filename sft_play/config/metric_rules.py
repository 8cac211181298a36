"""Rules about scores: which are measured, which one is the best model's, when training stops early. No effects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sft_play.config.metrics import OF_ANSWERS, closest, higher_is_better, measured, short_name, unknown
from sft_play.config.rule import Origins, problem
from sft_play.config.schema import Config
from sft_play.errors import UserError

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


RULES = (metric_names, best_model, loading_best, early_stopping)
