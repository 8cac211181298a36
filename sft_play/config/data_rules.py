"""Rules about data: sources and validation, the task, a model from scratch and its tokenizer. No effects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sft_play.config.filters import Condition
from sft_play.config.keys import variable_name
from sft_play.config.rule import Origins, problem
from sft_play.config.schema import Config, DataSource
from sft_play.config.yaml_files import scalar_text
from sft_play.errors import DataError, UserError

SHAPE_KEYS = ("vocab_size", "hidden_size", "attention_heads", "layers")
SMALLEST_VOCABULARY = 260
"""Of a tokenizer that is trained here: 256 bytes, eos, pad, and the two marks of ChatML."""
CHAT = ("messages", "sharegpt", "prompt_completion", "instruction", "question_answer")
"""Formats of conversations; `text` is plain text, and `tokens` may be either."""


def pretrained(config: Config, origins: Origins) -> Iterator[UserError]:
    """Keys that a pretrained model would ignore."""
    model = config.model
    if model.init != "pretrained":
        return
    for key in SHAPE_KEYS:
        if (value := getattr(model, key)) is not None:
            yield problem(
                origins, f"model.{key}", f"`model.{key}` is {value}, but a pretrained model has a shape of its own",
                "leave it out, or set `model.init: random` to start from scratch",
            )  # fmt: skip
    if model.tokenizer == "train":
        yield problem(
            origins, "model.tokenizer", "`model.tokenizer` is `train`, but a pretrained model's embeddings were learnt for its own tokens",
            "leave it out, or set `model.init: random` to start from scratch",
        )  # fmt: skip


def from_scratch(config: Config, origins: Origins) -> Iterator[UserError]:
    """What a model with random weights needs."""
    model = config.model
    if model.init != "random":
        return
    if config.tuning.mode != "full":
        key = "tuning.mode" if origins.get("tuning.mode", "default") != "default" else "model.init"
        yield problem(
            origins, key, f"`model.init` is `random`, but `tuning.mode` is `{config.tuning.mode}`: adapters over random weights learn little",
            "set `tuning.mode: full`",
        )  # fmt: skip
    if config.tuning.backend == "unsloth":
        yield problem(
            origins, "tuning.backend", "`model.init` is `random`, but `tuning.backend: unsloth` tunes pretrained models", "leave it out"
        )  # fmt: skip
    given = [key for key in SHAPE_KEYS if getattr(model, key) is not None]
    missing = [key for key in SHAPE_KEYS if key not in given]
    if model.name and given:
        yield problem(
            origins, f"model.{given[0]}", f"`model.name` and {_keys(given)} are both given: two shapes for one model",
            "keep `model.name` for its shape with random weights (`MODEL_NAME=` takes it away), or the shape keys",
        )  # fmt: skip
    elif not model.name and missing:
        yield problem(
            origins, "model.init", f"`model.init` is `random`, but {_keys(missing)} {'is' if len(missing) == 1 else 'are'} missing",
            "set " + " ".join(f"{variable_name(f'model.{key}')}=..." for key in missing) + ", or `model.name` for the shape of another model",
        )  # fmt: skip
    if not model.name and model.revision is not None:
        yield problem(
            origins, "model.revision", "`model.revision` is given, but there is no `model.name` that it could belong to"
        )
    yield from _shape(config, origins)


def _shape(config: Config, origins: Origins) -> Iterator[UserError]:
    """Numbers that do not go together."""
    model = config.model
    if model.hidden_size and model.attention_heads:
        if model.hidden_size % model.attention_heads:
            yield problem(
                origins, "model.hidden_size",
                f"`model.hidden_size` {model.hidden_size} cannot be divided by `model.attention_heads` {model.attention_heads}",
                f"for example {_near(model.hidden_size, 2 * model.attention_heads)}",
            )  # fmt: skip
        elif model.hidden_size // model.attention_heads % 2:
            yield problem(
                origins, "model.hidden_size",
                f"a head is {model.hidden_size} / {model.attention_heads} = {model.hidden_size // model.attention_heads} wide, "
                "but rotary positions need an even number",
                f"for example {_near(model.hidden_size, 2 * model.attention_heads)}",
            )  # fmt: skip
    trained = model.tokenizer == "train" or (model.tokenizer is None and not model.name)
    if trained and model.vocab_size is not None and model.vocab_size < SMALLEST_VOCABULARY:
        yield problem(
            origins, "model.vocab_size", f"`model.vocab_size` is {model.vocab_size}, but a byte-level tokenizer has at least "
            f"{SMALLEST_VOCABULARY} tokens: 256 bytes and 4 marks",
        )  # fmt: skip


def task(config: Config, origins: Origins) -> Iterator[UserError]:
    """Formats that the task does not take, where they are written; with `auto` the rows decide when they are read."""
    data, kind = config.data, config.tuning.task
    lists = {"data.sources": data.sources, "data.validation": data.validation if isinstance(data.validation, list) else []}
    for key, sources in lists.items():
        for index, source in enumerate(sources):
            if reason := refused_format(kind, source.format):
                yield problem(origins, key, f"`{key}[{index}].format` is `{source.format}`, but {reason[0]}", reason[1])


def refused_format(kind: str, form: str) -> tuple[str, str] | None:
    """Returns why `tuning.task: kind` does not take rows of the format `form`, and what to do; `None` where it does."""
    if kind == "sft" and form == "text":
        return (
            "`tuning.task: sft` learns answers, and plain text has none",
            "set `tuning.task: cpt` to learn every token of it, or `mixed` for text beside conversations",
        )
    if kind == "cpt" and form in CHAT:
        return (
            "`tuning.task: cpt` learns documents and plain text, not conversations",
            "set `tuning.task: mixed`, which learns every token of text and the answers of conversations",
        )
    return None


def _keys(names: list[str]) -> str:
    return ", ".join(f"`model.{name}`" for name in names)


def _near(size: int, step: int) -> int:
    return max(step, round(size / step) * step)


TASK_RULES = (pretrained, from_scratch, task)


# Rules of the entries of `data.sources` and `data.validation`. As those of `config.rules`: no effects.


def entries(config: Config, origins: Origins) -> Iterator[UserError]:
    """What no single source can mean."""
    for key, index, source in _sources(config):
        name = f"{key}[{index}]"
        if source.rows is not None and source.rows < 1:
            yield problem(
                origins,
                key,
                f"`{name}.rows` is {scalar_text(source.rows)}; expected an integer >= 1",
                "leave it out to take all rows",
            )
        for text in ("filter", "name", "split", "config", "revision"):
            given = getattr(source, text)
            if given is not None and not given.strip():
                yield problem(origins, key, f"`{name}.{text}` is empty", "leave it out")
        for new, old in source.columns.items():
            if not isinstance(new, str) or not isinstance(old, str) or not new.strip() or not old.strip():
                yield problem(
                    origins, key, f"`{name}.columns` has the entry `{new}: {old}`; expected the names of two columns",
                    "`columns` is written `{question: name in the file}`",
                )  # fmt: skip
                break


def filters(config: Config, origins: Origins) -> Iterator[UserError]:
    """Each `filter` can be read; what it says of a row is seen when there are rows."""
    for key, index, source in _sources(config):
        if source.filter is None or not source.filter.strip():
            continue
        try:
            Condition(source.filter)
        except DataError as error:
            told = error.message.removeprefix("`filter` ")
            yield problem(origins, key, f"`{key}[{index}].filter` {told}", error.hint)


def names(config: Config, origins: Origins) -> Iterator[UserError]:
    """Scores and counts are told by name, so no two sources of a split share one."""
    for key, sources in _lists(config):
        said = [source.name for source in sources if source.name is not None]
        twice = sorted(name for name, count in Counter(said).items() if count > 1)
        if twice:
            yield problem(
                origins, key, f"`{key}` has two sources with the name `{twice[0]}`", "counts and scores are told by name"
            )


def weights(config: Config, origins: Origins) -> Iterator[UserError]:
    """Weights are shares: none is negative, some are not 0, and either every training source has one or none has."""
    for key, index, source in _sources(config):
        if source.weight is not None and source.weight < 0:
            yield problem(
                origins, key, f"`{key}[{index}].weight` is {source.weight:g}; a share cannot be negative", "0 leaves a source out"
            )  # fmt: skip
        elif source.weight is not None and key == "data.validation":
            yield problem(
                origins, key, f"`{key}[{index}].weight` is {source.weight:g}, but validation is not mixed: every row is scored",
                "leave it out; `rows` limits a source",
            )  # fmt: skip
    given = [source.weight for source in config.data.sources]
    if any(weight is not None and weight < 0 for weight in given):
        return
    missing = [index for index, weight in enumerate(given) if weight is None]
    if missing and len(missing) < len(given):
        yield problem(
            origins, "data.sources", f"`data.sources[{missing[0]}]` has no `weight`, though other sources have one",
            "give every source a weight, or none: then each row is taken once",
        )  # fmt: skip
    elif given and not missing and not any(given):
        yield problem(
            origins, "data.sources", "all weights of `data.sources` are 0, so nothing would be trained", "leave them out"
        )


def _lists(config: Config) -> Iterator[tuple[str, list[DataSource]]]:
    yield "data.sources", config.data.sources
    if isinstance(config.data.validation, list):
        yield "data.validation", config.data.validation


def _sources(config: Config) -> Iterator[tuple[str, int, DataSource]]:
    for key, sources in _lists(config):
        for index, source in enumerate(sources):
            yield key, index, source


SOURCE_RULES = (entries, filters, names, weights)
