"""Rules between the keys of a model from scratch, its tokenizer, and the task. As those of `config.rules`: no effects."""

from __future__ import annotations

from collections.abc import Iterator

from sft_play.config.keys import variable_name
from sft_play.config.rule import Origins, problem
from sft_play.config.schema import Config
from sft_play.errors import UserError

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


RULES = (pretrained, from_scratch, task)
